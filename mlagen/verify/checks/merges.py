"""Functions of a package one after the other: attention of parts of the keys, and merges of the results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mlagen.verify import tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Results, Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.reference import Attention

STATES, PARTS = "merge_attn_states", "merge_attn_parts"
# Shares of the keys at which parts begin and end, by the name of a case: the second of eight parts is empty.
CUTS = {"two parts": (0.0, 0.93, 1.0), "eight parts": (0.0, 0.1, 0.1, 0.2, 0.45, 0.5, 0.7, 0.9, 1.0)}
QUANTISED, LARGEST, SCALE = torch.float8_e4m3fn, 448.0, 0.0173  # dtype of an output with a scale, and such a scale
PROMISES = {
    "merged": "attention of parts of the keys merges to attention of all, with a sink that enters once",
    "quantised": "an output with a scale is e4m3",
}


@dataclass(frozen=True)
class Conventions:
    """Conventions of a spec's attention for parts and their whole; without one, those of multi-head attention.

    Attributes:
        lse_base: "e" or "2".
        empty_row_lse: "+inf" or "-inf".
        sink: "none", "optional" or "required".
    """

    lse_base: str = "e"
    empty_row_lse: str = "-inf"
    sink: str = "optional"

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Conventions:
        """Those of `SPEC["spec"]`."""
        attention = spec["attention"]
        if attention is None:
            return cls()
        return cls(attention["lse_base"], attention["empty_row_lse"], attention.get("attn_sink", "optional"))


def merges_of(wrappers: Sequence[str]) -> list[str]:
    """The merges that a package has."""
    return [name for name in (PARTS, STATES) if name in wrappers]


def chains(wrappers: Sequence[str], sink: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of cases of attention in a package with merges, and their changes; "sink" is a pattern of sinks."""
    if not merges_of(wrappers):
        return
    for name in CUTS:
        yield f"merged: {name}", {"check": "merged", "sink": None}
        if sink != "none":
            yield f"merged: {name}, sink", {"check": "merged", "sink": "random"}
    yield "merged: one part, output_scale", {"check": "quantised", "sink": None}


def cuts_of(case_name: str) -> Sequence[float]:
    """Where the parts of a case begin and end."""
    return next(cuts for name, cuts in CUTS.items() if f"merged: {name}" in case_name)


def positions(cuts: Sequence[float], width: int) -> Iterator[tuple[int, int]]:
    """The parts as positions [first, last) of so many."""
    yield from pairwise(round(cut * width) for cut in cuts)


def left_out(subject: Subject, heads: int) -> torch.Tensor | None:
    """The sink for attention of a part, if the merge adds the model's sink."""
    required = Conventions.of(subject.package.SPEC["spec"]).sink == "required"
    return torch.full((heads,), float("-inf"), device=subject.device) if required else None


def merged(run: Run[Any, Any], parts: Sequence[Results], sink: torch.Tensor | None) -> Iterator[Results]:
    """The whole by each merge of the package, from parts "out" [tokens, heads, d_v] and "lse" [heads, tokens]."""
    subject = run.subject
    there = merges_of(subject.facts.wrappers)
    if PARTS in there:
        outs, lses = (torch.stack([part[name] for part in parts]) for name in ("out", "lse"))
        out, lse = subject.call(PARTS, outs, lses, attn_sink=sink)
        yield {"out": out, "lse": lse}
    while STATES in there and len(parts) > 1:
        # Two by two, halving: a result that is merged again and again rounds each time.
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        parts = [_of_two(subject, *pair, sink if len(pairs) == 1 else None) for pair in pairs]
        if len(parts) == 1:
            yield parts[0]


def _of_two(subject: Subject, prefix: Results, suffix: Results, sink: torch.Tensor | None) -> Results:
    """Two parts merged."""
    whole = {name: torch.full_like(tensor, NAN) for name, tensor in prefix.items()}
    given = (prefix["out"], prefix["lse"], suffix["out"], suffix["lse"], whole["lse"])
    subject.call(STATES, whole["out"], *given, attn_sink=sink)
    return whole


def with_sink(whole: Attention, sink: torch.Tensor | None, unit: float) -> Attention:
    """Attention with a sink, from that without: `unit` is the natural logarithm of its LSE's base."""
    if sink is None:
        return whole
    lse = torch.where(whole.lse.isinf(), -math.inf, whole.lse * unit)
    share = torch.sigmoid(lse - sink.double())[..., None]
    # Values lie from an element of the smaller result no farther than from the larger, and from that to it.
    spread = share * (whole.spread + (1 - share) * whole.out.abs())
    return whole._replace(out=whole.out * share, noise=whole.noise * share, spread=spread)


def quantised(run: Run[Any, Any]) -> list[Figure]:
    """With an output scale, attention writes its results divided by the scale, in e4m3, to the given buffer."""
    plain = run.call()["out"].double().nan_to_num(nan=0.0)  # rows of no request are 0 then
    scale = torch.full((1,), SCALE, device=run.subject.device)
    want = (plain / SCALE).clamp(-LARGEST, LARGEST)
    allowed = tolerance.UNIT_ROUNDOFF[QUANTISED] * want.abs() * (1 + 2.0**-16) + tolerance.SMALLEST[QUANTISED] / 2
    figures = []
    for named in ({}, {"out": torch.zeros(plain.shape, dtype=QUANTISED, device=plain.device)}):
        got = run.call(output_scale=scale, **named)["out"]
        if got.dtype != QUANTISED or got.shape != plain.shape:
            raise CaseFailedError(f"out with a scale is {got.dtype} {list(got.shape)}")
        if named and got.data_ptr() != named["out"].data_ptr():
            raise CaseFailedError("out was given, but another tensor was returned")
        figures.append(tolerance.worst("out", (got.double() - want).abs(), allowed))
    return figures
