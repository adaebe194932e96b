"""Record of a checked call's actions, and the function that repeats them with other tensors.

A call allocates memory, fills it and launches kernels. Each launch argument is a number, or an address relative to a
tensor of the call or to memory that it allocated.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import _internals
from ._internals import Description

ADDRESS_BYTES = 64  # checks use addresses only modulo this or a divisor of it
NUMBERS = frozenset((int, float, bool, type(None)))  # types of launch arguments without an address
# Other tensors, for example without memory, are checked at every call.
TENSOR, PARAMETER = torch.Tensor, torch.nn.Parameter
WHOLE = object()  # second tensor if a single tensor was passed
MAP = object()  # source of an encoded descriptor

Finish = Callable[[list[Any]], Any]  # makes a call's result of its memory, or of its memory and then its arguments
# Repeats a call, given the addresses of its tensors, in a list of its own, and its arguments.
Run = Callable[[list[Any], tuple[Any, ...]], Any]


class Known(NamedTuple):
    """The function that repeats the calls of a signature, and a comparison with the tensors of these calls.

    Attributes:
        present: picks the tensors to compare from all that the wrapper may take.
        is_alike: compares them. None: the signature has to be read.
    """

    present: _internals.Pick | None
    is_alike: Callable[..., bool] | None
    run: Run


class NotKeptError(Exception):
    """The call cannot be kept, so equal calls must be checked again."""


def signature_of(values: tuple[Any, ...], tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call's signature. Raises NotKeptError for a tensor that is not of torch's own type.

    A GPU's index stands for its device. torch makes a new object at each read of a device.

    Args:
        values: alignment of each tensor, and type and value of every other argument.
        tensors: all that the wrapper may take; None or WHOLE for one that is absent, as its alignment says.
    """
    parts = [*values]
    for one in tensors:
        kind = type(one)
        if kind is TENSOR or kind is PARAMETER:
            parts += (one.dtype, one.get_device(), one.shape, one.stride())
        elif one is not None and one is not WHOLE:
            raise NotKeptError
    return tuple(parts)


class CallState:
    """An argument that remembers the sizes of earlier calls in `config`. Each call sets it."""

    config: tuple[Any, ...] | None = None


class Place(NamedTuple):
    """Source of a launch argument that is an address: the number of a tensor, and an offset in bytes or a Description.

    Tensors of the call have the first numbers, then allocated memory.
    """

    number: int
    made: Any = None


UNKNOWN = Place(-1)  # source of an address that is in no tensor of a call


class View(NamedTuple):
    """A result that is a part of its memory."""

    number: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Launch(NamedTuple):
    """A launch of a compiled kernel. An argument is a Place or a number; constexprs are the last."""

    compiled: Any
    programs: int
    arguments: list[Any]


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last, including gaps."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


class Note:
    """Record of a call's actions, made while it is checked.

    Args:
        tensors: tensors of the call in the order of its arguments, by the wrapper's argument names; `q[0]` is the first
            of a pair.
        sources: wrapper arguments behind kernel arguments with other names, the most likely first.
        device: index of the current device.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], sources: Mapping[str, tuple[str, ...]], device: int | None
    ) -> None:
        self.tensors, self.sources, self.device = tensors, sources, device
        self.numbers = {name: number for number, name in enumerate(tensors)}
        self.addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.memory: list[torch.Tensor] = []
        self.ranges: list[tuple[int, int]] = []  # begin and end of each memory
        self.fills: list[tuple[int, float]] = []
        self.launches: list[Launch] = []
        self.conditions: list[tuple[Callable[..., bool], tuple[str, ...]]] = []
        self.config: tuple[Any, ...] | None = None
        self.kept = True

    def take(self, tensor: torch.Tensor) -> None:
        """Record allocated memory."""
        begin = tensor.data_ptr()
        self.memory.append(tensor)
        self.ranges.append((begin, begin + tensor.nbytes))
        if begin % ADDRESS_BYTES:
            self.kept = False

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Record that memory was filled, before any launch."""
        place = self._taken(tensor.data_ptr())
        if place is None or self.launches:
            self.kept = False
        else:
            self.fills.append((place[0], value))

    def launch(
        self, compiled: Any, names: list[str], programs: int, arguments: tuple[Any, ...], constexprs: tuple[Any, ...]
    ) -> None:
        """Record a launch of a compiled kernel. None is a launch of the interpreter, which cannot be repeated."""
        found = [
            argument if type(argument) in NUMBERS else self._place(name, argument)
            for name, argument in zip(names, arguments, strict=True)
        ]
        if compiled is None or UNKNOWN in found or arguments[0].device.index not in (self.device, None):
            self.kept = False
        else:
            self.launches.append(Launch(compiled, programs, [*found, *constexprs]))

    def _place(self, name: str, argument: Any) -> Any:
        """Return the source of a tensor or of a descriptor, UNKNOWN if it has none. Any other argument is itself."""
        tensor = argument if isinstance(argument, torch.Tensor) else getattr(argument, "base", None)
        if tensor is None:
            return argument
        address = tensor.data_ptr()
        found = self._taken(address) or self._given(name.removesuffix("_ptr"), address)
        if found is None:
            return UNKNOWN
        number, offset = found
        if tensor is not argument:
            return UNKNOWN if offset else Place(number, Description(argument))
        return Place(number, offset or None)

    def _taken(self, address: int) -> tuple[int, int] | None:
        """Return the number of the memory that contains an address, and the offset in bytes."""
        for number, (begin, end) in enumerate(self.ranges, len(self.tensors)):
            if begin <= address < end:
                return number, address - begin
        return None

    def _given(self, name: str, address: int) -> tuple[int, int] | None:
        """Return the same for tensors of the call. The name selects the tensor, since tensors may share memory.

        A tensor that begins at the address is the source, the most likely one first. A tensor that only spans the
        address may have a gap there, so it is the source only if no other tensor spans it.
        """
        sources = [one for one in self.sources.get(name, (name,)) if one in self.tensors]
        begin = [one for one in sources if self.addresses[one] == address]
        found = [one for one in begin if self.tensors[one].numel()] or begin
        if not found:
            found = [one for one in sources if 0 < address - self.addresses[one] < _span(self.tensors[one])]
            if len(found) != 1:
                return None
        return (self.numbers[found[0]], address - self.addresses[found[0]])

    def result(self, result: Any) -> Any:
        """Return the result with a number or a View for each tensor. Raises NotKeptError for an unknown tensor."""
        if result is None:
            return None
        if isinstance(result, tuple):
            return tuple(map(self.result, result))
        same = [number for number, one in enumerate((*self.tensors.values(), *self.memory)) if one is result]
        if len(same) == 1:
            return same[0]
        if same:  # one tensor under two names; another call may pass two tensors
            raise NotKeptError
        number, offset = self._taken(result.data_ptr()) or (None, 0)
        if number is None or offset:
            raise NotKeptError
        memory = self.memory[number - len(self.tensors)]
        if result.nbytes == memory.nbytes:
            self.memory[number - len(self.tensors)] = result  # begins where its memory begins
            return number
        if result.dtype != memory.dtype:
            raise NotKeptError
        return View(number, tuple(result.shape), result.stride())


class Lead(NamedTuple):
    """A launch as it is repeated: its arguments up to the last address, and the numbers after it.

    Attributes:
        arguments: the first arguments. Place(n, MAP) is the launch's encoded descriptor n.
        rest: the arguments that follow.
        function: the launcher's function that takes them; None: the launcher as a whole.
        maps: cache of encoded descriptors.
        described: numbers of the tensors that they describe.
    """

    launch: Launch
    arguments: list[Any]
    rest: tuple[Any, ...]
    function: Callable[..., Any] | None
    maps: _internals.Maps | None
    described: list[int]

    @classmethod
    def of(cls, launch: Launch, tensors: Sequence[torch.Tensor]) -> "Lead":
        """Return a launch as it is repeated. The tensors are those of the call, then its memory."""
        arguments = launch.arguments
        described = [one.number for one in arguments if _is_described(one)]
        function, maps = launch.compiled.run.launch if _internals.is_direct(launch.compiled) else None, None
        if function is not None and described:
            descriptors = [
                one.made if type(one) is Place and type(one.made) is Description else one for one in arguments
            ]
            found = _internals.inner_launcher(launch.compiled, descriptors)
            expanded = found[1].expanded([tensors[number].data_ptr() for number in described]) if found else []
            if found and sum(map(_internals.is_map, expanded)) == len(described):
                (function, maps), count = found, itertools.count()
                arguments = [Place(next(count), MAP) if _internals.is_map(one) else one for one in expanded]
        last = max((index for index, one in enumerate(arguments, 1) if type(one) is Place), default=0)
        return cls(launch, arguments[:last], tuple(arguments[last:]), function, maps, described)


def _is_described(argument: Any) -> bool:
    """Whether the source of an argument is a descriptor."""
    return type(argument) is Place and type(argument.made) is Description


class Values:
    """Numbering of the values that a repeated call gathers in one list, where each launch picks its arguments.

    The list begins with the addresses of the call's tensors and of its memory. Then follow the numbers between
    addresses, such as None for an absent tensor; addresses with an offset, and descriptors; encoded descriptors.

    Args:
        numbers: numbers of the addresses, by that of their tensor.
        count: how many these are, with those of absent tensors.

    Attributes:
        between: the numbers between addresses.
        offsets: the number of an address, and bytes that are added to it.
        descriptions: the number of an address, and the function that makes a descriptor of it.
        encoded: caches of encoded descriptors, each with the function that picks its addresses.
        starts: the launches.
    """

    def __init__(self, numbers: Mapping[int, int], count: int, leads: Sequence[Lead]):
        absent = next((number for number in range(count) if number not in numbers.values()), None)
        leading = [one for lead in leads for one in lead.arguments]
        self.between = [one for one in leading if type(one) is not Place and (one is not None or absent is None)]
        moved = dict.fromkeys(one for one in leading if type(one) is Place and type(one.made) is int)
        described = dict.fromkeys(filter(_is_described, leading))
        places = {Place(tensor): number for tensor, number in numbers.items()}
        places |= {place: number for number, place in enumerate((*moved, *described), count + len(self.between))}
        self.offsets = [(numbers[place.number], place.made) for place in moved]
        self.descriptions = [(numbers[place.number], place.made) for place in described]
        self.encoded: list[tuple[_internals.Maps, _internals.Pick]] = []
        self.starts: list[_internals.Start] = []
        between, end = itertools.count(count), count + len(self.between) + len(moved) + len(described)
        for lead in leads:
            picked = []
            for one in lead.arguments:
                if one is None and absent is not None:
                    picked.append(absent)
                elif type(one) is not Place:
                    picked.append(next(between))
                else:
                    picked.append(end + one.number if one.made is MAP else places[one])
            if lead.maps is not None:
                self.encoded.append((lead.maps, _internals.gather([numbers[tensor] for tensor in lead.described])))
                end += len(lead.described)
            launch, pick = lead.launch, _internals.gather(picked)
            self.starts.append(_internals.starter(launch.compiled, launch.programs, pick, lead.rest, lead.function))


def known_call(
    note: Note, result: Any, addresses: Sequence[int | None], arguments: Sequence[Any], again: Callable[..., Any]
) -> Known:
    """Return the function that repeats calls of a signature, from a record. Raises NotKeptError if it is incomplete.

    Args:
        addresses, arguments: those of the call, with None for each absent tensor.
        again: runs a call that must be checked, before any of its actions.
    """
    if not note.kept or not note.launches:
        raise NotKeptError
    returned, given = note.result(result), len(note.tensors)
    used = {one.number for launch in note.launches for one in launch.arguments if type(one) is Place}
    used |= set(results := _numbers(returned))
    if len(set(results)) < len(results):
        raise NotKeptError
    taken = [number for number in range(given, given + len(note.memory)) if number in used]
    numbers = dict(enumerate(number for number, address in enumerate(addresses) if address is not None))
    numbers |= {tensor: number for number, tensor in enumerate(taken, len(addresses))}
    tensors = (*note.tensors.values(), *note.memory)
    memory = {number: place for place, number in enumerate(taken)}
    paths = [(len(taken) + first, *rest) for first, *rest in _paths(arguments)]
    places = dict(enumerate(paths)) | {number: (place,) for number, place in memory.items()}
    run = _repeat(
        device=note.device,
        conditions=[
            (condition, _internals.gather([numbers[note.numbers[name]] for name in names]))
            for condition, names in note.conditions
        ],
        takes=[_internals.allocator(tensors[number]) for number in taken],
        fills=[(memory[number], value) for number, value in note.fills if number in memory],
        launched=Values(numbers, len(addresses) + len(taken), [Lead.of(launch, tensors) for launch in note.launches]),
        remember=_remember(note, arguments),
        finish=_finish(returned, places),
        returns_arguments=any(number < given for number in results),
        again=again,
    )
    present = [number for number, address in enumerate(addresses) if address is not None]
    return Known(_internals.gather(present), _internals.likeness(list(note.tensors.values())), run)


def _repeat(
    *,
    device: int | None,
    conditions: list[tuple[Callable[..., bool], _internals.Pick]],
    takes: list[_internals.Take],
    fills: list[tuple[int, float]],
    launched: Values,
    remember: tuple[int, tuple[Any, ...]] | None,
    finish: Finish,
    returns_arguments: bool,
    again: Callable[..., Any],
) -> Run:
    """Return the function that does these actions."""
    current_device, get_stream = _internals.current_device, _internals.stream_getter()
    between, offsets, starts = launched.between, launched.offsets, launched.starts
    descriptions, encoded = launched.descriptions, launched.encoded
    has_others = device is not None and _internals.device_count() > 1
    is_plain = not (conditions or fills or descriptions or encoded or remember)
    if is_plain and len(starts) == 1 and not (has_others or between or offsets or returns_arguments):
        return _repeat_plain(device, takes, starts[0], finish, again)

    def run(values: list[Any], arguments: tuple[Any, ...]) -> Any:
        if has_others and current_device() != device:
            return again(arguments)
        if not is_plain:
            for condition, pick in conditions:
                if not condition(*pick(values)):
                    return again(arguments)
        memory = []
        for take in takes:
            tensor = take()
            memory.append(tensor)
            address = tensor.data_ptr()
            if address % ADDRESS_BYTES:
                return again(arguments)
            values.append(address)
        if between:
            values += between
        for number, nbytes in offsets:
            values.append(values[number] + nbytes)
        if not is_plain:
            for number, value in fills:
                memory[number].fill_(value)
            for number, describe in descriptions:
                values.append(describe(values[number]))
            for maps, pick in encoded:
                values += maps[pick(values)]
        stream = get_stream(device)
        for start in starts:
            start(stream, values)
        if remember is not None:
            number, config = remember
            arguments[number].config = config
        if returns_arguments:
            memory += arguments
        return finish(memory)

    return run


def _repeat_plain(
    device: int | None,
    takes: list[_internals.Take],
    start: _internals.Start,
    finish: Finish,
    again: Callable[..., Any],
) -> Run:
    """Return the function that allocates and launches once. It saves a tenth of a microsecond of the general one."""
    get_stream = _internals.stream_getter()

    def run(values: list[Any], arguments: tuple[Any, ...]) -> Any:
        memory = []
        for take in takes:
            tensor = take()
            memory.append(tensor)
            address = tensor.data_ptr()
            if address % ADDRESS_BYTES:
                return again(arguments)
            values.append(address)
        start(get_stream(device), values)
        return finish(memory)

    return run


def _remember(note: Note, arguments: Sequence[Any]) -> tuple[int, tuple[Any, ...]] | None:
    """Return the number of the argument that remembers, and its config. Raises NotKeptError if it has no new config."""
    states = [number for number, one in enumerate(arguments) if isinstance(one, CallState)]
    if bool(states) != (note.config is not None) or len(states) > 1:
        raise NotKeptError
    return None if note.config is None else (states[0], note.config)


def _paths(arguments: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the place of each tensor among arguments, in the order of their addresses: (2,), or (0, 1) in a pair."""
    for number, one in enumerate(arguments):
        if isinstance(one, torch.Tensor):
            yield (number,)
        elif isinstance(one, (tuple, list)):
            yield from ((number, *path) for path in _paths(one))


def _numbers(returned: Any) -> list[int]:
    """Return the numbers of tensors in a result."""
    if isinstance(returned, View):
        return [returned.number]
    if isinstance(returned, tuple):
        return [number for one in returned for number in _numbers(one)]
    return [] if returned is None else [returned]


def _finish(returned: Any, places: Mapping[int, tuple[int, ...]]) -> Finish:
    """Return the function that makes a result of a call's memory, or of its memory and then its arguments.

    Args:
        returned: the result, with a number or a View for each tensor.
        places: the way to each tensor: its index, or that of its pair and its index in there.
    """
    if returned is None:
        return lambda sources: None
    if isinstance(returned, View):
        (place,), sizes, strides = places[returned.number], returned.sizes, returned.strides
        return lambda sources: _internals.reinterpret(sources[place], sizes, strides, 0)
    if not isinstance(returned, tuple):
        path = places[returned]
        if len(path) == 1:
            return operator.itemgetter(*path)
        return lambda sources: functools.reduce(operator.getitem, path, sources)
    if all(isinstance(one, int) and len(places[one]) == 1 for one in returned):
        return _internals.gather([places[one][0] for one in returned])
    parts = [_finish(one, places) for one in returned]
    return lambda sources: tuple([part(sources) for part in parts])
