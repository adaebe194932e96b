"""The Hopper kernels as ptxas takes them: no spill in a loop, no serialised product, as many products as planned."""

from __future__ import annotations

import re

import pytest

from mlagen.backends import compile_jobs as jobs_of
from mlagen.compile import check_limits, compile_jobs
from mlagen.compile.worker import load_module
from mlagen.emit import render
from mlagen.errors import ToolError
from mlagen.plan import make_plan
from mlagen.spec import load

RIGHT_ENDS = """            acc = warpgroup_mma_wait(0, deps=[acc])
            _signal(K0_RIGHT, at)
"""
TAIL = (
    "    scores = warpgroup_mma(shared.q_tail.index(at), shared.k0_tail.index(at).permute((1, 0)), scores, "
    "is_async=True)\n"
)


@pytest.fixture
def written(tmp_path, pytestconfig):
    """A function that writes the package of a spec, with a text of its Hopper kernel replaced, and gives its jobs."""

    def write(name, old="", new="", shared=None, partials=None):
        """`shared`: neighbouring tokens that share rows; the jobs are then those of the kernels in which they do.

        `partials`: how splits store their accumulators; the jobs are then those that store any.
        """
        spec = load(pytestconfig.rootpath / "specs" / f"{name}.yaml")
        if partials:
            spec = spec.model_copy(update={"partials": partials})
        if spec.attention_kind == "sparse":
            attention = spec.attention.model_copy(update={"shared_indices": shared})
            spec = spec.model_copy(update={"attention": attention})
        plan = make_plan(spec)
        folder = tmp_path / name
        folder.mkdir()
        for file in render(plan).files:
            text = file.text
            if file.name == ("_sparse_union.py" if shared else "_sparse_hopper.py"):
                assert old in text
                text = text.replace(old, new, 1)
            (folder / file.name).write_text(text)
        if shared:
            return folder, [job for job in jobs_of(plan) if job.module.endswith("_union") or "_redo" in job.kernel]
        jobs = [job for job in jobs_of(plan) if job.module.endswith(("_hopper", "_swapped"))]
        return folder, [job for job in jobs if not partials or "partial_ptr" in dict(job.signature)]

    return write


@pytest.mark.parametrize(
    "name", ["dsv32", "glm53", "glm53_fp8", "dsv41", "dsv3", "dsv3_prefill", "glm5_prefill"]
)  # with lanes behind V, and without, 528 bytes a token or two caches as well; dense; multi-head, 192/128 and 256/256
def test_they_fit(written, tmp_path, name):
    folder, jobs = written(name)
    results = compile_jobs(folder, jobs, workers=2, cache_dir=tmp_path / "cache")
    assert check_limits(results) == []
    for job, taken in zip(jobs, results, strict=True):
        assert taken.instructions["HGMMA"] == job.expected_products
        # Barriers, and what partitions pass: arguments, of which two layouts have most.
        assert job.expected_shared <= taken.shared <= job.expected_shared + 640


@pytest.mark.parametrize(
    ("name", "partials"),
    [("dsv32_fp8", "bf16"), ("dsv41", "fp32"), ("dsv3", "bf16"), ("dsv3", "fp16"), ("dsv32", "fp32")],
)
def test_those_that_store_other_partials_fit(written, tmp_path, name, partials):
    folder, jobs = written(name, partials=partials)
    results = compile_jobs(folder, jobs, workers=2, cache_dir=tmp_path / "cache")
    assert check_limits(results) == []
    assert jobs
    for job, taken in zip(jobs, results, strict=True):
        assert taken.instructions["HGMMA"] == job.expected_products


@pytest.mark.parametrize(("name", "group"), [("dsv32", 4), ("dsv32", 2), ("glm53", 4)])
def test_those_in_which_neighbours_share_rows_fit(written, tmp_path, name, group):
    folder, jobs = written(name, shared=group)
    results = compile_jobs(folder, jobs, workers=2, cache_dir=tmp_path / "cache")
    assert check_limits(results) == []
    kernels = {job.kernel for job in jobs}
    assert kernels == {"_sparse_union_kernel", "_union_kernel", "_sparse_redo_kernel"}
    for job, taken in zip(jobs, results, strict=True):
        if job.expected_products is not None:
            assert taken.instructions["HGMMA"] == job.expected_products
        if job.module.endswith("_union"):
            assert job.expected_shared <= taken.shared <= job.expected_shared + 512


def test_a_warps_number_read_from_the_thread_would_spill(written, tmp_path):
    old, new = (
        "        shr.u32 bit, $2, $4;\n",
        (
            "        mov.u32 bit, %tid.x;\n        bfe.u32 bit, bit, 5, 2;\n        add.u32 bit, bit, 28;\n"
            "        shr.u32 bit, $2, bit;\n"
        ),
    )
    folder, jobs = written("dsv32", old, new, shared=4)
    jobs = [job for job in jobs if job.kernel == "_sparse_union_kernel"][:1]
    results = compile_jobs(folder, jobs, workers=1, cache_dir=tmp_path / "cache")
    assert ["spills inside loops" in str(error) for error in check_limits(results)] == [True]


@pytest.mark.parametrize("group", [2, 4])
def test_the_bitmap_of_a_list_begins_shared_memory_as_its_assembly_takes_it_to(written, group):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    folder, jobs = written("dsv32", shared=group)
    (job,) = [job for job in jobs if job.module == "_union" and not job.constexprs]
    kernel = load_module(folder.rename(folder.with_name(f"group_{group}")), "_union")._union_kernel
    source = GluonASTSource(fn=kernel, signature=dict(job.signature), constexprs={}, attrs={})
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    offsets = [int(text) for text in re.findall(r"@global_smem, i32 (\d+)", compiled.asm["llir"])]
    assert offsets
    assert min(offsets) >= job.expected_shared  # what Triton itself needs lies behind


def test_a_product_that_runs_over_a_loops_end_is_refused(written, tmp_path):
    folder, jobs = written("dsv32", RIGHT_ENDS, "            _signal(K0_RIGHT, at)\n")
    with pytest.raises(ToolError, match="serialises its warpgroup products"):
        compile_jobs(folder, jobs[:1], workers=1, cache_dir=tmp_path / "cache")


def test_a_product_too_few_is_told(written, tmp_path):
    folder, jobs = written("dsv32", TAIL)
    results = compile_jobs(folder, jobs[:1], workers=1, cache_dir=tmp_path / "cache")
    (error,) = check_limits(results)
    assert "124 warpgroup products in the code - expected 132" in str(error)
