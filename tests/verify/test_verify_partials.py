"""Packages whose splits store their accumulators in bf16, held to their cases whole and broken."""

import re
from pathlib import Path

import dense_specs
import kvcache_specs
import pytest

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package

ROOT = Path(__file__).parents[2]
FEW, BESIDE = "*few indices*", "*tokens of a request keep*"


def write_rows(name: str, folder: Path) -> Path:
    """A spec of sparse attention over unquantised rows, whose 17 lanes of V leave rows of bf16 to be padded."""
    text = (ROOT / "specs" / "odd.yaml").read_text().replace("name: odd", f"name: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(re.sub(r"v_head_dim: \d+", "v_head_dim: 17", text))
    return path


# name: what writes the spec, the same with partials in fp32, and the cases that its package is held to
SPECS = {
    "rows": (lambda folder: write_rows("rows", folder), ["*splits: 3*", "*workspace*", "*their bits*"]),
    "kvcache": (lambda folder: kvcache_specs.write_spec("plain", folder), ["*split*", "*workspace*", "*invariant*"]),
    "kvcache_odd": (lambda folder: kvcache_specs.write_spec("odd", folder), ["*workspace*", FEW]),
    "dense": (lambda folder: dense_specs.write_spec("plain", folder), ["*shares: 7*", "*workspace*", "*invariant*"]),
    "dense_window": (lambda folder: dense_specs.write_spec("odd", folder), ["*shares*", "*workspace*", "*invariant*"]),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("partials")
    found = {}
    for name, (write, _) in SPECS.items():
        path = write(folder)
        path.write_text(path.read_text() + "partials: bf16\n")
        found[name] = folder / path.stem
        apply(compare(render(load_plan(path)), found[name]))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_packages_hold_the_cases_of_splits(packages, name):
    results = verify_package(packages[name], workers=1, targets=["sm90"], only=SPECS[name][1])
    assert len(results) > 2
    assert [str(error) for error in mismatches(results)] == []


# What is broken, in which package: file, old and new text, and cases that notice it.
MUTANTS = {
    "one split of a row is not rounded": (
        "rows",
        "_splits.py",
        "self.num_splits > 1 or self.merge_all_alike",
        "self.num_splits > 1",
        FEW,
    ),
    "one split over a cache is not rounded": (
        "kvcache",
        "_splits.py",
        "self.num_splits > 1 or self.merge_all_alike",
        "self.num_splits > 1",
        FEW,
    ),
    "a request of one program is not rounded": (
        "dense",
        "dense_attention.py",
        "(end_unit == units) & (overhead > 0)",
        "(end_unit == units)",
        BESIDE,
    ),
    "a request of one program is not merged": ("dense", "_splits.py", " & (later_slots > 0)", "", BESIDE),
    "a call of one program is not merged": (
        "dense",
        "dense_attention.py",
        "if schedule.slots == 0:",
        "if schedule.programs == 1:",
        "*invariant: one program",
    ),
    "accumulators lose further bits": (
        "kvcache",
        "_splits.py",
        "acc.to(tl.bfloat16)",
        "acc.to(tl.float8e5).to(tl.bfloat16)",
        "*workspace*",
    ),
    "row sums are rounded too": (
        "kvcache",
        "_splits.py",
        "tl.sum(part_l * weight, 0)",
        "tl.sum(part_l.to(tl.bfloat16).to(tl.float32) * weight, 0)",
        "*workspace*",
    ),
    "rows are as close as V's lanes": ("rows", "_splits.py", "* PARTIAL_LANES", "* D_V", "*workspace*"),
    "statistics stand where those of fp32 would": (
        "rows",
        "_splits.py",
        "PARTIAL_FLOATS\n    tl.store",
        "D_V\n    tl.store",
        "*splits: 3",
    ),
    "the workspace is as large as that of fp32": (
        "rows",
        "_splits.py",
        "(PARTIAL_FLOATS.value + 2)",
        "(D_V.value + 2)",
        "*workspace*",
    ),
    "the table stands where that of fp32 would": (
        "dense",
        "dense_attention.py",
        "(PARTIAL_FLOATS + 2)",
        "(D_V + 2)",
        "*shares: 7*",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(packages, tmp_path, name):
    package, file, old, new, only = MUTANTS[name]
    broken = tmp_path / packages[package].name
    broken.mkdir()
    for path in packages[package].glob("*.py"):
        text = path.read_text()
        assert path.name != file or old in text
        (broken / path.name).write_text(text.replace(old, new) if path.name == file else text)
    results = verify_package(broken, workers=1, targets=["sm90"], only=[only])
    assert mismatches(results)
