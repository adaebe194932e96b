"""Numbers of prologues: every variant once, few of them, and tiles that follow the width of a head."""

from __future__ import annotations

from typing import Any

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan

from mlagen.plan import ProloguePlan, make_plan
from mlagen.plan.families.prologue import OVER_HEADS, OVER_ROPE
from mlagen.spec import Spec


def fused(wrappers: tuple[str, ...] = tuple(ProloguePlan.WRAPPERS), **dims: Any) -> Spec:
    """A spec with a cache and prologues, and nothing else."""
    model = {"num_heads": 64, "kv_lora_rank": 448, "qk_rope_head_dim": 64, "rope": "gptj", "v_head_dim": 512}
    return Spec.model_validate(
        {
            "name": "fused",
            "title": "A prologue",
            "model": {**model, "dtype": "bf16", **dims},
            "cache": {"layout": "bf16"},
            "wrappers": wrappers,
            "targets": ("sm80", "sm90"),
        }
    )


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    return enumerate_plan(make_plan(fused()), tmp_path_factory.mktemp("fused"))


def test_variants_are_of_both_alignments_and_of_each_dtype_of_angles(every: Enumerated) -> None:
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_prologue_kernels"}
    for target in every.jobs:
        for kernel, tiles in (("_prologue_heads_kernel", 2), ("_prologue_rope_kernel", 1)):
            names = ("FP32_ANGLES", "ALIGNMENT", "PDL")
            given = [tuple(dict(job.constexprs)[name] for name in names) for job in every.of(target, kernel)]
            early = [(wide, 16, True) for wide in (False, True)] if target == "sm90" else []
            plain = [(wide, alignment, False) for wide in (False, True) for alignment in (1, 16)]
            assert sorted(given) == sorted([*plain, *early] * tiles)


def test_a_package_has_the_kernel_of_its_wrappers() -> None:
    for name in ProloguePlan.WRAPPERS:
        family = make_plan(fused((name,))).of(ProloguePlan)
        assert (family.heads_tiles is not None, family.rope_tile is not None) == (name in OVER_HEADS, name == OVER_ROPE)
    assert make_plan(fused(("concat_and_cache_mla",))).find(ProloguePlan) is None


@pytest.mark.parametrize(("dims", "heads", "rope"), [({}, 4, 16), ({"num_heads": 3}, 4, 4), ({"num_heads": 1}, 1, 1)])
def test_a_program_takes_4_kib_of_q_and_no_more_heads_than_the_model_has(
    dims: dict[str, int], heads: int, rope: int
) -> None:
    family = make_plan(fused(**dims)).of(ProloguePlan)
    assert family.heads_tiles is not None
    assert family.rope_tile is not None
    assert [tile.block_h for tile in (*family.heads_tiles, family.rope_tile)] == [1, heads, rope]
