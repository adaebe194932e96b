"""Q as a pair, its latent and its RoPE columns: calls that have to give the bits of those with the whole Q."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.family import Check, Results
from mlagen.verify.call.invalid import Invalid, elsewhere, every_other
from mlagen.verify.call.memory import LAYOUTS, NAN, Layout, Placed, place
from mlagen.verify.call.results import Figure
from mlagen.verify.checks import AnyRun, copied, require_bits

ALIGNMENT = 16  # bytes
PLACES = {**LAYOUTS, "late": Layout(offset=1)}  # their strides do not show where they begin
# Where the two tensors lie, by the name of a case's check.
LAYOUTS_OF_PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "pair": (("contiguous", "contiguous"), ("transposed", "slice"), ("slice", "transposed"), ("odd", "odd")),
    "pair, one odd": (("contiguous", "odd"), ("odd", "slice"), ("contiguous", "late"), ("late", "contiguous")),
    "pair, far": (("far", "contiguous"), ("contiguous", "far")),
}
PROMISES = {
    "pair": "Q as two tensors of any strides gives the bits of one",
    "pair, one odd": "each of the two tensors may lie as little aligned as can be",
    "pair, far": "offsets of each of the two tensors are 64 bits wide",
}


def _placed(tensor: torch.Tensor, layout: str) -> Placed:
    """A tensor [tokens, heads, columns] or [requests, s_q, heads, columns] laid out."""
    if tensor.dim() == 3:
        return place(tensor, PLACES[layout], NAN)
    placed = place(tensor.flatten(0, 1), PLACES[layout], NAN)
    view = placed.view.unflatten(0, tensor.shape[:2])  # type: ignore[no-untyped-call]
    return Placed(view, placed.buffer, placed.before)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether all rows of a tensor begin at multiples of ALIGNMENT."""
    steps = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    return all(step % ALIGNMENT == 0 for step in steps)


def check(query: Callable[[AnyRun], torch.Tensor], layouts: tuple[tuple[str, str], ...]) -> Check:
    """Q as a pair of tensors, placed so, gives the bits of the whole of it, and the reference's results.

    Args:
        query: Q as a run's wrapper takes it.
        layouts: of the pairs' tensors.
    """

    def whole(run: AnyRun, q: torch.Tensor, layout: str, found: dict[str, Results | None]) -> Results | None:
        """Results of the whole Q; None where that is aligned otherwise than its name says."""
        if layout not in found:
            placed = _placed(q, layout).view
            same = _is_aligned(placed) == (layout == "contiguous")
            found[layout] = copied(run.call(q=placed)) if same else None
        return found[layout]

    def checked(run: AnyRun) -> list[Figure]:
        q, d_v = query(run), run.subject.facts.d_v
        figures: list[Figure] = []
        found: dict[str, Results | None] = {}
        for names in layouts:
            placed = [_placed(part, name) for part, name in zip((q[..., :d_v], q[..., d_v:]), names, strict=True)]
            latent, rope = (one.view for one in placed)
            results = run.call(q=(latent, rope))
            figures += run.compare(results)
            # If a row's RoPE columns begin at no multiple of ALIGNMENT, no kernel claims alignment for them.
            claims = [latent, *([rope] if d_v * q.element_size() % ALIGNMENT == 0 else [])]
            expected = whole(run, q, "contiguous" if all(map(_is_aligned, claims)) else "odd", found)
            if expected is not None:
                require_bits(f"a pair, {' and '.join(names)}", expected, results)
            if any(one.changed() for one in placed):
                raise CaseFailedError("wrote to its input q")
        return figures

    return checked


def checks(query: Callable[[AnyRun], torch.Tensor]) -> dict[str, Check]:
    """The checks of a family, by name."""
    return {name: check(query, layouts) for name, layouts in LAYOUTS_OF_PAIRS.items()}


def cases(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """(name, promise, check) of the cases of each wrapper; none where packages take only one tensor."""
    if facts.takes_pair:
        for name, promise in PROMISES.items():
            yield f"query: {name}", promise, name


def invalid(facts: Facts, dtype: torch.dtype) -> Iterator[Invalid]:
    """Invalid pairs; `dtype` is another than Q's."""
    d_v = facts.d_v

    def pair(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        return lambda q: change(q[..., :d_v], q[..., d_v:])

    if not facts.takes_pair:
        yield Invalid("q", "a pair", lambda q: (q[..., :1], q[..., 1:]))
        return
    yield Invalid("q", "a pair of the whole", pair(lambda latent, rope: (torch.cat((latent, rope), -1), rope)))
    yield Invalid("q", "a pair the wrong way round", pair(lambda latent, rope: (rope, latent)))
    yield Invalid("q", "a pair of other heads", pair(lambda latent, rope: (latent, rope[..., :-1, :])))
    yield Invalid("q", "a pair of other tokens", pair(lambda latent, rope: (latent, rope[:1])))
    yield Invalid("q", "a pair of other dtypes", pair(lambda latent, rope: (latent, rope.to(dtype))))
    yield Invalid("q", "a pair on two devices", pair(lambda latent, rope: (latent, elsewhere(rope))))
    yield Invalid("q", "a pair, one not contiguous", pair(lambda latent, rope: (latent, every_other(rope))))
    yield Invalid("q", "a pair of one", pair(lambda latent, rope: (latent,)))
    yield Invalid("q", "a pair of three", pair(lambda latent, rope: (latent, rope, rope)))
    yield Invalid("q", "a pair without RoPE", pair(lambda latent, rope: (latent, None)))
    yield Invalid("q", "a pair without latent", pair(lambda latent, rope: (None, rope)))
