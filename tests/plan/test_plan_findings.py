"""Findings of builds about kernels under some Tritons: the file, and the packages rendered with it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from enumerated import Enumerated, enumerate_plan
from rotation import some

from mlagen.compile import installed
from mlagen.emit import render
from mlagen.errors import SpecErrors
from mlagen.plan import Plan, SparseFwdPlan, Tile, Tuned, load_plan, make_plan
from mlagen.plan.tiles.findings import (
    Findings,
    LeftOut,
    RegisterSplit,
    dump_findings,
    findings_path,
    read_findings,
)
from mlagen.plan.tiles.replacements import Replacement
from mlagen.plan.tritons import MINORS, minor
from mlagen.spec import load

ROOT = Path(__file__).parents[2]
HERE = minor(installed().version)
OTHER = next(triton for triton in MINORS if triton != HERE)
FITS = "sparse_fwd d256+128+32 v384 bf16 partials fp32"
FOUND = Findings(
    (RegisterSplit(FITS, "sm90_swap_ab", (3, 9), (232, 232)),),
    (LeftOut(FITS, "sm90", (3, 8), "8 spills in loops"), LeftOut(FITS, "sm90", (3, 9), "1 spill in loops")),
    (Replacement(FITS, "unaligned", "sm80", Tile(16, 16, 4, 2, False), ((3, 9),), Tile(16, 16, 8, 2, True)),),
)
# An sm90 kernel of each family as a schedule names it, by a spec that has it, and the modules that it launches from.
KERNELS = {
    "sparse_fwd": ("dsv32", "sm90", {"_sparse_fwd_sm90"}),
    "sparse_fwd, few heads": ("dsv32", "sm90_swap_ab", {"_sparse_fwd_sm90_swap_ab"}),
    "sparse_fwd, shared": ("glm5", "sm90_shared", {"_sparse_fwd_sm90_shared", "_index_union_sm90"}),
    "sparse_decode": ("dsv32_fp8_tensor", "sm90", {"_sparse_decode_sm90"}),
    "sparse_decode, e4m3": ("dsv32_fp8_tensor", "sm90_e4m3", {"_sparse_decode_sm90_e4m3"}),
    "dense_decode": ("dsv2_lite", "sm90", {"_dense_decode_sm90"}),
    "dense_decode, few rows": ("dsv2_lite", "sm90_swap_ab", {"_dense_decode_sm90_swap_ab"}),
    "dense_decode, e4m3": ("dsv3_fp8", "sm90", {"_dense_decode_sm90"}),
    "dense_decode, e4m3, 32 rows": ("dsv3_fp8", "sm90_rows32", {"_dense_decode_sm90_rows32"}),
    "dense_decode, e4m3, q in halves": ("dsv3_fp8", "sm90_q_halves", {"_dense_decode_sm90_q_halves"}),
    "dense_fwd": ("dsv3_prefill", "sm90", {"_dense_fwd_sm90"}),
}


def plan_of(name: str, findings: Findings, **changes: object) -> Plan:
    spec = load(ROOT / "specs" / f"{name}.yaml").model_copy(update={"targets": ("sm90",)})
    if changes:
        spec = spec.model_copy(update={"attention": spec.attention.model_copy(update=changes)})
    return make_plan(spec, Tuned(findings=findings))


def listed(plan: Plan, folder: Path) -> Enumerated:
    return enumerate_plan(plan, folder)


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = findings_path("r384", tmp_path)
    assert path == tmp_path / "tuned" / "r384" / "tritons.yaml"
    assert read_findings(path) == Findings()
    path.parent.mkdir(parents=True)
    path.write_text(dump_findings("r384", FOUND))
    found = read_findings(path)
    assert replace(found, replacements=tuple(replace(one, place=None) for one in found.replacements)) == FOUND
    assert dump_findings("r384", found) == path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('left_out:\n  - {fits: x, kernel: sm90, triton: "3.9", reason: y}', ":2:12: left_out[0].fits: got 'x'; takes"),
        (
            f'left_out:\n  - fits: {FITS}\n    kernel: portable\n    triton: "3.9"\n    reason: y',
            ":3:13: left_out[0].kernel: got 'portable'",
        ),
        (
            f'registers:\n  - fits: {FITS}\n    kernel: sm90\n    triton: "3.1"\n    split: [232, 40]',
            ":4:13: registers[0].triton: got '3.1'; takes minor versions: 3.6, 3.7, 3.8, 3.9",
        ),
        (
            f'registers:\n  - fits: {FITS}\n    kernel: sm90\n    triton: "3.9"\n    split: [232, 41]',
            ":5:12: registers[0].split: got [232, 41]; takes two multiples of 8 from 24 to 256",
        ),
    ],
    ids=["fits", "kernel", "triton", "split"],
)
def test_a_wrong_entry_is_named_at_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tritons.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SpecErrors) as caught:
        read_findings(path)
    assert message in str(caught.value)


def test_a_spec_takes_the_file_beside_it_and_ignores_entries_of_other_dims(tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text((ROOT / "specs" / "dsv32.yaml").read_text().replace("name: dsv32", "name: mine"))
    before = load_plan(spec)
    path = findings_path("mine", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(dump_findings("mine", FOUND))
    assert [file.text for file in render(load_plan(spec)).files] == [file.text for file in render(before).files]
    left = LeftOut(before.fits["sparse_fwd"], "sm90", (3, 9), "8 spills in loops")
    path.write_text(dump_findings("mine", Findings(left_out=(left,))))
    assert load_plan(spec).of(SparseFwdPlan).left_out == (left,)


def test_a_register_split_applies_only_under_its_triton() -> None:
    before = plan_of("dsv32", Findings())
    split = RegisterSplit(before.fits["sparse_fwd"], "sm90_swap_ab", HERE, (216, 216))
    found = plan_of("dsv32", Findings((split,))).of(SparseFwdPlan)
    for one, was in zip(found.sm90_swap_ab, before.of(SparseFwdPlan).sm90_swap_ab, strict=True):
        assert one.registers.at(HERE) == (216, 216)
        assert all(one.registers.at(triton) == was.registers.at(triton) for triton in MINORS if triton != HERE)
    assert found.sm90 == before.of(SparseFwdPlan).sm90


@pytest.mark.parametrize("which", some(KERNELS, 4))
def test_no_call_launches_a_kernel_that_is_left_out_under_the_triton_at_hand(tmp_path: Path, which: str) -> None:
    name, kernel, modules = KERNELS[which]
    changes = {"shared_indices": 2} if kernel == "sm90_shared" else {}
    before = plan_of(name, Findings(), **changes)
    family = kernel_family(modules)
    jobs = {}
    for triton in (HERE, OTHER):
        left = LeftOut(before.fits[family], kernel, triton, "8 spills in loops")
        jobs[triton] = listed(plan_of(name, Findings(left_out=(left,)), **changes), tmp_path).jobs["sm90"]
    every = listed(before, tmp_path).jobs["sm90"]
    assert {job.module for job in every} >= modules
    assert jobs[OTHER] == every
    assert not {job.module for job in jobs[HERE]} & modules
    assert {job for job in every if job.module not in modules and "_recompute" not in job.kernel} <= set(jobs[HERE])


def kernel_family(modules: set[str]) -> str:
    module = sorted(modules)[-1]
    return module.removeprefix("_").partition("_sm90")[0]


@pytest.mark.parametrize("forced", [None, "sm90_swap_ab"])
def test_calls_of_a_kernel_that_is_left_out_run_portable_also_when_it_is_forced(
    tmp_path: Path, forced: str | None
) -> None:
    fits = plan_of("dsv32", Findings()).fits["sparse_fwd"]
    kernels = {}
    for triton in (HERE, OTHER):
        left = LeftOut(fits, "sm90_swap_ab", triton, "8 spills in loops")
        package = listed(plan_of("dsv32", Findings(left_out=(left,))), tmp_path).package.__name__
        launch, sparse_fwd, splits = (
            importlib.import_module(f"{package}.{one}") for one in ("_launch", "sparse_fwd", "_splits")
        )
        facts = launch.DeviceFacts("sm90", 132, True, True)._replace(forced=launch.Forced(kernel=forced))
        for heads in (16, 128):
            how = sparse_fwd.schedule(facts, splits.ALIGNED, 4096, heads, 2048, can_sm90=True)
            kernels[triton, heads] = how.kernel
    other = "sm90" if forced is None else "portable" if HERE == OTHER else "sm90_swap_ab"
    assert kernels[HERE, 16] == "portable"
    assert kernels[OTHER, 16] == "sm90_swap_ab"
    if forced is None:
        assert kernels[HERE, 128] == kernels[OTHER, 128] == other
