"""How dense attention shares a batch out to programs, in plain Python, to check the kernel against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """KV blocks [first, end) of a request."""

    request: int
    first: int
    end: int


def share(
    kv_blocks: Sequence[int], overhead: int, combine_units: int, num_programs: int, *, alike: bool = False
) -> list[list[Part]]:
    """The parts of each program.

    The KV blocks of all requests are concatenated, with `overhead` blocks of padding before each request. Programs get
    equal parts of them, but for one block. Or each gets the same number of whole requests, if that takes it at most
    `combine_units` blocks longer.

    Where `alike`, each request gets the same number of parts, without padding, if those are at most one block longer.

    Args:
        kv_blocks: of each request, at least 1.
        overhead: a request's overhead, in KV blocks.
        combine_units: a program's cost of sharing requests, in KV blocks.
        num_programs: most programs.
        alike: the kernel may give each request as many programs, as those for sm90 do.
    """
    padded_blocks = [overhead + count for count in kv_blocks]
    total = sum(padded_blocks)
    programs = max(min(total, num_programs), 1)
    if kv_blocks:
        each = -(-len(kv_blocks) // programs)
        if programs * each * max(padded_blocks) <= total + programs * combine_units:
            programs = -(-len(kv_blocks) // each)
            padded_blocks = [max(padded_blocks)] * len(kv_blocks)
            total = programs * each * padded_blocks[0]
        elif alike and 1 < len(kv_blocks) <= num_programs and overhead:
            parts_each = num_programs // len(kv_blocks)
            longest = -(-max(kv_blocks) // parts_each)
            if longest * programs <= total + programs:
                programs, overhead = len(kv_blocks) * parts_each, 0
                padded_blocks = [parts_each * longest] * len(kv_blocks)
                total = sum(padded_blocks)
    found: list[list[Part]] = []
    for program in range(num_programs):
        lo, hi = program * total // programs, min((program + 1) * total // programs, total)
        parts, offset = [], 0
        for request, count in enumerate(kv_blocks):
            first, end = max(lo - offset - overhead, 0), min(hi - offset - overhead, count)
            if first < end:
                parts.append(Part(request, first, end))
            offset += padded_blocks[request]
        found.append(parts)
    return found


def splits_of(parts: Sequence[Sequence[Part]], requests: int) -> list[tuple[int, int]]:
    """For each request, its first program and how many programs share it."""
    programs = [
        [program for program, own in enumerate(parts) if any(part.request == request for part in own)]
        for request in range(requests)
    ]
    return [(own[0], len(own)) for own in programs]
