"""Reader of a kernel's resources in its machine code: a cubin, or AMD's assembly text."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlagen.compile.toolchain import Toolchain
from mlagen.errors import ToolError

# HMMA, HGMMA and QGMMA, UTCHMMA and UTCQMMA: warp, warpgroup and tensor-memory products; LDL and STL reach the stack.
_SASS = re.compile(r"^\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?(\w*MMA|LDL|STL)\b", re.MULTILINE)
_GCN = re.compile(r"^\s+(v_s?mfmac?_\w+|scratch_(?:load|store)\w*)\s", re.MULTILINE)


@dataclass(frozen=True)
class Flow:
    """How control flow shows in a machine code's text, line by line.

    Attributes:
        label: a line that a branch may lead to; its name.
        target: each label that an instruction may lead to.
        end: an instruction that never passes on to the next line.
        spill: an instruction that reaches the stack.
        product: an instruction that multiplies matrices.
    """

    label: re.Pattern[str]
    target: re.Pattern[str]
    end: re.Pattern[str]
    spill: re.Pattern[str]
    product: re.Pattern[str]


# A branch with a predicate, or with an operand before its label, may pass on. A called function returns: no target.
SASS_FLOW = Flow(
    label=re.compile(r"(\.L\w+):"),
    target=re.compile(r"`\((\.L\w+)\)"),
    end=re.compile(r"\s*(?:/\*\w+\*/)?\s*(?:BRA\S*\s+`|BRX|EXIT|RET)"),
    # A stored zero saves no register: ptxas of Triton 3.6 passes one to a trap at each TMA copy on sm120.
    spill=re.compile(r"\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?(?:LDL\b|STL\b(?!\S*\s+\[[^\]]*\], RZ\b))"),
    product=re.compile(r"\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?\w*MMA\b"),
)
GCN_FLOW = Flow(
    label=re.compile(r"(\.LBB\w+):"),
    target=re.compile(r"^[^;]*?[\s(](\.LBB\w+)"),
    end=re.compile(r"\s+s_(?:branch|setpc|endpgm)"),
    spill=re.compile(r"\s+scratch_(?:load|store)"),
    product=re.compile(r"\s+v_s?mfmac?_"),
)


@dataclass(frozen=True)
class Measured:
    """Figures of a compilation, independent of the plan; fields as in Resources."""

    registers: int
    scalar_registers: int | None
    spills: int
    loop_spills: int
    shared: int
    tensor_memory: int
    instructions: dict[str, int]
    seconds: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """Take plain values back in.

        Raises:
            KeyError: a value is missing.
            TypeError: a value is of another type, or has no numbers in it.
            ValueError: a value is no number.
        """
        scalar = data["scalar_registers"]
        return cls(
            registers=int(data["registers"]),
            scalar_registers=None if scalar is None else int(scalar),
            spills=int(data["spills"]),
            loop_spills=int(data["loop_spills"]),
            shared=int(data["shared"]),
            tensor_memory=int(data["tensor_memory"]),
            instructions={str(name): int(count) for name, count in dict(data["instructions"]).items()},
            seconds=float(data["seconds"]),
        )


def read_cubin(cubin: Path, kernel: str, toolchain: Toolchain) -> dict[str, Any]:
    """Read an NVIDIA binary with the tools in the Triton package.

    Args:
        cubin: the binary file.
        kernel: the entry function's name.
        toolchain: the Triton that made it; its tools read it.

    Returns:
        registers, scalar_registers, spills (stack bytes a thread), loop_spills and instructions.

    Raises:
        ToolError: a tool failed, or its output has no line for the kernel.
    """
    usage = _run(toolchain.tool("cuobjdump"), "--dump-resource-usage", str(cubin))
    match = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ToolError(f"cuobjdump names no resources of {kernel}", hint=usage)
    code = _run(toolchain.tool("nvdisasm"), "--print-code", str(cubin))
    return {
        "registers": int(match[1]),
        "scalar_registers": None,
        "spills": int(match[2]),
        "loop_spills": loop_spills(SASS_FLOW, code),
        "instructions": _count(_SASS, code),
    }


def read_amdgcn(assembly: Path) -> dict[str, Any]:
    """Read AMD assembly text, which carries its own metadata.

    Args:
        assembly: the text file.

    Returns:
        registers, scalar_registers, spills (vector registers), loop_spills and instructions.

    Raises:
        ToolError: the text lacks the metadata.
    """
    text = assembly.read_text()
    found = dict(re.findall(r"^\s+\.(vgpr_count|sgpr_count|vgpr_spill_count):\s+(\d+)$", text, re.MULTILINE))
    if len(found) < 3:
        raise ToolError("the AMD assembly names no register counts", hint=f"found {sorted(found)}")
    return {
        "registers": int(found["vgpr_count"]),
        "scalar_registers": int(found["sgpr_count"]),
        "spills": int(found["vgpr_spill_count"]),
        "loop_spills": loop_spills(GCN_FLOW, text),
        "instructions": _count(_GCN, text),
    }


def _count(mnemonic: re.Pattern[str], text: str) -> dict[str, int]:
    return dict(sorted(Counter(mnemonic.findall(text)).items()))


@dataclass
class _Block:
    """A basic block: its spills, whether it has matrix products, and the blocks that may run next."""

    spills: int = 0
    multiplies: bool = False
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def loop_spills(flow: Flow, text: str) -> int:
    """Count the instructions inside loops that reach the stack.

    Compilers move blocks behind the function's end and jump back from there, so a backward branch does not prove a
    loop. Code of an outer loop around a loop with matrix products is not counted, nor is a loop before it: both run
    seldom.

    Args:
        flow: how the text's machine code shows control flow.
        text: the disassembly of a kernel.

    Returns:
        How many spill loads and stores control can come back to.
    """
    blocks, labels, begun = [_Block()], {}, False
    for line in text.splitlines():
        if found := flow.label.match(line):
            if begun:  # else a block of nothing, which control never comes to, would lead to the label's
                blocks.append(_Block())
            labels[found[1]], begun = len(blocks) - 1, False
            continue
        block, begun = blocks[-1], True
        block.spills += flow.spill.match(line) is not None
        block.multiplies |= flow.product.match(line) is not None
        block.targets = flow.target.findall(line)
        block.falls_through = flow.end.match(line) is None
        if block.targets or not block.falls_through:
            blocks.append(_Block())
            begun = False
    following = [
        {labels[target] for target in block.targets if target in labels}
        | ({number + 1} if block.falls_through and number + 1 < len(blocks) else set())
        for number, block in enumerate(blocks)
    ]
    counted = _repeated(blocks, following, set(range(len(blocks))))
    return sum(blocks[number].spills for number in counted)


def _repeated(blocks: list[_Block], following: list[set[int]], within: set[int]) -> set[int]:
    """Return the blocks that loops of `within` repeat, except those around or before a loop with matrix products."""
    found: set[int] = set()
    loops = _loops(following, within)
    multiplying = [loop for loop in loops if any(blocks[number].multiplies for number in loop)]
    for loop in loops:
        if loop not in multiplying and any(_reached(loop, following, within) & other for other in multiplying):
            continue
        outside = set(range(len(blocks))) - loop
        entries = {number for before in outside for number in following[before] & loop} or {min(loop)}
        inner = _loops(following, loop - entries)
        if any(blocks[number].multiplies for one in inner for number in one):
            found |= _repeated(blocks, following, loop - entries)
        else:
            found |= loop
    return found


def _reached(start: set[int], ways: list[set[int]], within: set[int]) -> set[int]:
    """Return the blocks of `within` that are reachable from `start`."""
    seen: set[int] = set()
    pending = list(start)
    while pending:
        new = (ways[pending.pop()] & within) - seen
        seen |= new
        pending += new
    return seen


def _loops(following: list[set[int]], within: set[int]) -> list[set[int]]:
    """The largest sets of blocks of `within` that lead to each other."""

    backward: list[set[int]] = [set() for _ in following]
    for number in within:
        for other in following[number]:
            backward[other].add(number)
    loops: list[set[int]] = []
    for number in sorted(within):
        if not any(number in loop for loop in loops):
            loop = _reached({number}, following, within) & _reached({number}, backward, within)
            loops += [loop] if number in loop else []
    return loops


def _run(tool: Path, *arguments: str) -> str:
    try:
        return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise ToolError(f"{tool.name} of the Triton package does not start: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(
            f"{tool.name} failed with exit code {error.returncode}", hint=str(error.stderr).strip()
        ) from error
