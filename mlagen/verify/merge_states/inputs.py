"""The tensors of a merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place, seeded
from mlagen.verify.call.patterns import sinks
from mlagen.verify.checks.merges import Conventions
from mlagen.verify.merge_states.cases import PartsCase, StatesCase
from mlagen.verify.merge_states.reference import Merged, merge

# Each cycles through the (token, head) pairs of all parts; an odd number of entries, so that parts differ.
LSE_CYCLES: dict[str, list[float]] = {
    "none": [-math.inf],
    "none of either sign": [-math.inf, math.inf, math.inf],
    "mixed": [math.inf, 0.5, -math.inf, 1.25, -math.inf, -0.75, 3.0],
    "far apart": [80.0, -80.0, 0.0, 1e4, -1e4],
    "extreme": [3e38, -1.5e38, 1e30, -1e30, 3.4e38, -1.7e38, 0.0],
    "lowest": [-3e38, -math.inf, -3.4e38, -math.inf, -3e38, -2e38, -torch.finfo(torch.float32).max],
    "NaN": [NAN, 1.0, 2.0, -math.inf, 0.0],
}


@dataclass
class Inputs(family.Inputs):
    """A call's tensors, and the expected result.

    Attributes:
        arguments: of the wrapper, by name.
        expected: of mlagen.verify.merge_states.reference.merge.
        unit: natural logarithm of the base of the call's LSE.
        sink: f32 [heads] of the call, or None.
    """

    arguments: dict[str, Any]
    expected: Merged
    unit: float = 1.0
    sink: torch.Tensor | None = None


def _lses(pattern: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """LSE f32 of a pattern, in units of their base."""
    if pattern == "normal":
        return torch.randn(shape, generator=generator) * 2
    if pattern == "equal":
        return torch.full(shape, -1.5)
    cycle = torch.tensor(LSE_CYCLES[pattern])
    places = torch.arange(math.prod(shape)).view(shape) * 11 + torch.arange(shape[0])[:, None, None] * 2
    return cycle[places % len(cycle)]


def _optional(case: StatesCase | PartsCase, conventions: Conventions, device: str, generator: torch.Generator) -> Any:
    """Arguments that a call may leave out, by name."""
    found: dict[str, Any] = {}
    if case.sink is not None:
        found["attn_sink"] = sinks(case.sink, case.heads, 2, generator).to(device)
    elif conventions.sink == "required":
        found["attn_sink"] = None
    if case.scale is not None:
        found["output_scale"] = torch.tensor([case.scale], device=device)
    if case.lse_layout != "ht":
        found["lse_layout"] = case.lse_layout
    return found


def _place_lse(case: StatesCase | PartsCase, lse: torch.Tensor, layout: str) -> Placed:
    """An LSE [heads, tokens] laid out in memory, as the case's lse_layout has it."""
    return place(lse if case.lse_layout == "ht" else lse.T, LAYOUTS[layout], NAN)


def _out_dtype(case: StatesCase | PartsCase, dtype: torch.dtype) -> torch.dtype:
    return dtype if case.scale is None else torch.float8_e4m3fn


def build_states(case: StatesCase, conventions: Conventions, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    tokens, heads, d_v = case.tokens, case.heads, case.d_v
    lses = _lses(case.lse, (2, heads, tokens), generator)
    values = torch.randn(2, tokens, heads, d_v, generator=generator).to(dtype)
    arguments = _optional(case, conventions, device, generator)
    sink, unit = arguments.get("attn_sink"), math.log(2) if conventions.lse_base == "2" else 1.0
    alone = slice(tokens if case.prefixes is None else case.prefixes, None)  # tokens without a prefix
    lses[0, :, alone] = -math.inf
    unread = lses.isinf().transpose(1, 2)
    unread[1, alone] &= sink is not None  # without a sink they are copied
    values[unread] = NAN
    expected = merge(values.to(device), unit * lses.double().to(device), sink, conventions.empty_row_lse)
    if sink is None:
        out, lse, size = expected
        copied = values[1, alone].to(device).double()
        out[alone], lse[:, alone], size[alone] = copied, unit * lses[1, :, alone].to(device).double(), copied.abs()
    lses[0, :, alone] = NAN
    there = case.prefixes if case.short and case.prefixes is not None else tokens
    prefix_lse, suffix_lse, output_lse = case.lse_layouts
    placed = {
        "prefix_output": place(values[0, :there].to(device), LAYOUTS[case.prefix], NAN),
        "prefix_lse": _place_lse(case, lses[0, :, :there].to(device), prefix_lse),
        "suffix_output": place(values[1].to(device), LAYOUTS[case.suffix], NAN),
        "suffix_lse": _place_lse(case, lses[1].to(device), suffix_lse),
    }
    arguments |= {name: one.view for name, one in placed.items()}
    given = {}
    if case.in_place is None:
        nothing = torch.full((tokens, heads, d_v), NAN, dtype=_out_dtype(case, dtype), device=device)
        given["output"] = place(nothing, LAYOUTS[case.output], NAN)
    else:
        given["output"] = placed.pop(f"{case.in_place}_output")
    if case.output_lse:
        given["output_lse"] = _place_lse(case, torch.full((heads, tokens), NAN, device=device), output_lse)
    arguments |= {name: one.view for name, one in given.items()}
    if case.prefixes is not None:
        arguments["prefill_tokens_with_context"] = case.prefixes
    return Inputs(arguments, expected, unit, sink, placed=placed, given=given)


def build_parts(case: PartsCase, conventions: Conventions, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    sizes = (case.parts, case.tokens, case.heads, case.d_v)
    lses = _lses(case.lse, (case.parts, case.heads, case.tokens), generator)
    values = torch.randn(sizes, generator=generator).to(torch.float32 if case.float32 else dtype)
    values[lses.isinf().transpose(1, 2)] = NAN
    arguments = _optional(case, conventions, device, generator)
    sink, unit = arguments.get("attn_sink"), math.log(2) if (case.lse_base or conventions.lse_base) == "2" else 1.0
    values, lses = values.to(device), lses.to(device)
    expected = merge(values, unit * lses.double(), sink, conventions.empty_row_lse)
    if case.outputs == "swapped":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
        lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    elif case.outputs == "odd":
        odd = place(values.flatten(1, 2), LAYOUTS["odd"], NAN).view
        row = odd.stride(1)
        values = odd.as_strided(sizes, (odd.stride(0), case.heads * row, row, 1), odd.storage_offset())
    if case.lse_layout == "th":
        lses = lses.transpose(1, 2).contiguous()
    arguments |= {"outputs": values, "lses": lses}
    if case.lse_base is not None:
        arguments["lse_base"] = case.lse_base
    given = {}
    if case.given is not None:
        nothing = torch.full(sizes[1:], NAN, dtype=_out_dtype(case, dtype), device=device)
        given["out"] = place(nothing, LAYOUTS[case.given], NAN)
        given["output_lse"] = place(torch.full(lses.shape[1:], NAN, device=device), LAYOUTS[case.given], NAN)
        arguments |= {name: one.view for name, one in given.items()}
    return Inputs(arguments, expected, unit, sink, given=given)
