"""The search for tiles in the place of those that spill: a tile's place, the tries, and the printed result."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from checked_in import package_of
from enumerated import enumerate_package

from mlagen.bench.tune.replace_tiles import Search, main, text_of
from mlagen.compile import installed
from mlagen.compile.candidates import Place, place_of, tiles_like
from mlagen.plan import (
    DenseFwdTile,
    SparseFwdPlan,
    Tile,
    load_plan,
)
from mlagen.plan.tiles.replacements import Replacement, read_replacements
from mlagen.plan.tritons import minor, rows_under

ROOT = Path(__file__).parents[3]
SPEC = """\
name: small
title: A small model
model: {num_heads: 4, kv_lora_rank: 32, qk_rope_head_dim: 16, v_head_dim: 32, dtype: fp16}
attention: {kind: sparse, topk: 16, attn_sink: none, topk_length: none}
cache: {layout: fp16}
wrappers: [triton_mla_sparse_attention]
targets: [sm80]
"""


@pytest.mark.parametrize("name", ["dsv32", "dsv41", "dots3_sliding", "dsv3_prefill_tma"])
def test_every_tile_of_the_tables_is_found_where_it_stands(name: str) -> None:
    plan = load_plan(ROOT / "specs" / f"{name}.yaml")
    triton = minor(installed().version)
    jobs = enumerate_package(package_of(name), ("sm90",)).jobs["sm90"]
    found = {place for job in jobs if (place := place_of(job, plan, triton)) is not None}
    parts = {family.NAME: family for family in plan.tiled}
    for family, table in itertools.product(plan.fits, ("tiles", "unaligned")):
        rows = rows_under(getattr(parts[family], table), "sm90", triton)
        tiles = {place.tile for place in found if (place.family, place.table) == (family, table)}
        assert tiles == {row.tile for row in rows}
    assert {place.family for place in found} == set(plan.fits)


@pytest.mark.parametrize("tile", [Tile(64, 64, 8, 2, False), Tile(16, 16, 4, 1, False), DenseFwdTile(128, 64, 8, 2)])
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_tiles_are_tried_once_each_the_most_alike_first(tile: Tile | DenseFwdTile, target: str) -> None:
    tried = list(tiles_like(tile, target))
    assert tile not in tried
    assert len(set(tried)) == len(tried) > 20
    first = dataclasses.astuple(tried[0])
    assert sum(here != there for here, there in zip(dataclasses.astuple(tile), first, strict=True)) == 1
    assert any(one.num_stages == 1 for one in tried) == (target == "gfx942")


def test_what_is_printed_is_read_as_the_same_entries(tmp_path: Path) -> None:
    entries = [
        Replacement("sparse_fwd d512", "tiles", "sm90", Tile(32, 64, 4, 2, True), ((3, 8),), Tile(32, 64, 8, 2, True)),
        Replacement(
            "dense_fwd d64", "unaligned", "sm80", DenseFwdTile(64, 64, 4, 2), ((3, 9),), DenseFwdTile(64, 32, 4, 2)
        ),
    ]
    path = tmp_path / "replacements.yaml"
    path.write_text("replacements:\n" + "".join(map(text_of, entries)))
    assert [dataclasses.replace(one, place=None) for one in read_replacements(path)] == entries


@pytest.mark.compilation
def test_a_package_that_holds_has_nothing_to_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(SPEC)
    assert main([str(tmp_path / "small.yaml")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.compilation
def test_another_tile_is_taken_once_all_its_variants_hold(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SPEC)
    plan = load_plan(tmp_path / "small.yaml")
    tile = dict(plan.of(SparseFwdPlan).tiles)["sm80"][-1].tile
    search = Search(tmp_path / "small.yaml", installed().version, ["sm80"], ())
    assert search.spilling() == {}
    place = Place("sparse_fwd", "tiles", "sm80", tile)
    entry = search.instead(place, plan.fits["sparse_fwd"])
    assert entry is not None
    assert (entry.tile, entry.tritons) == (tile, (minor(installed().version),))
    assert entry.instead in list(tiles_like(tile, "sm80"))[:4]
