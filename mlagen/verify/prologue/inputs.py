"""The tensors of a prologue's call, and their expected values after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout import DataField, Field, ScalesField
from mlagen.layout.codec import planes_of, write
from mlagen.verify import tolerance
from mlagen.verify.call import family
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.memory import LAYOUTS, Placed, place, place_vector, seeded
from mlagen.verify.call.results import Figure
from mlagen.verify.paged.angles import draw_angles, draw_positions
from mlagen.verify.paged.pages import TENSOR_SCALE, CacheMemory, alias, draw_slots, random_pages
from mlagen.verify.paged.rope import MOST_OFF, codes
from mlagen.verify.paged.values import VALUES
from mlagen.verify.prologue.cases import PrologueCase
from mlagen.verify.prologue.reference import normalise, turned_queries, turned_rows
from mlagen.verify.prologue.side import (
    CACHE_ARGUMENT,
    CONCAT,
    PADDED,
    POSITIONS_ARGUMENT,
    Q_ARGUMENT,
    PrologueSide,
)

EPS = 0.5  # which shows in Q and in rows
POWERS = "powers"  # rows with a norm that is exact, if eps is 0
HALVES = ("bf16", "fp16")


@dataclass
class PrologueInputs(family.Inputs):
    """A call of a prologue.

    Attributes:
        side: the cache's.
        case: the case.
        arguments: by name, in the order of the wrapper's signature.
        memory: the cache.
        before: its bytes before the call, on the CPU; of a far cache nothing.
        written: tensors that the call changes in place, and their values before it, by name.
    """

    side: PrologueSide
    case: PrologueCase
    arguments: dict[str, Any]
    memory: CacheMemory
    before: torch.Tensor
    written: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def reset(self) -> None:
        """Put back the values that a call changes in place."""
        for tensor, values in self.written.values():
            tensor.copy_(values)

    def renew(self) -> Iterator[None]:
        """The values and the cache as they were, then tokens in another order."""
        for turned in (False, True):
            for name in ("kv", Q_ARGUMENT[self.case.wrapper], "kv_c", "k_pe"):
                values = self.written[name][1] if name in self.written else self.arguments.get(name)
                if turned and values is not None:
                    values.copy_(values.flip(0))
            self.reset()
            self.memory.buffer.copy_(self.before)
            yield

    def _original(self, name: str) -> torch.Tensor:
        """An argument before the call, on the CPU."""
        found = self.written[name][1] if name in self.written else self.arguments[name]
        assert isinstance(found, torch.Tensor)
        return found.cpu()

    @property
    def eps(self) -> float:
        """Eps of the norms."""
        return float(self.arguments["eps"])

    @property
    def exact(self) -> bool:
        """Whether the reference's rounding errors of rows are the kernel's."""
        return "kv" not in self.case.weights or self.case.values == POWERS

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the tokens of Q."""
        q = self._original(Q_ARGUMENT[self.case.wrapper])
        return self._original(POSITIONS_ARGUMENT[self.case.wrapper])[: len(q)]

    def queries(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [T, H, columns] after the call, computed in a dtype, and the sizes of its terms."""
        return turned_queries(self.side, self.unrotated(dtype), self._original("cos_sin_cache"), self.positions)

    def unrotated(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Q [T, H, columns] in front of RoPE, computed in a dtype."""
        q = self._original(Q_ARGUMENT[self.case.wrapper]).to(dtype)
        if self.case.wrapper != CONCAT:
            weight = self.arguments.get("q_norm_weight")
            q = normalise(q, None if weight is None else weight.cpu(), self.eps)
        return q

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [T, columns] as they are quantised, and their slots; -1 where a row is skipped."""
        concat = self.case.wrapper == CONCAT
        parts = [self._original(name).flatten(1) for name in (("kv_c", "k_pe") if concat else ("kv",))]
        weight = self.arguments.get("kv_norm_weight")
        rows, known = turned_rows(
            self.side,
            torch.cat(parts, 1),
            self._original("cos_sin_cache"),
            self.positions,
            None if weight is None else weight.cpu(),
            self.eps,
        )
        slots = self._original("slot_mapping")
        inside = known[: len(slots)] & (slots >= 0) & (slots < self.memory.pages * self.case.pages.block_size)
        return rows, torch.where(inside, slots, -1)

    def compare(self, results: family.Results) -> list[Figure]:
        """Figures of Q. Raises CaseFailedError unless the rows of the cache are the reference's."""
        rows, slots = self.rows()
        self._compare_cache(rows, slots)
        if self.case.wrapper == CONCAT:
            self._compare_in_place(rows, slots)
            want, _ = self.queries(torch.float32)
            if not torch.equal(results["q"].cpu(), want.to(self.side.dtype)):
                raise CaseFailedError("q_pe differs from the reference")
            return []
        want, sizes = self.queries()
        heads = want.shape[1]
        got = results["q"].cpu()
        if bool((got[:, heads:] != 0).any()):
            raise CaseFailedError("heads that pad Q are not 0")
        dtype = self.side.dtype
        # A sum of squares is off by a step a term at most, its root by half of that; then a few products and sums.
        steps = (want.shape[-1] / 2 + 16) * tolerance.FP32_STEP
        allowed = tolerance.UNIT_ROUNDOFF[dtype] * want.abs() * (1 + 2.0**-16) + steps * sizes
        error = (got[:, :heads].double() - want).abs()
        return [tolerance.worst("q", error, allowed + tolerance.SMALLEST[dtype] / 2)]

    def _compare_cache(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        layout, size, memory = self.side.layout, self.case.pages.block_size, self.memory
        there = slots >= 0
        where, rows = slots[there], rows[: len(slots)][there]
        one_page = torch.zeros(1, layout.page_bytes(max(len(where), 1)), dtype=torch.uint8)
        write(layout, one_page, max(len(where), 1), torch.arange(len(where)), rows, TENSOR_SCALE)
        want = [plane[0, : len(where)] for plane in planes_of(layout, one_page, max(len(where), 1))]
        device = memory.buffer.device
        pages, offsets = (where // size).to(device), (where % size).to(device)
        got = [plane[pages, offsets].cpu() for plane in planes_of(layout, memory.in_buffer(memory.buffer), size)]
        for field in layout.fields:
            part = slice(field.offset, field.offset + field.nbytes)
            left, right = (planes[field.plane][:, part].contiguous() for planes in (got, want))
            wrong = self._wrong(field, left, right)
            if bool(wrong.any()):
                raise CaseFailedError(f"{int(wrong.sum())} of {wrong.numel()} {field.name} differ from the reference's")
        if self.case.pages.far:
            return
        expected, buffer = self.before.clone(), memory.buffer.cpu()
        for plane, found in zip(planes_of(layout, memory.in_buffer(expected), size), got, strict=True):
            plane[where // size, where % size] = found
        if not torch.equal(buffer, expected):
            raise CaseFailedError("bytes outside the rows that are written changed")

    def _wrong(self, field: Field, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """Which values of a field are not the reference's, nor in few of them the next ones after another rounding."""
        if self.exact or not isinstance(field, DataField | ScalesField) or field.dtype == "ue8m0":
            return got != want
        if field.dtype == "fp32":
            one, other = got.view(torch.float32), want.view(torch.float32)
            rounds = isinstance(field, ScalesField) and field.rule.rounding == "power_of_two"
            return ((one - other).abs() > other.abs() * (0.0 if rounds else 2.0**-7)) & (one != other)
        if field.dtype in HALVES:
            one, other = got.view(self.side.dtype), want.view(self.side.dtype)
            off = _steps(one, other)
            # A norm rounded to the next number is off by a step, which is more of a difference that RoPE makes of it.
            largest = other.double().abs().amax(1, keepdim=True) if other.numel() else other.double()
            step = 2 * tolerance.UNIT_ROUNDOFF[self.side.dtype] * largest
            off = torch.where((one.double() - other.double()).abs() <= step, off.clamp(max=1), off)
        else:
            off = (codes(got, field.dtype == "e2m1") - codes(want, field.dtype == "e2m1")).abs()
        few = float((off == 1).float().mean() if off.numel() else 0) <= MOST_OFF
        return off > 1 if few else off > 0

    def _compare_in_place(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        written = torch.zeros(len(rows), dtype=torch.bool)
        written[: len(slots)] = slots >= 0
        d_c = self.side.first
        for name, want in (("kv_c", rows[:, :d_c]), ("k_pe", rows[:, d_c:])):
            got, before = self.arguments[name].cpu().flatten(1), self._original(name).flatten(1)
            off = _steps(got, torch.where(written[:, None], want, before))
            few = name == "kv_c" and not self.exact and float((off == 1).float().mean()) <= MOST_OFF
            if bool((off > (1 if few else 0)).any()):
                raise CaseFailedError(f"{name} differs from the row that is written, or from itself where none is")


def _steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """By how many numbers of their 16-bit dtype values differ."""

    def ordered(values: torch.Tensor) -> torch.Tensor:
        words = values.contiguous().view(torch.int16).int()
        return torch.where(words < 0, -32768 - words, words)

    return (ordered(got) - ordered(want)).abs()


def _rows(case: PrologueCase, side: PrologueSide, generator: torch.Generator) -> torch.Tensor:
    """Rows [T, columns] of a pattern."""
    shape = (case.tokens or 0, side.layout.columns)
    if case.values == POWERS:
        signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
        return (signs * torch.exp2(torch.arange(shape[0]) % 9 - 4.0)[:, None]).to(side.dtype)
    if case.values != "random":
        return VALUES[case.values](side, case.tokens, generator)
    magnitude = torch.exp(torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * magnitude).to(side.dtype)


def build(case: PrologueCase, side: PrologueSide, device: str, seed: int) -> PrologueInputs:
    """The inputs of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    rows, size, d_c, concat = _rows(case, side, generator), case.pages.block_size, side.first, case.wrapper == CONCAT
    tokens = len(rows)
    memory = random_pages(side, case.pages, max(3, -(-2 * tokens // size)), device, generator)
    slots = draw_slots(case, tokens, memory.pages * size, generator)
    columns = side.rope if concat else side.layout.columns
    q = (3 * torch.randn(tokens, case.heads, columns, generator=generator)).to(side.dtype)
    table = draw_angles(side, case.wide, generator)
    weights = {name: torch.randn(side.layout.columns, generator=generator).to(side.dtype) for name in ("q", "kv")}
    placed: dict[str, Placed] = {
        "slots": place_vector(slots.to(device), 0),
        "positions": place_vector(draw_positions(case.positions, tokens, generator).to(device), 0),
        "angles": place(table.to(device), LAYOUTS[case.tables], 0.0),
        "q": place(q.to(device), LAYOUTS[case.q], 0.0),
    }
    for name, part in {"kv_c": rows[:, :d_c], "k_pe": rows[:, d_c:]}.items() if concat else {"kv": rows}.items():
        placed[name] = place(part.to(device), LAYOUTS[case.rows], 0.0)
    for name in [name for name in weights if name in case.weights]:
        weight = weights[name][: d_c if concat else None]
        placed[f"{name}_norm_weight"] = place_vector(weight.to(device), 0.0)
    arguments = _arguments(case, side, placed, memory.tensor, device)
    eps = 0.0 if case.values == POWERS else EPS
    arguments = {name: eps if name == "eps" else value for name, value in arguments.items()}
    given: dict[str, Placed] = {}
    if case.given:
        padded = torch.full((tokens, case.heads + case.padded, columns), 0.5, dtype=side.dtype, device=device)
        given["q"] = place(padded, LAYOUTS[case.given], 0.0)
        arguments["out"] = given["q"].view
    changed = {"q_pe": "q", "k_pe": "k_pe", "kv_c": "kv_c"} if concat else {} if case.wrapper == PADDED else {"q": "q"}
    written = {name: (arguments[name], arguments[name].clone()) for name in changed}
    given |= {own: placed.pop(own) for own in changed.values()}
    before = memory.buffer[:0] if case.pages.far else memory.buffer.cpu().clone()
    return PrologueInputs(side, case, arguments, memory, before, written, placed=placed, given=given)


def _arguments(
    case: PrologueCase, side: PrologueSide, placed: dict[str, Placed], cache: torch.Tensor, device: str
) -> dict[str, Any]:
    """Arguments by name, in the order of the wrapper's signature."""
    views = {name: one.view for name, one in placed.items()}
    weights: dict[str, Any] = {name: views[name] for name in ("q_norm_weight", "kv_norm_weight") if name in views}
    scale = torch.tensor([TENSOR_SCALE], device=device) if side.layout.tensor_scale else None
    slots, positions = {"slot_mapping": views["slots"]}, {POSITIONS_ARGUMENT[case.wrapper]: views["positions"]}
    angles, pages = {"cos_sin_cache": views["angles"]}, {CACHE_ARGUMENT[case.wrapper]: cache}
    if case.wrapper == CONCAT:
        k_pe = views["k_pe"] if case.k_pe == "2d" else views["k_pe"][:, None]
        first = {**positions, "q_pe": views["q"], "k_pe": k_pe, "kv_c": views["kv_c"], **angles, "is_neox": side.neox}
        named = {"kv_cache_dtype": alias(side.layout), "kv_cache_scale": scale, "eps": EPS}
        return {**first, **slots, **pages, **named, **weights}
    first = {Q_ARGUMENT[case.wrapper]: views["q"], "kv": views["kv"], **pages, **slots, **positions, **angles}
    size, scales = case.pages.block_size, {} if scale is None else {"scale": scale}
    sizes: dict[str, Any] = {"eps": EPS, "block_size": size}
    if case.wrapper == PADDED:
        sizes = {"q_head_padded": case.heads + case.padded, "eps": EPS, "cache_block_size": size}
    return {**first, **sizes, **weights, **scales}
