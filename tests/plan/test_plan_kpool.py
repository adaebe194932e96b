"""Numbers of pools of keys: every variant once, few of them, and only the kernels of a package's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan

from mlagen.errors import LimitError
from mlagen.plan import KpoolPlan, make_plan
from mlagen.plan.families.kpool import COMPRESS, EXPAND, OVER_KEYS, QUERY, SEED, UPDATE
from mlagen.spec import Spec

KERNELS = {
    QUERY: "_quantise_rows_kernel",
    COMPRESS: "_compress_pools_kernel",
    SEED: "_seed_tail_kernel",
    UPDATE: "_update_tail_kernel",
    EXPAND: "_expand_pools_kernel",
}


def pooling(wrappers: tuple[str, ...] = tuple(KERNELS), *, layout: Any = "indexer_fp8") -> Spec:
    """A spec with an indexer over pools, and nothing else."""
    model = {"num_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 0, "v_head_dim": 512, "dtype": "bf16"}
    keys = {
        "indexer": {"num_heads": 32, "head_dim": 128, "topk": 512, "rope_head_dim": 0, "compress_ratio": 4},
        "indexer_cache": {"layout": layout},
    }
    return Spec.model_validate(
        {
            "name": "pooling",
            "title": "Pools of keys",
            "model": model,
            **(keys if set(OVER_KEYS) & set(wrappers) else {}),
            "wrappers": wrappers,
            "targets": ("sm80", "sm90"),
        }
    )


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    return enumerate_plan(make_plan(pooling()), tmp_path_factory.mktemp("pooling"))


def test_variants_are_of_both_alignments(every: Enumerated) -> None:
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_kpool_kernels"}
    for target in every.jobs:
        for wrapper, kernel in KERNELS.items():
            given = [dict(job.constexprs) for job in every.of(target, kernel)]
            found = sorted((one.get("ALIGNMENT", 16), one["PDL"]) for one in given)
            wanted = [(16, False)] if wrapper == EXPAND else [(1, False), (16, False)]
            assert found == wanted + ([(16, True)] if target == "sm90" else [])


def test_programs_that_change_a_ring_they_read_are_one_warp(every: Enumerated) -> None:
    for target in every.jobs:
        for job in every.of(target, KERNELS[UPDATE]):
            assert job.num_warps == 1


@pytest.mark.parametrize("wrapper", KERNELS)
def test_a_package_has_the_kernels_of_its_wrappers(wrapper: str, tmp_path) -> None:
    plan = make_plan(pooling((wrapper,)))
    found = enumerate_plan(plan, tmp_path)
    assert {one for _, one in found.kernels} == {KERNELS[wrapper]}
    assert (plan.of(KpoolPlan).rows is None) == (wrapper == EXPAND)
    modules = {path.stem for path in found.folder.glob("_indexer*.py")}
    wanted = {QUERY: {"_indexer_query"}, COMPRESS: {"_indexer_layout"}, UPDATE: {"_indexer_layout"}}
    assert modules == wanted.get(wrapper, set())


def test_keys_with_several_scales_are_refused() -> None:
    scales = {"kind": "scales", "of": "row", "dtype": "fp32", "tile": 64, "rounding": "power_of_two"}
    rule = {"divisor": 448.0, "floor": 1e-4, "floor_on": "amax"}
    layout = {"name": "two_scales", "fields": ({"kind": "row", "dtype": "e4m3"}, {**scales, **rule})}
    with pytest.raises(LimitError, match="takes one fp32 scale per key"):
        make_plan(pooling(layout=layout))
