"""Internals of torch and Triton, by version. Where one is missing, its public counterpart takes its place.

No other module of a package uses a private name of torch or Triton.
"""

import contextlib
import copy
import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable

__all__ = ["JITCallable"]

INSTALLED = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
MAPS_SIZE = 256  # addresses, or pairs of them, with cached descriptors of a launch
TENSOR_MAP = "PyCUtensorMap"  # type of a descriptor for a launcher
LAUNCHER = "CudaLauncher"  # type of the launcher with a known C function

Values = list[Any]  # addresses and numbers of a call; each launch picks its arguments there
Start = Callable[[int, Values], Any]  # launches a kernel on a stream
Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
Take = Callable[[], torch.Tensor]  # allocates memory


def found(path: str, fallback: Any) -> Any:
    """Return torch._C's function with a dotted name, or the fallback if this torch has none."""
    try:
        return operator.attrgetter(path)(torch._C)
    except AttributeError:
        return fallback


# Allocates on the current GPU past torch's dispatcher, as torch.compile's code does, at half the cost of torch.empty.
empty_strided: Callable[..., torch.Tensor] | None = found("_dynamo.guards._empty_strided_cuda", None)
# Makes a tensor with these sizes, strides and offset of another's memory, also past torch's dispatcher.
reinterpret: Callable[..., torch.Tensor] = found("_dynamo.guards._reinterpret_tensor", torch.as_strided)
current_device: Callable[[], int] = found("_cuda_getDevice", torch.cuda.current_device)
device_count: Callable[[], int] = torch.cuda.device_count
# Number of active modes of torch's dispatcher and of its functions. A torch that does not report it may have one.
one_mode = functools.partial(int, 1)
dispatch_modes: Callable[[], int] = found("_len_torch_dispatch_stack", one_mode)
function_modes: Callable[[], int] = found("_len_torch_function_stack", one_mode)
# Compares tensors with those of a call in one C function, as torch.compile's code does at each of its calls.
tensor_guards: Callable[..., Any] | None = found("_dynamo.guards.TensorGuards", None)


def is_watched() -> bool:
    """Whether a mode of torch's functions is active, other than that of a default device."""
    try:
        from torch.utils._device import DeviceContext

        modes = map(torch._C._get_function_stack_at, range(function_modes()))
        return any(type(mode) is not DeviceContext for mode in modes)
    except (ImportError, AttributeError):
        return True


def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function that compares tensors with these: type, dtype, device, sizes and strides.

    It also compares states of autograd and of torch's dispatcher, so it may refuse tensors that are alike. Return None
    if this torch has no such function, or if it refuses these tensors, for example one that is given twice.
    """
    if tensor_guards is None or len(set(map(id, tensors))) < len(tensors) or not is_exact(tensor_guards):
        return None
    is_alike = _guard(tensor_guards, tensors)
    return is_alike if is_alike(*tensors) else None


def _guard(guards: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@functools.cache
def is_exact(guards: Callable[..., Any]) -> bool:
    """Whether guards of this torch tell tensors apart by all that `likeness` names, tried on a few."""
    with contextlib.suppress(Exception):
        one = torch.empty((1, 2, 2), dtype=torch.int32, device="cpu")
        others = [one[:, :1], one[0], one.mT, one.as_strided((1, 2, 2), (8, 2, 1)), one.float(), one.to("meta")]
        others += [torch.nn.Parameter(one, requires_grad=False), one.expand(2, 2, 2)]
        is_alike = _guard(guards, [one])
        return bool(is_alike(one) and is_alike(one.clone())) and not any(map(is_alike, others))
    return False


def allocator(tensor: torch.Tensor) -> Take:
    """Return a function that allocates memory like a tensor on the current device."""
    sizes, strides, dtype, device = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    if empty_strided is not None and tensor.is_cuda:
        return functools.partial(empty_strided, sizes, strides, dtype)
    if strides == torch.empty(sizes, device="meta").stride():  # with one entry, strides say more than is_contiguous
        return lambda: torch.empty(sizes, dtype=dtype, device=device)
    return lambda: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def stream_getter() -> Callable[[int | None], int]:
    """Return the function that gives the number of a device's current stream."""
    getter: Callable[[int | None], int] | None = getattr(driver.active, "get_current_stream", None)
    return getter or _current_stream


def _current_stream(index: int | None) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


def triton_key() -> str:
    """Return the hash of this Triton's files, which is part of the keys of its cache; empty if it has none."""
    key = getattr(cache, "triton_key", str)
    return str(key())


def run(compiled: Any, programs: int, stream: int, arguments: Iterable[Any]) -> None:
    """Launch a compiled kernel with Triton's launcher, which is called alike in all versions of SUPPORTED."""
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
    )  # fmt: skip


def gather(numbers: Sequence[int]) -> Pick:
    """Return a function that picks the values with these numbers."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    if numbers:
        (number,) = numbers
        return lambda values: (values[number],)
    return lambda values: ()


class Address:
    """An address that stands in for a tensor, for descriptors."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Description:
    """Makes descriptors like that of a call, for memory at other addresses."""

    def __init__(self, descriptor: Any):
        self.descriptor = copy.copy(descriptor)
        self.descriptor.base = None

    def __call__(self, address: int) -> Any:
        """Return a descriptor for an address."""
        descriptor = copy.copy(self.descriptor)
        descriptor.base = Address(address)
        return descriptor


def is_direct(compiled: Any) -> bool:
    """Whether the C function of the kernel's launcher can be called without the launcher's Python part.

    Addresses are passed as numbers, so the C function does not look tensors up in the driver. The Python part does
    nothing else for a kernel without memory per launch.
    """
    launcher = compiled.run
    sizes = [getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    return type(launcher).__name__ == LAUNCHER and not any(sizes) and not getattr(launcher, "gsan_enabled", False)


def starter(
    compiled: Any, programs: int, pick: Pick, rest: tuple[Any, ...], launch: Callable[..., Any] | None
) -> Start:
    """Return a function that launches a compiled kernel with picked values, then `rest`, as arguments.

    Args:
        launch: the C function of its launcher, or the launcher's function around it; None: the launcher as a whole.
    """
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if launch is None:

        def start(stream: int, values: Values) -> None:
            run(compiled, programs, stream, pick(values) + rest)

        return start
    call, cooperative, pdl = launch, launcher.launch_cooperative_grid, launcher.launch_pdl
    if INSTALLED < (3, 7):
        begin = (function, cooperative, pdl, None, None, metadata, None, None, None)

        def start_3_6(stream: int, values: Values) -> None:
            call(programs, 1, 1, stream, *begin, *pick(values), *rest)

        return start_3_6
    annotations, signature = launcher.arg_annotations, launcher.kernel_signature

    def start_3_7(stream: int, values: Values) -> None:
        call(
            programs, 1, 1, stream, function, cooperative, pdl, metadata, None, None, None, None, None,
            annotations, signature, pick(values) + rest,
        )  # fmt: skip

    return start_3_7


class Maps(dict[tuple[int, ...], list[Any]]):
    """Cache of a launch's encoded descriptors, by the addresses that they describe, with room for a model's layers.

    Args:
        listing: a launcher that returns the arguments of the inner launcher.
        arguments: a kernel's arguments, with a Description for each descriptor.
    """

    def __init__(self, listing: Callable[..., tuple[Any, ...]], arguments: Sequence[Any]):
        super().__init__()
        self.listing, self.arguments = listing, arguments

    def expanded(self, addresses: Sequence[int]) -> list[Any]:
        """Return the launcher's arguments for memory at these addresses."""
        rest = iter(addresses)
        arguments = [one(next(rest)) if isinstance(one, Description) else one for one in self.arguments]
        if INSTALLED < (3, 7):
            return list(self.listing(*[None] * 13, *arguments)[13:])
        return list(self.listing(*[None] * 15, arguments)[15])

    def __missing__(self, addresses: tuple[int, ...]) -> list[Any]:
        maps = [one for one in self.expanded(addresses) if is_map(one)]
        if len(self) >= MAPS_SIZE:
            self.clear()
        self[addresses] = maps
        return maps


def is_map(argument: Any) -> bool:
    """Whether a launcher's argument is an encoded descriptor."""
    return type(argument).__name__ == TENSOR_MAP


def inner_launcher(compiled: Any, arguments: Sequence[Any]) -> tuple[Callable[..., Any], Maps] | None:
    """Return the C function inside the launcher that encodes descriptors, and a cache of encoded descriptors.

    Return None if the launcher is built otherwise: then it encodes descriptors at every launch.

    Args:
        arguments: a kernel's arguments, with a Description for each descriptor.
    """
    with contextlib.suppress(AttributeError, TypeError):
        outer = compiled.run.launch
        cells = dict(zip(outer.__code__.co_freevars, outer.__closure__, strict=True))
        if "launcher" in cells:
            inner: Callable[..., Any] = cells["launcher"].cell_contents
            cells["launcher"] = types.CellType(_listed)
            listing = types.FunctionType(outer.__code__, outer.__globals__, closure=tuple(cells.values()))
            return inner, Maps(listing, arguments)
    return None


def _listed(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments: a launcher without a launch."""
    return arguments
