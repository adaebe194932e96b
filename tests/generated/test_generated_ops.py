"""Operators of torch that a package registers: once, next to those of others, with fakes of any sizes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from checked_in import package_of

from mlagen.verify.worker import import_package

HEADS, TOPK = 4, 32


@contextlib.contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A package, imported afresh."""
    yield import_package(package_of(name))
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


@contextlib.contextmanager
def without_kernels(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, calls on a CPU are checked and planned for sm90, and launch nothing."""
    launch = package._launch
    monkeypatch.setattr(launch, "launch", lambda *_, **__: None)
    monkeypatch.setattr(launch, "is_current", lambda _: True)
    with launch.planned_for(launch.facts_of("sm90")):
        yield


def attended(tokens: int, device: str = "cpu") -> tuple[Any, ...]:
    """Arguments of flash_mla_sparse_fwd of `odd`."""
    q = torch.zeros(tokens, HEADS, 128, dtype=torch.float16, device=device)
    kv = torch.zeros(2, 53, 128, dtype=torch.float16, device=device)
    return q, kv, torch.zeros(tokens, 1, TOPK, dtype=torch.int32, device=device), 0.1


def parts(tokens: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments of merge_attn_parts of `odd`."""
    outputs = torch.zeros(2, tokens, HEADS, 96, dtype=torch.float32, device=device)
    return outputs, torch.zeros(2, HEADS, tokens, device=device)


def metadata(results: Any) -> list[tuple[Any, ...]]:
    results = results if isinstance(results, tuple) else (results,)
    return [(result.dtype, tuple(result.shape), result.stride()) for result in results]


def test_packages_have_operators_side_by_side() -> None:
    with imported("odd") as odd, imported("odd_fp8") as odd_fp8:
        for package in (odd, odd_fp8):
            operators = getattr(torch.ops, package.__name__)
            names = [one.schema.split("(")[0] for one in package.ops.OPERATORS]
            assert len(set(names)) == len(names)
            for name in names:
                packet, _, overload = name.partition(".")
                assert getattr(getattr(operators, packet), overload or "default")._schema
        assert not hasattr(torch.ops.odd, "flash_mla_with_kvcache")
        assert not hasattr(torch.ops.odd_fp8, "flash_mla_sparse_fwd")


def test_a_second_import_takes_the_first_ones_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("odd") as first, imported("odd") as second:
        assert first is not second
        ran = []
        monkeypatch.setattr(first._launch, "launch", lambda *_, **__: ran.append("first"))
        with without_kernels(second, monkeypatch):
            monkeypatch.setattr(second._launch, "launch", lambda *_, **__: ran.append("second"))
            torch.ops.odd.flash_mla_sparse_fwd(*attended(1))
        assert ran == ["second"]


def test_a_package_without_ops_registers_none() -> None:
    with imported("odd_prefill") as package:
        assert not hasattr(package, "ops")
        assert not hasattr(torch.ops.odd_prefill, "merge_attn_parts")


def test_tensors_that_require_a_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("odd") as package, without_kernels(package, monkeypatch):
        q, *others = attended(2)
        q.requires_grad_()
        ops = torch.ops.odd
        outputs, lses = parts(2)
        outputs.requires_grad_()
        results = {"out": torch.zeros(2, HEADS, 96, dtype=torch.float16), "output_lse": torch.zeros(HEADS, 2)}
        compiled = torch.compile(ops.flash_mla_sparse_fwd, fullgraph=True, backend="aot_eager")
        for call in (
            lambda: ops.flash_mla_sparse_fwd(q, *others),
            lambda: compiled(q, *others),
            lambda: ops.merge_attn_parts(outputs, lses),
            lambda: ops.merge_attn_parts.out(outputs, lses, **results),
        ):
            with pytest.raises(RuntimeError, match="has no gradient: detach its tensors"):
                call()
            with torch.no_grad():
                call()


def test_meta_tensors_give_shapes_dtypes_and_strides() -> None:
    with imported("odd"):
        operators = torch.ops.odd
        half, single, e4m3 = torch.float16, torch.float32, torch.float8_e4m3fn
        stats = (single, (3, HEADS), (HEADS, 1))
        q, *others = attended(3, "meta")
        out = (half, (3, HEADS, 96), (HEADS * 96, 96, 1))
        assert metadata(operators.flash_mla_sparse_fwd(q, *others)) == [out, stats, stats]
        assert metadata(operators.triton_mla_sparse_attention(q, *others)) == [out]
        scale = torch.ones(1, device="meta")
        quantised = operators.flash_mla_sparse_fwd(q, *others, output_scale=scale)
        assert metadata(quantised) == [(e4m3, *out[1:]), stats, stats]
        merged = operators.merge_attn_parts(*parts(3, "meta"))
        assert metadata(merged) == [out, (single, (HEADS, 3), (3, 1))]
        outputs, lses = parts(3, "meta")
        merged = operators.merge_attn_parts(outputs, lses.transpose(1, 2), lse_layout="th")
        assert metadata(merged) == [out, stats]
    with imported("odd_fp8"):
        q = torch.zeros(2, 3, HEADS, 128, dtype=half, device="meta")
        cache = torch.zeros(2, 5, 1, 176, dtype=torch.uint8, device="meta")
        indices = torch.zeros(2, 3, TOPK, dtype=torch.int32, device="meta")
        found = torch.ops.odd_fp8.flash_mla_with_kvcache(
            q, cache, None, None, 128, is_fp8_kvcache=True, indices=indices
        )
        assert metadata(found) == [
            (half, (2, 3, HEADS, 128), (3 * HEADS * 128, HEADS * 128, 128, 1)),
            (single, (2, HEADS, 3), (3 * HEADS, 1, HEADS)),
        ]


def test_sizes_may_be_symbols() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    """A trace of 3 tokens holds for any number, and so do the sizes that fakes give."""
    with imported("odd"):
        operators = torch.ops.odd

        def call(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            out, max_logits, lse = operators.flash_mla_sparse_fwd(q, kv, indices, 0.1)
            return out.new_zeros(out.shape[0] + max_logits.shape[0], lse.shape[1])

        traced = make_fx(call, tracing_mode="symbolic")(*attended(3)[:3])
        sizes = [node for node in traced.graph.nodes if node.target is torch.ops.aten.new_zeros.default]
        assert not isinstance(sizes[0].args[1][0], int)
        assert not isinstance(sizes[0].args[1][1], int)


def test_a_compiled_call_is_one_graph_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    with imported("odd") as package, without_kernels(package, monkeypatch):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        operator = torch.ops.odd.flash_mla_sparse_fwd
        compiled = torch.compile(
            lambda *given: operator(*given, 0.1)[0] + 0, fullgraph=True, dynamic=True, backend=counter
        )
        for tokens in (3, 5, 8):
            assert compiled(*attended(tokens)[:3]).shape == (tokens, HEADS, 96)
        assert counter.frame_count == 1


def test_operators_refuse_the_same_arguments_as_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("odd") as package, without_kernels(package, monkeypatch):
        q, kv, indices, _ = attended(2)
        with pytest.raises(ValueError, match=r"sm_scale: got 0\.0"):
            torch.ops.odd.flash_mla_sparse_fwd(q, kv, indices, 0.0)
        with pytest.raises(TypeError, match=r"q: got torch\.float32, takes torch\.float16"):
            torch.ops.odd.flash_mla_sparse_fwd(q.float(), kv, indices, 0.1)


def test_out_overloads_write_to_given_tensors_and_return_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("odd") as package, without_kernels(package, monkeypatch):
        q, kv, indices, scale = attended(2)
        out, stats = torch.zeros(2, HEADS, 96, dtype=torch.float16), torch.zeros(2, HEADS)
        seen: list[Any] = []
        monkeypatch.setattr(package._launch, "launch", lambda _kernel, _programs, call, *_: seen.append(call.out))
        given = {"out": out, "max_logits": stats, "lse": stats.clone()}
        assert torch.ops.odd.flash_mla_sparse_fwd(q, kv, indices, scale, **given) is None
        assert [one.data_ptr() for one in seen] == [out.data_ptr()]
