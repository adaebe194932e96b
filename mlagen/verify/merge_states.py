"""Merges of attention over parts of the keys: their reference, their cases and the code that runs them.

What must not matter is poisoned: the values of an empty part are NaN, and so are the elements between and around the
rows of a buffer, tokens of a prefix past those that have one, and what a kernel is to write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.verify.cases import Case
from mlagen.verify.checks import NAN, CaseFailedError, Subject, poisoned_allocations
from mlagen.verify.inputs import LAYOUTS, Placed, place
from mlagen.verify.results import Figure
from mlagen.verify.tolerance import FP32_STEP, SMALLEST, UNIT_ROUNDOFF, worst

STATES, PARTS = "merge_attn_states", "merge_attn_parts"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_STEPS = 32  # fp32 roundings of a weight: of a difference of LSE, its product, exp2, the sum, and of a term


def merge(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole of parts, in plain torch and float64.

    Args:
        outputs: [parts, tokens, heads, lanes], of which those of an empty part are not looked at.
        lses: [parts, heads, tokens], natural; +inf and -inf: an empty part.

    Returns:
        out [tokens, heads, lanes]; lse [heads, tokens]; and the sum of absolute terms behind each element of out.
    """
    empty = lses.isinf()
    logits = lses.double().masked_fill(empty, -math.inf)
    nothing = torch.full((1, *lses.shape[1:]), -math.inf, dtype=torch.float64, device=lses.device)
    largest = torch.cat([logits, nothing]).amax(0)
    weights = torch.where(empty, 0.0, (logits - torch.where(largest == -math.inf, 0.0, largest)).exp())
    total = weights.sum(0)
    lse = largest + total.log()
    weights = (weights / torch.where(total == 0, 1.0, total)).transpose(1, 2)[..., None]
    terms = weights * torch.where(empty.transpose(1, 2)[..., None], 0.0, outputs.double())
    return terms.sum(0), lse, terms.abs().sum(0)


@dataclass(frozen=True)
class StatesCase(Case):
    """A call of merge_attn_states.

    Attributes:
        tokens, heads: sizes of the output.
        lanes: lanes of a value; None: each that the package takes, the first for short.
        lse: pattern of both parts' LSE, a key of LSE_PATTERNS.
        prefixes: prefill_tokens_with_context; None: not passed.
        short: the prefix holds no more tokens than that.
        prefix, suffix, output: layout in memory of values, a key of mlagen.verify.inputs.LAYOUTS.
        lse_layouts: likewise of the LSE of the prefix, of the suffix and of the output.
        output_lse: it is asked for.
        in_place: output is "prefix" or "suffix"; None: its own.
        check: what is asked of the result, a key of STATES_CHECKS.
    """

    tokens: int
    heads: int
    lanes: int
    lse: str = "normal"
    prefixes: int | None = None
    short: bool = False
    prefix: str = "contiguous"
    suffix: str = "contiguous"
    output: str = "contiguous"
    lse_layouts: tuple[str, str, str] = ("contiguous", "slice", "odd")
    output_lse: bool = True
    in_place: str | None = None
    check: str = "reference"


@dataclass(frozen=True)
class PartsCase(Case):
    """A call of merge_attn_parts.

    Attributes:
        parts, tokens, heads, lanes: sizes of the outputs.
        lse: pattern of the LSE, a key of LSE_PATTERNS.
        lse_base: "e" or "2"; None: not passed.
        float32: the outputs are float32.
        outputs: layout in memory: "contiguous", "odd", or "swapped", which has tokens in front of the parts.
        given: out and output_lse are passed, in layouts of their own.
    """

    parts: int
    tokens: int
    heads: int
    lanes: int
    lse: str = "mixed"
    lse_base: str | None = None
    float32: bool = False
    outputs: str = "contiguous"
    given: str | None = None


@dataclass(frozen=True)
class MergeStatesRefusalCase(Case):
    """A call that a wrapper must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        wrapper: the wrapper called.
        argument: the argument that is off.
        make: what it is given, from what it was; the name of another argument stands for that.
    """

    wrapper: str
    argument: str
    make: Callable[[Any], Any]


KINDS = (StatesCase, PartsCase, MergeStatesRefusalCase)


def value_dims(spec: Mapping[str, Any]) -> list[int]:
    """Lanes of the values that a package merges."""
    heads = spec.get("multi_head")
    found = {heads["v_head_dim"] if heads else 0, spec["model"]["v_head_dim"]}
    return sorted(found - {0})


def _states_cases(lanes: int, num_heads: int, big: bool) -> Iterator[StatesCase]:
    base = StatesCase("", "", 21, 5, lanes)

    def case(name: str, promise: str, **changes: Any) -> StatesCase:
        return replace(base, name=f"merge {lanes}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's", heads=num_heads, tokens=5, every_target=True)
    for pattern, promise in LSE_PROMISES.items():
        yield case(f"lse: {pattern}", promise, lse=pattern)
    for tokens, heads in ((1, 1), (1, 128), (2, 3), (7, 16), (8, 8), (9, 9), (33, 1), (700, 12)):
        yield case(f"sizes: {tokens}x{heads}", "any number of tokens and heads", tokens=tokens, heads=heads)
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
    yield case("output_lse: none", "the LSE may be left out", output_lse=False, lse="mixed")
    for which in ("prefix", "suffix"):
        yield case(f"in place: {which}", "output may be either part", in_place=which, lse="mixed")
    yield case("manners: torch's defaults", "torch's defaults are neither read nor changed", check="defaults")
    if big:
        yield case("large", "a large batch", tokens=32768, heads=num_heads)
        yield case("manners: graph", "a captured call replays on new inputs", check="graph", tokens=300)


def _parts_cases(lanes: int, num_heads: int, big: bool) -> Iterator[PartsCase]:
    base = PartsCase("", "", 3, 7, 5, lanes)

    def case(name: str, promise: str, **changes: Any) -> PartsCase:
        return replace(base, name=f"merge parts {lanes}: {name}", promise=promise, **changes)

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
            yield case(
                f"layout: {layout}, {'float32' if float32 else 'own dtype'}",
                "parts of either dtype, with any strides",
                outputs=layout,
                float32=float32,
            )
    for layout in ("slice", "odd", "far"):
        yield case(f"out: {layout}", "results go where they are asked for", given=layout, tokens=3)
    if big:
        yield case("large", "a large batch", parts=8, tokens=4096, heads=num_heads)


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _tensor_changes(argument: str, first: str) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    yield argument, "dtype float64", lambda tensor: tensor.double()
    yield argument, "not a tensor", lambda tensor: tensor.tolist()
    yield argument, "a dimension short", lambda tensor: tensor[0]
    yield argument, "not contiguous", _every_other
    if argument != first:  # which says what device and sizes the others must have
        yield argument, "another device", lambda tensor: tensor.to("meta")
        yield argument, "two heads for one", lambda tensor: torch.cat([tensor, tensor], tensor.dim() - 2)


def _changes(wrapper: str) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """(argument, in what way it is wrong, what makes it so)."""
    if wrapper == PARTS:
        for argument in ("outputs", "lses", "out", "output_lse"):
            yield from _tensor_changes(argument, "outputs")
        yield "outputs", "another length of values", lambda tensor: tensor.repeat(1, 1, 1, 3)
        yield "lses", "a part short", lambda tensor: tensor[1:]
        for base in ("10", 2, None):
            yield "lse_base", repr(base), _constant(base)
        return
    for argument in ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse"):
        yield from _tensor_changes(argument, "output")
    for argument in ("prefix_output", "prefix_lse"):
        yield argument, "a token short", lambda tensor: tensor[1:] if tensor.dim() == 3 else tensor[:, 1:]
        yield (
            argument,
            "a token too many",
            lambda t: torch.cat([t, t[:1]] if t.dim() == 3 else [t, t[:, :1]], 3 - t.dim()),
        )
    yield "suffix_output", "a token short", lambda tensor: tensor[1:]
    yield "suffix_lse", "a token short", lambda tensor: tensor[:, 1:]
    yield "output", "another length of values", lambda tensor: tensor.repeat(1, 1, 3)
    for argument in ("prefix_lse", "suffix_lse"):
        yield "output_lse", f"{argument}'s memory", _constant(argument)
    for count in (-1, 5, 1.0, True):
        yield "prefill_tokens_with_context", str(count), _constant(count)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's merges; see mlagen.verify.cases."""
    wrappers, heads, big = spec["wrappers"], spec["model"]["num_heads"], device == "cuda"
    found: list[Case] = []
    for lanes in value_dims(spec):
        if STATES in wrappers:
            found += _states_cases(lanes, heads, big)
        if PARTS in wrappers:
            found += _parts_cases(lanes, heads, big)
    for wrapper in (STATES, PARTS):
        if wrapper in wrappers:
            found += [
                MergeStatesRefusalCase(
                    f"refuses: {argument}, {name} ({wrapper.removeprefix('merge_attn_')})",
                    f"{wrapper} names the argument in a ValueError or TypeError",
                    wrapper,
                    argument,
                    make,
                )
                for argument, name, make in _changes(wrapper)
            ]
    return found


INF = math.inf
# Each cycles through the (token, head) pairs of all parts; an odd number of entries, so that parts differ.
LSE_CYCLES: dict[str, list[float]] = {
    "none": [-INF],
    "none of either sign": [-INF, INF, INF],
    "mixed": [INF, 0.5, -INF, 1.25, -INF, -0.75, 3.0],
    "far apart": [80.0, -80.0, 0.0, 1e4, -1e4],
    "extreme": [3e38, -1.5e38, 1e30, -1e30, 3.4e38, -1.7e38, 0.0],
    "NaN": [NAN, 1.0, 2.0, -INF, 0.0],
}
LSE_PROMISES = {
    "normal": "both parts count",
    "equal": "parts of the same LSE count alike",
    "none": "rows without keys are 0, and their LSE -inf",
    "none of either sign": "+inf and -inf both stand for no keys",
    "mixed": "an empty part is not looked at, whatever its values are",
    "far apart": "a part that is far below the other counts nothing, and none overflows",
    "extreme": "any LSE from -2^127 on",
    "NaN": "an LSE of NaN shows in its row, and in no other",
}


def _lses(pattern: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """LSE f32 of a pattern, natural."""
    if pattern == "normal":
        return torch.randn(shape, generator=generator) * 2
    if pattern == "equal":
        return torch.full(shape, -1.5)
    cycle = torch.tensor(LSE_CYCLES[pattern])
    places = torch.arange(math.prod(shape)).view(shape) * 11 + torch.arange(shape[0])[:, None, None] * 2
    return cycle[places % len(cycle)]


def _figures(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    unit: float = 1.0,
) -> list[Figure]:
    """Figures of results against `merge`; `unit` is the natural logarithm of the LSE's base."""
    want, want_lse, size = expected
    error = (out.double() - want).abs().nan_to_num(nan=INF)
    allowed = UNIT_ROUNDOFF[out.dtype] * want.abs() + WEIGHT_STEPS * FP32_STEP * size + (size > 0) * SMALLEST[out.dtype]
    both = want.isnan() & out.isnan()
    figures = [worst("out", torch.where(both, 0.0, error), torch.where(both, 1.0, allowed))]
    if lse is not None:
        want_lse = want_lse / unit
        same = (lse.double() == want_lse) | (want_lse.isnan() & lse.isnan())
        error = torch.where(same, 0.0, (lse.double() - want_lse).abs().nan_to_num(nan=INF))
        steps = FP32_STEP * (8 + 4 * want_lse.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        figures.append(worst("lse", error, steps))
    return figures


@dataclass(frozen=True)
class States:
    """A call of merge_attn_states: its arguments by name, their buffers, and what it must give."""

    arguments: dict[str, Any]
    placed: dict[str, Placed]
    written: dict[str, Placed]
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def build_states(case: StatesCase, dtype: torch.dtype, device: str, seed: int) -> States:
    """The tensors of a case, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens, heads, lanes = case.tokens, case.heads, case.lanes
    lses = _lses(case.lse, (2, heads, tokens), generator)
    values = torch.randn(2, tokens, heads, lanes, generator=generator).to(dtype)
    if case.prefixes is not None:
        lses[0, :, case.prefixes :] = -INF
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
    written = {}
    if case.in_place is None:
        nothing = torch.full((tokens, heads, lanes), NAN, dtype=dtype, device=device)
        written["output"] = place(nothing, LAYOUTS[case.output], NAN)
    else:
        written["output"] = placed.pop(f"{case.in_place}_output")
    if case.output_lse:
        written["output_lse"] = place(torch.full((heads, tokens), NAN, device=device), output_lse, NAN)
    arguments: dict[str, Any] = {name: one.view for name, one in (placed | written).items()}
    if case.in_place is not None:
        arguments[f"{case.in_place}_output"] = written["output"].view
    if case.prefixes is not None:
        arguments["prefill_tokens_with_context"] = case.prefixes
    return States(arguments, placed, written, expected)


def _call_states(subject: Subject, call: States) -> list[Figure]:
    with subject.planned_for(None):
        returned = getattr(subject.package, STATES)(**call.arguments)
    if returned is not None:
        raise CaseFailedError(f"returned a {type(returned).__name__} instead of None")
    return _figures(call.arguments["output"], call.arguments.get("output_lse"), call.expected)


def _defaults(subject: Subject, call: States) -> list[Figure]:
    torch.set_default_device("meta")
    try:
        with subject.planned_for(None):
            getattr(subject.package, STATES)(**call.arguments)
        if torch.get_default_device().type != "meta":
            raise CaseFailedError("changed torch's default device")
    finally:
        torch.set_default_device(None)
    return _figures(call.arguments["output"], call.arguments.get("output_lse"), call.expected)


def _graph(subject: Subject, call: States) -> list[Figure]:
    _call_states(subject, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), subject.planned_for(None):
        getattr(subject.package, STATES)(**call.arguments)
    call.arguments["output"].fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    return _figures(call.arguments["output"], call.arguments["output_lse"], call.expected)


STATES_CHECKS: dict[str, Callable[[Subject, States], list[Figure]]] = {
    "reference": _call_states,
    "defaults": _defaults,
    "graph": _graph,
}


def _run_states(subject: Subject, case: StatesCase, seed: int) -> list[Figure]:
    dtype = DTYPES[subject.package.SPEC["spec"]["model"]["dtype"]]
    call = build_states(case, dtype, subject.device, seed)
    figures = STATES_CHECKS[case.check](subject, call)
    changed = [name for name, one in call.placed.items() if one.changed()]
    if changed:
        raise CaseFailedError(f"wrote to its input {', '.join(changed)}")
    for name, one in call.written.items():
        if one.spilled():
            raise CaseFailedError(f"wrote outside {name}")
    return figures


def _run_parts(subject: Subject, case: PartsCase, seed: int) -> list[Figure]:
    device, spec = subject.device, subject.package.SPEC["spec"]
    dtype, generator = DTYPES[spec["model"]["dtype"]], torch.Generator().manual_seed(seed)
    sizes = (case.parts, case.tokens, case.heads, case.lanes)
    lses = _lses(case.lse, (case.parts, case.heads, case.tokens), generator)
    values = torch.randn(sizes, generator=generator).to(torch.float32 if case.float32 else dtype)
    values[lses.isinf().transpose(1, 2)] = NAN
    values, lses = values.to(device), lses.to(device)
    expected = merge(values, lses)
    unit = math.log(2) if case.lse_base == "2" else 1.0
    lses = lses / unit
    expected = merge(values, lses * unit) if unit != 1.0 else expected
    if case.outputs == "swapped":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
        lses = lses.transpose(0, 1).contiguous().transpose(0, 1)
    elif case.outputs == "odd":
        placed = place(values.flatten(1, 2), LAYOUTS["odd"], NAN)
        row = placed.view.stride(1)
        values = placed.view.as_strided(
            sizes, (placed.view.stride(0), case.heads * row, row, 1), placed.view.storage_offset()
        )
    arguments: dict[str, Any] = {} if case.lse_base is None else {"lse_base": case.lse_base}
    written: dict[str, Placed] = {}
    if case.given is not None:
        layout = LAYOUTS[case.given]
        written["out"] = place(torch.full(sizes[1:], NAN, dtype=dtype, device=device), layout, NAN)
        written["output_lse"] = place(torch.full(lses.shape[1:], NAN, device=device), layout, NAN)
        arguments |= {name: one.view for name, one in written.items()}
    with subject.planned_for(None), poisoned_allocations():
        out, lse = getattr(subject.package, PARTS)(values, lses, **arguments)
    if out.dtype != dtype or out.shape != sizes[1:] or lse.dtype != torch.float32 or lse.shape != lses.shape[1:]:
        raise CaseFailedError(f"returned {out.dtype} {list(out.shape)} and {lse.dtype} {list(lse.shape)}")
    figures = _figures(out, lse, expected, unit)
    for name, one in written.items():
        if arguments[name].data_ptr() != {"out": out, "output_lse": lse}[name].data_ptr():
            raise CaseFailedError(f"{name} was given, but another tensor was returned")
        if one.spilled():
            raise CaseFailedError(f"wrote outside {name}")
    return figures


def _refusal(subject: Subject, case: MergeStatesRefusalCase) -> None:
    spec = subject.package.SPEC["spec"]
    dtype, lanes = DTYPES[spec["model"]["dtype"]], value_dims(spec)[0]
    if case.wrapper == STATES:
        arguments = dict(build_states(StatesCase("", "", 4, 3, lanes), dtype, subject.device, 0).arguments)
    else:
        arguments = {
            "outputs": torch.zeros(2, 4, 3, lanes, dtype=dtype, device=subject.device),
            "lses": torch.zeros(2, 3, 4, device=subject.device),
            "out": torch.zeros(4, 3, lanes, dtype=dtype, device=subject.device),
            "output_lse": torch.zeros(3, 4, device=subject.device),
        }
    wrong = case.make(arguments.get(case.argument))
    arguments[case.argument] = arguments[wrong] if isinstance(wrong, str) and wrong in arguments else wrong
    with subject.planned_for(None):
        try:
            getattr(subject.package, case.wrapper)(**arguments)
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{case.argument}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {case.argument}: {error}") from error
            return
    raise CaseFailedError(f"took a wrong {case.argument}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares none.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    match case:
        case StatesCase():
            return _run_states(subject, case, seed)
        case PartsCase():
            return _run_parts(subject, case, seed)
        case MergeStatesRefusalCase():
            _refusal(subject, case)
            return []
    raise TypeError(f"unknown case {case!r}")
