"""Verification of the top-k kernels: calls, and results against the reference."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from mlagen.verify import checks
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import bits
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject, large_allocations, launch_of, sm90_modules
from mlagen.verify.checks import require_none, require_tensors
from mlagen.verify.topk.cases import MergeCase, SelectCase, cases
from mlagen.verify.topk.inputs import Inputs, build_merge, build_select
from mlagen.verify.topk.invalid import DECODE, MERGE, NAME, PAGES
from mlagen.verify.topk.reference import merge, slots, top_k

TopkCase = SelectCase | MergeCase
TopkRun = Run[TopkCase, Inputs]
BY_NAME = {"scores", "page_size", "out", "out_raw_indices", "row_to_batch", "row_starts", "page_table_row_starts"}


def _build(subject: Subject, case: TopkCase, seed: int) -> Inputs:
    if isinstance(case, MergeCase):
        return build_merge(case, subject.device, seed)
    return build_select(case, subject.device, seed)


def _call(run: TopkRun, **given: Any) -> Results:
    """Calls by position, as callers do, but for arguments that wrappers take by name or that may be absent."""
    case, arguments = run.case, {**run.inputs.arguments, **given}
    wrapper = MERGE if isinstance(case, MergeCase) else case.wrapper
    named = BY_NAME - {"scores", "out"} if wrapper == MERGE else BY_NAME
    if wrapper != PAGES:
        named = named - {"row_starts"}
    positional = [value for name, value in arguments.items() if name not in named]
    launch = launch_of(run.subject.package)
    choices = _choices(run)
    forced = launch.force(**choices) if choices else contextlib.nullcontext()
    # Within a mode of torch every call is checked anew.
    large = contextlib.nullcontext() if run.subject.keeps else large_allocations(run.subject.device)
    with forced, large:
        returned = run.subject.call(
            wrapper, *positional, **{name: value for name, value in arguments.items() if name in named}
        )
    results = {name: one.view for name, one in run.inputs.given.items()}
    if isinstance(case, MergeCase):
        return dict(zip(("indices", "scores"), returned, strict=True))
    if wrapper == PAGES:
        return results | {"indices": returned}
    require_none(returned)
    return results


def _choices(run: TopkRun) -> dict[str, Any]:
    """The kernel and the tile that a case is forced to, as the package has it; empty where it is not, or not here."""
    tiles, case = importlib.import_module(f"{run.subject.package.__name__}._tiles"), run.case
    if isinstance(case, MergeCase):
        return {"tile": tiles.TopkMergeTile(*case.tile)} if case.tile else {}
    if case.sm90_tile:
        choices = {"kernel": case.kernels[0], "tile": tiles.TopkSm90Tile(*case.sm90_tile)}
        return choices if _has_sm90(run.subject) else {}
    if case.tile is None or run.subject.kernel is not None:
        return {}
    return {"kernel": "portable", "tile": tiles.TopkTile(*case.tile, 2)}


def _has_sm90(subject: Subject) -> bool:
    if "_topk_sm90" not in sm90_modules(subject.package):
        return False
    if subject.device == "cpu":
        return subject.runs_sm90
    device = torch.device(subject.device, torch.cuda.current_device())
    return bool(launch_of(subject.package).device_facts(device).sm90)


def _expected_select(run: TopkRun, case: SelectCase) -> Results:
    scores = run.inputs.arguments["input" if case.wrapper == PAGES else "logits"]
    device = scores.device
    ranges = torch.tensor(run.inputs.ranges, dtype=torch.int64, device=device).view(-1, 2, 1)
    first, end = ranges[:, 0], ranges[:, 1]  # [rows, 1]
    columns = torch.arange(scores.shape[1], device=device)
    values = scores[: len(ranges)].float()
    inside = (columns >= first) & (columns < end)  # [rows, columns]
    indices, found = top_k(torch.where(inside, values, -torch.inf), case.k)
    indices = torch.where(indices >= 0, indices - first, -1).int()
    expected = {"indices": indices, "raw": indices, "scores": found}
    if case.wrapper == PAGES and len(ranges):
        expected["indices"] = torch.stack([_slots(run, case, row, one) for row, one in enumerate(indices)])
    return {name: rows for name, rows in expected.items() if name in {"indices", *case.gives}}


def _slots(run: TopkRun, case: SelectCase, row: int, indices: torch.Tensor) -> torch.Tensor:
    given = run.inputs.arguments
    table, batches = given["src_page_table"], given.get("row_to_batch")
    batch = row if batches is None else int(batches[row])
    starts = given.get("page_table_row_starts", given.get("row_starts"))
    start = 0 if starts is None else int(starts[row])
    return slots(indices, table[batch] if 0 <= batch < len(table) else None, start, case.page_size)


def _expected_merge(run: TopkRun, case: MergeCase) -> Results:
    ids, scores = run.inputs.arguments["ids"], run.inputs.arguments["scores"]
    assert run.inputs.whole is not None
    found = [top_k(row, case.k) for row in run.inputs.whole.to(ids.device)]
    for row, (indices, values) in enumerate(found):
        own, same = merge(scores[row], ids[row], case.k)
        if not (torch.equal(own, indices) and torch.equal(same, values)):
            raise CaseFailedError("the reference merges ranks to something else than the whole")
    if not found:
        return {"indices": ids.new_empty((0, case.k)), "scores": scores.new_empty((0, case.k))}
    return {"indices": torch.stack([one for one, _ in found]), "scores": torch.stack([one for _, one in found])}


def _compare(run: TopkRun, results: Results) -> list[Figure]:
    case = run.case
    expected = _expected_merge(run, case) if isinstance(case, MergeCase) else _expected_select(run, case)
    if results.keys() != expected.keys():
        raise CaseFailedError(f"gave {', '.join(results)} instead of {', '.join(expected)}")
    require_tensors(run, results, {name: (want.dtype, tuple(want.shape)) for name, want in expected.items()})
    for name, want in expected.items():
        got = results[name]
        wrong = (bits(got.contiguous()) != bits(want)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            found = f"{list(at)} first: {got[at].item()}, not {want[at].item()}"
            raise CaseFailedError(f"{len(wrong)} of {want.numel()} {name} differ, {found}")
    return []


def _batch(run: TopkRun) -> list[Figure]:
    """Rows called in another order, and one by one, have the bits that they have together."""
    case, arguments = run.case, run.inputs.arguments
    assert isinstance(case, SelectCase)
    whole = checks.copied(run.call())
    for order in (list(range(case.rows))[::-1], [case.rows - 1]):
        rows = torch.tensor(order, device=run.subject.device)
        own = {name: arguments[name][rows] for name in ("logits", "row_starts", "row_ends", "indices", "scores")}
        own |= {"num_rows": len(order), "stride0": own["logits"].stride(0)}
        results = {"indices": own["indices"], "scores": own["scores"]}
        run.on(Inputs({**arguments, **own})).call()
        checks.require_bits(f"rows {order}", checks.picked(whole, order), results)
    return run.compare(whole)


def _renew(run: TopkRun) -> Iterator[None]:
    """Scores in another order, and shorter rows."""
    arguments = run.inputs.arguments
    arguments["logits"].copy_(arguments["logits"].flip(1))
    yield
    arguments["row_ends"].sub_(100)
    run.inputs.ranges = [(first, max(end - 100, first)) for first, end in run.inputs.ranges]
    yield


def _valid(subject: Subject, case: RefusedCase) -> dict[str, Any]:
    if case.wrapper == MERGE:
        return _build(subject, MergeCase("", "", 3, 40, 5, 2), 0).arguments
    sizes: dict[str, Any] = {"next_n": 2} if case.wrapper == DECODE else {}
    gives = ("scores", "raw") if case.wrapper == PAGES else ("scores",)
    starts: dict[str, Any] = {"starts": (0,), "page_starts": (0,), "batches": "mapped"} if case.wrapper == PAGES else {}
    made = SelectCase("", "", case.wrapper, 4, 16, 5, gives=gives, pages=9, **sizes, **starts)
    return _build(subject, made, 0).arguments


TOPK = Family(
    name=NAME,
    kinds=(SelectCase, MergeCase),
    cases=cases,
    build=_build,
    call=_call,
    compare=_compare,
    checks={
        "reference": checks.reference,
        "determinism": checks.determinism,
        "defaults": checks.defaults,
        "graph": checks.graph(_renew),
        "batch": _batch,
    },
    valid=_valid,
)
