"""The surroundings of a call that is kept: modes of torch, devices, streams, threads, and failures."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import indexer_calls
import numpy as np
import pytest
import torch
from noted import GENERATED, Launched, checked_calls, copied, on_a_device, tensors_in
from test_generated_calls import PACKAGES, calls_of, counted, sparse_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Mode = TorchFunctionMode | TorchDispatchMode


@pytest.fixture
def dsv32() -> Iterator[tuple[ModuleType, Launched]]:
    with on_a_device(GENERATED / "dsv32") as device:
        yield device


def calls_module(package: ModuleType) -> ModuleType:
    """The module `_calls` of a package."""
    return sys.modules[f"{package.__name__}._calls"]


class Dispatched(TorchDispatchMode):
    """Operators that torch's dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def is_view(function: torch._ops.OpOverload) -> bool:
    """Whether an operator looks at memory that there is, and leaves it as it is."""
    alias = function._schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


class Functions(TorchFunctionMode):
    """Which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_wrappers_use_only_torch_functions_that_are_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept call takes memory, fills it and launches: an operator that nobody notes would be left out."""
    with on_a_device(folder) as (package, _):
        calls, noted = calls_module(package), []
        empty, fill = calls.empty, calls.fill

        def tell(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def telling(*args: Any, **kwargs: Any) -> Any:
                noted.append(name)
                return function(*args, **kwargs)

            return telling

        monkeypatch.setattr(calls, "empty", tell("aten::empty", empty))
        monkeypatch.setattr(calls, "fill", tell("aten::fill_", fill))
        for name, call in calls_of(package):
            getattr(package, name).__wrapped__(**call)  # which makes descriptors of no tensor, once
            noted.clear()
            with Dispatched() as mode:
                getattr(package, name).__wrapped__(**call)
            assert [one._schema.name for one in mode.seen if not is_view(one)] == noted, name


@pytest.mark.parametrize("mode", [Dispatched, Functions])
def test_a_mode_of_torch_sees_the_same_calls_as_of_the_wrapper(
    mode: Callable[[], Any], dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = dsv32
    for _ in range(2):
        package.flash_mla_sparse_fwd(**sparse_call())
    checked = counted(package, monkeypatch)
    with mode() as seen:
        package.flash_mla_sparse_fwd(**sparse_call())
    assert checked
    with mode() as of_text:
        package.flash_mla_sparse_fwd.__wrapped__(**sparse_call())
    assert seen.seen == of_text.seen
    assert len(checked_calls(package.flash_mla_sparse_fwd)) == 1


def test_a_default_device_is_not_looked_at(dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    package, _ = dsv32
    call = sparse_call()
    package.flash_mla_sparse_fwd(**call)
    checked = counted(package, monkeypatch)
    with torch.device("meta"):
        returned = package.flash_mla_sparse_fwd(**call)
        assert not checked
        assert {one.device.type for _, one in tensors_in(returned)} == {"cpu"}
        with Functions():
            package.flash_mla_sparse_fwd(**call)
        assert checked


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_tensors_of_a_transform_are_left_to_the_wrapper(transform: str, dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    call = sparse_call()
    package.flash_mla_sparse_fwd(**call)
    launched.clear()

    def total(q: torch.Tensor) -> torch.Tensor:
        return package.flash_mla_sparse_fwd(**{**call, "q": q})[0].float().sum()

    transformed = {
        "vmap": lambda: torch.vmap(total)(call["q"][None]),
        "grad": lambda: torch.func.grad(total)(call["q"]),
    }
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        transformed[transform]()
    assert not launched
    assert len(checked_calls(package.flash_mla_sparse_fwd)) == 1


class Own(torch.Tensor):
    """A tensor of a subclass. Its address may be no address."""


def test_tensors_of_a_subclass_are_checked_at_every_call(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = dsv32
    package.flash_mla_sparse_fwd(**sparse_call())
    call = sparse_call()
    call["kv"] = call["kv"].as_subclass(Own)
    checked = counted(package, monkeypatch)
    for _ in range(2):
        package.flash_mla_sparse_fwd(**call)
        assert "kv" in checked
        checked.clear()
    package.flash_mla_sparse_fwd(**{**call, "kv": torch.nn.Parameter(sparse_call()["kv"])})
    assert not checked


def test_memory_is_of_the_mode_of_its_call(dsv32: tuple[ModuleType, Launched]) -> None:
    package, _ = dsv32
    for first in (True, False):
        call = sparse_call(sm_scale=1.0 + first)
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                returned = package.flash_mla_sparse_fwd(**call)
            assert [one.is_inference() for _, one in tensors_in(returned)] == [mode] * 3


@pytest.mark.filterwarnings("ignore")  # dynamo's, of code that it cannot trace: it calls the wrapper as it is
def test_compiled_code_calls_with_its_own_tensors(dsv32: tuple[ModuleType, Launched]) -> None:
    package, launched = dsv32
    call = sparse_call()
    given = (call["q"], call["kv"], call["indices"])
    package.flash_mla_sparse_fwd(*given, 0.5)

    def layer(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> tuple[Any, ...]:
        q = q * 2
        return q, package.flash_mla_sparse_fwd(q, kv, indices, 0.5)[0]

    compiled = torch.compile(layer, backend="eager", dynamic=False)
    for _ in range(4):
        mine = [one.clone() for one in given]
        launched.clear()
        q, out = compiled(*mine)
        (_, _, _, passed), combined = launched
        rope = q.data_ptr() + 512 * q.element_size()
        assert passed[:4] == (q.data_ptr(), rope, mine[1].data_ptr(), mine[2].data_ptr())
        assert out.data_ptr() in combined[3]


def test_a_tensor_under_two_names_is_not_taken_for_one_of_them(
    dsv32: tuple[ModuleType, Launched], tmp_path: Path
) -> None:
    package, _ = dsv32
    scores, ids = torch.zeros(2, 128), torch.zeros(2, 128)
    call = sparse_call()
    for _ in range(2):
        both = package.flash_mla_sparse_fwd(**call, max_logits=scores, lse=scores)
        assert both[1] is both[2] is scores
        one, other = package.flash_mla_sparse_fwd(**call, max_logits=scores, lse=ids)[1:]
        assert one is scores
        assert other is ids
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8")) as (indexer, _):
        scores, ids, out = torch.zeros(2, 64), *torch.zeros(2, 2, 64, dtype=torch.int32)
        for given in (ids, out, ids, out):  # over memory that was read, and elsewhere
            assert indexer.topk_merge(scores, ids, 64, given)[0] is given


def test_windows_are_read_and_not_used_up() -> None:
    with on_a_device(GENERATED / "dsv3_prefill") as (package, launched):
        call = dict(calls_of(package))["flash_attn_varlen_func"]
        for windows in (lambda: (-1, -1), lambda: [-1, -1], lambda: (np.int64(-1), -1), lambda: None):
            for _ in range(2):
                package.flash_attn_varlen_func(**call, window_size=windows())
        launched.clear()
        for windows in (lambda: (-1, 0), lambda: [-1, 0], lambda: iter((-1, 0)), lambda: 0, lambda: ()):
            with pytest.raises((TypeError, ValueError)):
                package.flash_attn_varlen_func(**call, window_size=windows())
        assert not launched


def test_another_current_device_or_stream_is_seen(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv32
    calls, now = calls_module(package), SimpleNamespace(device=0, stream=7)
    internals = sys.modules[f"{package.__name__}._internals"]
    stream_of = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: now.stream))
    note = calls.Note
    monkeypatch.setattr(internals, "current_device", lambda: now.device)
    monkeypatch.setattr(internals, "device_count", lambda: 2)
    monkeypatch.setattr(internals, "driver", stream_of)
    monkeypatch.setattr(calls, "Note", lambda tensors, sources, device: note(tensors, sources, 0))
    call = sparse_call()
    package.flash_mla_sparse_fwd(**call)
    launched.clear()
    checked = counted(package, monkeypatch)
    for now.stream in (8, 9):
        package.flash_mla_sparse_fwd(**call)
        assert {stream for _, _, stream, _ in launched.taken()} == {now.stream}
    assert not checked
    now.device = 1
    package.flash_mla_sparse_fwd(**call)
    assert checked


def test_threads_may_drop_each_others_signatures(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv32
    monkeypatch.setattr(calls_module(package), "CALL_CACHE_SIZE", 2)
    failed, begun = [], threading.Barrier(4)

    def work(first: int) -> None:
        begun.wait()
        try:
            for number in range(60):
                package.flash_mla_sparse_fwd(**sparse_call(sm_scale=1.0 + (first + number) % 5))
        except Exception as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not failed
    assert len([name for name, *_ in launched if "combine" not in name]) == 4 * 60
    assert len(checked_calls(package.flash_mla_sparse_fwd)) <= 2


def test_a_failed_launch_raises_and_keeps_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(GENERATED / "dsv3") as (package, _):
        call = dict(calls_of(package))["flash_mla_with_kvcache"]
        for _ in range(2):
            package.flash_mla_with_kvcache(**copied(call))

        def fail(item: Any) -> None:
            raise RuntimeError("no launch")

        monkeypatch.setattr(Launched, "append", lambda self, item: fail(item))
        again = copied(call)
        with pytest.raises(RuntimeError, match="no launch"):
            package.flash_mla_with_kvcache(**again)
        assert again["tile_scheduler_metadata"].config is None


def test_a_call_with_an_unreadable_record_still_runs(
    dsv32: tuple[ModuleType, Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, launched = dsv32

    def fail(*_: Any) -> None:
        raise AttributeError("a launcher of another make")

    monkeypatch.setattr(sys.modules[f"{package.__name__}._internals"], "starter", fail)
    for _ in range(2):
        assert len(package.flash_mla_sparse_fwd(**sparse_call())) == 3
        assert len(launched.taken()) == 2


def test_memory_is_filled_at_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **like: empty(*sizes, **like).fill_(9))
    with on_a_device(GENERATED / "dsv3_prefill") as (package, _):
        counters: list[int] = []

        def launching(key: tuple[Any, ...]) -> SimpleNamespace:
            place = package._launch._arguments_of(key[0]).index("tile_counter_ptr")

            def run(*given: Any) -> None:
                counter = given[9 + place]
                address = counter.data_ptr() if isinstance(counter, torch.Tensor) else counter
                counters.append(ctypes.c_int32.from_address(address).value)

            return SimpleNamespace(run=run, function=1, packed_metadata=None)

        monkeypatch.setattr(package._launch, "_COMPILED", SimpleNamespace(get=launching))
        call = dict(calls_of(package))["flash_attn_varlen_func"]
        for _ in range(3):
            package.flash_attn_varlen_func(**call)
        assert counters == [0] * 3
    with on_a_device(indexer_calls.write_package(tmp_path, "indexer_fp8")) as (package, _):
        calls = indexer_calls.arguments(package)
        for name in ("fp8_mqa_logits", "fp8_paged_mqa_logits"):
            for clean in (True, False, True, False):
                logits = getattr(package, name)(**{**calls[name], "clean_logits": clean})
                assert set(logits.unique().tolist()) == {-torch.inf if clean else 9.0}
