"""Facts of the indexer's logits for the wrappers that compute them, and for those that select from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.plan import MqaLogitsPlan, Plan
from mlagen.plan.families.mqa_logits import UNIT

FLAT = ("fp8_mqa_logits", "fp8_fp4_mqa_logits")
PAGED = ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")
SM90_FLAT, SM90_PAGED = "_mqa_logits_sm90", "_paged_mqa_logits_sm90"  # modules of the sm90 kernels
SCHEDULER = "get_paged_mqa_logits_metadata"
TORCH_TYPES = {"e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}


@dataclass(frozen=True)
class LogitsFacts:
    """Facts of the logits that several templates read.

    Attributes:
        flat, paged: the wrappers over flat keys and over pages.
        schedules: whether the package has the scheduler of paged calls.
        num_heads: heads of the indexer.
        stored: dtype of the keys.
        packed: whether a byte holds two columns.
        num_scales, scale_tile: scales of a key, and columns of each.
        key_bytes: bytes of a key in its plane.
        unit: keys that the scheduler counts at once.
    """

    flat: Sequence[str]
    paged: Sequence[str]
    schedules: bool
    num_heads: int
    stored: str
    packed: bool
    num_scales: int
    scale_tile: int
    key_bytes: int
    unit: int


def facts_of(plan: Plan, family: MqaLogitsPlan) -> LogitsFacts:
    """Return the facts of a package's logits."""
    wrappers, keys = plan.spec.wrappers, family.keys
    return LogitsFacts(
        flat=[name for name in FLAT if name in wrappers],
        paged=[name for name in PAGED if name in wrappers],
        schedules=SCHEDULER in wrappers,
        num_heads=family.rows.indexer.num_heads,
        stored=keys.dtype,
        packed=family.rows.packed,
        num_scales=family.scales.count,
        scale_tile=family.scales.tile,
        key_bytes=family.rows.layout.plane_bytes[keys.plane],
        unit=UNIT,
    )


def width_of(family: MqaLogitsPlan) -> int:
    """Return the elements of a key's row."""
    return family.rows.indexer.head_dim // (2 if family.rows.packed else 1)
