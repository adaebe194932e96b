"""Packages with splits that round their accumulators, run on their cases whole and broken."""

import re
from pathlib import Path

import dense_decode_specs
import pytest
import sparse_decode_specs
from broken import check_mutants
from checked_in import spec_of
from rotation import drawn

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
FEW = "*few indices*"


def write_rows(name: str, folder: Path) -> Path:
    """A spec of sparse attention over unquantised rows. 17 columns of V require padding of rows of bf16."""
    text = spec_of("odd").read_text().replace("name: odd", f"name: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(re.sub(r"(v_head_dim|kv_lora_rank): \d+", r"\1: 17", text))
    return path


SPLIT, SHARES = ["*split*", "*workspace*", "*invariant*"], ["*shares: 7*", "*workspace*", "*invariant*"]
# name: dtype of the partials, the function that writes the rest of the spec, and the package's cases
SPECS = {
    "rows": ("bf16", lambda folder: write_rows("rows", folder), ["*splits: 3*", "*workspace*", FEW]),
    "sparse_decode": ("bf16", lambda folder: sparse_decode_specs.write_spec("plain", folder), SPLIT),
    "sparse_decode_odd": ("bf16", lambda folder: sparse_decode_specs.write_spec("odd", folder), ["*workspace*", FEW]),
    "dense": ("bf16", lambda folder: dense_decode_specs.write_spec("plain", folder), SHARES),
    "dense_decode_window": (
        "bf16",
        lambda folder: dense_decode_specs.write_spec("odd", folder),
        ["*shares*", *SHARES[1:]],
    ),
    "rows_fp16": ("fp16", lambda folder: write_rows("rows", folder), ["*splits: 3*", "*workspace*", FEW]),
    "sparse_decode_fp16": ("fp16", lambda folder: sparse_decode_specs.write_spec("plain", folder), SPLIT),
    "v4_fp16": ("fp16", lambda folder: sparse_decode_specs.write_spec("v4", folder), ["*far apart*"]),
    "dense_decode_fp16": ("fp16", lambda folder: dense_decode_specs.write_spec("plain", folder), SHARES),
}
SLOW = {*SPECS} - {*drawn({*SPECS} - {"rows", "sparse_decode", "dense_decode_fp16"}, 1)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("partials")
    found = {}
    for name, (partials, write, _) in SPECS.items():
        (folder / name).mkdir()
        path = write(folder / name)
        path.write_text(f"{path.read_text()}partials: {partials}\n")
        found[name] = path.with_suffix("")
        apply(compare(render(load_plan(path)), found[name]))
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPECS])
def test_packages_hold_the_cases_of_splits(packages, name):
    results = verify_package(packages[name], workers=1, targets=["sm90"], only=SPECS[name][2])
    assert len(results) > 2
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("name", ["rows", "sparse_decode", "dense", "v4_fp16"])
@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(packages, tmp_path, name):
    check_mutants("partials_mutants.py", packages[name], tmp_path, name, more_than=2)
