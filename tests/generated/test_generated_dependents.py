"""Who waits for whom: kernels that are launched as dependents of the kernel before them, as they are compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton
from checked_in import package_of
from enumerated import enumerate_package
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mlagen.plan import TARGETS

pytestmark = pytest.mark.compilation

ROOT = Path(__file__).parents[2]
CACHES = [
    ("dsv32_fp8", "_cache_kernels", "_gather_tokens_kernel"),
    ("dsv32_fp8", "_indices_kernels", "_map_indices_kernel"),
    ("dsv4_flash", "_cache_kernels", "_write_kernel"),
    ("dsv4_flash", "_cache_kernels", "_gather_requests_kernel"),
    ("dsv4_flash", "_indices_kernels", "_combine_indices_kernel"),
    ("odd_fp8", "_extra_cache_kernels", "_write_kernel"),  # loads the scale of the tensor
]
MEMORY = re.compile(r"\b(?:ld|st|atom|red|cp\.async)\S*\.global")


def ptx(spec: str, module: str, kernel: str, target: str) -> str:
    """PTX of the first of a kernel's variants that has most tensors, and waits if any does."""
    found = enumerate_package(package_of(spec), (target,))
    jobs = [job for job in found.of(target, kernel) if job.module == module]
    job = max(jobs, key=lambda job: (len(job.signature), dict(job.constexprs).get("PDL", False)))
    fn = getattr(found.module(module), kernel)
    source = ASTSource(
        fn=fn,
        signature={name: dict(job.signature).get(name, "constexpr") for name in fn.arg_names},
        constexprs={(fn.arg_names.index(name),): value for name, value in job.constexprs},
    )
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, "enable_fp_fusion": True}
    text = triton.compile(source, target=GPUTarget("cuda", TARGETS[target].arch, 32), options=options).asm["ptx"]
    assert isinstance(text, str)
    return text


def touches(text: str) -> int:
    """Where the kernel first touches global memory."""
    found = MEMORY.search(text)
    assert found
    return found.start()


@pytest.mark.parametrize(("spec", "early"), [("dsv3", 0), ("dsv32", 1)])
def test_the_merge_reads_no_more_than_a_sink_before_it_waits_for_the_splits(spec: str, early: int) -> None:
    merge = ptx(spec, "_splits", "_combine_kernel", "sm90")
    before, wait, behind = merge.partition("griddepcontrol.wait")
    assert wait
    assert MEMORY.search(behind)
    assert [found[:2] for found in MEMORY.findall(before)] == ["ld"] * early


def test_splits_let_the_merge_begin_when_they_begin_to_store() -> None:
    split = ptx("dsv32", "_sparse_fwd_kernels", "_sparse_fwd_split_kernel", "sm90")
    begin = split.index("griddepcontrol.launch_dependents")
    assert split.rindex("mma") < begin < split.index("st.global")


@pytest.mark.parametrize(("spec", "module", "kernel"), CACHES)
def test_kernels_of_caches_let_the_next_begin_and_wait_before_they_touch_memory(
    spec: str, module: str, kernel: str
) -> None:
    text = ptx(spec, module, kernel, "sm90")
    assert 0 < text.index("griddepcontrol.launch_dependents") < text.index("griddepcontrol.wait") < touches(text)


@pytest.mark.parametrize(
    ("spec", "module", "kernel"),
    [
        ("dsv32", "_splits", "_combine_kernel"),
        ("dsv32", "_sparse_fwd_kernels", "_sparse_fwd_split_kernel"),
        ("dsv32_fp8", "_cache_kernels", "_gather_tokens_kernel"),
    ],
)
def test_older_targets_launch_one_kernel_after_the_other(spec: str, module: str, kernel: str) -> None:
    assert "griddepcontrol" not in ptx(spec, module, kernel, "sm80")
