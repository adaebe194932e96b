"""Sparse attention over rows: its list of cases is complete, well-formed, and without features that a spec lacks."""

import pytest
from verify_specs import spec

from mlagen.verify.call.case import Case
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.call.patterns import INDEX_PATTERNS
from mlagen.verify.sparse_fwd.cases import SparseFwdCase, cases
from mlagen.verify.sparse_fwd.family import SPARSE_FWD
from mlagen.verify.worker import selected

DEVICES = ["cpu", "cuda"]


def sparse(found: list[Case]) -> list[SparseFwdCase]:
    return [case for case in found if isinstance(case, SparseFwdCase)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "changes", [{}, {"attn_sink": "required"}, {"attn_sink": "none", "topk_length": "none"}, {"block_size": 53}]
)
def test_names_are_unique_and_say_what_they_promise(device, changes):
    found = cases(spec(**changes), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert case.name.split(": ")[0] in ("sparse_fwd", "refuses")
        assert case.promise[-1] not in " ."


@pytest.mark.parametrize("device", DEVICES)
def test_every_pattern_that_a_case_names_exists_and_is_named(device):
    found = cases(spec(), device)
    problems = [case.problem for case in sparse(found)]
    assert {problem.indices for problem in problems} == set(INDEX_PATTERNS)
    layouts = {problem.q for problem in problems} | {problem.kv for problem in problems}
    layouts |= {problem.out for problem in problems if problem.out}
    assert layouts == set(LAYOUTS)
    checks = {case.check for case in sparse(found)}
    merges = {"merged", "quantised"}  # of packages that have them
    assert checks == set(SPARSE_FWD.checks) - merges - ({"stream", "graph"} if device == "cpu" else set())


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_that_break_kernels_are_there(device):
    problems = [case.problem for case in sparse(cases(spec(), device))]
    assert {1, 5, 6, 12, 16, 17, 20, 32, 33, 64, 96, 128} <= {problem.heads for problem in problems}
    assert {1, 17, 128, 2047, 2048, 2048 + 128} <= {problem.topk for problem in problems}
    assert {0, 1} <= {problem.tokens for problem in problems}
    assert {0, 1} <= {problem.rows for problem in problems}
    assert any(problem.rows * 576 > 2**31 for problem in problems)
    assert {0, 1, 2, 3, 7} <= {case.splits for case in sparse(cases(spec(), device))}


def test_a_cpu_gets_small_ones():
    for case in sparse(cases(spec(), "cpu")):
        assert case.problem.tokens * case.problem.heads * case.problem.topk <= 128 * 2048


def test_what_a_spec_lacks_is_left_out():
    lacking = cases(spec(attn_sink="none", topk_length="none"), "cpu")
    assert not any(case.problem.sink or case.problem.length for case in sparse(lacking))
    assert any(case.name.startswith("refuses: attn_sink, given to a spec without") for case in lacking)
    only = cases(spec(wrappers=["triton_mla_sparse_attention"]), "cpu")
    assert {case.wrapper for case in sparse(only)} == {"triton_mla_sparse_attention"}
    assert not any(case.problem.sink for case in sparse(only))
    assert cases(spec(wrappers=["concat_and_cache_mla"]), "cpu") == []


def test_what_a_spec_requires_is_always_passed():
    found = sparse(cases(spec(attn_sink="required", topk_length="required"), "cpu"))
    assert all(case.problem.sink and case.problem.length for case in found)
    assert {case.wrapper for case in found} == {"flash_mla_sparse_fwd", "triton_mla_sparse_attention"}


def test_other_targets_run_a_subset():
    found = cases(spec(), "cpu")
    pairs = selected(found, ["sm90", "gfx942"], None)
    assert [case for case, target in pairs if target == "sm90"] == [case for case in found if not case.only_sm90]
    subset = [case for case, target in pairs if target == "gfx942"]
    assert 5 <= len(subset) <= len(found) // 10
    assert not any(isinstance(case, RefusedCase) for case in subset)
    assert [case.name for case, _ in selected(found, ["sm90"], ["sparse_fwd: rows: *"])] == [
        "sparse_fwd: rows: one",
        "sparse_fwd: rows: none",
    ]


def test_a_simulated_target_runs_a_handful_and_what_is_asked_for():
    found, target = cases(spec(), "cpu"), "sm90, simulated"
    names = [case.name for case, _ in selected(found, [target], None)]
    assert {"sparse_fwd: long", "sparse_fwd: logits: wide"} <= set(names)
    assert "sparse_fwd: logits: huge" not in names
    assert not any(name.startswith("refuses") for name in names)
    assert [case.name for case, _ in selected(found, [target], ["*: huge"])] == ["sparse_fwd: logits: huge"]
