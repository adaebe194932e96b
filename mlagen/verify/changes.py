"""What may be wrong with the arguments of a call over a cache, for cases that a wrapper must refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mlagen.layout import CacheLayout

# The argument that is off, in what way, what makes it so, and what the error says besides its name.
Change = tuple[str, str, Callable[[dict[str, Any]], None], str]


def with_changed(argument: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Replaces an argument by what `change` makes of it."""
    return lambda arguments: arguments.__setitem__(argument, change(arguments[argument]))


def gives(argument: str, make: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Gives an argument that `make` makes from the others."""
    return lambda arguments: arguments.__setitem__(argument, make(arguments))


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _sparser(tensor: torch.Tensor) -> torch.Tensor:
    """The same cache with a gap behind each row."""
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 16)[..., : tensor.shape[-1]]


def _crowded(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with pages that begin a byte early."""
    flat = tensor.new_zeros(tensor.numel())
    return flat.as_strided(tensor.shape, (tensor.stride(0) - tensor.shape[3], *tensor.stride()[1:]))


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same cache a byte later."""
    buffer = tensor.new_zeros(tensor.shape[0] * tensor.stride(0) + 1)
    return buffer[1:].as_strided(tensor.shape, tensor.stride(), 1)


def tensor_changes(argument: str, dtype: torch.dtype, *, first: bool = False) -> Iterator[Change]:
    """What may be wrong with any tensor; `first`: it says which device the others must be on."""
    name = str(dtype).removeprefix("torch.")
    yield argument, f"dtype {name}", with_changed(argument, lambda t: t.to(dtype)), ""
    yield argument, "not a tensor", with_changed(argument, lambda t: [1, 2]), ""
    yield argument, "a dimension short", with_changed(argument, lambda t: t[0]), ""
    yield argument, "last dimension not contiguous", with_changed(argument, _every_other), ""
    if not first:
        yield argument, "another device", with_changed(argument, _elsewhere), ""


def cache_changes(argument: str, layout: CacheLayout) -> Iterator[Change]:
    """What may be wrong with a cache of the layout, given as pages."""
    name = layout.name
    yield from tensor_changes(argument, torch.float64)
    wider = with_changed(argument, lambda t: t.new_zeros(*t.shape[:-1], t.shape[-1] + 16))
    yield argument, "rows of another layout", wider, name
    if layout.planar:
        yield argument, "rows apart", with_changed(argument, _sparser), name
        yield argument, "pages too close", with_changed(argument, _crowded), name
    if layout.quantised and max(one.itemsize for one in layout.fields) > 1:
        yield argument, "begins at an odd byte", with_changed(argument, _shifted), name
    if layout.tensor_scale:
        scale = argument.replace("k_cache", "k_scale")
        yield scale, "missing", gives(scale, lambda _: None), ""
        yield scale, "a number", gives(scale, lambda _: 1.0), ""
        yield scale, "two of them", gives(scale, lambda given: given["q"].new_ones(2, dtype=torch.float32)), ""
