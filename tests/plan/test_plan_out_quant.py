"""Numbers of the output's quantisation: every variant once, and heads that the kernel takes."""

from __future__ import annotations

import pytest
from enumerated import check_every_list, enumerate_plan
from pydantic import ValidationError

from mlagen.plan import OutQuantPlan, make_plan
from mlagen.plan.families.out_quant import OUT_QUANT, TILES
from mlagen.spec import Spec


def quantising(latent: int = 448, **model: object) -> Spec:
    """A spec with the wrapper and nothing else."""
    dims = {"num_heads": 64, "kv_lora_rank": latent, "qk_rope_head_dim": 64, "v_head_dim": latent + 64}
    return Spec.model_validate(
        {
            "name": "quantising",
            "title": "Quantised output",
            "model": {**dims, "rope": "gptj", "dtype": "bf16", **model},
            "wrappers": (OUT_QUANT,),
            "targets": ("sm80", "sm90"),
        }
    )


def test_variants_are_of_each_kind_alignment_and_tile(tmp_path) -> None:
    every = enumerate_plan(make_plan(quantising()), tmp_path)
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_out_quant_kernels"}
    names = ("ROTATES", "QUANTISES", "PACKS", "ALIGNMENT", "BLOCK_T", "PDL")
    for target in every.jobs:
        given = [tuple(dict(job.constexprs)[name] for name in names) for job in every.of(target, "_out_quant_kernel")]
        kinds = [
            (rotates, *kind) for rotates in (False, True) for kind in ((True, False), (True, True), (False, False))
        ]
        early = [(16, True)] if target == "sm90" else []
        ways = [(at, tile.block_t, pdl) for at, pdl in [(1, False), (16, False), *early] for tile in TILES]
        assert sorted(given) == sorted((*kind, *way) for kind in kinds for way in ways)


def test_tiles_go_to_all_calls_and_are_powers_of_two() -> None:
    tiles = make_plan(quantising()).of(OutQuantPlan).tiles
    assert [tile.most is None for tile in tiles] == [False] * (len(tiles) - 1) + [True]
    for tile in tiles:
        assert (tile.block_t * tile.block_h).bit_count() == 1


def test_scales_are_packed_where_a_heads_fill_words() -> None:
    packs = {latent: make_plan(quantising(latent)).of(OutQuantPlan).packs for latent in (64, 192, 448, 960)}
    assert packs == {64: False, 192: False, 448: True, 960: True}


@pytest.mark.parametrize(
    ("latent", "model", "says"),
    [
        (512, {}, "a V of all columns of a row, a power of two from 128 on; V has 576 of 576"),
        (448, {"v_head_dim": 448}, "a V of all columns of a row, a power of two from 128 on; V has 448 of 512"),
        (448, {"rope": "neox"}, "model.rope gptj and an even model.kv_lora_rank; the spec has neox and 448"),
    ],
)
def test_other_outputs_are_refused(latent: int, model: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        quantising(latent, **model)
