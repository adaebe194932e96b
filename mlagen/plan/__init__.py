"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.cache import CachePlan, layout_chunks
from mlagen.plan.chunks import Chunk
from mlagen.plan.dense_decode import DENSE_DECODE_WRAPPERS, DenseDecodePlan
from mlagen.plan.dense_fwd import DenseFwdPlan, DenseFwdRow, DenseFwdTile
from mlagen.plan.index_union import IndexUnionPlan
from mlagen.plan.merge_states import MergeStatesPlan
from mlagen.plan.plan import ROWS_WRAPPERS, Plan, SparseFwdPlan, load_plan, make_plan, needed
from mlagen.plan.sm90 import SM90, Sm90Plan, Sm90Row
from mlagen.plan.sparse_decode import SparseDecodePlan
from mlagen.plan.splits import CombineTile, SplitsPlan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import Tile, TileRow

__all__ = [
    "DENSE_DECODE_WRAPPERS",
    "ROWS_WRAPPERS",
    "SM90",
    "TARGETS",
    "CachePlan",
    "Chunk",
    "CombineTile",
    "DenseDecodePlan",
    "DenseFwdPlan",
    "DenseFwdRow",
    "DenseFwdTile",
    "IndexUnionPlan",
    "MergeStatesPlan",
    "Plan",
    "Sm90Plan",
    "Sm90Row",
    "SparseDecodePlan",
    "SparseFwdPlan",
    "SplitsPlan",
    "Target",
    "Tile",
    "TileRow",
    "layout_chunks",
    "load_plan",
    "make_plan",
    "needed",
]
