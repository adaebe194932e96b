"""How dense attention shares a batch out to programs, in plain Python: what the kernel has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Units [first, end) of a request's keys."""

    request: int
    first: int
    end: int


def share(units: Sequence[int], overhead: int, least_units: int, num_programs: int) -> list[list[Part]]:
    """The parts of each program.

    The requests stand on a line, one behind the other, each with `overhead` places and one for each of its units.
    Programs take parts of the line that are equal but for a place.

    Args:
        units: of each request, at least 1.
        overhead: places for what a request costs besides.
        least_units: fewest places of a program, where the line has so many.
        num_programs: most programs.
    """
    total = sum(overhead + count for count in units)
    programs = min(max(total // least_units, 1), num_programs)
    found: list[list[Part]] = []
    for program in range(num_programs):
        lo, hi = program * total // programs, min((program + 1) * total // programs, total)
        parts, place = [], 0
        for request, count in enumerate(units):
            place += overhead
            first, end = max(lo - place, 0), min(hi - place, count)
            if first < end:
                parts.append(Part(request, first, end))
            place += count
        found.append(parts)
    return found


def splits_of(parts: Sequence[Sequence[Part]], requests: int) -> list[tuple[int, int]]:
    """For each request, its first program and how many programs share it."""
    programs = [
        [program for program, own in enumerate(parts) if any(part.request == request for part in own)]
        for request in range(requests)
    ]
    return [(own[0], len(own)) for own in programs]
