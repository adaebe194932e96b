"""The vLLM attention backends of a package: the supported specs, and the templates' contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlagen.backends.parts.base import GeneratedFile
from mlagen.backends.parts.common import TORCH_DTYPES, fields_of
from mlagen.errors import UsageError
from mlagen.layout import CacheLayout, PadField, compose
from mlagen.plan import Plan
from mlagen.spec import DenseAttention, SparseAttention
from mlagen.spec.stored import NAMED_LAYOUTS

SUMMARY = "Attention backend of vLLM"
ENTRY_POINTS = "vllm.general_plugins"  # vLLM calls the functions of this group in every process
INDEXER_BLOCK_SIZE = 64  # page size of vLLM's indexer; sparse attention takes multiples of it
CONVERTER = "triton_convert_req_index_to_global_index"  # replaces vLLM's own function of that name
PACKED = "fp8_ds_mla"  # vLLM's word for rows of one size; models without RoPE have zeros in the RoPE columns
PACKED_DIMS = (512, 64)  # kv_lora_rank and qk_rope_head_dim of those rows
V4 = "ue8m0_v4"  # rows of both caches of DeepSeek V4, also called fp8_ds_mla in vLLM
V4_DIMS = (448, 64)
V4_WRAPPERS = (
    "flash_mla_with_kvcache",
    "flash_mla_sparse_fwd",
    "dequantize_and_gather_k_cache",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
)
INDEXER = (
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
)  # functions that its indexer calls
TOPK = ("top_k_per_row_prefill", "top_k_per_row_decode")  # functions of its top-k
MERGER = "topk_merge"  # merges the picks of ranks that share a context
PREFILL = "flash_attn_varlen_func"  # function of an MLA prefill backend


@dataclass(frozen=True)
class Kind:
    """A kind of attention that vLLM calls.

    Attributes:
        template: template of the backend.
        wrappers: wrappers that the backend calls.
        cache_dtypes: vLLM's words (`--kv-cache-dtype`) for the cache.
        packed: whether a row has several fields, which vLLM passes as uint8.
        unserved: names of vLLM's own backends, by major compute capability. Where they do not run, the backend takes
            their place in the platform's list.
    """

    template: str
    wrappers: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    packed: bool = False
    unserved: tuple[tuple[int, tuple[str, ...]], ...] = ()


_SPARSE_PLACES = ((8, ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")),)

# By kind of attention and layout of the cache.
KINDS = {
    ("sparse", "bf16"): Kind("sparse", ("flash_mla_sparse_fwd",), ("auto", "bfloat16"), unserved=_SPARSE_PLACES),
    ("sparse", "fp16"): Kind("sparse", ("flash_mla_sparse_fwd",), ("auto", "float16"), unserved=_SPARSE_PLACES),
    ("sparse", "fp8_ds_mla"): Kind(
        "sparse", ("flash_mla_with_kvcache",), ("fp8_ds_mla",), packed=True, unserved=_SPARSE_PLACES
    ),
    ("sparse", V4): Kind("v4", V4_WRAPPERS, ("fp8", "fp8_ds_mla"), packed=True),
    ("dense", "bf16"): Kind("dense", ("flash_mla_with_kvcache",), ("auto", "bfloat16")),
    ("dense", "fp16"): Kind("dense", ("flash_mla_with_kvcache",), ("auto", "float16")),
    ("dense", "fp8_per_tensor"): Kind("dense", ("flash_mla_with_kvcache",), ("fp8", "fp8_e4m3")),
}


@dataclass(frozen=True)
class Init:
    """Context of the template of `__init__.py`.

    Attributes:
        title: the spec's.
        plugin: name of the plugin's Python package.
        backend_name: the backend's name.
        has_backend, has_prefill: whether the plugin has an attention backend, and an MLA prefill backend.
        unserved: see Kind.
        selects: whether the backend takes the place of vLLM's for V4.
        indexes, picks: whether the package replaces functions of vLLM's indexer and of its top-k.
    """

    title: str
    plugin: str
    backend_name: str
    has_backend: bool
    has_prefill: bool
    unserved: Sequence[tuple[int, Sequence[str]]]
    selects: bool
    indexes: bool
    picks: bool


@dataclass(frozen=True)
class Selector:
    """Context of the template that takes the place of vLLM's backend for V4. `name` is the spec's."""

    name: str


@dataclass(frozen=True)
class Indexing:
    """Context of the template that replaces functions of vLLM's indexer.

    Attributes:
        name: the spec's.
        indexes, picks: whether the package replaces functions of the indexer and of its top-k.
        merges: whether the package can merge the picks of ranks that share a context.
    """

    name: str
    indexes: bool
    picks: bool
    merges: bool


@dataclass(frozen=True)
class V4Backend:
    """Context of the template of V4's backend.

    Attributes:
        name: the spec's.
        backend_name: the backend's name.
        d_qk: columns of Q.
    """

    name: str
    backend_name: str
    d_qk: int


@dataclass(frozen=True)
class Backend(V4Backend):
    """Facts that the templates of the other backends take.

    Attributes:
        d_v: columns of V.
        torch_dtype: torch's name of the model's dtype.
        cache_dtypes, packed: see Kind.
        block_size: pages have a multiple of this many tokens.
        row_bytes: bytes of a row of the cache.
        takes_pair: whether Q's RoPE columns are in another tensor.
    """

    d_v: int
    torch_dtype: str
    cache_dtypes: Sequence[str]
    packed: bool
    block_size: int
    row_bytes: int
    takes_pair: bool


@dataclass(frozen=True)
class DenseBackend(Backend):
    """Context of the template of dense attention. `tensor_scale`: whether the cache has one scale."""

    tensor_scale: bool


@dataclass(frozen=True)
class SparseBackend(Backend):
    """Context of the template of sparse attention.

    Attributes:
        takes_length: whether attention may take lengths of index lists.
        converts: whether the package converts indices.
        shares, why_not_shared: whether ranks can share a context, and the reason why not, in words.
        picks, merges: see Indexing.
    """

    takes_length: bool
    converts: bool
    shares: bool
    why_not_shared: str
    picks: bool
    merges: bool


@dataclass(frozen=True)
class PrefillBackend:
    """Context of the template of the MLA prefill backend.

    Attributes:
        name: the spec's.
        backend_name: the backend's name.
        torch_dtype: torch's name of the model's dtype.
        qk_head_dim, v_head_dim: columns of a head before absorption.
    """

    name: str
    backend_name: str
    torch_dtype: str
    qk_head_dim: int
    v_head_dim: int


BACKENDS = {"v4": V4Backend, "dense": DenseBackend, "sparse": SparseBackend}  # contexts by template
# Facts of a plugin without one.
NO_BACKEND = {"unserved": (), "indexes": False, "picks": False, "merges": False, "selects": False}


def plugin_name(plan: Plan) -> str:
    """Return the name of the plugin's Python package. It contains the generated package under the spec's name."""
    return f"mlagen_vllm_{plan.spec.name}"


def backend_name(plan: Plan) -> str:
    """Return the backend's name for `--attention-backend`."""
    return f"MLAGEN_{plan.spec.name.upper()}"


def serve_command(plan: Plan) -> str:
    """Return the command that serves MODEL with the plugin.

    Raises:
        UsageError: vLLM calls no attention of the spec's kind.
    """
    kind, options = _kind(plan), ""
    if kind is not None:
        options += f" --attention-backend {backend_name(plan)} --kv-cache-dtype {kind.cache_dtypes[0]}"
    if _has_prefill(plan):
        options += """ --attention-config '{"mla_prefill_backend": "CUSTOM"}'"""
    return f"vllm serve MODEL{options}"


def plugin_files(plan: Plan) -> list[GeneratedFile]:
    """Return the files of the plugin, without the generated package.

    Raises:
        UsageError: vLLM calls no attention of the spec's kind.
    """
    kind = _kind(plan)
    facts = _facts(plan, kind) | (NO_BACKEND if kind is None else _backend_facts(plan, kind))

    def file(name: str, template: str, context: type[Any]) -> GeneratedFile:
        return GeneratedFile(name, f"vllm/{template}.py.jinja", vars(context(**fields_of(context, facts))))

    indexer = [file("indexer.py", "indexer", Indexing)] if facts["indexes"] or facts["picks"] else []
    selector = [file("selector.py", "selector", Selector)] if facts["selects"] else []
    backend = [] if kind is None else [file("backend.py", kind.template, BACKENDS[kind.template])]
    prefill = [file("prefill.py", "prefill", PrefillBackend)] if facts["has_prefill"] else []
    return [*backend, *prefill, *indexer, *selector, file("__init__.py", "__init__", Init)]


def _kind(plan: Plan) -> Kind | None:
    """Return the kind of the spec's attention over a cache; None if it has only prefill before absorption.

    Raises:
        UsageError: vLLM calls no attention of that kind; the message names the allowed values.
    """
    spec = plan.spec
    if spec.attention is None and PREFILL in spec.wrappers:
        return None
    if spec.attention is None or plan.layout is None:
        takes = f"{', '.join(f'{kind} over {layout}' for kind, layout in KINDS)}, or {PREFILL} among the wrappers"
        raise _refused("attention", "none over a cache", takes)
    kind = KINDS.get((spec.attention.kind, PACKED if _is_packed(plan.layout) else plan.layout.name))
    if kind is None:
        layouts = ", ".join(layout for of, layout in KINDS if of == spec.attention.kind)
        raise _refused("cache.layout", f"'{plan.layout.name}'", f"{layouts} with {spec.attention.kind} attention")
    missing = [wrapper for wrapper in kind.wrappers if wrapper not in spec.wrappers]
    if missing:
        takes = f"{', '.join(missing)} among them, which vLLM's calls run"
        raise _refused("wrappers", ", ".join(spec.wrappers), takes)
    if plan.out_rope:
        raise _refused("attention.out_rope", "'inverse'", "none: vLLM's layers rotate the output themselves")
    if kind.template == "v4":
        _check_v4(plan)
        return kind
    if spec.extra_cache is not None:
        raise _refused("extra_cache", "a second cache", "none")
    if spec.attention.window is not None:
        raise _refused("attention.window", str(spec.attention.window), "none")
    if isinstance(spec.attention, SparseAttention):
        _check_sparse(plan, spec.attention, kind)
    return kind


def _has_prefill(plan: Plan) -> bool:
    """Whether the package computes prefills before absorption. Raises UsageError if the spec has a window for them."""
    heads = plan.spec.multi_head
    if heads is None or PREFILL not in plan.spec.wrappers:
        return False
    if heads.window is not None:
        raise _refused("multi_head.window", str(heads.window), "none: vLLM's prefill calls name none")
    return True


def _check_v4(plan: Plan) -> None:
    """Refuse specs that differ from the attention of vLLM's V4 layers."""
    spec, rows = plan.spec, compose(NAMED_LAYOUTS[V4], *V4_DIMS)
    assert isinstance(spec.attention, SparseAttention)  # checked by _kind
    for field, layout in (("cache.layout", plan.layout), ("extra_cache", plan.extra_layout)):
        if layout is None or _read(layout) != _read(rows):
            got = "none" if layout is None else f"rows of {layout.row_bytes} bytes"
            raise _refused(field, got, f"the {rows.row_bytes} of '{V4}' that vLLM writes of {V4_DIMS[0]} columns")
    if spec.attention.topk_length == "none":
        raise _refused("attention.topk_length", "'none'", "'optional' or 'required': V4's layers pass one")
    if spec.attention.attn_sink == "none":
        raise _refused("attention.attn_sink", "'none'", "'optional' or 'required': V4's layers pass one")
    if plan.d_v != plan.d_qk:
        raise _refused("model.v_head_dim", str(plan.d_v), f"{plan.d_qk}: V4's V is the whole row")


def _is_packed(layout: CacheLayout) -> bool:
    """Whether rows have vLLM's fp8_ds_mla bytes, with padding in models without RoPE columns."""
    rows = compose(NAMED_LAYOUTS[PACKED], *PACKED_DIMS)
    read, written = _read(layout), _read(rows)
    sizes = (layout.plane_bytes, layout.page_multiple) == (rows.plane_bytes, rows.page_multiple)
    return sizes and read in (written, [field for field in written if field["name"] != "rope"])


def _read(layout: CacheLayout) -> list[dict[str, Any]]:
    """Return the fields of a layout without scale rules, which only writers use."""
    fields = [asdict(field) for field in layout.fields if not isinstance(field, PadField)]
    return [{name: value for name, value in field.items() if name != "rule"} for field in fields]


def _check_sparse(plan: Plan, attention: SparseAttention, kind: Kind) -> None:
    if attention.attn_sink == "required":
        raise _refused("attention.attn_sink", "'required'", "'none' or 'optional': vLLM's sparse MLA passes none")
    if plan.rows_block_size is not None:
        raise _refused("cache.block_size", str(plan.rows_block_size), "none: vLLM's indices name flat rows")
    assert plan.layout is not None  # checked by _kind
    if kind.packed and not _is_packed(plan.layout):
        size = compose(NAMED_LAYOUTS[PACKED], *PACKED_DIMS).row_bytes
        takes = f"the {size} that vLLM writes as {PACKED}; without RoPE the rest is a field of kind pad"
        raise _refused("cache.layout", f"rows of {plan.layout.row_bytes} bytes", takes)


def _refused(field: str, got: str, takes: str) -> UsageError:
    return UsageError(f"{field}: got {got}; a package for vLLM takes {takes}")


def _why_not_shared(plan: Plan) -> str:
    """Return why ranks cannot share a context of sparse attention, in words; empty if they can."""
    if CONVERTER not in plan.spec.wrappers:
        return f"the package lacks {CONVERTER}, which leaves a rank its own indices"
    return "" if plan.sparse_attention.lse_base == "e" else "ranks merge parts by an LSE of base e"


def _facts(plan: Plan, kind: Kind | None) -> dict[str, Any]:
    """Return the facts of every plugin."""
    heads = plan.spec.multi_head
    return {
        "name": plan.spec.name,
        "title": plan.spec.title,
        "plugin": plugin_name(plan),
        "backend_name": backend_name(plan),
        "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype],
        "has_backend": kind is not None,
        "has_prefill": _has_prefill(plan),
        "qk_head_dim": heads and heads.qk_head_dim,
        "v_head_dim": heads and heads.v_head_dim,
    }


def _backend_facts(plan: Plan, kind: Kind) -> dict[str, Any]:
    """Return the facts of an attention backend and of the indexer."""
    attention = plan.attention
    assert plan.layout is not None  # checked by _kind
    dense = isinstance(attention, DenseAttention)
    why_not_shared = "" if dense else _why_not_shared(plan)
    picks = not dense and set(TOPK) <= set(plan.spec.wrappers)
    block_size = plan.spec.cache.block_size if dense and plan.spec.cache is not None else INDEXER_BLOCK_SIZE
    return {
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "cache_dtypes": kind.cache_dtypes,
        "block_size": block_size or 1,
        "row_bytes": plan.layout.row_bytes,
        "packed": kind.packed,
        "tensor_scale": plan.layout.tensor_scale,
        "takes_pair": plan.takes_pair,
        "takes_length": not dense and plan.sparse_attention.topk_length != "none",
        "unserved": kind.unserved,
        "converts": CONVERTER in plan.spec.wrappers,
        "shares": not why_not_shared,
        "why_not_shared": why_not_shared,
        "selects": kind.template == "v4",
        "indexes": set(INDEXER) <= set(plan.spec.wrappers),
        "picks": picks,
        "merges": picks and kind.template == "sparse" and not why_not_shared and MERGER in plan.spec.wrappers,
    }
