"""Trials of cache writers and gathers; the kernels are the reference's encoder and decoder, or go wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_packages import MakePackage

from mlagen.bench.check import error_limit
from mlagen.bench.families.cache import (
    GATHERS,
    WRITERS,
    fill_with,
    gather_error,
    gather_shapes,
    make_gather_inputs,
    make_write_inputs,
    sides_of,
    write_error,
    write_limit,
    writer_shapes,
)
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import TENSOR_SCALE, Batch, empty_cache, rows_of, shuffled_pages, slots_of
from mlagen.layout import CacheLayout
from mlagen.layout.codec import read, write
from mlagen.work import gather_bytes, write_bytes

CPU = torch.device("cpu")
BLOCK_SIZE = 64
LAYOUTS = {
    "bf16": (512, 64, 512),
    "fp8_per_tensor": (512, 64, 512),
    "fp8_ds_mla": (512, 64, 512),
    "nvfp4_ds_mla": (512, 64, 512),
    "mxfp8_v41": (448, 64, 512),
    "ue8m0_v4": (448, 64, 512),
}


def writers(package_layout: Callable[[], CacheLayout], spoil: int = 0) -> dict[str, Callable[..., Any]]:
    """Both writers, by the reference; the last `spoil` tokens are left out."""

    def put(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        kept = len(slots) - spoil
        write(package_layout(), cache, BLOCK_SIZE, slots[:kept], rows[:kept], TENSOR_SCALE)

    def concat(
        kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *, scale: object
    ) -> None:
        put(torch.cat([kv_c, k_pe], 1), kv_cache, slots)

    def quantize(
        k: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor, block_size: int, ue8m0: bool, **scale: torch.Tensor
    ) -> None:
        assert bool(scale) == package_layout().tensor_scale
        assert ue8m0 == any(field.dtype == "ue8m0" for field in package_layout().fields)
        put(k, k_cache, slots)

    return {"concat_and_cache_mla": concat, "quantize_and_insert_k_cache": quantize}


def gathers(package_layout: Callable[[], CacheLayout], shift: int = 0) -> dict[str, Callable[..., Any]]:
    """Both gathers, by the reference, shifted by `shift` tokens."""

    def take(cache: torch.Tensor, block_table: torch.Tensor, tokens: int) -> torch.Tensor:
        slots = slots_of(block_table, tokens, BLOCK_SIZE).flatten().roll(shift)
        return read(package_layout(), cache, BLOCK_SIZE, slots, TENSOR_SCALE)

    def dequantize(
        out: torch.Tensor,
        k_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        gather_lens: None,
        block_table: torch.Tensor,
        block_size: int,
        offset: int,
        **scale: torch.Tensor,
    ) -> None:
        assert bool(scale) == package_layout().tensor_scale
        out.copy_(take(k_cache, block_table, int(seq_lens[0])).view(out.shape))

    def gather(
        src: torch.Tensor,
        dst: torch.Tensor,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        token_to_seq: torch.Tensor,
        tokens: int,
        *,
        scale: torch.Tensor,
    ) -> None:
        dst.copy_(take(src, block_table, tokens // (len(starts) - 1)))

    return {"dequantize_and_gather_k_cache": dequantize, "gather_and_maybe_dequant_cache": gather}


def package_of(make: MakePackage, layout: str, **functions: int) -> BenchPackage:
    holder: list[BenchPackage] = []

    def its_layout() -> CacheLayout:
        return holder[0].layouts[0]

    wrappers = writers(its_layout, functions.get("spoil", 0)) | gathers(its_layout, functions.get("shift", 0))
    holder.append(make(wrappers, layout, dims=LAYOUTS[layout]))
    return holder[0]


@pytest.mark.parametrize("spoil", [0, 1])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_is_told_from_one_that_skips_a_token(
    make_package: MakePackage, layout: str, name: str, spoil: int
) -> None:
    package = package_of(make_package, layout, spoil=spoil)
    its_layout, batch = package.layouts[0], Batch("cache", name, 150, 2)
    first, second = make_write_inputs(batch, its_layout, package.facts.d_c, BLOCK_SIZE, torch.bfloat16, CPU, 2)
    assert not set(first.slots.tolist()) & set(second.slots.tolist())
    error = write_error(its_layout, BLOCK_SIZE, first, WRITERS[name](sides_of(package)[""], first))
    assert (error <= write_limit(its_layout, first)) == (spoil == 0)


def test_a_writer_that_loses_more_than_the_layout_does_is_wrong(make_package: MakePackage) -> None:
    package = package_of(make_package, "fp8_ds_mla")
    layout, batch = package.layouts[0], Batch("cache", "concat_and_cache_mla", 64, 1)
    (first,) = make_write_inputs(batch, layout, 512, BLOCK_SIZE, torch.bfloat16, CPU, 1)
    coarse = replace(first, latent=(4 * first.latent).round() / 4)
    error = write_error(layout, BLOCK_SIZE, first, WRITERS["concat_and_cache_mla"](sides_of(package)[""], coarse))
    assert error > write_limit(layout, first)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gather_is_told_from_one_that_is_a_token_off(
    make_package: MakePackage, layout: str, name: str, shift: int
) -> None:
    package = package_of(make_package, layout, shift=shift)
    its_layout, batch = package.layouts[0], Batch("gather", name, 150, 2)
    first, second = make_gather_inputs(batch, its_layout, BLOCK_SIZE, torch.bfloat16, CPU, 2)
    assert first.cache.data_ptr() == second.cache.data_ptr()
    assert first.out.data_ptr() != second.out.data_ptr()
    error = gather_error(its_layout, BLOCK_SIZE, first, GATHERS[name](sides_of(package)[""], first))
    assert (error <= error_limit(torch.bfloat16)) == (shift == 0)


def test_the_second_cache_is_measured_where_it_has_kernels_of_its_own(make_package: MakePackage) -> None:
    names = ["quantize_and_insert_k_cache", "dequantize_and_gather_k_cache"]
    wrappers = dict.fromkeys(names, print)
    package = make_package(wrappers, "mxfp8_v41", "nvfp4_v41", dims=(448, 64, 512), window=32)
    assert {batch.kind for batch in writer_shapes(package, None)} == {names[0]}
    package.root.extra_cache = SimpleNamespace(**wrappers)  # type: ignore[attr-defined]
    assert {batch.kind for batch in writer_shapes(package, None)} == {names[0], f"extra_cache.{names[0]}"}
    assert {batch.kind for batch in gather_shapes(package, None)} == {names[1], f"extra_cache.{names[1]}"}
    sides = sides_of(package)
    assert {prefix: side.layout.name for prefix, side in sides.items()} == {
        "": "mxfp8_v41",
        "extra_cache.": "nvfp4_v41",
    }
    assert [side.block_size for side in sides.values()] == [64, 16]
    assert sides["extra_cache."].kernel(names[0]) is print


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_filled_by_the_packages_writer(make_package: MakePackage, layout: str) -> None:
    package = package_of(make_package, layout)
    side = sides_of(package)[""]
    pages = empty_cache(side.layout, 3, BLOCK_SIZE, CPU)
    fill_with(side, pages)
    rows = read(side.layout, pages, BLOCK_SIZE, torch.arange(3 * BLOCK_SIZE), TENSOR_SCALE)
    assert 0.9 < float(rows.std()) < 1.1


def test_bytes_are_the_layouts(make_package: MakePackage) -> None:
    layout = package_of(make_package, "fp8_ds_mla").layouts[0]
    assert write_bytes(10, layout.columns, layout.row_bytes) == 10 * (576 * 2 + 8 + 656)
    assert gather_bytes(10, layout.columns, layout.row_bytes, 3, integers=5) == 10 * (656 + 576 * 2) + (3 + 5) * 4


def test_pages_are_each_used_once_and_in_no_order() -> None:
    pages = shuffled_pages(3, 2, 50, device=CPU)
    assert sorted(pages.flatten().tolist()) == list(range(300))
    assert pages.flatten().tolist() != list(range(300))
    slots = slots_of(pages, 70, 2)
    assert slots.shape == (3, 2, 70)
    assert len(set(slots.flatten().tolist())) == slots.numel()
    assert slots[0, 0, 5] == pages[0, 0, 2] * 2 + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_seen_as_callers_hold_it(make_package: MakePackage, layout: str) -> None:
    its_layout = package_of(make_package, layout).layouts[0]
    cache = empty_cache(its_layout, 3, BLOCK_SIZE, CPU)
    rows = rows_of(its_layout, cache, BLOCK_SIZE, torch.bfloat16)
    assert rows.shape == (3, BLOCK_SIZE, its_layout.row_bytes // rows.element_size())
    assert rows.dtype == (torch.uint8 if its_layout.quantised else torch.bfloat16)
    assert rows.stride(0) * rows.element_size() == its_layout.page_bytes(BLOCK_SIZE)
    assert rows.data_ptr() == cache.data_ptr()
