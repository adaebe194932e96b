"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.attention import CachedFamily, LatentFamily, Work
from mlagen.plan.cache import CachePlan
from mlagen.plan.chunks import Chunk
from mlagen.plan.dense_decode import DenseDecodePlan
from mlagen.plan.dense_fwd import DenseFwdPlan
from mlagen.plan.family import Family, TiledFamily
from mlagen.plan.index_union import IndexUnionPlan
from mlagen.plan.indexer import IndexerRows
from mlagen.plan.indexer_cache import IndexerCachePlan
from mlagen.plan.indexer_select import IndexerSelectPlan
from mlagen.plan.indices import IndicesPlan
from mlagen.plan.merge_states import MergeStatesPlan
from mlagen.plan.mqa_logits import MqaLogitsPlan
from mlagen.plan.ops import OPS, Op, OpsPlan
from mlagen.plan.plan import FAMILIES, Plan, load_plan, make_plan
from mlagen.plan.rows import Caches, StoredCache, layout_chunks
from mlagen.plan.sm90 import SM90, Sm90Plan, Sm90Row
from mlagen.plan.sparse_decode import SparseDecodePlan
from mlagen.plan.sparse_fwd import SparseFwdPlan
from mlagen.plan.splits import CombineTile, SplitsPlan
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import DenseFwdRow, DenseFwdTile, Tile, TileRow
from mlagen.plan.topk import TopkPlan
from mlagen.plan.tuned import Tuned

__all__ = [
    "FAMILIES",
    "OPS",
    "SM90",
    "TARGETS",
    "CachePlan",
    "CachedFamily",
    "Caches",
    "Chunk",
    "CombineTile",
    "DenseDecodePlan",
    "DenseFwdPlan",
    "DenseFwdRow",
    "DenseFwdTile",
    "Family",
    "IndexUnionPlan",
    "IndexerCachePlan",
    "IndexerRows",
    "IndexerSelectPlan",
    "IndicesPlan",
    "LatentFamily",
    "MergeStatesPlan",
    "MqaLogitsPlan",
    "Op",
    "OpsPlan",
    "Plan",
    "Sm90Plan",
    "Sm90Row",
    "SparseDecodePlan",
    "SparseFwdPlan",
    "SplitsPlan",
    "StoredCache",
    "Target",
    "Tile",
    "TileRow",
    "TiledFamily",
    "TopkPlan",
    "Tuned",
    "Work",
    "layout_chunks",
    "load_plan",
    "make_plan",
]
