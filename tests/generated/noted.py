"""A device of which nothing is there but the list of what is launched on it, and copies of calls for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench import load_package

GENERATED = Path(__file__).parents[2] / "generated"
TARGET, MULTIPROCESSORS, STREAM = "sm90", 132, 7


class Launched(list[tuple[Any, ...]]):
    """What was launched: a kernel's name, its programs, its stream, and its arguments, tensors as addresses.

    It stands where a package keeps its compiled kernels, and has every one of them.
    """

    def get(self, key: tuple[Any, ...]) -> Any:
        """The compiled kernel of a key of `_launch.launch`."""

        def run(programs: int, _y: int, _z: int, stream: int, _f: int, _metadata: tuple, *rest: Any) -> None:
            arguments = tuple(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in rest[3:])
            self.append((key[0].__name__, programs, stream, arguments))

        return SimpleNamespace(run=run, function=1, packed_metadata=(4, 1, 0))

    def taken(self) -> list[tuple[Any, ...]]:
        """What was launched since this was last asked."""
        found = self[:]
        self.clear()
        return found


@contextlib.contextmanager
def on_a_device(folder: Path) -> Iterator[tuple[ModuleType, Launched]]:
    """A package whose calls on the CPU's tensors are planned for sm90 and launched nowhere."""
    package, launched = load_package(folder).root, Launched()
    launch = package._launch
    calls = sys.modules[f"{package.__name__}._calls"]
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: STREAM))
    facts = launch.facts_of(TARGET)._replace(multiprocessors=MULTIPROCESSORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_COMPILED", launched)
        patch.setattr(launch, "driver", driver)
        patch.setattr(calls, "driver", driver)
        patch.setattr(launch, "device_facts", lambda device: facts)
        yield package, launched


def copied(argument: Any) -> Any:
    """An argument in other memory: tensors of the same sizes, strides, offsets and bytes, in a copy of their memory."""
    if isinstance(argument, torch.Tensor):
        memory = argument.untyped_storage().clone()
        return argument.new_empty(0).set_(memory, argument.storage_offset(), argument.shape, argument.stride())
    if isinstance(argument, tuple):
        return tuple(map(copied, argument))
    return argument


def checked_calls(wrapper: Any) -> dict[Any, Any]:
    """What a wrapper keeps of its calls, by their signatures."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
    found = cells["checked"].cell_contents
    assert isinstance(found, dict)
    return found
