"""Arguments that the wrappers of sparse attention over rows must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.checks import out_rope, pairs, quantised

FLASH, VLLM = "flash_mla_sparse_fwd", "triton_mla_sparse_attention"
SHORT = {FLASH: "flash", VLLM: "triton"}
NAME = "sparse_fwd"


def _of_sizes(*grow: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], torch.Tensor]:
    """[tokens, heads] for two arguments, [heads] for one: q's sizes, each grown by its argument."""

    def make(q: torch.Tensor) -> torch.Tensor:
        sizes = q.shape[2 - len(grow) : 2]
        return q.new_zeros([size + more for size, more in zip(sizes, grow, strict=True)], dtype=dtype)

    return make


def _out(columns: int, dtype: torch.dtype | None = None, step: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda q: q.new_zeros((*q.shape[:2], columns * step), dtype=dtype or q.dtype)[..., ::step]


def _invalid_inputs(facts: Facts) -> Iterator[Invalid]:
    strided = facts.d_qk > 1
    yield from invalid.tensor("q", torch.float32, first=True, strided=strided)
    yield Invalid("q", "wider than a KV row", invalid.wider(8))
    yield from pairs.invalid(facts, torch.float32)
    yield from invalid.tensor("kv", torch.float32, strided=strided)
    yield Invalid("kv", "wider rows", invalid.wider(8))
    yield Invalid("kv", "another page size", lambda kv: kv.new_zeros(kv.shape[0], kv.shape[1] + 1, kv.shape[2]))
    yield from invalid.tensor("indices", torch.int64)
    yield Invalid("indices", "more tokens than q", invalid.longer)
    yield Invalid("indices", "two index sets", lambda indices: indices.repeat(1, 2, 1))
    yield Invalid("d_v", "not the spec's", invalid.constant(facts.d_v + 16), wrappers=(FLASH,))
    if facts.softmax_scale is None:
        yield Invalid("sm_scale", "None", invalid.constant(None))
    yield from invalid.scale("sm_scale")
    yield Invalid("num_kv_splits", "negative", invalid.constant(-1), wrappers=(VLLM,))
    yield Invalid("num_kv_splits", "a float", invalid.constant(2.5), wrappers=(VLLM,))
    yield Invalid("sm_count", "zero", invalid.constant(0), wrappers=(VLLM,))


def _invalid_optional(
    argument: str, presence: str, wrong: dict[str, Callable[[torch.Tensor], Any]]
) -> Iterator[Invalid]:
    """An argument that a spec has, requires or lacks; `wrong` begins with a valid one, under an empty name."""
    valid = wrong.pop("")
    if presence == "none":
        yield Invalid(argument, "given to a spec without", valid, like="q", wrappers=(FLASH,))
        return
    for how, make in wrong.items():
        yield Invalid(argument, how, make, like="q", wrappers=(FLASH,))
    if presence == "required":
        yield Invalid(argument, "missing", invalid.constant(None))


def _invalid_results(facts: Facts) -> Iterator[Invalid]:
    if facts.out_heads:
        yield from quantised.invalid_out(facts)
    else:
        yield Invalid("out", "dtype float32", _out(facts.d_v, torch.float32), like="q")
        yield Invalid("out", "too wide", _out(facts.d_v + 8), like="q")
        if facts.d_v > 1:
            yield Invalid("out", "last dimension not contiguous", _out(facts.d_v, step=2), like="q")
    for name, wrappers in (("lse", ()), ("max_logits", (FLASH,))):
        yield Invalid(name, "a token too many", _of_sizes(1, 0), like="q", wrappers=wrappers)
        yield Invalid(name, "dtype float64", _of_sizes(0, 0, dtype=torch.float64), like="q", wrappers=wrappers)
    yield Invalid("workspace", "too small", invalid.zeros(16), like="q")
    yield Invalid("workspace", "dtype float16", invalid.zeros(1 << 20, dtype=torch.float16), like="q")
    yield Invalid("workspace", "two dimensions", invalid.zeros(1024, 1024), like="q")


def _invalid(facts: Facts) -> Iterator[Invalid]:
    yield from _invalid_inputs(facts)
    heads = {"": _of_sizes(0), "a head too many": _of_sizes(1), "dtype float64": _of_sizes(0, dtype=torch.float64)}
    yield from _invalid_optional("attn_sink", facts.sink, heads)
    tokens = {
        "": lambda q: q.new_ones(q.shape[0], dtype=torch.int32),
        "a token too many": lambda q: q.new_ones(q.shape[0] + 1, dtype=torch.int32),
        "dtype int64": lambda q: q.new_ones(q.shape[0], dtype=torch.int64),
    }
    yield from _invalid_optional("topk_length", facts.length, tokens)
    yield from out_rope.invalid(facts)
    yield from quantised.invalid(facts)
    yield from _invalid_results(facts)
    yield from invalid.output_scale()


def refused(facts: Facts) -> Iterator[RefusedCase]:
    """A case for each argument that is invalid under the spec."""
    wrappers = {wrapper: short for wrapper, short in SHORT.items() if wrapper in facts.wrappers}
    return invalid.refused_cases(NAME, wrappers, _invalid(facts))
