"""A cache in memory, as writers and gathers get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mlagen.layout import CacheLayout, codec
from mlagen.verify.call.memory import ELEMENTS, GUARD, allocate
from mlagen.verify.call.patterns import INT64
from mlagen.verify.paged.side import Side

TENSOR_SCALE = 0.37
FAR_PAGES = 60_000
POISON = 0xA5  # bytes around a cache


@dataclass(frozen=True)
class Pages:
    """How a cache lies in memory.

    Attributes:
        block_size: tokens a page.
        form: "rows" [pages, block_size, row]; "pages" [pages, bytes of a page].
        dtype: torch's name of the dtype of a quantised cache.
        page_gap: further bytes a page.
        row_gap: further bytes a row, of layouts with rows that may lie apart.
        offset: by how many of a row's widest values it begins off 16 bytes.
        far: it is longer than 2^31 bytes, and only its last pages are used.
        single: it has one page.
        tight: pages lie end to end, also where the layout rounds them up.
    """

    block_size: int = 64
    form: str = "rows"
    dtype: str = "uint8"
    page_gap: int = 0
    row_gap: int = 0
    offset: int = 0
    far: bool = False
    single: bool = False
    tight: bool = False


PAGES = Pages()


def page_cases(layout: CacheLayout) -> Iterator[tuple[str, str, Pages]]:
    """Yield places of a cache in memory that a writer of rows must handle: name, promise, pages."""
    for size in (1, 53, 256):
        yield f"block size {size}", "any page size", Pages(size)
    yield "page stride", "pages may lie apart; the bytes between them stay", Pages(53, page_gap=160)
    if not layout.planar:
        yield "row stride", "rows may lie apart; the bytes between them stay", Pages(53, row_gap=48)
    yield "odd cache", "a cache may begin off 16 bytes", Pages(53, page_gap=8, offset=1)
    yield "far pages", "page offsets are 64 bits wide", Pages(far=True)


@dataclass(frozen=True)
class CacheMemory:
    """A cache in its buffer.

    Attributes:
        tensor: the tensor for a wrapper.
        buffer: uint8, all bytes between and around the pages.
        pages: how many there are.
        others: tensors besides the cache tensor, by name, in the same buffer.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor
    pages: int
    others: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The same cache tensor, of bytes or of the model's dtype, in another buffer of this size."""
        return _in_buffer(self.tensor, buffer)

    def pages_in(self, buffer: torch.Tensor) -> codec.Pages:
        """The same pages in another buffer of this size, as the codec takes them."""
        if not self.others:
            return self.in_buffer(buffer)
        return tuple(_in_buffer(one, buffer) for one in (self.tensor, *self.others.values()))


def _in_buffer(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.dtype.itemsize > 1 else torch.uint8
    return buffer.view(dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _torch_dtype(side: Side, name: str) -> torch.dtype:
    """The dtype of a cache."""
    if not side.layout.quantised:
        return side.dtype
    eight = torch.float8_e4m3fnuz if side.fnuz else torch.float8_e4m3fn
    return {"uint8": torch.uint8, "int8": torch.int8, "float8": eight}[name]


def _far_pages(page: int) -> int:
    """Pages of so many bytes that reach past 2^31 of them."""
    return max(FAR_PAGES, 2**31 // page + 1000)


def random_pages(side: Side, pages: Pages, count: int, device: str, generator: torch.Generator) -> CacheMemory:
    """A cache of random bytes; one that is far, of memory as it is found."""
    layout, size = side.layout.parts[0], pages.block_size
    row = layout.row_bytes + pages.row_gap
    page = pages.page_gap + (size * row if pages.row_gap or pages.tight else layout.page_bytes(size))
    count = _far_pages(page) if pages.far else 1 if pages.single else count
    offset = GUARD + pages.offset * side.alignment
    end = offset + count * page
    begins = []
    for part in side.layout.parts[1:]:  # further tensors follow, with pages of their own
        begins.append(-(-(end + GUARD) // 16) * 16 + pages.offset * part.widest)
        end = begins[-1] + count * _page_bytes(part, pages, page)
    nbytes = -(-(end + GUARD) // 8) * 8
    buffer = allocate(nbytes, torch.uint8, device, None if pages.far else POISON)
    if not pages.far:
        buffer.copy_(torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8))
    unit = side.unit
    shape = (count, page // unit) if pages.form == "pages" else (count, size, layout.row_bytes // unit)
    stride = (page // unit, 1) if pages.form == "pages" else (7 if pages.single else page // unit, row // unit, 1)
    tensor = buffer if side.layout.quantised else buffer.view(side.dtype)
    tensor = tensor.as_strided(shape, stride, offset // unit).view(_torch_dtype(side, pages.dtype))
    others = {}
    for part, begin in zip(side.layout.parts[1:], begins, strict=True):
        elements = buffer.view(ELEMENTS[part.element])
        unit, strides = elements.element_size(), (_page_bytes(part, pages, page), part.row_bytes + pages.row_gap)
        shape = (count, size, part.row_bytes // unit)
        others[part.name] = elements.as_strided(shape, (strides[0] // unit, strides[1] // unit, 1), begin // unit)
    return CacheMemory(tensor, buffer, count, others)


def _page_bytes(part: CacheLayout, pages: Pages, page: int) -> int:
    """Bytes from page to page of a tensor besides the cache tensor. The cache tensor's lie `page` bytes apart."""
    if pages.far:  # past 2^31 elements
        return page * ELEMENTS[part.element].itemsize
    return pages.page_gap + pages.block_size * (part.row_bytes + pages.row_gap)


class HasSlots(Protocol):
    """A case with a cache and a pattern of slots."""

    @property
    def pages(self) -> Pages:
        """How the cache lies in memory."""

    @property
    def slots(self) -> str:
        """The pattern."""


def draw_slots(case: HasSlots, tokens: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """slot_mapping i64 of a pattern: different slots, in no order; of a far cache its last."""
    slots = torch.randperm(min(count, 2 * tokens + 64), generator=generator)[:tokens]
    if case.pages.far:
        slots = count - 1 - slots
        slots[::3] = torch.arange(len(slots[::3]))
    if case.slots == "negative":
        slots[::3] = -1
        slots[1::6] = INT64.min
    elif case.slots == "beyond":
        slots[::3] = count
        slots[1::6] = INT64.max
        slots[4::12] = 2**32 + torch.arange(len(slots[4::12]))
    elif case.slots == "shorter":
        slots = slots[: tokens // 2]
    elif case.slots == "none":
        slots = slots[:0]
    return slots


def alias(layout: CacheLayout) -> str:
    """vLLM's kv_cache_dtype of a layout."""
    if not layout.quantised:
        return "auto"
    return {"fp8_per_tensor": "fp8"}.get(layout.name, layout.name)


def scale_argument(side: Side, device: str) -> dict[str, torch.Tensor]:
    """The scale of a tensor as an argument, where the layout has one."""
    return {"scale": torch.tensor([TENSOR_SCALE], device=device)} if side.layout.tensor_scale else {}
