"""Candidate blocks: their selection from logits, logits of the keys in them, and the top-k of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.logits import facts_of, q_blocks_of, shapes_of, width_of
from mlagen.layout import CacheLayout
from mlagen.plan import CandidatesPlan, IndexerSelectPlan, MqaLogitsPlan, Plan
from mlagen.plan.families.candidates import FLAT, FLAT_PICKS, PAGED, PAGED_PICKS, SELECT

MODULE = "candidates"


@dataclass(frozen=True)
class Facts:
    """Facts that all templates take.

    Attributes:
        block: keys of a block.
        selects: whether the package selects blocks.
        flat, paged: whether it has logits over flat keys and over pages.
        packed: whether a byte of a key holds two columns.
    """

    block: int
    selects: bool
    flat: bool
    paged: bool
    packed: bool


@dataclass(frozen=True)
class Kernels(Facts):
    """Context of the kernels' template.

    Attributes:
        q_blocks: names of the blocks of Q.
        key_offset: position of a key in its plane, as text.
    """

    q_blocks: str
    key_offset: str


@dataclass(frozen=True)
class Launches(Facts):
    """Context of the template of schedules and launches.

    Attributes:
        picks: whether the package has logits and top-k in one call.
        score_blocks, score_warps: blocks that a program scores at a time, and its warps.
    """

    picks: bool
    score_blocks: int
    score_warps: int


@dataclass(frozen=True)
class Wrappers(Facts):
    """Context of the wrappers' template. Without logits, their facts are None.

    Attributes:
        wrappers: the package's wrappers.
        picks: whether the package has logits and top-k in one call.
        imports: modules that the module imports, as text.
        num_heads: heads of the indexer.
        q_flat, q_paged, kv_flat: descriptions of a query and of flat keys for docstrings.
        key_layout: layout of a cached key.
        row_bytes, key_bytes: bytes of a cached key with its scales, and of only its plane.
        logits_mib: workspace of logits, in MiB.
    """

    wrappers: Sequence[str]
    picks: bool
    imports: str
    num_heads: int | None = None
    q_flat: str | None = None
    q_paged: str | None = None
    kv_flat: str | None = None
    key_layout: CacheLayout | None = None
    row_bytes: int | None = None
    key_bytes: int | None = None
    logits_mib: int | None = None


def _picks(plan: Plan) -> bool:
    return bool({FLAT_PICKS, PAGED_PICKS} & {*plan.spec.wrappers})


def _facts(plan: Plan, family: CandidatesPlan) -> Facts:
    """Return the facts that all templates take."""
    wrappers, logits = {*plan.spec.wrappers}, plan.find(MqaLogitsPlan)
    return Facts(
        block=family.block,
        selects=SELECT in wrappers,
        flat=bool({FLAT, FLAT_PICKS} & wrappers),
        paged=bool({PAGED, PAGED_PICKS} & wrappers),
        packed=logits is not None and logits.rows.packed,
    )


def _kernels(plan: Plan, family: CandidatesPlan) -> Kernels:
    logits = plan.find(MqaLogitsPlan)
    offset = logits.keys.offset if logits else 0
    return Kernels(
        **vars(_facts(plan, family)),
        q_blocks=q_blocks_of(logits) if logits else "",
        key_offset=f" + {offset}" if offset else "",
    )


def _launches(plan: Plan, family: CandidatesPlan) -> Launches:
    return Launches(
        **vars(_facts(plan, family)),
        picks=_picks(plan),
        score_blocks=family.score_blocks,
        score_warps=family.score_warps,
    )


def _wrappers(plan: Plan, family: CandidatesPlan) -> Wrappers:
    facts, picks = _facts(plan, family), _picks(plan)
    scores = facts.flat or facts.paged
    imports = ["_calls", "_candidates", *["_candidates_kernels"] * scores, "_launch"]
    imports += [*["_topk"] * (facts.selects or picks), *["indexer_select"] * picks, *["mqa_logits"] * scores]
    common = vars(facts) | {"wrappers": plan.spec.wrappers, "picks": picks, "imports": ", ".join(imports)}
    if not scores:
        return Wrappers(**common)
    logits = plan.of(MqaLogitsPlan)
    layout, shapes = logits.rows.layout, facts_of(plan, logits)
    of_picks, texts = plan.find(IndexerSelectPlan), shapes_of(shapes, width_of(logits))
    return Wrappers(
        **common,
        num_heads=shapes.num_heads,
        q_flat=texts["q_flat"],
        q_paged=texts["q_paged"],
        kv_flat=texts["kv_flat"],
        key_layout=layout,
        row_bytes=layout.row_bytes,
        key_bytes=shapes.key_bytes,
        logits_mib=of_picks.logits_bytes >> 20 if of_picks else None,
    )


def private_files(plan: Plan, family: CandidatesPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))
    return [tiles.file(plan), kernels, generated(f"_{MODULE}", vars(_launches(plan, family)))]


def modules(plan: Plan, family: CandidatesPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
