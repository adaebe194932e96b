"""One tiny DeepSeek model with dummy weights in vLLM, by vLLM's own backend or by the plugin of a package.

Serves the loads of one engine and writes what came of each as JSON, part by part. Several such processes get ready side
by side; those that measure throughput do so one at a time, once all of them are ready.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loads
from plan import ENGINES, KINDS, LONGEST, MAY_REFUSE, MEASURED, MODES, block, config, modes_of

WAIT = 300  # seconds for the others to get ready, and to be measured


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("who", choices=("vllm", "mlagen"))
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="loads, of those of the engine")
    parser.add_argument("--heads", type=int, default=16, help="query heads of all ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--dcp", type=int, default=1, help="decode context parallel ranks")
    parser.add_argument("--prefill", default="", help="a package whose plugin is the MLA prefill backend")
    parser.add_argument("--state", type=Path, required=True, help="folder by which runs know of each other")
    parser.add_argument("--runs", type=int, default=1, help="runs that measure, to wait for")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Report:
    """What was found so far, on disk after every part."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found | {"modes": {}}

    def write(self) -> None:
        """Puts it on disk, whole or not at all."""
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.found), encoding="utf-8")
        beside.replace(self.path)

    def part(self, mode: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Runs a part of a mode and keeps what it gives; after one that failed, none of this engine runs."""
        kept = self.found["modes"].setdefault(mode, {})
        try:
            if any("failed" in one for one in self.found["modes"].values()):
                kept.setdefault("failed", f"{name}: not run after an earlier failure")
            else:
                kept |= run()
        except Exception as error:
            traceback.print_exc()
            kept["failed"] = f"{name}: {type(error).__name__}: {error}"[:400]
        self.write()

    def failed(self) -> bool:
        """Whether a part did, other than where vLLM's own backend may refuse."""
        return any(
            "failed" in one and not (self.found["who"] == "vllm" and mode in MAY_REFUSE)
            for mode, one in self.found["modes"].items()
        )


def prepare(kind: str, who: str, engine: str, prefill: str = "") -> None:
    """What vLLM reads of the environment before it is imported: which plugins it loads, among others."""
    package, _, _ = KINDS[kind]
    os.environ |= {
        "VLLM_PLUGINS": ",".join(f"mlagen_{one}" for one in (package, prefill) if one) if who == "mlagen" else "none",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",  # runs side by side share its folder
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # ranks talk by NCCL alone
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the package may have used the GPU before
        "VLLM_BATCH_INVARIANT": str(int(engine == "invariant")),
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # of batches of all sizes
        "HF_HUB_OFFLINE": "1",
    }


def warm_up(kind: str) -> dict[str, Any]:
    """Compiles the package's kernels as a server's start does, and says how many: none with a wheel that holds them.

    Runs side by side wait for the first one, and find its kernels on disk. vLLM calls the same function again.
    """
    import torch
    from triton import knobs

    package, _, _ = KINDS[kind]
    compiled, began = [], time.monotonic()
    knobs.compilation.listener = lambda *, cache_hit, **_: None if cache_hit else compiled.append(cache_hit)
    importlib.import_module(f"mlagen_vllm_{package}.{package}").warmup(torch.device("cuda", 0))
    knobs.compilation.listener = None
    found = {"compiled": len(compiled), "seconds": time.monotonic() - began}
    print(f"warmup: {found['compiled']} kernels compiled, {found['seconds']:.1f} s", flush=True)
    return found


def shared(asked: argparse.Namespace) -> int:
    """How many ranks share a context: as asked, but 1 where vLLM's own backend cannot.

    Its sparse MLA needs an LSE of the backend, and CuTe DSL for the indexer's picks.
    """
    if asked.who == "mlagen" or asked.dcp == 1 or asked.kind == "dense":
        return int(asked.dcp)
    from vllm.utils.import_utils import has_cutedsl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    own = AttentionBackendEnum[KINDS[asked.kind][1]].get_class().get_impl_cls()
    return int(asked.dcp) if own.can_return_lse_for_decode and has_cutedsl() else 1


def make_engine(asked: argparse.Namespace) -> Any:
    """vLLM with the model, on the backend that is asked for."""
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    package, backend, cache_dtype = KINDS[asked.kind]
    if asked.who == "mlagen":  # vLLM 0.26 has one name for all that are not its own
        backend = f"MLAGEN_{package.upper()}" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config(asked.kind, asked.heads)), encoding="utf-8")
    common = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": LONGEST,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "block_size": block(asked.kind),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.03,  # of which so many runs fit one GPU
        "kv_cache_memory_bytes": 320 << 20,
        "tensor_parallel_size": asked.tp,
        "decode_context_parallel_size": asked.dcp,
        "disable_custom_all_reduce": True,
        "worker_extension_cls": "worker.Look",
        "attention_backend": backend,
        "kv_cache_dtype": cache_dtype,
    }
    settings = common | ENGINES[asked.engine]
    if asked.prefill and asked.who == "mlagen":
        chosen = {"mla_prefill_backend": "CUSTOM"}
        settings["attention_config"] = settings.get("attention_config", {}) | chosen
    return LLM(model=str(folder), **settings)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time is inside."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def everyone(folder: Path, runs: int, name: str) -> None:
    """Waits until as many runs have come here."""
    (folder / name).touch()
    until = time.monotonic() + WAIT
    while len(list(folder.iterdir())) < runs and time.monotonic() < until:
        time.sleep(0.2)


def measure(llm: Any, asked: argparse.Namespace, report: Report, name: str) -> None:
    """Throughput, one run at a time and while no other does anything."""
    modes = modes_of(asked.engine, asked.modes)
    everyone(asked.state / "ready", asked.runs, name)
    with locked(asked.state / "lock"):
        if asked.engine in modes:
            llm.collective_rpc("count_steps")
            report.part(asked.engine, "throughput", lambda: {"rates": loads.throughput(llm)})
            report.part(asked.engine, "steps", lambda: {"steps": llm.collective_rpc("steps")[0]})
        if "load" in modes:
            report.part("load", "requests that come and go", lambda: loads.load(llm))
    everyone(asked.state / "measured", asked.runs, name)


def serve_all(llm: Any, asked: argparse.Namespace, report: Report) -> None:
    """The loads whose time is not taken, by mode."""
    parts: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "eager": ("sequences", lambda: loads.plain(llm)),
        "graphs": ("sequences", lambda: loads.plain(llm)),
        "load": ("the same requests alone", lambda: loads.load_alone(llm)),
        "mixed": ("mixed batches", lambda: loads.mixed(llm)),
        "prefix": ("shared prefixes", lambda: loads.prefix(llm, block(asked.kind) * asked.dcp)),
        "pieces": ("mixed batches", lambda: loads.mixed(llm)),
        "speculative": ("speculative tokens", lambda: loads.speculative(llm)),
        "invariant": ("alone and in a batch", lambda: loads.invariant(llm)),
    }
    for mode in modes_of(asked.engine, asked.modes):
        report.part(mode, *parts[mode])
        if mode == "eager" and asked.kind == "v4" and asked.who == "mlagen":
            report.part(mode, "attention beside vLLM's own", lambda: loads.beside(llm))
    report.found |= {"calls": llm.collective_rpc("calls")[0]}
    report.write()


def start(asked: argparse.Namespace, report: Report) -> Any:
    """The engine, or None: why not is then in the report, for every mode."""
    made = []

    def make() -> dict[str, Any]:
        began = time.monotonic()
        import torch
        import triton
        import vllm

        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
        asked.dcp = shared(asked)
        report.found |= {"versions": versions, "dcp": asked.dcp}
        if asked.who == "mlagen":
            report.found |= {"warmup": warm_up(asked.kind)}
        made.append(make_engine(asked))
        classes = made[0].collective_rpc("attention_classes")
        report.found |= {"backends": sorted({one for rank in classes for one in rank})}
        report.found |= {"indexer": made[0].collective_rpc("logits_module")[0]}
        report.found |= {"device": torch.cuda.get_device_name(), "ready": time.monotonic() - began}
        return {}

    for mode in modes_of(asked.engine, asked.modes):
        report.part(mode, "start of the engine", make if not made else dict)
    return None if any("failed" in one for one in report.found["modes"].values()) else made[0]


def main() -> int:
    """Runs the engine and writes what came out."""
    asked = options()
    prepare(asked.kind, asked.who, asked.engine, asked.prefill)
    name = f"{asked.kind}-{asked.engine}-{asked.who}"
    about = {"kind": asked.kind, "who": asked.who, "heads": asked.heads, "tp": asked.tp, "dcp": asked.dcp}
    report = Report(asked.out, about)
    llm = start(asked, report)
    if llm is not None:
        if asked.engine in MEASURED:
            measure(llm, asked, report, name)
        serve_all(llm, asked, report)
    return int(report.failed())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's shutdown takes seconds, and nothing is left to write
