"""Trials of multi-head attention, against plain torch; its shapes and work, and those of merges."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checked_in import spec_of

from mlagen.bench.check import error_limit
from mlagen.bench.families import dense_fwd, shapes_of
from mlagen.bench.families.dense_fwd import DenseFwdShape
from mlagen.bench.families.merge_states import STATES, MergeStatesShape
from mlagen.bench.package import BenchPackage
from mlagen.compile.worker import load_package
from mlagen.spec import Spec, load
from mlagen.verify.call.facts import Facts

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def package_of(name: str) -> BenchPackage:
    """A package of a checked-in spec, without kernels."""
    spec: Spec = load(spec_of(name))
    said = spec.model_dump(mode="json")
    root = ModuleType(name)
    vars(root).update(SPEC={"spec": said})
    return BenchPackage(ROOT / "generated" / name, root, Facts.of(said), said)


def test_prefills_and_merges_of_a_package_are_measured() -> None:
    counts = Counter(shape.family for shape in shapes_of(package_of("dsv3_prefill")))
    assert counts == {"dense_fwd": 12, "merge_states": 8}
    assert {str(shape) for shape in shapes_of(package_of("odd_prefill"), ["dense_fwd"])} == {
        f"dense_fwd {lengths} x h12 of 3" for lengths in dense_fwd.LENGTHS
    }
    assert shapes_of(package_of("dsv32"), ["dense_fwd", "merge_states"]) == []


def test_a_shapes_text_begins_with_its_table() -> None:
    shapes = shapes_of(package_of("dsv3_prefill"))
    assert all(str(shape).startswith(f"{shape.kind} ") for shape in shapes)
    assert len({str(shape) for shape in shapes}) == len(shapes)


def test_work_of_a_call_by_hand() -> None:
    shape = DenseFwdShape("4x4096", 128, 128)
    assert shape.tokens == 16384
    # 4 requests of 4096 x 4097 / 2 pairs, 128 heads, 192 + 128 multiply-adds, two FLOPs each.
    assert shape.flops(192, 128) == 4 * 8_390_656 * 128 * 320 * 2
    # q, k: 192 columns, v, out: 128, of 2 bytes; and the LSE.
    assert shape.bytes_moved(192, 128) == 16384 * 128 * (2 * 320 * 2 + 4)
    assert MergeStatesShape(STATES, 10, 4, 128, 2).bytes_moved == 3 * 10 * 4 * (256 + 4)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dense_fwd.DenseFwdInputs:
    """Two requests, of 5 and 9 tokens, four heads of two of K and V."""
    monkeypatch.setitem(dense_fwd.LENGTHS, "short", (5, 9))
    (inputs,) = dense_fwd.make_dense_fwd_inputs(DenseFwdShape("short", 4, 2), 24, 8, torch.bfloat16, CPU, 1)
    return inputs


def plain(
    q: Any, k: Any, v: Any, starts: Any, _: Any, longest: int, __: int, *, softmax_scale: float, causal: bool
) -> Any:
    out = torch.zeros(*q.shape[:2], v.shape[2])
    for first, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        assert end - first <= longest
        for head in range(q.shape[1]):
            logits = softmax_scale * q[first:end, head].float() @ k[first:end, head // 2].float().T
            logits = logits.masked_fill(~torch.ones_like(logits).tril().bool(), -torch.inf) if causal else logits
            out[first:end, head] = logits.softmax(1) @ v[first:end, head // 2].float()
    return out.bfloat16(), None


def test_results_of_prefills_are_checked(short: dense_fwd.DenseFwdInputs) -> None:
    def wrong(*arguments: Any, softmax_scale: float, causal: bool) -> Any:
        return plain(*arguments, softmax_scale=softmax_scale, causal=not causal)

    reference = dense_fwd.dense_fwd_reference(short)
    assert reference.error_of(dense_fwd.dense_fwd_call(plain, short)) < error_limit(torch.bfloat16)
    assert reference.error_of(dense_fwd.dense_fwd_call(wrong, short)) > 0.1


def test_a_prefill_is_called_as_the_wrapper_takes_it(short: dense_fwd.DenseFwdInputs) -> None:
    signature = inspect.signature(load_package(ROOT / "generated" / "dsv3_prefill").flash_attn_varlen_func)
    calls = []

    def wrapper(*arguments: Any, **named: Any) -> Any:
        calls.append(signature.bind(*arguments, **named).arguments)
        return (None,)

    dense_fwd.dense_fwd_call(wrapper, short)()
    (call,) = calls
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (9, 9)
    assert (call["softmax_scale"], call["causal"]) == (short.scale, True)
