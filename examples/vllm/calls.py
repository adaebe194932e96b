"""What layers called so far in this process, and how much of it went into a CUDA graph, whose replays call nothing."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

ATTENTION = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")  # of a package, under these names in its backend
CALLS: dict[str, list[int]] = {}  # by name: calls, and those of them that a graph was made of


def count(name: str) -> None:
    """Adds a call."""
    calls = CALLS.setdefault(name, [0, 0])
    calls[0] += 1
    calls[1] += torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def watch(backend: ModuleType) -> None:
    """Has a backend's calls of attention counted: by whether q comes in its two parts ("pair") or as one ("whole")."""
    for name in ATTENTION:
        if hasattr(backend, name):
            setattr(backend, name, _counted(getattr(backend, name)))


def watch_merges(layer: ModuleType) -> None:
    """Has a package's merges of ranks' picks counted ("merged"), if its plugin put one into vLLM's indexer."""
    merge = getattr(layer, "_merge_dcp_topk_global", None)
    if not getattr(merge, "__module__", "").startswith("mlagen_vllm_"):
        return

    @functools.wraps(merge)
    def counted(*arguments: Any, **options: Any) -> Any:
        count("merged")
        return merge(*arguments, **options)

    layer._merge_dcp_topk_global = counted  # type: ignore[attr-defined]


def _counted(attention: Any) -> Any:
    @functools.wraps(attention)
    def counted(q: Any, *arguments: Any, **options: Any) -> Any:
        count("pair" if isinstance(q, tuple) else "whole")
        return attention(q, *arguments, **options)

    return counted
