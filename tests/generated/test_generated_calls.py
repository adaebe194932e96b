"""Calls that are checked once: the work done again, the checks made anew, the calls kept and for how long."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from checked_in import PACKAGES, package_of
from noted import Launched, checked_calls, copied, in_words, on_a_device, tensors_in
from rotation import some
from torch._subclasses import FakeTensorMode
from triton.backends.nvidia import driver as nvidia
from valid_calls import calls_of

TOKENS, HEADS, TOPK, ROWS = 2, 128, 256, 512
Call = dict[str, Any]
INSTALLED = tuple(map(int, triton.__version__.split(".")[:2]))


@pytest.fixture
def dsv32() -> Iterator[tuple[ModuleType, Launched]]:
    with on_a_device(package_of("dsv32")) as device:
        yield device


@pytest.fixture
def dsv3() -> Iterator[tuple[ModuleType, Launched]]:
    with on_a_device(package_of("dsv3")) as device:
        yield device


def sparse_call(**changed: Any) -> Call:
    """Arguments of flash_mla_sparse_fwd of `dsv32`, which go through splits and a combine."""
    call = {
        "q": torch.zeros(TOKENS, HEADS, 576, dtype=torch.bfloat16),
        "kv": torch.zeros(ROWS, 1, 576, dtype=torch.bfloat16),
        "indices": torch.zeros(TOKENS, 1, TOPK, dtype=torch.int32),
        "sm_scale": 0.5,
    }
    return call | changed


def counted(package: ModuleType, patch: pytest.MonkeyPatch) -> list[str]:
    """Names of the arguments that are checked from now on."""
    checked: list[str] = []
    check = package._launch.check

    def counting(name: str, *rest: Any) -> Any:
        checked.append(name)
        return check(name, *rest)

    patch.setattr(package._launch, "check", counting)
    return checked


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_a_repeated_call_launches_the_same_kernels_as_the_checked_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_device(folder) as (package, launched):
        checked = counted(package, monkeypatch)
        for name, call in calls_of(package):
            wrapper = getattr(package, name)
            wrapper(**copied(call))
            assert launched.taken()
            again = copied(call)
            checked.clear()
            returned = wrapper(**again)
            assert not checked, name
            launches = in_words(launched.taken(), again, returned)
            state = {key: type(value)() for key, value in again.items() if hasattr(value, "config")}
            expected = wrapper.__wrapped__(**{**again, **state})
            assert launches == in_words(launched.taken(), again, expected)
            for (_, got), (_, want) in zip(tensors_in(returned), tensors_in(expected), strict=True):
                assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            for key, value in state.items():
                assert again[key].config == value.config != None  # noqa: E711


@pytest.mark.parametrize("folder", some(PACKAGES, 12), ids=lambda path: path.name)
def test_a_key_of_compiled_kernels_has_one_list_of_dtypes(folder: Path) -> None:
    with on_a_device(folder) as (package, _):
        targets = package.SPEC["spec"]["targets"]
    for target in {targets[0], *(one for one in targets if one == "sm90")}:
        with on_a_device(folder, target) as (package, launched):  # which fails for two lists under one key
            for name, call in calls_of(package):
                getattr(package, name).__wrapped__(**call)
            for variant in package._calls(torch.device("cpu")):
                variant()
            assert launched.taken()


def late(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy of a tensor that begins so many elements behind where memory begins."""
    memory = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
    return memory[elements:].view(tensor.shape)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Q in two parts."""
    sizes = ((TOKENS, HEADS, 512), (TOKENS, HEADS, 64))
    latent, rope = (torch.zeros(size, dtype=torch.bfloat16) for size in sizes)
    return latent, rope


CHANGES: dict[str, Callable[[], Call]] = {
    "sizes": lambda: {"kv": torch.zeros(ROWS + 1, 1, 576, dtype=torch.bfloat16)},
    "strides": lambda: {"kv": torch.zeros(ROWS, 1, 640, dtype=torch.bfloat16)[:, :, :576]},
    "strides of one entry": lambda: {"indices": torch.zeros(TOKENS, 3, TOPK, dtype=torch.int32)[:, :1]},
    "alignment": lambda: {"q": late(torch.zeros(TOKENS, HEADS, 576, dtype=torch.bfloat16), 1)},
    "a pair": lambda: {"q": pair()},
    "a pair's strides": lambda: {"q": (pair()[0].transpose(0, 1).contiguous().transpose(0, 1), pair()[1])},
    "a pair's alignment": lambda: {"q": (pair()[0], late(pair()[1], 1))},
    "a list": lambda: {"q": list(pair())},
    "alignment of indices": lambda: {"indices": late(torch.zeros(TOKENS, 1, TOPK, dtype=torch.int32), 1)},
    "a number": lambda: {"sm_scale": 0.25},
    "a number's type": lambda: {"sm_scale": 1},
    "an option": lambda: {"enable_batch_invariant": True},
    "a tensor that was absent": lambda: {"topk_length": torch.zeros(TOKENS, dtype=torch.int32)},
    "an output": lambda: {"out": torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16)},
    "an output's alignment": lambda: {"out": late(torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16), 1)},
    "a workspace": lambda: {"workspace": torch.zeros(1 << 21)},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_checked_and_launched_as_a_first_call_of_its_own(
    what: str, dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv32
    for _ in range(2):
        package.flash_mla_sparse_fwd(**sparse_call(sm_scale=1.0 if what == "a number's type" else 0.5))
    launched.clear()
    checked = counted(package, monkeypatch)
    changed = sparse_call(**CHANGES[what]())
    for first in (True, False):  # the second is the first's like
        checked.clear()
        returned = package.flash_mla_sparse_fwd(**changed)
        assert bool(checked) == first
        launches = in_words(launched.taken(), changed, returned)
        expected = package.flash_mla_sparse_fwd.__wrapped__(**changed)
        assert launches == in_words(launched.taken(), changed, expected)


REFUSED: dict[str, tuple[Callable[[], Call], type[Exception], str]] = {
    "a dtype": (
        lambda: {"indices": torch.zeros(TOKENS, 1, TOPK, dtype=torch.int64)},
        TypeError,
        "indices: got torch.i",
    ),
    "sizes": (lambda: {"kv": torch.zeros(ROWS, 1, 512, dtype=torch.bfloat16)}, ValueError, "kv: got shape"),
    "strides": (lambda: {"q": torch.zeros(576, HEADS, TOKENS).bfloat16().mT.transpose(0, 1)}, ValueError, "q: got"),
    "a device": (lambda: {"kv": torch.zeros(ROWS, 1, 576, dtype=torch.bfloat16, device="meta")}, ValueError, "kv: got"),
    "a flag for a number": (lambda: {"sm_scale": True}, TypeError, "sm_scale: got bool"),
    "a tensor for a number": (lambda: {"sm_scale": torch.ones(())}, TypeError, "sm_scale: got Tensor"),
    "a list for a number": (lambda: {"sm_scale": [1.0]}, TypeError, "sm_scale: got list"),
    "NaN": (lambda: {"sm_scale": float("nan")}, ValueError, "sm_scale: got nan"),
    "zero": (lambda: {"sm_scale": -0.0}, ValueError, "sm_scale: got -0.0"),
    "columns of V": (lambda: {"d_v": 256}, ValueError, "d_v: got 256"),
    "a small workspace": (lambda: {"workspace": torch.zeros(1)}, ValueError, "workspace: got 1 floats"),
    "a late workspace": (lambda: {"workspace": torch.zeros(1 << 21)[1:]}, ValueError, "workspace: got address "),
    "no tensor": (lambda: {"q": None}, TypeError, "q: got None"),
    "a sparse tensor": (
        lambda: {"kv": torch.zeros(ROWS, 1, 576).bfloat16().to_sparse()},
        ValueError,
        "kv: got stride 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_good_call_before_does_not_let_a_bad_one_through(what: str, dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    changed, error, said = REFUSED[what]
    for scale in (1.0, 1, 0.5):
        package.flash_mla_sparse_fwd(**sparse_call(sm_scale=scale))
    launched.clear()
    for _ in range(2):
        with pytest.raises(error) as caught:
            package.flash_mla_sparse_fwd(**sparse_call(**changed()))
        assert str(caught.value).startswith(said)
    assert not launched


def test_an_unknown_argument_is_the_wrappers_to_refuse(dsv32: tuple[ModuleType, Launched]) -> None:
    package, _ = dsv32
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        package.flash_mla_sparse_fwd(**sparse_call(), window=4)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'sm_scale'"):
        package.flash_mla_sparse_fwd(*list(sparse_call().values())[:3])


def test_an_argument_is_known_by_its_name(dsv32: tuple[ModuleType, Launched]) -> None:
    package, _ = dsv32
    call, stats = tuple(sparse_call().values()), torch.zeros(TOKENS, HEADS)
    for _ in range(2):
        for name, number in (("max_logits", 1), ("lse", 2)):
            assert package.flash_mla_sparse_fwd(*call, **{name: stats})[number] is stats
    assert len(checked_calls(package.flash_mla_sparse_fwd)) == 2


def test_forced_planned_and_recorded_calls_are_checked_and_not_kept(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv32
    launch, wrapper = package._launch, package.flash_mla_sparse_fwd
    call = sparse_call()
    wrapper(**call)
    plain = [name for name, *_ in launched.taken()]
    checked = counted(package, monkeypatch)
    with launch.force(num_splits=1):
        wrapper(**call)
        assert checked
        assert [name for name, *_ in launched.taken()] != plain
    with launch.planned_for(launch.facts_of("sm90")):
        checked.clear()
        wrapper(**call)
        assert checked
    monkeypatch.setattr(launch, "_COMPILED", {})
    with launch.recording() as recorded:
        wrapper(**call)
    assert len(recorded) == len(plain)
    assert len(checked_calls(wrapper)) == 1


def test_wrappers_keep_a_bounded_number_of_signatures(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = dsv32
    wrapper, most = package.flash_mla_sparse_fwd, 3
    monkeypatch.setattr(sys.modules[f"{package.__name__}._calls"], "CALL_CACHE_SIZE", most)
    scales = [0.5 + step for step in range(5)]
    for scale in scales:
        wrapper(**sparse_call(sm_scale=scale))
    kept = [next(part for part in signature if type(part) is float) for signature in checked_calls(wrapper)]
    assert kept == scales[-most:]


def test_no_tensor_of_a_call_lives_on(dsv32: tuple[ModuleType, Launched]) -> None:
    package, _ = dsv32
    for _ in range(3):
        call = sparse_call(attn_sink=torch.zeros(HEADS), out=torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16))
        results = package.flash_mla_sparse_fwd(**call)
        alive = [weakref.ref(tensor) for _, tensor in tensors_in((call, results))]
        del call, results
        gc.collect()
        assert [one() for one in alive] == [None] * len(alive)
    assert not [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (TOKENS, HEADS, 512)]


def test_threads_launch_on_their_own_tensors(dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    wrapper, threads, rounds = package.flash_mla_sparse_fwd, 8, 40
    calls = [sparse_call(sm_scale=0.5 + number % 3) for number in range(threads)]
    begun, failed = threading.Barrier(threads), []

    def work(call: Call) -> None:
        begun.wait()
        try:
            for _ in range(rounds):
                wrapper(**call)
        except Exception as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(call,)) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed
    split = [passed for name, _, _, passed in launched if "combine" not in name]
    assert len(split) == threads * rounds
    for call in calls:
        mine = [passed for passed in split if passed[0] == call["q"].data_ptr()]
        assert len(mine) == rounds
        rope, kv = call["q"].data_ptr() + 512 * call["q"].element_size(), call["kv"].data_ptr()
        assert {passed[1:3] for passed in mine} == {(rope, kv)}
        assert len({passed[10:] for passed in mine}) == 1  # numbers, behind the address of the partials


def test_remembered_sizes_of_metadata_are_checked_at_each_call(dsv3: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv3
    call = dict(calls_of(package))["flash_mla_with_kvcache"]
    for _ in range(3):
        fresh = copied(call)
        package.flash_mla_with_kvcache(**fresh)
        metadata = fresh["tile_scheduler_metadata"]
        assert metadata.config.s_q == 1
    longer = torch.zeros(2, 2, *fresh["q"].shape[2:], dtype=fresh["q"].dtype)
    other = {**copied(call), "q": longer}
    package.flash_mla_with_kvcache(**other)
    launched.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="tile_scheduler_metadata: got s_q 2, takes 1, as at first"):
            package.flash_mla_with_kvcache(**{**other, "tile_scheduler_metadata": metadata})
    assert not launched
    with pytest.raises(TypeError, match="tile_scheduler_metadata: got None"):
        package.flash_mla_with_kvcache(**{**call, "tile_scheduler_metadata": None})


def test_a_flag_and_an_equal_number_have_different_signatures(dsv3: tuple[ModuleType, Launched]) -> None:
    package, _ = dsv3
    call = dict(calls_of(package))["flash_mla_with_kvcache"] | {"causal": True}
    for _ in range(2):
        package.flash_mla_with_kvcache(**copied(call))
    with pytest.raises(TypeError, match="causal: got 1, takes True or False"):
        package.flash_mla_with_kvcache(**copied(call | {"causal": 1}))


def test_a_decode_with_room_in_attn_logits_takes_no_memory(
    dsv3: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv3
    call = dict(calls_of(package))["decode_attention_fwd"] | {"attn_logits": torch.zeros(1 << 24)}
    wrapper, taken = package.decode_attention_fwd, []
    wrapper(**copied(call))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: taken.append(_))
    for given in (call, call | {"attn_logits": torch.zeros(1 << 23).view(2, -1)}):
        launched.clear()
        wrapper(**given)
        wrapper.__wrapped__(**given)
        half = len(launched) // 2
        assert launched[:half] == launched[half:]
        assert given["attn_logits"].data_ptr() in launched[0][3]
    assert not taken


def test_v_has_to_be_part_of_k_at_every_call(dsv3: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv3
    call = dict(calls_of(package))["decode_attention_fwd"]
    for _ in range(2):
        package.decode_attention_fwd(**copied(call))
    apart = copied(call) | {"v_buffer": copied(call)["v_buffer"]}
    launched.clear()
    with pytest.raises(ValueError, match="v_buffer: got a tensor of its own"):
        package.decode_attention_fwd(**apart)
    assert not launched


def test_an_output_that_meets_an_input_is_refused_after_one_that_does_not() -> None:
    with on_a_device(package_of("dsv3_prefill")) as (package, launched):
        call = dict(calls_of(package))["merge_attn_states"]
        call["output_lse"] = torch.empty_like(call["prefix_lse"])
        for _ in range(2):
            package.merge_attn_states(**copied(call))
        launched.clear()
        met = copied(call)
        with pytest.raises(ValueError, match="output_lse: got memory of an input"):
            package.merge_attn_states(**{**met, "output_lse": met["suffix_lse"]})
        assert not launched
    with on_a_device(package_of("dsv32_fp8")) as (package, launched):
        wrapper = package.triton_convert_req_index_to_global_index
        call = dict(calls_of(package))["triton_convert_req_index_to_global_index"]
        call["out"] = torch.empty_like(call["token_indices"])
        for _ in range(2):
            wrapper(**copied(call))
        launched.clear()
        met = copied(call)
        with pytest.raises(ValueError, match="out: got memory of the indices that are read"):
            wrapper(**{**met, "out": met["token_indices"]})
        assert not launched


def test_inputs_with_and_without_shared_memory_have_different_signatures(dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    rows = torch.zeros(4, 576, dtype=torch.bfloat16)
    call = {"kv_c": rows[:, :512], "k_pe": rows[:, 512:], "kv_cache": torch.zeros(2, 64, 576, dtype=torch.bfloat16)}
    call["slot_mapping"] = torch.zeros(4, dtype=torch.int64)
    package.concat_and_cache_mla(**call)
    apart = call | {"k_pe": copied({"k_pe": call["k_pe"]})["k_pe"]}
    launched.clear()
    package.concat_and_cache_mla(**apart)
    ((*_, passed),) = launched.taken()
    assert passed[:4] == tuple(one.data_ptr() for one in apart.values())


def test_tensors_without_memory_are_left_to_the_wrapper(dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    package.flash_mla_sparse_fwd(**sparse_call())
    launched.clear()
    with FakeTensorMode() as mode:
        call = sparse_call()
        fake = {name: mode.from_tensor(one) for name, one in call.items() if name != "sm_scale"} | {"sm_scale": 0.5}
        with pytest.raises(UserWarning, match="data pointer of FakeTensor"):
            package.flash_mla_sparse_fwd(**fake)
    assert not launched
    assert len(checked_calls(package.flash_mla_sparse_fwd)) == 1


def is_takes(value: Any) -> bool:
    """Whether a value of a closure is the list of allocations."""
    return isinstance(value, list) and bool(value) and "allocator" in getattr(value[0], "__qualname__", "")


def test_memory_that_begins_elsewhere_is_checked_anew(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pluggable allocator may give memory that torch's own does not."""
    package, launched = dsv32
    package.flash_mla_sparse_fwd(**sparse_call())
    launched.clear()
    checked = counted(package, monkeypatch)
    call = sparse_call()
    package.flash_mla_sparse_fwd(**call)
    assert not checked
    launched.clear()
    (known,) = checked_calls(package.flash_mla_sparse_fwd).values()
    (takes,) = [cell.cell_contents for cell in known.run.__closure__ if is_takes(cell.cell_contents)]
    like = takes[0]()
    takes[0] = lambda: late(torch.zeros_like(like), 1)
    package.flash_mla_sparse_fwd(**sparse_call())
    assert checked


class PyCUtensorMap(NamedTuple):
    """A launcher's part of a descriptor: here the address that was encoded."""

    address: int


class CudaLauncher:
    """Triton's launcher by its name, with its own making of descriptors around a list of launches."""

    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, True, "annotations", "signature"

    def __init__(self, launched: list[Any], arguments: tuple[Any, ...]):
        kinds = ["tensordesc<bf16[64, 64]>" if hasattr(one, "base") else "i64" for one in arguments]
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
        metas = [meta for one in kinds if one != "i64"]
        signature = dict(enumerate(kinds))
        self.launch = nvidia.wrap_handle_tensordesc(lambda *given: launched.append(given), signature, metas)

    def __call__(self, *given: Any) -> None:
        begin, metadata, hooks, arguments = given[:5], given[5:6], given[6:9], given[9:]
        if INSTALLED < (3, 7):
            self.launch(*begin, False, True, None, None, *metadata, *hooks, *arguments)
        else:
            self.launch(*begin, False, True, *metadata, *hooks, None, None, "annotations", "signature", arguments)


def test_descriptors_are_encoded_once_for_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv3_prefill_tma")) as (package, _):
        call = dict(calls_of(package))["flash_attn_varlen_func"]
        encoded: list[int] = []
        launched: list[Any] = []

        def encode(address: int, *_: Any) -> PyCUtensorMap:
            encoded.append(address)
            return PyCUtensorMap(address)

        class Compiled:
            function, packed_metadata, launcher = 1, (4, 1, 0), None

            @property
            def run(self) -> Any:
                return self.launcher or self.first

            def first(self, *given: Any) -> None:
                self.launcher = CudaLauncher(launched, given[9:])
                self.launcher(*given)

        compiled = Compiled()
        utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
        monkeypatch.setattr(nvidia.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
        monkeypatch.setattr(package._launch, "_COMPILED", SimpleNamespace(get=lambda key: compiled))
        package.flash_attn_varlen_func(**call)
        for again in (copied(call), copied(call)):
            wanted = package.flash_attn_varlen_func.__wrapped__(**again)
            want = passed_of(launched[-1], again, wanted)
            for count in range(3):
                encoded.clear()
                returned = package.flash_attn_varlen_func(**again)
                assert bool(encoded) == (count == 0)
                assert passed_of(launched[-1], again, returned) == want


def passed_of(launched: tuple[Any, ...], call: Call, returned: Any) -> list[Any]:
    """A launcher's arguments, with the names of tensors in the place of addresses."""
    *begin, passed = launched if INSTALLED >= (3, 7) else (*launched[:13], launched[13:])
    numbers = tuple(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in passed)
    return in_words([(*begin, numbers)], call, returned)
