"""The spec of the workspace, and a runner of the command line in it."""

from __future__ import annotations

from collections.abc import Callable

from click.testing import Result

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
