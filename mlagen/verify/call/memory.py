"""Where tensors lie in memory: views in buffers that are poison elsewhere, and caches of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mlagen.layout import CacheLayout, codec
from mlagen.verify.call.case import CaseSkippedError
from mlagen.verify.call.facts import Facts

NAN = float("nan")
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "u8": torch.uint8}
GUARD = 4096  # elements of poison before and after a buffer: a KV row or two of it is read where a mask is missing
FAR_STRIDE = 2**30 + 8  # elements; twice this is past an int32, and it keeps 16-byte alignment
ODD_STRIDE = 7
TWICE_NAN = 0x7FC07FC0  # two NaN of bf16, which are one of fp32
GARBAGE = 2_147_480_000  # entries that engines leave in parts of a block table that nobody reads


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements lie.

    Attributes:
        offset: how many elements it begins off alignment.
        row_gap: poisoned elements after each run of the last dimension.
        page_gap: further ones after each entry of the first dimension.
        swapped: the first two dimensions are swapped in memory.
        far: entries of the first dimension lie FAR_STRIDE apart.
    """

    offset: int = 0
    row_gap: int = 0
    page_gap: int = 0
    swapped: bool = False
    far: bool = False


LAYOUTS = {
    "contiguous": Layout(),
    "slice": Layout(row_gap=24, page_gap=64),
    "odd": Layout(offset=1, row_gap=3, page_gap=5),
    "transposed": Layout(swapped=True),
    "far": Layout(far=True),
}


@dataclass(frozen=True)
class Placed:
    """A view and the buffer around it. Elements outside the view are poison.

    Attributes:
        view: the tensor a wrapper gets.
        buffer: 1-D, all elements between and around the view's.
        before: the buffer as it was when placed; None where it is too large to copy.
    """

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor | None

    def changed(self) -> bool:
        """Whether any element of the buffer has other bits than when it was placed."""
        return self.before is not None and not torch.equal(bits(self.buffer), bits(self.before))

    def spilled(self) -> bool:
        """Whether any element outside the view has other bits; the view's own bits are restored."""
        if self.before is None:
            return False
        self.view.copy_(self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()))
        return self.changed()


def seeded(seed: int) -> torch.Generator:
    """A generator of torch's default device: inside `torch.device("cuda")` the tensors of a call are drawn there."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of its size, so that NaN equals NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def allocate(elements: int, dtype: torch.dtype, device: str, fill: float | int | None) -> torch.Tensor:
    """A buffer; with `fill` None its pages are touched only when used.

    Raises:
        CaseSkippedError: the device has not that much memory.
    """
    try:
        if fill is None:
            return torch.empty(elements, dtype=dtype, device=device)
        return torch.full((elements,), fill, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        gib = elements * dtype.itemsize / 2**30
        raise CaseSkippedError(f"{gib:.1f} GiB are not to be had on {device}") from error


def place_workspace(floats: int, device: str) -> Placed:
    """A workspace [1, 1, floats]. Its bits are NaN in fp32 and in either half."""
    values = torch.full((1, 1, floats), TWICE_NAN, dtype=torch.int32, device=device).view(torch.float32)
    return place(values, LAYOUTS["contiguous"], NAN)


def is_wholly_used(workspace: torch.Tensor, facts: Facts) -> bool:
    """Whether the splits of a call wrote each float of `place_workspace`'s but those that pad rounded rows to 16 bytes.

    Bits tell, not NaN: a last chunk's statistics lie where earlier ones had two halves, as which a float may be NaN.
    """
    untouched = workspace.view(torch.int32) == TWICE_NAN
    floats, padded, stats = facts.d_v, facts.d_v, 2  # of an accumulator; its maximum and sum
    if facts.partials != "fp32":
        floats, padded = -(-facts.d_v // 2), -(-facts.d_v // 8) * 4
    if facts.partials == "fp16":
        stats = 3  # and its power of two
    rows = len(workspace) // (padded + stats)
    accumulators = untouched[: rows * padded].view(rows, padded)[:, :floats]
    return not bool(accumulators.any() | untouched[rows * padded :].any())


def idle_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides, odd in each dimension of one place: such a stride leads nowhere."""
    return tuple(ODD_STRIDE if places == 1 else stride for places, stride in zip(shape, strides, strict=True))


def place(values: torch.Tensor, layout: Layout, fill: float | int) -> Placed:
    """`values`, of two or three dimensions, laid out in a buffer filled with `fill`; the last one is contiguous."""
    shape = values.shape
    order = list(range(values.dim()))
    if layout.swapped:
        order[:2] = order[1::-1]
    strides = [0] * values.dim()
    extent = 1
    for dim in reversed(order):
        strides[dim] = extent
        extent *= max(shape[dim], 1)
        if dim == order[-1]:
            extent += layout.row_gap
        if dim == order[1] and values.dim() > 2:
            extent += layout.page_gap
    if layout.far:
        strides[0] = FAR_STRIDE
        extent = FAR_STRIDE * max(shape[0] - 1, 0) + extent
    elements = 2 * GUARD + layout.offset + extent
    buffer = allocate(elements, values.dtype, str(values.device), None if layout.far else fill)
    view = buffer.as_strided(shape, strides, GUARD + layout.offset)
    view.copy_(values)
    return Placed(view, buffer, None if layout.far else buffer.clone())


def place_vector(values: torch.Tensor, fill: float | int) -> Placed:
    """A vector in a buffer of `fill`."""
    placed = place(values[None], LAYOUTS["contiguous"], fill)
    return Placed(placed.view[0], placed.buffer, placed.before)


def unplaced(tensor: torch.Tensor) -> Placed:
    """A tensor that is its own buffer."""
    return Placed(tensor, tensor, tensor.clone())


def empty_pages(
    layout: CacheLayout, shape: tuple[int, int, int], memory: str, dtype: torch.dtype, poison: int, device: str
) -> Placed:
    """A cache [pages, block_size, heads, row] of poison: bytes, or values of `dtype` where it is not quantised.

    Args:
        layout: of a row.
        shape: pages, tokens a page, and heads.
        memory: "end to end", "page gap", "row gap", "head gap", "heads first", "odd" (as little aligned as may be),
            "tight" (end to end, also where the layout rounds pages up), "idle" (odd strides of dimensions of one
            place), "odd beside" (only tensors besides the cache tensor are "odd") or "far".
        dtype: of an unquantised cache.
        poison: every byte.
        device: device of the memory.
    """
    pages, size, heads = shape
    unit = 1 if layout.quantised else dtype.itemsize
    row = layout.row_bytes if layout.quantised else layout.columns or layout.row_bytes // unit
    least = max(one.itemsize for one in layout.fields) // unit  # elements; rows may begin at multiples of it
    odd = least if memory == "odd" and not layout.planar else 0
    head_stride = row + {"head gap": 16 * least}.get(memory, odd)
    row_stride = heads * head_stride + {"row gap": 48}.get(memory, 0)
    if memory == "heads first":
        row_stride, head_stride = row, size * row
    rounded = layout.planar and memory != "tight"
    page_stride = -(-layout.page_bytes(size) // unit) if rounded else size * row_stride
    if memory == "heads first":
        page_stride = heads * head_stride
    page_stride += {"page gap": 128, "odd": 3 * least}.get(memory, 0)
    offset = GUARD + (least if memory == "odd" else 0)
    last_page = page_stride
    far = memory == "far"
    if far:
        page_stride = FAR_STRIDE + 8
    elements = offset + max(pages - 1, 0) * page_stride + last_page + GUARD
    lazy = far and device == "cpu"
    buffer = allocate(elements * unit, torch.uint8, device, None if lazy else poison)
    buffer = buffer if layout.quantised else buffer.view(dtype)
    sizes, strides = (*shape, row), (page_stride, row_stride, head_stride, 1)
    view = buffer.as_strided(sizes, idle_strides(sizes, strides) if memory == "idle" else strides, offset)
    if lazy:
        view.view(torch.uint8).fill_(poison)
    return Placed(view, buffer, None)


def empty_tensors(
    layout: CacheLayout, shape: tuple[int, int], memory: str, poison: int, device: str
) -> dict[str, Placed]:
    """The tensors [pages, block_size, row] of poison besides the cache tensor, by name; see `empty_pages`."""
    found = {}
    for part in layout.parts[1:]:
        dtype = ELEMENTS[part.element]
        placed = empty_pages(part, (*shape, 1), "odd" if memory == "odd beside" else memory, dtype, poison, device)
        found[part.name] = replace(placed, view=placed.view[:, :, 0])
    return found


def every_tensor(cache: torch.Tensor, others: Mapping[str, torch.Tensor]) -> codec.Pages:
    """A cache [pages, block_size, row] in bytes, as the codec takes it: with its further tensors if there are any."""
    own = cache.view(torch.uint8)
    return (own, *(one.view(torch.uint8) for one in others.values())) if others else own
