"""`python -m mlagen.bench.report.balance --package generated/dsv3`: how evenly dense attention shares out real lengths.

Only arithmetic: loads count KV blocks, and a program's overhead for each request that it has a part of. No GPU is
asked, nothing is timed.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlagen.bench.package import BenchPackage, load_package
from mlagen.errors import MlagenError, UsageError
from mlagen.verify.dense_decode.schedule import share

REQUESTS = (16, 64, 128, 256)
HEADS = (16, 128)
MULTIPROCESSORS = 132  # of an H200
TARGET = "sm90"
PAGE_SIZE = 64
MAX_KEYS = 1 << 17  # that a row of the block table names
DRAWS = 9
SEED = 0


class Lengths(NamedTuple):
    """Lengths of prompts: how a trace is called, and its quantiles from 0 to 1 in equal steps."""

    name: str
    quantiles: tuple[int, ...]

    def draw(self, count: int, source: random.Random) -> list[int]:
        """So many lengths, by a straight line between neighbouring quantiles."""
        found = []
        for _ in range(count):
            step, part = divmod(source.random() * (len(self.quantiles) - 1), 1)
            below, above = self.quantiles[int(step)], self.quantiles[int(step) + 1]
            found.append(round(below + part * (above - below)))
        return found


def _trace(name: str, quantiles: str) -> Lengths:
    return Lengths(name, tuple(map(int, quantiles.split())))


# Prompts of rows in the midst of the published files; docs/balance.md says which.
TRACES = (
    _trace(
        "Azure 2023, conversation",
        "7 368 376 385 396 401 409 429 955 1017 1042 1075 1102 1159 1238 1484 2421 4075 4081 4088 4143",
    ),
    _trace(
        "Azure 2023, code",
        "32 134 220 357 510 726 914 1044 1099 1252 1446 1559 1736 1885 2120 2439 2659 3221 4623 6674 7437",
    ),
    _trace(
        "Mooncake, conversation",
        "894 1024 1390 1958 2667 3865 4324 5018 6319 7102 8332 9536 10484 12143 13046 14200 16080 18681 23595 28577"
        " 74319",
    ),
)


def shared(
    kv_blocks: Sequence[int], overhead: int, combine_units: int, programs: int, *, alike: bool = False
) -> list[int]:
    """Load of each program where all programs share the batch: its KV blocks, and the overhead of each part."""
    parts = share(kv_blocks, overhead, combine_units, programs, alike=alike)
    return [sum(overhead + part.end - part.first for part in own) for own in parts]


def next_free(loads: Iterable[int], programs: int) -> list[int]:
    """Load of each of `programs` places that take pieces of work in order, the one that is free first the next."""
    busy = [0] * programs
    for load in loads:
        heapq.heapreplace(busy, busy[0] + load)
    return busy


def cut(kv_blocks: Sequence[int], overhead: int, splits: int) -> list[int]:
    """Loads of the pieces of requests that are all cut into so many splits, even but for a KV block; none is empty."""
    return [
        overhead + (split + 1) * count // pieces - split * count // pieces
        for count in kv_blocks
        for pieces in [min(splits, count)]
        for split in range(pieces)
    ]


class Balance(NamedTuple):
    """The longest program's load over the mean load, of each draw, for three ways to share a batch out.

    The mean is that of the whole batch, each request's overhead once, over all programs: 1 is perfect balance.
    """

    shared: list[float]
    fixed: list[float]
    whole: list[float]
    splits: int


def balance(lengths: Lengths, requests: int, schedule: Any) -> Balance:
    """Draws batches and shares them out.

    Args:
        lengths: the lengths to draw from.
        requests: of a batch.
        schedule: the package's Schedule of such a call.
    """
    source = random.Random(f"{SEED} {lengths.name} {requests}")
    overhead, programs = schedule.overhead, schedule.programs
    found = Balance([], [], [], max(1, programs // requests))
    for _ in range(DRAWS):
        kv_blocks = [max(1, -(-length // schedule.unit_keys)) for length in lengths.draw(requests, source)]
        mean = (sum(kv_blocks) + overhead * requests) / programs
        alike = schedule.kernel != "portable"
        found.shared.append(max(shared(kv_blocks, overhead, schedule.combine_units, programs, alike=alike)) / mean)
        found.fixed.append(max(next_free(cut(kv_blocks, overhead, found.splits), programs)) / mean)
        found.whole.append(max(next_free(cut(kv_blocks, overhead, 1), programs)) / mean)
    return found


def schedule_of(package: BenchPackage, requests: int, heads: int) -> Any:
    """The Schedule of a decode step of such a batch on an H200.

    Raises:
        UsageError: the package has no dense attention over all keys for its target.
    """
    attention = package.attention_spec
    if attention.get("kind") != "dense" or attention.get("window") or TARGET not in package.spec["targets"]:
        raise UsageError(f"{package.folder}: takes a package with dense attention over all keys for {TARGET}")
    facts = package.module("_launch").DeviceFacts(TARGET, MULTIPROCESSORS)
    sizes = {"requests": requests, "s_q": 1, "num_heads": heads, "num_kv_heads": 1, "page_size": PAGE_SIZE}
    aligned = package.module("_splits").ALIGNED
    dense = package.module("dense_decode")
    sm90 = {"can_sm90": True} if "can_sm90" in inspect.signature(dense.schedule).parameters else {}
    return dense.schedule(facts, aligned, **sizes, max_keys=MAX_KEYS, batch_invariant=False, **sm90)


def markdown(package: BenchPackage) -> str:
    """The table, behind a line with the scheduler's numbers for each count of heads."""
    lines, rows = [], []
    for heads in HEADS:
        schedules = [schedule_of(package, requests, heads) for requests in REQUESTS]
        first = schedules[0]
        numbers = f"{first.unit_keys} keys a KV block, overhead {first.overhead}, merges {first.combine_units}"
        lines.append(f"- h{heads}: {numbers} a program, {first.programs} programs of {first.tile.block_h} rows.")
        for lengths in TRACES:
            for requests, schedule in zip(REQUESTS, schedules, strict=True):
                found = balance(lengths, requests, schedule)
                middle = [f"{statistics.median(ratios):.2f}" for ratios in found[:3]]
                rows.append(
                    f"| {lengths.name} | h{heads} | {requests} | {middle[0]} | {max(found.shared):.2f} |"
                    f" {middle[1]} ({found.splits}) | {middle[2]} |"
                )
    head = "| lengths | heads | requests | shared out | worst draw | fixed splits | whole requests |"
    return "\n".join([*lines, "", head, "| --- | --- | ---: | ---: | ---: | ---: | ---: |", *rows]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table of a package."""
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.bench.report.balance", description="How evenly dense attention shares out real lengths."
    )
    parser.add_argument("--package", type=Path, required=True, help="folder of the generated package")
    options = parser.parse_args(arguments)
    try:
        print(markdown(load_package(options.package)), end="")
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
