"""The tensors of a call of sparse attention over rows: numbers where they count, NaN where they must not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, allocate, place, seeded, unplaced
from mlagen.verify.call.patterns import IndexLists, draw_indices, named_rows, poison_index, sinks
from mlagen.verify.checks import out_rope, quantised
from mlagen.verify.checks.out_rope import Rotation
from mlagen.verify.sparse_fwd.cases import Problem


@dataclass
class Inputs(family.Inputs):
    """The tensors of one attention call.

    Attributes:
        q: [tokens, heads, d_qk].
        kv: [rows, 1, d_qk] or [pages, block_size, d_qk].
        indices: i32 [tokens, 1, topk].
        sm_scale: factor of the logits.
        passed_scale: sm_scale, or None, which the call passes for the spec's.
        length: i32 [tokens] or None.
        sink: f32 [heads] or None.
        rotation: positions and angles; None where attention does not rotate its output.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    passed_scale: float | None
    length: torch.Tensor | None
    sink: torch.Tensor | None
    rotation: Rotation | None = None

    def optional(self) -> dict[str, Any]:
        """Arguments of either wrapper that a call may leave out, by name."""
        found = {"attn_sink": self.sink, "topk_length": self.length}
        passed = {name: tensor for name, tensor in found.items() if tensor is not None}
        passed |= self.rotation.arguments() if self.rotation else {}
        return passed | {name: one.view for name, one in self.given.items()}

    def pick(self, rows: Sequence[int]) -> Inputs:
        """The same call for some of its tokens, in another order."""
        at = torch.tensor(rows, device=self.q.device)
        return replace(
            self,
            q=self.q[at].contiguous(),
            indices=self.indices[at].contiguous(),
            length=None if self.length is None else self.length[at].contiguous(),
            rotation=None if self.rotation is None else self.rotation.pick(rows),
            given={},
            placed={},
        )


def _rows(problem: Problem, facts: Facts, named: torch.Tensor, device: str, generator: torch.Generator) -> Placed:
    """KV rows: numbers in the `named` ones, NaN in all others."""
    dtype, size = getattr(torch, facts.dtype), facts.block_size or 1
    pages = -(-problem.rows // size)
    shape = (pages, size, facts.d_qk)
    values = torch.randn(len(named), facts.d_qk, generator=generator).to(dtype).to(device)
    named = named.to(device)
    if problem.kv == "far":
        buffer = allocate(pages * size * facts.d_qk, dtype, device, NAN if device == "cuda" else None)
        kv = buffer.view(shape)
        kv[named // size, named % size] = values
        return Placed(kv, buffer, None)
    kv = torch.full(shape, NAN, dtype=dtype, device=device)
    kv[named // size, named % size] = values
    return place(kv, LAYOUTS[problem.kv], NAN)


def build(problem: Problem, facts: Facts, device: str, seed: int, stats: Sequence[str] = ()) -> Inputs:
    """The tensors of a problem, the same for the same seed; also buffers for the `stats`.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    dtype, size = getattr(torch, facts.dtype), facts.block_size or 1
    tokens, heads, topk = problem.tokens, problem.heads, problem.topk
    problem = replace(problem, rows=-(-problem.rows // size) * size)
    lists = IndexLists(tokens, topk, problem.rows, problem.indices)
    named = named_rows(lists, generator)
    q_values = torch.randn(tokens, heads, facts.d_qk, generator=generator).to(dtype).to(device)
    q = place(problem.q_size * q_values, LAYOUTS[problem.q], NAN)
    kv = _rows(problem, facts, named, device, generator)
    indices, length = draw_indices(lists, named, problem.length, (tokens, 1), generator)
    index = place(indices.int()[:, None].to(device), LAYOUTS[problem.index_layout], poison_index(problem.indices))
    sink = None if problem.sink is None else sinks(problem.sink, heads, topk, generator).to(device)
    placed = {"q": q, "kv": kv, "indices": index}
    if length is not None:
        length = length.to(device)
        placed["topk_length"] = unplaced(length)
    if sink is not None:
        placed["attn_sink"] = unplaced(sink)
    given = {}
    if problem.out is not None and facts.out_heads:
        given["out"] = quantised.place_given(facts, tokens, heads, problem.out, device)
    elif problem.out is not None:
        empty = torch.full((tokens, heads, facts.d_v), NAN, dtype=dtype, device=device)
        given["out"] = place(empty, LAYOUTS[problem.out], NAN)
    for name in stats:
        given[name] = place(torch.full((tokens, heads), NAN, device=device), LAYOUTS["contiguous"], NAN)
    passed = None if problem.scale is None else problem.scale * facts.d_qk**-0.5
    scale = facts.default_scale if passed is None else passed
    rotation, angles = out_rope.draw(facts, problem.positions, tokens, device, generator)
    tensors = (q.view, kv.view, index.view, scale, passed, length, sink, rotation)
    return Inputs(*tensors, placed=placed | angles, given=given)
