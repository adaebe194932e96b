"""Invalid arguments, which wrappers must refuse by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.layout import CacheLayout
from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.subject import Subject


@dataclass(frozen=True)
class Invalid:
    """An argument made invalid.

    Attributes:
        argument: its name, which the error must say.
        how: description of the fault.
        make: makes it so from the valid one; None where a valid call does not pass it.
        says: further text of the error.
        like: the argument that `make` gets instead.
        changes: the argument that is replaced instead.
        wrappers: the wrappers that have the argument; empty: any wrapper that is asked.
    """

    argument: str
    how: str
    make: Callable[[Any], Any]
    says: str = ""
    like: str = ""
    changes: str = ""
    wrappers: tuple[str, ...] = ()

    def apply(self, arguments: dict[str, Any]) -> None:
        """Makes the arguments of a valid call invalid, in place."""
        arguments[self.changes or self.argument] = self.make(arguments.get(self.like or self.argument))


@dataclass(frozen=True)
class RefusedCase(Case):
    """A call that a wrapper must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        family: the wrapper's family.
        wrapper: the wrapper called.
        invalid: the invalid argument.
        module: module of the wrapper; empty: the package itself.
    """

    family: str
    wrapper: str
    invalid: Invalid
    module: str = ""


def refused_cases(
    family: str, wrappers: Mapping[str, str], found: Iterable[Invalid], *, prefix: str = "", module: str = ""
) -> Iterator[RefusedCase]:
    """A case for each argument and wrapper; `wrappers` says how names of cases call those that are asked."""
    for one in found:
        for wrapper, short in wrappers.items():
            if not one.wrappers or wrapper in one.wrappers:
                yield RefusedCase(
                    f"{prefix}refuses: {one.argument}, {one.how} ({short})",
                    f"{wrapper} names {one.argument} in a ValueError or TypeError",
                    family=family,
                    wrapper=wrapper,
                    invalid=one,
                    module=module,
                )


def check_refused(subject: Subject, case: RefusedCase, arguments: dict[str, Any]) -> None:
    """Makes an argument of a valid call invalid and calls the wrapper.

    Raises:
        CaseFailedError: the wrapper took it, its error lacks the expected words, or the metadata recorded a call.
    """
    invalid = case.invalid
    invalid.apply(arguments)
    try:
        with subject.planned_for(None):
            subject.wrapper(case.wrapper, case.module)(**arguments)
    except (ValueError, TypeError) as error:
        for word in filter(None, (invalid.argument, invalid.says)):
            if not re.search(rf"\b{re.escape(word)}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {word}: {error}") from error
        metadata = arguments.get("tile_scheduler_metadata")
        if metadata is not None and metadata.config is not None:
            raise CaseFailedError("a refused call recorded its sizes") from error
        return
    raise CaseFailedError(f"took an invalid {invalid.argument}")


def constant(value: Any) -> Callable[[Any], Any]:
    """A `make` that gives the value, and ignores the valid one."""
    return lambda _: value


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], torch.Tensor]:
    """A `make` that gives zeros where the valid tensor is."""
    return lambda tensor: tensor.new_zeros(shape, dtype=dtype)


def wider(columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A `make` that gives rows of so many columns more."""
    return lambda tensor: tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + columns)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """One entry more in the first dimension."""
    return torch.cat([tensor, tensor[:1]])


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on another kind of device."""
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def byte_late(tensor: torch.Tensor) -> torch.Tensor:
    """The same pages an element later."""
    buffer = tensor.new_zeros(tensor.shape[0] * tensor.stride(0) + 1)
    return buffer[1:].as_strided(tensor.shape, tensor.stride(), 1)


def kind(argument: str, dtype: torch.dtype) -> Iterator[Invalid]:
    """Another dtype, no tensor, and a tensor of too few dimensions."""
    yield Invalid(argument, f"dtype {str(dtype).removeprefix('torch.')}", lambda tensor: tensor.to(dtype))
    yield Invalid(argument, "not a tensor", constant([1, 2]))
    yield Invalid(argument, "a dimension short", lambda tensor: tensor[0])


def scale(argument: str) -> Iterator[Invalid]:
    """Factors of the logits that no model has, or that another version's argument in its place is."""
    for value in (0, 0.0, -1.0, math.nan, math.inf, 1e-60, 1e60, True, "1"):
        yield Invalid(argument, repr(value), constant(value))
    yield Invalid(argument, "a tensor", lambda tensor: tensor.new_ones(()), like="q")


def flag(argument: str) -> Iterator[Invalid]:
    """Values that are no bool, but another version's argument in its place."""
    for value in (0, 1.0, None):
        yield Invalid(argument, repr(value), constant(value))
    yield Invalid(argument, "a tensor", lambda tensor: tensor.new_zeros((), dtype=torch.bool), like="q")


def memory(
    argument: str, *, first: bool = False, strided: bool = True, word: str = "last dimension not contiguous"
) -> Iterator[Invalid]:
    """Elements apart, unless they cannot be; another device, unless this is the first, which says where others are."""
    if strided:
        yield Invalid(argument, word, every_other)
    if not first:
        yield Invalid(argument, "another device", elsewhere)


def tensor(
    argument: str,
    dtype: torch.dtype,
    *,
    first: bool = False,
    strided: bool = True,
    word: str = "last dimension not contiguous",
) -> Iterator[Invalid]:
    """Invalid tensors of any argument."""
    yield from kind(argument, dtype)
    yield from memory(argument, first=first, strided=strided, word=word)


def out(d_v: int, dtype: torch.dtype) -> Iterator[Invalid]:
    """Invalid `out` tensors of two requests of two query tokens and four heads."""
    yield Invalid("out", "dtype float32", zeros(2, 2, 4, d_v), like="q")
    yield Invalid("out", "too wide", zeros(2, 2, 4, d_v + 8, dtype=dtype), like="q")
    apart = zeros(2, 3, 4, d_v, dtype=dtype)
    yield Invalid("out", "requests apart", lambda q: apart(q)[:, :2], like="q")


def output_scale() -> Iterator[Invalid]:
    """Invalid scales of a quantised result; a package without merges takes no scale."""
    yield Invalid("output_scale", "two of them", constant(torch.ones(2)))
    yield Invalid("output_scale", "a number", constant(1.0))
    yield Invalid("output_scale", "dtype float64", constant(torch.ones(1, dtype=torch.float64)))


def pages(argument: str, layout: CacheLayout) -> Iterator[Invalid]:
    """Invalid caches of the layout, given as pages, and invalid scales."""

    def sparser(cache: torch.Tensor) -> torch.Tensor:
        return cache.new_zeros(*cache.shape[:-1], cache.shape[-1] + 16)[..., : cache.shape[-1]]

    def crowded(cache: torch.Tensor) -> torch.Tensor:
        flat = cache.new_zeros(cache.numel())
        return flat.as_strided(cache.shape, (cache.stride(0) - cache.shape[3], *cache.stride()[1:]))

    name = layout.name
    yield from tensor(argument, torch.float64)
    yield Invalid(argument, "rows of another layout", wider(16), name)
    if layout.planar:
        yield Invalid(argument, "rows apart", sparser, name)
        yield Invalid(argument, "pages too close", crowded, name)
    if layout.quantised and layout.parts[0].widest > 1:
        yield Invalid(argument, "begins at an odd byte", byte_late, name)
    if layout.tensor_scale:
        scale = argument.replace("k_cache", "k_scale")
        yield Invalid(scale, "missing", constant(None))
        yield Invalid(scale, "a number", constant(1.0))
        yield Invalid(scale, "two of them", zeros(2), like="q")


def tensors(layout: CacheLayout) -> Iterator[Invalid]:
    """Invalid tensors of fields besides the cache tensor."""
    for name in layout.tensors:
        yield from tensor(name, torch.float64)
        yield Invalid(name, "wider rows", wider(16))
        yield Invalid(name, "a page too many", lambda pages: torch.cat([pages, pages[:1]]))
        yield Invalid(name, "other pages than the cache's", lambda pages: torch.cat([pages, pages], 1))
        yield Invalid(name, "pages of stride 0", lambda pages: pages[:1].expand(pages.shape))
        yield Invalid(name, "missing", constant(None))
