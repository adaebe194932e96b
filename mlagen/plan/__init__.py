"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.chunks import Chunk
from mlagen.plan.jobs import CompileJob
from mlagen.plan.layout import CacheField, CacheLayout, make_layout
from mlagen.plan.plan import CachePlan, Plan, SparsePlan, layout_fingerprint, load_plan, make_plan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import Tile, TileRow

__all__ = [
    "TARGETS",
    "CacheField",
    "CacheLayout",
    "CachePlan",
    "Chunk",
    "CompileJob",
    "Plan",
    "SparsePlan",
    "Target",
    "Tile",
    "TileRow",
    "layout_fingerprint",
    "load_plan",
    "make_layout",
    "make_plan",
]
