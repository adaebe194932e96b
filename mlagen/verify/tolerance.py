"""How far a kernel's result may lie from the reference, and why.

Kernels multiply inputs exactly and accumulate in fp32. They round twice to the model's dtype: P before the second
product, and the output. So an element of `out` carries two kinds of rounding error, each at most u times the rounded
term (u: half an ulp of 1, 2^-8 for bf16, 2^-11 for fp16), with independent signs. Their root sum of squares is
`noise`, and the expected error is 0.4 u * noise. Errors are measured in that unit. So rows with heavy cancellation
get the larger tolerance that the format implies, and other rows do not.

Splits in bf16 store accumulators that are each off by at most 2^-8 of themselves, with a sign of their own. The merge
scales error and accumulator alike. So the error of an element is that of shares of it, rounded one by one. With values
of one sign, the squares of any shares add up to at most the element's square. With values of either sign, they add up
in the mean to the sum of the squared weighted values, if a row named in several splits counts as one. Both are at most
noise squared. The two errors are independent, so u becomes sqrt(u^2 + 2^-16). Calls in a single pass have the same
limit. In fp16, with a power of two a row, u becomes sqrt(u^2 + 2^-22), and a column far below its row's largest loses
less than `floor`.

Logits are sums of d_qk exact products in fp32, with an error of 2^-24 a step relative to the sum of absolute products
(`logit_size`). Tensor cores truncate where IEEE rounds, which doubles a step, and take at least 16 products a step. A
kernel may round elements of K elsewhere than the reference, and then get the neighbouring value: one unit of K.

Two limits are wider where sm90 multiplies fp8 on a GPU (`short`). Both came after cases had failed there: `lse` first,
then `out`. The calls are those of the sm90 kernels of dense decode over `fp8_per_tensor`, and of sparse decode with a
q of e4m3. All other calls have the usual limits, and so have the same kernels in numpy, which adds exactly. Sums of
logits keep about 14 bits. The limit of `lse` is the most that a sum loses (`short_error`), for any signs. The limit of
`out` is the root mean square of that (`short_noise`). To first order, an error d of a key's logit moves `out` by
d * weight * (value - out), so a row with one large weight hardly moves: `spread` is the root of the sum of squares of
all keys. It adds to the other errors as they do to each other, by squares. That covers logits with errors independent
of each other and of V, like those of random inputs. It covers neither rows with values that follow their logits, nor
logits of one sign with errors that grow with them. There the shifts add up, and `out` may differ by more. The 14 bits
are seen on hardware and documented nowhere, so a GPU run decides whether they still hold, not a CPU.

P is e4m3 in the sm90 kernels of dense decode with `products: fp8` (`p_keys`). Its u is 2^-4, and only weighted values
carry it: sqrt(noise^2 - out^2). A kernel keeps a row's largest P between 2^5 and 2^8.75. A P below 2^-6 has an absolute
error of up to 2^-10, so 2^-15 of the row's largest weight, with a sign of its own: sqrt(keys) of them add up. On a GPU
the sums with V keep about 14 bits too, of an accumulator over all keys of a program. A step truncates each product to
FP8_STEP of the accumulator. For V without a common sign the losses of all keys have signs of their own, and their root
mean square is at most FP8_STEP * sqrt(keys / 3) of `noise` (`short_sums`). Where values of a column have one sign, the
losses add up: 0.4 % of `out` after 512 keys in a program, 5 % after 4096 and 18 % after 16K, counted and on an H100.
These limits do not cover that.

A NaN never passes, an infinity must be met exactly, and an empty row or one under an infinite sink must be exactly 0.
"""

from __future__ import annotations

import math

import torch

from mlagen.verify.call.results import Figure
from mlagen.verify.reference import Attention

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e4m3fn: 2.0**-4}
PARTIALS_ROUNDOFF = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}  # of an fp32 accumulator
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}  # spacing of subnormals
FP32_STEP = 2.0**-24
FP8_STEP = 2.0**-13  # of sm90's fp8 products, which keep about 14 bits of a sum, 32 products a step
FP8_PRODUCTS = 32

# Error (2-norm) of a tensor of many rows in units of u * noise: 0.4 expected.
WHOLE_LIMIT = 0.6
# Error of a wide row (2-norm over d_v): its columns share the rounding of the weights, so that few weights can reach 1.
ROW_LIMIT = 1.0
# Error of one element: a normal tail reaches 5 sigma = 2 in a million elements.
ELEMENT_LIMIT = 4.0
# Weights far below the row's maximum are subnormal in fp16, with an absolute error; relative to the row's noise.
SUBNORMAL_WEIGHTS = 2.0**-20
SUBNORMAL_E4M3_P = 2.0**-15  # of one weight, likewise; the square root of the number of keys adds up


def roundoff(dtype: torch.dtype, partials: str = "fp32") -> float:
    """The u of results of `dtype`, with splits stored as `partials`."""
    return math.hypot(UNIT_ROUNDOFF[dtype], PARTIALS_ROUNDOFF[partials])


def worst(name: str, error: torch.Tensor, tolerance: torch.Tensor) -> Figure:
    """The entry with the largest error as a share of its tolerance; NaN errors count as infinite."""
    if not error.numel():
        return Figure(name, 0.0, 0.0)
    error = error.double().nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    tolerance = tolerance.double().expand_as(error) if tolerance.dim() == 0 else tolerance.double().flatten()
    share = torch.where(error == 0, 0.0, error / tolerance)
    at = int(share.nan_to_num(nan=math.inf, posinf=math.inf).argmax())
    return Figure(name, float(error[at]), float(tolerance[at]))


def _row_limit(d_v: int) -> float:
    """A row of one column is an element; the more columns, the less their own roundings spread."""
    return ROW_LIMIT + (ELEMENT_LIMIT - ROW_LIMIT) / math.sqrt(d_v)


def _whole_limit(rows: int, d_v: int) -> float:
    """Likewise: a tensor of one row is that row."""
    return WHOLE_LIMIT + (_row_limit(d_v) - WHOLE_LIMIT) / math.sqrt(rows)


def logit_tolerance(expected: Attention, d_qk: int, k_error: float = 0.0) -> torch.Tensor:
    """Largest error of a logit in natural units, [tokens, heads]: d_qk / 16 truncating steps, and a few for scaling.

    Elements of K may be off by `k_error`, relative.
    """
    return (FP32_STEP * (2 * d_qk / 16 + 8) + k_error) * expected.logit_size


def short_error(columns: int) -> float:
    """Largest error of a logit of `columns` columns in sm90's fp8 products, relative to the sum of absolute products.

    Each step truncates the terms of its sum to FP8_STEP of the largest. After j of n steps that is no more than the sum
    of j / n of the absolute products: (n + 1) / 2 steps in all.
    """
    return FP8_STEP * (-(-columns // FP8_PRODUCTS) + 1) / 2


def short_noise(columns: int) -> float:
    """Root mean square of the error that `short_error` bounds.

    The part that a step truncates lies evenly below its unit: its mean square is 1/3. Squares of n steps add to n / 3.
    """
    return FP8_STEP * math.sqrt(-(-columns // FP8_PRODUCTS)) / 3


def short_sums(keys: int) -> float:
    """Root mean square of the error of sums of e4m3 P and V in sm90's fp8 products, relative to `noise`."""
    return FP8_STEP * math.sqrt(keys / 3)


def out_errors(
    out: torch.Tensor,
    expected: Attention,
    d_qk: int,
    k_error: float = 0.0,
    partials: str = "fp32",
    *,
    short: bool = False,
    p_keys: int | None = None,
) -> list[Figure]:
    """Errors of `out` [tokens, heads, d_v]: of the whole, of rows and of elements, each relative to its noise.

    short: logits are products of fp8 that sm90 adds.
    p_keys: the most keys that a token sees, where P is e4m3; None: it has the dtype of `out`.

    Where the reference is 0 because a row is empty or its sink infinite, only 0 is right.
    """
    unit = roundoff(out.dtype, partials)
    error = (out.double() - expected.out).abs()  # [tokens, heads, d_v]
    noise = expected.noise
    row_noise = noise.norm(dim=2)  # [tokens, heads]
    scale = torch.where(row_noise > 0, row_noise, 1.0)
    # An error of the logits moves each weight by that share, and so each term of the sum.
    logits = 2 * logit_tolerance(expected, d_qk, k_error)  # [tokens, heads]
    tokens, heads, d_v = out.shape
    subnormal, rounding = SUBNORMAL_WEIGHTS, noise * unit  # rounding: [tokens, heads, d_v]
    if p_keys is not None:
        weighted = (noise.square() - expected.out.square()).clamp(min=0.0).sqrt()
        rounding = torch.hypot(rounding, weighted * UNIT_ROUNDOFF[torch.float8_e4m3fn])
        rounding = torch.hypot(rounding, noise * short_sums(p_keys)) if short else rounding
        subnormal = SUBNORMAL_E4M3_P * math.sqrt(p_keys)
    row_rounding = rounding.norm(dim=2)
    floor = row_noise * subnormal + (row_noise > 0) * SMALLEST[out.dtype]
    # [tokens, heads, d_v]; columns of a row share the errors of its logits, so that a row has the tail of an element.
    moved = expected.spread * (short_noise(d_qk) * expected.logit_size)[..., None] if short else torch.zeros_like(noise)
    row_moved, count = moved.norm(dim=2), max(1, tokens * heads)
    rows = torch.hypot(row_rounding * _row_limit(d_v), ELEMENT_LIMIT * row_moved)
    rows = rows + row_noise * logits + floor * math.sqrt(d_v)
    elements = ELEMENT_LIMIT * (torch.hypot(rounding, moved) + noise * logits[..., None]) + floor[..., None]
    tail = 1 + (ELEMENT_LIMIT - 1) / math.sqrt(count)
    whole = torch.hypot(row_rounding * _whole_limit(count, d_v), tail * row_moved)
    whole = (whole + row_noise * logits + floor * math.sqrt(d_v)).norm()
    total = noise.norm() if row_noise.any() else whole + 1
    return [
        worst("out", error.norm() / total, whole / total),
        worst("out row", error.norm(dim=2) / scale, rows / scale),
        worst("out element", error / scale[..., None], elements / scale[..., None]),
    ]


def element_limits(
    dtype: torch.dtype, expected: Attention, d_qk: int, k_error: float = 0.0, partials: str = "fp32"
) -> torch.Tensor:
    """Largest error of each element of an output before it is rounded. [tokens, heads, d_v]"""
    logits = 2 * logit_tolerance(expected, d_qk, k_error)[..., None]
    return ELEMENT_LIMIT * expected.noise * (roundoff(dtype, partials) + logits) + _floor(dtype, expected)


def mean_limits(
    dtype: torch.dtype, expected: Attention, d_qk: int, k_error: float = 0.0, partials: str = "fp32"
) -> torch.Tensor:
    """Root mean square of these errors at most, over all elements. [tokens, heads, d_v]"""
    logits, (tokens, heads, d_v) = 2 * logit_tolerance(expected, d_qk, k_error)[..., None], expected.noise.shape
    limit = _whole_limit(max(1, tokens * heads), d_v)
    return expected.noise * (limit * roundoff(dtype, partials) + logits) + _floor(dtype, expected)


def _floor(dtype: torch.dtype, expected: Attention) -> torch.Tensor:
    """Absolute error of elements of a row. [tokens, heads, 1]"""
    row_noise = expected.noise.norm(dim=2, keepdim=True)
    found: torch.Tensor = row_noise * SUBNORMAL_WEIGHTS + (row_noise > 0) * SMALLEST[dtype]
    return found


def _stat_error(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> Figure:
    """Absolute error of a statistic [tokens, heads] in units of its log base; infinities must be the same."""
    got = got.double()
    error = torch.where(got == expected, 0.0, (got - expected).abs())
    return worst(name, error.nan_to_num(nan=math.inf, posinf=math.inf), tolerance)


def max_logits_error(max_logits: torch.Tensor, expected: Attention, d_qk: int, lse_base: str) -> Figure:
    """Error of `max_logits` [tokens, heads]: that of a logit, and fp32 steps of its own for the change of base."""
    unit = math.log(2) if lse_base == "2" else 1.0
    steps = 4 * FP32_STEP * expected.max_logits.abs().nan_to_num(posinf=0.0)
    return _stat_error("max_logits", max_logits, expected.max_logits, logit_tolerance(expected, d_qk) / unit + steps)


def lse_error(
    lse: torch.Tensor,
    expected: Attention,
    d_qk: int,
    topk: int,
    lse_base: str,
    k_error: float = 0.0,
    *,
    short: bool = False,
) -> Figure:
    """Error of `lse` [tokens, heads]: that of a logit, of the fp32 sum of `topk` weights, and of exp2 and log2.

    short: logits are products of fp8 that sm90 adds.
    """
    k_error += short_error(d_qk) if short else 0.0
    unit = math.log(2) if lse_base == "2" else 1.0
    summed = FP32_STEP * (topk / 16 + 32)
    # exp2 and log2 are good to 2 ulp on a GPU.
    steps = 8 * FP32_STEP * expected.lse.abs().nan_to_num(posinf=0.0)
    return _stat_error("lse", lse, expected.lse, (logit_tolerance(expected, d_qk, k_error) + summed) / unit + steps)
