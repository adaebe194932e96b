"""What a user says of one model's attention: the YAML spec as frozen pydantic models.

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
    model_validator,
)

from mlagen.spec.base import Dtype, Model
from mlagen.spec.indexer import Indexer, IndexerCache, check_query
from mlagen.spec.needs import NEEDS, at_odds, lacks, runs_alone
from mlagen.spec.rules import free_name, free_namespace, refused, without_repeats
from mlagen.spec.stored import Cache, check_layout
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
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "triton_convert_req_index_to_global_index",
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
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
]


_SCALE = "softmax scale: factor of the logits where a caller of a wrapper passes None; absent: {} ** -0.5"


def _without(said: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A part's values without later fields that are at their defaults, so that hashes of older specs stay."""
    return {name: value for name, value in said.items() if name not in later or value != later[name]}


class Dims(Model):
    """Head dims after absorption: one row of K is `[latent | rope]`, V is its latent, or the whole row (DeepSeek V4).

    `v_head_dim` of a model's config.json is that of a head before absorption, which `multi_head` takes.

    Without `kv_lora_rank` a model has no latent rows, and its packages no wrapper that reads or writes them.
    """

    num_heads: Annotated[
        int, Field(ge=1, le=128, description="query heads before tensor parallelism; a rank may have fewer")
    ]
    kv_lora_rank: Annotated[
        int, Field(ge=0, le=1024, description="latent columns of a KV row (D_NOPE); 0: the model has no latent rows")
    ] = 0
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=256, description="RoPE columns of a KV row (D_ROPE); 0: none")] = 0
    v_head_dim: Annotated[
        int,
        Field(ge=0, le=1280, description="columns of V (D_V): kv_lora_rank, or plus qk_rope_head_dim the whole row"),
    ] = 0
    dtype: Annotated[Dtype, Field(description="dtype of q, of an unquantised cache and of the output")]

    @model_validator(mode="after")
    def _v_is_the_latent_or_the_row(self) -> Dims:
        if not self.kv_lora_rank:
            for name in ("qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name):
                    raise refused(f"got {getattr(self, name)}; takes 0 or nothing without kv_lora_rank", name)
            return self
        latent, row = self.kv_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim
        if self.v_head_dim not in (latent, row):
            whole = f", or {row} where V holds the RoPE columns too" if row > latent else ""
            raise refused(
                f"got {self.v_head_dim or '0 or nothing'}; takes {latent}{whole}: after absorption V is the latent of "
                "kv_lora_rank columns, and a head's own v_head_dim stands in multi_head alone",
                "v_head_dim",
            )
        return self


class SparseAttention(Model):
    """Attention of each query token over the `topk` KV rows that its indices name."""

    kind: Annotated[Literal["sparse"], Field(description="which KV rows a query token attends to")]
    topk: Annotated[int, Field(ge=1, le=65536, description="indices a query token (index_topk)")]
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="further indices a query token, of a sliding window; with a second cache, those of the first",
        ),
    ] = None
    attn_sink: Annotated[Presence, Field(description="per-head sink logit in the softmax's denominator")] = "optional"
    topk_length: Annotated[Presence, Field(description="per-token count of leading indices that are valid")] = (
        "optional"
    )
    lse_base: Annotated[Literal["e", "2"], Field(description="base of the returned log-sum-exp and of max_logits")] = (
        "e"
    )
    empty_row_lse: Annotated[
        Literal["+inf", "-inf"], Field(description="LSE of a row without a valid index; its output is 0")
    ] = "+inf"
    shared_indices: Annotated[
        Literal[2, 4] | None,
        Field(description="neighbouring tokens of a prefill that load each KV row once, on sm90; absent: each its own"),
    ] = None
    rescaling: Annotated[
        Literal["lagged", "exact"],
        Field(
            description="row maxima that weights refer to on sm90: lagging behind the true ones, by up to 2^7, or the "
            "true ones, which errs less and takes longer; portable kernels take those always"
        ),
    ] = "lagged"
    products: Annotated[
        Literal["model", "mixed"],
        Field(
            description="what attention over a cache multiplies; mixed: on sm90 scores in e4m3 where q is e4m3, with a "
            "q_scale, and so is the cache, with one scale a tensor; V in fp16"
        ),
    ] = "model"
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("(kv_lora_rank + qk_rope_head_dim)"))] = None

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        later = {"shared_indices": None, "rescaling": "lagged", "products": "model", "softmax_scale": None}
        return _without(dump(self), later)


class DenseAttention(Model):
    """Attention of each query token over all keys of its request, which a block table finds."""

    kind: Annotated[Literal["dense"], Field(description="which KV rows a query token attends to")]
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=1 << 20,
            description="most keys that a query token sees, its own with them; absent: all up to its own",
        ),
    ] = None
    lse_base: Annotated[Literal["e", "2"], Field(description="base of the returned log-sum-exp")] = "e"
    empty_row_lse: Annotated[
        Literal["+inf", "-inf"],
        Field(description="LSE of a row without a key, of flash_mla_with_kvcache; its output is 0"),
    ] = "+inf"
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("(kv_lora_rank + qk_rope_head_dim)"))] = None

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(dump(self), {"softmax_scale": None})


Attention: TypeAlias = Annotated[SparseAttention | DenseAttention, Field(discriminator="kind")]


class MultiHead(Model):
    """Multi-head attention before absorption, as prefill runs it: query heads have K and V of their own, or in groups.

    `model.num_heads` and `model.dtype` are its too.
    """

    qk_head_dim: Annotated[int, Field(ge=1, le=512, description="columns of a row of q and k, RoPE's among them")]
    v_head_dim: Annotated[int, Field(ge=1, le=512, description="columns of a row of v")]
    num_kv_heads: Annotated[
        int | None,
        Field(ge=1, le=128, description="heads of k and v, a divisor of model.num_heads; absent: as many"),
    ] = None
    addressing: Annotated[
        Literal["pointers", "descriptors"],
        Field(description="how blocks of k and v are loaded; descriptors: copied by them where the target can (TMA)"),
    ] = "pointers"
    softmax_scale: Annotated[SoftmaxScale, Field(description=_SCALE.format("qk_head_dim"))] = None

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without(dump(self), {"softmax_scale": None})


class Spec(Model):
    """One model's attention: what `mlagen build` reads."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="name of the generated package; in a folder specs/, the file's name without .yaml",
            json_schema_extra={
                # editors show it where the pattern fails, and so does `load`
                "patternErrorMessage": "a lower-case letter, then up to 62 lower-case letters, digits or underscores"
            },
        ),
        AfterValidator(free_name),
    ]
    title: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}$",
            description="one line for docstrings, plain ASCII",
            json_schema_extra={
                "patternErrorMessage": "a letter or digit, then up to 78 letters, digits, spaces or any of ()+,./:;_-"
            },
        ),
    ]
    model: Annotated[Dims, Field(description="head counts and dims of the model")]
    attention: Annotated[
        Attention | None, Field(description="which attention the kernels compute; absent: none that needs to be told")
    ] = None
    cache: Annotated[
        Cache | None, Field(description="how the KV cache is stored; absent: no wrapper reads or writes one")
    ] = None
    extra_cache: Annotated[
        Cache | None, Field(description="a second cache that attention over the cache reads in the same softmax")
    ] = None
    multi_head: Annotated[
        MultiHead | None,
        Field(description="dims of multi-head attention; absent: no wrapper computes it"),
    ] = None
    indexer: Annotated[
        Indexer | None,
        Field(description="the indexer that picks sparse attention's keys; absent: no wrapper computes what it does"),
    ] = None
    indexer_cache: Annotated[
        IndexerCache | None, Field(description="how the indexer's keys are stored; absent: no wrapper needs to know")
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
        Field(description="which back end emits the kernels; auto: the portable one, with Gluon's beside it on sm90"),
    ] = "auto"
    partials: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Field(
            description="how splits of attention store their accumulators for the merge, which adds them in fp32; "
            "fp16: with a power of two a row"
        ),
    ] = "fp32"
    ops: Annotated[
        bool, Field(description="whether the package registers its wrappers as operators of torch, torch.ops.<name>.*")
    ] = False

    @model_serializer(mode="wrap")
    def _without_what_is_new(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A part that came later is left out where it is not asked for, so that it changes no other spec's digest."""
        later = {"multi_head": None, "indexer": None, "indexer_cache": None, "partials": "fp32", "ops": False}
        return _without(serialize(self), later)

    @property
    def attention_kind(self) -> str | None:
        """Which attention the kernels compute; None without."""
        return None if self.attention is None else self.attention.kind

    @field_validator("cache", "extra_cache")  # not a model validator: it speaks up even while other fields are off
    @classmethod
    def _cache_holds_the_models_columns(cls, cache: Cache | None, info: ValidationInfo) -> Cache | None:
        model = info.data.get("model")  # absent while `model` itself is off
        if model is not None and cache is not None:
            if not model.kv_lora_rank:
                raise refused("got a cache; takes none without model.kv_lora_rank, the latent columns of its rows")
            check_layout(cache, (model.kv_lora_rank, model.qk_rope_head_dim), model.dtype)
        return cache

    @field_validator("extra_cache")
    @classmethod
    def _topk_is_the_second_caches(cls, cache: Cache | None, info: ValidationInfo) -> Cache | None:
        attention = info.data.get("attention")
        if cache is None or attention is None:
            return cache
        if attention.kind != "sparse":
            raise refused("got a second cache; takes one with attention of kind sparse, whose topk it belongs to")
        if attention.window is None:
            raise refused(
                "got a second cache, to which topk belongs; takes one with attention.window, the first's indices"
            )
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
                f"got {multi_head.softmax_scale or 'none'}; takes {takes}, that of attention.softmax_scale",
                "softmax_scale",
            )
        return multi_head

    @field_validator("indexer")
    @classmethod
    def _picks_what_attention_takes(cls, indexer: Indexer | None, info: ValidationInfo) -> Indexer | None:
        attention = info.data.get("attention")  # absent while it is off itself
        if indexer is None or attention is None:
            return indexer
        if attention.kind != "sparse":
            raise refused("got an indexer; takes one with attention of kind sparse, whose keys it picks")
        if attention.topk != indexer.topk:
            raise refused(f"got {indexer.topk}; takes attention.topk, {attention.topk}", "topk")
        return indexer

    @field_validator("indexer_cache")
    @classmethod
    def _holds_the_indexers_keys(cls, cache: IndexerCache | None, info: ValidationInfo) -> IndexerCache | None:
        indexer, model = info.data.get("indexer"), info.data.get("model")
        if cache is None or model is None or "indexer" not in info.data:
            return cache
        if indexer is None:
            raise refused("got a cache; takes none without indexer, whose keys it holds")
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
        wrappers = info.data.get("wrappers")  # absent while they are off themselves
        if wrappers is not None and not any(NEEDS[name].attention for name in wrappers):
            raise refused(f"got {partials}; takes none: no wrapper computes attention in splits")
        return partials

    @field_validator("ops")
    @classmethod
    def _the_name_is_a_namespace(cls, ops: bool, info: ValidationInfo) -> bool:
        return free_namespace(ops, info.data.get("name"))
