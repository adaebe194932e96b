"""Where the generated sm90 kernels synchronise, found in their syntax trees."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlagen.digest import kernels_of

WAITS = ("mbarrier.wait", "async_copy.wait_group", "_wait_k", "_hold_wait", "gdc_wait", "warpgroup_mma_wait")
ARRIVES = ("mbarrier.arrive", "mbarrier.expect", "async_copy.mbarrier_arrive", "_bar_arrive", "_bar_arrive_dynamic")
BARRIERS = ("_bar_sync", "_bar_sync_dynamic", "_barrier", "barrier", "gl.barrier", "gl.thread_barrier")
FENCES = ("fence_async_shared",)
VALUE_WAIT = "warpgroup_mma_wait"  # its call gives the value that it waited for
MANY = "7"  # products that may still run behind a wait that waits for nothing
SYNCS = {
    **dict.fromkeys(WAITS, "wait"),
    **dict.fromkeys(ARRIVES, "arrive"),
    **dict.fromkeys(BARRIERS, "barrier"),
    **dict.fromkeys(FENCES, "fence"),
}
# Delays also stand in front of copies to shared memory, and of stores there and to results.
ISSUES = ("tma_load", "tma_load_k", "tma_load_v", "async_load", "async_copy.commit_group", "gl.store")
STORES = ("_put_shared", "_store_shared", "_count_shared", "_take_four")


@dataclass(frozen=True)
class Sync:
    """A call that synchronises.

    Attributes:
        module, function: where it stands.
        call: the function that it calls: "mbarrier.wait".
        number: which such call of the function it is, from 1 on.
        line, end: its first and last line, from 1 on.
        columns: of a wait that gives a value, where the number of products that may still run stands in its line.
    """

    module: str
    function: str
    call: str
    number: int
    line: int
    end: int
    columns: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """ "wait", "arrive", "barrier" or "fence"."""
        return SYNCS[self.call]

    @property
    def name(self) -> str:
        """Its name, which stays when lines move."""
        return f"{self.module}:{self.function}:{self.call}:{self.number}"


def sm90_files(folder: Path) -> list[Path]:
    """The modules of a package that hold sm90 kernels."""
    return sorted(folder.glob("_*_sm90*.py"))


def called(call: ast.Call) -> str:
    """The dotted name of the called function: "mbarrier.wait"; of a method of something else, ".store"."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name):
            return f"{function.value.id}.{function.attr}"
        return f".{function.attr}"
    return ""


def statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The simple statements of a function, in order."""
    for node in ast.walk(function):
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return | ast.AnnAssign):
            yield node


def syncs_of(path: Path) -> list[Sync]:
    """Each wait, arrive, barrier and fence of a module."""
    text = path.read_text(encoding="utf-8")
    found = []
    for function in kernels_of(ast.parse(text)):
        counts: Counter[str] = Counter()
        for statement in sorted(statements(function), key=lambda one: one.lineno):
            for call in [node for node in ast.walk(statement) if isinstance(node, ast.Call)]:
                name = called(call)
                alone = isinstance(statement, ast.Expr) and statement.value is call
                if name not in SYNCS or not (alone or name == VALUE_WAIT):
                    continue
                counts[name] += 1
                sync = Sync(path.stem, function.name, name, counts[name], call.lineno, call.end_lineno or call.lineno)
                found.append(sync if alone else _of_value(sync, call))
    return found


def _of_value(sync: Sync, call: ast.Call) -> Sync:
    """A wait for a value: with MANY products that may still run it waits for none, and the value keeps its type."""
    count = call.args[0]
    assert isinstance(count, ast.Constant)
    assert count.end_col_offset is not None
    return replace(sync, line=count.lineno, end=count.lineno, columns=(count.col_offset, count.end_col_offset))


def without(text: str, sync: Sync) -> str:
    """A module's text without one of its syncs; lines stay where they are."""
    lines = text.splitlines()
    first = lines[sync.line - 1]
    if sync.columns is not None:
        lines[sync.line - 1] = first[: sync.columns[0]] + MANY + first[sync.columns[1] :]
        return "\n".join(lines) + "\n"
    lines[sync.line - 1] = first[: len(first) - len(first.lstrip())] + "pass"
    for number in range(sync.line, sync.end):
        lines[number] = ""
    return "\n".join(lines) + "\n"
