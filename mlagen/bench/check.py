"""Whether a timed call is right, and the device still works: errors of whole results, in the same run.

Attention's results must be within the tolerance of FlashMLA's own tests: the whole tensor by its cosine difference,
each element by an absolute or a relative error. Beyond that each row has a limit of its own, since in a batch of
requests of many lengths a long one's values are too small to count in either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cached_property

import torch

from mlagen.errors import ToolError
from mlagen.verify.tolerance import roundoff

COSINE_DIFFERENCE = 5e-6  # of a whole result: half the square of its relative error
ELEMENT_ABSOLUTE = 8e-4 / 0.1  # FlashMLA's for values that are normal with deviation 0.1; ours have 1
ELEMENT_RELATIVE = 2.01 / 128
ROW_ROUNDOFFS = 2  # relative error that each row of a right result stays below, in units of the dtype's roundoff
COARSE_ROWS = 4  # largest error of a row, over that of the whole, where a peer's own arithmetic sets the limit
CHUNK_BYTES = 1 << 30  # of float64 that a reference holds at a time
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/]+/)+")  # of a path in a message


def error_limit(dtype: torch.dtype, partials: str = "fp32") -> float:
    """Relative Frobenius error that a right result does not exceed.

    `partials` are those of the package under test: a peer's result has the same limits.
    """
    return min(math.sqrt(2 * COSINE_DIFFERENCE), row_limit(dtype, partials))


def row_limit(dtype: torch.dtype, partials: str = "fp32") -> float:
    """The same of each row."""
    return ROW_ROUNDOFFS * roundoff(dtype, partials)


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, files without the folders of this machine."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {FOLDERS.sub('', lines[0])[:160]}" if lines else type(error).__name__


def check_device(after: str) -> None:
    """Makes sure that the device still works after a failure.

    Raises:
        ToolError: it does not: an illegal access leaves the whole process without a device.
    """
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ToolError(f"the device stopped working at {after}: {one_line(error)}") from error


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error, in float64; NaN if `got` holds one."""
    difference = got.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def wrong_share(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of entries that differ."""
    return float((got != expected).double().mean()) if got.shape == expected.shape else 1.0


def in_chunks(count: int, bytes_each: int) -> list[slice]:
    """Slices of `count` things of so many bytes, each of at most CHUNK_BYTES or of one thing."""
    step = max(1, CHUNK_BYTES // max(1, bytes_each))
    return [slice(first, min(count, first + step)) for first in range(0, count, step)]


def attention(
    q: torch.Tensor, kv: torch.Tensor, seen: torch.Tensor, scale: float, d_v: int, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention in float64, [tokens, heads, d_v]; 0 where a token sees no key.

    Args:
        q: [tokens, heads, d_qk].
        kv: rows [tokens or 1, keys, d_qk]; V is their leading columns.
        seen: bool [tokens, keys].
        scale: factor of the logits.
        d_v: columns of V.
        sink: f32 [heads], natural logits in the denominator; None: no sink.
    """
    rows = kv.double()
    logits = scale * (q.double() @ rows.transpose(1, 2))  # [tokens, heads, keys]
    logits.masked_fill_(~seen[:, None], -math.inf)
    lse = logits.logsumexp(2, keepdim=True)
    weights = logits.sub_(lse).exp_().nan_to_num_(nan=0.0)
    if sink is not None:
        weights *= torch.sigmoid(lse - sink.double()[:, None])
    return weights @ rows[..., :d_v]


class Reference:
    """The right result of one input set.

    Args:
        make: gives f64 [tokens, num_heads, d_v]; called once, where the first result is compared.
        row_limit: relative error that no token's result exceeds.
    """

    def __init__(self, make: Callable[[], torch.Tensor], row_limit: float) -> None:
        self._make, self._row_limit = make, row_limit

    @cached_property
    def expected(self) -> torch.Tensor:
        """The result, f64 [tokens, num_heads, d_v]."""
        return self._make()

    def error_of(self, call: Callable[[], torch.Tensor], limit: float | None = None) -> float:
        """Runs a call twice and gives the second result's error; its output takes the memory of the first, poisoned.

        Args:
            call: gives [..., num_heads, d_v], all tokens in order.
            limit: the error limit where a peer computes more coarsely; None: the usual one.

        Returns:
            Relative Frobenius error of the whole; that of the worst row where it breaks the row's limit, and infinity
            where an element breaks its own.
        """
        call().fill_(float("nan"))
        got = call().reshape(self.expected.shape)
        row_limit = self._row_limit if limit is None else COARSE_ROWS * limit
        square = size = worst = 0.0
        outside = False
        for some in in_chunks(len(got), 4 * self.expected[0].nbytes):
            expected = self.expected[some]
            difference = (got[some].double() - expected).abs_()
            missed, wanted = difference.flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
            square, size = square + float(missed.square().sum()), size + float(wanted.square().sum())
            row = torch.where(missed == 0, 0.0, missed / wanted).nan_to_num_(nan=math.inf, posinf=math.inf)
            worst = max(worst, float(row.max()))
            if limit is None:
                close = (difference < ELEMENT_ABSOLUTE) | (difference < ELEMENT_RELATIVE * (expected.abs() + 1e-6))
                outside |= not bool(close.all())
        if not worst <= row_limit:
            return worst
        return math.inf if outside else math.sqrt(square / size) if size else 0.0
