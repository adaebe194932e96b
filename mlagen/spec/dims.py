"""Head dims of a model, and the one number that the spec derives from them: the columns of a KV row."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mlagen.spec.base import Dtype, Model
from mlagen.spec.indexer import Rope
from mlagen.spec.rules import refused


class Dims(Model):
    """Head dims after absorption. A row of K is `[latent | rope]`; V is its latent, or the whole row (DeepSeek V4).

    `v_head_dim` in a model's config.json is the one before absorption; it belongs in `multi_head`.

    A model without `kv_lora_rank` has no latent rows, and its package no wrapper that reads or writes them.
    """

    num_heads: Annotated[
        int, Field(ge=1, le=128, description="number of query heads before tensor parallelism; a rank may have fewer")
    ]
    kv_lora_rank: Annotated[
        int, Field(ge=0, le=1024, description="latent columns of a KV row (D_NOPE); 0 for a model without latent rows")
    ] = 0
    qk_rope_head_dim: Annotated[
        int, Field(ge=0, le=256, description="RoPE columns of a KV row (D_ROPE); 0 for none")
    ] = 0
    v_head_dim: Annotated[
        int,
        Field(ge=0, le=1280, description="columns of V (D_V): kv_lora_rank, or kv_lora_rank + qk_rope_head_dim"),
    ] = 0
    rope: Annotated[
        Rope | None,
        Field(
            description="pairs of the row's RoPE columns that RoPE rotates, for wrappers that rotate; neox: i and i + "
            "half; gptj: 2i and 2i + 1"
        ),
    ] = None
    dtype: Annotated[Dtype, Field(description="dtype of q, of an unquantised cache and of the output")]

    @property
    def d_qk(self) -> int:
        """Columns of a KV row, and of q: latent and RoPE columns."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @model_validator(mode="after")
    def _rotates_pairs_of_columns(self) -> Dims:
        if self.rope is not None and (self.qk_rope_head_dim == 0 or self.qk_rope_head_dim % 2):
            even = f"an even qk_rope_head_dim, but it is {self.qk_rope_head_dim}"
            raise refused(f"got {self.rope}; takes a value only with {even}", "rope")
        return self

    @model_validator(mode="after")
    def _v_is_the_latent_or_the_row(self) -> Dims:
        if not self.kv_lora_rank:
            for name in ("qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name):
                    raise refused(f"got {getattr(self, name)}; takes 0 or no value without kv_lora_rank", name)
            return self
        latent, row = self.kv_lora_rank, self.d_qk
        if self.v_head_dim not in (latent, row):
            whole = f", or {row} if V includes the RoPE columns" if row > latent else ""
            raise refused(
                f"got {self.v_head_dim or '0 or no value'}; takes {latent}{whole}: after absorption V is the latent "
                "row of kv_lora_rank columns. A head's own v_head_dim belongs in multi_head",
                "v_head_dim",
            )
        return self
