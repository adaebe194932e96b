"""Races between warps of a kernel that addresses shared memory itself and orders its warps by barriers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlagen.verify.gluon import lines
from mlagen.verify.gluon.layouts import LANES, owners, places
from mlagen.verify.gluon.program import KernelError
from mlagen.verify.gluon.values import Array

NOBODY, SEVERAL = -1, -2
CONFLICTS = {"read": ("write", "atomic"), "write": ("read", "write", "atomic"), "atomic": ("read", "write")}


class Warps:
    """Who touched each word since the last barrier of the whole program.

    Args:
        words: of shared memory.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._warps = {kind: np.full(words, NOBODY, np.int16) for kind in CONFLICTS}
        self._places = {kind: np.zeros(words, np.int32) for kind in CONFLICTS}
        self._blocks: list[tuple[int, int, bool]] = []  # words of Gluon's own accesses, and whether they write

    def barrier(self) -> None:
        """All warps have come to a barrier."""
        for array in self._warps.values():
            array.fill(NOBODY)
        self._blocks.clear()

    def touch(self, words: Array, warps: Array, kind: str) -> None:
        """Takes note of an access in inline assembly.

        Raises:
            KernelError: another warp's is not ordered with it.
        """
        place = lines.here()
        for other in CONFLICTS[kind]:
            found = self._warps[other][words]
            clash = (found != NOBODY) & (found != warps)
            if clash.any():
                self._fail(kind, place, other, int(words[clash][0]))
        own = self._warps[kind]
        before = own[words]
        own[words] = np.where((before == NOBODY) | (before == warps), warps, SEVERAL)
        self._places[kind][words] = place
        others = words[own[words] != warps]
        if len(others) and kind == "write":
            self._fail(kind, place, kind, int(others[0]))
        own[others] = SEVERAL

    def _fail(self, kind: str, place: int, other: str, word: int) -> None:
        raise KernelError(
            f"race of warps at word {word} of shared memory: {kind} at {lines.place(place)}, "
            f"{other} at {lines.place(int(self._places[other][word]))}, and no barrier between them"
        )

    def block(self, descriptor: Any, layout: Any, writes: bool) -> None:
        """Takes note of one of Gluon's accesses: between two that meet, Triton puts a barrier of its own.

        Raises:
            KernelError: it is not ordered with an access in inline assembly.
        """
        shape = descriptor.shape
        first = descriptor.start // 4
        size = int(np.prod(shape))
        if any(begin < first + size and first < end and (writes or wrote) for begin, end, wrote in self._blocks):
            self.barrier()
        if writes:
            self.touch(np.arange(first, first + size), owners(layout, shape) // LANES, "write")
        else:
            read = places(layout, shape)
            warps = np.broadcast_to(np.arange(read.shape[1]) // LANES, read.shape)
            self.touch(first + read.ravel(), warps.ravel(), "read")
        self._blocks.append((first, first + size, writes))
