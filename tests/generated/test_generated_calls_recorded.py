"""Calls before the one that is recorded: checked, counted, and as bounded in number as records are."""

from __future__ import annotations

import sys

import pytest
import torch
from checked_in import package_of
from noted import checked_calls, in_words, on_a_device
from test_generated_calls import counted, sparse_call


def test_a_call_is_recorded_when_its_signature_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32"), checked_calls=1) as (package, launched):
        wrapper, checked = package.flash_mla_sparse_fwd, counted(package, monkeypatch)
        launches = []
        for is_checked in (True, True, False):
            checked.clear()
            call = sparse_call()
            returned = wrapper(**call)
            launches.append(in_words(launched.taken(), call, returned))
            assert bool(checked) == is_checked
        assert launches[0] == launches[1] == launches[2]
        assert len(checked_calls(wrapper)) == 1


def test_signatures_that_come_once_take_no_room_of_recorded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32"), checked_calls=1) as (package, _):
        wrapper = package.flash_mla_sparse_fwd
        monkeypatch.setattr(sys.modules[f"{package.__name__}._calls"], "CALL_CACHE_SIZE", 3)
        for _ in range(2):
            wrapper(**sparse_call())
        for step in range(9):
            wrapper(**sparse_call(sm_scale=1.0 + step))
        assert len(checked_calls(wrapper)) == 1
        assert len(wrapper.counts) == 3
        for _ in range(2):
            with pytest.raises(ValueError, match=r"sm_scale: got -1\.0"):
                wrapper(**sparse_call(sm_scale=-1.0))
        assert len(checked_calls(wrapper)) == 1


def test_alternating_signatures_are_compared_with_the_latest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32")) as (package, launched):
        wrapper, checked, found = package.flash_mla_sparse_fwd, counted(package, monkeypatch), []
        calls_module = sys.modules[f"{package.__name__}._calls"]
        calls = [sparse_call(kv=torch.zeros(rows, 1, 576, dtype=torch.bfloat16)) for rows in (64, 128, 192)]
        for call in (*calls, *calls):
            wrapper(**call)
        assert len(wrapper.checked.latest) == len(calls)
        signature_of = calls_module.signature_of
        monkeypatch.setattr(calls_module, "signature_of", lambda *given: found.append(given) or signature_of(*given))
        checked.clear()
        launched.clear()
        for call in (*calls, *calls[::-1]):
            returned = wrapper(**call)
            assert not found
            assert not checked
            launches = in_words(launched.taken(), call, returned)
            expected = wrapper.__wrapped__(**call)
            checked.clear()
            assert launches == in_words(launched.taken(), call, expected)
        wrapper.checked.clear()
        wrapper(**calls[0])
        assert found
        assert checked


def test_the_latest_calls_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32")) as (package, _):
        wrapper, most = package.flash_mla_sparse_fwd, sys.modules[f"{package.__name__}._calls"].LATEST_CALLS
        for _ in range(3):
            for step in range(most + 2):
                wrapper(**sparse_call(sm_scale=1.0 + step))
        assert len(wrapper.checked.latest) == most


def test_a_torch_without_guards_reads_every_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32")) as (package, launched):
        wrapper, checked = package.flash_mla_sparse_fwd, counted(package, monkeypatch)
        monkeypatch.setattr(sys.modules[f"{package.__name__}._internals"], "tensor_guards", None)
        for is_checked in (True, False, False):
            checked.clear()
            wrapper(**sparse_call())
            assert bool(checked) == is_checked
            assert launched.taken()
        assert not wrapper.checked.latest


def test_a_call_in_another_mode_of_autograd_is_compared_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_device(package_of("dsv32")) as (package, _):
        wrapper, calls_module = package.flash_mla_sparse_fwd, sys.modules[f"{package.__name__}._calls"]
        for _ in range(2):
            wrapper(**sparse_call())
        with torch.inference_mode():
            for _ in range(2):
                wrapper(**sparse_call())
            monkeypatch.setattr(calls_module, "signature_of", None)  # a call of it fails, and would then be checked
            checked = counted(package, monkeypatch)
            wrapper(**sparse_call())
        wrapper(**sparse_call())
        assert not checked


def test_a_tensor_that_is_given_twice_leaves_the_latest_calls() -> None:
    with on_a_device(package_of("dsv3_prefill")) as (package, launched):
        wrapper, states, lses = package.merge_attn_states, torch.zeros(2, 4, 16, 128), torch.zeros(2, 16, 4)
        one, other, out = *states.bfloat16(), torch.zeros(4, 16, 128, dtype=torch.bfloat16)
        for _ in range(3):
            wrapper(out, one, lses[0], other, lses[1])
        latest, counted_launches = wrapper.checked.latest, len(launched.taken())
        assert latest
        for _ in range(5):
            wrapper(out, one, lses[0], one, lses[0])
        assert wrapper.checked.latest == latest
        assert len(launched.taken()) > counted_launches
