"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.cache import CachePlan, layout_chunks
from mlagen.plan.chunks import Chunk
from mlagen.plan.hopper import HOPPER_TARGET, HopperPlan, HopperRow
from mlagen.plan.jobs import CompileJob
from mlagen.plan.kvcache import KvcachePlan
from mlagen.plan.plan import ROWS_WRAPPERS, Plan, SparsePlan, load_plan, make_plan
from mlagen.plan.splits import MergeTile, SplitsPlan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import Tile, TileRow

__all__ = [
    "HOPPER_TARGET",
    "ROWS_WRAPPERS",
    "TARGETS",
    "CachePlan",
    "Chunk",
    "CompileJob",
    "HopperPlan",
    "HopperRow",
    "KvcachePlan",
    "MergeTile",
    "Plan",
    "SparsePlan",
    "SplitsPlan",
    "Target",
    "Tile",
    "TileRow",
    "layout_chunks",
    "load_plan",
    "make_plan",
]
