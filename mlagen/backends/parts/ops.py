"""Wrappers as torch operators. Schemas are derived from the signatures in the package's modules."""

from __future__ import annotations

import ast
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlagen.backends.parts.base import GeneratedFile, Module
from mlagen.backends.parts.common import LINE_LENGTH, TORCH_DTYPES, imported
from mlagen.errors import ToolError
from mlagen.plan import OPS, IndexerCachePlan, KpoolPlan, MergeStatesPlan, Op, OpsPlan, Plan

MODULE = "ops"
EXTRA_CACHE = "extra_cache"  # module of the second cache, with the wrapper names of the first
SCHEMA_WIDTH = LINE_LENGTH - 12  # columns of a line of a schema, without the template's indent and quotes
TENSOR = "torch.Tensor"
PAIR = f"tuple[{TENSOR}, {TENSOR}]"
EITHER = f"{TENSOR} | {PAIR}"  # one tensor or a pair; overloads take the pair
# Schema types by annotation. Integers may be symbols of a graph with dynamic shapes.
TYPES = {
    EITHER: "Tensor",
    TENSOR: "Tensor",
    f"{TENSOR} | None": "Tensor?",
    PAIR: "Tensor[]",
    f"tuple[{TENSOR}, {TENSOR} | None]": "Tensor?[]",
    f"{PAIR} | None": "Tensor[]?",
    "bool": "bool",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
    "str | None": "str?",
}
# Wrappers that return an attention result, of D_V columns or of an argument's columns; and those that return LSE.
OVER_LATENT = {"triton_mla_sparse_attention", "flash_mla_sparse_fwd", "flash_mla_with_kvcache"}
VALUES = OVER_LATENT | {"flash_attn_varlen_func", "merge_attn_parts"}
STATS = VALUES - {"triton_mla_sparse_attention"}
# The template's functions that run a wrapper into given tensors, if dropping its results is not enough.
RUNS_INTO = {"triton_convert_req_index_to_global_index": "_convert_into"}


@dataclass(frozen=True)
class Argument:
    """An argument of a wrapper.

    Attributes:
        name: name of the argument.
        type: type in a schema; None if operators leave it out.
        default: default in a schema; None without.
        by_name: keyword-only.
        pairs: the wrapper also accepts a pair of tensors.
    """

    name: str
    type: str | None
    default: str | None
    by_name: bool
    pairs: bool = False

    def text(self, alias: str = "", *, required: bool = False) -> str:
        """Return the argument's text in a schema. An alias marks it as written to; `required` drops its default."""
        kind = (self.type or "").removesuffix("?" if required else "")
        kind = kind.replace("Tensor", f"Tensor({alias}!)") if alias else kind
        return f"{kind} {self.name}" + ("" if required or self.default is None else f"={self.default}")


@dataclass(frozen=True)
class Operator:
    """Template context of an operator.

    Attributes:
        lines: lines of its schema.
        run: function that it runs.
        fake: function that returns its results without values.
    """

    lines: Sequence[str]
    run: str
    fake: str


def read_arguments(function: ast.FunctionDef, op: Op, plan: OpsPlan) -> list[Argument]:
    """Return the arguments of a wrapper, from its signature.

    Raises:
        ToolError: an argument has a type without schema and is not left out, or the plan names a missing argument.
    """
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    positional = len(arguments) - len(given.kwonlyargs)
    defaults = [*[None] * (positional - len(given.defaults)), *given.defaults, *given.kw_defaults]
    found = []
    for number, (one, default) in enumerate(zip(arguments, defaults, strict=True)):
        annotation = "" if one.annotation is None else ast.unparse(one.annotation)
        taken = one.arg not in op.leaves_out and annotation != "None"  # accepted only for its name
        if taken and annotation not in TYPES:
            takes = f"takes one of {', '.join(TYPES)}, or an entry of leaves_out in OPS"
            raise ToolError(f"{function.name}: {one.arg}: got the annotation {annotation!r}; {takes}")
        text = None if default is None or not taken else _default(default, plan.constants)
        kind = TYPES[annotation] if taken else None
        found.append(Argument(one.arg, kind, text, number >= positional, taken and annotation == EITHER))
    missing = {*op.written, *op.leaves_out} - {one.name for one in found}
    if missing:
        raise ToolError(f"{function.name}: OPS names {', '.join(sorted(missing))}, which it does not take")
    return found


def _default(node: ast.expr, constants: Mapping[str, int | None]) -> str:
    text = ast.unparse(node)
    return repr(constants[text] if text in constants else ast.literal_eval(node))


def _listed(arguments: Sequence[Argument], kept: Mapping[str, str], last: Sequence[str]) -> Iterator[str]:
    """Return the arguments of a schema: the kept ones, then those passed by name.

    Arguments after a left-out one are also passed by name, so that positions agree with the wrapper's.
    """
    by_name = False
    for one in arguments:
        if not by_name and (one.by_name or one.name not in kept):
            by_name = True
            if last or any(other.name in kept for other in arguments[arguments.index(one) :]):
                yield "*"
        if one.name in kept:
            yield kept[one.name]
    yield from last if by_name or not last else ("*", *last)


def _schema(name: str, arguments: Iterable[str], results: Sequence[str]) -> list[str]:
    returns = "Tensor" if len(results) == 1 else f"({', '.join(f'Tensor {result}' for result in results)})"
    # Lines break only after commas, where torch continues reading.
    text = f"{name}({', '.join(one.replace(' ', '~') for one in arguments)})~->~{returns.replace(' ', '~')}"
    return [line.replace("~", " ") for line in textwrap.wrap(text, SCHEMA_WIDTH, break_on_hyphens=False)]


def operators(function: ast.FunctionDef, module: str, plan: OpsPlan) -> list[Operator]:
    """Return the operators of a wrapper: one that allocates results, and one that writes to given tensors if possible.

    If the wrapper accepts a pair of tensors, each also has an overload for pairs.
    """
    arguments = read_arguments(function, plan.ops[function.name], plan)
    found = _overloads(function, module, plan, arguments, "")
    if any(one.pairs for one in arguments):
        pairs = [replace(one, type="Tensor[]") if one.pairs else one for one in arguments]
        found += _overloads(function, module, plan, pairs, "pair")
    return found


def _overloads(
    function: ast.FunctionDef, module: str, plan: OpsPlan, arguments: Sequence[Argument], overload: str
) -> list[Operator]:
    """Return the operators of a wrapper with these arguments. `overload` names the first; empty: the default."""
    wrapper, op = function.name, plan.ops[function.name]
    packet = f"{EXTRA_CACHE}_{wrapper}" if module == EXTRA_CACHE else wrapper
    name = f"{packet}.{overload}" if overload else packet
    lacks = any(one.type is None and one.default is None and _required(function, one.name) for one in arguments)
    run = f"_{wrapper}" if lacks or op.nested else f"{module}.{wrapper}"
    taken = [one for one in arguments if one.type is not None]
    written = [one.name for one in taken if one.name in op.written]
    aliases = dict(zip(written, string.ascii_lowercase, strict=False))
    if not op.results:
        kept = {one.name: one.text(aliases.get(one.name, "")) for one in taken}
        return [Operator(_schema(name, _listed(arguments, kept, ()), ()), run, "_nothing")]
    required = {one.name for one in taken if one.name in op.writes and one.default is None}
    kept = {
        one.name: one.text(aliases.get(one.name, ""))
        for one in taken
        if one.name not in aliases or one.name in required
    }
    fake = f"_fake_{wrapper}"
    found = [Operator(_schema(name, _listed(arguments, kept, ()), list(op.results)), run, fake)]
    if aliases.keys() - required:
        takers = set(op.results.values())
        ordered = [one for one in arguments if one.name in aliases and one.name not in required]
        last = [one.text(aliases[one.name], required=one.name in takers) for one in ordered]
        returned = [result for result, taker in op.results.items() if taker is None]
        own = RUNS_INTO.get(wrapper)
        into = own or (f"_lse_of({run})" if returned else f"_into({run})")
        into_name = f"{packet}.{overload}_out" if overload else f"{packet}.out"
        schema = _schema(into_name, _listed(arguments, kept, last), returned)
        found.append(Operator(schema, into, f"_lse_of({fake})" if returned else "_nothing"))
    return found


def _required(function: ast.FunctionDef, name: str) -> bool:
    """Whether a positional argument of a wrapper has no default."""
    given = function.args
    return name in [one.arg for one in given.args[: len(given.args) - len(given.defaults)]]


@dataclass(frozen=True)
class Query:
    """Results of the operator that quantises the indexer's query.

    Attributes:
        columns: bytes of a head.
        dtype: torch's name of their dtype.
        scales: bytes of a head's scales.
        packed: whether a byte holds two columns.
    """

    columns: int
    dtype: str
    scales: int
    packed: bool


@dataclass(frozen=True)
class Operators:
    """Context of the template.

    Attributes:
        namespace: namespace of the operators.
        modules: modules of their wrappers, as text.
        wrappers: the package's wrappers.
        takes_pair: whether an operator takes Q as a pair.
        operators: the operators.
        d_v: columns of V.
        torch_dtype: torch's name of the model's dtype.
        merges: whether the package merges results.
        query: results of the quantisation of the indexer's query; None without.
        decode: module of decode; None without.
        over_latent, values, stats: whether wrappers attend over latent rows, return values, and return statistics.
        uses_into, uses_lse_of: whether operators need these functions of the template.
    """

    namespace: str
    modules: str
    wrappers: Sequence[str]
    takes_pair: bool
    operators: Sequence[Operator]
    d_v: int
    torch_dtype: str
    merges: bool
    query: Query | None
    decode: str | None
    over_latent: bool
    values: bool
    stats: bool
    uses_into: bool
    uses_lse_of: bool


def _query(plan: Plan) -> Query | None:
    """Return the results of the operator that quantises the indexer's query, or None."""
    family = plan.find(IndexerCachePlan) or plan.find(KpoolPlan)
    if family is None or family.rows is None:
        return None
    query = family.rows.query
    dtype = TORCH_DTYPES.get(query.data[0].dtype, "uint8")
    return Query(query.data[0].nbytes, dtype, query.plane_bytes[1], family.rows.packed)


def context(plan: Plan, modules: Sequence[Module], texts: Mapping[str, str]) -> Operators:
    """Return the template context, from the texts of the package's modules by file name."""
    assert plan.ops is not None
    found, used, wrappers = [], [], plan.spec.wrappers
    for module in modules:
        name = module.file.module
        for node in ast.parse(texts[module.file.name]).body:
            if isinstance(node, ast.FunctionDef) and node.name in OPS and node.name in wrappers:
                found += operators(node, name, plan.ops)
                used.append(name)
    return Operators(
        namespace=plan.ops.namespace,
        modules=imported("", list(dict.fromkeys(used))),
        wrappers=wrappers,
        takes_pair=plan.takes_pair and bool(OVER_LATENT & {*wrappers}),
        operators=found,
        d_v=plan.d_v,
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        merges=plan.find(MergeStatesPlan) is not None,
        query=_query(plan),
        decode=next((module for module in used if module.endswith("_decode")), None),
        over_latent=bool(OVER_LATENT & {*wrappers}),
        values=bool(VALUES & {*wrappers}),
        stats=bool(STATS & {*wrappers}),
        uses_into=any(one.run.startswith("_into") for one in found),
        uses_lse_of=any(one.run.startswith("_lse_of") for one in found),
    )


def file(plan: Plan, modules: Sequence[Module]) -> GeneratedFile:
    """Return the module of operators. It reads the signatures in the texts of the public modules."""
    return GeneratedFile(f"{MODULE}.py", f"{MODULE}.py.jinja", {}, lambda texts: vars(context(plan, modules, texts)))
