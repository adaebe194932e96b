"""Operators of packages of every family: torch's own checks, fakes, and compiled calls in the interpreter."""

import re
from pathlib import Path

import pytest
from broken import check_mutants
from checked_in import package_of, spec_of
from rotation import by_share, some

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
# A spec with wrappers that the checked-in packages with operators lack, and the cases that are asked of it.
OTHERS = {
    "dots3_sliding": ["ops: *decode_attention_fwd", "ops: fake: flash_mla_with_kvcache"],
    "minicpm3_prefill": ["ops: *flash_attn_varlen_func"],
    "dsv4_flash": ["ops: *indices*"],
    "dsv32_fp8": ["ops: *convert*"],
}


@pytest.mark.parametrize("name", ["odd", pytest.param("odd_fp8", marks=pytest.mark.slow)])
@by_share
def test_operators_hold(name, choose):
    asked = set()

    def chosen(tasks):
        asked.update(task.case.rsplit(": ", 1)[1] for task in tasks)
        return choose(tasks)

    results = verify_package(package_of(name), workers=1, targets=["sm90"], only=["ops: *"], choose=chosen)
    wrappers = load_plan(spec_of(name)).spec.wrappers
    assert set(wrappers) <= asked
    assert results
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("name", some(OTHERS, 1))
def test_operators_of_other_wrappers_hold(name, tmp_path):
    text = spec_of(name).read_text() + "\nops: true\n"
    path = tmp_path / f"{name}.yaml"
    path.write_text(re.sub(r"^targets: .*$", "targets: [sm90]", text, flags=re.MULTILINE))
    apply(compare(render(load_plan(path)), tmp_path / name))
    results = verify_package(tmp_path / name, workers=1, targets=["sm90"], only=OTHERS[name])
    assert len(results) >= 3
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(tmp_path):
    check_mutants("ops_mutants.py", package_of("odd"), tmp_path, more_than=9)
