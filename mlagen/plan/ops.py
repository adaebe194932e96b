"""Wrappers as operators of torch: facts that a wrapper's signature does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mlagen.plan.indexer import indexer_rows_of
from mlagen.spec import DenseAttention, Spec

NOTHING: Mapping[str, str | None] = MappingProxyType({})


@dataclass(frozen=True)
class Op:
    """Facts of an operator's schema beyond the wrapper's signature.

    Attributes:
        writes: arguments that the wrapper writes to if they are given, besides those that take a result. An operator
            with results takes only those without a default beside them.
        results: the results in order, each with the argument that takes it if there is one.
        leaves_out: arguments that no operator takes: they settle how many results there are, or are no schema's type.
        nested: the wrapper returns a pair in place of a result. Its operator returns two results instead.
    """

    writes: tuple[str, ...] = ()
    results: Mapping[str, str | None] = field(default_factory=lambda: NOTHING)
    leaves_out: tuple[str, ...] = ()
    nested: bool = False

    @property
    def written(self) -> tuple[str, ...]:
        """Every argument that the wrapper writes to."""
        takers = dict.fromkeys(taker for taker in self.results.values() if taker is not None)
        return (*takers, *self.writes)


# Of wrappers that return a pair in place of a tensor, or write one, where two columns share a byte.
PACKED_OPS: Mapping[str, Op] = {
    "fused_indexer_q_rope_quant": Op(
        (), {"q": None, "q_scale": None, "weights": None}, ("use_fp4", "weights_out_dtype"), nested=True
    ),
    "indexer_qk_rope_quant_and_cache": Op(("q_out", "weights_out", "kv_cache", "q_scale_out")),
}


@dataclass(frozen=True)
class OpsPlan:
    """The operators of a package.

    Attributes:
        namespace: `torch.ops.<namespace>`, the spec's name.
        constants: values of constants that stand in signatures, by their text there.
        ops: the facts of each wrapper's operator, by the wrapper's name.
    """

    namespace: str
    constants: Mapping[str, int | None]
    ops: Mapping[str, Op]


def make_ops(spec: Spec, ops: Mapping[str, Op]) -> OpsPlan | None:
    """Return the operators of a spec among those of all wrappers; None if it asks for none."""
    if not spec.ops:
        return None
    window = spec.attention.window if isinstance(spec.attention, DenseAttention) else None
    rows = indexer_rows_of(spec)
    packed = PACKED_OPS if rows and rows.packed else {}
    tensors = spec.cache.layout.tensors if spec.cache else ()
    writers = {"concat_and_cache_mla": Op(("kv_cache", *tensors))} if tensors else {}
    constants = {"D_V.value": spec.model.v_head_dim, "WINDOW": window}
    return OpsPlan(spec.name, constants, {**ops, **packed, **writers})
