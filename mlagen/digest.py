"""A digest of the source a kernel is compiled from: the function, all it calls, and every constant they read.

Triton's own `JITFunction.cache_key` is no use here: it takes in comments and the line a function starts on, so a
longer file header would miss; and it needs the package imported. The whole file's text would miss whenever a wrapper or
a tile table changes. So the module's syntax tree is followed from the kernel on, name by name. Not seen: a call or a
decorator that changes an object by another name than the kernel's.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from mlagen.errors import Place, ToolError

# Stands for the package: its own name must not count.
_ROOT = "package"

# Before 3.11.8 and 3.12.2 CPython counts a tree's depth for all threads at once, and two parses at a time end in
# SystemError (python/cpython#106905).
_PARSING = threading.Lock()


def dump(node: ast.AST) -> str:
    """Write a syntax tree as `ast.dump` of Python 3.11 does, under any Python."""
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if (value is None and not _takes_none(node, name)) or (name == "type_params" and not value):
            continue
        fields.append(f"{name}={_written(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"


def _takes_none(node: ast.AST, name: str) -> bool:
    """Whether None is a value of the field, and not its absence."""
    return name == "value" and isinstance(node, ast.Constant | ast.MatchSingleton)


def _written(value: object) -> str:
    if isinstance(value, ast.AST):
        return dump(value)
    return f"[{', '.join(map(_written, value))}]" if isinstance(value, list) else repr(value)


def parse(text: bytes | str) -> ast.Module:
    """Parse a module, and drop its docstrings and other bare strings. Callers share the tree and do not change it.

    Raises:
        SyntaxError: it does not parse.
    """
    return _parsed(text.encode() if isinstance(text, str) else text)


@functools.lru_cache(maxsize=64)  # the modules of a package, which a build reads three times
def _parsed(text: bytes) -> ast.Module:
    with _PARSING:
        tree = ast.parse(text)
    _drop_strings(tree)
    return tree


def kernels_of(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module that run on the GPU."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            yield node


class SourceDigests:
    """Digests of the kernels of one package; reads each file once.

    Args:
        package_dir: folder of the generated package.
    """

    def __init__(self, package_dir: Path) -> None:
        self._package_dir = package_dir
        self._modules: dict[str, _Module | None] = {}
        # By module and index of a statement: its text, and (module, name) of all it refers to.
        self._statements: dict[tuple[str, int], tuple[str, list[tuple[str, str | None]]]] = {}

    def digest(self, module: str, kernel: str) -> str:
        """Hash the parts of the package that the kernel's compilation depends on.

        Comments, docstrings, positions and the package's place and name do not count.

        Args:
            module: module of the package, `sparse_attention`.
            kernel: function in it.

        Returns:
            A SHA-256 as hexadecimal digits.

        Raises:
            ToolError: the package has no such module or kernel, or does not parse.
        """
        start = f"{_ROOT}.{module}"
        found = self._module(start)
        if found is None:
            raise ToolError(f"no module {module} in {self._package_dir}")
        if kernel not in found.names:
            raise ToolError(f"no kernel {kernel} in {found.path}")
        taken: dict[tuple[str, int], str] = {}
        seen: set[tuple[str, str | None]] = set()
        queue: list[tuple[str, str | None]] = [(start, kernel)]
        while queue:
            if (item := queue.pop()) in seen or (source := self._module(item[0])) is None:
                continue
            seen.add(item)
            for index in source.statements_of(item[1]):
                if (place := (item[0], index)) not in self._statements:
                    statement = source.body[index]
                    text = f"{dump(statement)} {source.modules_in(statement)}"
                    self._statements[place] = text, list(self._references(source, statement))
                taken[place], references = self._statements[place]
                queue += references
        text = "\n".join(f"{name} {taken[name, index]}" for name, index in sorted(taken))
        return hashlib.sha256(text.encode()).hexdigest()

    def _references(self, source: _Module, statement: ast.stmt) -> Iterator[tuple[str, str | None]]:
        """(module, name) of all a statement refers to; the name is None if the statement takes the whole module."""
        followed = set()  # names of modules that stand before an attribute
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = source.modules.get(node.value.id)
                if name is not None and node.attr in self._names(name):
                    followed.add(node.value)
                    yield name, node.attr
            elif isinstance(node, ast.Name) and node not in followed:
                yield source.name, node.id
            elif isinstance(node, ast.ImportFrom) and node.level:
                for alias, origin, name in source.imported(node):
                    yield origin, None if alias.name == "*" else alias.name
                    # `from . import common` binds a module
                    yield name, None

    def _names(self, name: str) -> frozenset[str]:
        """Names that a module binds; none where its package may have bound something else to its name."""
        module, (folder, _, own) = self._module(name), name.rpartition(".")
        package = self._module(folder)
        if module is None or (package is not None and not package.leaves(own, name)):
            return frozenset()
        return module.names

    def _module(self, name: str) -> _Module | None:
        """The package's module by its dotted name; None if the package has no such module."""
        if name not in self._modules:
            path = self._package_dir.joinpath(*name.split(".")[1:])
            files = (path / "__init__.py", path.with_suffix(".py"))
            self._modules[name] = next((_Module(name, file) for file in files if file.is_file()), None)
        return self._modules[name]


class _Module:
    """The statements of a source file, and the names each one binds."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        try:
            tree = parse(path.read_bytes())
        except SyntaxError as error:
            raise ToolError(f"does not parse: {error.msg}", place=Place(path, error.lineno)) from error
        self.body: list[ast.stmt] = tree.body
        self._bound = [frozenset(_bound(statement)) for statement in self.body]
        self.names = frozenset[str]().union(*self._bound)
        bound = Counter(name for names in self._bound for name in names)
        # Possible modules of the package, by names that nothing else is bound to.
        self.modules = {
            alias.asname or alias.name: name
            for statement in self.body
            if isinstance(statement, ast.ImportFrom) and statement.level
            for alias, _, name in self.imported(statement)
            if bound[alias.asname or alias.name] == 1
        }

    def imported(self, statement: ast.ImportFrom) -> Iterator[tuple[ast.alias, str, str]]:
        """(alias, origin, dotted name of a module) of each name that a relative import binds."""
        origin = resolve_name("." * statement.level + (statement.module or ""), self.package)
        for alias in statement.names:
            yield alias, origin, f"{origin}.{alias.name}"

    def leaves(self, own: str, module: str) -> bool:
        """Whether a module's own name, as an attribute of the package, is that module; `from . import` may bind it."""
        return "*" not in self.names and (own not in self.names or self.modules.get(own) == module)

    def modules_in(self, statement: ast.stmt) -> list[tuple[str, str]]:
        """(name, module) of the modules that a statement names: the bound module counts, not the form of its import."""
        named = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        return sorted((name, self.modules[name]) for name in named & self.modules.keys())

    def statements_of(self, name: str | None) -> Iterator[int]:
        """Indices of the statements that bind the name (any name if None), or may change its object."""
        for index, bound in enumerate(self._bound):
            if name is None or not bound or name in bound or "*" in bound:
                yield index


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields with statements, or parts of one


def _drop_strings(node: ast.AST) -> None:
    """Remove docstrings and other bare strings. Only statements are visited, a tenth of all nodes."""
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if isinstance(block, list):
            block[:] = [one for one in block if not _is_string(one)]
            for one in block:
                _drop_strings(one)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names a statement of a module binds, or may change; too many do no harm."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    compound = isinstance(statement, ast.For | ast.While | ast.With | ast.Try | ast.If | ast.Match)
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and (compound or isinstance(node.ctx, ast.Store)):
            yield node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
