"""A case: a promise that a generated package has to hold, as plain data; and how one fails, or cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

SHARED_INDICES = "cuda, shared indices"  # a target: the kernels of neighbouring tokens that share rows
FEW_HEADS = "cuda, sm90 kernel of few heads"  # a target: that kernel; sparse calls have no more heads than it holds


class CaseFailedError(Exception):
    """A case failed. The message has the finding."""


class CaseSkippedError(Exception):
    """A case cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """A named promise.

    Attributes:
        name: unique in a package, `sparse_fwd: sink is +inf`.
        promise: the promise of the case, in one sentence.
        check: the check, a key of its family's checks.
        every_target: run on each target's tiles, not only on the first target's.
        attends: it computes attention.
        of_few_heads: the kernel of few heads may run it: it computes attention over rows of the model's dtype.
        simulated: sm90 kernels may run it, also in numpy.
        only_sm90: no other kernel runs it.
        in_full: it is left out of the set that stands for all cases.
    """

    name: str
    promise: str
    check: str = field(default="reference", kw_only=True)
    every_target: bool = field(default=False, kw_only=True)
    only_sm90: bool = field(default=False, kw_only=True)
    in_full: bool = field(default=False, kw_only=True)
    attends: ClassVar[bool] = False
    of_few_heads: ClassVar[bool] = False
    simulated: ClassVar[bool] = False

    @property
    def can_share(self) -> bool:
        """Whether neighbouring tokens of its call may load rows together."""
        return False
