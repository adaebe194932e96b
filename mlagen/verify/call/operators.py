"""Calls of wrappers through the operators of torch that a package registers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

PAIRS = ("pair", "pair_out")  # overloads that take Q as a list of two tensors
METADATA = "tile_scheduler_metadata"  # which no operator takes
LAUNCHER = "pdl_kwargs"  # of another launcher, which is ignored


class Operators:
    """Calls of a package's wrappers through its operators.

    Args:
        package: the imported package, which registers operators.

    Attributes:
        calls: how many calls went through an operator.
    """

    def __init__(self, package: ModuleType) -> None:
        self.calls = 0
        self._known = getattr(torch.ops, package.__name__)

    def of(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with the arguments and results of a wrapper that calls the operator `name`.

        A call that no overload of the operator can express runs the wrapper.
        """
        return functools.partial(self._call, name, wrapper)

    def _call(self, name: str, wrapper: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        signature = inspect.signature(wrapper)
        given = {
            name: value
            for name, value in signature.bind(*arguments, **named).arguments.items()
            if name not in (METADATA, LAUNCHER) and not _is_default(value, signature.parameters[name].default)
        }
        op = next((one for one in self._overloads(name) if _takes(one, given)), None)
        if op is None:
            return wrapper(*arguments, **named)
        self.calls += 1
        if op._overloadname in PAIRS:
            given["q"] = list(given["q"])
        own = op(**given)
        results = list(own) if isinstance(own, tuple) else [] if own is None else [own]
        return _results(op, next(self._overloads(name)), given, results)

    def _overloads(self, name: str) -> Iterator[Any]:
        packet = getattr(self._known, name, None)
        yield from (getattr(packet, one) for one in packet.overloads()) if packet is not None else ()


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def _takes(op: Any, given: dict[str, Any]) -> bool:
    """Whether an overload takes these arguments."""
    known = {one.name: one for one in op._schema.arguments}
    needed = {name for name, one in known.items() if not one.has_default_value()}
    pair = isinstance(given.get("q"), tuple | list)
    return given.keys() <= known.keys() and needed <= given.keys() and pair == (op._overloadname in PAIRS)


def _results(op: Any, plain: Any, given: dict[str, Any], results: list[torch.Tensor]) -> Any:
    """Return the results as the wrapper gives them: the tensors that an overload wrote to are among them.

    Args:
        op: the overload that ran.
        plain: the operator that allocates its results; its names are theirs.
        given: the arguments.
        results: those that the overload returned.
    """
    if len(results) == len(plain._schema.returns):
        found = results
    else:
        every = {one.name for one in plain._schema.arguments}
        written = [
            one.name
            for one in op._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name not in every
        ]
        rest = iter(results)
        names = [one.name or written[0] for one in plain._schema.returns]
        found = [given[name] if name in written else next(rest) for name in names]
    return None if not found else found[0] if len(found) == 1 else tuple(found)
