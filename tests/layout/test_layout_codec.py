"""The codec against a second encoder over tables of exact values, and against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import exact
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_specs import FNUZ, KEYS, NINE, ROOT, make, rows

from mlagen.layout import CacheLayout, ScalesField, compose
from mlagen.layout.codec import decode, encode, planes_of, read, write

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)

OLD_GLM = {"rounding": "nearest", "floor": 2.0**-126, "floor_on": "scale"}
LAYOUTS = {
    **{name: make(name) for name in (*NINE, *KEYS, FNUZ["name"])},
    "indexer_fp8, any fp32": make("indexer_fp8", rounding="nearest"),
    "fp8_ds_mla, any fp32": make("fp8_ds_mla", **OLD_GLM),
    "fp8_ds_mla without RoPE": make("fp8_ds_mla", 512, 0),
    "ue8m0_v4 as FlashMLA writes": make("ue8m0_v4", floor_on="scale"),
}
TILED = {name: layout for name, layout in LAYOUTS.items() if any(isinstance(f, ScalesField) for f in layout.fields)}

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
AMAX = [0.0, 1e-5, 1e-4, 0.0447, 0.0448, 6.0, 7.0, 447.0, 448.0, 449.0, 2688.0, 3e4, math.nan, math.inf]
AMAX += [448 * 2.0**k for k in range(-22, 7)]


def rows_of(values: torch.Tensor, columns: int) -> torch.Tensor:
    """The values as rows, the last one filled up with zeros."""
    count = -(-values.numel() // columns)
    return torch.nn.functional.pad(values, (0, count * columns - values.numel())).reshape(count, columns)


def assert_encodes(layout: CacheLayout, x: torch.Tensor, tensor_scale: float | None = None) -> None:
    """`x` [T, columns], bf16 or fp16, gives the second encoder's bytes; unquantised NaN keep their own bits."""
    found = encode(layout, x, tensor_scale)
    wanted = exact.encode(layout, x.double().numpy(), tensor_scale)
    nan = x.isnan()
    for field in layout.data:
        if not field.quantised:
            columns = slice(field.first_column, field.first_column + field.count)
            bits = x[:, columns].contiguous().view(torch.uint8).numpy()
            wanted[field.plane][:, field.offset : field.offset + field.nbytes][
                nan[:, columns].repeat_interleave(2, 1).numpy()
            ] = bits[nan[:, columns].repeat_interleave(2, 1).numpy()]
    for plane, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == torch.uint8
        off = np.argwhere(one.numpy() != other)
        assert off.size == 0, f"{layout.name}: plane {plane}, row and byte {off[0]}, {len(off)} in all"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("order", ["side by side", "mixed"])
def test_every_bf16_value_is_encoded_exactly(name, order):
    layout = LAYOUTS[name]
    values = ALL_BF16
    if order == "mixed":  # tiles of all magnitudes, without the ones that make a tile infinite
        values = values[torch.arange(65536) * 40503 % 65536]
        values = values[values.float().abs() < 1e6]
    if name == "fp16":
        values = values.half()
    assert_encodes(layout, rows_of(values, layout.columns), 0.4375 if layout.tensor_scale else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_of_any_dtype_is_encoded_by_its_values(dtype):
    x = torch.linspace(-300, 300, 576, dtype=torch.float32).to(torch.bfloat16)[None]
    layout = make("fp8_ds_mla")
    for found, wanted in zip(encode(layout, x.to(dtype)), encode(layout, x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("scale", [1.0, 0.4375, 1e-4, 3e38, torch.tensor([0.3])])
def test_a_scale_a_tensor_divides_every_column(scale):
    layout = make("fp8_per_tensor")
    assert_encodes(layout, rows_of(ALL_BF16, layout.columns), float(scale))
    (plane,) = encode(layout, rows_of(ALL_BF16, layout.columns), scale)
    table = torch.from_numpy(exact.decoded("e4m3")).float()
    wanted = table[plane.long()] * torch.tensor(float(scale))
    torch.testing.assert_close(decode(layout, (plane,), scale), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("call", [lambda layout, x: encode(layout, x), lambda layout, x: decode(layout, (x.byte(),))])
def test_a_scale_a_tensor_has_to_be_passed(call):
    with pytest.raises(ValueError, match="tensor_scale: got None"):
        call(make("fp8_per_tensor"), torch.ones(1, 576))


def tiles_with(layout: CacheLayout, amax: float) -> torch.Tensor:
    """Two rows: one with the largest magnitude `amax`, at a random column of each tile; one of nothing but amax."""
    generator = torch.Generator().manual_seed(5)
    columns = torch.arange(layout.columns)
    x = torch.rand(2, layout.columns, generator=generator) * 2 - 1
    x = x * (amax if math.isfinite(amax) else 1.0)
    x[0, columns % 16 == 5] = -amax
    x[0, columns % 16 == 9] = -0.0
    x[1] = amax
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("name", TILED)
def test_tiles_of_any_amax_are_encoded_exactly(name, amax):
    assert_encodes(TILED[name], tiles_with(TILED[name], amax))


@pytest.mark.parametrize("name", TILED)
def test_every_finite_element_of_a_finite_tile_decodes_near_its_value(name):
    layout = TILED[name]
    x = torch.cat([tiles_with(layout, amax) for amax in AMAX if 0 < amax <= 2688])
    out = decode(layout, encode(layout, x))
    for field in layout.data:
        columns = slice(field.first_column, field.first_column + field.count)
        scales = layout.scales_of(field)
        if scales:
            count, tile = scales.count, scales.tile
            amax = x[:, columns].float().abs().reshape(len(x), count, tile).amax(2).repeat_interleave(tile, 1)
            bits = 1 if field.dtype == "e2m1" else 3
            step = {"e4m3": 2.0**-9, "e4m3fnuz": 2.0**-10, "e2m1": 0.5}[field.dtype]
            smallest = scales.rule.floor / (scales.rule.divisor if scales.rule.floor_on == "amax" else 1)
            scale = (amax / scales.rule.divisor).clamp(min=smallest) * 2
            error = (out[:, columns] - x[:, columns].float()).abs()
            assert bool((error <= x[:, columns].float().abs() * 2.0**-bits + step * scale).all())


def e4m3(value: float) -> int:
    return int(exact.codes(np.array(value), "e4m3"))


def encoded(layout: CacheLayout, *leading: float) -> tuple[list[int], list[int]]:
    """The first scale and the first data bytes of a row that begins with these columns and is 0 otherwise."""
    row = torch.zeros(1, layout.columns)
    row[0, : len(leading)] = torch.tensor(leading)
    planes = encode(layout, row)
    field = layout.data[0]
    scales = layout.scales_of(field)
    at = scales.offset
    data = planes[field.plane][0, field.offset : field.offset + len(leading)].tolist()
    return planes[scales.plane][0, at : at + scales.itemsize].tolist(), data


def test_documented_bytes_of_ue8m0_v4():
    layout, flash = make("ue8m0_v4"), make("ue8m0_v4", floor_on="scale")
    assert encoded(layout, 0.0) == ([105], [0])  # 2^-22, the next power of two above 1e-4 / 448
    assert encoded(flash, 0.0) == ([114], [0])  # 2^-13, the next above 1e-4
    assert encoded(layout, 448.0, -448.0) == ([127], [0x7E, 0xFE])
    assert encoded(layout, 449.0, 1.0) == ([128], [e4m3(224.5), e4m3(0.5)])
    for k in range(-22, 7):
        assert encoded(layout, 448 * 2.0**k) == ([127 + k], [0x7E])
        assert encoded(layout, np.nextafter(np.float32(448 * 2.0**k), np.float32(1e30)))[0] == [128 + k]


def test_both_floors_of_ue8m0_v4_agree_from_a_magnitude_on():
    layout, flash = make("ue8m0_v4"), make("ue8m0_v4", floor_on="scale")
    magnitudes = ALL_BF16[:0x7F80].float()
    x = torch.zeros(len(magnitudes), layout.columns)
    x[:, 0] = magnitudes
    (_, one), (_, other) = encode(layout, x), encode(flash, x)
    equal = one[:, 0] == other[:, 0]
    assert bool(equal[magnitudes >= 0.0448].all())
    # 1e-4 rounds up to 2^-13, which any scale above 2^-14 does as well.
    assert torch.equal(equal, magnitudes > 448 * 2.0**-14)


def test_documented_bytes_of_other_layouts():
    assert encoded(make("mxfp8_v41"), 0.0) == ([105], [0])
    assert encoded(make("fp8_ds_mla"), 0.0)[0] == [0, 0, 0, 0x39]  # 2^-13 as fp32
    assert encoded(make("fp8_ds_mla", **OLD_GLM), 0.0)[0] == [0, 0, 0x80, 0]  # the smallest normal fp32
    assert encoded(make("fp8_ds_mla", **OLD_GLM), 448.0, 1.0) == ([0, 0, 0x80, 0x3F], [0x7E, 0x38])
    # The smallest e4m3, and the first column in the low half.
    assert encoded(make("nvfp4_v41"), 0.0) == ([1], [0])
    assert encoded(make("nvfp4_v41"), 6.0, -0.5) == ([0x38], [0x97, 0])
    assert encoded(make("nvfp4_v41"), 2688.0, 2688.0) == ([0x7E], [0x77, 0])  # 6 * 448
    assert encoded(make("nvfp4_v41"), 5000.0, 448.0) == ([0x7E], [0x27, 0])  # beyond, it saturates
    assert encoded(make(FNUZ["name"]), 224.0, 240.0)[1] == [e4m3(448 * 14 / 15), 0x7E]


def test_permuted_scales_are_where_the_layout_says():
    layout = make("nvfp4_ds_mla")
    row = torch.zeros(1, 576)
    row[0, :512:16] = 6 * torch.arange(1, 33)
    (plane,) = encode(layout, row)
    for scale in range(32):
        assert int(plane[0, 320 + 8 * (scale & 3) + (scale >> 2)]) == e4m3(scale + 1)
    torch.testing.assert_close(decode(layout, (plane,))[0, :512:16], row[0, :512:16], rtol=2**-4, atol=0)


def test_rope_columns_of_nvfp4_ds_mla_are_e4m3_without_a_scale():
    row = torch.zeros(1, 576)
    row[0, 512:516] = torch.tensor([1.0, -500.0, math.inf, math.nan])
    assert encode(make("nvfp4_ds_mla"), row)[0][0, 256:260].tolist() == [0x38, 0xFE, 0x7E, 0x7F]


@pytest.mark.parametrize(
    ("name", "nan", "negative_zero"),
    [("mxfp8_v41", 0x7F, 0x80), ("fnuz_ds_mla", 0x80, 0x00), ("nvfp4_v41", 0x7, 0x8)],
)
def test_nan_is_left_out_of_amax_and_stored_as_one_byte_and_a_zero_keeps_its_sign(name, nan, negative_zero):
    layout = make(name)
    columns = [448.0, math.nan, -math.nan, -0.0]
    scale, data = encoded(layout, *columns)
    assert scale == encoded(layout, 448.0)[0]
    if name == "nvfp4_v41":
        assert data[:2] == [nan << 4 | 7, negative_zero << 4 | nan]
    else:
        assert data[1:] == [nan, nan, negative_zero]
    assert encoded(layout, math.nan)[0] == encoded(layout, 0.0)[0]


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_an_infinite_tile_has_an_infinite_scale(infinity):
    for name, scale in (("mxfp8_v41", [255]), ("fp8_ds_mla", [0, 0, 0x80, 0x7F])):
        assert encoded(make(name), infinity, 1.0, -1.0) == (scale, [0x7F, 0x00, 0x80])
    # An e4m3 scale saturates, and so do the values.
    assert encoded(make("nvfp4_v41"), infinity, 1.0)[0] == [0x7E]
    assert encoded(make("nvfp4_v41"), infinity, 1.0)[1][0] == (7 if infinity > 0 else 0xF)


@pytest.mark.parametrize("name", ["mxfp8_v41", "fp8_ds_mla", "fnuz_ds_mla", "nvfp4_v41", "nvfp4_ds_mla"])
def test_every_byte_of_data_and_of_scales_decodes_exactly(name):
    layout = make(name)
    field = layout.data[0]
    scales = layout.scales_of(field)
    if scales.dtype == "fp32":
        values = torch.cat([torch.tensor([0.0, -1.5, math.inf, math.nan]), 1.37 * 2.0 ** torch.arange(-126.0, 126.0)])
        stored = values[:, None].view(torch.uint8)
    else:
        stored = torch.arange(256, dtype=torch.uint8)[:, None]
        values = torch.from_numpy(exact.decoded(scales.dtype)).float()
    data = torch.arange(256, dtype=torch.uint8)
    plane = torch.zeros(len(values) * 16, layout.row_bytes, dtype=torch.uint8)
    # Sixteen rows a scale, the same in each tile; a tile holds sixteen of the 256 data bytes.
    at = scales.offset
    plane[:, at : at + scales.nbytes] = stored.repeat(1, scales.count).repeat_interleave(16, 0)
    sixteen = data.reshape(16, 16).repeat(len(values), 1)
    per_tile = scales.tile // (2 if field.dtype == "e2m1" else 1)
    in_tiles = sixteen[:, torch.arange(field.nbytes) % per_tile % 16]
    plane[:, field.offset : field.offset + field.nbytes] = in_tiles
    table = torch.from_numpy(exact.decoded(field.dtype)).float()
    halves = torch.stack((in_tiles & 15, in_tiles >> 4), 2).flatten(1)
    codes = halves if field.dtype == "e2m1" else in_tiles
    wanted = table[codes.long()] * values.repeat_interleave(16)[:, None]
    found = decode(layout, (plane,))[:, field.first_column : field.first_column + field.count]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_unquantised_rows_are_their_own_bytes(dtype):
    values = ALL_BF16 if dtype == "bf16" else ALL_BF16.view(torch.int16).view(torch.float16)
    x = rows_of(values, 576)
    layout = make(dtype)
    (plane,) = encode(layout, x)
    assert torch.equal(plane, x.contiguous().view(torch.uint8))
    torch.testing.assert_close(decode(layout, (plane,)), x.float(), rtol=0, atol=0, equal_nan=True)


@SETTINGS
@given(row=rows(), seed=st.integers(0, 1 << 30))
def test_any_composition_is_encoded_as_its_fields_say(row, seed):
    layout = compose(*row)
    dtype = torch.float16 if any(field.dtype == "fp16" for field in layout.data) else torch.bfloat16
    x = torch.randn(3, layout.columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert_encodes(layout, x, 0.4375 if layout.tensor_scale else None)
    planes = encode(layout, x, 0.4375)
    again = encode(layout, decode(layout, planes, 0.4375), 0.4375)
    scaled = [field for field in layout.fields if isinstance(field, ScalesField)]
    if not scaled:  # a tile's largest value rounds, and its scale may follow
        assert all(torch.equal(one, other) for one, other in zip(planes, again, strict=True))


@SETTINGS
@given(row=rows(), block_size=st.integers(1, 9), pages=st.integers(1, 3), slack=st.integers(0, 3))
def test_what_is_written_is_read_back_and_nothing_else_changes(row, block_size, pages, slack):
    layout = compose(*row)
    width = layout.page_bytes(block_size) + 4 * slack
    cache = torch.full((pages, width), 0xA5, dtype=torch.uint8)
    slots = torch.randperm(pages * block_size, generator=torch.Generator().manual_seed(7))[: block_size + 1]
    x = torch.randn(len(slots), layout.columns, generator=torch.Generator().manual_seed(9)).to(torch.float16)
    write(layout, cache, block_size, slots, x, 2.0)
    wanted = decode(layout, encode(layout, x, 2.0), 2.0)
    assert torch.equal(read(layout, cache, block_size, slots, 2.0), wanted)
    # By hand: token p of a page has its row at p * plane_bytes[0], and a second one behind all of these.
    untouched = torch.ones(pages, width, dtype=torch.bool)
    for slot, token in zip(slots.tolist(), range(len(slots)), strict=True):
        page, place = divmod(slot, block_size)
        begin = 0
        for plane, nbytes in enumerate(layout.plane_bytes):
            at = begin + place * nbytes
            assert torch.equal(cache[page, at : at + nbytes], encode(layout, x[token : token + 1], 2.0)[plane][0])
            untouched[page, at : at + nbytes] = False
            begin += block_size * nbytes
    assert bool((cache[untouched] == 0xA5).all())


def test_slots_outside_the_cache_are_skipped_and_the_later_of_two_equal_ones_stays():
    layout = make("ue8m0_v4")
    cache = torch.zeros(2, layout.page_bytes(3), dtype=torch.uint8)
    x = torch.arange(1.0, 8.0)[:, None].expand(7, 512)
    write(layout, cache, 3, torch.tensor([-1, 5, 6, 1 << 40, 0, 0]), x)
    assert read(layout, cache, 3, torch.arange(6))[:, 0].tolist() == [6.0, 0, 0, 0, 0, 2.0]
    for slot in (-1, 6):
        with pytest.raises(IndexError, match="6 tokens"):
            read(layout, cache, 3, torch.tensor([slot]))


def test_interleaved_rows_may_stand_apart():
    layout = make("mxfp8_v41")
    base = torch.zeros(3, 4, 600, dtype=torch.uint8)
    cache = base[:, :, 16 : 16 + layout.row_bytes]
    write(layout, cache, 4, torch.tensor([7]), torch.ones(1, 512))
    assert bool((base[1, 3, 16 : 16 + 512] == e4m3(1.0 / 2**-8)).all())
    assert torch.equal(read(layout, cache, 4, torch.tensor([7])), torch.ones(1, 512))
    assert int(base.count_nonzero()) == layout.row_bytes


def test_a_cache_of_the_models_dtype_is_taken_as_its_bytes():
    cache = torch.zeros(2, 4, 576, dtype=torch.bfloat16)
    write(make("bf16"), cache, 4, torch.tensor([5]), torch.arange(576)[None].float())
    assert torch.equal(cache[1, 1], torch.arange(576).to(torch.bfloat16))


def test_a_planar_cache_in_three_dimensions_names_page_bases_alone():
    layout = make("ue8m0_v4")
    flat = torch.zeros(3, layout.page_bytes(64), dtype=torch.uint8)
    cache = flat.as_strided((3, 64, layout.row_bytes), (flat.stride(0), layout.row_bytes, 1))
    for view, wanted in zip(planes_of(layout, cache, 64), planes_of(layout, flat, 64), strict=True):
        assert (view.data_ptr(), view.shape, view.stride()) == (wanted.data_ptr(), wanted.shape, wanted.stride())
    data, scales = planes_of(layout, flat[1:], 64)
    assert (data.shape, scales.shape) == ((2, 64, 576), (2, 64, 8))
    assert data.data_ptr() == flat.data_ptr() + 37_440
    assert scales.data_ptr() == data.data_ptr() + 64 * 576


@pytest.mark.parametrize(
    ("shape", "takes"),
    [((2, 37_439), "37440 or more"), ((2, 64, 583), "64, 584"), ((2, 32, 584), "64, 584"), ((37_440,), "37440")],
)
def test_a_cache_that_holds_no_such_pages_is_refused(shape, takes):
    with pytest.raises(ValueError, match=takes):
        planes_of(make("ue8m0_v4"), torch.zeros(shape, dtype=torch.uint8), 64)


def test_planar_rows_that_stand_apart_are_refused():
    cache = torch.zeros(2, 64, 600, dtype=torch.uint8)[:, :, :584]
    with pytest.raises(ValueError, match="600 bytes apart; takes 584"):
        planes_of(make("ue8m0_v4"), cache, 64)


def test_rows_of_other_columns_are_refused():
    with pytest.raises(ValueError, match="got 575 columns; takes 576"):
        encode(make("bf16"), torch.zeros(1, 575))


@pytest.mark.thorough
def test_the_codec_needs_torch_and_nothing_else_of_ours():
    others = {"pydantic", "yaml", "triton", "mlagen.spec"}
    code = f"import mlagen.layout.codec, sys; print(sorted({others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
