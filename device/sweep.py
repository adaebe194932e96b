"""Chains in decode and prefill: variants of the package, tiles of top-k, chunks of rows, beside the peers' chain."""
import importlib, os, sys, time
from functools import partial
from pathlib import Path

T0 = time.time()
import torch

OUT = Path(os.environ["SEL"])
sys.path.insert(0, "examples/indexer")
import chain as example

from mlagen.bench.families.mqa_logits import FLAT, PAGED, SCHEDULE, LogitsShape, layout_of, logits_call, make_flat_inputs, make_paged_inputs
from mlagen.bench.families.topk import DECODE, PREFILL
from mlagen.bench.measure import eager_time, event_timer, flush_l2, graph_timer, interleave, warm_up
from mlagen.bench.package import load_package
from mlagen.bench.peers import mqa_logits as deep_gemm
from mlagen.bench.shapes import sets_needed

dev = torch.device("cuda", 0)
torch.manual_seed(0)
K = 2048
packages = {name: load_package(OUT / f"v_{name}") for name in ("old", "new", "sp", "rg")}
layout = layout_of(packages["new"])
say = partial(print, flush=True)


def launch_of(name):
    return importlib.import_module(f"{packages[name].root.__name__}._launch")


def tile(name, *numbers):
    tiles = importlib.import_module(f"{packages[name].root.__name__}._tiles")
    return tiles.TopkSm90Tile(*numbers) if numbers else None


def ours(name, shape, inputs, numbers):
    package = packages[name]
    logits = logits_call(shape.kind, package.wrapper(shape.kind), package.wrapper(SCHEDULE), inputs)
    own = partial(example.by_rows, package.wrapper(PREFILL), package.wrapper(DECODE))
    call = example.chain(shape, inputs, logits, own, K)
    if not numbers:
        return call
    launch, forced = launch_of(name), tile(name, *numbers)

    def steered():
        with launch.force(tile=forced):
            return call()

    return steered


A, B, C, D = (16, 1, 8192, None, 8), (16, 1, 8192, None, 16), (16, 1, 8192, None, 32), (16, 2, 8192, None, 8)
ONE, TWO = (16, 1, 8192, None, 1), (16, 1, 8192, None, 2)
FEW = [("old", ()), ("new", ()), ("sp", ()), ("rg", ()), *((v, t) for v in ("sp", "rg") for t in (A, B))]
PLAN = {
    (1, 32): [*FEW, ("rg", C)],
    (1, 64): [*FEW, ("rg", C)],
    (1, 128): [*FEW, ("rg", C)],
    (16, 32): FEW,
    (16, 64): FEW,
    (64, 32): [("old", ()), ("sp", ()), ("rg", ()), ("rg", ONE), ("rg", TWO)],
    (128, 32): [("old", ()), ("rg", ()), ("rg", ONE)],
}


def compile_ahead():
    """Compiles what the calls launch, side by side."""
    todo = []
    for (requests, keys), rows in PLAN.items():
        shape = LogitsShape(PAGED, requests, 1, 64, keys << 10)
        inputs = make_paged_inputs(shape, layout, 64, dev, 1)[0]
        for name, numbers in rows:
            with launch_of(name).recording() as found:
                ours(name, shape, inputs, numbers)()
            todo += found.values()
    launch_of("new").compile_all(todo)
    say(f"{len(todo)} variants, {time.time() - T0:.0f} s")


def decode():
    for (requests, keys), rows in PLAN.items():
        shape = LogitsShape(PAGED, requests, 1, 64, keys << 10)
        sets = sets_needed(shape.requests * shape.keys * layout.row_bytes, 50 << 20)
        made = make_paged_inputs(shape, layout, 64, dev, sets)
        calls = {f"{name}{'.'.join(map(str, (*numbers[:2], numbers[4]))) if numbers else ''}": [ours(name, shape, one, numbers) for one in made] for name, numbers in rows}
        for name, select in example.peers(shape, dev).items():
            if name == "per row" or (name == "persistent" and requests <= 16):
                continue
            theirs = [deep_gemm.prepare(PAGED, one) for one in made]
            calls["peer " + name] = [example.chain(shape, one, call, select, K) for one, call in zip(made, theirs)]
        logits = [logits_call(PAGED, packages["new"].wrapper(PAGED), packages["new"].wrapper(SCHEDULE), one) for one in made]
        few = [logits_call(PAGED, packages["rg"].wrapper(PAGED), packages["rg"].wrapper(SCHEDULE), one) for one in made]
        base, wrong = calls["old"][0]().clone(), []
        for name, each in calls.items():
            if "peer" not in name and not torch.equal(each[0](), base):
                wrong.append(name)
        calls |= {"logits": logits, "logits rg": few}
        for each in calls.values():
            warm_up(each[0], 0.02)
        found = interleave({name: graph_timer(each) for name, each in calls.items()}, rounds=9)
        say(f"{requests} x {keys}K:", ", ".join(f"{name} {1e6 * t:.2f}" for name, t in found.seconds.items()), "WRONG " + str(wrong) if wrong else "")
        del made, calls, found
        torch.cuda.empty_cache()


def prefill():
    package = packages["new"]
    function, select = package.wrapper(FLAT), package.wrapper(PREFILL)
    for keys, chunks in ((8, (256, 512, 1024, 2048, 4096)), (32, (128, 256, 512, 1024, 4096)), (128, (64, 128, 256, 512, 1024, 4096))):
        shape = LogitsShape(FLAT, 1, 4096, 64, keys << 10)
        one = make_flat_inputs(shape, layout, dev, 1)[0]
        indices = torch.empty(4096, K, dtype=torch.int32, device=dev)
        values, scales = one.q

        def chunked(rows):
            for a in range(0, 4096, rows):
                s = slice(a, a + rows)
                scores = function((values[s], scales), one.keys, one.weights[s], one.start[s], one.end[s], clean_logits=False)
                select(scores, one.start[s], one.end[s], indices[s], len(scores), scores.stride(0), 1, K)
            return indices

        timers, wrong, base = {}, [], chunked(4096).clone()
        for rows in chunks:
            if not torch.equal(chunked(rows), base):
                wrong.append(rows)
            timers[str(rows)] = graph_timer([partial(chunked, rows)] * 1, 8e-3) if keys < 128 else event_timer(partial(chunked, rows), None)
        peer = example.chain(shape, one, deep_gemm.prepare(FLAT, one), example.peers(shape, dev)["per row"], K)
        peer()
        timers["peer"] = graph_timer([peer], 8e-3) if keys < 128 else event_timer(peer, None)
        found = interleave(timers, rounds=5)
        say(f"prefill {keys}K by rows:", ", ".join(f"{name} {1e6 * t:.0f}" for name, t in found.seconds.items()), "WRONG " + str(wrong) if wrong else "")
        del one, timers, found, base
        torch.cuda.empty_cache()


def host():
    package = packages["new"]
    logits = torch.randn(16, 4096, device=dev)
    lens = torch.full((16,), 4096, dtype=torch.int32, device=dev)
    out = torch.empty(16, K, dtype=torch.int32, device=dev)
    long = torch.randn(1, 131072, device=dev)
    one = torch.full((1,), 131072, dtype=torch.int32, device=dev)
    ops = torch.ops._C
    for name, function in (("ours", package.wrapper(DECODE)), ("vLLM", getattr(ops, DECODE))):
        short = eager_time(lambda: function(logits[:1], 1, lens[:1], out[:1], 1, 4096, 1, K)) * 1e6
        bare = logits[:1], lens[:1], out[:1]
        kept = eager_time(lambda: function(bare[0], 1, bare[1], bare[2], 1, 4096, 1, K)) * 1e6
        say(f"from Python, top_k_per_row_decode {name}: 1 x 4K {kept:.1f} us ({short:.1f} with slicing)", end="; ")
        say(f"1 x 128K {eager_time(lambda: function(long, 1, one, bare[2], 1, 131072, 1, K)) * 1e6:.1f} us")
    space = torch.zeros(1 << 20, dtype=torch.uint8, device=dev)
    for name in ("persistent_topk", "cooperative_topk"):
        function = getattr(ops, name)
        say(f"{name} {eager_time(lambda: function(bare[0], bare[1], bare[2], space, K, 4096)) * 1e6:.1f} us", end="; ")
    own = package.wrapper("persistent_topk")
    say(f"our persistent_topk {eager_time(lambda: own(bare[0], bare[1], bare[2], space, K, 4096)) * 1e6:.1f} us")


if __name__ == "__main__":
    for part in (compile_ahead, decode, prefill, host):
        try:
            part()
        except Exception as error:
            say(f"{part.__name__}: {type(error).__name__}: {str(error)[:600]}")
        say(f"-- {part.__name__} {time.time() - T0:.0f} s")
