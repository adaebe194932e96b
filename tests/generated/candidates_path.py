"""Runs the sparse path of a package with candidate blocks, beside plain torch.

Usage: python candidates_path.py PACKAGE_DIR

One layer keeps the best blocks of keys, and a later one picks keys of them with a query of its own and attends to them.
Exit code 1: blocks or keys are not the best, or outputs differ.
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

LENGTHS, NEXT_N, PAGE, TOPK, KEPT, HEADS, EPS = (150, 90, 7), 2, 64, 12, 5, 2, 1e-6


def rotated(x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rows [tokens, any, 128] with their last 64 columns rotated in pairs of neighbours, in bf16."""
    cos, sin = (part[:, None] for part in angles[positions].chunk(2, -1))
    even, odd = x[..., 64::2].float(), x[..., 65::2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :64].float(), turned], -1).bfloat16()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as e4m3 with a power of two each leaves them, in fp32."""
    scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class Layer:
    """A query of all tokens for the indexer, as the package has it, and its logits over all keys in plain torch."""

    def __init__(self, package: Any, path: Batch, heads: int) -> None:
        q = torch.randn(len(path.positions), heads, 128).bfloat16()
        weights = torch.randn(len(path.positions), heads).bfloat16()
        scale = 128**-0.5, heads**-0.5
        self.q, self.weights = package.fused_indexer_q_rope_quant(path.positions, q, path.angles, weights, *scale)
        dots = torch.einsum("thd,tkd->thk", rounded(rotated(q, path.positions, path.angles)), path.keys).relu()
        self.logits = torch.einsum("thk,th->tk", dots, weights.float()) * scale[0] * scale[1]

    def arguments(self, path: Batch) -> tuple[Any, ...]:
        """Arguments of the calls over pages, up to the block table."""
        shape = (len(LENGTHS), NEXT_N)
        return (self.q.view(*shape, *self.q.shape[1:]), None), path.cache, self.weights, path.lens, path.table


class Batch:
    """Keys, rows and pages of a batch, written by the package."""

    def __init__(self, package: Any, heads: int, columns: int) -> None:
        count = torch.tensor(LENGTHS)
        self.lens = count.int()
        needed = [-(-one // PAGE) for one in LENGTHS]
        pages = torch.randperm(sum(needed)).int()
        self.table = torch.full((len(LENGTHS), max(needed)), -1, dtype=torch.int32)
        for request, taken in enumerate(pages.split(needed)):
            self.table[request, : len(taken)] = taken
        self.seen = (count[:, None] - NEXT_N + 1 + torch.arange(NEXT_N)).flatten()  # keys of each token
        self.request = torch.arange(len(LENGTHS)).repeat_interleave(NEXT_N).int()
        self.positions = self.seen - 1
        self.angles = torch.randn(max(LENGTHS), 64)
        self.cache = torch.full((sum(needed), PAGE, 1, package.SPEC["indexer_row_bytes"]), 0xFF, dtype=torch.uint8)
        self.rows = torch.randn(sum(needed) * PAGE, columns).bfloat16()
        norm, longest = torch.rand(128) + 0.5, max(LENGTHS)
        self.keys = torch.zeros(len(self.seen), longest, 128)
        for request, length in enumerate(LENGTHS):
            raw, at = torch.randn(length, 128).bfloat16(), torch.arange(length)
            slots = self.table[request, at // PAGE].long() * PAGE + at % PAGE
            package.indexer_k_norm_rope_store(raw, at, self.angles, norm, EPS, self.cache[:, :, 0], slots)
            mean = raw.float().square().mean(-1, keepdim=True)
            normed = (raw.float() * torch.rsqrt(mean + EPS) * norm).bfloat16()
            self.keys[self.request == request, :length] = rounded(rotated(normed[:, None], at, self.angles))[:, 0]


def faults(path: Batch, source: Layer, later: Layer, blocks: torch.Tensor, picked: torch.Tensor, token: int) -> str:
    """The fault of a token's blocks and keys. Empty if there is none."""
    seen = int(path.seen[token])
    count = -(-seen // 8)
    whole = torch.full((count * 8,), -torch.inf)
    whole[:seen] = source.logits[token, :seen]
    scores = whole.view(count, 8).amax(1)
    kept = blocks[token][blocks[token] >= 0].long()
    if kept.tolist() != sorted(set(kept.tolist())) or len(kept) != min(KEPT, count) or kept[-1] != count - 1:
        return f"token {token} keeps blocks {kept.tolist()} of {count}"
    best = scores[:-1].topk(len(kept) - 1).values.sum() - scores[kept[:-1]].sum()
    if best > 1e-2 * scores.abs().amax():
        return f"token {token} keeps blocks that score {best} less than the best"
    inside = (kept[:, None] * 8 + torch.arange(8)).flatten()
    inside = inside[inside < seen]
    here = picked[token][picked[token] >= 0].long()
    if here.tolist() != sorted(set(here.tolist())) or not set(here.tolist()) <= set(inside.tolist()):
        return f"token {token} picks {here.tolist()}"
    short = later.logits[token, inside].topk(min(TOPK, len(inside))).values.sum() - later.logits[token, here].sum()
    if len(here) != min(TOPK, len(inside)) or short > 1e-2 * later.logits[token, inside].abs().amax():
        return f"token {token} picks keys that score {short} less than the best"
    return ""


def attended(path: Batch, picked: torch.Tensor, out: torch.Tensor, q: torch.Tensor, token: int, scale: float) -> str:
    """The fault of a token's output. Empty if there is none."""
    here = picked[token][picked[token] >= 0].long()
    rows = path.rows[path.table[path.request[token]].long()[here // PAGE] * PAGE + here % PAGE].float()
    wanted = torch.softmax(q[token].float() @ rows.T * scale, -1) @ rows
    off = (out[token].float() - wanted).abs().amax() / wanted.abs().amax()
    return f"token {token} has an output off by {off}" if off > 1e-2 else ""


def main() -> int:
    """Runs a decode step of two query tokens a request."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder.parent))
    package = importlib.import_module(folder.name)
    interpreter.install()
    facts = package._launch.DeviceFacts("sm80", 4)
    package._launch.device_facts = lambda device: facts
    torch.manual_seed(0)
    said = package.SPEC["spec"]
    scale, heads = said["attention"]["softmax_scale"], said["indexer"]["num_heads"]
    path = Batch(package, heads, said["model"]["v_head_dim"])
    source, later = Layer(package, path, heads), Layer(package, path, heads)
    tokens = len(path.seen)
    blocks = torch.empty(tokens, KEPT, dtype=torch.int32)
    schedule = package.get_paged_mqa_logits_metadata(path.lens, PAGE, 4)
    package.paged_indexer_topk(*source.arguments(path), schedule, max(LENGTHS), TOPK, candidate_blocks=blocks)
    picked = package.paged_candidate_indexer_topk(*later.arguments(path), blocks, TOPK)
    slots, _ = package.compute_global_topk_indices_and_lens(
        picked, path.request, path.table, PAGE, torch.ones(tokens, dtype=torch.bool)
    )
    q = torch.randn(tokens, HEADS, path.rows.shape[1]).bfloat16()
    out = package.flash_mla_sparse_fwd(q, path.rows[:, None], slots[:, None], scale)[0]
    found = [faults(path, source, later, blocks, picked, token) for token in range(tokens)]
    found += [attended(path, picked, out, q, token, scale) for token in range(tokens)]
    print("; ".join(filter(None, found)) or "as plain torch")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
