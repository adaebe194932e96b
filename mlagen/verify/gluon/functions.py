"""Kernels as Python functions: stand-ins for Gluon's modules, and launches that run in numpy."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mlagen.verify import sanitizer
from mlagen.verify.checks import recomputed
from mlagen.verify.gluon import hopper, language, lines
from mlagen.verify.gluon.memory import Memory, atomic_add, load, store
from mlagen.verify.gluon.program import Program
from mlagen.verify.gluon.shared import Descriptor
from mlagen.verify.gluon.values import Tensor, constant, tensor
from mlagen.verify.gluon.warps import Warps

SEED = 0
NUMBERS = (int, float)
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg"}
DTYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64,
    torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64, torch.uint8: tl.uint8,
    torch.bool: tl.int1, torch.float8_e4m3fn: tl.float8e4nv,
}  # fmt: skip


class Function:
    """A kernel or a device function; called by another, it is Python's.

    Args:
        fn: the function as the module has it.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = fn.__name__
        self._body: Callable[..., Any] | None = None
        self._constants: list[bool] = []  # which parameters are
        lines.FILES.add(fn.__code__.co_filename)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls it, as another kernel's function does."""
        if self._body is None:
            self._body = _watched(translated(self.fn))
            parameters = inspect.signature(self.fn).parameters.values()
            self._constants = [one.annotation is tl.constexpr for one in parameters]
        given = [
            tensor(one) if type(one) in NUMBERS and not constant else one
            for one, constant in zip(arguments, self._constants, strict=False)
        ]
        return self._body(*given, **named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(_launch, self, grid)


@functools.cache
def translated(fn: types.FunctionType) -> types.FunctionType:
    """A function with stand-ins for Triton's names as globals, and constants as plain values."""
    scope = {name: _stand_in(value) for name, value in fn.__globals__.items()}
    scope["range"] = language.trip
    defaults = None if fn.__defaults__ is None else tuple(_stand_in(one) for one in fn.__defaults__)
    return types.FunctionType(fn.__code__, scope, fn.__name__, defaults, fn.__closure__)


def _watched(body: types.FunctionType) -> Callable[..., Any]:
    """A function that takes note of its calls, where cases ask for them."""
    if body.__name__ != recomputed.FUNCTION:
        return body

    def noting(*arguments: Any, **named: Any) -> Any:
        recomputed.note_call()
        return body(*arguments, **named)

    return noting


def _stand_in(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    if value is tl:
        return LANGUAGE
    if isinstance(value, types.ModuleType):
        return _Module(value)
    if isinstance(value, Function):
        return value
    if isinstance(value, triton.runtime.jit.KernelInterface) and hasattr(value, "fn"):
        return _function(value.fn)
    return value


class _Module:
    """A module that a kernel names functions and constants of."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _stand_in(getattr(self._module, name))


@functools.cache
def _function(fn: Callable[..., Any]) -> Function:
    return Function(fn)


def jit(function: Any = None, **_: Any) -> Any:
    """`gluon.jit`."""
    return jit if function is None else _function(function)


def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`gluon.constexpr_function`: takes and gives plain values."""

    def plain(*arguments: Any, **named: Any) -> Any:
        given = [getattr(one, "value", one) if isinstance(one, tl.constexpr) else one for one in arguments]
        found = function(*given, **named)
        return found.value if isinstance(found, tl.constexpr) else found

    return plain


def _launch(kernel: Function, grid: Any, *arguments: Any, **named: Any) -> None:
    options = {name: named.pop(name) for name in OPTIONS & named.keys()}
    signature = inspect.signature(kernel.fn)
    bound = signature.bind(*arguments, **named).arguments
    given = {name: _argument(value, signature.parameters[name].annotation) for name, value in bound.items()}
    tensors = [getattr(value, "base", value) for value in bound.values()]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor)]
    memory = Memory(tensors, early=options.get("launch_pdl", False))
    watches = "global_smem" in inspect.getsource(sys.modules[kernel.fn.__module__])
    folder = str(Path(kernel.fn.__code__.co_filename).parent)
    programs = int(grid[0])
    with sanitizer.watched(kernel.__name__, folder, bound):
        for number in range(programs):
            sanitizer.begin_program()
            Memory.current = memory
            program = Program.current = Program(number, programs, options["num_warps"], SEED)
            if watches:
                program.arena.hand = Warps(len(program.arena.words))
            kernel(**given)
            program.finish()
    recomputed.note_launch(kernel.__name__, bound, kernel.fn.__globals__)


def _argument(value: Any, annotation: Any) -> Any:
    """An argument of a launch as the kernel sees it."""
    if annotation is tl.constexpr or value is None:
        return value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, torch.Tensor):
        return Tensor(np.int64(value.data_ptr()), tl.pointer_type(DTYPES[value.dtype]))
    if isinstance(value, bool):
        return Tensor(np.bool_(value), tl.int1)
    if isinstance(value, int):
        dtype = tl.int64 if annotation is tl.int64 or not -(2**31) <= value < 2**31 else tl.int32
        return Tensor(constant(value, dtype), dtype)
    if isinstance(value, float):
        return Tensor(np.float32(value), tl.float32)
    return value


DEPENDENT = {"gdc_wait": hopper.gdc_wait, "gdc_launch_dependents": hopper.gdc_launch_dependents}


def _language() -> types.SimpleNamespace:
    names: dict[str, Any] = {
        name: getattr(tl, name)
        for name in (
            "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
            "float32", "float64", "float8e4nv", "constexpr", "dtype",
        )
    }  # fmt: skip
    names |= language.FUNCTIONS | {"load": load, "store": store, "atomic_add": atomic_add, "tensor": Tensor}
    names["extra"] = types.SimpleNamespace(cuda=types.SimpleNamespace(**DEPENDENT))
    names |= {
        "allocate_shared_memory": hopper.allocate_shared_memory, "warp_specialize": hopper.warp_specialize,
        "thread_barrier": hopper.thread_barrier, "barrier": hopper.thread_barrier,
        "inline_asm_elementwise": hopper.inline_asm_elementwise, "shared_memory_descriptor": Descriptor,
    }  # fmt: skip
    return types.SimpleNamespace(**names)


LANGUAGE = _language()
GLUON = "triton.experimental.gluon"


def _modules() -> Mapping[str, dict[str, Any]]:
    """Contents of the stand-ins for Gluon's modules, by name."""
    real = importlib.import_module(f"{GLUON}.language")
    layouts = {name: getattr(real, name) for name in dir(real) if name.endswith("Layout")}
    host = vars(importlib.import_module(f"{GLUON}.nvidia.hopper"))
    # Triton 3.8 and newer look for a second kind there whenever they compare an argument with descriptors.
    descriptors: dict[str, Any] = {
        name: host[name] for name in ("TensorDescriptor", "TensorDescriptorIm2Col") if name in host
    }
    names = {name: getattr(hopper, name) for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")}
    return {
        GLUON: {"jit": jit, "constexpr_function": constexpr_function},
        f"{GLUON}.language": vars(LANGUAGE) | layouts,
        f"{GLUON}.language.nvidia": {},
        f"{GLUON}.language.nvidia.ampere": {"async_copy": hopper.AsyncCopy},
        f"{GLUON}.language.nvidia.hopper": {**names, "mbarrier": hopper.Mbarrier, "tma": hopper.Tma},
        f"{GLUON}.nvidia": {},
        f"{GLUON}.nvidia.hopper": descriptors,
    }


def install() -> None:
    """Puts the stand-ins in place of Gluon's modules in this process; a second call does nothing."""
    if getattr(sys.modules.get(GLUON), "runs_in_numpy", False):
        return
    made = {}
    for name, contents in _modules().items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(contents)
        made[name].__path__ = []
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        setattr(made.get(parent) or importlib.import_module(parent), own, module)
    # For interpreted kernels as well; a reload by Triton leaves two modules of this name.
    for module in (importlib.import_module("triton.language.extra.cuda"), tl.extra.cuda):
        vars(module).update(DEPENDENT)
    made[GLUON].runs_in_numpy = True  # type: ignore[attr-defined]
    sys.modules.update(made)
