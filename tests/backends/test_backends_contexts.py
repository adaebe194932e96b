"""A template names every key that it is given, and is given every name that it looks up.

Templates also read every field of the dataclasses of back ends in their contexts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import jinja2
from attention_specs import attention_of
from checked_in import SPECS
from jinja2 import meta, nodes

from mlagen.backends import GeneratedFile, files
from mlagen.emit.render import ENGINES, source_path, template_dir, wrapped
from mlagen.errors import UsageError
from mlagen.plan import IndexerCachePlan, Plan, ProloguePlan, load_plan, make_plan
from mlagen.spec import Spec


class Reading(jinja2.Environment):
    """An environment that notes the fields that its templates read, by class."""

    read: ClassVar[dict[type, set[str]]] = defaultdict(set)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.read[type(obj)].add(attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """For the attributes that filters take."""
        if isinstance(argument, str):
            self.read[type(obj)].add(argument)
        return super().getitem(obj, argument)


# Without globals, which `meta` takes for known: a key may have the name of one, for example `namespace`.
ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.globals.clear()
ENVIRONMENT.filters["wrapped"] = wrapped

READING = Reading(
    loader=jinja2.FileSystemLoader(template_dir()),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
READING.filters["wrapped"] = wrapped


@cache
def tree(template: str) -> nodes.Template:
    """The syntax tree of a template."""
    return ENVIRONMENT.parse((template_dir() / template).read_text(encoding="utf-8"))


def joined(template: str) -> list[str]:
    """The templates that a template extends, includes, or imports with its context, and itself."""
    found, left = [], [template]
    while left:
        found.append(left.pop())
        for node in tree(found[-1]).find_all((nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)):
            if not isinstance(node, nodes.Import | nodes.FromImport) or node.with_context:
                names = [
                    const.value
                    for const in (node.template, *node.template.find_all(nodes.Const))
                    if isinstance(const, nodes.Const) and str(const.value).endswith(".jinja")
                ]
                left += [name for name in names if name not in (*found, *left)]
    return found


def named(template: str) -> set[str]:
    """The names that a template looks up in its context."""
    return {name for one in joined(template) for name in meta.find_undeclared_variables(tree(one))}


# Caches of no checked-in spec. Rows: no block holds the scales in order, or a byte has columns of two chunks. Keys of
# the indexer: blocks have padding and, with RoPE at the last columns, only one column of some pairs.
RULE = {"kind": "scales", "rounding": "nearest", "divisor": 6, "floor": 0.01, "floor_on": "scale"}
SCATTERED = {**RULE, "of": "latent", "dtype": "e4m3", "tile": 16, "interleave": 3}
ROWS = {
    (96, 16): ({"kind": "latent", "dtype": "e2m1"}, SCATTERED, {"kind": "rope", "dtype": "bf16"}),
    (33, 15): ({"kind": "row", "dtype": "e2m1"},),
}
KEYS = {"topk": 2048, "num_heads": 6, "head_dim": 97, "rope_head_dim": 30, "rope": "gptj"}
KEYS_LAYOUT = {
    "name": "own",
    "fields": (
        {"kind": "row", "dtype": "e4m3"},
        {"kind": "pad", "bytes": 3},
        {**RULE, "of": "row", "dtype": "fp32", "tile": 128},
    ),
}


def plans() -> Iterator[Plan]:
    """The plans of all specs, of ROWS and KEYS, and of a prologue with neox pairs."""
    yield from map(load_plan, SPECS)
    data = attention_of("dsv32_fp8")
    for (latent, rope), fields in ROWS.items():
        columns = {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "v_head_dim": latent}
        cache = {"layout": {"name": "own", "fields": fields}}
        yield make_plan(Spec.model_validate(data | {"model": data["model"] | columns, "cache": cache}))
    wrappers = (*data["wrappers"], *IndexerCachePlan.WRAPPERS)
    neox = {"model": data["model"] | {"rope": "neox"}, "wrappers": (*data["wrappers"], *ProloguePlan.WRAPPERS)}
    yield make_plan(Spec.model_validate(data | neox))
    for rope_at in ("first", "last"):
        indexer = {"indexer": {**KEYS, "rope_at": rope_at}, "indexer_cache": {"layout": KEYS_LAYOUT, "block_size": 64}}
        yield make_plan(Spec.model_validate(data | indexer | {"wrappers": wrappers}))


def plugins(plan: Plan) -> Iterator[GeneratedFile]:
    """The files of the plugins that a plan has."""
    for engine in ENGINES.values():
        with suppress(UsageError):
            yield from engine.plugin_files(plan)


@cache
def given() -> dict[str, dict[str, list[Any]]]:
    """The values that each template is given, of all specs, by key. Rendering them notes the fields that are read."""
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for plan in plans():
        texts: dict[str, str] = {}
        for unfilled in [*files(plan), *plugins(plan)]:
            file = unfilled.filled(texts)
            if file.is_copied:
                texts[file.name] = source_path(file.template).read_text(encoding="utf-8")
                continue
            texts[file.name] = READING.get_template(file.template).render(**file.context)
            for key, value in file.context.items():
                found[file.template][key].append(value)
    return found


def inner(value: Any) -> Iterator[Any]:
    """The dataclasses of back ends in a value."""
    children: Sequence[Any] = ()
    if dataclasses.is_dataclass(value):
        if type(value).__module__.startswith("mlagen.backends."):
            yield value
            children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        children = value
    for child in children:
        yield from inner(child)


def read_of(nested: type) -> set[str]:
    """The attributes that templates read of a dataclass, with those that its properties read in turn."""
    read = READING.read[nested]
    properties = [one for name in read if isinstance(one := getattr(nested, name, None), property)]
    return read.union(*(one.fget.__code__.co_names for one in properties if one.fget))


@cache
def nested() -> dict[str, type]:
    """The dataclasses of back ends in the contexts of all templates, by name."""
    values = [value for keys in given().values() for several in keys.values() for value in several]
    found = {type(one) for value in values for one in inner(value)}
    return {f"{one.__module__}.{one.__qualname__}": one for one in found}


def test_each_key_that_a_template_is_given_is_named() -> None:
    assert len(given()) > 50
    unnamed = {template: sorted(keys.keys() - named(template)) for template, keys in given().items()}
    assert {template: keys for template, keys in unnamed.items() if keys} == {}


def test_each_field_of_a_nested_dataclass_is_read() -> None:
    assert len(nested()) > 20
    fields = {name: {field.name for field in dataclasses.fields(one)} for name, one in nested().items()}
    unread = {name: sorted(fields[name] - read_of(one)) for name, one in nested().items()}
    assert {name: found for name, found in unread.items() if found} == {}


def test_a_template_never_asks_whether_a_name_is_given() -> None:
    """So a name that it looks up and is not given fails the rendering, by StrictUndefined."""
    every = {one for template in given() for one in joined(template)}
    for template in sorted(every):
        asked = [*tree(template).find_all(nodes.Test), *tree(template).find_all(nodes.Filter)]
        assert {one.name for one in asked} & {"defined", "undefined", "default", "d"} == set(), template
