"""Sizes and inputs that families share: heads, indices, rotations of input sets, and paged caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.layout import CacheLayout
from mlagen.layout.codec import encode, planes_of

RANK_HEADS = (64, 16)  # heads a rank holds under tensor parallelism, besides the model's own
L2_MULTIPLE = 2  # rotating inputs touch this many times the L2, so that none is left there at its next turn
MOST_SETS = 64
MOST_BATCH_SETS = 1024  # so that even 128 tokens a call exceed L2 together
INDEX_CHUNK = 1 << 28  # random numbers drawn at a time
TOKENS = ((1, 1), (128, 1), (4096, 1), (32768, 1), (32768, 8))  # of a batch, and the requests they are of
BLOCK_SIZE = 64  # tokens a page where the spec names none
TENSOR_SCALE = 2.0**-5  # of layouts with one scale a tensor: standard normal values are far from the largest e4m3
FILL_TOKENS = 1 << 17  # tokens encoded at a time


def default_heads(num_heads: int) -> list[int]:
    """Head counts measured for a model of `num_heads`, most first."""
    return sorted({num_heads, *(heads for heads in RANK_HEADS if heads < num_heads)}, reverse=True)


def make_indices(
    tokens: int, topk: int, s_kv: int, device: torch.device | str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random indices i32 [tokens, topk]: distinct rows, spread evenly, in no order; -1 past s_kv of them."""
    rows = min(topk, s_kv)
    step = max(1, INDEX_CHUNK // s_kv)
    indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    for first in range(0, tokens, step):
        count = min(step, tokens - first)
        keys = torch.rand(count, s_kv, device=device, generator=generator)
        indices[first : first + count, :rows] = keys.topk(rows, dim=1).indices
    return indices


def sets_needed(touched: int, l2_bytes: int, most: int = MOST_SETS) -> int:
    """Input sets that a rotation takes if one call touches `touched` bytes; at least 2, at most `most`."""
    return max(2, min(most, math.ceil(L2_MULTIPLE * l2_bytes / touched)))


@dataclass(frozen=True)
class Batch:
    """Sizes of one call of a kernel that moves cached tokens or indices.

    Attributes:
        family: `cache`, `gather` or `index`.
        kind: the wrapper.
        tokens: of the call.
        requests: that they are of, in equal parts.
        topk: indices a token; 0 where there are none.
    """

    family: str
    kind: str
    tokens: int
    requests: int
    topk: int = 0

    def __str__(self) -> str:
        requests = "1 request" if self.requests == 1 else f"{self.requests} requests"
        return f"{self.kind} {self.tokens}, {requests}" + (f", topk {self.topk}" if self.topk else "")

    @property
    def tokens_each(self) -> int:
        """Tokens of a request."""
        return self.tokens // self.requests

    def pages_each(self, block_size: int) -> int:
        """Pages that the tokens of a request fill."""
        return -(-self.tokens_each // block_size)


def batches(family: str, kind: str, topk: Sequence[int] = (0,)) -> list[Batch]:
    """The batches that a wrapper is measured at."""
    return [Batch(family, kind, tokens, requests, each) for each in topk for tokens, requests in TOKENS]


def rotation(moved: int, l2_bytes: int) -> int:
    """Input sets of a call that moves so many bytes."""
    return sets_needed(moved, l2_bytes, MOST_BATCH_SETS)


def shuffled_pages(*shape: int, device: torch.device) -> torch.Tensor:
    """Numbers of pages in no order, each once, i32 of that shape."""
    count = torch.Size(shape).numel()
    return torch.randperm(count, device=device, dtype=torch.int32).view(shape)


def slots_of(pages: torch.Tensor, tokens: int, block_size: int) -> torch.Tensor:
    """Slots i64 [..., tokens] of the first tokens of requests with pages [..., any]."""
    position = torch.arange(tokens, device=pages.device)
    return pages[..., position // block_size].long() * block_size + position % block_size


def empty_cache(layout: CacheLayout, pages: int, block_size: int, device: torch.device) -> torch.Tensor:
    """A cache of zeros, uint8 [pages, page_bytes]."""
    return torch.zeros(pages, layout.page_bytes(block_size), dtype=torch.uint8, device=device)


def fill(layout: CacheLayout, cache: torch.Tensor, block_size: int) -> None:
    """Fills a cache [pages, page_bytes] with standard normal rows, as the reference encodes them."""
    views = planes_of(layout, cache, block_size)
    step = max(1, FILL_TOKENS // block_size)
    for first in range(0, cache.shape[0], step):
        pages = min(step, cache.shape[0] - first)
        rows = torch.randn(pages * block_size, layout.columns, device=cache.device)
        for view, plane in zip(views, encode(layout, rows, TENSOR_SCALE), strict=True):
            view[first : first + pages] = plane.view(pages, block_size, -1)


def rows_of(layout: CacheLayout, cache: torch.Tensor, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A cache [pages, page_bytes] as callers of vLLM hold it: [pages, block_size, row], of bytes where it is quantised.

    Of a page-planar layout rows are nominal: they say where a page begins, and how large it is.
    """
    page = cache.stride(0)
    rows = cache.as_strided((cache.shape[0], block_size, layout.row_bytes), (page, layout.row_bytes, 1))
    return rows if layout.quantised else rows.view(dtype)
