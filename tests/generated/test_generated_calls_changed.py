"""Calls that differ in one argument from calls that were kept: each does the same as its wrapper's text, or refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import indexer_calls
import numpy as np
import pytest
import torch
from checked_in import package_of
from noted import Launched, checked_calls, copied, in_words, on_a_device, tensors_in
from rotation import some
from test_generated_calls import calls_of

PACKAGES = [
    *("dsv32", "dsv32_fp8", "dsv32_nvfp4", "dsv3", "dsv3_fp8", "dsv3_prefill_tma", "glm5_prefill", "dsv4_flash"),
    *("dsv41", "odd_fp8", "own_layout", "dots3_sliding"),
]  # of each form of every wrapper one
LAYOUTS = ("indexer_fp8", "indexer_mxfp4")
Call = dict[str, Any]


class Own(torch.Tensor):
    """A tensor of a subclass."""


class Pair(NamedTuple):
    """A tuple of a subclass."""

    first: Any
    second: Any


def moved(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A tensor of the same strides that begins so many bytes behind a multiple of 64."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.zeros(reach * tensor.element_size() + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + nbytes
    elements = memory[first : first + reach * tensor.element_size()].view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride())


def wider(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor of the same sizes within one that has more entries in a dimension."""
    sizes = list(tensor.shape)
    sizes[dim] += 64
    return torch.zeros(sizes, dtype=tensor.dtype).narrow(dim, 0, tensor.shape[dim])


def other_tensors(tensor: torch.Tensor) -> Iterator[Any]:
    """Values for a tensor's place, some of them right."""
    yield from (None, True, 1, 1.0, "q", np.zeros(2), [tensor], (tensor, tensor), tensor.clone())
    for nbytes in (0, 1, 2, 4, 8, 16, 32):
        if nbytes % tensor.element_size() == 0:
            yield moved(tensor, nbytes)
    for dim in range(tensor.dim()):
        yield from (wider(tensor, dim), tensor.narrow(dim, 0, 0), tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0)))
        yield torch.cat([tensor.view(torch.uint8)] * 2 if tensor.element_size() == 1 else [tensor] * 2, dim)
    yield from (tensor[None], tensor.to("meta"), tensor.clone().as_subclass(Own), torch.empty(0), torch.zeros(()))
    for dtype in (torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.uint8):
        yield torch.zeros(tensor.shape, dtype=dtype)
        if dtype.itemsize == tensor.element_size():
            yield tensor.view(dtype)
    if tensor.is_floating_point() and tensor.element_size() > 1:
        yield torch.nn.Parameter(tensor.clone())
        yield tensor.clone().requires_grad_()
    if tensor.dim() > 1:
        yield tensor.mT
        yield torch.zeros(tensor.shape, dtype=tensor.dtype).mT.contiguous().mT
        yield torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)


NUMBERS = (
    *(None, True, False, 0, 1, 2, 3, -1, 0.0, -0.0, 1.0, 2.0, 0.5, 64, 64.0, float("nan"), float("inf"), 1 << 31),
    *(1 << 40, 1 << 70, 1e300, np.int64(1), np.int64(64), np.float64(1.0), np.float32(0.5), np.bool_(True), "", "1"),
    *("auto", "ht", "th", "2", "e", "ue8m0", torch.float32, torch.bfloat16, torch.zeros(()), (), [], (-1, -1)),
    *([-1, -1], (-1.0, -1), (True, -1), Pair(-1, -1), (None, None), [[-1], -1], object()),
)


def others(value: Any) -> Iterator[Any]:
    """Values for an argument's place."""
    if isinstance(value, torch.Tensor):
        yield from other_tensors(value)
    elif isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
        for number, one in enumerate(value):
            for other in (*(() if one is None else other_tensors(one)), None, 1):
                yield (*value[:number], other, *value[number + 1 :])
        yield from (list(value), Pair(*value), value[:1], (*value, None), iter(value))
        yield from other_tensors(value[0])
    elif not hasattr(value, "config"):
        yield from NUMBERS
        if isinstance(value, (int, float)):
            yield from (value + 1, value * 2, -value, float(value), int(value), np.int64(value), np.float64(value))
    else:
        yield from (None, 1, type(value)(), type(value)((1, 2)))


class Outcome(NamedTuple):
    """The outcome of a call."""

    launches: str  # which tells -0.0 from 0.0, and True from 1
    returned: Any
    config: Any


def outcome(wrapper: Callable[..., Any], call: Call, launched: Launched) -> Outcome:
    """A wrapper's launches, and its result or error, in words that stay the same in other memory."""
    launched.clear()
    states = {name: type(one)(one.config) for name, one in call.items() if hasattr(one, "config")}
    given = call | states
    try:
        returned = wrapper(**given)
    except Exception as error:
        return Outcome(repr(launched.taken()), (type(error), str(error)), [one.config for one in states.values()])
    names = {id(one): name for name, one in tensors_in(given)}
    kinds = [
        (path, names.get(id(one)), type(one), one.dtype, tuple(one.shape), one.stride(), one.is_inference())
        for path, one in tensors_in(returned)
    ]
    launches = repr(in_words(launched.taken(), given, returned))
    return Outcome(launches, (type(returned), kinds), [one.config for one in states.values()])


def check(package: ModuleType, launched: Launched, calls: Iterator[tuple[str, Call]]) -> None:
    """Calls every wrapper with every change, twice over, between calls that are kept."""
    for name, call in calls:
        wrapper = getattr(package, name)
        given = {**{key: one.default for key, one in parameters(wrapper).items()}, **call}
        changed = [call | {key: other} for key, value in given.items() for other in others(value)]
        text = [outcome(wrapper.__wrapped__, one, launched) for one in changed]
        as_is = outcome(wrapper.__wrapped__, call, launched)
        for _ in range(2):
            for one, expected in zip(changed, text, strict=True):
                assert outcome(wrapper, one, launched) == expected, (name, differing(one, call))
                assert outcome(wrapper, copied(call), launched).launches == as_is.launches, name
            changed, text = changed[::-1], text[::-1]
        assert any(known.run is not wrapper.unkept for known in checked_calls(wrapper).values()), name


def parameters(wrapper: Any) -> dict[str, Any]:
    """A wrapper's parameters that have defaults."""
    found = inspect.signature(wrapper).parameters
    return {name: one for name, one in found.items() if one.default is not one.empty}


def differing(call: Call, as_is: Call) -> Call:
    """The argument that was changed."""
    return {name: one for name, one in call.items() if as_is.get(name) is not one}


@pytest.mark.parametrize("name", some(PACKAGES, 4))
def test_changed_calls_equal_the_wrapper(name: str) -> None:
    with on_a_device(package_of(name)) as (package, launched):
        check(package, launched, calls_of(package))


@pytest.mark.parametrize("layout", some(LAYOUTS, 1))
def test_changed_calls_of_the_indexer_equal_the_wrapper(layout: str, tmp_path: Path) -> None:
    with on_a_device(indexer_calls.write_package(tmp_path, layout)) as (package, launched):
        check(package, launched, iter(indexer_calls.arguments(package).items()))


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_absent_scores_have_the_dtype_of_given_ones(target: str, tmp_path: Path) -> None:
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8"), target) as (package, launched):
        for name, call in indexer_calls.topk_calls().items():
            for rows in {"logits", "input"} & call.keys():
                for dtype in (torch.bfloat16, torch.float32):
                    for scores in (None, torch.zeros(indexer_calls.ROWS, 64)):
                        getattr(package, name).__wrapped__(**call | {rows: call[rows].to(dtype), "scores": scores})
        assert not launched.mixed


@pytest.mark.parametrize("name", ["indexer_topk", "paged_indexer_topk"])
def test_memory_in_a_gap_of_another_argument_is_attributed_correctly(name: str, tmp_path: Path) -> None:
    """The workspace lies between two rows of slots at the first call, and in memory of its own at the second."""
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8")) as (package, launched):
        call = indexer_calls.arguments(package)[name]
        arena, floats = torch.zeros(4096, dtype=torch.int32), call["workspace"].numel()
        slots = arena.as_strided((indexer_calls.ROWS, 64), (64 + floats, 1))
        between = arena[64 : 64 + floats].view(torch.float32)
        assert slots.data_ptr() < between.data_ptr() < slots[-1].data_ptr()
        wrapper = getattr(package, name)
        for given in ({"workspace": between}, {}, {}):
            changed = call | {"slots": slots} | given
            assert outcome(wrapper, changed, launched) == outcome(wrapper.__wrapped__, changed, launched)
        assert [one for one in checked_calls(wrapper).values() if one.run is not wrapper.unkept]


class Vague(float):
    """A number that says that it is equal to any other of its kind."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vague)

    def __hash__(self) -> int:
        return 0


def test_calls_without_a_signature_are_always_checked() -> None:
    with on_a_device(package_of("dsv32")) as (package, launched):
        call = dict(calls_of(package))["flash_mla_sparse_fwd"]
        wrapper = package.flash_mla_sparse_fwd
        for scale in (0.5, 0.25):
            changed = call | {"sm_scale": Vague(scale)}
            assert outcome(wrapper, changed, launched) == outcome(wrapper.__wrapped__, changed, launched)
        assert not checked_calls(wrapper)


def test_the_end_of_scores_memory_is_looked_at_by_every_call(tmp_path: Path) -> None:
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8"), "sm80") as (package, launched):  # portable
        call = indexer_calls.arguments(package)["top_k_per_row_decode"]
        room, size = torch.zeros(indexer_calls.ROWS * 4096), (indexer_calls.ROWS, 4093)
        ends = (indexer_calls.ROWS - 1) * 4096 + 4093
        fits, ended = room.as_strided(size, (4096, 1)), room[:ends].clone().as_strided(size, (4096, 1))
        wrapper, text = package.top_k_per_row_decode, package.top_k_per_row_decode.__wrapped__
        wanted = [outcome(text, call | {"logits": one}, launched).launches for one in (fits, ended)]
        assert wanted[0] != wanted[1]
        for _ in range(2):
            for one, want in zip((fits, ended), wanted, strict=True):
                assert outcome(wrapper, call | {"logits": one}, launched).launches == want


@pytest.mark.parametrize("rows", [1, 16])
def test_rows_that_programs_share_take_their_scratch_at_every_call(tmp_path: Path, rows: int) -> None:
    """Of 32K columns: sm90 gives several programs to each row, and their candidates to a second kernel."""
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8")) as (package, launched):
        columns, lens = 1 << 15, torch.full((rows,), 1 << 15, dtype=torch.int32)
        call = {"logits": torch.zeros(rows, columns), "next_n": 1, "seq_lens": lens, "num_rows": rows, "topk": 64}
        call |= {"indices": torch.zeros(rows, 64, dtype=torch.int32), "stride0": columns, "stride1": 1}
        wrapper = package.top_k_per_row_decode
        want = outcome(wrapper.__wrapped__, call, launched)
        assert "_topk_collect_sm90_kernel" in want.launches
        for _ in range(3):
            assert outcome(wrapper, copied(call), launched).launches == want.launches
        assert [one for one in checked_calls(wrapper).values() if one.run is not wrapper.unkept]
