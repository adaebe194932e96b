"""Readers of calls' signatures: one function per wrapper, from the arguments that the wrapper declares."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import LINE_LENGTH, tuple_text
from mlagen.backends.parts.ops import EITHER, PAIR, TENSOR
from mlagen.plan import Plan

MODULE, INDEXER_MODULE = "_signatures", "_signatures_indexer"
MOST_READERS = 22  # of a file: about 900 lines
INDEXER_MODULES = ("candidates", "indexer_cache", "indexer_select", "mqa_logits", "topk")  # modules of wrappers
DECORATOR = "_calls.validated"
STATE = "_calls.CallState"
TOGETHER = 3  # reads of addresses in a line
INDENT = 4


@dataclass(frozen=True)
class Reader:
    """Template context of a reader.

    Attributes:
        name: name of the wrapper's module, then of the wrapper.
        declared: lines of the reader's declaration.
        passed: lines that bind the arguments as a tuple.
        reads: statements that bind the members of pairs and the addresses of tensors.
        values: lines that bind the part of the signature that is no property of a tensor but its alignment.
        tensors: lines that bind all tensors that the wrapper may take.
        optional: whether some of them may be absent.
        addresses: the addresses.
    """

    name: str
    declared: list[str]
    passed: list[str]
    reads: list[str]
    values: list[str]
    tensors: list[str]
    optional: bool
    addresses: str


@dataclass(frozen=True)
class Signatures:
    """Template context.

    Attributes:
        readers: the readers.
        imported: names that they need of `_notes`.
        apart: names of the readers that another module has; `_calls` finds them in this one.
    """

    readers: list[Reader]
    imported: str
    apart: list[str]


def files(plan: Plan) -> list[GeneratedFile]:
    """The files of the readers of all wrappers in earlier files; the indexer's are apart where there are many."""
    if len(plan.spec.wrappers) <= MOST_READERS:
        return [generated(MODULE, {}, read=_context)]
    apart, rest = (partial(_context, of_indexer=of_indexer) for of_indexer in (True, False))
    return [generated(INDEXER_MODULE, {}, MODULE, apart), generated(MODULE, {}, read=rest)]


def _context(texts: Mapping[str, str], *, of_indexer: bool | None = None) -> dict[str, Any]:
    """Template context, from the texts of the modules with wrappers.

    Args:
        texts: the texts, by file.
        of_indexer: whether the file has only the readers of the indexer's modules, or only the others and the names of
            those. None: all readers.
    """
    everything = list(readers(texts))
    of_modules = tuple(f"{module}_" for module in INDEXER_MODULES)
    apart = [reader for reader in everything if of_indexer is not None and reader.name.startswith(of_modules)]
    found = apart if of_indexer else [reader for reader in everything if reader not in apart]
    whole = any("WHOLE" in line for reader in found for line in reader.reads)
    names = ["ADDRESS_BYTES", *["WHOLE"] * whole]
    return vars(Signatures(found, ", ".join(names), [] if of_indexer else sorted(reader.name for reader in apart)))


def readers(texts: Mapping[str, str]) -> Iterator[Reader]:
    """Yield the readers of the wrappers in a package's files, by name."""
    trees = {name.removesuffix(".py"): ast.parse(text) for name, text in texts.items() if DECORATOR in text}
    for module, tree in sorted(trees.items()):
        states = [
            node.name for node in tree.body if isinstance(node, ast.ClassDef) and STATE in map(ast.unparse, node.bases)
        ]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(map(_validates, node.decorator_list)):
                yield _Writer(states).reader(module, node)


def _validates(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == DECORATOR


class _Writer:
    """Collects the statements and the parts of a reader.

    A loop over the arguments would cost as much as a launch. Annotations say which arguments may be tensors. A part of
    a signature begins with a type, so a tensor in the place of another argument changes it.

    Args:
        states: classes of arguments that remember sizes.
    """

    def __init__(self, states: Iterable[str]) -> None:
        self.states = set(states)
        self.reads: list[str] = []
        self.addresses: list[str] = []
        self.values: list[str] = []
        self.tensors: list[str] = []
        self.optional = False

    def reader(self, module: str, function: ast.FunctionDef) -> Reader:
        """The reader of a wrapper."""
        arguments = [*function.args.args, *function.args.kwonlyargs]
        for one in arguments:
            self._read(one.arg, "" if one.annotation is None else ast.unparse(one.annotation))
        names = [one.arg for one in arguments]
        positional = len(function.args.args)
        declared = [*names[:positional], *["*"][: len(names) - positional], *names[positional:]]
        return Reader(
            f"{module}_{function.name}",
            _declaration(declared),
            _bound("arguments", names, 2 * INDENT),
            list(_together(self.reads)),
            _bound("values", self.values, 3 * INDENT),
            _bound("tensors", self.tensors, 3 * INDENT),
            self.optional,
            ", ".join(self.addresses),
        )

    def _read(self, name: str, annotation: str) -> None:
        """Add an argument."""
        is_pair = f"type({name}) is tuple or type({name}) is list"
        if annotation in self.states:
            self.values += [f"type({name})", f"{name}.config"]
        elif annotation == EITHER:
            self.reads.append(f"{name}_0, {name}_1 = {name} if {is_pair} else ({name}, WHOLE)")
            self._tensor(f"{name}_0")
            self._tensor(f"{name}_1", absent="WHOLE")
        elif annotation.startswith(PAIR.removesuffix("]")):
            self.reads.append(f"{name}_0, {name}_1 = {name} if {is_pair} else (None, None)")
            self.values.append(f"type({name})")
            self._tensor(f"{name}_0", absent="None")
            self._tensor(f"{name}_1", absent="None")
        elif TENSOR in annotation:
            self._tensor(name, absent="" if annotation == TENSOR else "None")
        elif annotation.startswith("tuple["):
            self.values += [f"type({name})", f"(*map(type, {name}), *{name}) if {is_pair} else {name}"]
        else:
            self.values += [f"type({name})", f"{name} or repr({name})" if "float" in annotation else name]

    def _tensor(self, name: str, *, absent: str = "") -> None:
        """Add a tensor, or its stand-in if it can be absent."""
        address = f"a{len(self.addresses)}"
        self.addresses.append(address)
        self.tensors.append(name)
        alignment = f"{address} % ADDRESS_BYTES if {address} else {name}.device"
        if absent:
            self.optional = True
            self.values.append(f"None if {address} is None else {alignment}")
            self.reads.append(f"{address} = None if {name} is {absent} else {name}.data_ptr()")
        else:
            self.values.append(alignment)
            self.reads.append(f"{address} = {name}.data_ptr()")


def _declaration(names: list[str]) -> list[str]:
    """Return lines that declare a function of arguments. The linter allows a builtin's name among them."""
    known = set(dir(builtins))
    comment = "  # noqa: A002" if known & set(names) else ""
    line = f"def call({', '.join(names)}):{comment}"
    if len(line) + INDENT <= LINE_LENGTH:
        return [line]
    lines = [
        line + comment if known & set(line.rstrip(",").split(", ")) else line
        for line in _lines(names, 2 * INDENT + len(comment))
    ]
    return ["def call(", *(" " * INDENT + line for line in lines), "):  # fmt: skip"]


def _bound(name: str, items: list[str], indent: int) -> list[str]:
    """Return lines that bind a tuple of items to a name, for a place with an indent."""
    line = f"{name} = {tuple_text(items)}"
    if len(line) + indent <= LINE_LENGTH:
        return [line]
    return [f"{name} = (", *(" " * INDENT + line for line in _lines(items, indent + INDENT)), ")  # fmt: skip"]


def _together(reads: list[str]) -> Iterator[str]:
    """Yield reads of addresses, up to three in a line: Python assigns so many without a tuple between."""
    simple = re.compile(r"a\d+ = \w+\.data_ptr\(\)")
    while reads:
        count = next((number for number, one in enumerate(reads[:TOGETHER]) if not simple.fullmatch(one)), TOGETHER)
        taken = [one.split(" = ") for one in reads[: max(count, 1)]]
        line = reads[0] if count < 2 else " = ".join(", ".join(side) for side in zip(*taken, strict=True))
        yield line
        reads = reads[max(count, 1) :]


def _lines(items: Iterable[str], indent: int) -> list[str]:
    """Set items with commas on lines of the width that generated files have."""
    text = "".join(f"{one}, " for one in items).rstrip()
    # Lines break only after commas.
    words = text.replace(" ", "~").replace(",~", ", ")
    return [line.replace("~", " ") for line in textwrap.wrap(words, LINE_LENGTH - indent, break_on_hyphens=False)]
