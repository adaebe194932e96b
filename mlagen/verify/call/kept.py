"""Calls that a package keeps: a later call like one that was checked launches with nothing but addresses.

Elsewhere verification forces tiles and targets, and a call within `force` is checked each time. Here calls are kept. On
a CPU the interpreter stands in for compiled kernels: it is launched with addresses, and finds the tensors there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.subject import Subject, launch_of

if TYPE_CHECKING:
    from mlagen.verify.call.family import Run
    from mlagen.verify.call.results import Figure

CHECK = "kept"
OTHER_SEED = 1
TENSORS = (torch.Tensor, torch.nn.Parameter)


class _Kernel:
    """A kernel of the interpreter with the launcher of a compiled one."""

    function = packed_metadata = 0

    def __init__(self, function: Any) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.kernel: Any = InterpretedFunction(function)
        self.dtypes: list[torch.dtype | None] = []
        self.kept = 0

    def run(self, programs: int, _y: int, _z: int, _stream: Any, _function: Any, _metadata: Any, *rest: Any) -> None:
        """Launches with tensors, and the kernel is then compiled for their dtypes, or with addresses in their place."""
        arguments = rest[3:]
        dtypes = [getattr(getattr(one, "base", one), "dtype", None) for one in arguments]
        if any(dtypes):
            if self.dtypes and self.dtypes != dtypes:
                raise CaseFailedError(f"{self.kernel.fn.__name__} is launched with two lists of dtypes under one key")
            self.dtypes = dtypes
        else:
            self.kept += 1
            arguments = tuple(map(_found, arguments, self.dtypes))
        self.kernel[(programs,)](*arguments)


class _Kernels(dict[tuple[Any, ...], _Kernel]):
    """Stands where a package keeps its compiled kernels, and has each that is asked for."""

    def get(self, key: tuple[Any, ...], _default: Any = None) -> _Kernel:
        """The kernel of a key of `_launch.launch`."""
        if key not in self:
            self[key] = _Kernel(key[0])
        return self[key]


def _found(argument: Any, dtype: torch.dtype | None) -> Any:
    """The argument of a launch, or the tensor at an address that stands for one."""
    if dtype is None:
        return argument
    if not hasattr(argument, "base"):
        return _tensor_at(argument, dtype)
    descriptor = copy.copy(argument)
    descriptor.base = _tensor_at(argument.base.data_ptr(), dtype).as_strided(argument.shape, argument.strides)
    return descriptor


def _tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """All of a storage from an address on.

    Raises:
        CaseFailedError: no tensor of this process has memory there.
    """
    if address == 0:
        return torch.empty(0, dtype=dtype)
    for one in [one for one in gc.get_objects() if type(one) in TENSORS and one.device.type == "cpu"]:
        storage = one.untyped_storage()
        offset = address - storage.data_ptr()
        if 0 <= offset < max(storage.nbytes(), 1) and offset % dtype.itemsize == 0:
            size = (storage.nbytes() - offset) // dtype.itemsize
            tensor = torch.empty(0, dtype=dtype)
            return tensor.set_(storage, offset // dtype.itemsize, (size,), (1,))
    raise CaseFailedError(f"a kept call launches with the address {address:#x}, where no tensor lies")


def _forget(package: ModuleType) -> None:
    """Has the package's wrappers keep no call."""
    modules = [one for name, one in sys.modules.items() if name.split(".")[0] == package.__name__]
    for wrapper in {id(one): one for module in modules for one in vars(module).values()}.values():
        if isinstance(getattr(wrapper, "checked", None), dict):
            wrapper.checked.clear()


@contextlib.contextmanager
def _keeping(subject: Subject) -> Iterator[_Kernels]:
    """Within, the package's calls are kept; on a CPU their kernels are those of the dict that this gives."""
    launch, kernels = launch_of(subject.package), _Kernels()
    internals, calls = (
        importlib.import_module(f"{subject.package.__name__}.{one}") for one in ("_internals", "_calls")
    )
    patched: list[tuple[Any, str, Any]] = [(internals, "empty_strided", None)]  # so that memory comes poisoned
    patched.append((calls, "CHECKED_CALLS", 0))  # the first call is recorded
    if subject.device == "cpu":
        driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _index: 0))
        patched += [(launch, "_COMPILED", kernels), (internals, "driver", driver)]
    before = [getattr(owner, name) for owner, name, _ in patched]
    _forget(subject.package)
    for owner, name, value in patched:
        setattr(owner, name, value)
    try:
        yield kernels
    finally:
        for (owner, name, _), value in zip(patched, before, strict=True):
            setattr(owner, name, value)
        _forget(subject.package)


def kept(run: Run[Any, Any]) -> list[Figure]:
    """A call of the signature of one before it does the same with other values in other memory."""
    run = replace(run, subject=replace(run.subject, keeps=True))
    with _keeping(run.subject) as kernels:
        figures = run.compare(run.call())
        again = run.on(run.family.build(run.subject, run.case, OTHER_SEED))
        launched = sum(one.kept for one in kernels.values())
        figures += again.compare(again.call())
        again.inputs.check_memory()
        if kernels and launched == sum(one.kept for one in kernels.values()):
            raise CaseFailedError("the second call was checked anew, and not kept")
    return figures


def kept_cases(found: list[Case]) -> Iterator[Case]:
    """A case for each ordinary call among others: it is called again, in other memory."""
    promise = "a later call like one that was checked does the same with other values in other memory"
    for case in found:
        if "typical" in case.name and case.check == "reference":
            yield replace(case, name=f"{case.name}, kept", promise=promise, check=CHECK, every_target=False)
