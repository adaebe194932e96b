"""The YAML spec of one model's attention as frozen pydantic models.

Field names are the field's standard terms (kv_lora_rank, qk_rope_head_dim, index_topk ...). No number is derived here:
that is the plan's. Every string is an enumeration or a pattern, so none can carry text into a template or a path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from mlagen.spec.base import SIZES_ONLY, Model
from mlagen.spec.dims import Dims
from mlagen.spec.epilogues import EPILOGUES, OutQuant, check_quant
from mlagen.spec.indexer import Indexer, IndexerCache, check_query
from mlagen.spec.needs import NEEDS, at_odds, lacks, runs_alone
from mlagen.spec.rules import free_name, free_namespace, refused, without_repeats
from mlagen.spec.stored import Cache, check_layout, check_one_tensor
from mlagen.spec.targets import Target

Presence = Literal["none", "optional", "required"]
SoftmaxScale = Annotated[float | None, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
WrapperName = Literal[
    "triton_mla_sparse_attention",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "decode_attention_fwd",
    "flash_attn_varlen_func",
    "merge_attn_states",
    "merge_attn_parts",
    "concat_and_cache_mla",
    "quantize_and_insert_k_cache",
    "dequantize_and_gather_k_cache",
    "gather_and_maybe_dequant_cache",
    "fused_deepseek_v4_qnorm_rope_kv_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "concat_and_cache_mla_rope_fused",
    "save_partial_states",
    "compress_norm_rope_store",
    "fused_save_compress_norm",
    "rope_quant_insert",
    "fused_inv_rope_fp8_quant",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "triton_convert_req_index_to_global_index",
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "indexer_qk_rope_quant_and_cache",
    "fwht128_quant_fp8",
    "kpool_compress_and_write_cache",
    "kpool_seed_tail_cache",
    "kpool_decode_update_and_maybe_write_cache_batched",
    "expand_pools_and_append_tail",
    "fp8_mqa_logits",
    "fp8_fp4_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "fp8_paged_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "top_k_per_row_prefill",
    "top_k_per_row_decode",
    "persistent_topk",
    "top_k_page_table_transform",
    "topk_merge",
    "indexer_topk",
    "paged_indexer_topk",
    "select_candidate_blocks",
    "candidate_mqa_logits",
    "paged_candidate_mqa_logits",
    "candidate_indexer_topk",
    "paged_candidate_indexer_topk",
]


_SCALE = "softmax scale for callers that pass None; default: {} ** -0.5"


class SparseAttention(Model):
    """Sparse attention: each query token attends to the `topk` KV rows that its indices name."""

    kind: Annotated[Literal["sparse"], Field(description="which KV rows a query token attends to")]
    topk: Annotated[int, Field(ge=1, le=65536, description=f"indices per query token (index_topk); {SIZES_ONLY}")]
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="additional indices per query token, for a sliding window; with a second cache, indices of "
            f"the first; {SIZES_ONLY}",
        ),
    ] = None
    attn_sink: Annotated[
        Presence, Field(description="whether callers pass a sink logit per head, added to the softmax's denominator")
    ] = "optional"
    topk_length: Annotated[
        Presence, Field(description="whether callers pass the number of valid leading indices per token")
    ] = "optional"
    lse_base: Annotated[Literal["e", "2"], Field(description="base of the returned log-sum-exp and of max_logits")] = (
        "e"
    )
    empty_row_lse: Annotated[
        Literal["+inf", "-inf"], Field(description="LSE of a token without a valid index; its output is 0")
    ] = "+inf"
    shared_indices: Annotated[
        Literal[2, 4] | None,
        Field(description="prefill on sm90: number of neighbouring tokens that share loads of KV rows; default: none"),
    ] = None
    rescaling: Annotated[
        Literal["lagged", "exact"],
        Field(
            description="conditional rescaling of O on sm90. lagged: P refers to a row maximum that may lag the true "
            "one "
            "by a factor of up to 2^7; exact: to the true maximum, with smaller errors and more time. Portable kernels "
            "are always exact"
        ),
    ] = "lagged"
    products: Annotated[
        Literal["model", "mixed"],
        Field(
            description="dtypes of the matrix products over a cache. model: the model's dtype; mixed: on sm90, QK in "
            "e4m3 "
            "and PV in fp16, if q is e4m3 with a q_scale and the cache is e4m3 with one scale per tensor"
        ),
    ] = "model"
    out_rope: Annotated[
        Literal["inverse"] | None,
        Field(
            description="rotation of the output's RoPE columns in the kernels. inverse: by minus the position of the "
            "query token, which callers pass with the table of cosines and sines; default: none"
        ),
    ] = None
    out_quant: Annotated[
        OutQuant | None,
        Field(description="quantisation of the rotated output in the kernels, by groups of heads; default: none"),
    ] = None
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("(kv_lora_rank + qk_rope_head_dim)"))] = None

    @field_validator("out_rope")
    @classmethod
    def _rotates_a_token_at_a_time(cls, out_rope: str | None, info: ValidationInfo) -> str | None:
        group = info.data.get("shared_indices")
        if out_rope is not None and group is not None:
            raise refused(f"got {out_rope}; takes none with shared_indices, which is {group}")
        return out_rope

    @field_validator("out_quant")
    @classmethod
    def _quantises_a_rotated_output(cls, out_quant: OutQuant | None, info: ValidationInfo) -> OutQuant | None:
        if out_quant is not None and info.data.get("out_rope", "") is None:
            raise refused("got a group of heads; takes none without out_rope")
        return out_quant

    @model_serializer(mode="wrap")
    def _names_epilogues_that_are_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out absent epilogues: the specs of packages without one, and their digests, are older than these."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if value is not None or name not in EPILOGUES}


class DenseAttention(Model):
    """Dense attention: each query token attends to all keys of its request, found by a block table."""

    kind: Annotated[Literal["dense"], Field(description="which KV rows a query token attends to")]
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=1 << 20,
            description="sliding window: most keys that a query token sees, including its own; default: all up to its "
            "own",
        ),
    ] = None
    lse_base: Annotated[Literal["e", "2"], Field(description="base of the returned log-sum-exp")] = "e"
    empty_row_lse: Annotated[
        Literal["+inf", "-inf"],
        Field(description="LSE of a token without keys, in flash_mla_with_kvcache; its output is 0"),
    ] = "+inf"
    products: Annotated[
        Literal["model", "fp8"],
        Field(
            description="dtypes of the matrix products on sm90 over e4m3 rows with one scale per tensor. model: QK in "
            "e4m3, PV in fp16; fp8: both in e4m3, faster with many heads and requests; out then errs by 0.5 % to 1.4 % "
            "instead of 0.2 %, and by more over long requests where columns of V have one sign"
        ),
    ] = "model"
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("(kv_lora_rank + qk_rope_head_dim)"))] = None

    @model_serializer(mode="wrap")
    def _names_products_that_are_asked_for(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the default: the specs of packages without the switch, and their digests, are older than it."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if (name, value) != ("products", "model")}


Attention: TypeAlias = Annotated[SparseAttention | DenseAttention, Field(discriminator="kind")]


class MultiHead(Model):
    """Multi-head attention before absorption, for prefill. Each query head, or group of them, has its own K and V.

    Number of query heads and dtype are those of `model`.
    """

    qk_head_dim: Annotated[int, Field(ge=1, le=512, description="columns of q and k per head, including RoPE columns")]
    v_head_dim: Annotated[int, Field(ge=1, le=512, description="columns of v per head")]
    num_kv_heads: Annotated[
        int | None,
        Field(
            ge=1,
            le=128,
            description="heads of k and v, a divisor of model.num_heads; default: model.num_heads; " + SIZES_ONLY,
        ),
    ] = None
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=1 << 20,
            description="sliding window: most keys that a row sees, including its own; callers pass window_size. "
            "Portable kernels only; default: none, and a window_size is refused",
        ),
    ] = None
    addressing: Annotated[
        Literal["pointers", "descriptors"],
        Field(
            description="loads of k and v. pointers: by addresses; descriptors: by tensor descriptors (TMA) on "
            "targets that have them"
        ),
    ] = "pointers"
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("qk_head_dim"))] = None


class Spec(Model):
    """The spec of one model's attention, read by `mlagen build`."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="name of the generated package; in a folder named specs, the file's name without .yaml",
            json_schema_extra={
                # editors and `load` show it if the pattern does not match
                "patternErrorMessage": "a lower-case letter, then up to 62 lower-case letters, digits or underscores"
            },
        ),
        AfterValidator(free_name),
    ]
    title: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}$",
            description="one line of plain ASCII for docstrings",
            json_schema_extra={
                "patternErrorMessage": "a letter or digit, then up to 78 letters, digits, spaces or any of ()+,./:;_-"
            },
        ),
    ]
    model: Annotated[Dims, Field(description="number of heads and head dims of the model")]
    attention: Annotated[
        Attention | None,
        Field(description="attention over latent rows, sparse or dense; leave it out if no wrapper computes it"),
    ] = None
    cache: Annotated[
        Cache | None, Field(description="layout of the KV cache; leave it out if no wrapper reads or writes one")
    ] = None
    extra_cache: Annotated[Cache | None, Field(description="second cache, read by attention in the same softmax")] = (
        None
    )
    multi_head: Annotated[
        MultiHead | None,
        Field(description="head dims of attention before absorption; leave it out if no wrapper computes it"),
    ] = None
    indexer: Annotated[
        Indexer | None,
        Field(
            description="lightning indexer, which picks the keys of sparse attention; leave it out if no wrapper "
            "computes it"
        ),
    ] = None
    indexer_cache: Annotated[
        IndexerCache | None,
        Field(description="layout of the cache of the indexer's keys; leave it out if no wrapper reads or writes it"),
    ] = None
    wrappers: Annotated[
        tuple[WrapperName, ...],
        Field(min_length=1, description="wrappers to generate, by API name", json_schema_extra={"uniqueItems": True}),
        AfterValidator(without_repeats),
    ]
    targets: Annotated[
        tuple[Target, ...],
        Field(min_length=1, description="GPU architectures to compile for", json_schema_extra={"uniqueItems": True}),
        AfterValidator(without_repeats),
    ]
    backend: Annotated[
        Literal["auto", "triton", "gluon"],
        Field(
            description="kernels to emit. auto: portable Triton kernels, and Gluon kernels on sm90; triton: only "
            "portable ones; gluon: fail if a spec has no Gluon kernel"
        ),
    ] = "auto"
    partials: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Field(
            description="dtype of the partial outputs that split-KV stores; the combine kernel adds them in fp32. fp16 "
            "is stored with a power-of-two scale per row"
        ),
    ] = "fp32"
    ops: Annotated[bool, Field(description="register the wrappers as torch operators, torch.ops.<name>.*")] = False

    @property
    def attention_kind(self) -> str | None:
        """The kind of attention: sparse, dense, or None."""
        return None if self.attention is None else self.attention.kind

    @field_validator("attention")
    @classmethod
    def _rotates_columns_of_v(cls, attention: Attention | None, info: ValidationInfo) -> Attention | None:
        model = info.data.get("model")  # absent if `model` itself is invalid
        if model is None or not isinstance(attention, SparseAttention) or attention.out_rope is None:
            return attention
        got = f"got {attention.out_rope}; takes a value only with"
        if model.rope != "gptj" or model.kv_lora_rank % 2:
            found = f"{model.rope or 'none'} and {model.kv_lora_rank}"
            raise refused(f"{got} model.rope gptj and an even model.kv_lora_rank, but they are {found}", "out_rope")
        row = model.d_qk
        if model.v_head_dim != row:
            found = f"model.v_head_dim is {model.v_head_dim}"
            raise refused(f"{got} RoPE columns in V, a row of {row} columns, but {found}", "out_rope")
        return attention

    @field_validator("attention")
    @classmethod
    def _quantises_whole_blocks_of_v(cls, attention: Attention | None, info: ValidationInfo) -> Attention | None:
        model = info.data.get("model")
        if model is None or not isinstance(attention, SparseAttention) or attention.out_quant is None:
            return attention
        check_quant(attention.out_quant, model.num_heads, model.v_head_dim)
        return attention

    @field_validator("cache", "extra_cache")  # a field validator also runs if other fields are invalid
    @classmethod
    def _cache_holds_the_models_columns(cls, cache: Cache | None, info: ValidationInfo) -> Cache | None:
        model = info.data.get("model")  # absent if `model` itself is invalid
        if model is not None and cache is not None:
            if not model.kv_lora_rank:
                raise refused("got a cache; takes none without model.kv_lora_rank, the latent columns of a row")
            check_layout(cache, (model.kv_lora_rank, model.qk_rope_head_dim), model.dtype)
        return cache

    @field_validator("extra_cache")
    @classmethod
    def _topk_is_the_second_caches(cls, cache: Cache | None, info: ValidationInfo) -> Cache | None:
        attention = info.data.get("attention")
        if cache is None or attention is None:
            return cache
        if attention.kind != "sparse":
            raise refused("got a second cache; takes one only with attention of kind sparse")
        if attention.window is None:
            raise refused("got a second cache; takes one only with attention.window, the indices of the first cache")
        check_one_tensor(cache)
        first = info.data.get("cache")
        if first is not None and first.layout.tensors:
            raise refused(f"got a second cache; takes none with cache.layout in {' and '.join(first.layout.tensors)}")
        return cache

    @field_validator("multi_head")
    @classmethod
    def _heads_come_in_groups(cls, multi_head: MultiHead | None, info: ValidationInfo) -> MultiHead | None:
        model = info.data.get("model")
        heads = multi_head and multi_head.num_kv_heads
        if model is not None and heads and model.num_heads % heads:
            raise refused(f"got {heads}; takes a divisor of model.num_heads, {model.num_heads}", "num_kv_heads")
        return multi_head

    @field_validator("multi_head")
    @classmethod
    def _one_softmax_scale(cls, multi_head: MultiHead | None, info: ValidationInfo) -> MultiHead | None:
        attention = info.data.get("attention")
        scale = attention and attention.softmax_scale
        if multi_head is not None and attention is not None and multi_head.softmax_scale != scale:
            takes = "none" if scale is None else scale
            raise refused(
                f"got {multi_head.softmax_scale or 'none'}; takes {takes}, the value of attention.softmax_scale",
                "softmax_scale",
            )
        return multi_head

    @field_validator("indexer")
    @classmethod
    def _picks_what_attention_takes(cls, indexer: Indexer | None, info: ValidationInfo) -> Indexer | None:
        attention = info.data.get("attention")  # absent if it is invalid itself
        if indexer is None or attention is None:
            return indexer
        if attention.kind != "sparse":
            raise refused("got an indexer; takes one only with attention of kind sparse")
        if attention.topk != indexer.topk:
            raise refused(f"got {indexer.topk}; takes {attention.topk}, the value of attention.topk", "topk")
        return indexer

    @field_validator("indexer_cache")
    @classmethod
    def _holds_the_indexers_keys(cls, cache: IndexerCache | None, info: ValidationInfo) -> IndexerCache | None:
        indexer, model = info.data.get("indexer"), info.data.get("model")
        if cache is None or model is None or "indexer" not in info.data:
            return cache
        if indexer is None:
            raise refused("got a cache; takes none without indexer")
        check_one_tensor(cache)
        check_layout(cache, (indexer.head_dim, 0), model.dtype)
        check_query(indexer, cache)
        return cache

    @field_validator("wrappers")
    @classmethod
    def _wrappers_have_what_they_need(cls, wrappers: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for index, name in enumerate(wrappers):
            fault = lacks(name, info.data) or runs_alone(name, wrappers) or at_odds(name, wrappers, info.data)
            if fault is not None:
                raise refused(f"got {name}, which {fault}", index)
        return wrappers

    @field_validator("partials")
    @classmethod
    def _partials_are_those_of_splits(cls, partials: str, info: ValidationInfo) -> str:
        wrappers = info.data.get("wrappers")  # absent if they are invalid themselves
        if partials != "fp32" and wrappers is not None and not any(NEEDS[name].attention for name in wrappers):
            raise refused(f"got {partials}; takes fp32, since no wrapper computes attention in splits")
        return partials

    @field_validator("ops")
    @classmethod
    def _the_name_is_a_namespace(cls, ops: bool, info: ValidationInfo) -> bool:
        if ops and getattr(info.data.get("attention"), "out_quant", None) is not None:
            raise refused("got True; takes False with attention.out_quant")
        return free_namespace(ops, info.data.get("name"))
