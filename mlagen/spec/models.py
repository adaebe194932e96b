"""What a user says of one model's attention: the YAML spec as frozen pydantic models.

Field names are the field's standard terms (kv_lora_rank, qk_rope_head_dim, index_topk ...). No number is derived here: that
is the plan's. Every string is an enumeration or a pattern, so none can carry text into a template or a path.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Target = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"]
Dtype = Literal["bf16", "fp16"]
Presence = Literal["none", "optional", "required"]
WrapperName = Literal["triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla"]


class Model(BaseModel):
    """Base of every part of a spec: frozen, strict, no unknown field."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Dims(Model):
    """Head dims after absorption: one row of K is `[latent | rope]`, V is its first `v_head_dim` lanes."""

    num_heads: Annotated[int, Field(ge=1, le=128, description="query heads before tensor parallelism; a rank may have fewer")]
    kv_lora_rank: Annotated[int, Field(ge=1, le=1024, description="latent lanes of a KV row (D_NOPE)")]
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=256, description="RoPE lanes of a KV row (D_ROPE); 0: no RoPE")]
    v_head_dim: Annotated[int, Field(ge=1, le=1280, description="leading lanes of a KV row that are V (D_V); may include RoPE lanes")]
    dtype: Annotated[Dtype, Field(description="dtype of q, of an unquantised cache and of the output")]

    @model_validator(mode="after")
    def _v_lies_in_the_row(self) -> Dims:
        row = self.kv_lora_rank + self.qk_rope_head_dim
        if self.v_head_dim > row:
            raise ValueError(f"v_head_dim is {self.v_head_dim}, but a KV row has only {row} lanes (kv_lora_rank + qk_rope_head_dim)")
        return self


class SparseAttention(Model):
    """Attention of each query token over the `topk` KV rows that its indices name."""

    kind: Literal["sparse"]
    topk: Annotated[int, Field(ge=1, le=65536, description="indices a query token (index_topk)")]
    attn_sink: Annotated[Presence, Field(description="per-head sink logit in the softmax's denominator")] = "optional"
    topk_length: Annotated[Presence, Field(description="per-token count of leading indices that are valid")] = "optional"
    lse_base: Annotated[Literal["e", "2"], Field(description="base of the returned log-sum-exp and of max_logits")] = "e"
    empty_row_lse: Annotated[Literal["+inf", "-inf"], Field(description="LSE of a row without a valid index; its output is 0")] = "+inf"


class UnquantisedCache(Model):
    """Cache of unquantised rows `[latent | rope]`."""

    block_size: Annotated[
        int | None,
        Field(ge=1, le=4096, description="tokens a page of the cache that attention reads; absent: flat rows [s_kv, 1, d_qk]"),
    ] = None


class Bf16Cache(UnquantisedCache):
    """KV cache of bf16 rows."""

    layout: Literal["bf16"]


class Fp16Cache(UnquantisedCache):
    """KV cache of fp16 rows."""

    layout: Literal["fp16"]


Cache = Annotated[Bf16Cache | Fp16Cache, Field(discriminator="layout")]


class Spec(Model):
    """One model's attention: what `mlagen build` reads."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$", description="name of the generated package")]
    title: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()+,./:;_-]{0,78}$", description="one line for docstrings, plain ASCII"),
    ]
    model: Dims
    attention: SparseAttention
    cache: Cache
    wrappers: Annotated[tuple[WrapperName, ...], Field(min_length=1, description="wrappers to generate, by API name")]
    targets: Annotated[tuple[Target, ...], Field(min_length=1, description="GPU architectures to compile for")]
    backend: Annotated[Literal["auto", "triton"], Field(description="which back end emits the kernels")] = "auto"

    @model_validator(mode="after")
    def _parts_agree(self) -> Spec:
        if self.cache.layout != self.model.dtype:
            raise ValueError(f"cache.layout is {self.cache.layout}, but model.dtype is {self.model.dtype}: an unquantised cache holds the model's dtype")
        return self
