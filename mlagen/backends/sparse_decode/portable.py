"""Sparse decode over any cache layout: single-pass and split-KV kernels, and FlashMLA's wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import layout, splits, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cached import Cache, Rows, cache_context, rows_context, type_of
from mlagen.backends.parts.common import Block
from mlagen.backends.parts.splits import (
    ANGLE_ARGUMENTS,
    QUANT_ARGUMENTS,
    Attention,
    AttentionWrappers,
    OutRope,
    QuantisedOut,
    attention_context,
    presences,
    rotated,
    values_of,
)
from mlagen.layout import CacheLayout
from mlagen.plan import Caches, MergeStatesPlan, Plan, Sm90Plan, SparseDecodePlan
from mlagen.plan.sm90.caches import load_unit
from mlagen.plan.splits import PartialRow
from mlagen.plan.tiles.findings import LeftOut

OFFSET_BITS = 32  # alignment of the sm90 kernel's rows
MODULE, MODULE_OF_KERNELS = "sparse_decode", "_sparse_decode_kernels"


def _prefixed(caches: Caches) -> list[tuple[str, CacheLayout]]:
    """Return (prefix of argument names, layout) of each cache."""
    extra = [("extra_", caches.extra.layout)] if caches.extra else []
    return [("", caches.main.layout), *extra]


@dataclass(frozen=True)
class Operands:
    """Run-time arguments for a list of indices and its cache.

    Attributes:
        variable, type: variable that holds them, and its class.
        tensors, sizes, cache_strides, index_strides: names of the arguments.
        cache_parameters: strides of the cache and of its further tensors, as parameters.
    """

    variable: str
    type: str
    tensors: Sequence[str]
    sizes: Sequence[str]
    cache_strides: Sequence[str]
    index_strides: Sequence[str]
    cache_parameters: str


@dataclass(frozen=True)
class CachesFacts:
    """Facts of the caches that both templates take.

    Attributes:
        extra: layout of the second cache; None without.
        caches: the cache, and the second one if it has another layout.
        both: whether one kernel over one layout reads both caches.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
        has_tensor_scale: whether a cache has one scale.
    """

    extra: CacheLayout | None
    caches: Sequence[Cache]
    both: bool
    needs_e4m3: bool
    has_tensor_scale: bool


@dataclass(frozen=True)
class Kernels(Attention, CachesFacts, Rows):
    """Context of the kernels' template.

    Attributes:
        layout: the cache's layout.
        has_sink, sink_required: whether attention may take a sink, and whether it must.
        has_topk_length, length_required: whether it may take lengths of index lists, and whether it must.
        partials: a row of a split's results.
        queries: names of the blocks of Q, as text.
        operands: run-time arguments for each list of indices.
        kernel_imports: modules that the kernels import.
        out_rope, out_quant: the rotation and the quantisation of the output; None without.
        rotated: blocks of V with columns that the epilogue rotates.
        angle_arguments, quant_arguments: a further line of kernels' arguments, for positions and angles and for a
            quantised output; empty without.
    """

    layout: CacheLayout
    has_sink: bool
    sink_required: bool
    has_topk_length: bool
    length_required: bool
    partials: PartialRow
    queries: str
    operands: Sequence[Operands]
    kernel_imports: Sequence[str]
    out_rope: OutRope | None
    out_quant: QuantisedOut | None
    rotated: Sequence[Block]
    angle_arguments: str
    quant_arguments: str


@dataclass(frozen=True)
class Variants:
    """Optional tensors of calls.

    Attributes:
        warms_length, warms_sink: whether calls for compilation have these tensors.
        optional_names: names of the optional tensors, as entries of a tuple.
        optional: every choice of them that a kernel is compiled for, as text.
    """

    warms_length: bool
    warms_sink: bool
    optional_names: str
    optional: Sequence[str]


@dataclass(frozen=True)
class Wrappers(AttentionWrappers, CachesFacts, Variants):
    """Context of the wrappers' template.

    Attributes:
        backend: the spec's back end.
        has_sink, sink_required: whether attention may take a sink, and whether it must.
        default_scale, default_scale_said: text for the softmax scale.
        out_rope, out_quant: the rotation and the quantisation of the output; None without.
        sm90, e4m3: plans of the sm90 kernels for a Q of the model's dtype and for an e4m3 Q; None without.
        sm90_kernels: names and modules of the sm90 kernels.
        left_out: kernels that the tile table leaves out.
        q_dtype: dtype of Q, as text.
        quantised_said: whether the cache is quantised, in docstrings.
        row_unit: bytes of a unit that the sm90 kernel loads.
        loads_at: rows begin at multiples of this many bytes.
        offset_bits: bits of a byte offset in the sm90 kernel.
        imports: modules that the wrappers import.
        has_bytes: whether a cache is quantised.
        tensors: tensors of a call, by the names of kernel arguments.
    """

    backend: str
    has_sink: bool
    sink_required: bool
    default_scale: str
    default_scale_said: str
    out_rope: OutRope | None
    out_quant: QuantisedOut | None
    sm90: Sm90Plan | None
    e4m3: Sm90Plan | None
    sm90_kernels: Sequence[tuple[str, str]]
    left_out: Sequence[LeftOut]
    q_dtype: str
    quantised_said: str
    row_unit: int
    loads_at: int
    offset_bits: int
    imports: Sequence[str]
    has_bytes: bool
    tensors: Sequence[str]


def _operands(plan: Plan, caches: Caches) -> list[Operands]:
    """Return the run-time arguments for each list of indices and its cache."""
    lengths, found = presences(plan).topk_length != "none", []
    for prefix, one in _prefixed(caches):
        tensors = ["k_cache_ptr", "indices_ptr"]
        tensors += ["topk_length_ptr"] if lengths else []
        tensors += ["k_scale_ptr"] if one.tensor_scale else []
        tensors += [f"{name}_ptr" for name in one.tensors]
        names = {
            "tensors": tensors,
            "sizes": ["num_slots", "page_size", "topk"],
            "cache_strides": ["page_stride"] if one.planar else ["page_stride", "row_stride"],
            "index_strides": ["indices_request_stride", "indices_token_stride"],
        }
        of_kind = {kind: [prefix + name for name in listed] for kind, listed in names.items()}
        lines = [of_kind["cache_strides"], *([f"{name}_page_stride", f"{name}_row_stride"] for name in one.tensors)]
        parameters = "\n    ".join(" ".join(f"{name}: tl.int64," for name in line) for line in lines)
        kind = type_of(prefix if caches.other else "")
        found.append(Operands(f"{prefix}cache", kind, cache_parameters=parameters, **of_kind))
    return found


def _caches(plan: Plan, family: SparseDecodePlan) -> CachesFacts:
    """Return the facts of the caches."""
    caches = [cache_context(plan, family.caches, family.caches.main)]
    if family.caches.other:
        caches.append(cache_context(plan, family.caches, family.caches.other))
    extra = family.caches.extra.layout if family.caches.extra else None
    return CachesFacts(
        extra=extra,
        caches=caches,
        both=extra is not None and len(caches) == 1,
        needs_e4m3=any(cache.needs_e4m3 for cache in caches),
        has_tensor_scale=any(one.tensor_scale for _, one in _prefixed(family.caches)),
    )


def _kernels(plan: Plan, family: SparseDecodePlan) -> Kernels:
    """Context of the kernels' template."""
    rows, of_caches = rows_context(family), _caches(plan, family)
    return Kernels(
        **attention_context(plan, Kernels),
        **vars(rows),
        **vars(of_caches),
        queries=", ".join(f"q_{chunk.name}" for chunk in rows.chunks),
        operands=_operands(plan, family.caches),
        kernel_imports=sorted([*(cache.module for cache in of_caches.caches), "_launch", "_splits"]),
        angle_arguments=ANGLE_ARGUMENTS if plan.out_rope else "",
        quant_arguments=QUANT_ARGUMENTS if plan.out_quant else "",
        rotated=rotated(plan, rows.v_chunks),
    )


def _wrappers(plan: Plan, family: SparseDecodePlan) -> Wrappers:
    """Context of the wrappers' template."""
    main, of_caches = family.caches.main.layout, _caches(plan, family)
    # Sizes that get names: rows counted in bytes, pages with several planes.
    sized = [one.module for one in of_caches.caches if one.layout.quantised or not one.layout.takes_heads]
    merging = ["merge_states"] if plan.find(MergeStatesPlan) else []
    return Wrappers(
        **attention_context(plan, Wrappers),
        **vars(of_caches),
        **vars(_variants(plan, of_caches)),
        sm90=family.sm90,
        e4m3=family.sm90_e4m3,
        sm90_kernels=list(family.sm90_kernels.items()),
        left_out=family.left_out,
        q_dtype="_q_dtype(q_scale)" if family.sm90_e4m3 else "DTYPE",
        quantised_said="quantised" if main.quantised else "not quantised",
        row_unit=load_unit(main),
        loads_at=max(one.loads_at for _, one in _prefixed(family.caches)),
        offset_bits=OFFSET_BITS + load_unit(main).bit_length() - 1,
        imports=[*sorted([*sized, "_calls", "_launch", MODULE_OF_KERNELS, "_splits", "_tiles"]), *merging],
        has_bytes=any(one.quantised for _, one in _prefixed(family.caches)),
        tensors=[
            "q",
            *(["q_rope"] if plan.takes_pair else []),
            *_tensors(plan, main, of_caches.extra, family.sm90_e4m3),
        ],
    )


def _tensors(plan: Plan, main: CacheLayout, extra: CacheLayout | None, e4m3: Sm90Plan | None) -> list[str]:
    """Return the tensors of a call except Q, by the names of kernel arguments."""
    scales = [*(["k_scale"] if main.tensor_scale else []), *(["q_scale"] if e4m3 else [])]
    found = ["k_cache", "indices", "topk_length", *scales, *main.tensors]
    if extra is not None:
        found += ["extra_k_cache", "extra_indices", "extra_topk_length"]
        found += ["extra_k_scale"] if extra.tensor_scale else []
    rotation = ["positions", "cos_sin_cache"] if plan.out_rope else []
    return [*found, "attn_sink", *rotation, "out", "workspace"]


def _variants(plan: Plan, caches: CachesFacts) -> Variants:
    """Return the optional tensors of calls, and every choice of them that a kernel is compiled for."""
    attention = plan.sparse_attention
    lengths, sinks = values_of(attention.topk_length, "length"), values_of(attention.attn_sink, "sink")
    names = ["topk_length"]
    choices: list[tuple[str, ...]] = [(length,) for length in lengths]
    if caches.extra is not None:
        names += ["extra_k_cache", "extra_indices", "extra_topk_length"]
        # A kernel over one layout gets the first cache in place of an absent second one, without a length.
        cache, absent = ("k_cache", "None") if caches.both else ("extra_k_cache", None)
        others = [(cache, "indices", length) for length in lengths if length != absent]
        choices = [(*one, *other) for one in choices for other in [("None", "None", "None"), *others]]
    return Variants(
        warms_length="length" in lengths,
        warms_sink="sink" in sinks,
        optional_names=", ".join(f'"{name}"' for name in (*names, "attn_sink")),
        optional=[", ".join((*one, sink)) for one in choices for sink in sinks],
    )


def private_files(plan: Plan, family: SparseDecodePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated(MODULE_OF_KERNELS, vars(_kernels(plan, family)))
    return [*layout.files(plan, family.caches), tiles.file(plan), splits.file(plan), kernels]


def modules(plan: Plan, family: SparseDecodePlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = [*family.wanted(plan.spec), "FlashMLASchedMeta", "get_mla_metadata", "kvcache_workspace_size"]
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), names)]
