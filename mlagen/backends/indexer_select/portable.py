"""Logits of the indexer and their top-k in one call: wrappers over the kernels of both families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.logits import facts_of, shapes_of, width_of
from mlagen.layout import CacheLayout
from mlagen.plan import IndexerSelectPlan, MqaLogitsPlan, Plan
from mlagen.plan.families.candidates import SELECT as SELECT_BLOCKS
from mlagen.plan.sm90.mqa_logits import FLAT_MODULE, PAGED_MODULE

MODULE = "indexer_select"


@dataclass(frozen=True)
class Wrappers:
    """Context of the wrappers' template.

    Attributes:
        flat, paged: the logits' wrappers over flat keys and over pages.
        picks_flat, picks_paged: whether the package has these wrappers of the family.
        num_heads: heads of the indexer.
        packed: whether a byte of a key holds two columns.
        key_layout: layout of a cached key.
        row_bytes: bytes of a cached key with its scales.
        sm90_flat, sm90_paged: whether the package has these sm90 kernels.
        q_flat, q_paged, kv_flat: descriptions of a query and of flat keys for docstrings.
        logits_mib: workspace of logits, in MiB.
        selects_blocks: whether calls also select candidate blocks.
    """

    flat: Sequence[str]
    paged: Sequence[str]
    picks_flat: bool
    picks_paged: bool
    num_heads: int
    packed: bool
    key_layout: CacheLayout
    row_bytes: int
    sm90_flat: bool
    sm90_paged: bool
    q_flat: str
    q_paged: str
    kv_flat: str
    logits_mib: int
    selects_blocks: bool


def _context(plan: Plan, family: IndexerSelectPlan) -> Wrappers:
    of_logits = plan.of(MqaLogitsPlan)
    logits, layout = facts_of(plan, of_logits), of_logits.rows.layout
    return Wrappers(
        flat=logits.flat,
        paged=logits.paged,
        picks_flat=family.FLAT in plan.spec.wrappers,
        picks_paged=family.PAGED in plan.spec.wrappers,
        num_heads=logits.num_heads,
        packed=logits.packed,
        key_layout=layout,
        row_bytes=layout.row_bytes,
        sm90_flat=FLAT_MODULE in of_logits.sm90,
        sm90_paged=PAGED_MODULE in of_logits.sm90,
        **shapes_of(logits, width_of(of_logits)),
        logits_mib=family.logits_bytes >> 20,
        selects_blocks=SELECT_BLOCKS in plan.spec.wrappers,
    )


def private_files(plan: Plan, family: IndexerSelectPlan) -> list[GeneratedFile]:
    """Return no files: its modules import those of the logits and of top-k."""
    return []


def modules(plan: Plan, family: IndexerSelectPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_context(plan, family))), family.wanted(plan.spec))]
