"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.cache import CachePlan, layout_chunks
from mlagen.plan.chunks import Chunk
from mlagen.plan.dense import DENSE_WRAPPERS, DensePlan
from mlagen.plan.hopper import HOPPER_TARGET, HopperPlan, HopperRow
from mlagen.plan.kvcache import KvcachePlan
from mlagen.plan.merge import MergePlan
from mlagen.plan.plan import ROWS_WRAPPERS, Plan, SparsePlan, load_plan, make_plan, needed
from mlagen.plan.splits import MergeTile, SplitsPlan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import Tile, TileRow
from mlagen.plan.union import UnionPlan
from mlagen.plan.varlen import VarlenPlan, VarlenRow, VarlenTile

__all__ = [
    "DENSE_WRAPPERS",
    "HOPPER_TARGET",
    "ROWS_WRAPPERS",
    "TARGETS",
    "CachePlan",
    "Chunk",
    "DensePlan",
    "HopperPlan",
    "HopperRow",
    "KvcachePlan",
    "MergePlan",
    "MergeTile",
    "Plan",
    "SparsePlan",
    "SplitsPlan",
    "Target",
    "Tile",
    "TileRow",
    "UnionPlan",
    "VarlenPlan",
    "VarlenRow",
    "VarlenTile",
    "layout_chunks",
    "load_plan",
    "make_plan",
    "needed",
]
