"""Numbers of the compressor: every variant once, few of them, and tiles that follow the width of a row."""

from __future__ import annotations

from typing import Any

import pytest
from enumerated import Enumerated, check_every_list, enumerate_plan

from mlagen.plan import CompressorPlan, make_plan
from mlagen.plan.families.compressor import COMPRESS, SAVE
from mlagen.spec import Spec

KEYS = {"num_heads": 4, "head_dim": 128, "topk": 64, "rope_head_dim": 64, "rope": "gptj", "rope_at": "last"}


def compressing(wrappers: tuple[str, ...] = tuple(CompressorPlan.WRAPPERS), rope: str = "gptj", **dims: Any) -> Spec:
    """A spec with caches and a compressor, and nothing else."""
    model = {"num_heads": 64, "kv_lora_rank": 448, "qk_rope_head_dim": 64, "rope": "gptj", "v_head_dim": 512}
    return Spec.model_validate(
        {
            "name": "compressing",
            "title": "A compressor",
            "model": {**model, "dtype": "bf16", **dims},
            "cache": {"layout": "mxfp8_v41"},
            "extra_cache": {"layout": "nvfp4_v41"},
            "indexer": {**KEYS, "rope": rope},
            "indexer_cache": {"layout": "indexer_fp8"},
            "wrappers": wrappers,
            "targets": ("sm80", "sm90"),
        }
    )


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Enumerated:
    return enumerate_plan(make_plan(compressing()), tmp_path_factory.mktemp("compressing"))


def test_variants_are_of_both_alignments_and_of_each_dtype(every: Enumerated) -> None:
    check_every_list(every)
    assert {module for module, _ in every.kernels} == {"_compressor_kernels", "_indexer_compressor_kernels"}
    for target in every.jobs:
        # One tile of states; five of rows and five of keys, and one of each without aligned loads.
        kernels = (("_save_states_kernel", "FP32", 1, 1), ("_compress_kernel", "FP32_ANGLES", 10, 2))
        for kernel, flag, tiles, unaligned in kernels:
            names = (flag, "ALIGNMENT", "PDL")
            given = [tuple(dict(job.constexprs)[name] for name in names) for job in every.of(target, kernel)]
            early = [(wide, 16, True) for wide in (False, True)] if target == "sm90" else []
            aligned = [(wide, 16, False) for wide in (False, True)]
            apart = [(wide, 1, False) for wide in (False, True)]
            assert sorted(given) == sorted([*aligned, *early] * tiles + apart * unaligned)


def test_rows_go_to_the_second_cache() -> None:
    family = make_plan(compressing()).of(CompressorPlan)
    assert family.cache.layout.name == "nvfp4_v41"
    assert family.keys is not None


def test_keys_of_other_pairs_are_not_compressed() -> None:
    assert make_plan(compressing(rope="neox")).of(CompressorPlan).keys is None


def test_a_package_has_the_kernels_of_its_wrappers(tmp_path) -> None:
    for name, kernel in ((SAVE, "_save_states_kernel"), (COMPRESS, "_compress_kernel")):
        found = enumerate_plan(make_plan(compressing((name,))), tmp_path / name).kernels
        assert {one for _, one in found} == {kernel}


def test_tiles_follow_the_width_of_a_row() -> None:
    family = make_plan(compressing()).of(CompressorPlan)
    for tiles, widest, fewest in ((family.row_tiles, 4, 4), (family.key_tiles, 2, 1)):
        (few, many), (long, long_some, long_many) = ([tile for _, tile in rows] for rows in tiles)
        warps = [tile.num_warps for tile in (few, many, long, long_some, long_many)]
        assert warps == [widest, fewest, 4 * fewest, 4 * fewest, fewest]
        assert many.block_w < few.block_w == long.block_w == long_some.block_w == long_many.block_w == 8
        assert [tile.apart for tile in (few, many, long, long_some, long_many)] == [False, False, True, True, False]
        assert [tile.block_t for tile in (few, many, long, long_some, long_many)] == [1, 1, 1, 128, 128]
        assert [[most for most, _ in rows] for rows in tiles] == [[2048, None], [256, 16384, None]]
