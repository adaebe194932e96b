"""Tolerances: wide enough for rounding, too narrow for anything else."""

import math

import pytest
import torch

from mlagen.verify.reference import Attention, sparse_attention
from mlagen.verify.tolerance import FP8_PRODUCTS, FP8_STEP, lse_error, max_logits_error, out_errors

D_QK, D_V, TOPK = 96, 64, 200
DTYPES = [torch.bfloat16, torch.float16]


def problem(dtype: torch.dtype, seed: int = 0, scale: float = 1.0, topk: int = TOPK):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 4, D_QK, generator=generator).to(dtype)
    kv = torch.randn(400, 1, D_QK, generator=generator).to(dtype)
    indices = torch.randint(0, 400, (3, topk), generator=generator).int()
    return q, kv, indices, scale * D_QK**-0.5


def expected_of(q, kv, indices, scale) -> Attention:
    return sparse_attention(q, kv, indices, scale, D_V, None, None, "e", "+inf")


def stored(share: torch.Tensor, partials: str) -> torch.Tensor:
    """A split's accumulator [tokens, heads, d_v] as the merge reads it."""
    if partials == "bf16":
        return share.bfloat16().float()
    power = share.abs().amax(2, keepdim=True).log2().floor().exp2()
    return (share / power).half().float() * power


def rounded(q, kv, indices, scale, rounds: int = 1, splits: int = 1, partials: str = "bf16") -> torch.Tensor:
    """A kernel's results: P rounded to the dtype relative to the row's maximum, and the output rounded.

    With more than one of `splits`, their shares are rounded to `partials` before they are added up.
    """
    k = kv[indices.long(), 0].float()  # [tokens, topk, d_qk]
    logits = torch.einsum("thd,tnd->thn", q.float(), k) * scale
    p = (logits - logits.amax(2, keepdim=True)).exp()
    cut = zip(p.to(q.dtype).float().tensor_split(splits, 2), k[..., :D_V].tensor_split(splits, 1), strict=True)
    shares = [torch.einsum("thn,tnd->thd", weights, values) for weights, values in cut]
    if splits > 1:
        shares = [stored(share, partials) for share in shares]
    out = torch.stack(shares).sum(0) / p.sum(2, keepdim=True)
    for _ in range(rounds - 1):
        out = out * (1 + 2.0 ** -(7 if q.dtype == torch.bfloat16 else 10))
    return out.to(q.dtype)


def worst(figures) -> float:
    return max(figure.share for figure in figures)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scale", "topk"), [(1.0, 200), (1.0, 1), (1.0, 2), (8.0, 200), (40.0, 50), (1e-3, 200)])
def test_rounding_alone_passes(dtype, scale, topk):
    for seed in range(4):
        inputs = problem(dtype, seed, scale, topk)
        assert worst(out_errors(rounded(*inputs), expected_of(*inputs), D_QK)) < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [2, 5, 50])
@pytest.mark.parametrize(("scale", "topk"), [(1.0, 200), (8.0, 200), (40.0, 50), (1e-3, 200)])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_partials_in_bf16_pass_where_they_are_said(dtype, splits, scale, topk, mean):
    for seed in range(4):
        q, kv, indices, scaled = problem(dtype, seed, scale, topk)
        inputs = (q, kv + mean, indices, scaled)  # with a mean, shares of one sign add up
        out, expected = rounded(*inputs, splits=splits), expected_of(*inputs)
        assert worst(out_errors(out, expected, D_QK, partials="bf16")) < 0.9
        if (dtype, scale, splits, mean) == (torch.float16, 1.0, 2, 0.0):
            assert worst(out_errors(out, expected, D_QK)) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_partials_in_fp16_pass_where_they_are_said(dtype, mean):
    for splits in (2, 5, 50):
        q, kv, indices, scaled = problem(dtype, splits)
        inputs = (q, kv + mean, indices, scaled)
        out, expected = rounded(*inputs, splits=splits, partials="fp16"), expected_of(*inputs)
        assert worst(out_errors(out, expected, D_QK, partials="fp16")) < 0.9


def test_partials_in_bf16_fail_where_fp16_is_said():
    inputs = problem(torch.float16)
    out = rounded(*inputs, splits=2, partials="bf16")
    assert worst(out_errors(out, expected_of(*inputs), D_QK, partials="fp16")) > 1


@pytest.mark.parametrize("splits", [2, 5])
def test_one_more_unit_of_rounding_fails_with_partials_in_bf16(splits):
    inputs = problem(torch.bfloat16)
    out = rounded(*inputs, rounds=3, splits=splits)
    assert worst(out_errors(out, expected_of(*inputs), D_QK, partials="bf16")) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_more_unit_of_rounding_fails(dtype):
    inputs = problem(dtype)
    assert worst(out_errors(rounded(*inputs, rounds=2), expected_of(*inputs), D_QK)) > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(value):
    inputs = problem(torch.bfloat16)
    expected = expected_of(*inputs)
    out = rounded(*inputs)
    out[1, 2, 3] = value
    assert math.isinf(worst(out_errors(out, expected, D_QK)))
    lse = expected.lse.float()
    lse[2, 1] = value
    assert math.isinf(lse_error(lse, expected, D_QK, TOPK, "e").share)
    assert math.isinf(max_logits_error(lse, expected, D_QK, "e").error)


def test_one_wrong_row_or_element_is_not_drowned():
    inputs = problem(torch.bfloat16)
    expected = expected_of(*inputs)
    row, element = rounded(*inputs), rounded(*inputs)
    row[1, 2] *= 1.02
    element[1, 2, 3] += 0.01
    assert worst(out_errors(row, expected, D_QK)) > 1
    assert worst(out_errors(element, expected, D_QK)) > 1


def test_an_empty_row_must_be_zero_and_its_infinities_exact():
    q, kv, indices, scale = problem(torch.bfloat16)
    indices[1] = -1
    expected = expected_of(q, kv, indices, scale)
    out = expected.out.bfloat16()
    assert worst(out_errors(out, expected, D_QK)) <= 1
    assert lse_error(expected.lse.float(), expected, D_QK, TOPK, "e").share <= 1
    assert max_logits_error(expected.max_logits.float(), expected, D_QK, "e").share <= 1
    out[1, 0, 0] = 1e-30
    assert math.isinf(worst(out_errors(out, expected, D_QK)))
    assert math.isinf(lse_error(-expected.lse.float(), expected, D_QK, TOPK, "e").share)


@pytest.mark.parametrize(("base", "unit"), [("e", 1.0), ("2", math.log(2))])
def test_lse_and_max_logits_hold_fp32_precision(base, unit):
    q, kv, indices, scale = problem(torch.bfloat16)
    expected = sparse_attention(q, kv, indices, scale, D_V, None, None, base, "+inf")
    assert lse_error(expected.lse.float(), expected, D_QK, TOPK, base).share < 0.1
    assert lse_error(expected.lse.float() + 1e-3, expected, D_QK, TOPK, base).share > 1
    assert lse_error(expected.lse.float() * unit / math.log(2), expected, D_QK, TOPK, base).share > 1 or base == "2"
    assert max_logits_error(expected.max_logits.float() + 1e-3, expected, D_QK, base).share > 1
    # P rounded before it is summed is no way to an LSE.
    assert lse_error(expected.lse.bfloat16().float(), expected, D_QK, TOPK, base).share > 1


def short_scores(q, k):
    """q [rows, columns] times k [keys, columns] as sm90 adds products of fp8: each step keeps 14 bits."""
    total = torch.zeros(len(q), len(k), dtype=torch.float64)
    for first in range(0, q.shape[1], FP8_PRODUCTS):
        products = q[:, None, first : first + FP8_PRODUCTS] * k[None, :, first : first + FP8_PRODUCTS]
        terms = torch.cat([products, total[..., None]], 2)
        unit = FP8_STEP * 2.0 ** torch.frexp(terms.abs().amax(2, keepdim=True))[1].sub(1)
        total = torch.trunc(terms / unit).mul(unit).sum(2)
    return total


@pytest.mark.parametrize("keys", [1, 70, 1000])
@pytest.mark.parametrize("magnitude", [2.0**-6, 0.4375, 1.0, 4.0])
def test_lse_of_sums_with_fewer_bits_passes_where_they_are_said_and_nowhere_else(keys, magnitude):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(16, 576, generator=generator).to(torch.float8_e4m3fn).double()
    k = torch.randn(keys, 576, generator=generator).to(torch.float8_e4m3fn).double()
    indices = torch.arange(keys).int().expand(1, keys)
    expected = sparse_attention(q[None], k[:, None], indices, magnitude / 24, 512, None, None, "e", "+inf")
    lse = (short_scores(q, k) * (magnitude / 24)).logsumexp(1)[None]
    said = lse_error(lse, expected, 576, keys, "e", short=True)
    assert 0.0 < said.share < 0.5
    assert lse_error(lse, expected, 576, keys, "e").share > 1 or keys > 1
    if magnitude <= 1:  # a score that is off by a hundredth of its sum of absolute products
        assert lse_error(lse + 0.01 * expected.logit_size.double(), expected, 576, keys, "e", short=True).share > 1


@pytest.mark.parametrize("keys", [1, 2, 70, 1000])
@pytest.mark.parametrize("magnitude", [2.0**-6, 1.0, 40 * 0.4375])
def test_out_moves_with_such_sums_as_far_as_is_said(keys, magnitude):
    """Also scores of a softmax that saturates; without two keys in a softmax nothing moves."""
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(16, 576, generator=generator).to(torch.float8_e4m3fn).double()
    k = torch.randn(keys, 576, generator=generator).to(torch.float8_e4m3fn).double()
    indices = torch.arange(keys).int().expand(1, keys)
    expected = sparse_attention(q[None], k[:, None], indices, magnitude / 24, 512, None, None, "e", "+inf")
    weights = (short_scores(q, k) * (magnitude / 24)).softmax(1)
    out = (weights.bfloat16().double() @ k[:, :512]).bfloat16()[None]
    figures = out_errors(out, expected, 576, short=True)
    assert worst(figures) < 1
    if magnitude > 1 and keys > 2:  # some heads have two keys of a like weight
        assert worst(out_errors(out, expected, 576)) > 1
    if keys == 1:
        assert torch.equal(expected.spread, torch.zeros_like(expected.spread))
    if keys > 2:  # one key of the largest weight left out
        weights[torch.arange(16), weights.argmax(1)] = 0.0
        wrong = (weights @ k[:, :512]).bfloat16()[None]
        assert worst(out_errors(wrong, expected, 576, short=True)) > 1


def short_sums_of(p, v):
    """p [rows, keys] times v [keys, columns] as sm90 adds products of fp8."""
    return short_scores(p, v.T)


def coarse(q, k, scale, *, short=False, shift=0):
    """Results with P in e4m3, its largest value 2^5, as a kernel of sm90 has them; `shift` exchanges its keys."""
    logits = q @ k.T * scale
    p = (logits - logits.amax(1, keepdim=True)).exp() * 2.0**5
    rounded_p = p.float().to(torch.float8_e4m3fn).double().roll(shift, 1)
    out = short_sums_of(rounded_p, k[:, :512]) if short else rounded_p @ k[:, :512]
    return (out / p.sum(1, keepdim=True)).bfloat16()[None]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("keys", [1, 2, 70, 1000])
@pytest.mark.parametrize("magnitude", [2.0**-6, 1.0, 8.0])
def test_p_of_e4m3_passes_where_it_is_said_and_nowhere_else(keys, magnitude, short):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(16, 576, generator=generator).to(torch.float8_e4m3fn).double()
    k = torch.randn(keys, 576, generator=generator).to(torch.float8_e4m3fn).double()
    indices = torch.arange(keys).int().expand(1, keys)
    expected = sparse_attention(q[None], k[:, None], indices, magnitude / 24, 512, None, None, "e", "+inf")
    figures = out_errors(coarse(q, k, magnitude / 24, short=short), expected, 576, short=short, p_keys=keys)
    assert worst(figures) < 0.9
    if keys > 2:
        assert worst(out_errors(coarse(q, k, magnitude / 24), expected, 576)) > 1
    if keys > 2 and magnitude >= 1:  # else all keys weigh alike
        wrong = coarse(q, k, magnitude / 24, short=short, shift=1)
        assert worst(out_errors(wrong, expected, 576, short=short, p_keys=keys)) > 1


def test_no_tokens_pass():
    expected = expected_of(torch.ones(0, 4, D_QK), torch.ones(3, 1, D_QK), torch.ones(0, 7).int(), 1.0)
    assert worst(out_errors(torch.ones(0, 4, D_V).bfloat16(), expected, D_QK)) == 0
    assert lse_error(torch.ones(0, 4), expected, D_QK, 7, "e").share == 0
