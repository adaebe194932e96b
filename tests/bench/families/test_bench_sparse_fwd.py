from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mlagen.bench.check import error_limit
from mlagen.bench.families.sparse_fwd import (
    CHAIN,
    SharedShape,
    SparseFwdShape,
    default_shapes,
    make_inputs,
    make_neighbours,
    reference,
)
from mlagen.bench.package import BenchPackage

CPU = torch.device("cpu")


def test_default_shapes_cover_prefill_and_decode_of_every_head_count(dsv32: BenchPackage) -> None:
    shapes = default_shapes(dsv32.facts)
    assert {shape.num_heads for shape in shapes} == {128, 64, 16}
    assert {shape.s_kv for shape in shapes if shape.kind == "prefill"} == {8192, 32768, 131072}
    assert {shape.tokens for shape in shapes if shape.kind == "decode"} == {1, 4, 16, 64, 128}
    assert {shape.topk for shape in shapes} == {2048}
    assert len(set(shapes)) == 24


def test_shapes_can_be_narrowed(dsv32: BenchPackage) -> None:
    shapes = default_shapes(dsv32.facts, ("decode",), [20])
    assert {(shape.kind, shape.num_heads) for shape in shapes} == {("decode", 20)}


@pytest.mark.parametrize("share", [0, 50, 75, 90, 100])
def test_neighbours_share_so_many_indices(share: int) -> None:
    indices = make_neighbours(CHAIN + 9, 200, 1000, share, "cpu", torch.Generator().manual_seed(0))
    assert indices.dtype == torch.int32
    rows = [set(row) for row in indices.tolist()]
    assert all(len(row) == 200 and row <= set(range(1000)) for row in rows)
    kept = [len(one & next_one) for one, next_one in itertools.pairwise(rows)]
    assert {each for number, each in enumerate(kept, 1) if number % CHAIN} == {2 * share}
    assert not torch.equal(indices[0].sort().values, indices[0])


def test_neighbours_of_a_small_context_share_what_they_must() -> None:
    rows = [set(row) for row in make_neighbours(5, 200, 250, 0, "cpu").tolist()]
    assert [len(one & next_one) for one, next_one in itertools.pairwise(rows)] == [150] * 4


def test_ordered_shapes_draw_the_same_rows_in_ascending_order() -> None:
    shape = SparseFwdShape("ordered", 4, 16, 512, 64)
    torch.manual_seed(3)
    ordered = shape.draw_indices(2, CPU)
    torch.manual_seed(3)
    drawn = replace(shape, kind="prefill").draw_indices(2, CPU)
    assert torch.equal(ordered, drawn.sort(-1).values)
    assert not torch.equal(ordered, drawn)


def test_shared_shapes_draw_them(dsv32: BenchPackage) -> None:
    shape = SharedShape("shared", 4, 16, 512, 64, 50)
    inputs = make_inputs(shape, dsv32.facts, CPU, l2_bytes=0, sets=2)
    assert [each.indices.shape for each in inputs] == [(4, 1, 64)] * 2
    assert len(set(inputs[0].indices[0, 0].tolist()) & set(inputs[0].indices[1, 0].tolist())) == 32
    assert str(shape) == "shared 4 x h16, kv 512, topk 64, 50 % shared"


def test_input_sets_share_a_large_kv_only(dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    small = make_inputs(shape, dsv32.facts, CPU, l2_bytes=60 << 20, sets=2)
    assert small[0].kv.data_ptr() != small[1].kv.data_ptr()
    large = make_inputs(shape, dsv32.facts, CPU, l2_bytes=1 << 10, sets=2)
    assert large[0].kv.data_ptr() == large[1].kv.data_ptr()
    assert large[0].q.shape == (3, 16, 576)
    assert large[0].kv.shape == (512, 1, 576)
    assert large[0].indices.shape == (3, 1, 64)
    assert not torch.equal(large[0].indices, large[1].indices)
    assert large[0].q.dtype == large[0].kv.dtype == torch.bfloat16
    assert large[0].attn_sink is None
    assert large[0].topk_length is None


def test_inputs_follow_the_spec(dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    facts = replace(dsv32.facts, sink="required", length="required", block_size=53, dtype="float16")
    (inputs,) = make_inputs(shape, facts, CPU, l2_bytes=0, sets=1)
    assert inputs.attn_sink is not None
    assert inputs.attn_sink.shape == (16,)
    assert inputs.topk_length is not None
    assert inputs.topk_length.tolist() == [64, 64, 64]
    assert inputs.kv.shape == (10, 53, 576)
    assert inputs.kv.dtype == torch.float16


def test_the_check_tells_right_from_wrong(dsv32: BenchPackage, shape: SparseFwdShape) -> None:
    (inputs,) = make_inputs(shape, dsv32.facts, CPU, l2_bytes=0, sets=1)
    checked = reference(inputs, dsv32.facts)

    def attention(scale: float) -> torch.Tensor:
        kv = inputs.kv[inputs.indices[:, 0].long(), 0].float()  # [tokens, topk, d_qk]
        logits = torch.einsum("thd,tkd->thk", inputs.q.float(), kv) * inputs.sm_scale * scale
        return torch.einsum("thk,tkd->thd", logits.softmax(2), kv[..., :512]).bfloat16()

    limit = error_limit(torch.bfloat16)
    assert checked.error_of(lambda: attention(1.0)) < limit
    assert checked.error_of(lambda: attention(1.1)) > limit
    out = attention(1.0)
    assert checked.error_of(lambda: out) == torch.inf  # nothing wrote over the poison
