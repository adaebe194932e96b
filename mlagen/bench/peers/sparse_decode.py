"""Peers of sparse decode over a paged cache: FlashMLA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from mlagen.bench.families.sparse_decode import Cached, SparseDecodeInputs, SparseDecodeShape
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.libraries import D_C, D_ROPE, FLASH_MLA, FLASH_MLA_MODULES, first_module, pad_heads
from mlagen.bench.rotation import rotated_after
from mlagen.bench.shapes import TENSOR_SCALE
from mlagen.bench.trial import Call, Entrant
from mlagen.layout import CacheLayout
from mlagen.layout.codec import read
from mlagen.verify.call.facts import Facts

KNOWN = {"fp8_ds_mla": D_C + D_ROPE, "ue8m0_v4": D_C}  # layouts, and the columns of a row
INDEX_MULTIPLE = 64  # FlashMLA takes so many indices at a time


class SparseDecodePeer(Protocol):
    """Attention over a cache, of someone else's.

    Attributes:
        name: as reports show it.
    """

    name: str

    def unsupported(self, facts: Facts, layout: CacheLayout, extra: CacheLayout | None) -> str | None:
        """Why it cannot run a package's shapes, in one line; None if it can."""

    def prepare(self, inputs: SparseDecodeInputs) -> Call:
        """A call of one `SparseDecodeInputs`. Raises ImportError where the peer is not there."""


class FlashMlaSparseDecode:
    """FlashMLA from vLLM or its own package; heads and indices are padded, and the plan is made, outside the timing."""

    name = FLASH_MLA

    def unsupported(self, facts: Facts, layout: CacheLayout, extra: CacheLayout | None) -> str | None:
        """It knows two layouts, the same one in both caches."""
        if KNOWN.get(layout.name) != layout.columns or (extra is not None and extra.fields != layout.fields):
            return f"layouts {' and '.join(KNOWN)} only"
        return None if (facts.d_v, facts.dtype) == (512, "bfloat16") else "bf16 and 512 columns of V only"

    def prepare(self, inputs: SparseDecodeInputs) -> Call:
        """Pads q, the sink and the indices; the first call fills the metadata."""
        module = first_module(FLASH_MLA_MODULES)
        heads = inputs.q.shape[2]
        q, sink = pad_heads(inputs.q, inputs.attn_sink)
        metadata, _ = module.get_mla_metadata()
        cache = inputs.main.view(inputs.q.dtype)
        indices = pad_indices(inputs.main.indices)
        options: dict[str, Any] = {"softmax_scale": inputs.sm_scale, "is_fp8_kvcache": True, "indices": indices}
        options |= {"attn_sink": sink, "topk_length": inputs.topk_length}
        if inputs.extra is not None:
            options["extra_k_cache"] = inputs.extra.view(inputs.q.dtype)
            options["extra_indices_in_kvcache"] = pad_indices(inputs.extra.indices)
            options["extra_topk_length"] = inputs.extra_topk_length

        def call() -> torch.Tensor:
            out, _ = module.flash_mla_with_kvcache(q, cache, None, None, inputs.d_v, metadata, **options)
            assert isinstance(out, torch.Tensor)
            return out[:, :, :heads]

        call()
        return call


class FlashMlaRows:
    """FlashMLA's prefill kernel over a cache of one scale as bf16 rows, which are made of it outside the timing.

    The rows that no index of the call names are left out.
    """

    name = f"{FLASH_MLA}, rows of bf16"

    def unsupported(self, facts: Facts, layout: CacheLayout, extra: CacheLayout | None) -> str | None:
        """It is for caches that its decode kernel does not know."""
        if not layout.tensor_scale or extra is not None:
            return "one cache of one scale only"
        if (facts.d_qk, facts.d_v, facts.dtype) != (D_C + D_ROPE, D_C, "bfloat16"):
            return f"bf16 and rows of {D_C} + {D_ROPE} columns only"
        return "calls without lengths only" if facts.length == "required" else None

    def prepare(self, inputs: SparseDecodeInputs) -> Call:
        """Makes the rows, pads q, the sink and the indices."""
        attention = first_module(FLASH_MLA_MODULES).flash_mla_sparse_fwd
        requests, s_q, heads, _ = inputs.q.shape
        q, sink = pad_heads(inputs.q, inputs.attn_sink)
        rows, indices = named_rows(inputs.main)
        arguments = (q.flatten(0, 1), rows[:, None], pad_indices(indices).flatten(0, 1)[:, None], inputs.sm_scale)

        def call() -> torch.Tensor:
            out = attention(*arguments, inputs.d_v, sink)[0]
            assert isinstance(out, torch.Tensor)
            return out.view(requests, s_q, *out.shape[1:])[:, :, :heads]

        return call


def named_rows(cached: Cached) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that indices name, bf16 [rows, columns], and the indices into these: i32, as they were."""
    slots, places = torch.unique(cached.indices.flatten(), return_inverse=True)
    first = int((slots < 0).sum())  # absent ones are -1, the least
    rows = read(cached.layout, cached.pages, cached.block_size, slots[first:].long(), TENSOR_SCALE).bfloat16()
    return rows, (places - first).clamp(min=-1).view_as(cached.indices).int()


def pad_indices(indices: torch.Tensor) -> torch.Tensor:
    """Indices i32 [requests, s_q, count] with absent ones behind them, up to a count that FlashMLA takes."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[2] % INDEX_MULTIPLE), value=-1)


PEERS: tuple[SparseDecodePeer, ...] = (FlashMlaSparseDecode(), FlashMlaRows())


def sparse_decode_peers(
    package: BenchPackage, shape: SparseDecodeShape, inputs: Sequence[SparseDecodeInputs]
) -> Iterator[Entrant[SparseDecodeInputs]]:
    """Others' kernels at a shape of the family; the rotation of the output is a launch behind them."""
    for peer in PEERS:
        prepare = partial(rotated_after, peer.prepare, attrgetter("angles"))
        yield Entrant(peer.name, prepare, peer.unsupported(package.facts, *package.cached))


BENCHMARKS = {"sparse_decode": sparse_decode_peers}
