"""A case: a promise that a generated package has to hold, as plain data; and how one fails, or cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

# Names of sm90 kernels; a package has some of them.
SM90, ROWS_32, Q_HALVES, E4M3 = "sm90", "sm90_rows32", "sm90_q_halves", "sm90_e4m3"
SWAP_AB, SHARED, COLLECT = "sm90_swap_ab", "sm90_shared", "sm90_collect"
SM90_KERNELS = (SM90, ROWS_32, Q_HALVES, E4M3, SWAP_AB, SHARED, COLLECT)


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

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the sm90 kernels that its call is forced to: those of packages that may run it."""
        return ()
