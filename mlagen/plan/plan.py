"""The plan of one spec: the families of kernels that its package has, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlagen.errors import LimitError, Place
from mlagen.layout import CacheLayout
from mlagen.plan.attention import LatentFamily
from mlagen.plan.families import FAMILIES, OPS
from mlagen.plan.families.dense_decode import DenseDecodePlan
from mlagen.plan.families.sparse_decode import SparseDecodePlan
from mlagen.plan.families.sparse_fwd import SparseFwdPlan
from mlagen.plan.family import AnyFamily, Family, TiledFamily
from mlagen.plan.indexer import IndexerRows, indexer_rows_of
from mlagen.plan.ops import OpsPlan, make_ops
from mlagen.plan.rows import Caches, caches_of, out_quant_of, out_rope_columns, rows_block_size
from mlagen.plan.sm90.caches import cache_refusal
from mlagen.plan.sm90.dense_decode import check_e4m3_p
from mlagen.plan.sm90.index_union import IndexUnionPlan
from mlagen.plan.sm90.index_union import refusal as union_refusal
from mlagen.plan.sm90.kernel import RESCALE_THRESHOLD_LOG2, refusal
from mlagen.plan.sm90.sparse_decode import multiplies_e4m3
from mlagen.plan.splits import SplitsPlan
from mlagen.plan.targets import SM90
from mlagen.plan.tiles.findings import Findings, findings_path, read_findings
from mlagen.plan.tiles.replacements import Replacement, read_replacements
from mlagen.plan.tiles.tuned import Tuned, TunedFiles
from mlagen.spec import QUANT_BLOCK, DenseAttention, OutQuant, SparseAttention, Spec, load


@dataclass(frozen=True)
class Plan:
    """All numbers that follow from a spec.

    Attributes:
        spec: the spec.
        caches: bytes of a token of its caches, and blocks of a row; None without.
        families: families with a wrapper in the spec, in the order of FAMILIES.
        ops: the wrappers as torch operators; None: the package registers none.
    """

    spec: Spec
    caches: Caches | None
    families: tuple[Family, ...]
    ops: OpsPlan | None = None

    def find(self, kind: type[AnyFamily]) -> AnyFamily | None:
        """The numbers of a family; None where the spec has none."""
        return next((family for family in self.families if isinstance(family, kind)), None)

    def of(self, kind: type[AnyFamily]) -> AnyFamily:
        """The numbers of a family. Raises LookupError: the spec has none."""
        found = self.find(kind)
        if found is None:
            raise LookupError(f"{self.spec.name} has no {kind.__name__}")
        return found

    @property
    def d_qk(self) -> int:
        """Columns of a KV row; 0 without latent rows."""
        return self.spec.model.d_qk

    @property
    def d_v(self) -> int:
        """Columns of V, the first ones of a KV row; 0 without latent rows."""
        return self.spec.model.v_head_dim

    @property
    def latent(self) -> tuple[LatentFamily, ...]:
        """The families of attention over latent rows."""
        return tuple(family for family in self.families if isinstance(family, LatentFamily))

    @property
    def tiled(self) -> tuple[TiledFamily[Any], ...]:
        """The families with a tile table."""
        return tuple(family for family in self.families if isinstance(family, TiledFamily))

    @property
    def fits(self) -> dict[str, str]:
        """Kernels that the tables of each family are valid for, by family."""
        return {family.NAME: family.fits for family in self.tiled}

    @property
    def layout(self) -> CacheLayout | None:
        """Bytes of a token of the cache; None without."""
        return self.caches.main.layout if self.caches else None

    @property
    def extra_layout(self) -> CacheLayout | None:
        """Bytes of a token of the second cache; None without."""
        return self.caches.extra.layout if self.caches and self.caches.extra else None

    @property
    def takes_pair(self) -> bool:
        """Whether attention over latent rows takes Q in two parts: where V ends its latent does, and RoPE begins."""
        dims = self.spec.model
        return dims.qk_rope_head_dim > 0 and dims.v_head_dim == dims.kv_lora_rank

    @property
    def rescale_threshold_log2(self) -> int:
        """Log2 of the threshold at which attention over latent rows rescales O on sm90."""
        attention = self.spec.attention
        exact = isinstance(attention, SparseAttention) and attention.rescaling == "exact"
        return 0 if exact else RESCALE_THRESHOLD_LOG2

    def no_sm90(self, family: LatentFamily) -> str | None:
        """Return the reason why a family has no sm90 kernel; None if it has one, or sm90 is no target."""
        if family.sm90 is not None or SM90 not in self.spec.targets:
            return None
        reason = "backend is triton" if self.spec.backend == "triton" else refusal(self.spec)
        if reason is None and self.layout is not None:
            reason = cache_refusal(self.spec, self.layout, self.extra_layout)
        return reason

    @property
    def indexer_rows(self) -> IndexerRows | None:
        """Keys of the indexer, and its query; None without a cache of them."""
        return indexer_rows_of(self.spec)

    @property
    def out_rope(self) -> int:
        """RoPE columns of the output, the last ones, that attention rotates back; 0: none."""
        return out_rope_columns(self.spec)

    @property
    def out_quant(self) -> OutQuant | None:
        """Quantisation of attention's output; None without."""
        return out_quant_of(self.spec)

    @property
    def union(self) -> IndexUnionPlan | None:
        """Numbers of the kernels of shared indices; None without."""
        sparse_fwd = self.find(SparseFwdPlan)
        return sparse_fwd.sm90_shared if sparse_fwd else None

    @property
    def rows_block_size(self) -> int | None:
        """Tokens a page of the unquantised rows that attention reads; None: flat rows."""
        return rows_block_size(self.caches)

    @property
    def splits(self) -> SplitsPlan:
        """The splits of attention over latent rows. Raises LookupError: the spec has none."""
        if not self.latent:
            raise LookupError(f"{self.spec.name} has no attention over latent rows in splits")
        return self.latent[0].splits  # which all have

    @property
    def attention(self) -> SparseAttention | DenseAttention:
        """The spec's attention over latent rows. Raises LookupError if there is none."""
        if self.spec.attention is None:
            raise LookupError(f"{self.spec.name} has no attention over latent rows")
        return self.spec.attention

    @property
    def sparse_attention(self) -> SparseAttention:
        """The spec's sparse attention. Raises LookupError if there is none."""
        if not isinstance(self.spec.attention, SparseAttention):
            raise LookupError(f"{self.spec.name} has no sparse attention")
        return self.spec.attention


def load_plan(path: Path, replacements: Sequence[Replacement] | None = None, findings: Findings | None = None) -> Plan:
    """Read a spec and the tuned tiles of its kernels, and derive the plan.

    Args:
        path: the spec.
        replacements: tiles that are replaced under some Tritons; None: those of `replacements.yaml`.
        findings: findings about the spec's kernels under some Tritons; None: those in the file next to the spec.

    Raises:
        SpecErrors: the spec, or a tuned file, is invalid.
        LimitError: as in `make_plan`. It names the place in a tuned file, or the spec's file.
    """
    spec = load(path)
    files = TunedFiles(spec.name, path.parent, spec.model.num_heads)
    replaced = read_replacements() if replacements is None else replacements
    found = read_findings(findings_path(spec.name, path.parent)) if findings is None else findings
    try:
        return make_plan(spec, Tuned(files=files, replacements=replaced, findings=found))
    except LimitError as error:
        raise LimitError(error.message, place=error.place or Place(path), hint=error.hint) from None


def make_plan(spec: Spec, tuned: Tuned | None = None) -> Plan:
    """Derives the plan.

    Args:
        spec: the validated spec.
        tuned: tuned tiles; None: only `replacements.yaml`.

    Raises:
        LimitError: the spec asks for the Gluon back end, or for shared indices, and cannot have them; or a target
            cannot hold any tile of these dims; one line with the arithmetic.
    """
    _check(spec)
    tuned = tuned or Tuned()
    caches = caches_of(spec)
    families = []
    for kind in FAMILIES:
        family = kind.make(spec, caches, tuned)
        if isinstance(family, TiledFamily):
            family = family.replaced((*tuned.replacements, *tuned.findings.replacements)).found(tuned.findings)
        families += [family] if family is not None else []
    plan = Plan(spec, caches, tuple(families), make_ops(spec, OPS))
    _check_blocks(plan)
    return plan


def _check_blocks(plan: Plan) -> None:
    """Raises LimitError: a block of V of a portable kernel has parts of the blocks that its output is quantised in."""
    for family in plan.latent if plan.out_quant else ():
        widths = [chunk.columns for chunk in family.chunks if chunk.in_v]
        if any(width % QUANT_BLOCK for width in widths):
            listed = ", ".join(map(str, widths))
            takes = f"multiples of {QUANT_BLOCK} columns, but it has {listed}"
            message = f"attention.out_quant: got a group of heads; {family.NAME} takes one with blocks of V of {takes}"
            raise LimitError(message)


def _check(spec: Spec) -> None:
    """Raises LimitError: the spec asks for kernels that cannot be emitted for it."""
    reason = refusal(spec)
    if spec.backend == "gluon" and reason is not None:
        raise LimitError(f"backend: got gluon, which cannot be emitted: {reason}")
    group = spec.attention.shared_indices if isinstance(spec.attention, SparseAttention) else None
    reason = union_refusal(spec, over_rows=bool(SparseFwdPlan.wanted(spec)))
    if group is not None and reason is not None:
        raise LimitError(f"attention.shared_indices: got {group}, which cannot be emitted: {reason}")
    if multiplies_e4m3(spec) and not SparseDecodePlan.wanted(spec):
        message = "attention.products: got mixed, which cannot be emitted: no wrapper computes attention over a cache"
        raise LimitError(message)
    if not DenseDecodePlan.wanted(spec):
        check_e4m3_p(spec, None, None)
