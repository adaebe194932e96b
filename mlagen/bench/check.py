"""Whether a timed call is right, and the device still works: errors of results, in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mlagen.errors import ToolError
from mlagen.verify.tolerance import roundoff

CHECKED_TOKENS = 6
LIMIT_ROUNDOFFS = 2  # relative error that a right result stays below, in units of the dtype's roundoff


def error_limit(dtype: torch.dtype, partials: str = "fp32") -> float:
    """Relative Frobenius error from which a result is wrong; a right one has a quarter of it or so.

    `partials` are those of the package under test: a peer's result is held to no less.
    """
    return LIMIT_ROUNDOFFS * roundoff(dtype, partials)


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


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


def checked_tokens(count: int, device: torch.device) -> torch.Tensor:
    """Some of so many tokens, i64, each once and evenly spread: the first and the last are among them."""
    few = min(count, CHECKED_TOKENS)
    return torch.arange(few, device=device) * (count - 1) // max(1, few - 1)


class Reference:
    """Results of a few tokens of one input set.

    Args:
        tokens: which, i64 [n].
        expected: f64 [n, num_heads, d_v].
        worst: the error is that of the worst token, where some results are small beside others.
    """

    def __init__(self, tokens: torch.Tensor, expected: torch.Tensor, *, worst: bool = False) -> None:
        self._tokens, self._expected, self._worst = tokens, expected, worst

    def error_of(self, call: Callable[[], torch.Tensor]) -> float:
        """Runs a call twice and gives the second result's error; its output takes the memory of the first, poisoned.

        Args:
            call: gives [..., num_heads, d_v], all tokens in order.
        """
        call().fill_(float("nan"))
        out = call()
        got = out.reshape(-1, *out.shape[-2:])[self._tokens]
        if not self._worst:
            return relative_error(got, self._expected)
        return max(relative_error(*pair) for pair in zip(got, self._expected, strict=True))
