"""Internals of torch and Triton: the launcher of each version, and the public way if an internal is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mlagen.runtime import _internals

VALUES = [10, 20, 30]


class CudaLauncher:
    """Triton's launcher by its name: the C function is a list of calls."""

    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, "annotations", "signature"
    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, *given: Any) -> None:
        self.launched.append(given)

    def __call__(self, *given: Any) -> None:
        self.launched.append(("whole", *given))


def compiled(launcher: Any) -> SimpleNamespace:
    return SimpleNamespace(run=launcher, function=5, packed_metadata=(4, 1))


def test_a_missing_name_gives_the_fallback() -> None:
    assert _internals.found("no.such.name", len) is len
    assert _internals.found("_len_torch_function_stack", len) is torch._C._len_torch_function_stack


@pytest.mark.parametrize("strides", [(4, 1), (1, 2), (8, 1)])
def test_memory_has_the_dtype_sizes_and_strides_of_the_first_calls(strides: tuple[int, int]) -> None:
    like = torch.empty_strided((2, 4), strides, dtype=torch.int32)
    taken = _internals.allocator(like)()
    assert (taken.dtype, taken.shape, taken.stride()) == (like.dtype, like.shape, like.stride())


def like() -> list[torch.Tensor]:
    return [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, 2, 2)]


def test_likeness_is_of_dtype_device_sizes_and_strides() -> None:
    is_alike, (one, other) = _internals.likeness(like()), like()
    assert is_alike is not None
    assert is_alike(one, other)
    changed = [one.long(), one.to("meta"), one[:, :2], one[None], one.mT.contiguous().mT]
    for each in [*changed, one.as_strided((2, 4), (1, 1)), torch.nn.Parameter(one, requires_grad=False)]:
        assert not is_alike(each, other)
    assert not is_alike(one, other.as_strided((1, 2, 2), (8, 2, 1)))  # the stride of a single entry


def test_likeness_needs_guards_that_tell_tensors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = like()
    assert _internals.likeness([one, one]) is None  # guards refuse one tensor in two places

    def careless(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(check=lambda *tensors: True)

    def other_arguments(tensors: Any) -> None:
        """Take no sizes."""

    for guards in (None, careless, other_arguments):
        monkeypatch.setattr(_internals, "tensor_guards", guards)
        assert _internals.likeness(like()) is None


def test_without_a_count_of_modes_a_mode_may_be_active() -> None:
    assert _internals.found("no_count", _internals.one_mode)() == 1
    assert not _internals.is_watched()
    with TorchFunctionMode():
        assert _internals.is_watched()
    with torch.device("meta"):
        assert not _internals.is_watched()


def test_a_driver_without_streams_leaves_them_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_internals, "driver", SimpleNamespace(active=SimpleNamespace()))
    assert _internals.stream_getter() is _internals._current_stream
    monkeypatch.setattr(_internals, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=len)))
    assert _internals.stream_getter() is len


def test_a_triton_without_a_key_has_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _internals.triton_key()
    monkeypatch.setattr(_internals, "cache", SimpleNamespace())
    assert _internals.triton_key() == ""


@pytest.mark.parametrize("count", range(4))
def test_gather_gives_a_tuple_of_any_length(count: int) -> None:
    assert _internals.gather(list(range(count))[::-1])([0, 10, 20, 30]) == tuple(range(0, 10 * count, 10))[::-1]


def test_the_c_function_gets_the_arguments_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = CudaLauncher()
    pick, launch = _internals.gather([2, 0]), launcher.launch
    monkeypatch.setattr(_internals, "INSTALLED", (3, 6))
    _internals.starter(compiled(launcher), 64, pick, (1, 2), launch)(7, VALUES)
    monkeypatch.setattr(_internals, "INSTALLED", (3, 7))
    _internals.starter(compiled(launcher), 64, pick, (1, 2), launch)(7, VALUES)
    nothing = (None,) * 5
    assert launcher.launched == [
        (64, 1, 1, 7, 5, False, True, None, None, (4, 1), None, None, None, 30, 10, 1, 2),
        (64, 1, 1, 7, 5, False, True, (4, 1), *nothing, "annotations", "signature", (30, 10, 1, 2)),
    ]


def test_another_launcher_is_called_as_a_whole() -> None:
    launcher = CudaLauncher()
    start = _internals.starter(compiled(launcher), 64, _internals.gather([2, 0]), (1, 2), None)
    start(7, VALUES)
    assert launcher.launched == [("whole", 64, 1, 1, 7, 5, (4, 1), None, None, None, 30, 10, 1, 2)]


@pytest.mark.parametrize(
    ("changed", "direct"),
    [
        ({}, True),
        ({"global_scratch_size": 16}, False),
        ({"profile_scratch_size": 16}, False),
        ({"gsan_enabled": True}, False),
    ],
)
def test_a_kernel_with_memory_per_launch_needs_the_whole_launcher(changed: dict[str, Any], direct: bool) -> None:
    launcher = CudaLauncher()
    vars(launcher).update(changed)
    assert _internals.is_direct(compiled(launcher)) == direct
    assert not _internals.is_direct(compiled(print))


def test_a_launcher_of_another_make_encodes_its_descriptors_itself() -> None:
    def outer(*_: Any) -> None:
        """Launch without a function inside."""

    for launch in (outer, print):
        assert _internals.inner_launcher(compiled(SimpleNamespace(launch=launch)), []) is None


def test_encoded_descriptors_are_kept_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class PyCUtensorMap:
        """An encoded descriptor, by its name."""

    encoded: list[int] = []

    def listing(*given: Any) -> tuple[Any, ...]:
        arguments = given[13:] if _internals.INSTALLED < (3, 7) else given[15]
        encoded.extend(one.base.data_ptr() for one in arguments if hasattr(one, "base"))
        expanded = [PyCUtensorMap() if hasattr(one, "base") else one for one in arguments]
        return (*given[:13], *expanded) if _internals.INSTALLED < (3, 7) else (*given[:15], expanded)

    monkeypatch.setattr(_internals, "MAPS_SIZE", 2)
    maps = _internals.Maps(listing, [1, _internals.Description(SimpleNamespace(base=None)), 2])
    first = maps[(64,)]
    assert [type(one) for one in first] == [PyCUtensorMap]
    assert maps[(64,)] is first
    assert maps[(128,)] is not first
    assert encoded == [64, 128]
    assert maps[(192,)]
    assert list(maps) == [(192,)]
