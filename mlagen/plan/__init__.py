"""The plan: every number that follows from a spec, computed once."""

from mlagen.plan.attention import CachedFamily, LatentFamily, Work
from mlagen.plan.families import FAMILIES, OPS, SM90_MODULES
from mlagen.plan.families.cache import CachePlan
from mlagen.plan.families.candidates import CandidatesPlan
from mlagen.plan.families.compressor import CompressorPlan
from mlagen.plan.families.dense_decode import DenseDecodePlan
from mlagen.plan.families.dense_fwd import DenseFwdPlan
from mlagen.plan.families.indexer_cache import IndexerCachePlan
from mlagen.plan.families.indexer_select import IndexerSelectPlan
from mlagen.plan.families.indices import IndicesPlan
from mlagen.plan.families.kpool import KpoolPlan
from mlagen.plan.families.latents import LatentsPlan
from mlagen.plan.families.merge_states import MergeStatesPlan
from mlagen.plan.families.mqa_logits import MqaLogitsPlan
from mlagen.plan.families.out_quant import OutQuantPlan
from mlagen.plan.families.prologue import ProloguePlan
from mlagen.plan.families.sparse_decode import SparseDecodePlan
from mlagen.plan.families.sparse_fwd import SparseFwdPlan
from mlagen.plan.families.topk import TopkPlan
from mlagen.plan.family import Family, TiledFamily
from mlagen.plan.indexer import IndexerRows
from mlagen.plan.ops import Op, OpsPlan
from mlagen.plan.plan import Plan, load_plan, make_plan
from mlagen.plan.rows import Caches, StoredCache, layout_chunks
from mlagen.plan.sm90.index_union import IndexUnionPlan
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.splits import CombineTile, SplitsPlan
from mlagen.plan.targets import SM90, TARGETS, Target
from mlagen.plan.tiles.chunks import Chunk
from mlagen.plan.tiles.tile import DenseFwdRow, DenseFwdTile, Sm90Row, Tile, TileRow
from mlagen.plan.tiles.tuned import Tuned

__all__ = [
    "FAMILIES",
    "OPS",
    "SM90",
    "SM90_MODULES",
    "TARGETS",
    "CachePlan",
    "CachedFamily",
    "Caches",
    "CandidatesPlan",
    "Chunk",
    "CombineTile",
    "CompressorPlan",
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
    "KpoolPlan",
    "LatentFamily",
    "LatentsPlan",
    "MergeStatesPlan",
    "MqaLogitsPlan",
    "Op",
    "OpsPlan",
    "OutQuantPlan",
    "Plan",
    "ProloguePlan",
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
