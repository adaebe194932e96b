"""The generated package under test, and how its calls are directed to the kernels that a target names."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from mlagen.verify.case import FEW_HEADS, SHARED_INDICES
from mlagen.verify.facts import Facts

CPU_MULTIPROCESSORS = 8  # of the device that the interpreter stands for
INDEX_UNION_ROWS = 1 << 28  # as many as an entry of a list can name
SM90_KERNELS = "cuda, sm90 kernels"


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

    def fitting(self, heads: int) -> int:
        """As many of the heads as the kernels hold that are this subject's target."""
        most = [heads]
        if self.target == SHARED_INDICES:
            most += [module.GROUP_HEADS for module in union_modules(self.package)]
        elif self.target == FEW_HEADS:
            most += [module.SWAP_AB_HEADS[-1] for module in swap_ab_modules(self.package)]
        return min(most)

    def call(
        self, wrapper: str, /, *arguments: Any, module: str = "", multiprocessors: int | None = None, **named: Any
    ) -> Any:
        """Calls a wrapper of the package, or of one of its modules; what it leaves of its allocations is NaN."""
        with self.planned_for(multiprocessors), poisoned_allocations():
            return self.wrapper(wrapper, module)(*arguments, **named)

    def wrapper(self, name: str, module: str = "") -> Callable[..., Any]:
        """A wrapper of the package, or of one of its modules."""
        found: Callable[..., Any] = getattr(getattr(self.package, module) if module else self.package, name)
        return found


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
