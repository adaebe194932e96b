"""Arguments that sparse attention over a paged cache must refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.checks import out_rope, pairs, quantised
from mlagen.verify.checks.decode import FLASH
from mlagen.verify.sparse_decode.facts import CacheFacts

NAME = "sparse_decode"


def _invalid_optional(known: CacheFacts) -> Iterator[Invalid]:
    facts = known.facts
    if facts.sink == "none":
        yield Invalid("attn_sink", "given to a spec without", invalid.zeros(4), like="q")
    else:
        heads = facts.whole_groups(4)
        yield Invalid("attn_sink", "a head too many", invalid.zeros(heads + 1), like="q")
        yield Invalid("attn_sink", "dtype float64", invalid.zeros(heads, dtype=torch.float64), like="q")
    if facts.sink == "required":
        yield Invalid("attn_sink", "missing", invalid.constant(None))
    for name in ("topk_length", "extra_topk_length")[: len(known.layouts)]:
        if facts.length == "none":
            yield Invalid(name, "given to a spec without", invalid.zeros(2, dtype=torch.int32), like="q")
            continue
        yield Invalid(name, "a request too many", invalid.zeros(3, dtype=torch.int32), like="q")
        yield Invalid(name, "dtype int64", invalid.zeros(2, dtype=torch.int64), like="q")
        if facts.length == "required":
            yield Invalid(name, "missing", invalid.constant(None))


def _invalid(known: CacheFacts) -> Iterator[Invalid]:
    facts, layout = known.facts, known.layouts[0]
    other = torch.float16 if facts.dtype == "bfloat16" else torch.bfloat16
    yield from invalid.tensor("q", other, first=True)
    yield Invalid("q", "wider than a row", invalid.wider(8))
    if known.e4m3:
        yield Invalid("q", "of e4m3 without its scale", lambda q: q.to(torch.float8_e4m3fn))
        yield Invalid("q", "with a scale of one of e4m3", invalid.zeros(1), like="q", changes="q_scale")
    yield from pairs.invalid(facts, other)
    yield from invalid.pages("k_cache", layout)
    yield from invalid.tensors(layout)
    yield Invalid("k_cache", "two heads", lambda cache: cache.repeat(1, 1, 2, 1))
    yield Invalid("indices", "missing", invalid.constant(None), "dense")
    yield from invalid.tensor("indices", torch.int64)
    yield Invalid("indices", "a request too many", invalid.longer)
    yield Invalid("indices", "more requests than q", lambda q: q[:1], like="q", changes="q")
    yield Invalid("head_dim_v", "not the spec's", lambda d_v: d_v + 16)
    yield Invalid("is_fp8_kvcache", "not the layout's", lambda given: not given, layout.name)
    yield Invalid("causal", "True", invalid.constant(True))
    for argument in ("causal", "is_fp8_kvcache"):
        yield from invalid.flag(argument)
    yield Invalid("num_splits", "a tensor", torch.clone, like="indices")
    yield Invalid("tile_scheduler_metadata", "None", invalid.constant(None))
    yield from invalid.scale("softmax_scale")
    yield from _invalid_optional(known)
    yield from out_rope.invalid(facts)
    yield from quantised.invalid(facts)
    if facts.out_heads:
        yield from quantised.invalid_out(facts)
    else:
        yield from invalid.out(facts.d_v, getattr(torch, facts.dtype))
    yield Invalid("workspace", "too small", invalid.zeros(16), like="q")
    yield from invalid.output_scale()
    yield Invalid("workspace", "no tensor", invalid.constant([0.0]))
    yield Invalid("workspace", "dtype float16", invalid.zeros(1 << 20, dtype=torch.float16), like="q")
    if len(known.layouts) > 1:
        yield from invalid.pages("extra_k_cache", known.layouts[1])
        yield Invalid("extra_k_cache", "two heads", lambda cache: cache.repeat(1, 1, 2, 1))
        yield from invalid.tensor("extra_indices_in_kvcache", torch.int64)
        yield Invalid("extra_k_cache", "missing", invalid.constant(None))
        yield Invalid("extra_indices_in_kvcache", "missing", invalid.constant(None))
    else:
        for name in ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"):
            yield Invalid(name, "given to a spec without", torch.clone, like="indices")


def refused(known: CacheFacts) -> Iterator[RefusedCase]:
    """A case for each argument that is invalid under the spec."""
    return invalid.refused_cases(NAME, {FLASH: NAME}, _invalid(known))
