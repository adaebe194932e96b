"""Operators of torch that a package registers: their schemas, their fakes, and compiled calls of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree

from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.family import Family, Inputs, Run
from mlagen.verify.call.invalid import Invalid, RefusedCase
from mlagen.verify.call.operators import LAUNCHER
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import require_bits

NAME = "ops"
KEYS = 70  # of a row at most: calls of the families' own cases have more, for splits
QUANTISED = torch.float8_e4m3fn
PAIRS, INTO = ("pair", "pair_out"), ("out", "pair_out")  # overloads that take Q in two parts, and that return nothing
CHECKS = {
    "opcheck": "{} passes torch.library.opcheck",
    "fake": "without values {} gives the shapes, dtypes and strides that it gives with them",
    "compile": "compiled as one graph, of fixed and of dynamic shapes, {} gives the bits of its wrapper",
}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class OpCase(Case):
    """The operators of a wrapper.

    Attributes:
        wrapper: the wrapper.
        module: module of the wrapper; empty: the package itself.
        family: the wrapper's family.
    """

    wrapper: str = field(kw_only=True)
    module: str = field(kw_only=True)
    family: str = field(kw_only=True)

    @property
    def operator(self) -> str:
        """The operators' name."""
        return f"{self.module}_{self.wrapper}" if self.module else self.wrapper


@dataclass(kw_only=True)
class OpInputs(Inputs):
    """Arguments of a valid call of the wrapper, by name."""

    arguments: Arguments


OpRun = Run[OpCase, OpInputs]


def _overloads(run: OpRun) -> Iterator[Any]:
    """The operators of the case."""
    packet = getattr(getattr(torch.ops, run.subject.package.__name__), run.case.operator)
    yield from (getattr(packet, name) for name in packet.overloads())


def _variants(run: OpRun) -> Iterator[Arguments]:
    """Arguments of the wrapper: as they are, of fp32 parts, with a quantised result, with LSE of the other layout."""
    plain = run.inputs.arguments
    yield plain
    if "outputs" in plain:
        yield {**plain, "outputs": plain["outputs"].float()}
    taken = {argument.name for op in _overloads(run) for argument in op._schema.arguments}
    tensor = next(value for value in plain.values() if isinstance(value, torch.Tensor))
    if "output_scale" in taken:
        scale = torch.full((1,), 0.5, dtype=torch.float32, device=tensor.device)
        outputs = {
            name: plain[name].new_zeros(plain[name].shape, dtype=QUANTISED) for name in {"o", "output"} & {*plain}
        }
        yield {**plain, **outputs, "output_scale": scale}
    if "lse_layout" in taken:
        turned = {name: value.transpose(-1, -2) for name, value in plain.items() if "lse" in name and value is not None}
        yield {**plain, **turned, "lse_layout": "th"}


def _taken(run: OpRun, op: Any, arguments: Arguments) -> Arguments:
    """Those of a wrapper's arguments that an operator takes, Q as a pair where it takes that."""
    taken = {one.name: arguments[one.name] for one in op._schema.arguments if one.name in arguments}
    if op._overloadname in PAIRS:
        d_v = run.subject.facts.d_v
        taken["q"] = [taken["q"][..., :d_v].clone(), taken["q"][..., d_v:].clone()]
    return taken


def _calls(run: OpRun) -> Iterator[tuple[Any, Arguments]]:
    """Each operator with arguments of its own: with new tensors for results where it writes to given ones."""
    for arguments in _variants(run):
        for op in _overloads(run):
            if op._overloadname not in INTO:
                results: Any = op(**copy.deepcopy(_taken(run, op, arguments)))
                results = results if isinstance(results, tuple) else (results,)
                names = [one.name for one in op._schema.returns]
                every = {one.name for one in op._schema.arguments}
                yield op, _taken(run, op, arguments)
                continue
            given = _taken(run, op, arguments)
            for one in op._schema.arguments:
                if one.alias_info is None or not one.alias_info.is_write or one.name in every:
                    continue
                if isinstance(one.type, torch.ListType):
                    given[one.name] = [_like(result) for result in results]
                elif one.name in names or not one.has_default_value():
                    given[one.name] = _like(results[names.index(one.name) if one.name in names else 0])
                elif one.name in EXTRA:
                    given[one.name] = EXTRA[one.name](arguments)
            yield op, given


def _like(result: torch.Tensor) -> torch.Tensor:
    """A tensor for a result, with nothing of it."""
    return torch.zeros_like(result)


# Optional tensors to write to that are no result of the operator which allocates its own.
EXTRA: Mapping[str, Callable[[Arguments], torch.Tensor]] = {
    "lse": lambda given: given["q"].new_zeros(given["q"].shape[:2], dtype=torch.float32),
    "valid_counts_out": lambda given: given["req_id"].new_zeros(given["token_indices"].shape[:1]),
}


def _placed(op: Any, arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """An operator's arguments by position, and the others."""
    named, positional = dict(arguments), []
    for one in op._schema.arguments:
        if one.kwarg_only or one.name not in named:
            break
        positional.append(named.pop(one.name))
    return tuple(positional), named


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """Every tensor among the arguments."""
    return [leaf for leaf in _pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of the tensors lie in one storage."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    return len(storages) > len(set(storages))


def _opcheck(run: OpRun) -> list[Figure]:
    """Torch's own checks, which give an operator copies of its tensors, each in memory of its own without gaps.

    If that is another call, only those checks run that take tensors as they are. Calls of e4m3 are left out, because
    torch cannot compare their values.
    """
    with run.subject.planned_for(None):
        for op, arguments in _calls(run):
            tensors, own = _tensors(arguments), copy.deepcopy(arguments)
            if any(tensor.dtype == QUANTISED for tensor in tensors):
                continue
            if _share_memory(tensors):
                with SchemaCheckMode():
                    op(**own)
                continue
            checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
            if all(tensor.clone().stride() == tensor.stride() for tensor in tensors):
                checks.append("test_aot_dispatch_dynamic")
            torch.library.opcheck(op, *_placed(op, own), test_utils=checks)
    return []


def _metadata(results: Any) -> list[tuple[Any, ...]]:
    return [(result.dtype, tuple(result.shape), result.stride(), result.device.type) for result in _tensors(results)]


def _fake(run: OpRun) -> list[Figure]:
    with run.subject.planned_for(None):
        for op, arguments in _calls(run):
            wanted = _metadata(op(**copy.deepcopy(arguments)))
            with FakeTensorMode() as mode:
                faked = _pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
                found = _metadata(op(**faked))
            if found != wanted:
                raise CaseFailedError(f"{op}: without values {found}, with values {wanted}")
    return []


def _compile(run: OpRun) -> list[Figure]:
    with run.subject.planned_for(None):
        for op, arguments in _calls(run):
            eager = copy.deepcopy(arguments)
            wanted = _wrapper_results(run, op, eager)
            for dynamic in (False, True):
                torch._dynamo.reset()
                own = copy.deepcopy(arguments)

                def call(given: Arguments, op: Any = op) -> Any:
                    return op(**given)

                results = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")(own)
                got = _tensors(results)
                expected = wanted[len(wanted) - len(got) :]
                what = f"{op}, {'dynamic' if dynamic else 'fixed'} shapes"
                require_bits(what, _numbered([*expected, *_tensors(eager)]), _numbered([*got, *_tensors(own)]))
    return []


def _numbered(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def _wrapper_results(run: OpRun, op: Any, arguments: Arguments) -> list[torch.Tensor]:
    """The wrapper's results for an operator's arguments."""
    given = dict(arguments)
    if "tile_scheduler_metadata" in run.inputs.arguments:
        given["tile_scheduler_metadata"] = run.subject.package.get_mla_metadata()[0]
    if LAUNCHER in run.inputs.arguments:
        given[LAUNCHER] = None
    if "valid_counts_out" in given:
        given["return_valid_counts"] = True
    return _tensors(run.subject.wrapper(run.case.wrapper, run.case.module)(**given))


def _short(arguments: Arguments) -> Arguments:
    """The arguments of a call with fewer keys, in no batch-invariant mode, so that few programs run."""
    short = {name: value for name, value in arguments.items() if name != "enable_batch_invariant"}
    if isinstance(short.get("indices"), torch.Tensor):
        short["indices"] = short["indices"][..., :KEYS].contiguous()
    for name in ("cache_seqlens", "b_seq_len"):
        if short.get(name) is not None:
            short[name] = short[name].clamp(max=KEYS)
    return short


def operators(families: Sequence[Family]) -> Family:
    """The family of cases about operators. Their calls are valid calls of other families."""
    by_name = {family.name: family for family in families}

    def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
        if not spec.get("ops"):
            return []
        refused = [case for family in families for case in family.cases(spec, device) if isinstance(case, RefusedCase)]
        wrappers = dict.fromkeys((case.wrapper, case.module, case.family) for case in refused)
        found: list[Case] = []
        for wrapper, module, family in wrappers:
            one = OpCase("", "", wrapper=wrapper, module=module, family=family)
            for check, promise in CHECKS.items():
                name = f"{NAME}: {check}: {one.operator}"
                found.append(replace(one, name=name, promise=promise.format(one.operator), check=check))
        return found

    def build(subject: Subject, case: OpCase, seed: int) -> OpInputs:
        nothing = Invalid("", "", lambda value: value)
        like = RefusedCase("", "", family=case.family, wrapper=case.wrapper, module=case.module, invalid=nothing)
        return OpInputs(arguments=_short(by_name[case.family].valid(subject, like)))

    def unused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("operators have checks of their own")

    return Family(
        name=NAME,
        kinds=(OpCase,),
        cases=cases,
        build=build,
        call=unused,
        compare=unused,
        checks={"opcheck": _opcheck, "fake": _fake, "compile": _compile},
        valid=unused,
    )
