"""Arguments that multi-head attention must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify.call import invalid
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.call.memory import NAN

NAME = "dense_fwd"
WRAPPER = "flash_attn_varlen_func"
# Arguments of FlashAttention's function, with values that request features that this one does not have.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "dropout_p": (0.1, NAN),
    "softcap": (30.0,),
    "num_splits": (2,),
    "alibi_slopes": (torch.ones(2),),
    "block_table": (torch.zeros(1, 1, dtype=torch.int32),),
    "seqused_k": (torch.ones(2, dtype=torch.int32),),
    "q_v": (torch.ones(2),),
    "s_aux": (torch.ones(2),),
}
# The same of packages with and without a window.
WINDOWS = {True: ((5, 1), (-2, 0), (5,), (5.0, 0), (5, True)), False: ((5, 0), (-1, 0))}


def _invalid(has_window: bool) -> Iterator[Invalid]:
    for argument in ("q", "k", "v"):
        yield from invalid.kind(argument, torch.float32)
        yield Invalid(argument, "twice as wide", lambda tensor: torch.cat([tensor, tensor], 2))
        yield from invalid.memory(argument, first=argument == "q", word="not contiguous")
    yield Invalid("k", "heads that do not divide q's", lambda k: torch.cat([k, k[:, :1]], 1))
    yield Invalid("k", "no head", lambda k: k[:, :0])
    yield Invalid("v", "a row short", lambda v: v[1:])
    yield Invalid("v", "a head short", lambda v: v[:, 1:])
    for argument in ("cu_seqlens_q", "cu_seqlens_k"):
        yield Invalid(argument, "dtype int64", torch.Tensor.long)
        yield Invalid(argument, "None", invalid.constant(None))
        yield Invalid(argument, "not contiguous", invalid.every_other)
    yield Invalid("cu_seqlens_q", "empty", lambda cu_seqlens: cu_seqlens[:0])
    yield Invalid("cu_seqlens_k", "an entry short", lambda cu_seqlens: cu_seqlens[1:])
    for argument in ("max_seqlen_q", "max_seqlen_k"):
        for value in (-1, 2.5, True):
            yield Invalid(argument, str(value), invalid.constant(value))
    yield from invalid.scale("softmax_scale")
    yield from invalid.flag("causal")
    yield from invalid.output_scale()
    yield Invalid("out", "dtype float32", invalid.constant(torch.zeros(3, 2, 2)))
    yield Invalid("out", "another shape", invalid.constant(torch.zeros(1, 1, 1, dtype=torch.bfloat16)))
    for argument, values in {**UNSUPPORTED, "window_size": WINDOWS[has_window]}.items():
        for one in values:
            yield Invalid(argument, "given" if isinstance(one, torch.Tensor) else str(one), invalid.constant(one))


def refused(*, has_window: bool) -> Iterator[RefusedCase]:
    """A case for each invalid argument of a package with or without a window."""
    return invalid.refused_cases(NAME, {WRAPPER: NAME}, _invalid(has_window))
