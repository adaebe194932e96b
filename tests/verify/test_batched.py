"""The batched references against the plain ones."""

import math

import pytest
import torch

from mlagen.verify import batched, reference
from mlagen.verify.dense_fwd.reference import dense_fwd
from mlagen.verify.topk.inputs import scores_of
from mlagen.verify.topk.reference import top_k


def _same(one: reference.Attention, other: reference.Attention) -> None:
    for name, left, right in zip(one._fields, one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, equal_nan=True, msg=f"{name} differs")


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("elements", [1 << 23, 50])
def test_sparse_attention_is_the_plain_one(lse_base: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "ELEMENTS", elements)
    generator = torch.Generator().manual_seed(3)
    q, kv = torch.randn(7, 3, 20, generator=generator), torch.randn(5, 4, 20, generator=generator)
    kv[2, 1] = math.nan
    indices = torch.randint(-3, 24, (7, 11), generator=generator).int()
    indices[indices == 9] = 8
    indices[4] = -1
    length = torch.tensor([11, 5, 0, 99, 3, -2, 11], dtype=torch.int32)
    for sink in (None, torch.tensor([0.3, math.inf, -math.inf])):
        for lengths in (None, length):
            arguments = (kv, indices, 0.2, 12, sink, lengths, lse_base, "+inf")
            _same(batched.in_batches(q, *arguments), reference.sparse_attention(q, *arguments))


def test_sparse_attention_takes_no_tokens_and_no_columns() -> None:
    kv = torch.randn(2, 1, 8)
    for tokens, topk in ((0, 3), (2, 0)):
        arguments = (kv, torch.zeros(tokens, topk, dtype=torch.int32), 1.0, 4, None, None, "e", "-inf")
        q = torch.randn(tokens, 2, 8)
        _same(batched.in_batches(q, *arguments), reference.sparse_attention(q, *arguments))


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_is_the_plain_one(causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    cu_q, cu_k = [1, 4, 4, 9, 10], [0, 5, 8, 8, 14]
    q = torch.randn(12, 6, 10, generator=generator)
    k, v = torch.randn(15, 2, 10, generator=generator), torch.randn(15, 2, 7, generator=generator)
    arguments = (q, k, v, cu_q, cu_k, 0.3, causal)
    _same(batched.dense_fwd(*arguments), dense_fwd(*arguments))


def test_multi_head_attention_takes_no_heads() -> None:
    q, k, v = torch.zeros(3, 0, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 4)
    _same(batched.dense_fwd(q, k, v, [0, 3], [0, 5], 0.3, True), dense_fwd(q, k, v, [0, 3], [0, 5], 0.3, True))


@pytest.mark.parametrize("pattern", ["ties", "special", "zeros", "none", "few", "wide"])
def test_top_k_of_rows_is_that_of_each(pattern: str) -> None:
    scores = scores_of(pattern, 4, 90, torch.Generator().manual_seed(1))
    for k in (1, 40, 90, 120):
        indices, found = top_k(scores, k)
        for row in range(4):
            picked = [column for column in range(90) if scores[row, column] > -math.inf]
            picked = sorted(sorted(picked, key=lambda column: (-float(scores[row, column]), column))[:k])
            assert indices[row].tolist() == picked + [-1] * (k - len(picked))
            assert found[row, : len(picked)].tolist() == [float(scores[row, column]) for column in picked]
