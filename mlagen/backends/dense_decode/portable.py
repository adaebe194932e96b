"""Dense decode: a kernel that partitions a batch by its lengths, and the wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import layout, splits, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cached import Cache, Rows, cache_context, rows_context
from mlagen.backends.parts.call import CallTable, Field, given
from mlagen.backends.parts.common import tuple_text
from mlagen.backends.parts.splits import Attention, AttentionWrappers, attention_context, kernel_names
from mlagen.layout import CacheLayout
from mlagen.plan import DenseDecodePlan, Plan, Sm90Plan
from mlagen.plan.splits import PartialRow

MODULE = "dense_decode"
FLASH, DECODE = "flash_mla_with_kvcache", "decode_attention_fwd"


@dataclass(frozen=True)
class Kernels(Attention, Rows):
    """Context of the kernels' template.

    Attributes:
        layout: the cache's layout.
        window: keys that a row of the model sees, including its own; None: all.
        partials: a row of a split's results.
        q_blocks: names of the blocks of Q, as text.
        cache: the cache.
    """

    layout: CacheLayout
    window: int | None
    partials: PartialRow
    q_blocks: str
    cache: Cache


@dataclass(frozen=True)
class Text:
    """Text of the wrappers for a window, a tensor's scale and sm90 kernels.

    Attributes:
        swap_ab_rows: rows of Q of the swap-AB kernels.
        kernel_inputs, tile_inputs: inputs that the kernel and the tile of a call depend on.
        window_passed, window_block: the window as an argument, and the further KV block that it may touch.
        kernel: the kernel of a call.
        pdl_passed: the argument for dependent launches.
        q_dtype, q_bytes: dtype of Q and bytes of its elements.
        scales_passed: the scales as arguments.
        kv_heads: number of KV heads.
        quantised_said: whether the cache is quantised, in docstrings.
        tensor_addresses: statements that add the addresses of further tensors.
    """

    swap_ab_rows: str
    kernel_inputs: str
    tile_inputs: str
    window_passed: str
    window_block: str
    kernel: str
    pdl_passed: str
    q_dtype: str
    q_bytes: str
    scales_passed: str
    kv_heads: str
    quantised_said: str
    tensor_addresses: str


@dataclass(frozen=True)
class Wrappers(AttentionWrappers, CallTable, Text):
    """Context of the wrappers' template.

    Attributes:
        window: keys that a row of the model sees, including its own; None: all.
        merge_import: import for merges, as text; empty without.
        default_scale, default_scale_said, scale_type, scale_said, scale_else: text for the softmax scale.
        plan: the family's plan.
        sm90: plan of the sm90 kernel; None without.
        sm90_kernels: names and modules of the sm90 kernels.
        kernel_names: kernels that a schedule names, as text.
        cache: the cache.
        has_tensor_scale: whether the cache has one scale.
        strides: accepted strides of the cache, for docstrings.
        rounds_partials: whether partials are stored in bf16 or fp16.
        options: options of a call.
        q_dtypes: accepted dtypes of Q, for docstrings.
        flash, decode: the wrappers of the package.
        empty_lse: LSE of a row without keys, as text.
    """

    window: int | None
    merge_import: str
    default_scale: str
    default_scale_said: str
    scale_type: str
    scale_said: str
    scale_else: str
    plan: DenseDecodePlan
    sm90: Sm90Plan | None
    sm90_kernels: Sequence[tuple[str, str]]
    kernel_names: str
    cache: Cache
    has_tensor_scale: bool
    strides: str
    rounds_partials: bool
    options: Sequence[Field]
    q_dtypes: str
    flash: bool
    decode: bool
    empty_lse: str


def _kernels(plan: Plan, dense: DenseDecodePlan) -> Kernels:
    """Context of the kernels' template."""
    return Kernels(
        **attention_context(plan, Kernels),
        **vars(rows_context(dense)),
        q_blocks=", ".join(f"q_{chunk.name}" for chunk in dense.chunks),
        cache=cache_context(plan, dense.caches, dense.caches.main),
    )


def _wrappers(plan: Plan, dense: DenseDecodePlan) -> Wrappers:
    """Context of the wrappers' template."""
    one, cache = dense.caches.main.layout, cache_context(plan, dense.caches, dense.caches.main)
    said_sm90 = "an sm90 kernel supports the call's addresses and page size."
    return Wrappers(
        **attention_context(plan, Wrappers),
        **vars(_call(plan, dense)),
        **vars(_text(dense)),
        plan=dense,
        sm90=dense.sm90,
        sm90_kernels=list(dense.sm90_kernels.items()),
        kernel_names=kernel_names([dense]),
        cache=cache,
        has_tensor_scale=one.tensor_scale,
        strides="any page, row and head stride" if one.takes_heads else cache.strides,
        rounds_partials=plan.splits.partials.rounds,
        options=given(
            Field("can_sm90", said=said_sm90) if dense.sm90 else None,
            Field("e4m3", said="q is e4m3.") if dense.sm90_rows32 else None,
        ),
        q_dtypes=plan.spec.model.dtype + (" or float8_e4m3fn" if one.tensor_scale else ""),
        flash=FLASH in plan.spec.wrappers,
        decode=DECODE in plan.spec.wrappers,
        empty_lse="-math.inf" if plan.attention.empty_row_lse == "-inf" else "math.inf",
    )


def _call(plan: Plan, dense: DenseDecodePlan) -> CallTable:
    """Return the table of a call's attributes: the constructor's arguments, and sizes and strides."""
    layout, pair, d_qk, d_v = dense.caches.main.layout, plan.takes_pair, dense.d_qk, dense.d_v
    window, scale = dense.window is not None, layout.tensor_scale
    main = layout.parts[0]
    row = main.row_bytes if layout.quantised else main.columns
    q = f"[requests, s_q, num_heads, {d_qk}]"
    inputs = (
        Field("q", rows="requests", said=f"{q}, or only its latent columns" if pair else q),
        Field("q_rope", rows="requests", said=f"[requests, s_q, num_heads, {d_qk - d_v}]") if pair else None,
        Field("k_cache", said=f"[pages, page_size, num_kv_heads, {row}]"),
        *(Field(name, said="[pages, page_size, columns]") for name in layout.tensors),
        Field("block_table", rows="requests"),
        Field("cache_seqlens", rows="requests"),
        Field("q_scale") if scale else None,
        Field("k_scale") if scale else None,
        Field("softmax_scale"),
        Field("causal", "int(causal)"),
        Field("max_keys"),
        Field("window") if window else None,
        Field("empty_lse"),
        Field("out", rows="tokens", said=f"[tokens, num_heads, {d_v}]"),
        Field("lse", rows="tokens", said="[tokens, num_heads]"),
        Field("partial", said="the workspace; None: allocated when the call runs"),
    )
    sizes = (
        Field("self.sm_scale_log2", "softmax_scale * LOG2E.value"),
        Field(
            "self.combine_block_s",
            "1 if schedule.overhead else schedule.combine.block_s",
            said="batch invariant: at fixed places",
        )
        if window
        else None,
        Field("self.num_requests, self.s_q, self.num_heads, _", "q.shape"),
        Field("self.num_pages, self.page_size, self.num_kv_heads, _", "k_cache.shape"),
        Field("self.tokens, self.request_rows", "self.num_requests * self.s_q, self.s_q * self.num_heads"),
        Field("self.unit_keys, self.num_programs", "schedule.unit_keys, schedule.programs"),
        Field("self.overhead, self.combine_units", "schedule.overhead, schedule.combine_units"),
        Field("self.later_slots", "schedule.later_slots"),
        Field("self.num_rows", "schedule.slots * self.request_rows"),
        Field("self.q_request_stride, self.q_token_stride, self.q_head_stride, _", "q.stride()"),
        Field("self.q_rope_request_stride, self.q_rope_token_stride, self.q_rope_head_stride, _", "q_rope.stride()")
        if pair
        else None,
        Field(
            f"self.page_stride, {'_' if layout.planar else 'self.row_stride'}, self.k_head_stride",
            "_splits.cache_strides(k_cache)",
        ),
        *(
            Field(f"self.{name}_page_stride, self.{name}_row_stride", f"_layout.tensor_strides({name})")
            for name in layout.tensors
        ),
        Field("self.block_table_stride, self.lse_token_stride", "block_table.stride(0), lse.stride(0)"),
        Field("self.out_token_stride, self.out_head_stride, _", "out.stride()"),
    )
    return CallTable(given(*inputs), given(*sizes))


def _text(dense: DenseDecodePlan) -> Text:
    """Text of the wrappers for a window, a tensor's scale and sm90 kernels."""
    layout, window, sm90 = dense.caches.main.layout, dense.window is not None, dense.sm90 is not None
    scale = layout.tensor_scale
    rows, e4m3 = "rows, batch_invariant", dense.sm90_rows32 is not None
    return Text(
        swap_ab_rows=tuple_text(one.block_h for one in dense.sm90_swap_ab),
        kernel_inputs=f"facts, requests, max_keys, {rows}, e4m3" if e4m3 else f"facts, requests, {rows}",
        tile_inputs="kernel, rows" if dense.sm90_swap_ab else "kernel",
        window_passed=", window" if window else "",
        window_block=" + 1" if window else "",
        kernel="kernel" if sm90 else '"portable"',
        pdl_passed=", pdl" if sm90 else "",
        q_dtype="_q_dtype(q_scale)" if scale else "DTYPE",
        q_bytes="q.element_size()" if scale else "DTYPE.itemsize",
        scales_passed=", q_scale, k_scale" if scale else "",
        kv_heads="h_kv" if layout.takes_heads else "1",
        quantised_said="quantised" if layout.quantised else "not quantised",
        tensor_addresses="".join(f"\n    addresses |= _layout.tensor_addresses({name})" for name in layout.tensors),
    )


def private_files(plan: Plan, family: DenseDecodePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated("_dense_decode_kernels", vars(_kernels(plan, family)))
    return [*layout.files(plan, family.caches), tiles.file(plan), splits.file(plan), kernels]


def modules(plan: Plan, family: DenseDecodePlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = family.wanted(plan.spec)
    flash = ["FlashMLASchedMeta", "get_mla_metadata"] if FLASH in wrappers else []
    names = sorted([*wrappers, *flash, "dense_workspace_size"])
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), names)]
