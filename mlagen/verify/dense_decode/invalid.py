"""Arguments that dense attention over a paged cache must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.checks import pairs
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.dense_decode.facts import DenseDecodeFacts

NAME = "dense_decode"
DECODE = "decode_attention_fwd"
SHORT = {FLASH: NAME, DECODE: "decode"}


def _invalid_flash(known: DenseDecodeFacts) -> Iterator[Invalid]:
    facts = known.facts
    yield Invalid("head_dim_v", "not the spec's", lambda d_v: d_v + 16)
    yield Invalid("is_fp8_kvcache", "not the layout's", lambda given: not given, known.layout.name)
    yield Invalid("num_splits", "a tensor", torch.clone, like="block_table")
    yield Invalid("tile_scheduler_metadata", "None", invalid.constant(None))
    yield from invalid.scale("softmax_scale")
    for argument in ("causal", "is_fp8_kvcache"):
        yield from invalid.flag(argument)
    for name in ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length"):
        yield Invalid(name, "given", torch.clone, "dense", like="block_table")
    yield from invalid.out(facts.d_v, getattr(torch, facts.dtype))


def _invalid_decode(facts: Facts) -> Iterator[Invalid]:
    yield Invalid("v_buffer", "of its own", torch.clone)
    yield Invalid("v_buffer", "other columns", lambda k_buffer: k_buffer[..., 1:], like="k_buffer")
    yield Invalid("page_size", "not the buffer's", lambda size: size + 1)
    yield Invalid("page_size", "0", invalid.constant(0))
    yield Invalid("logit_cap", "not 0", invalid.constant(30.0))
    if facts.softmax_scale is None:
        yield Invalid("sm_scale", "None", invalid.constant(None))
    yield from invalid.scale("sm_scale")
    yield Invalid("o", "dtype float32", torch.Tensor.float)
    yield Invalid("o", "a request short", lambda o: o[1:])
    yield Invalid("lse", "dtype float64", torch.Tensor.double)
    yield Invalid("lse", "missing", invalid.constant(None))


def _invalid(known: DenseDecodeFacts, wrapper: str) -> Iterator[Invalid]:
    flash, layout = wrapper == FLASH, known.layout
    other = torch.float16 if known.facts.dtype == "bfloat16" else torch.bfloat16
    yield from invalid.tensor("q", other, first=True)
    yield Invalid("q", "wider than a row", invalid.wider(8))
    yield from pairs.invalid(known.facts, other)
    if layout.takes_heads:
        yield Invalid("q", "heads that do not fall to KV heads", lambda q: q[..., :3, :])
    if flash:
        yield from invalid.pages("k_cache", layout)
    else:
        yield Invalid("k_buffer", "not a tensor", invalid.constant([1, 2]))
        yield Invalid("k_buffer", "two dimensions", lambda k_buffer: k_buffer[0, 0])
        if layout.tensor_scale:
            yield Invalid("k_scale", "a number", invalid.constant(1.0))
    yield from invalid.tensors(layout)
    for name in ("block_table", "cache_seqlens") if flash else ("req_to_token", "b_seq_len"):
        yield from invalid.tensor(name, torch.int64)
        yield Invalid(name, "a request too many", invalid.longer)
        yield Invalid(name, "missing", invalid.constant(None))
    if known.window is not None:
        yield Invalid("window", "0", invalid.constant(0))
        yield Invalid("window", "a float", invalid.constant(5.0))
    yield from invalid.output_scale()
    yield Invalid("workspace", "too small", invalid.zeros(16), like="q")
    yield Invalid("workspace", "dtype float16", invalid.zeros(1 << 20, dtype=torch.float16), like="q")
    yield from _invalid_flash(known) if flash else _invalid_decode(known.facts)


def refused(known: DenseDecodeFacts) -> Iterator[RefusedCase]:
    """A case for each argument of each wrapper that is invalid under the spec."""
    for wrapper, short in SHORT.items():
        if wrapper in known.facts.wrappers:
            yield from invalid.refused_cases(NAME, {wrapper: short}, _invalid(known, wrapper))
