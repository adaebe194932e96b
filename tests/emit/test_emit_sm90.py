"""Templates of the sm90 kernels name their context, and compute nothing."""

from __future__ import annotations

from pathlib import Path

import jinja2.meta
import pytest
from jinja2 import nodes

from mlagen.emit.render import _environment, template_dir

FOLDER = template_dir() / "sm90"
COMPUTES = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.Concat)
by_template = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.name)


def parse(path: Path) -> nodes.Template:
    return _environment(False).parse(path.read_text(encoding="utf-8"))


@by_template
def test_a_template_includes_nothing_and_imports_without_context(path: Path) -> None:
    tree = parse(path)
    assert list(tree.find_all(nodes.Include)) == []
    assert [found.lineno for found in tree.find_all((nodes.Import, nodes.FromImport)) if found.with_context] == []


@by_template
def test_a_template_neither_computes_nor_compares_names(path: Path) -> None:
    tree = parse(path)
    compared = [
        one.lineno
        for found in tree.find_all(nodes.Compare)
        for one in found.find_all(nodes.Const)
        if isinstance(one.value, str)
    ]
    computed = [found.lineno for found in tree.find_all(COMPUTES)]
    assert (computed, compared) == ([], [])


@pytest.mark.parametrize(
    "path", sorted({*FOLDER.glob("*.jinja")} - {*FOLDER.glob("*.py.jinja")}), ids=lambda path: path.name
)
def test_macros_get_their_declared_arguments(path: Path) -> None:
    assert jinja2.meta.find_undeclared_variables(parse(path)) == set()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[!_]*.py.jinja")), ids=lambda path: path.name)
def test_a_kernel_extends_a_base(path: Path) -> None:
    assert [found.lineno for found in parse(path).find_all(nodes.Extends)] == [1]
