"""A device that runs nothing but keeps a list of launches, and copies of calls for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.verify.worker import import_package

GENERATED = Path(__file__).parents[2] / "generated"
TARGET, MULTIPROCESSORS, STREAM = "sm90", 132, 7
LEAST_ADDRESS = 1 << 32  # an argument below is a number


class Launched(list[tuple[Any, ...]]):
    """Launches: a kernel's name, its programs, its stream, and its arguments, tensors as addresses.

    It stands where a package keeps its compiled kernels, and has each that is asked for. A compiled kernel reads every
    tensor as one of the dtype that it was compiled for, so that a key has one list of dtypes.

    Attributes:
        mixed: kernels that were launched with two lists of dtypes under one key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixed: set[str] = set()
        self._dtypes: dict[tuple[Any, ...], list[torch.dtype | None]] = {}

    def get(self, key: tuple[Any, ...]) -> SimpleNamespace:
        """The compiled kernel of a key of `_launch.launch`."""

        def run(programs: int, _y: int, _z: int, stream: int, _function: int, _metadata: None, *rest: Any) -> None:
            found = [getattr(getattr(one, "base", one), "dtype", None) for one in rest[3:]]
            if any(found) and self._dtypes.setdefault(key, found) != found:  # a kept call has addresses alone
                self.mixed.add(key[0].__name__)
            self.append((key[0].__name__, programs, stream, tuple(map(_address, rest[3:]))))

        return SimpleNamespace(run=run, function=1, packed_metadata=None)

    def taken(self) -> list[tuple[Any, ...]]:
        """The launches since this was last asked."""
        found = self[:]
        self.clear()
        return found


def _address(argument: Any) -> Any:
    """An argument as the driver has it: a tensor's address, or a descriptor's address and its tensor."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):
        return argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape
    return argument


@contextlib.contextmanager
def on_a_device(folder: Path, target: str = TARGET, *, checked_calls: int = 0) -> Iterator[tuple[ModuleType, Launched]]:
    """A package, imported afresh. Its calls on the CPU's tensors are planned for a target and launched nowhere.

    Args:
        folder, target: of the package, and of its calls.
        checked_calls: calls of a signature before the one that is recorded.
    """
    package, launched = import_package(folder), Launched()
    launch, internals = package._launch, sys.modules[f"{package.__name__}._internals"]
    calls = sys.modules[f"{package.__name__}._calls"]
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: STREAM))
    facts = launch.facts_of(target)._replace(multiprocessors=MULTIPROCESSORS)

    def device_facts(device: torch.device) -> Any:
        forced = launch._forced.get()
        return facts if forced is None else facts._replace(forced=forced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_COMPILED", launched)
        patch.setattr(internals, "driver", driver)
        patch.setattr(launch, "device_facts", device_facts)
        patch.setattr(calls, "CHECKED_CALLS", checked_calls)
        yield package, launched
    assert not launched.mixed, f"two lists of dtypes under one key: {launched.mixed}"
    for module in [module for module in sys.modules if module.split(".")[0] == package.__name__]:
        del sys.modules[module]


def tensors_in(values: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in arguments or results, with names."""
    if isinstance(values, torch.Tensor):
        yield name, values
    elif isinstance(values, (Mapping, tuple, list)):
        items = values.items() if isinstance(values, Mapping) else enumerate(values)
        for key, value in items:
            yield from tensors_in(value, f"{name}.{key}")


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in other memory; arguments that shared memory still share it. Metadata that no call has seen."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            kept = memory.setdefault(storage.data_ptr(), storage.clone())
            place = (value.storage_offset(), value.shape, value.stride())
            return torch.empty(0, dtype=value.dtype).set_(kept, *place)  # type: ignore[call-overload]
        if isinstance(value, (tuple, list)):
            return type(value)(map(copy, value))
        return type(value)() if hasattr(value, "config") else value

    return {name: copy(value) for name, value in arguments.items()}


def in_words(launches: list[tuple[Any, ...]], arguments: Mapping[str, Any], results: Any) -> list[tuple[Any, ...]]:
    """Launches with names for addresses: the tensor of each, and the place in it; other memory has no name."""
    named = [*tensors_in(arguments, "given"), *tensors_in(results, "returned")]

    def tell(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(tell, argument))
        if not isinstance(argument, int) or argument < LEAST_ADDRESS:
            return argument
        places = []
        for name, tensor in named:
            storage = tensor.untyped_storage()
            if storage.data_ptr() <= argument < storage.data_ptr() + storage.nbytes():
                places.append((name, argument - tensor.data_ptr()))
        return places or "other memory"

    return [(*launch, tuple(map(tell, passed))) for *launch, passed in launches]


def checked_calls(wrapper: Any) -> dict[Any, Any]:
    """The calls that a wrapper keeps, by their signatures."""
    found = wrapper.checked
    assert isinstance(found, dict)
    return found
