"""Decode of one layer over an e4m3 cache: SGLang's cast of the whole pool, and a package that reads the cache as it is.

    python examples/sglang/cast.py [--requests 64] [--keys 4096] [--heads 16 128] [--pool 262144 1048576] [--json FILE]

With an fp8 cache, SGLang's `fa3` and `flashinfer` backends convert the whole pool of a layer to the dtype of q, used or
not, and attend over the copy. The package dsv3_fp8 attends over the pool itself. All results are compared with float64.
On a GPU the script times the conversion, the conversion with FlashAttention-3 behind it (if
that is installed), and the package with q in bf16 and in e4m3. On a CPU (`--device cpu`) the package runs in Triton's
interpreter. Exit code 1: a result is too far off.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LATENT, ROPE, PAGE, SCALE = 512, 64, 64, 0.1352337788608801
PACKAGE = "dsv3_fp8"
Q_SCALE = 2.0**-5
OFF = {"bf16": 6e-3, "e4m3": 6e-2}  # of the largest output, by the dtype of q: e4m3 rounds q to four bits
ROUNDS = 9


@dataclass(frozen=True)
class Step:
    """The inputs of one layer's decode step.

    Attributes:
        q: bf16 [requests, 1, heads, LATENT + ROPE].
        pool: e4m3 [pages, PAGE, 1, LATENT + ROPE], of all requests that the server has room for.
        table: i32 [requests, pages of a request], of the running ones.
        lengths: i32 [requests].
    """

    q: torch.Tensor
    pool: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def expected(self) -> torch.Tensor:
        """Attention in float64, [requests, 1, heads, LATENT]."""
        found = []
        for q, pages, length in zip(self.q[:, 0].double(), self.table, self.lengths.tolist(), strict=True):
            rows = self.pool[pages.long()].flatten(0, 2)[:length].double()
            found.append((q @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT])
        return torch.stack(found)[:, None]


def step_of(requests: int, keys: int, heads: int, pool: int, device: str) -> Step:
    """Requests of `keys` tokens each in a pool of `pool` tokens, standard normal."""
    generator = torch.Generator(device).manual_seed(3)
    each, pages = -(-keys // PAGE), max(-(-pool // PAGE), requests * -(-keys // PAGE))
    q = torch.randn(requests, 1, heads, LATENT + ROPE, generator=generator, device=device) / 8
    rows = torch.empty(pages, PAGE, 1, LATENT + ROPE, dtype=torch.float8_e4m3fn, device=device)
    for first in range(0, pages, 4096):  # a float32 pool may not fit
        part = rows[first : first + 4096]
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    table = torch.randperm(pages, generator=generator, device=device)[: requests * each].view(requests, each)
    lengths = torch.full((requests,), keys, dtype=torch.int32, device=device)
    return Step(q.bfloat16(), rows, table.to(torch.int32), lengths)


def by_package(package: ModuleType, step: Step, q: str) -> Callable[[], torch.Tensor]:
    """The package's call; q in bf16, or rounded to e4m3 beforehand."""
    scales = {"k_scale": torch.ones(1, device=step.q.device)}
    query = step.q
    if q == "e4m3":
        query = (step.q / Q_SCALE).to(torch.float8_e4m3fn)
        scales["q_scale"] = torch.full((1,), Q_SCALE, device=step.q.device)
    planned, _ = package.get_mla_metadata()
    arguments = (query, step.pool.view(torch.uint8), step.table, step.lengths, LATENT, planned, None, SCALE, True, True)
    return lambda: package.flash_mla_with_kvcache(*arguments, **scales)[0]


def cast(step: Step, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The conversion of the pool to `rows` alone."""
    return lambda: rows.copy_(step.pool)


def by_cast(step: Step, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The conversion, and FlashAttention-3 over its result. Raises ImportError without FlashAttention-3."""
    from mlagen.bench.peers.libraries import flash_attention_3_call

    convert, keys = cast(step, rows), int(step.lengths.max())
    # The plan is made here, once: SGLang makes one for all layers of a step.
    attend = flash_attention_3_call(step.q, rows, step.table, step.lengths, keys, SCALE)

    def call() -> torch.Tensor:
        convert()
        result = attend()
        assert isinstance(result, torch.Tensor)
        return result

    return call


def package_of(packages: Path, device: str) -> ModuleType:
    """The generated package; on a CPU with the tiles of sm80, in Triton's interpreter."""
    sys.path.insert(0, str(packages))
    package = importlib.import_module(PACKAGE)
    if device == "cpu":
        from mlagen.verify import interpreter

        interpreter.install()
        facts = package._launch.DeviceFacts("sm80", 108)
        package._launch.device_facts = lambda device: facts
    return package


def run(package: ModuleType, step: Step, device: str) -> dict[str, Any]:
    """Compare the results of a step and, on a GPU, time the calls in turns."""
    calls = {f"package, q {q}": (by_package(package, step, q), OFF[q]) for q in OFF}
    rows = torch.empty_like(step.pool, dtype=step.q.dtype)
    if device == "cuda":
        try:
            calls["cast and FA3"] = (by_cast(step, rows), OFF["bf16"])
        except ImportError as error:
            print(f"FlashAttention-3 is not there: {error}", file=sys.stderr)
    want = step.expected()
    result: dict[str, Any] = {"off": {}, "us": {}, "wrong": []}
    for name, (call, most) in calls.items():
        off = float((call().reshape(want.shape).double() - want).abs().max() / want.abs().max())
        result["off"][name] = off
        if not off <= most:
            result["wrong"].append(name)
    if device == "cuda":
        from mlagen.bench.measure import event_timer, flush_l2, interleave, warm_up

        flush = flush_l2(torch.device("cuda", torch.cuda.current_device()))
        timed = {"cast": cast(step, rows), **{name: call for name, (call, _) in calls.items()}}
        for call in timed.values():
            warm_up(call)
        rounds = interleave({name: event_timer(call, flush) for name, call in timed.items()}, ROUNDS)
        result["us"] = {name: round(seconds * 1e6, 1) for name, seconds in rounds.seconds.items()}
        result["spread"] = {name: round(spread, 3) for name, spread in rounds.spreads.items()}
    return result


def main() -> int:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description="the cast of an fp8 pool beside attention over it")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--packages", type=Path, default=Path("generated"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--keys", type=int, default=4096, help="tokens of a request")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--pool", type=int, nargs="+", default=[262144, 1048576], help="tokens of the pool")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    package = package_of(options.packages, options.device)
    results = []
    for heads in options.heads:
        for pool in options.pool:
            step = step_of(options.requests, options.keys, heads, pool, options.device)
            one = {"heads": heads, "pool": pool, **run(package, step, options.device)}
            times = "; ".join(f"{name} {us} us" for name, us in one["us"].items())
            off = ", ".join(f"{name} {value:.1e}" for name, value in one["off"].items())
            print(f"{heads} heads, a pool of {pool} tokens: off by {off}; {times or 'not timed'}", flush=True)
            results.append(one)
    if options.json:
        about: dict[str, Any] = {"requests": options.requests, "keys": options.keys}
        if options.device == "cuda":
            about |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    return int(any(one["wrong"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
