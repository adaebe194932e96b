"""Facts of the indexer's logits for the wrappers that compute them, and for those that select from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts.common import TORCH_DTYPES
from mlagen.plan import MqaLogitsPlan, Plan
from mlagen.plan.families.mqa_logits import SCHEDULER
from mlagen.plan.sm90.mqa_logits import FLAT, PAGED

BYTES_OF_A_WORD = 4  # byte scales that callers may pass as one int32


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
    )


def width_of(family: MqaLogitsPlan) -> int:
    """Return the elements of a key's row."""
    return family.rows.indexer.head_dim // (2 if family.rows.packed else 1)


def q_blocks_of(family: MqaLogitsPlan) -> str:
    """Return the names of the blocks of Q, as text."""
    blocks = len(family.rows.chunks)
    return ", ".join(f"q_{number}" for number in range(blocks)) if blocks > 1 else "q"


def shapes_of(logits: LogitsFacts, width: int) -> dict[str, str]:
    """Return descriptions of a query and of flat keys for docstrings. A row has `width` elements."""
    heads, scales = logits.num_heads, logits.num_scales
    if not logits.packed:
        name = TORCH_DTYPES.get(logits.stored)
        flat, paged = (f"{name} [{rows}, {heads}, {width}]" for rows in ("M", "B, next_n"))
        return {
            "q_flat": f"{flat}, any token and head stride, and None",
            "q_paged": f"{paged}, any stride of requests, tokens and heads, and None",
            "kv_flat": f"{name} [N, {width}], any row stride, and float32 [N], the keys and their scales",
        }
    words = scales == BYTES_OF_A_WORD

    def pair(rows: str, more: str) -> str:
        packed = f"int32 [{rows}{more}] or " if words else ""
        return f"int8 or uint8 [{rows}{more}, {width}], e2m1, and {packed}uint8 [{rows}{more}, {scales}]"

    return {
        "q_flat": pair("M", f", {heads}"),
        "q_paged": pair("B, next_n", f", {heads}"),
        "kv_flat": f"{pair('N', '')}, the keys and their scales",
    }
