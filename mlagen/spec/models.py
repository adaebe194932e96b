"""What a user says of one model's attention: the YAML spec as frozen pydantic models.

Field names are the field's standard terms (kv_lora_rank, qk_rope_head_dim, index_topk ...). No number is derived here:
that is the plan's. Every string is an enumeration or a pattern, so none can carry text into a template or a path.
"""

from __future__ import annotations

import keyword
import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Target = Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"]
Dtype = Literal["bf16", "fp16"]
Presence = Literal["none", "optional", "required"]
WrapperName = Literal["triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla"]

# Modules that generated code or its callers import: a package of that name would hide them.
TAKEN_NAMES = sys.stdlib_module_names | {"mlagen", "numpy", "torch", "triton"}


def refused(message: str, *at: str | int) -> PydanticCustomError:
    """An error of a rule between values; `at` leads from what the validator checks to the value that is off."""
    return PydanticCustomError("refused", "{message}", {"message": message, "at": at})


def _free_name(name: str) -> str:
    if keyword.iskeyword(name):
        raise refused(f"got '{name}', a Python keyword; takes a name that can be imported, such as '{name}_mla'")
    if name in TAKEN_NAMES:
        raise refused(
            f"got '{name}', which would hide the Python module of that name; takes another, such as '{name}_mla'"
        )
    return name


def _without_repeats(entries: tuple[str, ...]) -> tuple[str, ...]:
    repeats = [index for index, entry in enumerate(entries) if entry in entries[:index]]
    if repeats:
        again = ", ".join(dict.fromkeys(entries[index] for index in repeats))
        raise refused(f"got {again} more than once; takes each entry once", repeats[0])
    return entries


class Model(BaseModel):
    """Base of every part of a spec: frozen, strict, no unknown field."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        field_title_generator=lambda name, _: name,  # editors show a field under the name that the file spells
    )


class Dims(Model):
    """Head dims after absorption: one row of K is `[latent | rope]`, V is its first `v_head_dim` lanes."""

    num_heads: Annotated[
        int, Field(ge=1, le=128, description="query heads before tensor parallelism; a rank may have fewer")
    ]
    kv_lora_rank: Annotated[int, Field(ge=1, le=1024, description="latent lanes of a KV row (D_NOPE)")]
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=256, description="RoPE lanes of a KV row (D_ROPE); 0: no RoPE")]
    v_head_dim: Annotated[
        int, Field(ge=1, le=1280, description="leading lanes of a KV row that are V (D_V); may include RoPE lanes")
    ]
    dtype: Annotated[Dtype, Field(description="dtype of q, of an unquantised cache and of the output")]

    @model_validator(mode="after")
    def _v_lies_in_the_row(self) -> Dims:
        row = self.kv_lora_rank + self.qk_rope_head_dim
        if self.v_head_dim > row:
            lanes = f"kv_lora_rank {self.kv_lora_rank} + qk_rope_head_dim {self.qk_rope_head_dim}"
            raise refused(f"got {self.v_head_dim}; takes at most {row}, the lanes of a KV row ({lanes})", "v_head_dim")
        return self


class SparseAttention(Model):
    """Attention of each query token over the `topk` KV rows that its indices name."""

    kind: Annotated[Literal["sparse"], Field(description="which KV rows a query token attends to")]
    topk: Annotated[int, Field(ge=1, le=65536, description="indices a query token (index_topk)")]
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


class UnquantisedCache(Model):
    """Cache of unquantised rows `[latent | rope]`."""

    block_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="tokens a page of the cache that attention reads; absent: flat rows [s_kv, 1, d_qk]",
        ),
    ] = None


class Bf16Cache(UnquantisedCache):
    """KV cache of bf16 rows."""

    layout: Annotated[Literal["bf16"], Field(description="how a cached token is stored")]


class Fp16Cache(UnquantisedCache):
    """KV cache of fp16 rows."""

    layout: Annotated[Literal["fp16"], Field(description="how a cached token is stored")]


Cache = Annotated[Bf16Cache | Fp16Cache, Field(discriminator="layout")]


class Spec(Model):
    """One model's attention: what `mlagen build` reads."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="name of the generated package; the file's name without .yaml",
            json_schema_extra={
                # editors show it where the pattern fails, and so does `load`
                "patternErrorMessage": "a lower-case letter, then up to 62 lower-case letters, digits or underscores"
            },
        ),
        AfterValidator(_free_name),
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
    attention: Annotated[SparseAttention, Field(description="which attention the kernels compute")]
    cache: Annotated[Cache, Field(description="how the KV cache is stored")]
    wrappers: Annotated[
        tuple[WrapperName, ...],
        Field(min_length=1, description="wrappers to generate, by API name", json_schema_extra={"uniqueItems": True}),
        AfterValidator(_without_repeats),
    ]
    targets: Annotated[
        tuple[Target, ...],
        Field(min_length=1, description="GPU architectures to compile for", json_schema_extra={"uniqueItems": True}),
        AfterValidator(_without_repeats),
    ]
    backend: Annotated[Literal["auto", "triton"], Field(description="which back end emits the kernels")] = "auto"

    @field_validator("cache")  # not a model validator: it speaks up even while other fields are off
    @classmethod
    def _cache_holds_the_models_dtype(cls, cache: Cache, info: ValidationInfo) -> Cache:
        model = info.data.get("model")  # absent while `model` itself is off
        if model is not None and cache.layout != model.dtype:
            raise refused(
                f"got '{cache.layout}'; takes {model.dtype}: an unquantised cache holds model.dtype", "layout"
            )
        return cache
