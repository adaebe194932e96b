"""Blocks of a row: together they are the row, with any dims."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from plan_specs import dims, make_spec

from mlagen.plan import Chunk, make_plan
from mlagen.plan.rows import row_chunks
from mlagen.plan.tiles.chunks import make_chunks, split_columns

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True)


def check_covers(chunks: tuple[Chunk, ...], columns: int) -> None:
    assert [chunk.start for chunk in chunks] == [sum(one.columns for one in chunks[:n]) for n in range(len(chunks))]
    assert sum(chunk.columns for chunk in chunks) == columns
    for chunk in chunks:
        assert 1 <= chunk.columns <= chunk.block
        assert chunk.masked == (chunk.columns < chunk.block)
        assert chunk.block >= 16
        assert chunk.block & (chunk.block - 1) == 0
    names = [chunk.name for chunk in chunks]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


@SETTINGS
@given(dims=dims())
def test_attention_covers_every_column_once_in_order_and_no_chunk_crosses_the_end_of_v(dims):
    spec = make_spec(**dims)
    chunks = row_chunks(spec)
    check_covers(chunks, dims["kv_lora_rank"] + dims["qk_rope_head_dim"])
    d_v = dims["v_head_dim"]
    assert all(chunk.start + chunk.columns <= d_v if chunk.in_v else chunk.start >= d_v for chunk in chunks)


@SETTINGS
@given(dims=dims())
def test_the_cache_kernels_cover_every_column(dims):
    check_covers(make_plan(make_spec(**dims)).caches.main.tiled, dims["kv_lora_rank"] + dims["qk_rope_head_dim"])


def test_only_the_last_block_is_padded_by_at_most_an_eighth_or_it_is_the_smallest():
    for columns in range(1, 1281):
        *full, (width, block) = split_columns(columns)
        assert sum(width for width, _ in full) + width == columns
        assert all(width == block <= 512 for width, block in full)
        assert block == 16 or block - width <= block / 8


@pytest.mark.parametrize(
    ("columns", "blocks"),
    [
        (1, [(1, 16)]),
        (16, [(16, 16)]),
        (17, [(16, 16), (1, 16)]),
        (96, [(64, 64), (32, 32)]),
        (120, [(120, 128)]),
        (500, [(500, 512)]),
        (1024, [(512, 512), (512, 512)]),
        (1088, [(512, 512), (512, 512), (64, 64)]),
        (192, [(128, 128), (64, 64)]),
        (448, [(448, 512)]),
        (512, [(512, 512)]),
        (576, [(512, 512), (64, 64)]),
    ],
)
def test_columns_split_into_powers_of_two_largest_first(columns, blocks):
    assert split_columns(columns) == blocks


def test_no_columns_are_no_chunk():
    assert split_columns(0) == []
    assert make_chunks([("nope", 16), ("rope", 0)], 16) == (Chunk("nope", 0, 16, 16, True),)


def test_v_that_ends_inside_the_latent_cuts_it():
    assert make_chunks([("nope", 128), ("rope", 64)], 96) == (
        Chunk("nope_0", 0, 64, 64, True),
        Chunk("nope_1", 64, 32, 32, True),
        Chunk("nope_2", 96, 32, 32, False),
        Chunk("rope", 128, 64, 64, False),
    )


def test_a_row_whose_v_holds_rope_columns_is_one_run():
    spec = make_spec(kv_lora_rank=448, qk_rope_head_dim=64, v_head_dim=512)
    assert row_chunks(spec) == (Chunk("kv", 0, 512, 512, True),)
