"""Whether a timed call is right: its result on some tokens against float64, in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mlagen.bench.shapes import Inputs
from mlagen.bench.tune.progress import one_line
from mlagen.errors import ToolError
from mlagen.verify.facts import Facts
from mlagen.verify.reference import sparse_attention
from mlagen.verify.tolerance import roundoff

CHECKED_TOKENS = 6
LIMIT_ROUNDOFFS = 2  # relative error that a right result stays below, in units of the dtype's roundoff


def error_limit(dtype: torch.dtype, partials: str = "fp32") -> float:
    """Relative Frobenius error from which a result is wrong; a right one has a quarter of it or so.

    `partials` are those of the package under test: a peer's result is held to no less.
    """
    return LIMIT_ROUNDOFFS * roundoff(dtype, partials)


def check_device(after: str) -> None:
    """Makes sure that the device still works after a failure.

    Raises:
        ToolError: it does not: an illegal access leaves the whole process without a device.
    """
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ToolError(f"the device stopped working at {after}: {one_line(error)}") from error


class Reference:
    """Float64 results of a few tokens of one input set.

    Args:
        inputs: the call.
        facts: the spec's.
    """

    def __init__(self, inputs: Inputs, facts: Facts) -> None:
        tokens = inputs.q.shape[0]
        count = min(tokens, CHECKED_TOKENS)
        self._tokens = torch.linspace(0, tokens - 1, count, device=inputs.q.device).long()
        lengths = inputs.topk_length
        self._expected = sparse_attention(
            inputs.q[self._tokens],
            inputs.kv,
            inputs.indices[self._tokens, 0],
            inputs.sm_scale,
            facts.d_v,
            inputs.attn_sink,
            None if lengths is None else lengths[self._tokens],
            facts.lse_base,
            facts.empty_row_lse,
        ).out

    def error(self, out: torch.Tensor) -> float:
        """Relative Frobenius error of `out` [tokens, num_heads, d_v] over the checked tokens; NaN if it holds one."""
        got = out[self._tokens].double()
        return float((got - self._expected).norm() / self._expected.norm())

    def error_of(self, call: Callable[[], torch.Tensor]) -> float:
        """Runs a call twice and gives the second result's error; its output takes the memory of the first, poisoned."""
        call().fill_(float("nan"))
        return self.error(call())
