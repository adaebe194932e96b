"""Schemas of operators agree with the wrappers' signatures and docstrings, for any spec."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import torch
from checked_in import SPECS, spec_of
from rotation import some

from mlagen.backends import files
from mlagen.backends.parts.ops import EITHER, OVER_LATENT, Operator, operators, read_arguments
from mlagen.emit import render
from mlagen.emit.render import bodies
from mlagen.errors import ToolError
from mlagen.plan import OPS, Op, OpsPlan, Plan, load_plan, make_plan
from mlagen.spec.models import WrapperName

by_spec = pytest.mark.parametrize("name", some([path.stem for path in SPECS], 12))
PLAN = OpsPlan("odd", {"D_V.value": 96, "WINDOW": None}, OPS)


@cache
def plan_of(name: str) -> Plan:
    """The plan of a spec with operators."""
    return make_plan(load_plan(spec_of(name)).spec.model_copy(update={"ops": True}))


def wrappers(name: str) -> Iterator[tuple[str, ast.FunctionDef, list[Operator]]]:
    """Every wrapper of a package, its module, and its operators."""
    plan = plan_of(name)
    assert plan.ops is not None
    for file, body, _ in bodies(files(plan)):
        for node in ast.parse(body).body if not file.name.startswith("_") else ():
            if isinstance(node, ast.FunctionDef) and node.name in plan.spec.wrappers:  # copied modules may have more
                yield file.module, node, operators(node, file.module, plan.ops)


def parsed(one: Operator) -> Any:
    return torch._C.parse_schema("odd::" + " ".join(one.lines))


def function(text: str) -> ast.FunctionDef:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return node


def test_every_wrapper_is_known() -> None:
    assert set(OPS) == set(get_args(WrapperName))


def takes_pair(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation) == EITHER


@by_spec
def test_every_wrapper_has_an_operator_that_torch_reads(name: str) -> None:
    found = {(module, node.name): [parsed(one) for one in ops] for module, node, ops in wrappers(name)}
    assert {wrapper for _, wrapper in found} == set(plan_of(name).spec.wrappers)
    pairs = {node.name for _, node, _ in wrappers(name) if any(map(takes_pair, node.args.args))}
    assert bool(pairs) is (
        plan_of(name).takes_pair and bool((OVER_LATENT | {"decode_attention_fwd"}) & {*plan_of(name).spec.wrappers})
    )
    for (_, wrapper), schemas in found.items():
        takers = [taker for taker in OPS[wrapper].results.values() if taker]
        overloads = ["", *(["out"] if takers else [])]
        overloads += ["pair", *(["pair_out"] if takers else [])] if wrapper in pairs else []
        assert [schema.overload_name for schema in schemas] == overloads


@by_spec
def test_operators_have_their_wrappers_arguments_names_positions_and_defaults(name: str) -> None:
    for _, node, ops in wrappers(name):
        given = node.args
        texts = {**dict.fromkeys([one.arg for one in [*given.args, *given.kwonlyargs]])}
        texts |= zip(
            [one.arg for one in given.args[len(given.args) - len(given.defaults) :]], given.defaults, strict=True
        )
        texts |= {one.arg: value for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
        for schema in map(parsed, ops):
            positional = [one.name for one in schema.arguments if not one.kwarg_only]
            assert positional == [one.arg for one in given.args][: len(positional)]
            for one in schema.arguments:
                node_default = texts[one.name]
                if one.has_default_value() and not isinstance(node_default, ast.Name | ast.Attribute):
                    assert one.default_value == ast.literal_eval(node_default), (node.name, one.name)
                if node_default is None:
                    assert not one.has_default_value(), (node.name, one.name)


@by_spec
def test_arguments_that_a_docstring_writes_to_are_written_to_in_the_schema(name: str) -> None:
    for _, node, ops in wrappers(name):
        described = re.findall(
            r"^    (\w+(?:, \w+)*): ((?:.*\n(?:        .*\n)*))", ast.get_docstring(node) or "", re.M
        )
        said = {
            argument
            for names, text in described
            for argument in names.split(", ")
            if re.search(r"to write to|takes the (slots|lengths)|written if given", text)
        }
        written = {
            one.name
            for schema in map(parsed, ops)
            for one in schema.arguments
            if one.alias_info is not None and one.alias_info.is_write
        }
        assert said <= written, node.name


@by_spec
def test_an_operator_that_allocates_its_results_writes_only_to_what_a_call_must_give(name: str) -> None:
    for _, node, (first, *_) in wrappers(name):
        op = OPS[node.name]
        written = [one for one in parsed(first).arguments if one.alias_info is not None and one.alias_info.is_write]
        if op.results:
            assert {one.name for one in written if not one.has_default_value()} <= {*op.writes}, node.name
            assert not any(one.has_default_value() for one in written), node.name


def test_arguments_after_a_left_out_one_are_keyword_only() -> None:
    node = function(
        "def merge_attn_parts(outputs: torch.Tensor, out: torch.Tensor | None = None, "
        "output_lse: torch.Tensor | None = None, scale: float = 1.0) -> None: ..."
    )
    first, out = operators(node, "merge_states", PLAN)
    assert (
        " ".join(first.lines)
        == "merge_attn_parts(Tensor outputs, *, float scale=1.0) -> (Tensor out, Tensor output_lse)"
    )
    text = "merge_attn_parts.out(Tensor outputs, *, float scale=1.0, Tensor(a!) out, Tensor(b!) output_lse) -> ()"
    assert " ".join(out.lines) == text


def test_an_argument_that_no_schema_has_is_named() -> None:
    node = function("def merge_attn_parts(outputs: torch.Tensor, stream: torch.cuda.Stream = None) -> None: ...")
    with pytest.raises(ToolError, match=r"merge_attn_parts: stream: got the annotation 'torch.cuda.Stream'; takes"):
        read_arguments(node, Op(), PLAN)


def test_a_written_argument_that_a_wrapper_does_not_take_is_named() -> None:
    node = function("def concat_and_cache_mla(cache: torch.Tensor) -> None: ...")
    with pytest.raises(ToolError, match=r"concat_and_cache_mla: OPS names kv_cache, which it does not take"):
        operators(node, "cache", PLAN)


@by_spec
def test_without_ops_a_package_has_no_trace_of_them(name: str) -> None:
    with_ops = {file.name: file.text for file in render(plan_of(name)).files}
    plan = make_plan(plan_of(name).spec.model_copy(update={"ops": False}))
    without = {file.name: file.text for file in render(plan).files}
    assert set(with_ops) - set(without) == {"ops.py"}
    assert {file for file in without if without[file] != with_ops[file]} == {"__init__.py"}
    assert not re.search(r"\bops\b", without["__init__.py"].replace('"ops": False', ""))
