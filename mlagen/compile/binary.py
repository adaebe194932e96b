"""Reads what a compiled kernel takes out of its machine code: a cubin, or AMD's assembly text."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlagen.errors import ToolError

# HMMA, HGMMA and QGMMA, UTCHMMA and UTCQMMA: warp, warpgroup and tensor-memory products; LDL and STL reach the stack.
_SASS = re.compile(r"^\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?(\w*MMA|LDL|STL)\b", re.MULTILINE)
_GCN = re.compile(r"^\s+(v_s?mfmac?_\w+|scratch_(?:load|store)\w*)\s", re.MULTILINE)


@dataclass(frozen=True)
class Measured:
    """What a compilation gave, whatever the plan thought of it; fields as in Resources."""

    registers: int
    scalar_registers: int | None
    spills: int
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
            shared=int(data["shared"]),
            tensor_memory=int(data["tensor_memory"]),
            instructions={str(name): int(count) for name, count in dict(data["instructions"]).items()},
            seconds=float(data["seconds"]),
        )


def read_cubin(cubin: Path, kernel: str) -> dict[str, Any]:
    """Read an NVIDIA binary with the tools in the Triton package.

    Args:
        cubin: the binary file.
        kernel: the entry function's name.

    Returns:
        registers, scalar_registers, spills (stack bytes a thread) and instructions.

    Raises:
        ToolError: a tool failed, or its output has no line for the kernel.
    """
    usage = _nvidia_tool("cuobjdump", "--dump-resource-usage", str(cubin))
    match = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ToolError(f"cuobjdump names no resources of {kernel}", hint=usage)
    return {
        "registers": int(match[1]),
        "scalar_registers": None,
        "spills": int(match[2]),
        "instructions": _count(_SASS, _nvidia_tool("nvdisasm", "--print-code", str(cubin))),
    }


def read_amdgcn(assembly: Path) -> dict[str, Any]:
    """Read AMD assembly text, which carries its own metadata.

    Args:
        assembly: the text file.

    Returns:
        registers, scalar_registers, spills (vector registers) and instructions.

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
        "instructions": _count(_GCN, text),
    }


def _count(mnemonic: re.Pattern[str], text: str) -> dict[str, int]:
    return dict(sorted(Counter(mnemonic.findall(text)).items()))


def _nvidia_tool(name: str, *arguments: str) -> str:
    # find_spec, since importing Triton here would cost the parent what its workers pay already.
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise ToolError("triton is not installed")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    try:
        return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise ToolError(f"{name} of the Triton package does not start: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ToolError(f"{name} failed with exit code {error.returncode}", hint=str(error.stderr).strip()) from error
