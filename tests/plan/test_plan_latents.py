"""Numbers of latents: every variant once, few of them, and the cache that they go to."""

from __future__ import annotations

from pathlib import Path

from enumerated import check_every_list, enumerate_plan

from mlagen.bench import load_package
from mlagen.plan import LatentsPlan, make_plan
from mlagen.plan.families.latents import INSERT, POOL
from mlagen.spec import Spec


def storing(wrappers: tuple[str, ...] = (POOL, INSERT), **parts: object) -> Spec:
    """A spec with V4.1's caches and latents, and nothing else."""
    model = {"num_heads": 64, "kv_lora_rank": 448, "qk_rope_head_dim": 64, "rope": "gptj", "v_head_dim": 512}
    return Spec.model_validate(
        {
            "name": "storing",
            "title": "Latents",
            "model": {**model, "dtype": "bf16"},
            "cache": {"layout": "mxfp8_v41"},
            "extra_cache": {"layout": "nvfp4_v41"},
            "wrappers": wrappers,
            "targets": ("sm80", "sm90"),
            **parts,
        }
    )


def test_variants_are_of_both_alignments_and_of_each_kind_of_call(tmp_path) -> None:
    every = enumerate_plan(make_plan(storing()), tmp_path)
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_latents_kernels"}
    for target in every.jobs:
        kernels = (("_latents_kernel", ("POOLS",)), ("_pairs_kernel", ()), ("_insert_kernel", ("FP32_ANGLES",)))
        for kernel, flags in kernels:
            names = (*flags, "ALIGNMENT", "PDL")
            given = {tuple(dict(job.constexprs)[name] for name in names) for job in every.of(target, kernel)}
            tiles = {(*job.constexprs, job.num_warps) for job in every.of(target, kernel)}
            assert len(every.of(target, kernel)) == len(tiles)
            kinds = [(one,) for one in (False, True)] if flags else [()]
            early = [(*kind, 16, True) for kind in kinds] if target == "sm90" else []
            assert sorted(given) == sorted([*early, *((*kind, at, False) for kind in kinds for at in (1, 16))])


def test_latents_go_to_the_second_cache() -> None:
    family = make_plan(storing()).of(LatentsPlan)
    assert family.cache.layout.name == "nvfp4_v41"
    assert make_plan(storing(extra_cache=None)).of(LatentsPlan).cache.layout.name == "mxfp8_v41"


def test_a_package_has_the_kernels_of_its_wrappers(tmp_path) -> None:
    for name, kernels in ((POOL, {"_latents_kernel", "_pairs_kernel"}), (INSERT, {"_insert_kernel"})):
        found = enumerate_plan(make_plan(storing((name,))), tmp_path / name).kernels
        assert {one for _, one in found} == kernels


def test_wide_latents_have_eight_warps_and_narrow_ones_two() -> None:
    family = make_plan(storing()).of(LatentsPlan)
    assert (family.one_tile.block_w, family.one_tile.num_warps) == (2, 1)
    assert [(most, tile.block_w, tile.num_warps) for most, tile in family.tiles] == [(4096, 2, 8), (0, 2, 4)]
    narrow = {"num_heads": 4, "kv_lora_rank": 90, "qk_rope_head_dim": 30, "rope": "neox", "v_head_dim": 90}
    small = storing(model={**narrow, "dtype": "bf16"}, cache={"layout": "bf16"}, extra_cache=None)
    assert [tile.num_warps for _, tile in make_plan(small).of(LatentsPlan).tiles] == [2, 1]


def test_calls_of_many_tokens_have_half_of_the_warps() -> None:
    latents = load_package(Path(__file__).resolve().parents[2] / "generated" / "dsv41").module("latents")
    assert latents._pool_tile(False, 1 << 20).num_warps == 1
    assert [latents._pool_tile(True, tokens).num_warps for tokens in (1, 4096, 4097, 1 << 20)] == [8, 8, 4, 4]
