"""The cases of out_quant: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.out_quant.invalid import refused
from mlagen.verify.out_quant.side import NAME, OutSide, side_of

FP32, PACKED, WIDE = "fp32", "packed", "none"  # scales: float32, words of ue8m0, or no quantisation


@dataclass(frozen=True)
class OutQuantCase(Case):
    """A call.

    Attributes:
        tokens, groups, width: of the output; a group has `width` heads.
        scales: FP32, PACKED or WIDE.
        values: a key of mlagen.verify.out_quant.inputs.VALUES.
        positions: pattern of the positions, as mlagen.verify.paged.angles draws them; empty: no rotation.
        rows: layout in memory of the output, a key of mlagen.verify.memory.LAYOUTS, or "same" (a token for all).
        tables: layout in memory of the table of angles.
        named: the arguments with the spec's dims are given.
    """

    tokens: int = 5
    groups: int = 2
    width: int = 2
    scales: str = FP32
    values: str = "random"
    positions: str = "random"
    rows: str = "contiguous"
    tables: str = "contiguous"
    named: bool = False


VALUES = {
    "zero": "groups of zeros of either sign have the least scale",
    "powers": "amax at 448 times a power of two, and the next number on either side, also of fp32",
    "ties": "a value in the middle of two e4m3 numbers goes to the even one, and so do subnormals",
    "tiny": "groups of subnormals have the least scale",
    "large": "the largest finite values, whose rotation may overflow",
    "infinite": "an infinity is NaN with an infinite scale, and its group's other values are 0",
    "NaN": "NaN stays in its place and does not count for a scale",
}


def _cases(side: OutSide, base: OutQuantCase, big: bool) -> Iterator[OutQuantCase]:
    def case(name: str, promise: str, **changes: Any) -> OutQuantCase:
        return replace(base, name=f"{NAME}: {name}", promise=promise, **changes)

    kinds = (FP32, PACKED, WIDE) if side.packs else (FP32, WIDE)
    for kind in kinds:
        names = {FP32: "typical", PACKED: "packed scales", WIDE: "not quantised"}
        yield case(names[kind], "an ordinary call gives the reference's bits", scales=kind, every_target=True)
        yield case(f"{names[kind]}, no rotation", "without positions nothing rotates", scales=kind, positions="")
        for tokens in (0, 1, 3, 4):
            promise = "scales behind the last token are zeros up to a multiple of four"
            yield case(f"{names[kind]}, {tokens} tokens", promise, tokens=tokens, scales=kind)
        yield case(f"{names[kind]}, odd", "any strides", scales=kind, rows="odd", tables="odd", every_target=True)
    for values, promise in VALUES.items():
        yield case(f"values: {values}", promise, values=values, every_target=True)
        if side.packs:
            yield case(f"values: {values}, packed", promise, values=values, scales=PACKED)
        yield case(f"values: {values}, no rotation", promise, values=values, positions="")
    for groups, width in ((1, 1), (1, 7), (7, 1), (3, 5)):
        yield case(f"{groups} groups of {width} heads", "any groups of heads", groups=groups, width=width)
    for positions, promise in {
        "zero": "position 0 rotates nothing",
        "garbage": "a token whose position is outside the table is not rotated, INT64_MIN and INT64_MAX too",
        "longer": "positions past the last token are not looked at",
    }.items():
        for scales, name in ((FP32, ""), (WIDE, ", not quantised")):
            yield case(f"positions: {positions}{name}", promise, tokens=20, positions=positions, scales=scales)
    for rows in ("slice", "odd", "transposed", "far", "same"):
        few = 3 if rows == "far" else base.tokens
        yield case(f"output {rows}", "tokens and heads of the output may lie apart", rows=rows, tokens=few)
    for tables in ("slice", "odd"):
        yield case(f"angles {tables}", "rows of the table may lie apart", tables=tables)
    yield case("dims named", "the spec's dims may be given", named=True)
    promise = "calls of more rows run other tiles; each row is the same but for its angles"
    for tokens in (50, 130):
        yield case(f"{16 * tokens} rows", promise, tokens=tokens, groups=4, width=4, rows="same", every_target=True)
    if big:
        tokens, heads = 2**31 // (side.columns * side.heads) + 5, side.heads
        promise = "offsets of results are 64 bits wide"
        yield case("far results", promise, tokens=tokens, groups=heads, width=1, rows="same")
        yield case("graph", "a captured call replays on new inputs", check="graph")
    yield case("contract: torch's defaults", "torch's default device is neither read nor changed", check="defaults")


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package; see mlagen.verify.families."""
    side, big = side_of(spec), device == "cuda"
    if side is None:
        return []
    base = OutQuantCase("", "", tokens=301, groups=8, width=8) if big else OutQuantCase("", "")
    return [*_cases(side, base, big), *refused(side)]
