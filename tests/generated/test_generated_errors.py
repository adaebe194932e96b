"""Wrong arguments of a package's functions: one line that names the argument, its value and the allowed ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from checked_in import package_of
from valid_calls import calls_of

from mlagen.bench import load_package

FAMILIES = ("dsv3", "dsv32", "dsv32_fp8", "dsv4_flash", "dsv41", "glm53", "dsv3_prefill")
ONE_LINE = r"[\w\[\] *+]+: got [^\n]+, takes [^\n]+"
SIZES = {
    "workspace_size": {"tokens": 4, "num_heads": 16, "topk": 64},
    "kvcache_workspace_size": {"requests": 4, "s_q": 1, "num_heads": 16, "topk": 64},
    "dense_workspace_size": {"requests": 4, "s_q": 1, "num_heads": 16, "max_keys": 64},
}
NO_GPU = "takes a CUDA or ROCm device"
ABSENT = "takes a GPU that torch finds: "
GPU = r"takes a device, a name such as 'sm103' or 'gfx942', or a compute capability such as \(10, 3\)"
# Arguments that name no GPU, with the value in the error and the rest of it.
DEVICES = {
    "None": (None, "None", NO_GPU),
    "a CPU": ("cpu", "cpu", NO_GPU),
    "a device of a CPU": (torch.device("cpu"), "cpu", NO_GPU),
    "an unknown name": ("h100", "'h100'", NO_GPU),
    "an object": (object(), "a object", NO_GPU),
    "a GPU that is not there": ("cuda:99", "cuda:99", ABSENT),
    "a device that is not there": (torch.device("cuda", 99), "cuda:99", ABSENT),
    "an index that is not there": (99, "cuda:99", ABSENT),
    "an index of numpy": (np.int64(99), "cuda:99", ABSENT),
    "a bool": (True, "True", NO_GPU),
    "an index that torch cuts": (256, "cuda:256", NO_GPU),
    "a name that torch cuts": ("cuda:300", "cuda:300", NO_GPU),
    "an index of 70 bits": (1 << 70, str(1 << 70), NO_GPU),
}
SUPPORTED = {
    "None": (None, "None", GPU),
    "a CPU": ("cpu", "'cpu'", GPU),
    "a device of a CPU": (torch.device("cpu"), "cpu", NO_GPU),
    "a marketing name": ("h100", "'h100'", GPU),
    "half a capability": ((9,), r"\(9,\)", GPU),
    "a capability with a flag": ((9, True), r"\(9, True\)", GPU),
    "a list": ([9, 0], r"\[9, 0\]", GPU),
    "a GPU that is not there": ("cuda:99", "cuda:99", ABSENT),
}
WRONG_SIZES = (None, "4", 2.5, -1, 1 << 40, True, torch.ones(2))
WRONG = (None, "text", object(), [1, 2], (), (None, None), 2.5, -1, 1 << 40, True, torch.ones(2, 3), torch.float16)


def root_of(name: str) -> ModuleType:
    root: ModuleType = load_package(package_of(name)).root
    return root


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("name", "function"), [("dsv32", "workspace_size"), ("dsv3", "dense_workspace_size")])
def test_a_workspace_is_of_a_gpu(name: str, function: str, device: tuple[Any, str, str]) -> None:
    given, got, takes = device
    with pytest.raises((TypeError, ValueError), match=rf"^device: got {got}, {takes}"):
        getattr(root_of(name), function)(given, **SIZES[function])


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_warmup_is_of_a_gpu(device: tuple[Any, str, str]) -> None:
    given, got, takes = device
    with pytest.raises((TypeError, ValueError), match=rf"^device: got {got}, {takes}"):
        root_of("dsv32").warmup(given)


@pytest.mark.parametrize("gpu", SUPPORTED.values(), ids=SUPPORTED)
def test_supports_lists_what_it_takes(gpu: tuple[Any, str, str]) -> None:
    given, got, takes = gpu
    with pytest.raises((TypeError, ValueError), match=rf"^gpu: got {got}, {takes}"):
        root_of("dsv32").supports(given)


@pytest.mark.parametrize("target", [None, "sm70", "h100", ["sm90"], torch.device("cpu"), torch.ones(2)], ids=str)
def test_variants_lists_the_targets(target: object) -> None:
    with pytest.raises(ValueError, match=r"^target: got .*, takes 'sm80' or 'sm86' or .* or 'gfx950'$"):
        root_of("dsv32").variants(target)


@pytest.mark.parametrize("name", ["dsv32", "dsv32_fp8", "dsv4_flash", "dsv3"])
def test_sizes_of_a_workspace_are_counts(name: str) -> None:
    root = root_of(name)
    for function in filter(lambda one: hasattr(root, one), SIZES):
        size_of, sizes = getattr(root, function), SIZES[function]
        with root._launch.planned_for(root._launch.facts_of("sm90")):
            size_of("cuda", **sizes)
            for argument, wrong in ((one, wrong) for one in sizes for wrong in WRONG_SIZES):
                with pytest.raises((TypeError, ValueError), match=rf"^{argument}: got .*, takes an integer from 0 to "):
                    size_of("cuda", **sizes | {argument: wrong})
            with pytest.raises(TypeError, match=r"^enable_batch_invariant: got 1, takes True or False"):
                size_of("cuda", **sizes, enable_batch_invariant=1)


def wrong_values(valid: Any) -> Iterator[Any]:
    """Values of another type than an argument's, and of a tensor other shapes and dtypes."""
    yield from WRONG
    if isinstance(valid, torch.Tensor):
        yield from (valid.double(), valid.to("meta"), valid[None], valid[..., None])
        if valid.dim():
            yield from (valid[0:0], valid[:-1], torch.cat([valid, valid[:1]]), valid[..., :0])
    if isinstance(valid, tuple):
        for index, member in enumerate(valid):
            yield from ((*valid[:index], wrong, *valid[index + 1 :]) for wrong in wrong_values(member))


def errors_of(root: ModuleType) -> Iterator[tuple[str, str, Exception]]:
    """The errors of each wrapper where one argument of a valid call is wrong, with both names."""
    for wrapper, call in calls_of(root):
        for argument, parameter in inspect.signature(getattr(root, wrapper)).parameters.items():
            for value in wrong_values(call.get(argument, parameter.default)):
                changed = call | {argument: value}
                if "tile_scheduler_metadata" in call and argument != "tile_scheduler_metadata":
                    changed["tile_scheduler_metadata"] = root.get_mla_metadata()[0]
                try:
                    getattr(root, wrapper)(**changed)
                except Exception as error:  # of any type, since only two are right
                    yield wrapper, argument, error


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapper_takes_a_value_or_refuses_it_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of(name)
    monkeypatch.setattr(root._launch, "launch", lambda *_, **__: None)
    with root._launch.planned_for(root._launch.facts_of("sm90")):
        found = [*errors_of(root)]
    assert len(found) > 100
    unclear = [one for one in found if not re.fullmatch(ONE_LINE, str(one[2]))]
    assert unclear == [one for one in found if not isinstance(one[2], TypeError | ValueError)] == []


def test_a_flag_is_no_number_and_a_number_no_flag() -> None:
    one_of = root_of("dsv32")._launch.one_of
    one_of("use_fnuz", False, False)
    one_of("splits", np.int64(1), 0, 1, None)
    for value, allowed in ((0, False), (1.0, True), (False, 0), (True, 1)):
        with pytest.raises(ValueError, match=rf"^use: got {value}, takes {allowed}$"):
            one_of("use", value, allowed)


@pytest.mark.parametrize(
    ("value", "said"),
    [(np.bool_(True), r"a numpy\.bool_?"), (np.float32(0.5), r"0\.5"), ((9,), r"\(9,\)"), (torch.ones(2), "a tensor")],
)
def test_an_error_shows_a_value_in_one_line(value: object, said: str) -> None:
    with pytest.raises(TypeError, match=rf"^compact: got {said}, takes True or False$"):
        root_of("dsv32")._launch.flag("compact", value)


def test_integers_of_numpy_are_integers() -> None:
    root = root_of("dsv4_flash")
    assert root.supports((np.int64(9), np.int8(0))) == root.supports((9, 0)) == "sm90"
    with root._launch.planned_for(root._launch.facts_of("sm90")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(root._launch, "launch", lambda *_, **__: None)
        for name in ("save_partial_states", "compress_norm_rope_store"):
            call = dict(calls_of(root))[name]
            sizes = {size: np.int32(call[size]) for size in ("block_size", "state_width")}
            assert getattr(root, name)(**call | sizes) is None


def test_an_lse_may_be_declined_by_none() -> None:
    root = root_of("dsv3_prefill")
    call = dict(calls_of(root))["flash_attn_varlen_func"]
    with root._launch.planned_for(root._launch.facts_of("sm90")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(root._launch, "launch", lambda *_, **__: None)
        assert isinstance(root.flash_attn_varlen_func(**call, return_softmax_lse=None), torch.Tensor)
        assert len(root.flash_attn_varlen_func(**call, return_softmax_lse=None, return_attn_probs=True)) == 2
