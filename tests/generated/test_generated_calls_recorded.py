"""Calls before the one that is recorded: checked, counted, and as bounded in number as records are."""

from __future__ import annotations

import sys

import pytest
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
