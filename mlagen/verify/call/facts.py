"""Facts of a package's spec for verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlagen.layout import layouts_of


@dataclass(frozen=True)
class Facts:
    """Facts of a package's spec, flattened.

    Attributes:
        num_heads: query heads of the model.
        d_c: latent columns of a KV row.
        d_rope: RoPE columns of a KV row.
        d_v: leading columns that are V.
        dtype: torch's name of the dtype, "bfloat16" or "float16".
        kind: "sparse" or "dense" attention; None: no wrapper of attention.
        topk: indices a token; 0 where attention is not sparse.
        sink, length: "none", "optional" or "required".
        lse_base: "e" or "2".
        empty_row_lse: "+inf" or "-inf".
        block_size: tokens a page of the unquantised rows that attention reads; None: flat rows.
        wrappers: names of the package's wrappers.
        shared_indices: neighbouring tokens that load rows together; None: each its own.
        partials: how splits store their accumulators, "fp32", "bf16" or "fp16".
        softmax_scale: meaning of None in wrappers of attention over latent rows; None: the spec states none.
        out_rope: RoPE columns of the output that attention rotates back; 0: none.
        out_heads: heads of a group of the output that attention quantises; 0: it does not.
        out_packed: whether scales of the output are bytes in words.
    """

    num_heads: int
    d_c: int
    d_rope: int
    d_v: int
    dtype: str
    kind: str | None
    topk: int
    sink: str
    length: str
    lse_base: str
    empty_row_lse: str
    block_size: int | None
    wrappers: tuple[str, ...]
    shared_indices: int | None = None
    partials: str = "fp32"
    softmax_scale: float | None = None
    out_rope: int = 0
    out_heads: int = 0
    out_packed: bool = False

    @property
    def d_qk(self) -> int:
        """Columns of a KV row."""
        return self.d_c + self.d_rope

    def whole_groups(self, heads: int) -> int:
        """So many heads, or the next number of whole groups where attention quantises its output."""
        return -(-heads // self.out_heads) * self.out_heads if self.out_heads else heads

    @property
    def default_scale(self) -> float:
        """The factor of the logits of a call that names none."""
        return float(self.d_qk**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def takes_pair(self) -> bool:
        """Whether wrappers of attention over latent rows take Q as a pair: its latent, which V is, and RoPE columns."""
        return self.d_rope > 0 and self.d_v == self.d_c

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Facts:
        """The facts of `SPEC["spec"]`."""
        model, attention = spec["model"], spec["attention"] or {}
        layout = layouts_of(spec)[0]
        return cls(
            num_heads=model["num_heads"],
            d_c=model["kv_lora_rank"],
            d_rope=model["qk_rope_head_dim"],
            d_v=model["v_head_dim"],
            dtype={"bf16": "bfloat16", "fp16": "float16"}[model["dtype"]],
            kind=attention.get("kind"),
            topk=attention.get("topk", 0),
            sink=attention.get("attn_sink", "none"),
            length=attention.get("topk_length", "none"),
            lse_base=attention.get("lse_base", "e"),
            empty_row_lse=attention.get("empty_row_lse", "+inf"),
            block_size=None if layout is None or layout.quantised else spec["cache"]["block_size"],
            wrappers=tuple(spec["wrappers"]),
            shared_indices=attention.get("shared_indices"),
            partials=spec.get("partials", "fp32"),
            softmax_scale=attention.get("softmax_scale"),
            out_rope=model["qk_rope_head_dim"] if attention.get("out_rope") else 0,
            out_heads=(attention.get("out_quant") or {}).get("heads_per_group", 0),
            out_packed=(attention.get("out_quant") or {}).get("scales") == "ue8m0",
        )
