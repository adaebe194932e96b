"""Pairs of columns that attention's RoPE rotates, by model type; configs do not contain them."""

from __future__ import annotations

# As engines call DeepSeek's attention: pairs 2i and 2i + 1. Other types have no entry until their class is read.
ROPE = {
    "deepseek_v2": "gptj",
    "deepseek_v3": "gptj",
    "deepseek_v32": "gptj",
    "deepseek_v4": "gptj",
    "deepseek_v41": "gptj",
    "axk2": "gptj",  # transformers' class: interleaved, unlike its indexer
}
