"""The Hopper kernels as ptxas takes them: no spill in a loop, no serialised product, as many products as planned."""

from __future__ import annotations

import pytest

from mlagen.backends import compile_jobs as jobs_of
from mlagen.compile import check_limits, compile_jobs
from mlagen.emit import render
from mlagen.errors import ToolError
from mlagen.plan import load_plan

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

    def write(name, old="", new=""):
        plan = load_plan(pytestconfig.rootpath / "specs" / f"{name}.yaml")
        folder = tmp_path / name
        folder.mkdir()
        for file in render(plan).files:
            text = file.text
            if file.name == "_sparse_hopper.py":
                assert old in text
                text = text.replace(old, new, 1)
            (folder / file.name).write_text(text)
        return folder, [job for job in jobs_of(plan) if job.module.endswith("_hopper")]

    return write


@pytest.mark.parametrize("name", ["dsv32", "glm53"])  # with lanes behind V, and without
def test_they_fit(written, tmp_path, name):
    folder, jobs = written(name)
    results = compile_jobs(folder, jobs, workers=2, cache_dir=tmp_path / "cache")
    assert check_limits(results) == []
    for job, taken in zip(jobs, results, strict=True):
        assert taken.instructions["HGMMA"] == job.expected_products
        assert job.expected_shared <= taken.shared <= job.expected_shared + 512  # barriers, and what partitions pass


def test_a_product_that_runs_over_a_loops_end_is_refused(written, tmp_path):
    folder, jobs = written("dsv32", RIGHT_ENDS, "            _signal(K0_RIGHT, at)\n")
    with pytest.raises(ToolError, match="serialises its warpgroup products"):
        compile_jobs(folder, jobs[:1], workers=1, cache_dir=tmp_path / "cache")


def test_a_product_too_few_is_told(written, tmp_path):
    folder, jobs = written("dsv32", TAIL)
    results = compile_jobs(folder, jobs[:1], workers=1, cache_dir=tmp_path / "cache")
    (error,) = check_limits(results)
    assert "124 warpgroup products in the code - expected 132" in str(error)
