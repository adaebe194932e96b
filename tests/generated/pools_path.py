"""Runs the sparse path of a package with pools of keys, beside plain torch.

Usage: python pools_path.py PACKAGE_DIR

Exit code 1: a token attends to other tokens than those of its best pools and its tail, or the outputs differ.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from mlagen.verify import interpreter

POOL, RING, PAGE, TOPK, HEADS, PROMPT = 4, 8, 16, 3, 4, 37
STEPS = (("prefill", 0, PROMPT), ("decode", PROMPT, 38), ("decode", 38, 39), ("three drafts", 39, 42))


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Rows times the Hadamard matrix of 128 columns over its root, in bf16."""
    matrix = torch.ones(1, 1)
    for _ in range(7):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.float() @ matrix * 128**-0.5).bfloat16()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as e4m3 with a power of two each leaves them, in fp32."""
    scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class Tokens:
    """Keys, gates, rows and queries of all tokens of a request, and the scores of its pools in plain torch."""

    def __init__(self, count: int, index_heads: int, columns: int) -> None:
        self.key, self.gate = torch.randn(2, count, 128).bfloat16()
        self.ape = torch.randn(POOL, 128)
        self.index_q = torch.randn(count, index_heads, 128).bfloat16()
        self.weights = torch.randn(count, index_heads)
        self.rows = torch.randn(count, columns).bfloat16()
        self.q = torch.randn(count, HEADS, columns).bfloat16()
        pools = count // POOL
        keys, gates = (one[: pools * POOL].float().view(pools, POOL, 128) for one in (self.key, self.gate))
        means = ((gates + self.ape).softmax(1) * keys).sum(1).bfloat16()
        products = torch.einsum("thd,pd->thp", rounded(transformed(self.index_q)), rounded(transformed(means))).relu()
        self.scores = torch.einsum("thp,th->tp", products, self.weights)

    def check(self, token: int, seen: torch.Tensor, out: torch.Tensor, scale: float) -> str:
        """The fault of a token: it attends to wrong tokens, or has a wrong output. Empty if there is none."""
        here = seen[seen >= 0].sort().values
        pools = (token + 1) // POOL
        picked = (here[here < pools * POOL] // POOL).unique()
        whole = torch.cat([picked.repeat_interleave(POOL) * POOL + torch.arange(POOL).repeat(len(picked)),
                           torch.arange(pools * POOL, token + 1)])  # fmt: skip
        if not torch.equal(here, whole.to(here.dtype)) or len(picked) != min(pools, TOPK):
            return f"token {token} attends to {here.tolist()}"
        short = self.scores[token, :pools].topk(len(picked)).values.sum() - self.scores[token, picked.long()].sum()
        if short > 1e-2 * self.scores.abs().amax():
            return f"token {token} picks pools that score {short} less than the best"
        rows = self.rows[here.long()].float()
        wanted = torch.softmax(self.q[token].float() @ rows.T * scale, -1) @ rows
        off = (out.float() - wanted).abs().amax() / wanted.abs().amax()
        return f"token {token} has an output off by {off}" if off > 1e-2 else ""


def step(package: Any, tokens: Tokens, cache: torch.Tensor, tail: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Keys of a step's pools, and the tokens that each of its tokens attends to, [tokens, any]."""
    positions = torch.arange(first, end)
    key, gate = tokens.key[first:end], tokens.gate[first:end]
    if first == 0:
        pools = end // POOL
        given = [one[: pools * POOL].view(pools, POOL, 128) for one in (key, gate)]
        package.kpool_compress_and_write_cache(cache, *given, tokens.ape, torch.arange(pools), POOL)
        package.kpool_seed_tail_cache(tail, key, gate, positions % RING, POOL)
    else:
        ends = (positions + 1) % POOL == 0
        slots = torch.where(ends, positions // POOL, -1)[None]
        package.kpool_decode_update_and_maybe_write_cache_batched(
            cache, tail, (positions % RING)[None], key[None], gate[None], tokens.ape, slots, positions[None], POOL
        )
    count, heads = end - first, tokens.index_q.shape[1]
    values, scales = package.fwht128_quant_fp8(tokens.index_q[first:end].flatten(0, 1))
    weights = tokens.weights[first:end] * scales.view(count, heads)
    lengths = ((positions + 1) // POOL).int()[None]
    table = torch.arange(len(cache), dtype=torch.int32)[None]
    logits = package.fp8_fp4_paged_mqa_logits(
        (values.view(1, count, heads, 128), None), cache[:, :, None], weights, lengths, table,
        package.get_paged_mqa_logits_metadata(lengths, PAGE, 4), int(lengths.max()),
    )  # fmt: skip
    picked = torch.empty(count, TOPK, dtype=torch.int32)
    package.top_k_per_row_decode(logits, 1, lengths[0].contiguous(), picked, count, *logits.stride(), TOPK)
    return package.expand_pools_and_append_tail(picked, (positions + 1).int(), POOL)


def main() -> int:
    """Runs a prefill, two steps of decode and one of three tokens."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder.parent))
    package = importlib.import_module(folder.name)
    interpreter.install()
    facts = package._launch.DeviceFacts("sm80", 4)
    package._launch.device_facts = lambda device: facts
    torch.manual_seed(0)
    said = package.SPEC["spec"]
    scale = said["attention"]["softmax_scale"] or 0.05
    tokens = Tokens(STEPS[-1][2], said["indexer"]["num_heads"], said["model"]["kv_lora_rank"])
    cache = torch.zeros(1, PAGE, package.SPEC["indexer_row_bytes"], dtype=torch.uint8)
    tail = torch.zeros(1, 2, RING, 128, dtype=torch.bfloat16)
    wrong = False
    for what, first, end in STEPS:
        seen = step(package, tokens, cache, tail, first, end)
        out = package.flash_mla_sparse_fwd(tokens.q[first:end], tokens.rows[:end, None], seen[:, None], scale)[0]
        faults = [tokens.check(first + one, seen[one], out[one], scale) for one in range(end - first)]
        print(f"{what}: {'; '.join(filter(None, faults)) or 'as plain torch'}")
        wrong |= any(faults)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
