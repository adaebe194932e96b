"""The tensors of a call of multi-head attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify import batched
from mlagen.verify.call import family
from mlagen.verify.call.memory import LAYOUTS, NAN, place, seeded, unplaced
from mlagen.verify.call.patterns import INT32
from mlagen.verify.dense_fwd.cases import DenseFwdCase
from mlagen.verify.dense_fwd.reference import dense_fwd
from mlagen.verify.reference import Attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Inputs(family.Inputs):
    """A call's tensors, and the numbers that the reference takes.

    Attributes:
        arguments: of the wrapper, by name.
        cu_q, cu_k: where each request begins, and the last one ends.
        scale: factor of the logits.
    """

    arguments: dict[str, Any]
    cu_q: list[int]
    cu_k: list[int]
    scale: float

    @property
    def q(self) -> torch.Tensor:
        """[total_q, heads, d_qk]."""
        found: torch.Tensor = self.arguments["q"]
        return found

    def expected(self) -> Attention:
        """The reference results of the call."""
        q, k, v, causal = (self.arguments[name] for name in ("q", "k", "v", "causal"))
        left, right = self.arguments.get("window_size") or (-1, -1)
        attend = batched.dense_fwd if q.is_cuda else dense_fwd
        window = None if left < 0 else left + 1
        return attend(q, k, v, self.cu_q, self.cu_k, self.scale, causal or right == 0, window)


def starts(lengths: list[int], before: int = 0) -> list[int]:
    """Where each request begins, and the last one ends, behind `before` rows."""
    found = [before]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def build(case: DenseFwdCase, spec: Mapping[str, Any], device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    heads, dtype = spec["multi_head"], DTYPES[spec["model"]["dtype"]]
    cu_q = starts([rows for rows, _ in case.requests], case.before)
    cu_k = starts([keys for _, keys in case.requests], case.before)
    placed, given = {}, {}
    for name, cu, count, columns in (
        ("q", cu_q, case.heads, heads["qk_head_dim"]),
        ("k", cu_k, case.kv_heads, heads["qk_head_dim"]),
        ("v", cu_k, case.kv_heads, heads["v_head_dim"]),
    ):
        values = torch.full((cu[-1] + case.after, count, columns), NAN, dtype=dtype)
        values[cu[0] : cu[-1]] = torch.randn(cu[-1] - cu[0], count, columns, generator=generator).to(dtype)
        placed[name] = place(values.to(device), LAYOUTS[getattr(case, name)], NAN)
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        offsets = [*cu[:-1], INT32.max] if case.beyond else cu
        placed[name] = unplaced(torch.tensor(offsets, dtype=torch.int32, device=device))
    arguments: dict[str, Any] = {name: one.view for name, one in placed.items()}
    longest = [max((request[side] for request in case.requests), default=0) for side in (0, 1)]
    arguments |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1], "causal": case.causal}
    if case.window is not None:
        arguments["window_size"] = case.window
    if case.hint is not None:
        arguments |= {"max_seqlen_q": case.hint, "max_seqlen_k": case.hint}
    unit = heads["qk_head_dim"] ** -0.5
    scale = (heads.get("softmax_scale") or unit) if case.scale is None else case.scale * unit
    if case.scale is not None:
        arguments["softmax_scale"] = scale
    if case.out is not None:
        shape = (cu_q[-1] + case.after, case.heads, heads["v_head_dim"])
        given["out"] = place(torch.full(shape, NAN, dtype=dtype, device=device), LAYOUTS[case.out], NAN)
        arguments["out"] = given["out"].view
    return Inputs(arguments, cu_q, cu_k, scale, placed=placed, given=given)
