"""The reference against loops over single numbers, written from the interface's text."""

import math

import pytest
import torch

from mlagen.verify.reference import sparse_attention

NAN = float("nan")
INF = math.inf


def naive(q, rows, indices, scale, d_v, sink, length, base, empty):
    """(out, max_logits, lse) of one token and head, as lists and floats; `rows` is a list of KV rows."""
    count = len(indices) if length is None else min(max(length, 0), len(indices))
    chosen = [rows[i] for i in indices[:count] if 0 <= i < len(rows)]
    if not chosen:
        return [0.0] * d_v, -INF, empty
    logits = [scale * sum(a * b for a, b in zip(q, row, strict=True)) for row in chosen]
    top = max(logits)
    total = sum(math.exp(logit - top) for logit in logits)
    lse = top + math.log(total)
    out = [
        sum(math.exp(logit - top) * row[d] for logit, row in zip(logits, chosen, strict=True)) / total
        for d in range(d_v)
    ]
    if sink == INF:
        out = [0.0] * d_v
    elif sink is not None and sink != -INF:
        out = [value * math.exp(lse) / (math.exp(lse) + math.exp(sink)) for value in out]
    unit = math.log(2) if base == "2" else 1.0
    return out, top / unit, lse / unit


INDICES = [
    [3, 1, 4, 1, 5],  # 1 counts twice
    [-1, 2**31 - 1, -(2**31), 6, 5],  # 6 is one past the last row
    [-1, -1, 7, -2, -1],  # none valid
    [1, 3, 5, 4, 2],
]
LENGTHS = [5, 9, 5, 2]


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize(("sink", "lengths"), [(None, None), ([0.5, -INF, INF], LENGTHS), ([3.0, -2.0, 0.0], None)])
@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_attention_equals_loops(base, sink, lengths, page_size):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 3, 8, generator=generator).bfloat16()
    rows = torch.randn(6, 8, generator=generator).bfloat16()
    rows[0] = NAN  # named by no index
    result = sparse_attention(
        q,
        rows.view(6 // page_size, page_size, 8),
        torch.tensor(INDICES, dtype=torch.int32),
        0.3,
        5,
        None if sink is None else torch.tensor(sink),
        None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        base,
        "+inf",
    )
    for token in range(4):
        for head in range(3):
            out, top, lse = naive(
                q[token, head].tolist(),
                rows.tolist(),
                INDICES[token],
                0.3,
                5,
                None if sink is None else sink[head],
                None if lengths is None else lengths[token],
                base,
                INF,
            )
            assert result.out[token, head].tolist() == pytest.approx(out, abs=1e-12)
            assert result.max_logits[token, head].item() == pytest.approx(top)
            assert result.lse[token, head].item() == pytest.approx(lse)


def test_an_empty_row_is_zero_whatever_the_sink():
    for empty in ("+inf", "-inf"):
        result = sparse_attention(
            torch.ones(1, 2, 4),
            torch.full((3, 1, 4), NAN),
            torch.full((1, 7), -1, dtype=torch.int32),
            1.0,
            4,
            torch.tensor([INF, 0.0]),
            None,
            "e",
            empty,
        )
        assert torch.equal(result.out, torch.zeros(1, 2, 4).double())
        assert torch.equal(result.max_logits, torch.full((1, 2), -INF).double())
        assert torch.equal(result.lse, torch.full((1, 2), float(empty)).double())
        assert not result.noise.any()


def test_a_length_hides_rows_that_hold_nan():
    rows = torch.full((4, 1, 4), NAN)
    rows[2] = 1.0
    indices = torch.tensor([[2, 3, 0]], dtype=torch.int32)
    length = torch.tensor([1], dtype=torch.int32)
    result = sparse_attention(torch.ones(1, 1, 4), rows, indices, 0.5, 4, None, length, "e", "+inf")
    assert result.out.flatten().tolist() == [1.0] * 4
    assert result.lse.item() == 2.0


def test_noise_grows_with_what_is_rounded_together():
    rows = torch.ones(2, 1, 4)
    one_row = torch.tensor([[0] * 8], dtype=torch.int32)
    two_rows = torch.tensor([[0, 1] * 4], dtype=torch.int32)
    of = [
        sparse_attention(torch.ones(1, 1, 4), rows, indices, 1.0, 4, None, None, "e", "+inf").noise[0, 0, 0].item()
        for indices in (one_row, two_rows)
    ]
    assert of[0] == pytest.approx(math.sqrt(2))  # one weight of 1, and the output
    assert of[1] == pytest.approx(math.sqrt(1.5))  # two weights of a half
