"""A few pairs of layouts, compiled: shared memory of a program, compared with the plan."""

from __future__ import annotations

from collections import defaultdict

import pytest
from enumerated import enumerate_plan
from pairs import SLACK, V4, V32, make_pair

from mlagen.compile import CompileJob, check_limits, compile_jobs
from mlagen.plan import TARGETS, SparseDecodePlan, Tile, make_plan

pytestmark = pytest.mark.compilation

SAMPLE = [
    (V4, "ue8m0_v4", "nvfp4_v41", "sm120"),
    (V4, "nvfp4_v41", "ue8m0_v4", "sm86"),
    (V32, "fp8_ds_mla", "nvfp4_ds_mla", "sm120"),
    (V32, "bf16", "nvfp4_ds_mla", "sm86"),
    (V32, "fp8_per_tensor", "fp8_ds_mla", "sm120"),
]


def tile_of(job: CompileJob) -> Tile:
    given = dict(job.constexprs)
    return Tile(given["BLOCK_H"], given["BLOCK_N"], job.num_warps, job.num_stages, given["INDICES_AHEAD"])


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "first", "second", "target"), SAMPLE, ids=str)
def test_a_pair_of_layouts_has_the_expected_resources_and_no_spills(dims, first, second, target, tmp_path, compiled):
    plan = make_plan(make_pair(dims, first, second, (target,)))
    family, found = plan.of(SparseDecodePlan), enumerate_plan(plan, tmp_path)
    rows = {False: dict(family.unaligned)[target], True: dict(family.tiles)[target]}
    expected = {(aligned, row.tile): row.expected_shared for aligned, listed in rows.items() for row in listed}
    # Of each tile and alignment the variant with every tensor, which takes most.
    jobs: dict[tuple[object, ...], CompileJob] = {}
    for job in sorted(found.of(target, "_sparse_decode_split_kernel"), key=lambda job: job.variant.count(" no ")):
        given = dict(job.constexprs)
        if None not in given.values():
            jobs.setdefault((given["ALIGNMENT"], given["INDEX_GROUP"], tile_of(job)), job)
    assert len(jobs) == 2 + len(rows[True])
    taken = defaultdict(int)
    results = compile_jobs(found.folder, list(jobs.values()), cache_dir=compiled)
    for job, result in zip(jobs.values(), results, strict=True):
        key = (job.tabled, tile_of(job))
        taken[key] = max(taken[key], result.shared)
    assert check_limits(results) == []
    assert taken.keys() == expected.keys()
    for key, most in taken.items():
        assert most <= expected[key] <= SLACK * most, key
        assert expected[key] <= TARGETS[target].shared_limit
