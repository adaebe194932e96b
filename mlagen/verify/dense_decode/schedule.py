"""How dense attention shares a batch out to programs, in plain Python, to check the kernel against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Units [first, end) of a request's keys."""

    request: int
    first: int
    end: int


def share(
    units: Sequence[int], overhead: int, combine_units: int, num_programs: int, *, alike: bool = False
) -> list[list[Part]]:
    """The parts of each program.

    The requests stand on a line, one behind the other, each with `overhead` places and one for each of its units.
    Programs take parts of the line that are equal but for a place, or whole requests, as many each, where those parts
    are at most `combine_units` places longer.

    Where `alike`, as many parts of each request, and no place besides, where those are a place longer at most.

    Args:
        units: of each request, at least 1.
        overhead: places for a request's overhead.
        combine_units: places for a program's cost of sharing requests.
        num_programs: most programs.
        alike: the kernel may give each request as many programs, as those for sm90 do.
    """
    places = [overhead + count for count in units]
    total = sum(places)
    programs = max(min(total, num_programs), 1)
    if units:
        each = -(-len(units) // programs)
        if programs * each * max(places) <= total + programs * combine_units:
            programs = -(-len(units) // each)
            places = [max(places)] * len(units)
            total = programs * each * places[0]
        elif alike and 1 < len(units) <= num_programs and overhead:
            parts_each = num_programs // len(units)
            longest = -(-max(units) // parts_each)
            if longest * programs <= total + programs:
                programs, overhead = len(units) * parts_each, 0
                places = [parts_each * longest] * len(units)
                total = sum(places)
    found: list[list[Part]] = []
    for program in range(num_programs):
        lo, hi = program * total // programs, min((program + 1) * total // programs, total)
        parts, place = [], 0
        for request, count in enumerate(units):
            first, end = max(lo - place - overhead, 0), min(hi - place - overhead, count)
            if first < end:
                parts.append(Part(request, first, end))
            place += places[request]
        found.append(parts)
    return found


def splits_of(parts: Sequence[Sequence[Part]], requests: int) -> list[tuple[int, int]]:
    """For each request, its first program and how many programs share it."""
    programs = [
        [program for program, own in enumerate(parts) if any(part.request == request for part in own)]
        for request in range(requests)
    ]
    return [(own[0], len(own)) for own in programs]
