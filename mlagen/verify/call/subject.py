"""The generated package under test, and how its calls are directed to the kernels that a target names."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlagen.verify.call.case import SHARED, SM90_KERNELS, SWAP_AB
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.operators import Operators

CPU_MULTIPROCESSORS = 8  # of the device that the interpreter stands for
# The kernel that calls are forced to run, by the target that stands for it.
FORCED = {f"cuda {kernel}": kernel for kernel in SM90_KERNELS}
# The same kernels on a CPU, where they run in numpy.
SIMULATED = {f"{kernel}, simulated": kernel for kernel in SM90_KERNELS}


def launch_of(package: ModuleType) -> Any:
    """The package's module of launches."""
    return importlib.import_module(f"{package.__name__}._launch")


def sm90_modules(package: ModuleType) -> tuple[str, ...]:
    """Names of the package's modules of sm90 kernels."""
    return tuple(launch_of(package).SM90_MODULES)


def kernels_of(package: ModuleType) -> tuple[str, ...]:
    """Names of the kernels that the package's calls can run."""
    return tuple(launch_of(package).KERNELS)


def targets_of(package: ModuleType, device: str = "cuda") -> list[str]:
    """Targets of FORCED or of SIMULATED that the package has kernels for."""
    targets = FORCED if device == "cuda" else SIMULATED
    return [target for target, kernel in targets.items() if kernel in kernels_of(package)]


@dataclass(frozen=True)
class Subject:
    """A generated package under test.

    Attributes:
        package: the imported package.
        facts: further facts of the spec.
        device: "cpu" (the interpreter) or "cuda".
        target: target of the tiles in the interpreter. One of FORCED on a GPU, or of SIMULATED on a CPU, gives every
            call that its kernel can run to that kernel.
        keeps: calls are kept by their signature, as those of a user are; see `mlagen.verify.call.kept`.
        operators: calls go through these; None: to the wrappers.
    """

    package: ModuleType
    facts: Facts
    device: str
    target: str
    keeps: bool = False
    operators: Operators | None = None

    @property
    def runs_sm90(self) -> bool:
        """Whether sm90 kernels run calls: on a GPU, or in numpy."""
        return self.device == "cuda" or self.target in SIMULATED

    @property
    def kernel(self) -> str | None:
        """The kernel that calls are forced to run."""
        return FORCED.get(self.target) or SIMULATED.get(self.target)

    @contextlib.contextmanager
    def planned_for(self, multiprocessors: int | None) -> Iterator[None]:
        """Within, wrappers plan for this subject's target (CPU), and for a device of so many multiprocessors.

        Every call that can runs the kernels that are the target, if it is one of kernels.
        """
        launch, planned = launch_of(self.package), None
        if self.device == "cpu":
            simulated = self.target in SIMULATED
            target = "sm90" if simulated else self.target
            planned = launch.DeviceFacts(target, multiprocessors or CPU_MULTIPROCESSORS, pdl=simulated, sm90=simulated)
        elif multiprocessors is not None:
            device = torch.device(self.device, torch.cuda.current_device())
            planned = launch.device_facts(device)._replace(multiprocessors=multiprocessors)
        with (
            contextlib.nullcontext() if planned is None else launch.planned_for(planned),
            launch.force(**({"kernel": self.kernel} if self.kernel else {})),
        ):
            token = launch._steered.set(not self.keeps)
            try:
                yield
            finally:
                launch._steered.reset(token)

    def fitting(self, heads: int) -> int:
        """As many of the heads as the kernels hold that are this subject's target."""
        most = [heads]
        if self.kernel == SHARED:
            most.append(self.package.sparse_fwd.GROUP_HEADS)
        elif self.kernel == SWAP_AB:
            most.append(self.package.sparse_fwd.SWAP_AB_HEADS[-1])
        return min(most) // max(1, self.facts.out_heads) * max(1, self.facts.out_heads)

    def call(
        self, wrapper: str, /, *arguments: Any, module: str = "", multiprocessors: int | None = None, **named: Any
    ) -> Any:
        """Calls a wrapper of the package, or of one of its modules. Allocated memory that it does not write is NaN."""
        function = self.wrapper(wrapper, module)
        if self.operators is not None:
            function = self.operators.of(f"{module}_{wrapper}" if module else wrapper, function)
        with self.planned_for(multiprocessors), poisoned_allocations():
            return function(*arguments, **named)

    def wrapper(self, name: str, module: str = "") -> Callable[..., Any]:
        """A wrapper of the package, or of one of its modules."""
        found: Callable[..., Any] = getattr(getattr(self.package, module) if module else self.package, name)
        return found


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within, torch.empty gives NaN. So memory that a kernel leaves unwritten, or reads unwritten, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def unfilled_allocations() -> Iterator[None]:
    """Within, torch.empty fills no memory, also where algorithms have to be deterministic."""
    before = fills_allocations()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def fills_allocations() -> bool:
    """Whether `poisoned_allocations` fills memory here."""
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


LARGE_BYTE = 0x7F  # 3.4e38 in fp32, a large number in an integer


class _LargeEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the result of torch.empty with LARGE_BYTE."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
            made.view(torch.uint8).fill_(LARGE_BYTE)
        return made


def large_allocations(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context: torch.empty on a CPU gives large numbers there. Top-k never picks NaN, but picks these."""
    if device != "cpu":
        return contextlib.nullcontext()
    return _LargeEmpty()  # type: ignore[no-untyped-call]
