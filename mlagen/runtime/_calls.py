"""Cache of checked calls, by signature.

The wrapper's own code checks, schedules and launches the first calls of a signature. A note records the actions of the
second, and later calls with that signature repeat only these, with their own tensors. So a signature that never comes
again costs no record. Refused calls are not kept, and neither are tensors or values read from them. `_signatures` reads
the signature of a call.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import _launch, _signatures
from ._internals import likeness
from ._notes import PARAMETER, TENSOR, CallState, Known, Note, Run, known_call, signature_of

__all__ = ["CallState", "validated"]

CALL_CACHE_SIZE = 4096  # most signatures per wrapper, of recorded calls and of calls that were only checked
LATEST_CALLS = 4  # repeated calls that a call is first compared with
CHECKED_CALLS = 1  # calls of a signature that are only checked; the next one is recorded
PLAIN = frozenset((bool, int, str, type(None), torch.dtype, torch.device))  # types that a signature tells apart


class KnownCalls(dict[tuple[Any, ...], Known]):
    """Calls by signature.

    Attributes:
        latest: the latest repeated calls: `values`, the part of a signature that `is_alike` does not compare, and the
            fields of Known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: tuple[Any, ...] = ()

    def repeating(self, signature: tuple[Any, ...], values: tuple[Any, ...], tensors: Sequence[Any]) -> Run | None:
        """Return the function for a call, which becomes the latest. Return None for an unknown signature."""
        known = self.get(signature)
        if known is None:
            return None
        present, is_alike, run = known
        if present is not None and is_alike is not None:
            for _, _, _, other in self.latest:
                if other is run:  # compared and refused: another mode of autograd, or a tensor that is given twice
                    is_alike = likeness(present(tensors))
                    break
            if is_alike is not None:
                self.latest = ((values, present, is_alike, run), *self.latest[: LATEST_CALLS - 1])
        return run

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        self.latest = ()


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory of a call, like torch.empty."""
    tensor = torch.empty(*shape, dtype=dtype, device=device)
    note = _launch.noted()
    if note is not None:
        note.take(tensor)
    return tensor


def filled(*shape: int, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory of a call and fill it with a value."""
    tensor = empty(*shape, dtype=dtype, device=device)
    fill(tensor, value)
    return tensor


def fill(tensor: torch.Tensor, value: float) -> None:
    """Fill memory from `empty`, or columns of all its rows. The next equal call fills all of it."""
    tensor.fill_(value)
    note = _launch.noted()
    if note is not None:
        note.fill(tensor, value)


def requires(condition: Callable[..., bool], *names: str) -> None:
    """Add a condition on addresses of arguments, by name, that repeated calls must meet as well as the signature."""
    note = _launch.noted()
    if note is not None:
        note.conditions.append((condition, names))


def apart(nbytes: int, other_nbytes: int, address: int, other: int) -> bool:
    """Whether two address ranges do not overlap."""
    return address + nbytes <= other or other + other_nbytes <= address


def remember(state: CallState, config: tuple[Any, ...]) -> None:
    """Store the sizes of an accepted call in an argument. Repeated calls also do so."""
    state.config = config
    note = _launch.noted()
    if note is not None:
        note.config = config


def not_kept() -> None:
    """Mark a call as not repeatable, since it read a value outside its signature."""
    note = _launch.noted()
    if note is not None:
        note.kept = False


def _named(names: Iterable[str], arguments: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among arguments with their names, in the order of their addresses."""
    for name, one in zip(names, arguments, strict=False):
        if isinstance(one, torch.Tensor):
            yield name, one
        elif isinstance(one, (tuple, list)):
            yield from _named((f"{name}[{number}]" for number in range(len(one))), one)


def _holds(signature: tuple[Any, ...], addresses: Sequence[int | None], arguments: Iterable[Any]) -> bool:
    """Whether a signature distinguishes these arguments from all others with another effect."""
    tensors = []
    for one in _leaves(arguments):
        kind = type(one)
        if kind is TENSOR or kind is PARAMETER:
            tensors.append(one.data_ptr())
        elif kind is float:
            if (one or repr(one)) not in signature:
                return False  # 0.0 is equal to -0.0
        elif isinstance(one, CallState):
            if any(part is one for part in signature):
                return False
        elif kind not in PLAIN:
            return False
    return tensors == [address for address in addresses if address is not None]


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments, of tuples and lists the members."""
    for one in arguments:
        if type(one) is tuple or type(one) is list:
            yield from _leaves(one)
        else:
            yield one


def validated(**sources: str | tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a wrapper check its calls once per signature.

    Args:
        sources: wrapper arguments behind kernel arguments with other names. Of several, the first that is given and
            contains the address is the source.
    """
    origins = {name: (source,) if isinstance(source, str) else source for name, source in sources.items()}

    def decorate(wrapper: Any) -> Any:
        checked = KnownCalls()
        counts: dict[int, int] = {}  # calls that were only checked, by the hash of their signature
        parameters, lock = inspect.signature(wrapper).parameters, threading.Lock()
        names = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
        positional = len(parameters) - len(names)

        def again(arguments: tuple[Any, ...]) -> Any:
            """Run the wrapper."""
            return wrapper(*arguments[:positional], **dict(zip(names, arguments[positional:], strict=True)))

        def unkept(addresses: list[Any], arguments: tuple[Any, ...]) -> Any:
            """Run a call of a signature that is checked each time."""
            return again(arguments)

        def put(calls: dict[Any, Any], key: Any, value: Any) -> None:
            """Add an entry. The oldest makes room for it."""
            with lock:
                while len(calls) >= CALL_CACHE_SIZE:
                    del calls[next(iter(calls))]
                calls[key] = value

        def first(signature: tuple[Any, ...], addresses: list[Any], arguments: tuple[Any, ...]) -> Any:
            """Run a call with an unknown signature; keep its actions if there was one like it before."""
            key = hash(signature)
            count = counts.get(key, 0)
            if count < CHECKED_CALLS:
                result = again(arguments)
                put(counts, key, count + 1)
                return result
            tensors = dict(_named(parameters, arguments))
            device = next((one.device for one in tensors.values()), None)
            if device is None or not _holds(signature, addresses, arguments) or not _launch.is_current(device):
                return again(arguments)
            note, known = Note(tensors, origins, device.index), Known(None, None, unkept)
            with _launch.noting(note):
                result = again(arguments)
            with contextlib.suppress(Exception):  # NotKeptError, or an unknown launcher; the call itself has run
                known = known_call(note, result, addresses, arguments, again)
            put(checked, signature, known)
            return result

        def find(values: tuple[Any, ...], tensors: tuple[Any, ...]) -> Run:
            """Return the function for a call that is none of the latest. Raises NotKeptError if it has no signature."""
            signature = signature_of(values, tensors)
            return checked.repeating(signature, values, tensors) or functools.partial(first, signature)

        reader = getattr(_signatures, f"{wrapper.__module__.rpartition('.')[2]}_{wrapper.__name__}")
        call: Any = functools.wraps(wrapper)(reader(again, checked, find))
        call.__defaults__, call.__kwdefaults__ = wrapper.__defaults__, wrapper.__kwdefaults__
        call.checked, call.counts, call.unkept = checked, counts, unkept
        return call

    return decorate
