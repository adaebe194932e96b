"""Encodes and decodes cached tokens in plain torch: the reference of writers, gathers and attention.

No tiling, no kernel, one step of the maths a line. Needs torch and nothing else besides the layout.
"""

from __future__ import annotations

import hashlib
import itertools

import torch

from mlagen.layout.layout import LARGEST, CacheLayout, DataField, ScalesField

FLOAT = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
NAN_BYTE = {"e4m3": 0x7F, "e4m3fnuz": 0x80}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Pages = torch.Tensor | tuple[torch.Tensor, ...]  # of a cache, or of each of its tensors
GOLDEN_TENSOR_SCALE = 0.4375  # of golden pages: 7 / 16, so that divisions round


def encode(
    layout: CacheLayout, rows: torch.Tensor, tensor_scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Encode rows as writers store them.

    Args:
        layout: where each byte is.
        rows: [T, columns] bf16, fp16 or fp32.
        tensor_scale: divisor of values in fields with one scale per tensor.

    Returns:
        For each plane its bytes, [T, plane_bytes[plane]] uint8.
    """
    tokens = rows.shape[0]
    _check_columns(layout, rows.shape[1])
    planes = tuple(torch.zeros(tokens, width, dtype=torch.uint8, device=rows.device) for width in layout.plane_bytes)
    for field in layout.data:
        x = rows[:, field.first_column : field.first_column + field.count]
        scales = layout.scales_of(field)
        if scales:
            stored, scale = _tile_scales(x.float(), field, scales)
            order = [scales.position(number) for number in range(scales.count)]
            in_place = torch.empty_like(stored)
            in_place[:, order] = stored
            end = scales.offset + scales.nbytes
            planes[scales.plane][:, scales.offset : end] = in_place.reshape(tokens, scales.nbytes)
            x = x.float() / scale.repeat_interleave(scales.tile, 1)[:, : field.count]
        elif field.tensor_scale:
            x = x.float() / _tensor_scale(tensor_scale, rows.device)
        planes[field.plane][:, field.offset : field.offset + field.nbytes] = _to_bytes(x, field.dtype)
    return planes


def decode(
    layout: CacheLayout, planes: tuple[torch.Tensor, ...], tensor_scale: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Decode rows as readers do: value times scale, in fp32.

    Args:
        layout: where each byte is.
        planes: for each plane its bytes, [T, plane_bytes[plane]] uint8.
        tensor_scale: factor of values in fields with one scale per tensor.

    Returns:
        [T, columns] fp32.
    """
    found = []
    for field in layout.data:
        x = _from_bytes(planes[field.plane][:, field.offset : field.offset + field.nbytes], field.dtype)
        scales = layout.scales_of(field)
        if scales:
            stored = planes[scales.plane][:, scales.offset : scales.offset + scales.nbytes]
            order = [scales.position(number) for number in range(scales.count)]
            scale = _from_bytes(stored, scales.dtype)[:, order]
            x = x * scale.repeat_interleave(scales.tile, 1)[:, : field.count]
        elif field.tensor_scale:
            x = x * _tensor_scale(tensor_scale, x.device)
        found.append(x)
    return torch.cat(found, 1)


def planes_of(layout: CacheLayout, pages: Pages, block_size: int) -> tuple[torch.Tensor, ...]:
    """Return views of a cache, one per plane.

    Args:
        layout: where each byte is.
        pages: [num_pages, at least page_bytes] uint8, any page stride; or [num_pages, block_size, row] of any dtype,
            with row_bytes per row. Rows may have any stride; in a page-planar layout they are end to end, and the
            tensor's rows are not the layout's. Of a layout with several tensors, a tuple of such pages of each.
        block_size: tokens per page.

    Returns:
        For each plane [num_pages, block_size, plane_bytes[plane]] uint8, sharing memory with `pages`.

    Raises:
        ValueError: `pages` cannot hold such pages.
    """
    if isinstance(pages, tuple):
        parts = zip(layout.parts, pages, strict=True)
        return tuple(view for part, one in parts for view in planes_of(part, one, block_size))
    cache = pages.view(torch.uint8)
    if cache.dim() == 3:
        if cache.shape[1] != block_size or cache.shape[2] != layout.row_bytes:
            raise ValueError(
                f"pages: got {list(cache.shape)} bytes; takes [num_pages, {block_size}, {layout.row_bytes}]"
            )
        if not layout.planar:
            return (cache,)
        if block_size > 1 and cache.stride(1) != layout.row_bytes:
            raise ValueError(f"pages: got rows {cache.stride(1)} bytes apart; takes {layout.row_bytes}: {layout.name}")
    elif cache.dim() != 2 or cache.shape[1] < layout.page_bytes(block_size):
        raise ValueError(
            f"pages: got {list(cache.shape)} bytes; takes [num_pages, {layout.page_bytes(block_size)} or more]"
        )
    views = []
    offset = cache.storage_offset()
    for width in layout.plane_bytes:
        shape = (cache.shape[0], block_size, width)
        views.append(cache.as_strided(shape, (cache.stride(0), width, 1), offset))
        offset += block_size * width
    return tuple(views)


def parts_of(layout: CacheLayout, pages: torch.Tensor, block_size: int) -> Pages:
    """Return views of pages [num_pages, page_bytes] that hold a page of each tensor in turn, one per tensor."""
    if not layout.tensors:
        return pages
    sizes = [part.page_bytes(block_size) for part in layout.parts]
    return tuple(pages[:, end - nbytes : end] for nbytes, end in zip(sizes, itertools.accumulate(sizes), strict=True))


def write(
    layout: CacheLayout,
    cache: Pages,
    block_size: int,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    tensor_scale: float | torch.Tensor | None = None,
) -> None:
    """Encodes rows into a cache, in place.

    Args:
        layout: where each byte is.
        cache: pages, as `planes_of` takes them.
        block_size: tokens a page.
        slot_mapping: [N] integers, page * block_size + position; a slot outside the cache is skipped, and of two
            equal ones the later stays.
        rows: [at least N, columns] bf16, fp16 or fp32.
        tensor_scale: see `encode`.
    """
    views = planes_of(layout, cache, block_size)
    slots = slot_mapping.tolist()
    last = {slot: token for token, slot in enumerate(slots) if 0 <= slot < len(views[0]) * block_size}
    where = torch.tensor(list(last), dtype=torch.int64, device=views[0].device)
    tokens = torch.tensor(list(last.values()), dtype=torch.int64, device=rows.device)
    for view, plane in zip(views, encode(layout, rows[tokens], tensor_scale), strict=True):
        view[where // block_size, where % block_size] = plane.to(view.device)


def read(
    layout: CacheLayout,
    cache: Pages,
    block_size: int,
    slots: torch.Tensor,
    tensor_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Decodes rows of a cache.

    Args:
        layout: where each byte is.
        cache: pages, as `planes_of` takes them.
        block_size: tokens a page.
        slots: [N] integers, page * block_size + position.
        tensor_scale: see `decode`.

    Returns:
        [N, columns] fp32.

    Raises:
        IndexError: a slot lies outside the cache.
    """
    where = slots.to(torch.int64)
    views = planes_of(layout, cache, block_size)
    end = len(views[0]) * block_size
    if bool(((where < 0) | (where >= end)).any()):
        raise IndexError(f"slots: got one outside the cache's {end} tokens")
    return decode(layout, tuple(view[where // block_size, where % block_size] for view in views), tensor_scale)


def golden_rows(tokens: int, columns: int) -> torch.Tensor:
    """Return the rows of a golden page, made from integers only, so that any language can make them.

    Column l of token t is v * 2^k. With all products modulo 2^32, h = (1000003 * t + l) * 2654435761,
    h = (h ^ (h >> 16)) * 73244475 and v = (h >> 23) - 256. With c = (t + l // 128) % 8, the value is 0 where c is 0,
    and k is -24 where c is 1 (below every floor), 7 where c is 2, -14 where c is 3, and -7 elsewhere.
    bf16 and fp16 hold all of them.

    Returns:
        [tokens, columns] fp32.
    """
    t = torch.arange(tokens)[:, None]
    column = torch.arange(columns)[None, :]
    h = (1000003 * t + column) * 2654435761 % 2**32
    h = (h ^ (h >> 16)) * 73244475 % 2**32
    v = (h >> 23) - 256
    kinds = torch.tensor([0.0, 2.0**-24, 2.0**7, 2.0**-14, 2.0**-7, 2.0**-7, 2.0**-7, 2.0**-7])
    rows = v.float() * kinds[(t + column // 128) % 8]
    return torch.where(rows == 0, torch.zeros(()), rows)


def golden_page(layout: CacheLayout, block_size: int = 64) -> torch.Tensor:
    """A page of `golden_rows`, token t at position t; a scale a tensor is GOLDEN_TENSOR_SCALE.

    Returns:
        [page_bytes] uint8; bytes that hold nothing are 0. Of a layout with several tensors, a page of each in turn.
    """
    page = torch.zeros(1, layout.page_bytes(block_size), dtype=torch.uint8)
    rows = golden_rows(block_size, layout.columns)
    write(layout, parts_of(layout, page, block_size), block_size, torch.arange(block_size), rows, GOLDEN_TENSOR_SCALE)
    return page[0]


def page_sha256(page: torch.Tensor) -> str:
    """Sha256 of a page's bytes, in hex."""
    return hashlib.sha256(bytes(page.tolist())).hexdigest()


def _check_columns(layout: CacheLayout, columns: int) -> None:
    if columns != layout.columns:
        raise ValueError(f"rows: got {columns} columns; takes {layout.columns}: {layout.name}")


def _tensor_scale(scale: float | torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if scale is None:
        raise ValueError("tensor_scale: got None; takes a number: this layout has one scale a tensor")
    return torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(())


def _tile_scales(x: torch.Tensor, field: DataField, scales: ScalesField) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of fp32 rows: as stored, [T, count, itemsize] uint8, and the values that readers will see, [T, count]."""
    rule = scales.rule
    magnitude = torch.where(x.isnan(), 0.0, x.abs())
    magnitude = torch.nn.functional.pad(magnitude, (0, scales.count * scales.tile - field.count))
    amax = magnitude.reshape(x.shape[0], scales.count, scales.tile).amax(2)
    floor = torch.tensor(rule.floor, dtype=torch.float32, device=x.device)
    divisor = torch.tensor(rule.divisor, dtype=torch.float32, device=x.device)
    s = torch.maximum(amax, floor) / divisor if rule.floor_on == "amax" else torch.maximum(amax / divisor, floor)
    if scales.dtype == "e4m3":
        stored = _to_bytes(s, "e4m3")
    else:
        exponent = _ceil_log2(s) + 127
        if scales.dtype == "ue8m0":
            stored = exponent.clamp(0, 255).to(torch.uint8)
        elif rule.rounding == "power_of_two":
            stored = _to_bytes(_power_of_two(exponent), "fp32")
        else:
            stored = _to_bytes(s, "fp32")
    stored = stored.reshape(x.shape[0], scales.count, scales.itemsize)
    return stored, _from_bytes(stored.flatten(1), scales.dtype)


def _ceil_log2(s: torch.Tensor) -> torch.Tensor:
    """Exponent of the next power of two, from the bits of normal fp32 numbers; infinity gives 128."""
    bits = s.view(torch.int32)
    return ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).int() - 127


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """2^(biased - 127) in fp32: 0 gives 2^-127, a subnormal, and 255 infinity."""
    bits = torch.where(biased == 0, torch.full_like(biased, 0x400000), biased << 23)
    return bits.int().view(torch.float32)


def _to_bytes(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Values [T, N] to bytes, rounded to nearest even and, where quantised, clamped to the largest finite value."""
    if dtype == "e2m1":
        codes = _e2m1_codes(x.float())
        return codes[:, ::2] | codes[:, 1::2] << 4
    if dtype in NAN_BYTE:
        y = x.float()
        stored = y.clamp(-LARGEST[dtype], LARGEST[dtype]).to(FLOAT[dtype]).view(torch.uint8)
        return torch.where(y.isnan(), torch.tensor(NAN_BYTE[dtype], dtype=torch.uint8, device=x.device), stored)
    return x.to(FLOAT[dtype]).contiguous().view(torch.uint8)


def _from_bytes(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    """Bytes [T, N * itemsize] to fp32 values."""
    if dtype == "e2m1":
        codes = torch.stack((stored & 15, stored >> 4), 2).flatten(1).long()
        values = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=stored.device)
        return values[codes]
    if dtype == "ue8m0":
        return _power_of_two(stored.int())
    return stored.contiguous().view(FLOAT[dtype]).float()


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 of fp32 values: nearest, ties to the even code, NaN to +6."""
    y = torch.where(x.isnan(), torch.tensor(LARGEST["e2m1"], device=x.device), x)
    codes = torch.zeros_like(y, dtype=torch.uint8)
    for code, (below, above) in enumerate(itertools.pairwise(E2M1_VALUES), 1):
        middle = (below + above) / 2
        codes += y.abs() >= middle if code % 2 == 0 else y.abs() > middle
    return codes | torch.signbit(y).to(torch.uint8) << 3
