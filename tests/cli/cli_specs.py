"""The spec of the workspace, a runner of the command line in it, and specs made from configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import Result

from mlagen.errors import MlagenError
from mlagen.spec.from_config import Wishes, spec_from_config

SPEC = """\
name: small
title: A small model
model: {num_heads: 4, kv_lora_rank: 32, qk_rope_head_dim: 16, v_head_dim: 32, dtype: fp16}
attention: {kind: sparse, topk: 16}
cache: {layout: fp16}
wrappers: [flash_mla_sparse_fwd]
targets: [sm80, gfx942]
"""

# One small kernel with two variants per target, for tests that compile or run it.
WRITER = SPEC.replace("name: small", "name: writer").replace("flash_mla_sparse_fwd", "concat_and_cache_mla")

Run = Callable[..., Result]


def written(config: Any, **wishes: Any) -> tuple[str | None, str | None]:
    """The spec of a config, or the line that refuses it."""
    text = config if isinstance(config, str) else json.dumps(config)
    try:
        return spec_from_config(text, Path("config.json"), Wishes(**wishes)).text, None
    except MlagenError as error:
        refusal = error
    assert refusal.exit_code == 2
    assert str(refusal).isprintable()
    return None, str(refusal)
