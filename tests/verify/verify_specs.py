"""Specs as a package's SPEC holds them, for tests of the cases, and the YAML that tests make their own from."""

import re
from pathlib import Path
from typing import Any

from mlagen.spec import NEEDS


def dsv32_text() -> str:
    """specs/dsv32.yaml without its indexer, prologue, shared indices and partials, which few dims can have."""
    text = (Path(__file__).parents[2] / "specs" / "dsv32.yaml").read_text()
    text = re.sub(r"^(indexer|indexer_cache):\n(  .*\n)*", "", text, flags=re.MULTILINE)
    others = "|".join(name for name, needs in NEEDS.items() if needs.rope or not needs.rows)
    text = re.sub(rf"^  - ({others})\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^(  rope|  shared_indices|partials):.*\n", "", text, flags=re.MULTILINE)


def spec(**changes: Any) -> dict[str, Any]:
    """A sparse spec with all that is optional; `changes` replace fields of any of its parts by name."""
    whole: dict[str, Any] = {
        "name": "some",
        "model": {
            "num_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "v_head_dim": 512,
            "dtype": "bf16",
        },
        "attention": {
            "topk": 2048,
            "attn_sink": "optional",
            "topk_length": "optional",
            "lse_base": "e",
            "empty_row_lse": "+inf",
            "shared_indices": 4,
        },
        "cache": {
            "layout": {
                "name": "bf16",
                "fields": [{"kind": "latent", "dtype": "bf16"}, {"kind": "rope", "dtype": "bf16"}],
            },
            "block_size": None,
        },
        "wrappers": ["triton_mla_sparse_attention", "flash_mla_sparse_fwd", "concat_and_cache_mla"],
        "targets": ["sm90", "gfx942"],
    }
    for name, value in changes.items():
        (part,) = [part for part in (whole, *whole.values()) if isinstance(part, dict) and name in part]
        part[name] = value
    return whole
