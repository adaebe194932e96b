"""Device facts, launches and argument checks of all wrappers. Every package has the same copy."""

import concurrent.futures
import contextlib
import contextvars
import functools
import importlib
import inspect
import numbers
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import _facts, _internals
from ._facts import KERNELS, MODULES, PDL_TARGETS, SM90_MODULES, TARGETS

# The oldest and the newest supported minor version of Triton, and the installed one.
SUPPORTED = ((3, 6), (3, 9))
INSTALLED = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
IN_RANGE = SUPPORTED[0] <= INSTALLED <= SUPPORTED[1]
TRITON = min(max(INSTALLED, SUPPORTED[0]), SUPPORTED[1])  # tables are read for this version
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**127  # softmax scales: in fp32 not 0 or inf, also times log2(e)
SCALARS = (numbers.Number, str, type(None), torch.dtype, torch.device)  # errors show their values
INT32_MAX = (1 << 31) - 1


class Forced(NamedTuple):
    """Choices of `force` for calls of any family. None: the tables and the sizes of a call decide."""

    kernel: str | None = None  # one of KERNELS; calls that it cannot run use a portable kernel
    tile: Any = None  # tile of the portable kernel of the called family, or of top-k's forced kernel
    num_splits: int | None = None  # splits of calls that do not pass a number of splits
    workspace_bytes: int | None = None  # calls that need more run in pieces
    combine_units: int | None = None  # dense_decode: cost of sharing a request between programs
    block_b: int | None = None  # dense_decode: requests per read of lengths


class DeviceFacts(NamedTuple):
    """Facts of a device. The target selects the rows of the tile tables."""

    target: str
    multiprocessors: int
    pdl: bool = False  # whether it has programmatic dependent launch
    sm90: bool = False  # whether it runs the sm90 kernels
    memory_rate: int = 0  # GB/s of its memory; 0: unknown
    forced: Forced = Forced()

    @property
    def has_e4m3(self) -> bool:
        """Whether its hardware converts float8_e4m3fn."""
        return self.target in _facts.E4M3_TARGETS

    @property
    def rounds_e4m3(self) -> bool:
        """Whether one instruction rounds fp32 to float8_e4m3fn, and any NaN to 0x7f."""
        return self.target in _facts.E4M3_ROUNDING_TARGETS


def supports(gpu: torch.device | str | tuple[int, int]) -> str | None:
    """Return the target with kernels of this package that a GPU runs; None if there is none.

    A CUDA device runs the newest target of its own major compute capability that is not newer than itself: sm103 runs
    the kernels of sm100. A ROCm device runs only those of its own name.

    Args:
        gpu: a device, a name such as "sm103" or "gfx942", or a CUDA device's compute capability, such as (10, 3).

    Raises:
        TypeError, ValueError: none of these, no GPU of this machine, or a compute capability where torch is ROCm's.
    """
    if isinstance(gpu, torch.device) or (isinstance(gpu, str) and gpu.startswith("cuda")):
        gpu = architecture(gpu_of(gpu, "gpu"))
    elif isinstance(gpu, tuple) and len(gpu) == 2 and all(map(_is_integer, gpu)):
        if torch.version.hip:
            raise ValueError(f"gpu: got {gpu}, takes a device or a name: ROCm's compute capabilities name no GPU")
        gpu = f"sm{gpu[0]}{gpu[1]}"
    if isinstance(gpu, str) and (cuda := re.fullmatch(r"sm(\d+)(\d)", gpu)):
        fits = [f"sm{cuda[1]}{minor}" for minor in range(int(cuda[2]), -1, -1)]
    elif isinstance(gpu, str) and re.fullmatch(r"gfx[0-9a-f]+", gpu):
        fits = [gpu]
    else:
        takes = "a device, a name such as 'sm103' or 'gfx942', or a compute capability such as (10, 3)"
        raise (ValueError if isinstance(gpu, str) else TypeError)(f"gpu: got {said(gpu)}, takes {takes}")
    return next((target for target in fits if target in TARGETS), None)


def gpu_of(device: torch.device | str | int, name: str = "device") -> torch.device:
    """Return a GPU with its index; "cuda" is the current one. Raises TypeError or ValueError if torch finds no such."""
    named = f"cuda:{device}" if _is_integer(device) else device
    try:
        gpu = torch.device(named)
    except (TypeError, RuntimeError):
        kind = ValueError if isinstance(device, (str, int)) else TypeError
        raise kind(f"{name}: got {said(device)}, takes a CUDA or ROCm device") from None
    if gpu.type != "cuda" or (isinstance(named, str) and str(gpu) != named):  # torch keeps 8 bits of an index
        raise ValueError(f"{name}: got {named}, takes a CUDA or ROCm device")
    try:
        torch.cuda.get_device_properties(gpu)
        return gpu if gpu.index is not None else torch.device("cuda", torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"{name}: got {gpu}, takes a GPU that torch finds: {str(error).splitlines()[0]}") from error


def architecture(gpu: torch.device) -> str:
    """Return the name of a GPU's own architecture: "sm103", "gfx942"."""
    properties = torch.cuda.get_device_properties(gpu)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"


def device_facts(device: torch.device | str | int) -> DeviceFacts:
    """Return the facts of a CUDA or ROCm device. Inside `planned_for` they are those of the planned target.

    Raises:
        TypeError, ValueError: the device is no GPU, or this package has no kernels for it.
    """
    facts, forced = _planned.get(), _forced.get()
    if facts is None:
        facts = _read_facts(device if type(device) is torch.device and device.index is not None else gpu_of(device))
    return facts if forced is None else facts._replace(forced=forced)


@functools.cache
def _read_facts(device: torch.device) -> DeviceFacts:
    name = architecture(gpu_of(device))
    target = supports(name)
    if target is None:
        raise ValueError(f"device: got {name}, takes one of {', '.join(TARGETS)}, for which this package has kernels")
    gpu = torch.cuda.get_device_properties(device)
    compiles = not triton.knobs.runtime.interpret  # the interpreter has neither PDL nor Gluon
    pdl, sm90 = compiles and target in PDL_TARGETS, compiles and name == "sm90" and has_gluon()
    rate = 2 * getattr(gpu, "memory_clock_rate", 0) * getattr(gpu, "memory_bus_width", 0) // 8_000_000  # by kHz, bits
    return DeviceFacts(target, gpu.multi_processor_count, pdl, sm90, rate)


@functools.cache
def has_gluon() -> bool:
    """Whether the package has sm90 kernels and this Triton, 3.6 or newer, can import their modules."""
    if not SM90_MODULES or INSTALLED < (3, 6):
        return False
    try:
        for module in SM90_MODULES:
            importlib.import_module(f".{module}", __package__)
    except Exception:  # any error of a later Triton: the portable kernels still run
        return False
    return True


@functools.cache
def sm90_kernel(module: str) -> Any:
    """Return the sm90 kernel of a module. Import the module only here, since not every Triton has its Gluon."""
    return getattr(importlib.import_module(f".{module}", __package__), f"{module}_kernel")


def for_triton(table: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a table for TRITON. Rows for only some versions end with these, which are removed."""
    chosen: dict[str, list[tuple[Any, ...]]] = {target: [] for target in table}
    for target, rows in table.items():
        for row in rows:
            *entries, first, last = row if type(row[-1]) is tuple else (*row, TRITON, TRITON)  # Tiles have types
            if first <= TRITON <= last:
                chosen[target].append(tuple(entries))
    return chosen


def is_current(device: torch.device) -> bool:
    """Whether launches go to `device`, since Triton launches on the current device."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def hash_functions() -> None:
    """Hash every Triton function of the package, callees first, so that a kernel has one key in Triton's cache.

    In Triton 3.6 and 3.7 a kernel's hash includes a callee's constants only if the callee was hashed before. Otherwise
    keys would depend on the order of a process's first launches.
    """
    for module in (sys.modules.get(f"{__package__}.{name}") for name in MODULES):
        for one in [] if module is None else list(vars(module).values()):
            if isinstance(one, _internals.JITCallable):
                hash(one)  # the function keeps it


class Variant(NamedTuple):
    """A launch, as far as its compilation depends on it: no run-time argument is specialised."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constexprs: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """Compile the kernel for the current device, or load it from Triton's cache. Launch nothing."""
        hash_functions()
        return self.kernel.warmup(*self.arguments, *self.constexprs, grid=(self.programs,), **self.options)


# Annotations of these two functions would be part of every kernel's key.
def kernel(function, jit=triton.jit):  # type: ignore[no-untyped-def]
    """Make a kernel that specialises only its constexprs, not its run-time arguments.

    Otherwise Triton would compile it again for each mix of divisible and other values. Assumptions about addresses come
    only from constexprs, so `warmup` can reach every variant.
    """
    return jit(function, do_not_specialize=_arguments_of(function))


def _arguments_of(function) -> list[str]:  # type: ignore[no-untyped-def]
    """Return the names of a kernel's run-time arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.annotation is not tl.constexpr]


@functools.cache
def _taker(function: Callable[..., Any]) -> tuple[Callable[[Any], tuple[Any, ...]], int]:
    """Return a function that reads a kernel's run-time arguments from a call by name: `q_ptr` is the call's `q`.

    Return also their number up to the last tensor. No argument after it is ever absent.
    """
    names = _arguments_of(function)
    tensors = [number for number, name in enumerate(names, 1) if name.endswith("_ptr")]
    return operator.attrgetter(*(name.removesuffix("_ptr") for name in names)), tensors[-1]


_names_of = functools.cache(_arguments_of)
_COMPILED: dict[tuple[Any, ...], Any] = {}
_planned: contextvars.ContextVar[DeviceFacts | None] = contextvars.ContextVar("planned", default=None)
_forced: contextvars.ContextVar[Forced | None] = contextvars.ContextVar("forced", default=None)
_recorded: contextvars.ContextVar[dict[Any, Variant] | None] = contextvars.ContextVar("recorded", default=None)
_noted: contextvars.ContextVar[Any] = contextvars.ContextVar("noted", default=None)
_steered = contextvars.ContextVar("steered", default=False)
noted = _noted.get  # the note of the call that is being recorded, or None
is_steered = _steered.get  # whether calls are planned, forced, recorded or noted; such calls are always checked
steering: list[None] = []  # an entry for each such context of any thread; if empty, no call is steered


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[Any]:
    token, steered = variable.set(value), _steered.set(True)  # in this thread only: others continue to launch
    steering.append(None)
    try:
        yield value
    finally:
        steering.pop()
        variable.reset(token)
        _steered.reset(steered)


def planned_for(facts: DeviceFacts) -> contextlib.AbstractContextManager[Any]:
    """Inside, calls plan for a device with these facts, whichever device holds their tensors."""
    return _set(_planned, facts)


def force(**choices: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, calls use these fields of `Forced`, and those of an enclosing `force`.

    Raises:
        ValueError: the package has no kernel of this name.
    """
    one_of("kernel", choices.get("kernel"), None, *KERNELS)
    return _set(_forced, (_forced.get() or Forced())._replace(**choices))


def recording() -> contextlib.AbstractContextManager[Any]:
    """Inside, `launch` adds variants that are not compiled yet to the dict that this yields, and launches none."""
    return _set(_recorded, {})


def noting(note: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `launch` adds each launch to `note`, so that the call can be repeated without its checks."""
    return _set(_noted, note)


def facts_of(target: str) -> DeviceFacts:
    """Return the facts of one of TARGETS without a device. It has one multiprocessor. Raises ValueError for others."""
    one_of("target", target, *TARGETS)
    return DeviceFacts(target, 1, target in PDL_TARGETS, target == "sm90" and has_gluon())


def compile_all(variants: Iterable[Variant]) -> None:
    """Compile variants for the current device, in parallel on all cores."""
    with concurrent.futures.ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for variant in variants:
            variant.compile()


def launch(
    kernel: Any,
    programs: int,
    call: Any,
    constexprs: tuple[Any, ...],
    num_warps: int,
    num_stages: int,
    pdl: bool = False,
    pdl_max_programs: int | None = None,
    registers: int | None = None,
) -> None:
    """Launch a kernel on the current device and stream, with the fields of `call` that have its arguments' names.

    Triton's own launch inspects every argument to find the variant, which costs several times the launch. Here only the
    constexprs and the absent tensors select it. The first launch compiles, and later ones call the compiled kernel's
    launcher. A Triton outside SUPPORTED may have another launcher, so there each launch is Triton's own.

    Args:
        pdl: programmatic dependent launch. The kernel begins once every program of the previous kernel allows it or
            ends, and itself waits for that kernel's writes.
        pdl_max_programs: launches of more programs go without pdl. The kernel has a last constexpr for it.
        registers: most registers of a thread; None: no limit.
    """
    if pdl_max_programs is not None:
        if pdl and _recorded.get() is not None:
            for taken in (True, False):
                launch(kernel, programs, call, (*constexprs, taken), num_warps, num_stages, taken, None, registers)
            return
        pdl = pdl and programs <= pdl_max_programs
        constexprs = (*constexprs, pdl)
    taker, tensors = _taker(kernel.fn)
    arguments = taker(call)
    absent = tuple([argument is None for argument in arguments[:tensors]])
    device = arguments[0].device
    key = (kernel.fn, device, constexprs, absent, num_warps, num_stages, pdl, registers)
    compiled = _COMPILED.get(key)
    if compiled is not None:
        _internals.run(compiled, programs, _internals.stream_getter()(device.index), (*arguments, *constexprs))
        _tell(kernel, compiled, programs, arguments, constexprs)
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if pdl:
        options["launch_pdl"] = True  # kept by the launcher
    if registers is not None:
        options["maxnreg"] = registers
    recorded = _recorded.get()
    if recorded is not None:
        recorded[key] = Variant(kernel, programs, arguments, constexprs, options)
        return
    hash_functions()
    compiled = kernel[(programs,)](*arguments, *constexprs, **options)
    if IN_RANGE and compiled is not None:  # the interpreter compiles nothing
        _COMPILED[key] = compiled
    _tell(kernel, compiled if IN_RANGE else None, programs, arguments, constexprs)


def _tell(kernel: Any, compiled: Any, programs: int, arguments: tuple[Any, ...], constexprs: tuple[Any, ...]) -> None:
    """Add a launch to the note, if the call is being recorded."""
    note = _noted.get()
    if note is not None:
        note.launch(compiled, _names_of(kernel.fn), programs, arguments, constexprs)


def pdl_max_programs(facts: DeviceFacts) -> int:
    """Return the most programs of short kernels with pdl, since its start and wait cost each program."""
    return _facts.PDL_MAX_PROGRAMS * facts.multiprocessors


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin, and wait for the end of the previous one. With PDL, no memory is accessed before.

    Every program of every such kernel waits, so when one kernel ends, all before it have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def check(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device | None,
) -> torch.Size:
    """Check a tensor and return its shape. None in `shape` is any size, and as `device` any device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or a last dimension that is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {said(tensor)}, takes a tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, takes {dtype}")
    got = tensor.shape
    if got != shape:  # an open size, or another shape
        fits = len(got) == len(shape)
        for size, want in zip(got, shape, strict=False):
            if want is not None and want != size:
                fits = False
        if not fits:
            takes = ", ".join("any" if want is None else str(want) for want in shape)
            raise ValueError(f"{name}: got shape {list(got)}, takes [{takes}]")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, takes one on {device}, where the others are")
    stride = tensor.stride()[-1]
    if stride != 1 and got[-1] > 1:
        raise ValueError(f"{name}: got stride {stride} in the last dimension, takes 1")
    return got


def number(name: str, value: float) -> float:
    """Return `value` as a float. Raises TypeError if it is no number. A tensor is none: a read would synchronise."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a number")
    return float(value)


def scale(name: str, value: float) -> float:
    """Return `value` as a softmax scale. Raises TypeError: no number; ValueError: 0, negative, or not finite in fp32.

    No model has such a scale. In its place, other versions of an interface pass 0, like FlashAttention 2's dropout_p.
    """
    if type(value) is not float:
        value = number(name, value)
    if LEAST_SCALE <= value <= MOST_SCALE:
        return value
    raise ValueError(f"{name}: got {value}, takes a softmax scale from 2**-126 to 2**127")


def flag(name: str, value: bool) -> bool:
    """Return `value`. Raises TypeError if it is no bool: other versions of an interface pass other arguments there."""
    if value is True or value is False:
        return value
    raise TypeError(f"{name}: got {said(value)}, takes True or False")


def integer(name: str, value: int, least: int, most: int | None = INT32_MAX, *, other: str = "") -> int:
    """Return `value` as an int. Raises TypeError if it is no integer, ValueError if not from `least` to `most`."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return value
    takes = f"{least} on" if most is None else f"{least} to {most}"
    takes = f"{least}" if least == most else f"{other}an integer from {takes}"
    if not _is_integer(value):
        raise TypeError(f"{name}: got {said(value)}, takes {takes}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}: got {value}, takes {takes}")
    return int(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def count(name: str, value: int | None, least: int) -> int:
    """Return `value` as an int, 0 for None. Raises TypeError if it is no integer, ValueError if it is below `least`."""
    return 0 if value is None else integer(name, value, least, None, other="None or ")


def one_of(name: str, value: Any, *allowed: Any, why: str = "") -> None:
    """Raise ValueError if `value` is not one of the allowed values."""
    fits = (one for one in allowed if isinstance(one, bool) == isinstance(value, bool))  # 1 is equal to True
    if not isinstance(value, SCALARS) or value not in fits:
        raise ValueError(f"{name}: got {said(value)}, takes {' or '.join(map(repr, allowed))}{why}")


def said(value: Any) -> str:
    """Return how errors show a value, in one line: tensors and other objects by their type."""
    if isinstance(value, list) and 0 < len(value) < 4:
        return f"[{', '.join(map(said, value))}]"
    if isinstance(value, tuple) and 0 < len(value) < 4:
        return f"({', '.join(map(said, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, numbers.Number):
        return str(value)  # numpy's repr names its type
    if isinstance(value, SCALARS):
        return repr(value)
    kind = type(value)
    name = "tensor" if isinstance(value, torch.Tensor) else f"{kind.__module__}.{kind.__qualname__}"
    return f"a {name.removeprefix('builtins.')}"


@functools.lru_cache(maxsize=4096)
def divider(divisor: int) -> tuple[int, int]:
    """Return (multiplier, shift) so that n // divisor == (2 * n * multiplier >> 32) >> shift for 0 <= n < 2**31.

    multiplier is 2**(31 + shift) / divisor, rounded up, as the int32 of the same bits. The rounding adds less than
    n / 2**31 < 1 to the dividend. A divisor of 0 divides nothing, and counts as 1.
    """
    divisor = max(divisor, 1)
    shift = (divisor - 1).bit_length()
    multiplier = -(-(1 << (31 + shift)) // divisor)
    return multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift
