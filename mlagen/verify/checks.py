"""Runs one case against a generated package and says what it found."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from mlagen.verify import tolerance
from mlagen.verify.cases import FEW_HEADS, SHARED_INDICES, Case, Problem, RefusalCase, SparseFwdCase
from mlagen.verify.facts import Facts
from mlagen.verify.inputs import LAYOUTS, Inputs, Placed, bits, build, is_wholly_used, place, place_workspace
from mlagen.verify.reference import sparse_attention
from mlagen.verify.results import Figure

CPU_MULTIPROCESSORS = 8  # of the device that the interpreter stands for
NAN = float("nan")
INDEX_UNION_ROWS = 1 << 28  # as many as an entry of a list can name
SM90_KERNELS = "cuda, sm90 kernels"


class CaseFailedError(Exception):
    """A case does not hold; the message says what was found."""


class Results(NamedTuple):
    """What an attention wrapper gave: out [tokens, heads, d_v]; max_logits and lse [tokens, heads] or None."""

    out: torch.Tensor
    max_logits: torch.Tensor | None
    lse: torch.Tensor | None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Results:
        """The results, each that is there changed."""
        max_logits = None if self.max_logits is None else change(self.max_logits)
        return Results(change(self.out), max_logits, None if self.lse is None else change(self.lse))


def sm90_modules(package: ModuleType) -> list[Any]:
    """The package's modules that say which of their calls an sm90 kernel runs."""
    return [module for name in ("SM90_CALLS", "SM90_QUERIES") for module in _modules_with(package, name)]


def union_modules(package: ModuleType) -> list[Any]:
    """Those that have a table of calls in which neighbouring tokens share rows."""
    return _modules_with(package, "UNION")


def swap_ab_modules(package: ModuleType) -> list[Any]:
    """Those whose calls of few heads have an sm90 kernel of their own."""
    return _modules_with(package, "SWAP_AB_HEADS")


def _modules_with(package: ModuleType, table: str) -> list[Any]:
    return [module for module in vars(package).values() if isinstance(module, ModuleType) and hasattr(module, table)]


@dataclass(frozen=True)
class Subject:
    """A generated package under test.

    Attributes:
        package: the imported package.
        facts: what its spec says.
        device: "cpu" (the interpreter) or "cuda".
        target: whose tiles the interpreter reads; on a GPU SM90_KERNELS gives every call that can to those, FEW_HEADS
            to the one of few heads, and SHARED_INDICES to those in which neighbouring tokens share rows.
    """

    package: ModuleType
    facts: Facts
    device: str
    target: str

    @contextlib.contextmanager
    def planned_for(self, multiprocessors: int | None) -> Iterator[None]:
        """Within, wrappers plan for this subject's target (CPU) and for a device of so many multiprocessors."""
        launch: Any = importlib.import_module(f"{self.package.__name__}._launch")
        actual = launch.device_facts

        def device_facts(device: torch.device) -> Any:
            if self.device == "cpu":
                return launch.DeviceFacts(self.target, multiprocessors or CPU_MULTIPROCESSORS)
            facts = actual(device)
            return facts if multiprocessors is None else facts._replace(multiprocessors=multiprocessors)

        launch.device_facts = device_facts
        try:
            with self._forced():
                yield
        finally:
            launch.device_facts = actual

    @contextlib.contextmanager
    def _forced(self) -> Iterator[None]:
        """Within, every call that can runs the kernels that are this subject's target, if it is one of kernels."""
        changes: list[tuple[Any, dict[str, Any]]] = []
        if self.target in (SM90_KERNELS, FEW_HEADS):
            changes = [
                (module, {"SM90_CALLS": [(module.ANY, 0)]} if hasattr(module, "SM90_CALLS") else {"SM90_QUERIES": 0})
                for module in sm90_modules(self.package)
            ]
        if self.target == SM90_KERNELS:  # of any heads the one for many
            changes += [(module, {"SWAP_AB_HEADS": ()}) for module in swap_ab_modules(self.package)]
        elif self.target == FEW_HEADS:
            changes += [(module, {"UNION": [(module.ANY, module.ANY + 1)]}) for module in union_modules(self.package)]
        elif self.target == SHARED_INDICES:
            changes = [
                (
                    module,
                    {
                        "UNION": [(module.GROUP_HEADS, 0), (module.ANY, module.ANY + 1)],
                        "INDEX_UNION_ROWS": INDEX_UNION_ROWS,
                    },
                )
                for module in union_modules(self.package)
            ]
        before = [(module, {name: getattr(module, name) for name in values}) for module, values in changes]
        try:
            _assign(changes)
            yield
        finally:
            _assign(before)

    def fitted(self, problem: Problem) -> Problem:
        """The problem with as many heads as the kernels hold that are this subject's target."""
        most = [problem.heads]
        if self.target == SHARED_INDICES:
            most += [module.GROUP_HEADS for module in union_modules(self.package)]
        elif self.target == FEW_HEADS:
            most += [module.SWAP_AB_HEADS[-1] for module in swap_ab_modules(self.package)]
        return replace(problem, heads=min(most))

    def attend(self, case: SparseFwdCase, inputs: Inputs, **given: Any) -> Results:
        """Calls the case's wrapper; `given` holds further arguments by name."""
        facts = self.facts
        arguments: dict[str, Any] = {"enable_batch_invariant": case.batch_invariant, **given}
        if inputs.out is not None:
            arguments.setdefault("out", inputs.out.view)
        if inputs.sink is not None:
            arguments["attn_sink"] = inputs.sink
        if inputs.length is not None:
            arguments["topk_length"] = inputs.length
        call = getattr(self.package, case.wrapper)
        with self.planned_for(case.multiprocessors), poisoned_allocations():
            if case.wrapper == "flash_mla_sparse_fwd":
                results = call(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, d_v=facts.d_v, **arguments)
                return Results(*results)
            if "lse" not in arguments:
                arguments["lse"] = torch.full(inputs.q.shape[:2], NAN, device=self.device)
            call = functools.partial(call, inputs.q, inputs.kv, inputs.indices, inputs.sm_scale)
            out = call(case.splits, case.multiprocessors, **arguments)
            return Results(out, None, arguments["lse"])


def _assign(changes: list[tuple[Any, dict[str, Any]]]) -> None:
    """Sets names of modules, which choose schedules anew, those that keep any."""
    for module, values in changes:
        for name, value in values.items():
            setattr(module, name, value)
        if hasattr(module, "_schedule"):
            module._schedule.cache_clear()


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within, torch.empty gives NaN: what a kernel leaves unwritten, or reads unwritten, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def compare(subject: Subject, inputs: Inputs, results: Results) -> list[Figure]:
    """Figures of `results` against the reference.

    Raises:
        CaseFailedError: a result has another dtype or shape than it should.
    """
    facts = subject.facts
    tokens, heads, d_qk = inputs.q.shape
    dtype = getattr(torch, facts.dtype)
    _require("out", results.out, dtype, (tokens, heads, facts.d_v))
    for name, stat in (("max_logits", results.max_logits), ("lse", results.lse)):
        if stat is not None:
            _require(name, stat, torch.float32, (tokens, heads))
    expected = sparse_attention(
        inputs.q,
        inputs.kv,
        inputs.indices[:, 0],
        inputs.sm_scale,
        facts.d_v,
        inputs.sink,
        inputs.length,
        facts.lse_base,
        facts.empty_row_lse,
    )
    figures = tolerance.out_errors(results.out, expected, d_qk, partials=facts.partials)
    if results.max_logits is not None:
        figures.append(tolerance.max_logits_error(results.max_logits, expected, d_qk, facts.lse_base))
    if results.lse is not None:
        topk = inputs.indices.shape[2]
        figures.append(tolerance.lse_error(results.lse, expected, d_qk, topk, facts.lse_base))
    return figures


def _require(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise CaseFailedError(f"{name} is {tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(shape)}")


def _check_untouched(placed: dict[str, Placed]) -> None:
    changed = [name for name, tensor in placed.items() if tensor.changed()]
    if changed:
        raise CaseFailedError(f"wrote to its input {', '.join(changed)}")


def _check_bits(what: str, one: Results, other: Results) -> None:
    """Raises CaseFailedError unless both hold the same bits."""
    for name, left, right in zip(Results._fields, one, other, strict=True):
        if left is not None and right is not None and not torch.equal(bits(left), bits(right)):
            count = int((bits(left) != bits(right)).sum())
            raise CaseFailedError(f"{what}: {count} of {left.numel()} elements of {name} have other bits")


def _copy(results: Results) -> Results:
    return results.map(torch.Tensor.clone)


def _reference(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    results = subject.attend(case, inputs)
    figures = compare(subject, inputs, results)
    _check_untouched(inputs.placed)
    if inputs.out is not None:
        if results.out.data_ptr() != inputs.out.view.data_ptr():
            raise CaseFailedError("out was given, but another tensor was returned")
        if inputs.out.spilled():
            raise CaseFailedError("wrote outside out")
    return figures


def _determinism(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    first = _copy(subject.attend(case, inputs))
    _check_bits("second call", first, subject.attend(case, inputs))
    return compare(subject, inputs, first)


def _rows(inputs: Inputs, rows: torch.Tensor) -> Inputs:
    """The same call for some of its tokens, in another order."""
    return replace(
        inputs,
        q=inputs.q[rows].contiguous(),
        indices=inputs.indices[rows].contiguous(),
        length=None if inputs.length is None else inputs.length[rows].contiguous(),
        out=None,
        placed={},
    )


def _invariance(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    tokens = inputs.q.shape[0]
    whole = _copy(subject.attend(case, inputs))

    def check(what: str, rows: list[int], changed: Inputs | None = None) -> None:
        picked = torch.tensor(rows, device=inputs.q.device)
        got = subject.attend(case, changed or _rows(inputs, picked))
        _check_bits(what, whole.map(lambda tensor: tensor[picked]), got.map(lambda tensor: tensor[: len(rows)]))

    check("alone", [tokens - 1])
    check("in another order", list(range(tokens))[::-1])
    many = [0] * (1 if subject.device == "cpu" else 300) + list(range(tokens)) * 2
    check("in a larger batch", many)
    # The first row stays; the others get other queries, indices and lengths.
    others = _rows(inputs, torch.arange(tokens, device=inputs.q.device))
    others.q[1:] = others.q[1:].flip(2)
    others.indices[1:, :, ::2] = -1
    if others.length is not None:
        others.length[1:] = 1
    check("beside other rows", [0], others)
    # A multiple of 16 more columns, so that the indices stay aligned as they were.
    wider = _rows(inputs, torch.arange(tokens, device=inputs.q.device))
    columns = torch.full_like(inputs.indices[:, :, :1], -1).expand(-1, -1, 800)
    check("in a wider call", list(range(tokens)), replace(wider, indices=torch.cat([wider.indices, columns], 2)))
    return compare(subject, inputs, whole)


def _buffers(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    flash = case.wrapper == "flash_mla_sparse_fwd"
    names = ("max_logits", "lse") if flash else ("lse",)
    stats = {
        name: place(torch.full((1, *inputs.q.shape[:2]), NAN, device=subject.device), LAYOUTS["contiguous"], NAN)
        for name in names
    }
    results = subject.attend(case, inputs, **{name: stat.view[0] for name, stat in stats.items()})
    figures = compare(subject, inputs, results)
    buffers = {"out": inputs.out, **stats}
    for name, buffer in buffers.items():
        tensor = getattr(results, name)
        assert buffer is not None
        if tensor.data_ptr() != buffer.view.data_ptr():
            raise CaseFailedError(f"{name} was given, but another tensor was returned")
        if buffer.spilled():
            raise CaseFailedError(f"wrote outside {name}")
    _check_untouched(inputs.placed)
    return figures


def _out_alone(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    return compare(subject, inputs, subject.attend(case, inputs, lse=None))


def _workspace(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    tokens, heads, _ = inputs.q.shape
    topk = inputs.indices.shape[2]

    def size(count: int) -> int:
        with subject.planned_for(case.multiprocessors):
            device = inputs.q.device
            options = {"enable_batch_invariant": case.batch_invariant}
            return int(subject.package.workspace_size(device, count, heads, topk, case.splits, **options))

    figures: list[Figure] = []
    first: Results | None = None
    for what, count in (("for all tokens", tokens), ("for two tokens", 2), ("for one token", 1)):
        floats = size(count)
        if floats == 0:
            raise CaseFailedError("workspace_size is 0 for a call in splits")
        buffer = place_workspace(floats, subject.device)
        results = _copy(subject.attend(case, inputs, workspace=buffer.view.view(-1)))
        figures += compare(subject, inputs, results)
        if not is_wholly_used(buffer.view.view(-1), subject.facts):
            raise CaseFailedError(f"a workspace {what} is not wholly used")
        if buffer.spilled():
            raise CaseFailedError(f"wrote outside a workspace {what}")
        if first is not None:
            _check_bits(f"workspace {what}", first, results)
        first = first or results
    with contextlib.suppress(ValueError):
        subject.attend(case, inputs, workspace=torch.empty(size(1) - 4, device=subject.device))
        raise CaseFailedError("took a workspace too small for one token")
    return figures


def _defaults(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    lse = torch.full(inputs.q.shape[:2], NAN, device=subject.device)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        results = subject.attend(case, inputs, lse=lse)
        if torch.get_default_dtype() != torch.float64 or torch.get_default_device().type != "meta":
            raise CaseFailedError("changed torch's default dtype or device")
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    return compare(subject, inputs, results)


def _stream(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    _reference(subject, case, inputs)  # compiles, so that the launch below is not late
    wanted = inputs.q.clone()
    inputs.q.fill_(NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # A launch on another stream would read q too early.
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        inputs.q.copy_(wanted)
        results = subject.attend(case, inputs)
    stream.synchronize()
    return compare(subject, inputs, results)


def _graph(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    lse = torch.full(inputs.q.shape[:2], NAN, device=subject.device)
    subject.attend(case, inputs, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = subject.attend(case, inputs, lse=lse)
    inputs.q.copy_(inputs.q.flip(0))
    inputs.indices.copy_(inputs.indices.flip(0))
    for tensor in results:
        if tensor is not None:
            tensor.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    return compare(subject, inputs, results)


def _spoilt(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    """Rows with lanes that are not finite, of which one token names one: it has no part in the others' results."""
    tokens, _, topk = inputs.indices.shape
    page_size = inputs.kv.shape[1]
    named = set(torch.unique(inputs.indices).tolist())
    free = [row for row in range(1, inputs.kv.shape[0] * page_size) if row not in named]
    token = tokens // 2
    others = torch.tensor([each for each in range(tokens) if each != token], device=inputs.q.device)
    figures = []
    for value, lanes in ((NAN, slice(None)), (NAN, slice(3, 4)), (float("inf"), slice(7, 9)), (NAN, slice(-1, None))):
        row = free.pop()
        inputs.kv[row // page_size, row % page_size] = 1.0
        inputs.kv[row // page_size, row % page_size, lanes] = value
        changed = replace(inputs, indices=inputs.indices.clone())
        changed.indices[token, 0, topk // 3] = row
        results = _copy(subject.attend(case, replace(changed, out=None)))
        if bool(results.out[token].isfinite().all()):
            raise CaseFailedError(f"a row with {value} has no part in the result of the token that names it")
        figures += compare(subject, _rows(changed, others), results.map(lambda tensor: tensor[others]))
    return figures


def _one_by_one(subject: Subject, case: SparseFwdCase, inputs: Inputs) -> list[Figure]:
    (module,) = union_modules(subject.package)
    group = int(module.GROUP.value)
    tokens, heads, _ = inputs.q.shape
    device = inputs.q.device
    redo = 1 - torch.arange(-(-tokens // group), dtype=torch.int32, device=device) % 2
    redo[-1] = 1  # which is not full
    out = torch.full((tokens, heads, subject.facts.d_v), NAN, dtype=inputs.q.dtype, device=device)
    stats = [torch.full((tokens, heads), NAN, device=device) for _ in range(2)]
    with subject.planned_for(case.multiprocessors):
        launch: Any = importlib.import_module(f"{subject.package.__name__}._launch")
        schedule = module._union_schedule(launch.device_facts(device), module.ALIGNED, inputs.indices.shape[2])
        call = (inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, inputs.length, inputs.sink)
        module._launch_redo(schedule, redo, *call, out, *stats)
    results = Results(out, *stats)
    flagged = redo.bool().repeat_interleave(group)[:tokens]
    if any(not bool(tensor[~flagged].isnan().all()) for tensor in results if tensor is not None):
        raise CaseFailedError("wrote results of tokens that are not flagged")
    picked = flagged.nonzero()[:, 0]
    return compare(subject, _rows(inputs, picked), results.map(lambda tensor: tensor[picked]))


SPARSE_FWD_CHECKS: dict[str, Callable[[Subject, SparseFwdCase, Inputs], list[Figure]]] = {
    "reference": _reference,
    "determinism": _determinism,
    "invariance": _invariance,
    "buffers": _buffers,
    "out alone": _out_alone,
    "workspace": _workspace,
    "defaults": _defaults,
    "stream": _stream,
    "graph": _graph,
    "spoilt": _spoilt,
    "one by one": _one_by_one,
}


def _refusal(subject: Subject, case: RefusalCase) -> None:
    facts, device = subject.facts, subject.device
    sink = "random" if facts.sink == "required" else None
    length = "full" if facts.length == "required" else None
    inputs = build(Problem(2, 4, 1100, 60, sink=sink, length=length), facts, device, 0)
    arguments = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "sm_scale": inputs.sm_scale}
    # So wide a call runs in splits in this mode, and so needs a workspace.
    arguments["enable_batch_invariant"] = True
    if inputs.sink is not None:
        arguments["attn_sink"] = inputs.sink
    if inputs.length is not None:
        arguments["topk_length"] = inputs.length
    case.change.apply(arguments, facts)
    argument = case.change.argument
    with subject.planned_for(None):
        try:
            getattr(subject.package, case.wrapper)(**arguments)
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{argument}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {argument}: {error}") from error
            return
    raise CaseFailedError(f"took a wrong {argument}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares bits.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    match case:
        case SparseFwdCase():
            inputs = build(subject.fitted(case.problem), subject.facts, subject.device, seed)
            return SPARSE_FWD_CHECKS[case.check](subject, case, inputs)
        case RefusalCase():
            _refusal(subject, case)
        case _:
            raise TypeError(f"unknown case {case!r}")
    return []
