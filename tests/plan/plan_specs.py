"""Specs for tests of the plan: DeepSeek V3.2 with some values changed, and any dims that a spec takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention_specs import attention_of
from hypothesis import strategies as st

from mlagen.spec import Spec

ROOT = Path(__file__).parents[2]
DENSE = {"wrappers": ("flash_mla_with_kvcache", "decode_attention_fwd")}  # with attention of kind dense


def make_spec(**changes: Any) -> Spec:
    """DeepSeek V3.2's attention; `changes` replace fields of any of its parts by name. A layout may be its name."""
    data = attention_of("dsv32")
    data["attention"]["shared_indices"] = None  # which few dims and targets can have
    data["attention"]["products"] = "model"
    data.pop("partials", None)  # which wrappers without attention have not
    for name, value in changes.items():
        (part,) = [part for part in (data, *data.values()) if isinstance(part, dict) and name in part]
        part[name] = value
    return Spec.model_validate(data)


@st.composite
def dims(draw: st.DrawFn) -> dict[str, int]:
    """kv_lora_rank, qk_rope_head_dim and v_head_dim, any that a spec takes."""
    rank, rope = draw(st.integers(1, 1024)), draw(st.integers(0, 256))
    return {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "v_head_dim": draw(st.sampled_from([rank, rank + rope]))}
