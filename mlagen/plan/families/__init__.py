"""Plans of the families, one module per family, and the registry that lists them."""

from __future__ import annotations

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
from mlagen.plan.family import Family
from mlagen.plan.ops import Op

FAMILIES: tuple[type[Family], ...] = (
    CachePlan,
    CandidatesPlan,
    CompressorPlan,
    DenseDecodePlan,
    DenseFwdPlan,
    IndexerCachePlan,
    IndexerSelectPlan,
    IndicesPlan,
    KpoolPlan,
    LatentsPlan,
    MergeStatesPlan,
    MqaLogitsPlan,
    OutQuantPlan,
    ProloguePlan,
    SparseDecodePlan,
    SparseFwdPlan,
    TopkPlan,
)
# Generated modules of the sm90 kernels of any package.
SM90_MODULES: tuple[str, ...] = tuple(module for family in FAMILIES for module in family.all_sm90_modules())
# Facts of every wrapper as an operator of torch.
OPS: dict[str, Op] = {name: op for family in FAMILIES for name, op in family.WRAPPERS.items()}
