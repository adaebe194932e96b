"""Times of the indexer's chain, logits and then top-k, of a generated package beside DeepGEMM's and vLLM's.

    python examples/indexer/chain.py generated/dsv32

Both chains run in one process on the same inputs, in turns, as one CUDA graph each or between events; the peer's is
DeepGEMM's logits with the fastest of vLLM's top-k operators at that shape. Of every shape the picks of some tokens are
compared to those of the package's logits by torch.topk. Needs a GPU of sm90, and the peers on PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlagen.bench.families.mqa_logits import (
    FLAT,
    PAGED,
    PREFILL_KEYS,
    PREFILL_TOKENS,
    SCHEDULE,
    LogitsInputs,
    LogitsShape,
    layout_of,
    logits_call,
    make_flat_inputs,
    make_paged_inputs,
)
from mlagen.bench.families.topk import DECODE, PREFILL
from mlagen.bench.measure import device_timer, flush_l2, interleave
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.peers import mqa_logits as deep_gemm
from mlagen.bench.peers.libraries import load_vllm_operators
from mlagen.bench.shapes import BLOCK_SIZE, sets_needed
from mlagen.bench.trial import Call

DECODES = ((1, 32), (1, 64), (1, 128), (16, 32), (16, 64), (64, 32), (64, 64), (128, 32))  # requests, keys in K
WORKSPACE, COOPERATIVE_ROWS = 1 << 20, 32
L2_BYTES = 50 << 20


def shapes(package: BenchPackage) -> list[LogitsShape]:
    """Prefills of 4096 tokens and decodes of one token a request."""
    heads = package.spec["indexer"]["num_heads"]
    prefills = [LogitsShape(FLAT, 1, PREFILL_TOKENS, heads, keys) for keys in PREFILL_KEYS]
    return [LogitsShape(PAGED, requests, 1, heads, keys << 10) for requests, keys in DECODES] + prefills


def chain(shape: LogitsShape, inputs: LogitsInputs, logits: Call, select: Callable[..., Any], topk: int) -> Call:
    """Logits and then the top-k of what each token sees."""
    indices = torch.empty(shape.tokens, topk, dtype=torch.int32, device=inputs.end.device)

    def call() -> torch.Tensor:
        select(logits(), inputs, indices)
        return indices

    return call


def by_rows(prefill: Any, decode: Any, scores: torch.Tensor, inputs: LogitsInputs, indices: torch.Tensor) -> None:
    """Top-k by the two functions that vLLM and a package have under the same names."""
    sizes = (len(scores), scores.stride(0), scores.stride(1), indices.shape[1])
    if inputs.start is not None:
        prefill(scores, inputs.start, inputs.end, indices, *sizes)
    else:
        decode(scores, 1, inputs.end, indices, *sizes)


def with_workspace(select: Any, space: torch.Tensor, scores: torch.Tensor, inputs: LogitsInputs, out: Any) -> None:
    """Top-k by vLLM's operators that take a workspace."""
    select(scores, inputs.end[:, 0].contiguous(), out, space, out.shape[1], inputs.context)


def peers(shape: LogitsShape, device: torch.device) -> dict[str, Callable[..., Any]]:
    """vLLM's top-k operators at a shape."""
    load_vllm_operators()
    ops = torch.ops._C
    found: dict[str, Callable[..., Any]] = {"per row": partial(by_rows, getattr(ops, PREFILL), getattr(ops, DECODE))}
    if shape.kind == PAGED:
        space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        found["persistent"] = partial(with_workspace, ops.persistent_topk, space)
        if shape.tokens <= COOPERATIVE_ROWS:
            found["cooperative"] = partial(with_workspace, ops.cooperative_topk, space)
    return found


def wrong_picks(shape: LogitsShape, inputs: LogitsInputs, ours: Call, logits: Call, topk: int) -> int:
    """Tokens, of some, whose picks are not the top-k of the package's logits."""
    picked, scores, wrong = ours(), logits(), 0
    for token in (0, shape.tokens // 2, shape.tokens - 1):
        end = int(inputs.end.flatten()[token])
        best = scores[token, :end].float().topk(min(topk, end)).values.sort().values
        mine = scores[token, picked[token][picked[token] >= 0].long()].float().sort().values
        wrong += not torch.equal(best, mine)
    return wrong


def measure(package: BenchPackage, shape: LogitsShape, topk: int, device: torch.device) -> str:
    """One row."""
    layout = layout_of(package)
    sets = sets_needed(shape.requests * shape.keys * layout.row_bytes, L2_BYTES) if shape.kind == PAGED else 1
    size = package.spec["indexer_cache"].get("block_size") or BLOCK_SIZE
    if shape.kind == PAGED:
        inputs = make_paged_inputs(shape, layout, size, device, sets)
    else:
        inputs = make_flat_inputs(shape, layout, device, sets)
    schedule = package.wrapper(SCHEDULE)
    ours = [logits_call(shape.kind, package.wrapper(shape.kind), schedule, one) for one in inputs]
    theirs = [deep_gemm.prepare(shape.kind, one) for one in inputs]
    own = partial(by_rows, package.wrapper(PREFILL), package.wrapper(DECODE))
    calls: dict[str, Sequence[Call]] = {
        "ours": [chain(shape, one, call, own, topk) for one, call in zip(inputs, ours, strict=True)]
    }
    for name, select in peers(shape, device).items():
        calls[name] = [chain(shape, one, call, select, topk) for one, call in zip(inputs, theirs, strict=True)]
    wrong = wrong_picks(shape, inputs[0], calls["ours"][0], ours[0], topk)
    flush = flush_l2(device)
    found = interleave({name: device_timer(each, flush)[0] for name, each in calls.items()}, rounds=7)
    times = {name: seconds * 1e6 for name, seconds in found.seconds.items()}
    best = min((name for name in times if name != "ours"), key=times.__getitem__)
    each = ", ".join(f"{name} {times[name]:.1f}" for name in times if name != "ours")
    ratio = f"{times['ours']:8.1f} us, {found.ratios[best]:.2f} of DeepGEMM and vLLM's {best} ({each})"
    return f"{shape}, topk {topk}: {ratio}; wrong {wrong}"


def main(folder: str) -> None:
    """Prints a row for each shape."""
    package, device = load_package(Path(folder)), torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    for shape in shapes(package):
        print(measure(package, shape, package.spec["indexer"]["topk"], device), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
