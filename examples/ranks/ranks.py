"""Decode over contexts that GPUs share, by generated packages: dense and sparse, beside one GPU.

    torchrun --nproc-per-node 2 examples/ranks/ranks.py [--context 131072] [--requests 4] [--interleave 1]

Each rank holds some of a request's rows: token t is on rank (t // interleave) % ranks. It attends with all heads over
its rows, and the ranks merge their parts by the LSE: an all-gather of LSEs, then a reduce-scatter of outputs over
heads. The result of each rank's heads is compared with attention over all rows. On GPUs the script also times this,
attention of a rank's heads over all rows (tensor parallelism), and the same with FlashMLA, if it is installed. On a
CPU (`--device cpu`) kernels run in Triton's interpreter. Exit code 1: the two part.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as ranks

LATENT, ROPE, PAGE, SCALE = 512, 64, 64, 0.1352337788608801
DENSE, SPARSE = "dsv3", "dsv32_fp8"
OFF = 2.0**-6  # of the largest output: each part and their sum are rounded to bf16
ROUNDS, CALLS = 7, 20

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def package_of(name: str, packages: Path, device: str) -> ModuleType:
    """A generated package; on a CPU with the tiles of sm80, in Triton's interpreter."""
    if str(packages) not in sys.path:
        sys.path.insert(0, str(packages))
    package = importlib.import_module(name)
    if device == "cpu":
        from mlagen.verify import interpreter

        interpreter.install()
        facts = package._launch.DeviceFacts("sm80", 108)
        package._launch.device_facts = lambda device: facts
    return package


@dataclass(frozen=True)
class Cache:
    """Rows of all requests, the same number of each.

    Attributes:
        pages: as the package's writer fills them.
        table: i32 [requests, pages of a request].
        lengths: i32 [requests].
    """

    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def cache_of(package: ModuleType, rows: torch.Tensor) -> Cache:
    """A paged cache with rows bf16 [requests, tokens, LATENT + ROPE]."""
    requests, tokens, columns = rows.shape
    each, device = -(-tokens // PAGE), rows.device
    table = torch.randperm(requests * each, generator=torch.Generator().manual_seed(7)).view(requests, each)
    table = table.to(device, torch.int32)
    dtype, width = (torch.uint8, 656) if package.__name__ == SPARSE else (torch.bfloat16, columns)
    pages = torch.zeros(requests * each, PAGE, width, dtype=dtype, device=device)
    token = torch.arange(tokens, device=device)
    slots = table[:, token // PAGE].long() * PAGE + token % PAGE
    kind = "fp8_ds_mla" if package.__name__ == SPARSE else "auto"
    flat = rows.flatten(0, 1)
    package.concat_and_cache_mla(flat[:, :LATENT], flat[:, LATENT:], pages, slots.flatten(), kind)
    return Cache(pages[:, :, None], table, torch.full((requests,), tokens, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Work:
    """A decode step.

    Attributes:
        package: the package.
        q: bf16 [requests, 1, heads, LATENT + ROPE].
        picks: i32 [requests, picks], tokens of each request; None for dense attention.
        whole, part: the cache of all rows, and of this rank's.
        interleave: tokens in a row that a rank holds.
    """

    package: ModuleType
    q: torch.Tensor
    picks: torch.Tensor | None
    whole: Cache
    part: Cache
    interleave: int

    def call(self, function: Attention, planned: Any, cache: Cache, q: torch.Tensor, slots: Any) -> Any:
        """Attention over a cache; slots i32 [requests, 1, picks] of sparse attention."""
        if slots is None:
            return function(q, cache.pages, cache.table, cache.lengths, LATENT, planned, None, SCALE, True)
        return function(q, cache.pages, None, None, LATENT, planned, None, SCALE, False, True, slots)

    def slots(self, cache: Cache, **shared: int) -> torch.Tensor | None:
        """Slots of the picks; of a part of the rows -1 for those of other ranks."""
        if self.picks is None:
            return None
        count = self.picks.shape[1]
        requests = torch.arange(len(self.q), dtype=torch.int32, device=self.q.device)
        convert = self.package.triton_convert_req_index_to_global_index
        return convert(requests, cache.table, self.picks, PAGE, NUM_TOPK_TOKENS=count, **shared)[:, None]

    def heads(self) -> torch.Tensor:
        """The queries of this rank's heads."""
        return self.q.chunk(ranks.get_world_size(), 2)[ranks.get_rank()]

    def alone(self, function: Attention, planned: Any) -> torch.Tensor:
        """Attention of this rank's heads over all rows."""
        return self.call(function, planned, self.whole, self.heads(), self.slots(self.whole))[0]

    def shared(self, function: Attention, planned: Any) -> torch.Tensor:
        """The same by attention of all heads over this rank's rows, and a merge of the ranks' parts."""
        world, rank = ranks.get_world_size(), ranks.get_rank()
        shared = {"dcp_size": world, "dcp_rank": rank, "cp_kv_cache_interleave_size": self.interleave}
        slots = self.slots(self.part, **shared)
        out, lse = self.call(function, planned, self.part, self.q, slots)
        every = lse.new_empty(world, *lse.shape)
        ranks.all_gather_into_tensor(every.flatten(0, 1), lse.contiguous())
        every = torch.where(every == torch.inf, -torch.inf, every)  # FlashMLA's LSE of a token without keys
        share = torch.exp(every[rank] - torch.logsumexp(every, 0)).nan_to_num()  # [requests, heads, 1]
        scaled = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
        by_rank = torch.stack(scaled.chunk(world, 2))
        mine = torch.empty_like(by_rank[0])
        ranks.reduce_scatter_tensor(mine, by_rank.flatten(0, 1).contiguous())
        return mine


def work_of(name: str, options: argparse.Namespace) -> Work:
    """The inputs of a package, the same on all ranks, and this rank's part of them."""
    package = package_of(name, options.packages, options.device)
    generator = torch.Generator().manual_seed(1)
    shape = (options.requests, options.context, LATENT + ROPE)
    rows = torch.randn(shape, generator=generator, dtype=torch.bfloat16).to(options.device)
    q = torch.randn(options.requests, 1, options.heads, LATENT + ROPE, generator=generator, dtype=torch.bfloat16)
    token, picks = torch.arange(options.context), None
    if name == SPARSE:
        drawn = [torch.randperm(options.context, generator=generator)[: options.topk] for _ in range(options.requests)]
        picks = torch.stack(drawn).to(options.device, torch.int32)
    mine = (token // options.interleave) % ranks.get_world_size() == ranks.get_rank()
    whole, part = cache_of(package, rows), cache_of(package, rows[:, mine.to(options.device)].contiguous())
    return Work(package, q.to(options.device), picks, whole, part, options.interleave)


def planned_by(module: Any) -> Any:
    """The first value of `get_mla_metadata`, which the functions of FlashMLA's signature take."""
    return module.get_mla_metadata()[0]


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call in a replayed graph, the slowest rank's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    found = []
    for _ in range(ROUNDS):
        ranks.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / CALLS)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    ranks.all_reduce(slowest, op=ranks.ReduceOp.MAX)
    return float(slowest)


def contenders(package: ModuleType) -> dict[str, Any]:
    """Modules with `flash_mla_with_kvcache`: the package, and FlashMLA if it is installed."""
    found = {package.__name__: package}
    for name in ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface"):
        try:
            return found | {"FlashMLA": importlib.import_module(name)}
        except ImportError:
            continue
    return found


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare, and on GPUs time, a package."""
    work = work_of(name, options)
    module = work.package
    want = work.alone(module.flash_mla_with_kvcache, planned_by(module)).float()
    got = work.shared(module.flash_mla_with_kvcache, planned_by(module)).float()
    off = (got - want).abs().max() / want.abs().max()
    ranks.all_reduce(off, op=ranks.ReduceOp.MAX)
    result: dict[str, Any] = {"package": name, "off": float(off), "us": {}}
    if options.device == "cuda":
        for who, one in contenders(module).items():
            for key, how in (("all rows", work.alone), ("shared", work.shared)):
                call = functools.partial(how, one.flash_mla_with_kvcache, planned_by(one))
                result["us"][f"{who}, {key}"] = round(seconds(call) * 1e6, 1)
    return result


def main() -> int:
    """Run both packages on this rank."""
    parser = argparse.ArgumentParser(description="decode over contexts that ranks share")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--packages", type=Path, default=Path("generated"))
    parser.add_argument("--only", nargs="+", default=[DENSE, SPARSE], choices=[DENSE, SPARSE])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    for option, value in {"context": 131072, "requests": 4, "heads": 128, "topk": 2048, "interleave": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks.init_process_group("gloo" if options.device == "cpu" else "nccl")
    try:
        results = [run(name, options) for name in options.only]
        first = ranks.get_rank() == 0
        about = {name: getattr(options, name) for name in ("context", "requests", "heads", "topk", "interleave")}
        if options.device == "cuda":
            about |= {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
        about["ranks"] = ranks.get_world_size()
    finally:
        ranks.destroy_process_group()
    if first:
        for one in results:
            times = "; ".join(f"{who} {us} us" for who, us in one["us"].items())
            print(f"{one['package']}: outputs off by {one['off']:.1e} of the largest; {times or 'not timed'}")
        if options.json:
            options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    return int(any(not one["off"] <= OFF for one in results))


if __name__ == "__main__":
    sys.exit(main())
