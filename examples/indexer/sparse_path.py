"""DeepSeek V3.2's whole sparse path by one generated package, beside the same in plain torch.

    mlagen build examples/indexer/dsv32_indexer.yaml --no-verify
    python examples/indexer/sparse_path.py [--device cpu] [--tokens 600] [--topk 2048] [--packages generated]

Hidden states to queries and keys of the indexer, its cache, logits, top-k, slots, sparse attention: first the prefill
of two requests, then a decode of one more token of each. On a CPU the kernels run in Triton's interpreter, as `mlagen
verify` runs them. Exit code 1: the two part.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAME = "dsv32_indexer"  # its caches have 656 bytes a token for attention, and 132 for the indexer
HIDDEN, HEADS, LATENT, ROPE = 256, 16, 512, 64
INDEX_HEADS, INDEX_DIM = 64, 128
PAGE = 64
TIE = 1e-3  # of the largest score, within which two of them are equal
OFF = 0.02  # of the largest output: bf16 outputs of rows in e4m3, whose sums differ in order alone


def prepare(device: str, packages: Path) -> ModuleType:
    """The package; on a CPU, with Triton's interpreter mended and a GPU's tiles."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(packages))
    package = importlib.import_module(NAME)
    if device == "cpu":
        from mlagen.verify import interpreter

        interpreter.install()
        facts = package._launch.DeviceFacts("sm90", 132)
        package._launch.device_facts = lambda device: facts
    return package


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, [HIDDEN, ...], whose query is absorbed already.

    Attributes:
        q, row: to the query [HEADS, LATENT + ROPE] and to the cached row [LATENT + ROPE].
        index_q, index_k, index_w: to the indexer's query, key and weights of heads.
        cos_sin: [positions, ROPE], cosines before sines.
    """

    q: Tensor
    row: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor
    cos_sin: Tensor

    @classmethod
    def random(cls, positions: int, device: str) -> Layer:
        """Weights that keep the size of what they map."""
        import torch

        def weight(columns: int) -> Tensor:
            return (torch.randn(HIDDEN, columns, device=device) * HIDDEN**-0.5).bfloat16()

        steps = 10000.0 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)
        angles = torch.arange(positions, device=device)[:, None] * steps
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        columns = (HEADS * (LATENT + ROPE), LATENT + ROPE, INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS)
        return cls(*map(weight, columns), cos_sin)

    def rotated(self, x: Tensor, positions: Tensor, *, pairs: bool) -> Tensor:
        """The RoPE of columns [..., ROPE], those of a pair side by side (attention) or half apart (the indexer)."""
        import torch

        cos, sin = self.cos_sin[positions].view(-1, *[1] * (x.dim() - 2), ROPE).chunk(2, -1)
        if pairs:
            a, b = x.float()[..., ::2], x.float()[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def attention(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The query [T, HEADS, 576] and the row [T, 576] of each token, rotated."""
        import torch

        q, row = (hidden @ self.q).unflatten(1, (HEADS, -1)), hidden @ self.row
        return tuple(
            torch.cat([x[..., :LATENT], self.rotated(x[..., LATENT:], positions, pairs=True)], -1) for x in (q, row)
        )

    def indexer(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's query [T, 64, 128], not rotated yet, its key [T, 128], rotated, and its weights [T, 64]."""
        import torch

        q = (hidden @ self.index_q).unflatten(1, (INDEX_HEADS, INDEX_DIM))
        k = torch.nn.functional.layer_norm((hidden @ self.index_k).float(), (INDEX_DIM,)).to(hidden.dtype)
        k = torch.cat([self.rotated(k[:, :ROPE], positions, pairs=False), k[:, ROPE:]], 1)
        return q, k, hidden @ self.index_w


@dataclass(frozen=True)
class Caches:
    """Pages of two requests, whose blocks interleave: those of attention and those of the indexer.

    Attributes:
        rows, keys: uint8 [pages, PAGE, 656] and [pages, PAGE, 132].
        table: int32 [requests, blocks].
    """

    rows: Tensor
    keys: Tensor
    table: Tensor

    @classmethod
    def empty(cls, requests: int, tokens: int, device: str) -> Caches:
        """Caches for so many tokens a request."""
        import torch

        blocks = -(-tokens // PAGE)
        table = torch.arange(blocks * requests, dtype=torch.int32, device=device).view(blocks, requests).T.contiguous()
        rows, keys = (torch.empty(blocks * requests, PAGE, n, dtype=torch.uint8, device=device) for n in (656, 132))
        return cls(rows, keys, table)

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Where tokens are, int64 [T]."""
        return self.table[requests, positions // PAGE].long() * PAGE + positions % PAGE


def step(
    package: ModuleType, layer: Layer, caches: Caches, hidden: Tensor, requests: Tensor, positions: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """One step of tokens that follow what is cached: their outputs [T, HEADS, LATENT] and the tokens they attend to.

    A step of one token a request scores keys where they lie; a longer one gathers them first.
    """
    import torch

    q, row = layer.attention(hidden, positions)
    index_q, index_k, weights = layer.indexer(hidden, positions)
    slots = caches.slots(requests, positions)
    package.concat_and_cache_mla(row[:, :LATENT], row[:, LATENT:], caches.rows, slots)
    package.indexer_k_quant_and_cache(index_k, caches.keys, slots, INDEX_DIM, "ue8m0")
    index_q, weights = package.fused_indexer_q_rope_quant(
        positions, index_q, layer.cos_sin, weights, INDEX_DIM**-0.5, INDEX_HEADS**-0.5
    )
    picked = torch.empty(len(hidden), topk, dtype=torch.int32, device=hidden.device)
    counts = torch.bincount(requests, minlength=len(caches.table))
    if counts.max() == 1:
        lengths = (positions + 1).int()
        sms = torch.cuda.get_device_properties(0).multi_processor_count if hidden.is_cuda else 132
        lengths, longest = lengths[:, None], int(lengths.max())
        schedule = package.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
        logits = package.fp8_paged_mqa_logits(
            index_q[:, None], caches.keys[:, :, None], weights, lengths, caches.table, schedule, longest
        )
        package.top_k_per_row_decode(logits, 1, lengths, picked, len(logits), *logits.stride(), topk)
    else:
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        keys = torch.empty(len(hidden), INDEX_DIM, dtype=torch.float8_e4m3fn, device=hidden.device)
        scales = torch.empty(len(hidden), 4, dtype=torch.uint8, device=hidden.device)
        package.cp_gather_indexer_k_quant_cache(caches.keys, keys, scales, caches.table, offsets)
        first, end = offsets[requests], offsets[requests] + (positions + 1).int()
        scales = scales.view(torch.float32).squeeze(1)
        logits = package.fp8_mqa_logits(index_q, (keys, scales), weights, first, end, clean_logits=False)
        package.top_k_per_row_prefill(logits, first, end, picked, len(logits), *logits.stride(), topk)
    rows = package.triton_convert_req_index_to_global_index(
        requests.int(), caches.table, picked, PAGE, NUM_TOPK_TOKENS=topk
    )
    meta, _ = package.get_mla_metadata()
    out, _ = package.flash_mla_with_kvcache(
        q[:, None], caches.rows[:, :, None], None, None, LATENT, meta, None, None, False, True, rows[:, None]
    )
    return out[:, 0], picked


def rounded(x: Tensor, tile: int) -> Tensor:
    """What e4m3 with a power of two for each `tile` columns leaves of values [..., columns]."""
    import torch

    tiles = x.float().unflatten(-1, (-1, tile))
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def reference(layer: Layer, hidden: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    """The same of one request in plain torch: outputs, and scores of keys [T, T] with -inf behind each token."""
    import torch

    positions = torch.arange(len(hidden), device=hidden.device)
    q, row = layer.attention(hidden, positions)
    index_q, index_k, weights = layer.indexer(hidden, positions)
    index_q = torch.cat([layer.rotated(index_q[..., :ROPE], positions, pairs=False), index_q[..., ROPE:]], -1)
    products = torch.einsum("thd,sd->ths", rounded(index_q, INDEX_DIM), rounded(index_k, INDEX_DIM)).relu()
    scores = torch.einsum("ths,th->ts", products, weights.float()) * INDEX_DIM**-0.5 * INDEX_HEADS**-0.5
    scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True) & scores.isfinite()
    rows = torch.cat([rounded(row[:, :LATENT], 128), row[:, LATENT:].float()], 1)
    logits = torch.einsum("thd,sd->ths", q.float(), rows) * scale
    attention = logits.masked_fill(~chosen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("ths,sd->thd", attention, rows[:, :LATENT]), scores


def compare(what: str, out: Tensor, picked: Tensor, theirs: tuple[Tensor, Tensor]) -> bool:
    """Prints how far both agree; False where they part by more than rounding does.

    A set may hold another key than the reference's where the scores of the two are equal but for rounding: tensor cores
    add products in fewer bits than fp32 has.
    """
    import torch

    wanted, scores = theirs
    kept = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    kept = kept.scatter(-1, picked.long().where(picked >= 0, scores.shape[-1]), True)[..., :-1]
    seen = scores.isfinite()
    count = seen.sum(-1, keepdim=True).clamp(max=picked.shape[-1])
    least = scores.sort(dim=-1, descending=True).values.gather(-1, count - 1)
    apart = (kept != (scores >= least)) & seen
    same = ~apart.any(-1)
    gap = ((scores - least).abs() * apart).nan_to_num(0.0, 0.0, 0.0).amax() / scores[seen].abs().amax()
    off = ((out.float() - wanted).abs().amax() / wanted.abs().amax()).item()
    right = bool((kept & ~seen).sum() == 0) and bool((kept.sum(-1, keepdim=True) == count).all())
    print(
        f"{what}: {int(same.sum())} of {same.numel()} sets the same, others by keys within {gap:.1e} of the last; "
        f"output off by {off:.1e} of its largest value"
    )
    return right and gap < TIE and off < OFF


def main() -> int:
    """Runs a prefill and a decode of two requests both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=600, help="of the longer request; the other has two thirds")
    parser.add_argument("--topk", type=int, default=2048, help="keys that a token attends to")
    parser.add_argument("--packages", default="generated", type=Path, help="folder of the generated package")
    chosen = parser.parse_args()
    package = prepare(chosen.device, chosen.packages)
    import torch

    torch.manual_seed(0)
    lengths = (chosen.tokens, chosen.tokens * 2 // 3)
    layer = Layer.random(chosen.tokens + 1, chosen.device)
    caches = Caches.empty(len(lengths), chosen.tokens + 1, chosen.device)
    hidden = [torch.randn(length + 1, HIDDEN, device=chosen.device).bfloat16() for length in lengths]
    scale = package.SPEC["spec"]["attention"]["softmax_scale"]  # which None stands for in a call
    theirs = [reference(layer, one, chosen.topk, scale) for one in hidden]

    requests = torch.arange(2, device=chosen.device).repeat_interleave(torch.tensor(lengths, device=chosen.device))
    positions = torch.cat([torch.arange(length, device=chosen.device) for length in lengths])
    prompts = torch.cat([one[:-1] for one in hidden])
    out, picked = step(package, layer, caches, prompts, requests, positions, chosen.topk)
    agree = [
        compare(f"prefill of {length} tokens", ours, sets, (wanted[:-1], scores[:-1]))
        for length, ours, sets, (wanted, scores) in zip(
            lengths, out.split(lengths), picked.split(lengths), theirs, strict=True
        )
    ]
    last = torch.stack([one[-1] for one in hidden])
    requests, positions = torch.arange(2, device=chosen.device), torch.tensor(lengths, device=chosen.device)
    out, picked = step(package, layer, caches, last, requests, positions, chosen.topk)
    agree += [
        compare(f"decode after {length} tokens", ours, sets, (wanted[-1], scores[-1]))
        for length, ours, sets, (wanted, scores) in zip(lengths, out, picked, theirs, strict=True)
    ]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
