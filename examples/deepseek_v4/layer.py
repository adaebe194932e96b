"""The attention of a DeepSeek V4 layer by one generated package, beside the same in plain torch.

    python examples/deepseek_v4/layer.py [--device cpu] [--ratio 128] [--tokens 300] [--topk 512] [--packages generated]

Hidden states to output: norms, RoPE and insertion of the window's rows; the compressor's states and rows; the indexer's
keys, query, logits and top-k; attention over both caches with a sink; RoPE turned back; the output's projection. The
prompts of two requests are prefilled in two chunks. Then each decodes a token, and three drafts. Two of them are
rejected, and others follow in their places. With --ratio 128 the layer has no indexer, and tokens attend to every
compressed row. On a CPU the kernels run in Triton's interpreter. Exit code 1: the two part.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("dsv4_flash", "dsv4_flash_out_rope")  # packages; the second one turns RoPE of the output back
HIDDEN, Q_RANK, HEADS, DIM, NOPE, ROPE = 256, 64, 8, 512, 448, 64
INDEX_HEADS, INDEX_DIM = 64, 128
GROUPS, RANK = 2, 32  # of the output's projection: heads of a group go to RANK columns
WINDOW, PAGE, EPS = 128, 64, 1e-6
STATES = {4: 4, 128: 8}  # states a page, by ratio
TIE = 1e-2  # of the largest score: a token's sum of scores may be that much less, since torch adds in another order
OFF = 0.03  # of the largest output: bf16 outputs of rows in e4m3


def prepare(device: str, packages: Path, name: str) -> ModuleType:
    """The package; on a CPU, with Triton's interpreter mended and the tiles of a GPU without e4m3."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(packages))
    package = importlib.import_module(name)
    if device == "cpu":
        from mlagen.verify import interpreter

        interpreter.install()
        facts = package._launch.DeviceFacts("sm80", 108)
        package._launch.device_facts = lambda device: facts
    return package


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, [HIDDEN, columns] unless said otherwise.

    Attributes:
        ratio: tokens that a compressed row stands for: 4, of overlapping windows of 8, or 128.
        q_down, row: to the queries' latent [Q_RANK] and to the window's row [DIM].
        kv, score: to the compressor's columns, twice as many as a row's with overlap.
        key_kv, key_score: the same for the indexer's keys.
        ape, key_ape: fp32 [ratio, columns], added to scores by a token's place.
        norms: of the window's row, of a compressed row, of a key and of the latent, each [columns of it].
        q, index_q: from the latent [Q_RANK] to the query [HEADS, DIM] and to the indexer's query.
        index_w: to the weights of the indexer's heads.
        sink: fp32 [HEADS].
        down, up: the output's projection, [GROUPS, HEADS / GROUPS * DIM, RANK] and [GROUPS * RANK, HIDDEN].
        cos_sin: fp32 [positions, ROPE], cosines before sines.
    """

    ratio: int
    q_down: Tensor
    row: Tensor
    kv: Tensor
    score: Tensor
    key_kv: Tensor
    key_score: Tensor
    ape: Tensor
    key_ape: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    q: Tensor
    index_q: Tensor
    index_w: Tensor
    sink: Tensor
    down: Tensor
    up: Tensor
    cos_sin: Tensor

    @classmethod
    def random(cls, ratio: int, positions: int, device: str) -> Layer:
        """Random weights. Columns are as large as those of the hidden states."""
        import torch

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, device=device) * shape[-2] ** -0.5).bfloat16()

        halves = 2 if ratio == 4 else 1
        steps = 10000.0 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)
        angles = torch.arange(positions, device=device)[:, None] * steps
        columns = (Q_RANK, DIM, halves * DIM, halves * DIM, halves * INDEX_DIM, halves * INDEX_DIM)
        return cls(
            ratio,
            *(weight(HIDDEN, one) for one in columns),
            ape=torch.randn(ratio, halves * DIM, device=device),
            key_ape=torch.randn(ratio, halves * INDEX_DIM, device=device),
            norms=tuple(1 + 0.1 * torch.randn(one, device=device).bfloat16() for one in (DIM, DIM, INDEX_DIM, Q_RANK)),
            q=weight(Q_RANK, HEADS * DIM),
            index_q=weight(Q_RANK, INDEX_HEADS * INDEX_DIM),
            index_w=weight(HIDDEN, INDEX_HEADS),
            sink=torch.randn(HEADS, device=device),
            down=weight(GROUPS, HEADS // GROUPS * DIM, RANK),
            up=weight(GROUPS * RANK, HIDDEN),
            cos_sin=torch.cat([angles.cos(), angles.sin()], 1),
        )

    def turned(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """fp32 [..., columns] of tokens with the last ROPE columns rotated, in pairs side by side."""
        import torch

        cos, sin = self.cos_sin[positions].view(-1, *[1] * (x.dim() - 2), ROPE).chunk(2, -1)
        a, b = x.float()[..., -ROPE::2], x.float()[..., 1 - ROPE :: 2]
        sin = -sin if back else sin
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([x.float()[..., :-ROPE], pairs], -1)

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The query [T, HEADS, DIM] and the indexer's [T, INDEX_HEADS, INDEX_DIM], neither normalised nor rotated."""
        latent = normed((hidden @ self.q_down).float(), self.norms[3].float()).bfloat16()
        return (latent @ self.q).view(-1, HEADS, DIM), (latent @ self.index_q).view(-1, INDEX_HEADS, INDEX_DIM)

    def output(self, out: Tensor, positions: Tensor | None) -> Tensor:
        """Hidden states [T, HIDDEN] of attention's output [T, HEADS, DIM].

        Its V has RoPE, which is turned back by `positions`; None: attention has done that.
        """
        import torch

        plain = out.float() if positions is None else self.turned(out, positions, back=True)
        plain = plain.view(len(out), GROUPS, -1)
        return torch.einsum("tgd,gdr->tgr", plain, self.down.float()).flatten(1) @ self.up.float()


@dataclass(frozen=True)
class Caches:
    """Pages of two requests. Their blocks interleave.

    Attributes:
        window, rows, keys: uint8 [pages, PAGE, bytes]: rows of tokens, compressed rows, and keys of the indexer.
        states, key_states: fp32 [pages, states a page, columns] of the compressor.
        table, row_table, state_table: int32 [requests, blocks]; keys lie where rows do.
    """

    window: Tensor
    rows: Tensor
    keys: Tensor
    states: Tensor
    key_states: Tensor
    table: Tensor
    row_table: Tensor
    state_table: Tensor

    @classmethod
    def empty(cls, layer: Layer, requests: int, tokens: int, device: str) -> Caches:
        """Caches for so many tokens a request."""
        import torch

        def tables(count: int, size: int) -> Tensor:
            blocks = -(-count // size)
            pages = torch.arange(blocks * requests, dtype=torch.int32, device=device)
            return pages.view(blocks, requests).T.contiguous()

        groups, size = tokens // layer.ratio + 1, STATES[layer.ratio]
        table, row_table, state_table = tables(tokens, PAGE), tables(groups, PAGE), tables(tokens, size)

        def paged(of: Tensor, row_bytes: int, multiple: int) -> Tensor:
            each = -(-PAGE * row_bytes // multiple) * multiple  # a page of 584 bytes a row ends at a multiple of 576
            memory = torch.zeros(of.numel() * each, dtype=torch.uint8, device=device)
            return memory.as_strided((of.numel(), PAGE, row_bytes), (each, row_bytes, 1))

        states = [
            torch.zeros(state_table.numel(), size, 2 * one.shape[1], device=device) for one in (layer.kv, layer.key_kv)
        ]
        caches = (paged(table, 584, 576), paged(row_table, 584, 576), paged(row_table, 132, 1))
        return cls(*caches, *states, table, row_table, state_table)


def slots_of(table: Tensor, size: int, requests: Tensor, positions: Tensor) -> Tensor:
    """Where entries at positions of requests are; -1 for negative positions. [requests or tokens, ...]"""
    import torch

    pages = table[requests.view(-1, *[1] * (positions.dim() - 1)), positions.clamp(0) // size].long()
    return torch.where(positions >= 0, pages * size + positions % size, -1)


def step(
    package: ModuleType, layer: Layer, caches: Caches, hidden: Tensor, first: int, topk: int
) -> tuple[Tensor, Tensor | None]:
    """One step of n tokens a request from position `first` on: outputs, and the groups that each token attends to.

    hidden [requests, n, HIDDEN]. Returns [requests, n, HIDDEN] and [requests, n, topk].
    """
    import torch

    count, n, _ = hidden.shape
    flat, device = hidden.flatten(0, 1), hidden.device
    requests = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(n)
    positions = torch.arange(first, first + n, device=device).repeat(count)
    # The window's row: norm of each head and of the row, RoPE of both, quantisation and insertion.
    (q, index_q), row = layer.queries(flat), flat @ layer.row
    slots = slots_of(caches.table, PAGE, requests.long(), positions)
    package.fused_deepseek_v4_qnorm_rope_kv_insert(
        q, row, caches.window, slots, positions, layer.cos_sin, EPS, PAGE, kv_norm_weight=layer.norms[0]
    )
    # The compressor: states of all tokens, then a row where a group ends. The indexer's keys come likewise.
    size = STATES[layer.ratio]
    state_slots = slots_of(caches.state_table, size, requests.long(), positions)
    row_slots = slots_of(caches.row_table, PAGE, requests.long(), positions // layer.ratio)
    made = [(layer.kv, layer.score, layer.ape, caches.states, caches.rows, layer.norms[1])]
    if layer.ratio == 4:
        made.append((layer.key_kv, layer.key_score, layer.key_ape, caches.key_states, caches.keys, layer.norms[2]))
    for kv, score, ape, states, cache, norm in made:
        width = kv.shape[1]
        package.save_partial_states(
            flat.float() @ kv.float(), flat.float() @ score.float(), ape, positions, states, state_slots, size, width,
            layer.ratio,
        )  # fmt: skip
        package.compress_norm_rope_store(
            states, len(flat), requests, positions, state_slots, caches.state_table, size, width, layer.cos_sin, cache,
            row_slots, None, len(norm), ROPE, layer.ratio, layer.ratio == 4, False, norm, EPS,
        )  # fmt: skip
    # The groups that each token sees, or the indexer's choice among them, as slots of the second cache.
    seen = (positions.view(count, n) + 1) // layer.ratio
    if layer.ratio == 4:
        index_q, weights = package.fused_indexer_q_rope_quant(
            positions, index_q, layer.cos_sin, flat @ layer.index_w, INDEX_DIM**-0.5, INDEX_HEADS**-0.5
        )
        sms = torch.cuda.get_device_properties(0).multi_processor_count if flat.is_cuda else 108
        lengths, extra = seen.int(), torch.empty(count * n, topk, dtype=torch.int32, device=device)
        picked = package.paged_indexer_topk(
            (index_q.view(count, n, INDEX_HEADS, INDEX_DIM), None), caches.keys, weights, lengths, caches.row_table,
            package.get_paged_mqa_logits_metadata(lengths, PAGE, sms), max(int(lengths.max()), 1), topk, slots=extra,
            row_to_batch=requests,
        ).view(count, n, topk)  # fmt: skip
        extra = extra.view(count, n, topk)
    else:
        picked, groups = None, torch.arange(int(seen.max()) or 1, device=device)
        groups = torch.where(groups < seen[..., None], groups, -1)
        extra = slots_of(caches.row_table, PAGE, torch.arange(count, device=device), groups).int()
    # Attention over the window's last tokens and over these groups, with a sink in one softmax.
    last = positions.view(count, n, 1) - torch.arange(WINDOW - 1, -1, -1, device=device)
    window = slots_of(caches.table, PAGE, torch.arange(count, device=device), last).int()
    meta, _ = package.get_mla_metadata()
    # Some packages turn RoPE of the output back in attention itself. For the others torch does that.
    turns_back = package.SPEC["spec"]["attention"].get("out_rope") == "inverse"
    angles = {"positions": positions, "cos_sin_cache": layer.cos_sin} if turns_back else {}
    out, _ = package.flash_mla_with_kvcache(
        q.view(count, n, HEADS, DIM), caches.window[:, :, None], None, None, DIM, meta, None, None, False, True, window,
        attn_sink=layer.sink, extra_k_cache=caches.rows[:, :, None], extra_indices_in_kvcache=extra, **angles,
    )  # fmt: skip
    return layer.output(out.flatten(0, 1), None if turns_back else positions).view(count, n, HIDDEN), picked


def rounded(x: Tensor, tile: int, columns: int) -> Tensor:
    """Values rounded to bf16, and the first columns to e4m3 with a power of two for each `tile` of them, in fp32."""
    import torch

    tiles = x.bfloat16().float()[..., :columns].unflatten(-1, (-1, tile))
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    kept = ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return torch.cat([kept, x.bfloat16().float()[..., columns:]], -1)


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """The RMSNorm of fp32 columns."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def compressed(layer: Layer, kv: Tensor, score: Tensor, ape: Tensor, norm: Tensor) -> Tensor:
    """The rows fp32 [groups, columns] of kv and scores [T, columns or twice as many] of a request, not rounded yet."""
    import torch

    ratio, columns, rows = layer.ratio, len(norm), []
    scores = score + ape.repeat(-(-len(kv) // ratio), 1)[: len(kv)]
    for end in range(ratio, len(kv) + 1, ratio):
        newer = slice(end - ratio, end)
        values, weights = kv[newer, -columns:], scores[newer, -columns:]
        if kv.shape[1] > columns and end > ratio:  # the group before, by its first columns
            older = slice(end - 2 * ratio, end - ratio)
            values = torch.cat([kv[older, :columns], values])
            weights = torch.cat([scores[older, :columns], weights])
        rows.append((weights.softmax(0) * values).sum(0))
    firsts = torch.arange(len(rows), device=kv.device) * ratio
    return layer.turned(normed(torch.stack(rows), norm.float()), firsts) if rows else kv[:0, :columns]


@dataclass
class Reference:
    """A request in plain torch, from all of its hidden states at once, in fp32.

    Attributes:
        q: [T, HEADS, DIM].
        row: [T, DIM] of the window.
        rows: [groups, DIM], compressed.
        scores: [T, groups] of the indexer, -inf for groups that a token does not see.
    """

    layer: Layer
    hidden: Tensor
    q: Tensor = field(init=False)
    row: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    scores: Tensor = field(init=False)

    def __post_init__(self) -> None:
        import torch

        layer, hidden = self.layer, self.hidden
        positions, wide = torch.arange(len(hidden), device=hidden.device), hidden.float()
        q, index_q = layer.queries(hidden)
        self.q = layer.turned(normed(q.float()), positions).bfloat16().float()
        row = normed((hidden @ layer.row).float(), layer.norms[0].float()).bfloat16()
        self.row = rounded(layer.turned(row, positions), 64, NOPE)
        kv, score = wide @ layer.kv.float(), wide @ layer.score.float()
        self.rows = rounded(compressed(layer, kv, score, layer.ape, layer.norms[1]), 64, NOPE)
        seen = torch.arange(len(self.rows), device=hidden.device) < (positions[:, None] + 1) // layer.ratio
        self.scores = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))
        if layer.ratio == 4:
            kv, score = wide @ layer.key_kv.float(), wide @ layer.key_score.float()
            keys = rounded(compressed(layer, kv, score, layer.key_ape, layer.norms[2]), INDEX_DIM, INDEX_DIM)
            turned = layer.turned(index_q, positions)
            products = torch.einsum("thd,sd->ths", rounded(turned, INDEX_DIM, INDEX_DIM), keys).relu()
            weights = (hidden @ layer.index_w).float() * (INDEX_DIM * INDEX_HEADS) ** -0.5
            self.scores = self.scores + torch.einsum("ths,th->ts", products, weights)

    def output(self, first: int, chosen: Tensor, scale: float) -> Tensor:
        """Outputs of the tokens from `first` on, which attend to the chosen groups, bool [n, groups]."""
        import torch

        here = torch.arange(first, first + len(chosen), device=chosen.device)
        every = torch.arange(len(self.row), device=chosen.device)
        window = (every <= here[:, None]) & (every > here[:, None] - WINDOW)
        rows, mask = torch.cat([self.row, self.rows]), torch.cat([window, chosen], 1)
        logits = torch.einsum("thd,sd->ths", self.q[here], rows) * scale
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        sink = self.layer.sink.view(1, HEADS, 1).expand(len(here), -1, 1)
        weights = torch.cat([logits, sink], 2).softmax(-1)[..., :-1]
        return self.layer.output(torch.einsum("ths,sd->thd", weights, rows), here)


def compare(what: str, found: tuple[Tensor, Tensor | None], theirs: Reference, first: int, scale: float) -> bool:
    """Prints how far a step of a request agrees; False where it parts by more than rounding does.

    Outputs are compared over the groups that the package picked. Scores may be equal but for rounding, so the picks are
    judged by the sum of their scores.
    """
    import torch

    out, picked = found
    scores = theirs.scores[first : first + len(out)]
    chosen, gap = scores.isfinite(), 0.0
    if picked is not None:
        everyone = torch.zeros(len(out), scores.shape[1] + 1, dtype=torch.bool, device=out.device)
        kept = everyone.scatter(1, picked.long().where(picked >= 0, scores.shape[1]), True)[:, :-1]
        count = chosen.sum(1).clamp(max=picked.shape[1])
        if bool((kept & ~chosen).any()) or not torch.equal(kept.sum(1), count):
            print(f"{what}: a token attends to a group that it does not see, or to too few")
            return False
        best = scores.sort(1, descending=True).values.cumsum(1).gather(1, (count - 1).clamp(0)[:, None])[:, 0]
        sums = torch.where(kept, scores, 0.0).sum(1)
        size = scores[chosen].abs().amax() if bool(chosen.any()) else 1.0
        gap = float(((best - sums) * (count > 0)).nan_to_num(0.0).amax() / size)
        chosen = kept
    wanted = theirs.output(first, chosen, scale)
    off = float((out.float() - wanted).abs().amax() / wanted.abs().amax())
    print(f"{what}: picks within {gap:.1e} of the best scores; output off by {off:.1e} of its largest value")
    return gap < TIE and off < OFF


def main() -> int:
    """Runs two requests both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ratio", default=4, type=int, choices=tuple(STATES), help="tokens of a compressed row")
    parser.add_argument("--tokens", default=300, type=int, help="of each prompt")
    parser.add_argument("--topk", default=512, type=int, help="compressed rows that a token attends to")
    parser.add_argument("--packages", default="generated", type=Path, help="folder of the generated package")
    parser.add_argument("--package", default=NAMES[0], choices=NAMES, help="the generated package")
    chosen = parser.parse_args()
    package = prepare(chosen.device, chosen.packages, chosen.package)
    import torch

    torch.manual_seed(0)
    requests, prompt, scale = 2, chosen.tokens, DIM**-0.5
    layer = Layer.random(chosen.ratio, prompt + 8, chosen.device)
    caches = Caches.empty(layer, requests, prompt + 8, chosen.device)
    hidden = torch.randn(requests, prompt + 6, HIDDEN, device=chosen.device).bfloat16()
    drafted = hidden.clone()
    drafted[:, prompt + 2 : prompt + 4] += 1  # the second and third draft are rejected: other tokens follow
    half, right = prompt // 2, True
    steps = [
        ("first chunk", hidden, 0, half),
        ("second chunk", hidden, half, prompt),
        ("decode", hidden, prompt, prompt + 1),
        ("three drafts", drafted, prompt + 1, prompt + 4),
        ("after the rejected drafts", hidden, prompt + 2, prompt + 4),
        ("decode", hidden, prompt + 4, prompt + 5),
    ]
    for what, source, first, end in steps:
        out, picked = step(package, layer, caches, source[:, first:end], first, chosen.topk)
        for request in range(requests):
            theirs = Reference(layer, source[request, :end])
            found = out[request], None if picked is None else picked[request]
            right &= compare(f"request {request}, {what}", found, theirs, first, scale)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
