"""A template names every key that it is given, and is given every name that it looks up."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import jinja2
import pytest
from checked_in import SPECS
from jinja2 import meta, nodes

from mlagen.backends import files
from mlagen.emit.render import bodies, template_dir, wrapped
from mlagen.plan import load_plan

# Without globals, which `meta` takes for known: a key may have the name of one, for example `namespace`.
ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.globals.clear()
ENVIRONMENT.filters["wrapped"] = wrapped


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


@cache
def given() -> dict[str, set[str]]:
    """The keys that each template is given, of all specs."""
    found = defaultdict(set)
    for spec in SPECS:
        for file, _, _ in bodies(files(load_plan(spec))):
            if not file.is_copied:
                found[file.template] |= set(file.context)
    return found


@pytest.mark.parametrize("template", sorted(given()))
def test_each_key_that_a_template_is_given_is_named(template: str) -> None:
    assert sorted(given()[template] - named(template)) == []


@pytest.mark.parametrize("template", sorted({one for template in given() for one in joined(template)}))
def test_a_template_never_asks_whether_a_name_is_given(template: str) -> None:
    """So a name that it looks up and is not given fails the rendering, by StrictUndefined."""
    asked = [*tree(template).find_all(nodes.Test), *tree(template).find_all(nodes.Filter)]
    assert {one.name for one in asked} & {"defined", "undefined", "default", "d"} == set()
