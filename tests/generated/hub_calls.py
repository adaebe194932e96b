"""Loads kernel repositories by Hugging Face's `kernels` and calls them in Triton's interpreter.

    python hub_calls.py {call|benchmark} REPOSITORY...

`call` calls each function of a repository, checks attention and merges against plain torch, and prints the function's
name. `benchmark` runs the workloads of its benchmark with small sizes, and compares each with its reference. Lines
begin with the name of the kernel's module.
"""

import os
import sys
from pathlib import Path

import alone
import torch

SMALL = {"requests": 2, "length": 48, "heads": 4, "kv_heads": 2, "keys": 90, "topk": 40, "decode": 2, "prefill": 5}


def load(repository: Path):
    """The kernel, for a GPU that is not here: a variant is chosen by its folder."""
    from kernels import get_kernel

    os.environ["LOCAL_KERNELS"] = f"ORG/{repository.name}={repository / 'build' / 'torch-cuda'}"
    return get_kernel(f"ORG/{repository.name}", version=0)


def call(kernel, repository: Path) -> None:
    """Calls each function, and an operator of torch where there are any."""
    alone.run(kernel)
    if hasattr(kernel, "ops"):
        print(f"{kernel.__name__} torch.ops.{kernel.ops.NAMESPACE}")
        arguments = alone.arguments(kernel)["flash_mla_sparse_fwd"]
        operators = getattr(torch.ops, kernel.__name__)
        alone.check_attention(arguments, operators.flash_mla_sparse_fwd(**arguments)[0])


def benchmark(kernel, repository: Path) -> None:
    """Runs each workload once, as `kernels benchmark` does before it takes times."""
    from kernels.cli.benchmark import discover_benchmark_classes, discover_benchmark_scripts

    facts = kernel._launch.DeviceFacts(kernel.SPEC["spec"]["targets"][0], 4)
    kernel._launch.device_facts = lambda device: facts
    for script in discover_benchmark_scripts(repository.name, repository):
        for found in discover_benchmark_classes(script, repository):
            for name, size in SMALL.items():
                if hasattr(found, name):
                    setattr(found, name, size)
            for workload in [name.removeprefix("benchmark_") for name in dir(found) if name.startswith("benchmark_")]:
                torch.manual_seed(found.seed)
                run = found()
                run.kernel = kernel
                getattr(run, f"setup_{workload}", run.setup)()
                getattr(run, f"benchmark_{workload}")()
                wanted = getattr(run, f"verify_{workload}")()
                assert torch.allclose(run.out, wanted, atol=1e-2), (run.out - wanted).abs().max()
                assert not torch.allclose(run.out, torch.zeros_like(wanted), atol=1e-2)
                print(f"{kernel.__name__} {workload}")


def main() -> None:
    """Runs a mode over repositories. All of them are loaded before the first call."""
    from mlagen.verify import interpreter

    interpreter.install()
    mode = {"call": call, "benchmark": benchmark}[sys.argv[1]]
    loaded = {path: load(path) for path in map(Path, sys.argv[2:])}
    for path, kernel in loaded.items():
        mode(kernel, path)


if __name__ == "__main__":
    main()
