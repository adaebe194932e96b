"""Attention and merges of one package, chained: specs with every convention of LSE and sinks."""

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
MERGES = "merge_attn_states, merge_attn_parts"
CHAINS = ["*merged*", "merge*: sink*", "merge*: lse: none", "refuses: attn_sink*", "refuses: output_scale*"]


def write_rows(folder: Path, name: str, spec: str, **changes: str) -> Path:
    """A spec of attention over rows with merges; `changes` replace the text behind a field's name."""
    text = spec_of(spec).read_text()
    if "merge_attn_parts" not in text:
        text = text.replace("wrappers:\n", "wrappers:\n  - merge_attn_states\n  - merge_attn_parts\n")
    for field, value in {"name": name, **changes}.items():
        text = re.sub(rf"^( *){field}: .*$", rf"\1{field}: {value}", text, flags=re.MULTILINE)
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def with_merges(path: Path, merges: str = MERGES) -> Path:
    path.write_text(re.sub(r"^wrappers: \[", f"wrappers: [{merges}, ", path.read_text(), flags=re.MULTILINE))
    return path


# name: the function that writes the spec
SPECS = {
    "required": lambda folder: write_rows(folder, "required", "odd", attn_sink="required", empty_row_lse="+inf"),
    "sinkless": lambda folder: write_rows(folder, "sinkless", "odd", attn_sink="none"),
    "wide": lambda folder: write_rows(folder, "wide", "hyv4"),  # 512 columns, base e
    "dense_2": lambda folder: with_merges(
        dense_decode_specs.write_spec("plain", folder, attention=', lse_base: "2", empty_row_lse: -inf')
    ),
    "dense_window": lambda folder: with_merges(dense_decode_specs.write_spec("window", folder), "merge_attn_states"),
    "paged_2": lambda folder: with_merges(sparse_decode_specs.write_spec("odd", folder)),  # a sink that is required
    "paged_sinkless": lambda folder: with_merges(sparse_decode_specs.write_spec("plain", folder), "merge_attn_parts"),
}

SLOW = {*SPECS} - {*drawn({*SPECS} - {"dense_2", "wide"}, 1)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("merges")
    found = {}
    for name, write in SPECS.items():
        (folder / name).mkdir()
        path = write(folder / name)
        found[name] = path.with_suffix("")
        apply(compare(render(load_plan(path)), found[name]))
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPECS])
def test_attention_of_parts_merges_to_attention_of_the_whole(packages: dict[str, Path], name: str) -> None:
    results = verify_package(packages[name], workers=1, targets=["sm90"], only=CHAINS)
    assert sum("merged:" in result.case for result in results) >= 3
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(packages: dict[str, Path], tmp_path: Path) -> None:
    check_mutants("merges_mutants.py", packages["required"], tmp_path, more_than=10)
