"""The functions that vLLM's indexer calls by their names: logits against float64, top-k against a stable sort."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
METADATA = "vllm.v1.attention.backends.mla.indexer"
PAGE, PAGES, TOPK = 64, 3, 5
RANGES = ((0, 40), (7, 90), (30, 30), (100, 128))  # of the query tokens of a prefill
LENGTHS = (100, 3, 0)  # of the requests of a decode
TABLE = ((2, 0), (1, 2), (0, 1))
COLUMNS, WIDTH = 60, 50  # of scores, and the most that a row has
RANKS = ((2, 1), (2, 16), (4, 1), (8, 1))  # that share a context, and neighbours on one of them
CONTEXTS = ((0, 0), (0, 1), (0, 60), (60, 33), (93, 3))  # of query tokens: the request's first column, tokens seen


def look(spec: dict[str, Any]) -> dict[str, Any]:
    """The errors of both logits, None where they are vLLM's own, and which operators pick as they ought to."""
    return {"flat": flat(spec), "paged": paged(spec), "picks": [name for name, calls in CALLS.items() if picks(calls)]}


def _side(spec: dict[str, Any], tokens: int, keys: int) -> tuple[torch.Tensor, ...]:
    """A query, its weights, keys and their scales."""
    generator = torch.Generator().manual_seed(1)
    heads, columns = spec["indexer"]["num_heads"], spec["indexer"]["head_dim"]
    q = torch.randn(tokens, heads, columns, generator=generator).to(torch.float8_e4m3fn)
    k = torch.randn(keys, columns, generator=generator).to(torch.float8_e4m3fn)
    return q, torch.rand(tokens, heads, generator=generator), k, torch.rand(keys, generator=generator) + 0.5


def _scored(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Logits of one query token, in float64."""
    return weights.double() @ (q.double() @ k.double().T).relu() * scales.double()


def _largest(logits: torch.Tensor, wanted: list[tuple[int, torch.Tensor]]) -> float:
    """The largest relative error of rows. Each row has columns from its first one on."""
    pairs = [(row[first : first + len(to)].double(), to) for row, (first, to) in zip(logits, wanted, strict=True)]
    return max((float(((got - to).abs() / to.abs().max()).max()) for got, to in pairs if len(to)), default=0.0)


def flat(spec: dict[str, Any]) -> float | None:
    """The error of logits over gathered keys, called as vLLM calls them."""
    layer = importlib.import_module(LAYER)
    q, weights, k, scales = _side(spec, len(RANGES), 128)
    first, end = torch.tensor(RANGES, dtype=torch.int32).T.contiguous()
    try:
        logits = layer.fp8_fp4_mqa_logits((q, None), (k, scales), weights, first, end, clean_logits=False)
    except RuntimeError:
        return None
    assert layer.has_deep_gemm()
    rows = zip(q, weights, RANGES, strict=True)
    return _largest(logits, [(a, _scored(each, w, k[a:b], scales[a:b])) for each, w, (a, b) in rows])


def paged(spec: dict[str, Any]) -> float | None:
    """The error of logits over pages, called as vLLM calls them."""
    layer, metadata = importlib.import_module(LAYER), importlib.import_module(METADATA)
    q, weights, k, scales = _side(spec, len(LENGTHS), PAGES * PAGE)
    planes = (k.view(torch.uint8).view(PAGES, -1), scales.view(torch.uint8).view(PAGES, -1))
    pages = torch.cat(planes, 1).view(PAGES, PAGE, 1, -1)
    lengths, table = torch.tensor(LENGTHS, dtype=torch.int32)[:, None], torch.tensor(TABLE, dtype=torch.int32)
    try:
        schedule = metadata.get_paged_mqa_logits_metadata(lengths, PAGE, 4)
        logits = layer.fp8_fp4_paged_mqa_logits(
            (q[:, None], None), pages, weights, lengths, table, schedule, max_model_len=128, clean_logits=False
        )
    except RuntimeError:
        return None
    wanted = []
    for request, length in enumerate(LENGTHS):
        at = torch.arange(length)
        slots = table[request, at // PAGE].long() * PAGE + at % PAGE
        wanted.append((0, _scored(q[request], weights[request], k[slots], scales[slots])))
    return _largest(logits, wanted)


def _prefill(logits: torch.Tensor, first: torch.Tensor, end: torch.Tensor, out: torch.Tensor) -> None:
    ops = importlib.import_module(LAYER).ops
    ops.top_k_per_row_prefill(logits, first, end, out, logits.shape[0], logits.stride(0), logits.stride(1), TOPK)


def _decode(logits: torch.Tensor, first: torch.Tensor, end: torch.Tensor, out: torch.Tensor) -> None:
    ops, lengths = importlib.import_module(LAYER).ops, (end - first).view(-1, 2)
    ops.top_k_per_row_decode(logits, 2, lengths, out, logits.shape[0], logits.stride(0), logits.stride(1), TOPK)


def _of_lengths(name: str) -> Callable[..., None]:
    def call(logits: torch.Tensor, first: torch.Tensor, end: torch.Tensor, out: torch.Tensor) -> None:
        operator, workspace = getattr(torch.ops._C, name), torch.zeros(1 << 20, dtype=torch.uint8)
        operator(logits, (end - first)[:, None], out, workspace, TOPK, WIDTH)

    return call


CALLS = {
    "top_k_per_row_prefill": _prefill,
    "top_k_per_row_decode": _decode,
    "persistent_topk": _of_lengths("persistent_topk"),
    "cooperative_topk": _of_lengths("cooperative_topk"),
}


def picks(call: Callable[..., None]) -> bool:
    """Whether a call gives the largest of each row, of equal ones the smallest indices; no without an operator."""
    logits = torch.randint(0, 4, (4, COLUMNS), generator=torch.Generator().manual_seed(2)).float()
    begins, lengths = ((9, 0, 3, 20), (40, 3, 0, 17)) if call is _prefill else ((0,) * 4, (WIDTH, 3, 0, 17))
    first, counts = (torch.tensor(values, dtype=torch.int32) for values in (begins, lengths))
    out = torch.full((4, 2 * TOPK), -7, dtype=torch.int32)[:, :TOPK]
    try:
        call(logits, first, first + counts, out)
    except AttributeError:  # vLLM's own, which are not built here
        return False
    for row, start, length, found in zip(logits, begins, lengths, out, strict=True):
        order = row[start : start + length].sort(descending=True, stable=True).indices[:TOPK].sort().values
        assert found.tolist() == order.tolist() + [-1] * (TOPK - len(order))
    return True


class Shared:
    """The ranks that share a context, one after another: each is heard first, then each hears all."""

    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []
        self.hears = False

    def all_gather(self, one: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.hears:
            self.heard.append(one)
        return torch.cat(self.heard if self.hears else [one] * 2, dim)


def merges(share: Callable[[], None]) -> bool:
    """Whether ranks' picks become those of all tokens, of equal scores the smallest; False where vLLM's own merges."""
    layer = importlib.import_module(LAYER)
    own = layer._merge_dcp_topk_global
    share()
    if layer._merge_dcp_topk_global is own:
        return False
    for ranks, interleave in RANKS:
        for starts in (True, False):
            _check_merge(layer, ranks, interleave, starts)
    return True


def _check_merge(layer: Any, ranks: int, interleave: int, starts: bool) -> None:
    """A prefill's rows lie side by side (`starts`), those of a decode begin at 0; a rank may have no column at all."""
    contexts = CONTEXTS if starts else [(0, seen) for _, seen in CONTEXTS[:2]]
    columns = max(first + seen for first, seen in contexts)
    scores = torch.randint(0, 9, (len(contexts), columns), generator=torch.Generator().manual_seed(ranks)).float()
    scores[-1, -1] = -1e30
    shared, wanted, parts = Shared(), [], []
    for row, (first, seen) in zip(scores, contexts, strict=True):
        wanted.append(row[first : first + seen].sort(descending=True, stable=True).indices[:TOPK].sort().values)
    for rank in range(ranks):
        owned = [[at for at in range(seen) if at // interleave % ranks == rank] for _, seen in contexts]
        begins = [0] * len(contexts)
        if starts:  # the rank's columns of requests one after another
            requests = sorted({first for first, _ in contexts})
            pairs = list(zip(contexts, owned, strict=True))
            sizes = [max(len(own) for (of, _), own in pairs if of == first) for first in requests]
            begins = [sum(sizes[: requests.index(first)]) for first, _ in contexts]
        width = max(begin + len(own) for begin, own in zip(begins, owned, strict=True))
        logits = torch.full((len(contexts), width), torch.nan)
        picks = torch.full((len(contexts), TOPK), -1, dtype=torch.int32)
        for row, ((first, _), own, begin) in enumerate(zip(contexts, owned, begins, strict=True)):
            values = scores[row, [first + at for at in own]]
            logits[row, begin : begin + len(own)] = values
            local = values.sort(descending=True, stable=True).indices[:TOPK].sort().values
            picks[row, : len(local)] = local
        parts.append((logits, picks, torch.tensor(begins, dtype=torch.int32) if starts else None))
    layer.get_dcp_group = lambda: shared
    for shared.hears in (False, True):
        for rank, (logits, picks, row_starts) in enumerate(parts):
            given = picks if shared.hears else picks.clone()
            layer._merge_dcp_topk_global(logits, given, TOPK, rank, ranks, interleave, row_starts=row_starts)
    for _, picks, _ in parts:
        for found, of in zip(picks, wanted, strict=True):
            assert found.tolist() == of.tolist() + [-1] * (TOPK - len(of))
