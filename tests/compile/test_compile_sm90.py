"""The sm90 kernels as ptxas takes them: no spill in a loop, no serialised product, as many products as planned."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from enumerated import enumerate_package, write_package

from mlagen.backends import expected_products
from mlagen.compile import CompileJob, Resources, check_limits, compile_jobs, content_keys, installed
from mlagen.compile.worker import load_module
from mlagen.errors import ToolError
from mlagen.plan import IndexUnionPlan, Plan, make_plan
from mlagen.plan.tiles.allowed import read_allowed
from mlagen.proofs import Proofs
from mlagen.spec import Spec, load

pytestmark = pytest.mark.compilation

RIGHT_ENDS = """            acc = warpgroup_mma_wait(0, deps=[acc])
            _bar_arrive(K0_R_FREE, zero)  # to the producer: K0's right half is free
"""
TAIL = (
    "    scores = warpgroup_mma(shared.q_tail.index(zero), shared.k0_tail.index(zero).permute((1, 0)), scores, "
    "is_async=True)\n"
)
SHARED_MODULES = ("_index_union_sm90", "_sparse_fwd_sm90_shared")


@functools.cache
def proofs() -> Proofs:
    return Proofs(Path(__file__).parents[2] / "generated")


def known(key: str) -> Any:
    """Figures of a checked-in kernel, if it is one. A sample of them is compiled again in every run."""
    return proofs().measured(key, installed().version)


def products(taken: Resources) -> int:
    """Warpgroup products of 16-bit and of 8-bit operands."""
    return taken.instructions.get("HGMMA", 0) + taken.instructions.get("QGMMA", 0)


@dataclass(frozen=True)
class Written:
    """A package, its jobs, and the plan's bytes by kernel and BLOCK_H, and products."""

    folder: Path
    jobs: list[CompileJob]
    shared: dict[tuple[str, int | None], int]
    split_shared: dict[tuple[str, int | None], int]
    products: dict[tuple[str, int | None], int]

    def check(self, results: list[Resources], slack: int) -> None:
        """Check results against the plan, up to this many bytes."""
        assert self.jobs
        assert check_limits(results, self.products) == []
        for job, taken in zip(self.jobs, results, strict=True):
            one = (taken.kernel, taken.block_h)
            if one in self.products:
                assert products(taken) == self.products[one]
            if one in self.shared:
                split = self.split_shared.get(one, 0) if "partial_ptr" in dict(job.signature) else 0
                # Splits use scratch memory of Triton; 3.9 needs less.
                assert self.shared[one] <= taken.shared <= self.shared[one] + split + slack


def few(jobs: list[CompileJob]) -> list[CompileJob]:
    """Of each kernel the variants with results that have most and fewest optional tensors, and one without a cache.

    Of those with partials the one that has most.
    """
    chosen: dict[object, CompileJob] = {}
    for job in jobs:
        given, constexprs = dict(job.signature), dict(job.constexprs)
        splits = "partial_ptr" in given
        one = (job.kernel, constexprs.get("BLOCK_H"), splits)
        for most in (True,) if splits else (True, False):
            best = chosen.setdefault((*one, most), job)
            if len(given) != len(best.signature) and (len(given) > len(best.signature)) is most:
                chosen[*one, most] = job
        if not splits and constexprs.get("extra_k_cache_ptr", job) is None and "topk_length_ptr" in given:
            chosen.setdefault((*one, "alone"), job)
    return [*dict.fromkeys(chosen.values())]


def expected(plan: Plan) -> tuple[dict[tuple[str, int | None], int], dict[tuple[str, int | None], int]]:
    """Bytes of shared memory, and additional bytes of splits, by kernel and BLOCK_H."""
    shared: dict[tuple[str, int | None], int] = {}
    split: dict[tuple[str, int | None], int] = {}
    for family in plan.tiled:
        for name, module in family.sm90_kernels.items():
            numbers = getattr(family, name)
            numbers = numbers.sm90 if isinstance(numbers, IndexUnionPlan) else numbers
            of_sizes = isinstance(numbers, tuple)
            for one in numbers if of_sizes else (numbers,):
                kernel = (f"{module}_kernel", one.block_h if of_sizes else None)
                shared[kernel], split[kernel] = one.expected_shared, getattr(one, "split_shared", 0)
    if plan.union:
        shared["_index_union_kernel", None] = plan.union.expected_shared
    return shared, split


@pytest.fixture
def written(tmp_path, pytestconfig):
    """A function that writes the package of a spec, with a text of its sm90 kernel replaced."""

    def write(name, old="", new="", shared=None, partials=None, dims=None, cache=None, rescaling="lagged"):
        """`dims`: latent columns, which are V's, and RoPE's, in place of the spec's; `cache`: a layout likewise.

        `shared`: neighbouring tokens that share rows; the jobs are then those of the kernels for them.

        `partials`: how splits store their accumulators; the jobs are then those that store any.
        """
        spec = load(pytestconfig.rootpath / "specs" / f"{name}.yaml").model_copy(update={"targets": ("sm90",)})
        if dims:
            latent, rope = dims
            changes = {"kv_lora_rank": latent, "v_head_dim": latent, "qk_rope_head_dim": rope}
            spec = spec.model_copy(update={"model": spec.model.model_copy(update=changes)})
        if cache:
            data = spec.model_dump()
            data["cache"]["layout"], data["wrappers"] = cache, ("flash_mla_with_kvcache",)  # a name becomes its layout
            spec = Spec.model_validate(data)
        if partials:
            spec = spec.model_copy(update={"partials": partials})
        if spec.attention_kind == "sparse":
            attention = spec.attention.model_copy(update={"shared_indices": shared, "rescaling": rescaling})
            spec = spec.model_copy(update={"attention": attention})
        plan = make_plan(spec)
        folder = write_package(plan, tmp_path)
        if old:
            file = folder / ("_sparse_fwd_sm90_shared.py" if shared else "_sparse_fwd_sm90.py")
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new, 1))
        every = enumerate_package(folder).jobs["sm90"]
        if shared:
            jobs = [job for job in every if job.module in SHARED_MODULES or "_recompute" in job.kernel]
        else:
            jobs = [job for job in every if "_sm90" in job.module]
            jobs = [job for job in jobs if not partials or "partial_ptr" in dict(job.signature)]
        return Written(folder, few(jobs), *expected(plan), expected_products(plan))

    return write


@pytest.mark.parametrize(
    "name",
    [
        "dsv32",
        "dsv3",
        "dsv3_prefill",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm53_fp8", "glm53", "dsv41", "glm5_prefill")),
    ],
)  # with columns behind V, and without, 528 bytes a token or two caches as well; dense; multi-head, 192/128 and 256/256
def test_they_fit(written, compiled, name):
    package = written(name)
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    # Barriers, and the arguments that partitions pass: two layouts have most of these.
    package.check(results, slack=640)


def test_scores_over_e4m3_are_products_of_e4m3(written, compiled):
    package = written("dsv3_fp8")
    names = ("_dense_decode_sm90", "_dense_decode_sm90_rows32", "_dense_decode_sm90_q_halves")
    assert {job.module for job in package.jobs} == set(names)
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled)
    package.check(results, slack=832)  # barriers and arguments, and scratch of Triton's
    taken = {(one.kernel, one.instructions["QGMMA"], one.instructions["HGMMA"]) for one in results}
    assert taken == {(f"{name}_kernel", qgmma, 64) for name, qgmma in zip(names, (36, 36, 72), strict=True)}


def test_sparse_decode_kernels_for_e4m3_q_fit(written, compiled):
    package = written("dsv32_fp8_tensor")
    jobs = [job for job in package.jobs if job.module == "_sparse_decode_sm90_e4m3"]
    results = compile_jobs(package.folder, jobs, workers=1, cache_dir=compiled)
    replace(package, jobs=jobs).check(results, slack=832)  # some may spill around the loop of steps
    assert {(taken.instructions["QGMMA"], taken.instructions["HGMMA"]) for taken in results} == {(36, 64)}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("dsv3", (400, 80)),
        *(pytest.param("dsv32", dims, marks=pytest.mark.slow) for dims in ((64, 64), (256, 64), (384, 32), (400, 64))),
        *(pytest.param("dsv32", dims, marks=pytest.mark.slow) for dims in ((512, 16), (512, 128))),
        *(pytest.param("dsv3", dims, marks=pytest.mark.slow) for dims in ((64, 0), (256, 32), (384, 128), (512, 128))),
    ],
)  # halves that differ, blocks of 32, columns of V and K that a row has not, a short tail
def test_those_of_other_dims_fit(written, compiled, name, dims):
    package = written(name, dims=dims)
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    package.check(results, slack=640)


@pytest.mark.parametrize(
    ("cache", "dims"),
    [
        ("fp8_ds_mla", (256, 64)),
        *(pytest.param("fp8_ds_mla", dims, marks=pytest.mark.slow) for dims in ((256, 0), (256, 128), (512, 32))),
        *(pytest.param("fp8_per_tensor", dims, marks=pytest.mark.slow) for dims in ((256, 32), (256, 128))),
        *(pytest.param("fp8_per_tensor", dims, marks=pytest.mark.slow) for dims in ((512, 0), (512, 64))),
    ],
)  # rows at 8 bytes, and of one scale a tensor
def test_those_over_rows_of_e4m3_of_other_dims_fit(written, compiled, cache, dims):
    package = written("dsv32_fp8", dims=dims, cache=cache)
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    package.check(results, slack=640)


@pytest.mark.parametrize(
    ("name", "partials"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dsv32_fp8", "bf16"), ("dsv41", "fp32"))),
        pytest.param("dsv3", "bf16", marks=pytest.mark.slow),
        pytest.param("dsv3", "fp16", marks=pytest.mark.slow),
        ("dsv32", "fp32"),
    ],
)
def test_those_that_store_other_partials_fit(written, compiled, name, partials):
    package = written(name, partials=partials)
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    package.check(results, slack=640)


def test_allowances_of_no_package_are_of_kernels_that_are_compiled_here(written):
    keys: set[str] = set()
    for changes in ({"partials": "bf16"}, {"partials": "fp16"}, {"dims": (400, 80)}):
        package = written("dsv3", **changes)
        keys |= {*content_keys(package.folder, package.jobs)}
    allowed = {one.key for one in read_allowed() if one.reason.startswith("of no package")}
    assert allowed
    assert allowed <= keys


@pytest.mark.parametrize(
    ("name", "group"),
    [("dsv32", 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dsv32", 2), ("glm53", 4)))],
)
def test_shared_index_prefill_fits(written, compiled, name, group):
    package = written(name, shared=group)
    assert {job.kernel for job in package.jobs} == {
        "_sparse_fwd_sm90_shared_kernel",
        "_index_union_kernel",
        "_sparse_fwd_recompute_kernel",
    }
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    package.check(results, slack=512)


@pytest.mark.parametrize(
    ("name", "group", "kernels"),  # the seesaws and swap-AB
    [
        pytest.param("dsv32", None, 2, marks=pytest.mark.slow),
        pytest.param("dsv32", 4, 1, marks=pytest.mark.slow),
        pytest.param("dsv32_fp8", None, 3, marks=pytest.mark.slow),
    ],
)
def test_kernels_with_exact_rescaling_fit(written, compiled, name, group, kernels):
    package = written(name, shared=group, rescaling="exact")
    texts = [(package.folder / f"{module}.py").read_text() for module in {job.module for job in package.jobs}]
    thresholds = [
        found for text in texts for found in re.findall(r"RESCALE_THRESHOLD_LOG2 = gl.constexpr\((\d+)\)", text)
    ]
    assert thresholds == ["0"] * kernels
    results = compile_jobs(package.folder, package.jobs, workers=1, cache_dir=compiled, known=known)
    package.check(results, slack=640)


def test_a_warps_number_read_from_the_thread_would_spill(written, compiled):
    old, new = (
        "        shr.u32 bit, $2, $4;\n",
        (
            "        mov.u32 bit, %tid.x;\n        bfe.u32 bit, bit, 5, 2;\n        add.u32 bit, bit, 28;\n"
            "        shr.u32 bit, $2, bit;\n"
        ),
    )
    package = written("dsv32", old, new, shared=4)
    jobs = [job for job in package.jobs if job.kernel == "_sparse_fwd_sm90_shared_kernel"][:1]
    results = compile_jobs(package.folder, jobs, workers=1, cache_dir=compiled)
    assert ["spills inside loops" in str(error) for error in check_limits(results)] == [True]


@pytest.mark.parametrize("group", [2, 4])
def test_the_bitmap_of_a_list_begins_shared_memory_as_its_assembly_takes_it_to(written, group):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    package = written("dsv32", shared=group)
    job = next(job for job in package.jobs if job.kernel == "_index_union_kernel" and not job.constexprs)
    kernel = load_module(package.folder, "_index_union_sm90")._index_union_kernel
    source = GluonASTSource(fn=kernel, signature=dict(job.signature), constexprs={}, attrs={})
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    offsets = [int(text) for text in re.findall(r"@global_smem, i32 (\d+)", built.asm["llir"])]
    assert offsets
    assert min(offsets) >= package.shared["_index_union_kernel", None]  # followed by Triton's own memory


def one_of_the_sparse_kernel(package: Written) -> list[CompileJob]:
    return [job for job in package.jobs if job.kernel == "_sparse_fwd_sm90_kernel"][:1]


def test_a_product_that_runs_over_a_loops_end_is_refused(written, compiled):
    package = written("dsv32", RIGHT_ENDS, "            _bar_arrive(K0_R_FREE, zero)\n")
    with pytest.raises(ToolError, match="serialises its warpgroup products"):
        compile_jobs(package.folder, one_of_the_sparse_kernel(package), workers=1, cache_dir=compiled)


def test_a_missing_product_is_reported(written, compiled):
    package = written("dsv32", TAIL)
    jobs = one_of_the_sparse_kernel(package)
    results = compile_jobs(package.folder, jobs, workers=1, cache_dir=compiled)
    (error,) = check_limits(results, package.products)
    assert "124 wgmma instructions in the code - expected 132" in str(error)
