"""Inline assembly: PTX, parsed once a text and executed instruction by instruction over all threads at once.

A register holds bits, one entry a thread in the last dimension. An instruction that is not known is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mlagen.verify.gluon.layouts import LANES
from mlagen.verify.gluon.values import Array


class PtxError(Exception):
    """Assembly asks for an instruction or an operand that is not known here."""


class Instruction(NamedTuple):
    """One instruction: the predicate it is under, its name's parts and operands."""

    predicate: str
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]


BITS = {"8": np.dtype("u1"), "16": np.dtype("u2"), "32": np.dtype("u4"), "64": np.dtype("u8")}
KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


@functools.lru_cache(maxsize=512)
def parse(text: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and labels of a text."""
    body = re.sub(r"//[^\n]*", "", text).strip()
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in _statements(body):
        statement = line.strip()
        while label := re.match(r"(\w+):\s*", statement):
            labels[label[1]] = len(found)
            statement = statement[label.end() :]
        if not statement or statement.startswith(".reg"):
            continue
        match = re.match(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
        if match is None:
            raise PtxError(f"no instruction: {statement}")
        listed = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[][^,]*", match[4])
        operands = tuple(one.strip() for one in listed if one.strip())
        found.append(Instruction(match[2] or "", match[1] == "!", tuple(re.split(r"::|\.", match[3])), operands))
    return tuple(found), labels


def _statements(body: str) -> list[str]:
    """Statements without the braces around blocks; those of vectors stay."""
    blocks = re.sub(r"\{(?=\s*(\.reg|\w+\.|@))", "", body)
    kept, depth = [], 0
    for one in re.split(r"([{}])", blocks):
        if one == "{":
            depth += 1
        if one != "}" or depth:
            kept.append(one)
        if one == "}" and depth:
            depth -= 1
    return re.split(r";|(?<=:)\s*\n", "".join(kept))


class Threads:
    """The threads that a text runs on.

    Attributes:
        registers: bits by name; operands are "$0" and so on.
        count: of threads.
        programs: of the grid.
        memory: loads, stores and prefetches: `memory(space, action, addresses, mask, values, register, width)`, where
            the width of a prefetch is in bytes.
        barrier: `barrier(action, number, threads)`.
    """

    def __init__(
        self,
        registers: dict[str, Array],
        first: int,
        threads: int,
        programs: int,
        memory: Callable[..., Array],
        barrier: Callable[[str, int, int | None], None],
    ) -> None:
        self.registers = registers
        self.count = threads
        thread = np.arange(first, first + threads, dtype="u4")
        lane = thread % np.uint32(LANES)
        self.special = {
            "%tid.x": thread,
            "%laneid": lane,
            "%lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
            "%nctaid.x": np.uint32(programs),
            "global_smem": np.uint32(0),
        }
        self.memory, self.barrier = memory, barrier

    def run(self, text: str) -> None:
        """Runs a text."""
        instructions, labels = parse(text)
        at, skipped = 0, None
        while at < len(instructions):
            one = instructions[at]
            if skipped is not None and at == skipped[0]:
                skipped = None
            mask: Any = True if skipped is None else ~skipped[1]
            if one.predicate:
                flag = self.registers[one.predicate] != 0
                mask = mask & (~flag if one.negated else flag)
            if one.parts[0] == "bra":
                target = labels[one.operands[0]]
                if target <= at:
                    raise PtxError("a branch goes back")
                if skipped is not None and skipped[0] != target:
                    raise PtxError("branches cross")
                taken = np.asarray(mask)
                if taken.all():
                    at = target
                    continue
                skipped = target, taken
            else:
                self._execute(one, mask)
            at += 1

    def _execute(self, one: Instruction, mask: Any) -> None:
        name = one.parts[0]
        if name in ("ld", "st", "atom", "red", "prefetch", "cp"):
            self._access(one, mask)
        elif name == "bar":
            number = int(np.asarray(self.value(one.operands[0], "u32")).flat[0])
            self.barrier(one.parts[1], number, int(one.operands[1]) if len(one.operands) > 1 else None)
        elif name == "mov" and one.operands[0].startswith("{"):
            self._unpack(one, mask)
        else:
            function = ALU.get(name)
            if function is None:
                raise PtxError(f"instruction {'.'.join(one.parts)} is not known")
            found = function(self, one.parts[1:], one.operands[1:])
            targets = one.operands[0].split("|")
            results = found if isinstance(found, tuple) else (found,)
            for target, result in zip(targets, results, strict=False):
                self.set(target, result, mask)

    def set(self, name: str, value: Array, mask: Any = True) -> None:
        """Writes a register where the mask says so."""
        bits = np.asarray(value)
        if bits.dtype.kind in "if":
            bits = bits.view(f"u{bits.dtype.itemsize}")
        if mask is not True and not np.all(mask):
            old = self.registers.get(name)
            bits = np.where(mask, bits, np.zeros((), bits.dtype) if old is None else old)
        self.registers[name] = bits

    def value(self, operand: str, kind: str) -> Array:
        """An operand as values of a type: "u32", "s32", "f32", "b16", "pred" and so on."""
        if kind == "pred":
            return self.registers[operand] != 0
        dtype = np.dtype(f"{KINDS[kind[0]]}{int(kind[1:]) // 8}")
        found = self.registers.get(operand, self.special.get(operand))
        if found is None:
            return _immediate(operand, dtype)
        bits = np.asarray(found)
        if bits.dtype.itemsize != dtype.itemsize:
            bits = bits.astype(f"u{dtype.itemsize}")
        return bits if bits.dtype == dtype else bits.view(dtype)

    def _unpack(self, one: Instruction, mask: Any) -> None:
        """`mov.b32 {a, b}, c`."""
        targets = [name.strip() for name in one.operands[0][1:-1].split(",")]
        bits = int(one.parts[1][1:])
        whole, size = self.value(one.operands[1], one.parts[1]), bits // len(targets)
        for number, target in enumerate(targets):
            self.set(target, (whole >> np.array(number * size, whole.dtype)).astype(f"u{size // 8}"), mask)

    def _access(self, one: Instruction, mask: Any) -> None:
        parts, operands = one.parts, one.operands
        if parts == ("prefetch", "param", "tensormap"):  # of a descriptor, which lies among the kernel's parameters
            return
        place = next(operand for operand in operands if operand.startswith("["))
        base, _, offset = place[1:-1].partition("+")
        address = self.value(base.strip(), "u64").astype(np.int64) + int(offset or 0)
        if parts[0] in ("prefetch", "cp"):
            if parts[0] == "cp" and parts[1:4] != ("async", "bulk", "prefetch"):
                raise PtxError(f"instruction {'.'.join(parts)} is not known")
            self.memory("global", "prefetch", address, mask, None, 0, int(operands[1]) if parts[0] == "cp" else 1)
            return
        space = parts[1]
        if space not in ("shared", "global"):
            raise PtxError(f"memory of {'.'.join(parts)} is not known")
        width = {"v2": 2, "v4": 4}.get(parts[-2], 1)
        if parts[-1][1:] != "32":
            raise PtxError(f"memory access {'.'.join(parts)} is not known")
        if parts[0] == "ld":
            targets = operands[0].strip("{}").split(",")
            for number, target in enumerate(targets):
                loaded = self.memory(space, "ld", address, mask, None, number, width)
                self.set(target.strip(), loaded, mask)
            return
        action = "st" if parts[0] == "st" else parts[2]
        values = operands[-1].strip("{}").split(",")
        for number, name in enumerate(values):
            found = self.memory(space, action, address, mask, self.value(name.strip(), "u32"), number, width)
        if parts[0] == "atom":
            self.set(operands[0], found, mask)


def _immediate(operand: str, dtype: Any) -> Array:
    if operand.startswith("0f"):
        return np.array(int(operand[2:], 16), "u4").view("f4")[()]
    try:
        number = int(operand, 0)
    except ValueError:
        raise PtxError(f"operand {operand} is not known") from None
    if dtype.kind == "f":
        return dtype.type(number)
    return np.array(number & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)[()]


Function = Callable[[Threads, tuple[str, ...], tuple[str, ...]], Any]
ALU: dict[str, Function] = {}


def instruction(*names: str) -> Callable[[Function], Function]:
    """Adds a function of its type's parts and operands to ALU."""

    def add(function: Function) -> Function:
        ALU.update(dict.fromkeys(names, function))
        return function

    return add
