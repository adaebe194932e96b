"""The cases of merges: plain data, made from a spec and from where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlagen.verify.call.case import Case
from mlagen.verify.call.patterns import SINK_PROMISES
from mlagen.verify.checks.merges import PARTS, STATES, Conventions
from mlagen.verify.merge_states.invalid import refused

TILES = 3  # of a package: for few rows, for many, and for many over fast memory
LSE_PROMISES = {
    "normal": "both parts count",
    "equal": "parts of the same LSE count alike",
    "none": "rows without keys are 0, and their LSE what the spec's attention gives them",
    "none of either sign": "+inf and -inf both stand for no keys",
    "mixed": "an empty part is not looked at, whatever its values are",
    "far apart": "a part that is far below the other counts nothing, and none overflows",
    "extreme": "any finite LSE",
    "lowest": "a part of the lowest LSE counts where no other does",
    "NaN": "an LSE of NaN shows in its row, and in no other",
}


@dataclass(frozen=True)
class StatesCase(Case):
    """A call of merge_attn_states.

    Attributes:
        tokens, heads: sizes of the output.
        d_v: columns of a value; None: each that the package takes, the first for short.
        lse: pattern of both parts' LSE, a key of LSE_PATTERNS.
        prefixes: prefill_tokens_with_context; None: not passed.
        short: the prefix holds no more tokens than that.
        prefix, suffix, output: layout in memory of values, a key of mlagen.verify.call.memory.LAYOUTS.
        lse_layouts: likewise of the LSE of the prefix, of the suffix and of the output.
        output_lse: it is asked for.
        in_place: output is "prefix" or "suffix"; None: its own.
        lse_layout: of all LSE.
        sink: pattern of attn_sink, a key of mlagen.verify.call.patterns.SINK_PROMISES; None: not passed.
        scale: output_scale; None: not passed.
        tile: which of the package's tiles the call is forced to; None: to none.
    """

    tokens: int
    heads: int
    d_v: int
    lse: str = "normal"
    prefixes: int | None = None
    short: bool = False
    prefix: str = "contiguous"
    suffix: str = "contiguous"
    output: str = "contiguous"
    lse_layouts: tuple[str, str, str] = ("contiguous", "slice", "odd")
    output_lse: bool = True
    in_place: str | None = None
    lse_layout: str = "ht"
    sink: str | None = None
    scale: float | None = None
    tile: int | None = None


@dataclass(frozen=True)
class PartsCase(Case):
    """A call of merge_attn_parts.

    Attributes:
        parts, tokens, heads, d_v: sizes of the outputs.
        lse: pattern of the LSE, a key of LSE_PATTERNS.
        lse_base: "e" or "2"; None: not passed.
        float32: the outputs are float32.
        outputs: layout in memory: "contiguous", "odd", or "swapped", which has tokens in front of the parts.
        given: out and output_lse are passed, in layouts of their own.
        lse_layout, sink, scale: as of StatesCase.
    """

    parts: int
    tokens: int
    heads: int
    d_v: int
    lse: str = "mixed"
    lse_base: str | None = None
    float32: bool = False
    outputs: str = "contiguous"
    given: str | None = None
    lse_layout: str = "ht"
    sink: str | None = None
    scale: float | None = None


def value_dims(spec: Mapping[str, Any]) -> list[int]:
    """Columns of the values that a package merges."""
    heads = spec.get("multi_head")
    found = {heads["v_head_dim"] if heads else 0, spec["model"]["v_head_dim"]}
    return sorted(found - {0})


def _shared_cases(case: Any, sink: str) -> Iterator[Any]:
    """Cases for either merge."""
    for pattern, promise in SINK_PROMISES.items() if sink != "none" else ():
        yield case(f"sink: {pattern}", promise, sink=pattern, lse="mixed" if pattern == "mixed" else "normal")
    for tokens in (3, 9):
        promise = "LSE may be [T, H], where T is H too"
        yield case(f"lse_layout: th, {tokens} tokens", promise, lse_layout="th", tokens=tokens, heads=3, lse="mixed")
    yield case("lse_layout: th, 3 heads", "LSE may be [T, H], where T is H too", lse_layout="th", tokens=3, heads=3)
    quantised: dict[str, Any] = {"scale": 0.0371, "every_target": True}
    sinks = {} if sink == "none" else {"sink": "random"}
    yield case("output_scale", "an output with a scale is e4m3, to nearest even", lse="mixed", **quantised, **sinks)
    yield case("output_scale: small", "values past the largest e4m3 become that", scale=0.0011, every_target=True)
    yield case("output_scale: NaN", "NaN stays NaN in e4m3", lse="NaN", **quantised)


def _states_cases(d_v: int, num_heads: int, sink: str, big: bool) -> Iterator[StatesCase]:
    base = StatesCase("", "", 21, 5, d_v)

    def case(name: str, promise: str, **changes: Any) -> StatesCase:
        return replace(base, name=f"merge {d_v}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's", heads=num_heads, tokens=5, every_target=True)
    for pattern, promise in LSE_PROMISES.items():
        yield case(f"lse: {pattern}", promise, lse=pattern)
    for tokens, heads in ((1, 1), (1, 128), (2, 3), (7, 16), (8, 8), (9, 9), (33, 1), (700, 12)):
        yield case(f"sizes: {tokens}x{heads}", "any number of tokens and heads", tokens=tokens, heads=heads)
    for tile in range(TILES):
        yield case(f"tile: {tile}", "any number of tokens and heads", tile=tile, tokens=13, prefixes=9, lse="mixed")
    yield case("tokens: none", "an empty batch does nothing", tokens=0)
    yield case("heads: none", "no heads, nothing to do", heads=0)
    for count in (0, 1, 13, 21):
        for short in (False, True):
            yield case(
                f"prefixes: {count}{', and no more tokens' if short else ''}",
                "tokens from prefill_tokens_with_context on get their suffix, and their prefix is not looked at",
                prefixes=count,
                short=short,
                lse="mixed",
            )
    for number, tensor in enumerate(("prefix", "suffix", "output")):
        for layout in ("slice", "odd", "transposed", "far"):
            changes: dict[str, Any] = {tensor: layout, "tokens": 3 if layout == "far" else 21, "heads": 3}
            yield case(f"layout: {tensor} {layout}", "all have strides of their own, 2^31 elements too", **changes)
        far = tuple("far" if number == which else "slice" for which in range(3))
        yield case(f"layout: LSE of {tensor} far", "LSE may lie apart likewise", lse_layouts=far, heads=3)
        swapped = tuple("transposed" if number == which else "odd" for which in range(3))
        yield case(f"layout: LSE of {tensor} transposed", "tokens of LSE may lie apart", lse_layouts=swapped)
    yield case("output_lse: none", "the LSE may be left out", output_lse=False, lse="mixed")
    for which in ("prefix", "suffix"):
        yield case(f"in place: {which}", "output may be either part", in_place=which, lse="mixed")
    yield case("in place: LSE beside one another", "LSE of one buffer may take turns", check="beside", lse="mixed")
    for tokens in (21, 700):
        promise = "an output with a scale takes any strides, and a prefix of some tokens"
        quantised: dict[str, Any] = {"output": "odd", "prefixes": 13, "scale": 0.0371, "output_lse": tokens == 21}
        yield case(f"output_scale: strides, {tokens} tokens", promise, tokens=tokens, heads=12, **quantised)
    yield from _shared_cases(case, sink)
    yield case("contract: torch's defaults", "torch's defaults are neither read nor changed", check="defaults")
    if big:
        yield case("large", "a large batch", tokens=32768, heads=num_heads)
        yield case("contract: graph", "a captured call replays on new inputs", check="graph", tokens=300)


def _parts_cases(d_v: int, num_heads: int, sink: str, big: bool) -> Iterator[PartsCase]:
    base = PartsCase("", "", 3, 7, 5, d_v)

    def case(name: str, promise: str, **changes: Any) -> PartsCase:
        return replace(base, name=f"merge parts {d_v}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's", parts=5, heads=num_heads, every_target=True)
    for parts in (0, 1, 2, 4, 5, 8, 33):
        yield case(f"parts: {parts}", "any number of parts", parts=parts)
    for pattern, promise in LSE_PROMISES.items():
        yield case(f"lse: {pattern}", promise, lse=pattern, parts=5)
    for lse_base in ("e", "2"):
        yield case(f"lse_base: {lse_base}", "LSE of either base", lse_base=lse_base)
    for tokens, heads in ((1, 1), (1, 128), (8, 3), (9, 1), (0, 4), (4, 0)):
        yield case(f"sizes: {tokens}x{heads}", "any number of tokens and heads", tokens=tokens, heads=heads)
    for layout in ("contiguous", "odd", "swapped"):
        for float32 in (False, True):
            promise = "parts of either dtype, with any strides"
            yield case(
                f"layout: {layout}, {'float32' if float32 else 'own dtype'}", promise, outputs=layout, float32=float32
            )
    for layout in ("slice", "odd", "far"):
        yield case(f"out: {layout}", "results go where they are asked for", given=layout, tokens=3)
    yield case("out: LSE transposed", "tokens of LSE may lie apart", given="odd", lse_layout="th", outputs="swapped")
    yield case("output_scale: out given", "an output with a scale takes any strides", given="odd", scale=0.0371)
    yield case("output_scale: float32", "parts of float32 become e4m3", float32=True, scale=0.0371)
    yield from _shared_cases(case, sink)
    if big:
        yield case("large", "a large batch", parts=8, tokens=4096, heads=num_heads)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's merges; see mlagen.verify.families."""
    wrappers, heads, big = spec["wrappers"], spec["model"]["num_heads"], device == "cuda"
    sink = Conventions.of(spec).sink
    found: list[Case] = []
    for d_v in value_dims(spec):
        if STATES in wrappers:
            found += _states_cases(d_v, heads, sink, big)
        if PARTS in wrappers:
            found += _parts_cases(d_v, heads, sink, big)
    return [*found, *refused(wrappers, sink)]
