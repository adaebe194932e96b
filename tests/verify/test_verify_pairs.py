"""Packages that take Q as a pair, run on the cases of pairs, whole and broken."""

from pathlib import Path

import dense_decode_specs
import pytest
import sparse_decode_specs
from broken import check_mutants
from checked_in import spec_of
from rotation import by_share, drawn
from test_verify_partials import write_rows

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.checks.pairs import PROMISES

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
# The function that writes the spec, and the number of cases: over rows (17 columns leave RoPE at no multiple of 16
# bytes); over caches; dense, also with a q of e4m3.
SPECS = {
    "rows": (lambda folder: spec_of("odd"), 9),
    "rows_short": (lambda folder: write_rows("rows_short", folder), 9),
    "cache": (lambda folder: sparse_decode_specs.write_spec("plain", folder), 6),
    "cache_eight": (lambda folder: sparse_decode_specs.write_spec("eight", folder), 6),
    "dense": (lambda folder: dense_decode_specs.write_spec("window", folder), 14),
    "dense_e4m3": (lambda folder: dense_decode_specs.write_spec("tensor", folder), 17),
}
SLOW = {*SPECS} - {*drawn(("rows", "cache", "dense_e4m3"), 1)}
NO_PAIR = {"cache": "tensor", "dense": "odd"}  # V has the RoPE columns


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    found = {}
    for name, (write, _) in SPECS.items():
        (folder / name).mkdir()
        path = write(folder / name)
        found[name] = folder / name / path.stem
        apply(compare(render(load_plan(path)), found[name]))
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SPECS])
@by_share
def test_a_pair_has_the_bits_of_the_whole(packages, name, choose):
    asked: list[str] = []

    def chosen(tasks):
        asked.extend(task.case for task in tasks if "simulated" not in task.target)
        return choose(tasks)

    results = verify_package(packages[name], workers=1, targets=["sm90"], only=["*query: pair*"], choose=chosen)
    assert results
    assert [str(error) for error in mismatches(results)] == []
    assert len(asked) == SPECS[name][1]
    for kind in PROMISES:
        assert any(f"query: {kind}" in case for case in asked)


@pytest.mark.parametrize("name", ["rows", "cache", "dense_e4m3"])
def test_what_is_no_pair_is_refused(packages, name):
    results = verify_package(packages[name], workers=1, targets=["sm90"], only=["*refuses: q, a pair*"])
    assert [str(error) for error in mismatches(results)] == []
    assert len(results) >= 11


@pytest.mark.parametrize("name", NO_PAIR)
def test_a_package_whose_v_has_the_rope_columns_refuses_pairs(name, tmp_path):
    write = {"cache": sparse_decode_specs, "dense": dense_decode_specs}[name].write_package
    package = write(NO_PAIR[name], tmp_path)
    results = verify_package(package, workers=1, targets=["sm90"], only=["*query: pair*", "*refuses: q, a pair*"])
    assert [str(error) for error in mismatches(results)] == []
    assert results
    assert all("refuses" in result.case for result in results)
    assert not any("rope" in path.name or "q_rope" in path.read_text() for path in package.glob("[!_]*.py"))


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", ["rows", "cache", "dense"])
def test_every_mutant_is_reported(packages, tmp_path, name):
    check_mutants("pairs_mutants.py", packages[name], tmp_path, name, more_than=7)
