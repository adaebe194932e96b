"""Kernel time of a decode step at real lengths in vLLM, by vLLM's own backend or by the plugin of a package.

    step.py KIND WHO --state FOLDER --runs N --out REPORT.json   measures one engine
    step.py --table FOLDER   prints the table of the reports step-*.json in a folder

64 requests of 32K tokens and one of 128K decode together, by the tiny models of `plan.py`, with attention of the real
size. No prompt is computed: vLLM's DecodeBenchConnector says that all tokens but the last are in the cache, and
`worker.py` fills the caches with random rows by vLLM's own writers. The profiler's trace gives the kernels that each of
vLLM's three operators of attention launches. They may overlap. The time of an operator is the time while any of its
kernels runs. Matrix products of the model inside these operators, the same in both engines, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LENGTHS = (*(32 << 10,) * 64, 128 << 10)  # tokens of the prompts
LAYERS = 3
WARM_STEPS, STEPS = 6, 12
ROUNDS = 3
CACHE_BYTES = 9 << 30
OPERATORS = {
    "vllm::sparse_attn_indexer": "indexer",
    "vllm::unified_mla_kv_cache_update": "cache",
    "vllm::unified_mla_attention_with_output": "attention",
}
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
Span = tuple[float, float]


def spans_of(events: Iterable[dict[str, Any]], names: Iterable[str]) -> list[tuple[str, float, float]]:
    """Names, begins and ends of the operators with one of these names, in us."""
    wanted = set(names)
    found = [one for one in events if one.get("cat") == "cpu_op" and one["name"] in wanted]
    return [(one["name"], one["ts"], one["ts"] + one["dur"]) for one in found]


def union(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def read(trace: dict[str, Any], steps: int) -> dict[str, Any]:
    """The us that kernels of each operator run, a layer and step, and the us of each kernel by its name."""
    events = trace["traceEvents"]
    launches = {
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
    }
    operators, products = spans_of(events, OPERATORS), spans_of(events, PRODUCTS)
    spans: dict[str, list[Span]] = {part: [] for part in OPERATORS.values()}
    kernels = Counter[str]()
    for one in events:
        if one.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launches.get(one["args"].get("correlation"))
        if at is None or any(first <= at <= last for _, first, last in products):
            continue
        for name, first, last in operators:
            if first <= at <= last:
                spans[OPERATORS[name]].append((one["ts"], one["ts"] + one["dur"]))
                kernels[f"{OPERATORS[name]}: {one['name'][:120]}"] += one["dur"]
    share = steps * LAYERS
    whole = union([span for part in spans.values() for span in part]) / share
    parts = {part: round(union(found) / share, 2) for part, found in spans.items()}
    return {
        "us": round(whole, 2),
        "parts": parts,
        "kernels": {name: round(us / share, 2) for name, us in kernels.items()},
    }


def profiled(llm: Any) -> dict[str, Any]:
    """The time of a step, of the round with the median sum."""
    from loads import Request, Served, add, prompt, step
    from torch.profiler import ProfilerActivity, profile

    engine, served, lengths = llm.llm_engine, Served(), dict.fromkeys(range(len(LENGTHS)), 0)
    count = 40 + ROUNDS * STEPS + len(LENGTHS)
    for number, length in enumerate(LENGTHS):
        add(engine, number, Request(prompt(number, length), count), None)
    while 0 in lengths.values():
        step(engine, served, lengths)
    llm.collective_rpc("fill_caches")
    for _ in range(WARM_STEPS):
        step(engine, served, lengths)
    rounds = []
    for _ in range(ROUNDS):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                step(engine, served, lengths)
        path = Path(tempfile.mkdtemp()) / "trace.json"
        profiler.export_chrome_trace(str(path))
        rounds.append(read(json.loads(path.read_text(encoding="utf-8")), STEPS))
    rounds.sort(key=lambda one: one["us"])
    return rounds[len(rounds) // 2] | {"rounds": [one["us"] for one in rounds]}


def measure(asked: argparse.Namespace) -> int:
    """Starts an engine, waits until all are ready, and measures it while no other runs."""
    import engine
    import plan

    longest = max(LENGTHS) + 256
    plan.LONGEST = longest
    plan.ENGINES["step"] = {
        "enforce_eager": True,
        "max_model_len": longest,
        "max_num_seqs": len(LENGTHS),
        "kv_cache_memory_bytes": CACHE_BYTES,
        "gpu_memory_utilization": 0.14,
        "kv_transfer_config": {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.0},
        },
    }
    engine.prepare(asked.kind, asked.who, "step")
    asked.engine = "step"
    name = f"{asked.kind}-{asked.who}"
    found: dict[str, Any] = {"kind": asked.kind, "who": asked.who, "heads": asked.heads}
    import torch
    import triton
    import vllm

    found |= {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
    if asked.who == "mlagen":
        engine.warm_up(asked.kind)
    llm = engine.make_engine(asked)
    found |= {"device": torch.cuda.get_device_name(), "backends": llm.collective_rpc("attention_classes")[0]}
    engine.everyone(asked.state, asked.runs, name)
    with engine.locked(asked.state / "lock"):
        found |= profiled(llm)
    asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(name, found["us"], found["parts"], found["rounds"], flush=True)
    return 0


def table(folder: Path) -> Iterable[str]:
    """Lines of a table: us a layer by vLLM's backend and by the package, and the ratio."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("step-*.json"))]
    found = {(one["kind"], one["who"]): one for one in reports}
    yield "| model | vLLM us a layer (indexer, cache, attention) | package us a layer (likewise) | ratio |"
    yield "|---|---|---|---|"
    for kind in dict.fromkeys(kind for kind, _ in found):
        theirs, ours = found.get((kind, "vllm")), found.get((kind, "mlagen"))
        if theirs and ours:
            cells = [f"{one['us']} ({', '.join(str(us) for us in one['parts'].values())})" for one in (theirs, ours)]
            yield f"| {kind} | {cells[0]} | {cells[1]} | {theirs['us'] / ours['us']:.2f} |"


def main() -> int:
    """Measures an engine, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("sparse", "sparse_fp8", "dense"))
    parser.add_argument("who", nargs="?", choices=("vllm", "mlagen"))
    parser.add_argument("--heads", type=int, default=16, help="query heads: those of a rank")
    parser.add_argument("--state", type=Path, help="folder for files that runs tell each other by")
    parser.add_argument("--runs", type=int, default=1, help="runs to wait for")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="folder of reports")
    parser.set_defaults(tp=1, dcp=1, prefill="")
    asked = parser.parse_args()
    if asked.table:
        print("\n".join(table(asked.table)))
        return 0
    return measure(asked)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's shutdown takes seconds
