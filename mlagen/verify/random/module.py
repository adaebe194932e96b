"""Random calls of one sm90 module, in this process, for a tool that watches it: compute-sanitizer, or Triton's consan.

    compute-sanitizer --tool racecheck --kernel-name kns=sm90 \
        python -m mlagen.verify.random.module generated/dsv32 --module _topk_sm90 --calls 8
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from mlagen.verify.random.reached import REACHED, modules_of
from mlagen.verify.random.tally import Station
from mlagen.verify.worker import import_package, prepare

PLAIN = ("once",)
SAME_SHAPE = 3  # calls of a shape, since a new one may compile anew


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.verify.random.module", description="Makes random calls of one sm90 module on a GPU."
    )
    parser.add_argument("package", type=Path, help="folder of the generated package")
    parser.add_argument("--module", required=True, choices=sorted(REACHED), help="module whose kernels the calls reach")
    parser.add_argument("--calls", type=int, default=12, help="calls that launch the module; default 12")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no call begins; default 120")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; default 0")
    parser.add_argument("--plain", action="store_true", help="one call at a time, without graphs and side streams")
    return parser


def _take_memory() -> None:
    """Gives Triton the allocator that consan's records need."""
    import torch
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> Any:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    triton.set_allocator(allocate)


def main(arguments: list[str] | None = None) -> int:
    """Makes the calls; a line a shape.

    Returns:
        0: all calls were right and reached the module; 1: some call was wrong, or too few reached it; 2: bad usage.
    """
    options = _parser().parse_args(arguments)
    if options.module not in modules_of([options.package], "*"):
        print(f"{options.package}: no module {options.module}", file=sys.stderr)
        return 2
    prepare("cuda")
    from mlagen.verify.random.station import Tester

    _take_memory()
    station = Station(options.package.name, *REACHED[options.module])
    tester = Tester(station, import_package(options.package), "cuda", options.seed, ways=PLAIN if options.plain else ())
    end, shape, reached, wrong = time.monotonic() + options.seconds, 0, 0, 0
    while reached < options.calls and time.monotonic() < end:
        tally = tester.batch(shape, 0, SAME_SHAPE, end - time.monotonic(), lambda _: None)
        kernels = {name: calls for name, (calls, _) in tally.kernels.items() if name.startswith(f"{options.module}:")}
        reached += max(kernels.values(), default=0)
        wrong += tally.wrong
        print(f"shape {shape}: {kernels or 'the module was not reached'}, {tally.wrong} wrong", flush=True)
        for number, way, detail in tally.failures:
            print(f"    call {shape}.{number}, {way}: {detail}", flush=True)
        if tally.broken:
            break
        shape += 1
    print(f"{options.module}: {reached} calls of {shape} shapes, {wrong} wrong")
    return int(bool(wrong) or not reached)


if __name__ == "__main__":
    sys.exit(main())
