"""Parts that wrappers share: the device's facts, launches and the checks of arguments; the same in every package."""

import concurrent.futures
import contextlib
import contextvars
import functools
import hashlib
import importlib
import inspect
import json
import logging
import numbers
import operator
import pathlib
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import _facts, _internals
from ._facts import KERNELS, MODULES, PDL_TARGETS, SM90_MODULES, TARGETS

# The oldest and the newest minor version of Triton that mlagen makes packages for, and the one at hand.
SUPPORTED = ((3, 6), (3, 9))
INSTALLED = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
IN_RANGE = SUPPORTED[0] <= INSTALLED <= SUPPORTED[1]
TRITON = min(max(INSTALLED, SUPPORTED[0]), SUPPORTED[1])  # entries of tables for this version are taken
WAIT_SECONDS = 5.0  # after which a process that waits for another one's kernels says so
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**127  # of logits: in fp32 neither 0 nor inf, nor times log2(e)


class Forced(NamedTuple):
    """Choices of `force` for calls of any family; None: as tables and sizes of a call have it."""

    kernel: str | None = None  # one of KERNELS; calls that it cannot run take a portable kernel
    tile: Any = None  # of portable kernels, of the family that is called; of top-k's forced kernel
    num_splits: int | None = None  # of calls that do not name a number of splits
    workspace_bytes: int | None = None  # from where calls go through the kernels in pieces
    combine_units: int | None = None  # of dense_decode: a program's cost of sharing requests
    block_b: int | None = None  # of dense_decode: requests per read of lengths


class DeviceFacts(NamedTuple):
    """A device as the tile tables know it: the row to read, and its other facts."""

    target: str
    multiprocessors: int
    pdl: bool = False  # whether a kernel can begin while the one before it still runs
    sm90: bool = False  # whether it runs the sm90 kernels
    memory_rate: int = 0  # GB/s of its memory; 0: not known
    forced: Forced = Forced()

    @property
    def has_e4m3(self) -> bool:
        """Whether its hardware converts float8_e4m3fn."""
        return self.target in _facts.E4M3_TARGETS

    @property
    def rounds_e4m3(self) -> bool:
        """Whether its hardware rounds fp32 to float8_e4m3fn at once, to 0x7f from any NaN."""
        return self.target in _facts.E4M3_ROUNDING_TARGETS


def supports(gpu: torch.device | str | tuple[int, int]) -> str | None:
    """Return the target with kernels of this package that a GPU runs; None if there is none.

    A CUDA device runs the newest target of its own major compute capability that is not newer than itself: sm103 runs
    the kernels of sm100. A ROCm device runs only those of its own name.

    Args:
        gpu: a device, a name such as "sm103" or "gfx942", or a CUDA device's compute capability, such as (10, 3).

    Raises:
        TypeError: none of these.
        ValueError: a name of another form, a device that is no GPU, or a compute capability where torch is ROCm's.
    """
    if isinstance(gpu, torch.device):
        gpu = architecture(gpu)
    elif isinstance(gpu, tuple) and len(gpu) == 2 and all(isinstance(part, int) for part in gpu):
        if torch.version.hip:
            raise ValueError(f"gpu: got {gpu}, takes a device or a name: ROCm's compute capabilities name no GPU")
        gpu = f"sm{gpu[0]}{gpu[1]}"
    elif not isinstance(gpu, str):
        raise TypeError(f"gpu: got {gpu!r}, takes a device, a name or a compute capability")
    if cuda := re.fullmatch(r"sm(\d+)(\d)", gpu):
        fits = [f"sm{cuda[1]}{minor}" for minor in range(int(cuda[2]), -1, -1)]
    elif re.fullmatch(r"gfx[0-9a-f]+", gpu):
        fits = [gpu]
    else:
        raise ValueError(f"gpu: got {gpu!r}, takes a name such as 'sm103' or 'gfx942'")
    return next((target for target in fits if target in TARGETS), None)


def architecture(device: torch.device) -> str:
    """The name of a GPU's own architecture: "sm103", "gfx942". Raises ValueError if the device is no GPU."""
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, takes a CUDA or ROCm device")
    properties = torch.cuda.get_device_properties(device)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a CUDA or ROCm device; inside `planned_for` those of the target that stands for it.

    Raises:
        ValueError: the device is no GPU, or none that this package has kernels for.
    """
    facts, forced = _planned.get() or _read_facts(device), _forced.get()
    return facts if forced is None else facts._replace(forced=forced)


@functools.cache
def _read_facts(device: torch.device) -> DeviceFacts:
    name = architecture(device)
    target = supports(name)
    if target is None:
        raise ValueError(f"device: got {name}, takes one of {', '.join(TARGETS)}")
    gpu = torch.cuda.get_device_properties(device)
    compiles = not triton.knobs.runtime.interpret  # the interpreter knows neither of these two
    pdl, sm90 = compiles and target in PDL_TARGETS, compiles and name == "sm90" and has_gluon()
    rate = 2 * getattr(gpu, "memory_clock_rate", 0) * getattr(gpu, "memory_bus_width", 0) // 8_000_000  # by kHz, bits
    return DeviceFacts(target, gpu.multi_processor_count, pdl, sm90, rate)


@functools.cache
def has_gluon() -> bool:
    """Whether there are sm90 kernels and this Triton has their Gluon: 3.6 or newer, with all that they import."""
    if not SM90_MODULES or INSTALLED < (3, 6):
        return False
    try:
        for module in SM90_MODULES:
            importlib.import_module(f".{module}", __package__)
    except Exception:  # any error of a later Triton; the portable kernels still run
        return False
    return True


@functools.cache
def sm90_kernel(module: str) -> Any:
    """The sm90 kernel of a module, which is imported when it first runs: not every Triton has its Gluon."""
    return getattr(importlib.import_module(f".{module}", __package__), f"{module}_kernel")


def for_triton(table: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a table that hold for TRITON, without the versions that rows of some Tritons alone end with."""
    chosen: dict[str, list[tuple[Any, ...]]] = {target: [] for target in table}
    for target, rows in table.items():
        for row in rows:
            *entries, first, last = row if type(row[-1]) is tuple else (*row, TRITON, TRITON)  # a Tile has its own type
            if first <= TRITON <= last:
                chosen[target].append(tuple(entries))
    return chosen


def is_current(device: torch.device) -> bool:
    """Whether a launch goes to `device`, as Triton launches on the current device."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def hash_functions() -> None:
    """Has Triton hash every function of the package, callees first, so that a kernel has one key in Triton's cache.

    Triton 3.6 and 3.7 take the constants of a callee into a kernel's hash only if the callee was hashed before: the key
    would be another in each process, with the order of its first launches.
    """
    for module in (sys.modules.get(f"{__package__}.{name}") for name in MODULES):
        for one in [] if module is None else list(vars(module).values()):
            if isinstance(one, _internals.JITCallable):
                hash(one)  # which it keeps


class Variant(NamedTuple):
    """A launch, as far as Triton's compilation depends on it: no run-time argument is specialised."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constexprs: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """Compiles the kernel for the current device, or takes it from Triton's cache; launches nothing."""
        hash_functions()
        return self.kernel.warmup(*self.arguments, *self.constexprs, grid=(self.programs,), **self.options)


# Annotations of these two would be in the key of every kernel's compilation.
def kernel(function, jit=triton.jit):  # type: ignore[no-untyped-def]
    """Makes a kernel that does not specialise its run-time arguments, those that are no constexprs.

    Else Triton would compile it anew for each mix of divisible and other values. The compiler's assumptions about
    addresses come only from constexprs, so that `warmup` can reach every variant.
    """
    return jit(function, do_not_specialize=_arguments_of(function))


def _arguments_of(function) -> list[str]:  # type: ignore[no-untyped-def]
    """The names of a kernel's run-time arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.annotation is not tl.constexpr]


@functools.cache
def _taker(function: Callable[..., Any]) -> tuple[Callable[[Any], tuple[Any, ...]], int]:
    """Return a function that takes a kernel's run-time arguments from a call by their names: `q_ptr` is the call's `q`.

    Behind it stands how many come up to the last tensor: none behind is ever absent.
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
noted = _noted.get  # the note of the call that is done the first time, if one is
is_steered = _steered.get  # whether calls are planned, forced, recorded or noted: then each is checked
steering: list[None] = []  # an entry for each such context of any thread: while there is none, no call is steered


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[Any]:
    token, steered = variable.set(value), _steered.set(True)  # of this thread only: others go on launching
    steering.append(None)
    try:
        yield value
    finally:
        steering.pop()
        variable.reset(token)
        _steered.reset(steered)


def planned_for(facts: DeviceFacts) -> contextlib.AbstractContextManager[Any]:
    """Inside, calls plan for a device of these facts, even if another device holds their tensors."""
    return _set(_planned, facts)


def force(**choices: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, calls run with these fields of `Forced`, and with those of an enclosing `force`.

    Raises:
        ValueError: the package has no kernel of this name.
    """
    if choices.get("kernel") not in (None, *KERNELS):
        raise ValueError(f"kernel: got {choices['kernel']!r}, takes one of {', '.join(KERNELS)}")
    return _set(_forced, (_forced.get() or Forced())._replace(**choices))


def recording() -> contextlib.AbstractContextManager[Any]:
    """Inside, `launch` launches nothing that is not compiled yet, but notes its variant in the dict that this gives."""
    return _set(_recorded, {})


def noting(note: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, `launch` tells `note` of each launch, so that the call can be done again without its checks."""
    return _set(_noted, note)


def facts_of(target: str) -> DeviceFacts:
    """The facts of one of TARGETS without a device; with one multiprocessor, it sets how many programs run at once."""
    return DeviceFacts(target, 1, target in PDL_TARGETS, target == "sm90" and has_gluon())


def take_compiled(name: str) -> None:
    """Puts kernels that were compiled ahead for an architecture into Triton's cache, so that no compiler runs for them.

    `mlagen build --cache` leaves them in the package's folder, as kernels-ARCHITECTURE-tritonVERSION-KEY.tar.xz, where
    KEY stands for the very files of a Triton. An archive for another Triton is ignored.
    """
    folder, known = pathlib.Path(__file__).parent, None
    for archive in folder.glob(f"kernels-{name}-*.tar.xz"):
        known = known or hashlib.sha256(_internals.triton_key().encode()).hexdigest()[:16]
        if archive.name.endswith(f"-{known}.tar.xz"):
            with tarfile.open(archive) as tar:
                _unpack(tar, pathlib.Path(triton.knobs.cache.dir))


def _unpack(tar: tarfile.TarFile, folder: pathlib.Path) -> None:
    """Adds an archive's entries to a cache of Triton's; those that are there are left as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for member in tar:
            entry, name = pathlib.PurePosixPath(member.name).parts
            if (folder / entry).exists():
                continue
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            if name.startswith("__grp__"):  # names the entry's files, which Triton takes by their paths
                paths = {one: str(folder / entry / one) for one in json.loads(data)}
                data = json.dumps({"child_paths": paths}).encode()
            path = pathlib.Path(temporary, entry, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for unpacked in pathlib.Path(temporary).iterdir():
            with contextlib.suppress(OSError):  # another process was first
                unpacked.rename(folder / unpacked.name)


@contextlib.contextmanager
def taking_turns(name: str) -> Iterator[None]:
    """Inside, one process compiles this package's kernels for an architecture; others wait and find them in the cache.

    The lock is a file in Triton's cache folder. The system frees it when a process ends, however it ends: then those
    that wait go on together. Where no file can be locked there, nothing is waited for.
    """
    folder = pathlib.Path(triton.knobs.cache.dir)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # no fcntl, a folder that is read-only, or one without locks
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f".{__package__.rpartition('.')[2]}-{name}.lock"
            _take_turn(stack.enter_context(path.open("a")), path)
        yield


def _take_turn(file: IO[str], path: pathlib.Path) -> None:
    """Locks a file for this process, or, if another one has it, for all that wait until that one is done."""
    fcntl = importlib.import_module("fcntl")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    due = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        if time.monotonic() >= due:
            due = float("inf")
            logging.getLogger(__name__).warning("%s: waiting for a process that compiles; lock: %s", __package__, path)
        time.sleep(0.05)


def compile_all(variants: Iterable[Variant]) -> None:
    """Compiles variants for the current device, side by side on all cores."""
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
    """Launches a kernel on the current device and stream, with the fields of `call` that have its arguments' names.

    Triton's own launch looks at every argument to choose the variant, at several times the cost of the launch. Here the
    constexprs and which optional tensors are absent settle it, since run-time arguments are not specialised:
    the first launch compiles, later ones call the compiled kernel's launcher as Triton does, alike in all versions in
    the range of SUPPORTED. Another Triton's launcher may take other arguments, so there every launch is Triton's own.

    With `pdl` (programmatic dependent launch) a kernel begins as soon as every program of the one before it allows it
    or ends, and waits by itself for that kernel's writes. With `pdl_max_programs`, those of up to so many programs do:
    a last constexpr is whether they do. `registers` are the most that a thread may have, where there is a limit.
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
        options["launch_pdl"] = True  # which the launcher keeps
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
    """Tells of a launch, if someone notes the call."""
    note = _noted.get()
    if note is not None:
        note.launch(compiled, _names_of(kernel.fn), programs, arguments, constexprs)


def pdl_max_programs(facts: DeviceFacts) -> int:
    """Most programs of short kernels that launch so: to begin and to wait costs each program."""
    return _facts.PDL_MAX_PROGRAMS * facts.multiprocessors


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel begin, and waits for the end of the one before: with PDL a kernel touches no memory earlier.

    Every program of every such kernel waits, so the end of one is the end of all before it.
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
    """Checks an argument and returns its shape; None in `shape` stands for any size, and as `device` for any device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or a last dimension that is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, takes a tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, takes {dtype}")
    got = tensor.shape
    if got != shape:  # where shape leaves sizes open, or is another
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
    """`value` as a float. Raises TypeError if it is no number; a tensor is none, since reading it would synchronise."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a number")
    return float(value)


def scale(name: str, value: float) -> float:
    """`value` as the factor of logits. Raises TypeError: no number; ValueError: 0, negative, or not finite in fp32.

    No model has such a factor. Other versions of an interface pass 0 in its place, as FlashAttention 2 does with its
    dropout_p, and a negative factor prefers the keys that fit least.
    """
    if type(value) is not float:
        value = number(name, value)
    if LEAST_SCALE <= value <= MOST_SCALE:
        return value
    raise ValueError(f"{name}: got {value}, takes a factor of logits above 0, from 2**-126 to 2**127")


def flag(name: str, value: bool) -> bool:
    """`value`, a bool. Raises TypeError if it is none: a number or a tensor is another argument of another version."""
    if value is True or value is False:
        return value
    raise TypeError(f"{name}: got {type(value).__name__}, takes True or False")


def count(name: str, value: int | None, least: int) -> int:
    """`value` as an int, 0 for None. Raises TypeError if it is no integer, ValueError if it is below `least`."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {type(value).__name__}, takes None or an integer")
    if value < least:
        raise ValueError(f"{name}: got {value}, takes None or at least {least}")
    return int(value)


@functools.lru_cache(maxsize=4096)
def divider(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) so that n // divisor == (2 * n * multiplier >> 32) >> shift for 0 <= n < 2**31.

    multiplier is 2**(31 + shift) / divisor, rounded up, as the int32 of the same bits: its excess adds less than
    n / 2**31 < 1 to the dividend. 0, which divides nothing, counts as 1.
    """
    divisor = max(divisor, 1)
    shift = (divisor - 1).bit_length()
    multiplier = -(-(1 << (31 + shift)) // divisor)
    return multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift
