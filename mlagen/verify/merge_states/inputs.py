"""The tensors of a merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify import family
from mlagen.verify.memory import LAYOUTS, NAN, place
from mlagen.verify.merge_states.cases import PartsCase, StatesCase
from mlagen.verify.merge_states.reference import Merged, merge

# Each cycles through the (token, head) pairs of all parts; an odd number of entries, so that parts differ.
LSE_CYCLES: dict[str, list[float]] = {
    "none": [-math.inf],
    "none of either sign": [-math.inf, math.inf, math.inf],
    "mixed": [math.inf, 0.5, -math.inf, 1.25, -math.inf, -0.75, 3.0],
    "far apart": [80.0, -80.0, 0.0, 1e4, -1e4],
    "extreme": [3e38, -1.5e38, 1e30, -1e30, 3.4e38, -1.7e38, 0.0],
    "NaN": [NAN, 1.0, 2.0, -math.inf, 0.0],
}


@dataclass
class Inputs(family.Inputs):
    """A call's tensors, and what it must give.

    Attributes:
        arguments: of the wrapper, by name.
        expected: of mlagen.verify.merge_states.reference.merge.
        unit: natural logarithm of the base of the call's LSE.
    """

    arguments: dict[str, Any]
    expected: Merged
    unit: float = 1.0


def _lses(pattern: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """LSE f32 of a pattern, natural."""
    if pattern == "normal":
        return torch.randn(shape, generator=generator) * 2
    if pattern == "equal":
        return torch.full(shape, -1.5)
    cycle = torch.tensor(LSE_CYCLES[pattern])
    places = torch.arange(math.prod(shape)).view(shape) * 11 + torch.arange(shape[0])[:, None, None] * 2
    return cycle[places % len(cycle)]


def build_states(case: StatesCase, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, d_v = case.tokens, case.heads, case.d_v
    lses = _lses(case.lse, (2, heads, tokens), generator)
    values = torch.randn(2, tokens, heads, d_v, generator=generator).to(dtype)
    if case.prefixes is not None:
        lses[0, :, case.prefixes :] = -math.inf
    values[lses.isinf().transpose(1, 2)] = NAN
    expected = merge(values.to(device), lses.to(device))
    if case.prefixes is not None:
        lses[0, :, case.prefixes :] = NAN
    there = case.prefixes if case.short and case.prefixes is not None else tokens
    prefix_lse, suffix_lse, output_lse = (LAYOUTS[layout] for layout in case.lse_layouts)
    placed = {
        "prefix_output": place(values[0, :there].to(device), LAYOUTS[case.prefix], NAN),
        "prefix_lse": place(lses[0, :, :there].to(device), prefix_lse, NAN),
        "suffix_output": place(values[1].to(device), LAYOUTS[case.suffix], NAN),
        "suffix_lse": place(lses[1].to(device), suffix_lse, NAN),
    }
    arguments: dict[str, Any] = {name: one.view for name, one in placed.items()}
    given = {}
    if case.in_place is None:
        nothing = torch.full((tokens, heads, d_v), NAN, dtype=dtype, device=device)
        given["output"] = place(nothing, LAYOUTS[case.output], NAN)
    else:
        given["output"] = placed.pop(f"{case.in_place}_output")
    if case.output_lse:
        given["output_lse"] = place(torch.full((heads, tokens), NAN, device=device), output_lse, NAN)
    arguments |= {name: one.view for name, one in given.items()}
    if case.prefixes is not None:
        arguments["prefill_tokens_with_context"] = case.prefixes
    return Inputs(arguments, expected, placed=placed, given=given)


def build_parts(case: PartsCase, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (case.parts, case.tokens, case.heads, case.d_v)
    lses = _lses(case.lse, (case.parts, case.heads, case.tokens), generator)
    values = torch.randn(sizes, generator=generator).to(torch.float32 if case.float32 else dtype)
    values[lses.isinf().transpose(1, 2)] = NAN
    unit = math.log(2) if case.lse_base == "2" else 1.0
    values, lses = values.to(device), lses.to(device) / unit
    expected = merge(values, lses * unit)
    if case.outputs == "swapped":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
        lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    elif case.outputs == "odd":
        odd = place(values.flatten(1, 2), LAYOUTS["odd"], NAN).view
        row = odd.stride(1)
        values = odd.as_strided(sizes, (odd.stride(0), case.heads * row, row, 1), odd.storage_offset())
    arguments: dict[str, Any] = {"outputs": values, "lses": lses}
    if case.lse_base is not None:
        arguments["lse_base"] = case.lse_base
    given = {}
    if case.given is not None:
        layout = LAYOUTS[case.given]
        given["out"] = place(torch.full(sizes[1:], NAN, dtype=dtype, device=device), layout, NAN)
        given["output_lse"] = place(torch.full(lses.shape[1:], NAN, device=device), layout, NAN)
        arguments |= {name: one.view for name, one in given.items()}
    return Inputs(arguments, expected, unit, given=given)
