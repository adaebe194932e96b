"""Findings of `mlagen build` about a spec's kernels by version of Triton: `tuned/<spec>/tritons.yaml` near the spec.

The spec and this file settle a package's text, so that it is the same where no Triton is installed. An entry has the
text that its kernels fit, `plan.fits`. Entries for other dims are ignored.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mlagen.plan.files import place_at, read_checked
from mlagen.plan.tiles.replacements import Entries, FitsText, MinorText, Replacement, ReplacementTable
from mlagen.plan.tritons import Minor, minor, minor_text
from mlagen.spec.base import Model
from mlagen.spec.rules import refused

NAME = "tritons"  # of the file, which lies among the tuned tables of the spec's targets
REGISTERS = (24, 256, 8)  # least and most of a thread, in steps of so many, as setmaxnreg takes them
HEAD = (
    "# What holds for kernels of {} under some Tritons. Written by `mlagen build`; delete the file to search anew.",
    "# fits: which kernels, as `mlagen show plan` prints it.",
)
NOTES = {
    "registers": "# Splits of registers in place of the kernel's own, which spills in loops",
    "left_out": "# Kernels that do not hold: other kernels run their calls",
    "replacements": "# Tiles of portable kernels that do not hold, and the tiles in their place",
}


@dataclass(frozen=True)
class RegisterSplit:
    """Another split of registers of an sm90 kernel under a Triton.

    Attributes:
        fits: the text that its kernels fit, `plan.fits`.
        kernel: its name in the family, such as `sm90_swap_ab`.
        triton: the minor version.
        split: as `Registers.split`.
    """

    fits: str
    kernel: str
    triton: Minor
    split: tuple[int, int]


@dataclass(frozen=True)
class LeftOut:
    """A kernel that no call runs under a Triton.

    Attributes:
        fits: the text that its kernels fit, `plan.fits`.
        kernel: its name in the family, such as `sm90_swap_ab`.
        triton: the minor version.
        reason: why, in words.
    """

    fits: str
    kernel: str
    triton: Minor
    reason: str


@dataclass(frozen=True)
class Findings:
    """All findings about the kernels of one spec.

    Attributes:
        registers: splits of registers.
        left_out: kernels that no call runs.
        replacements: tiles in place of those that do not hold.
    """

    registers: tuple[RegisterSplit, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    replacements: tuple[Replacement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.registers or self.left_out or self.replacements)

    def with_split(self, split: RegisterSplit) -> Findings:
        """The same with a split of registers in place of the kernel's earlier one under the Triton."""
        whose = (split.fits, split.kernel, split.triton)
        others = (one for one in self.registers if (one.fits, one.kernel, one.triton) != whose)
        return replace(self, registers=(*others, split))

    def of(self, fits: Iterable[str]) -> Findings:
        """Those of kernels that fit one of these texts."""
        known = frozenset(fits)
        return Findings(
            tuple(one for one in self.registers if one.fits in known),
            tuple(one for one in self.left_out if one.fits in known),
            tuple(one for one in self.replacements if one.fits in known),
        )


def _split(split: tuple[int, ...]) -> tuple[int, ...]:
    least, most, step = REGISTERS
    if len(split) != 2 or any(one % step or not least <= one <= most for one in split):
        raise refused(f"got {list(split)}; takes two multiples of {step} from {least} to {most}")
    return split


Kernel = Annotated[str, Field(pattern=r"^sm90(_[a-z0-9]+)*$", description="an sm90 kernel of the family")]


class _Registers(Model):
    fits: FitsText
    kernel: Kernel
    triton: Annotated[MinorText, Field(description="minor version of Triton under which it takes the split")]
    split: Annotated[
        tuple[int, ...],
        AfterValidator(_split),
        Field(description="registers a thread of two warpgroups; the third has the rest"),
    ]


class _LeftOut(Model):
    fits: FitsText
    kernel: Kernel
    triton: Annotated[MinorText, Field(description="minor version of Triton under which no call runs it")]
    reason: Annotated[str, Field(description="the reason, for readers")]


class _Table(ReplacementTable):
    replacements: Entries = ()
    registers: Annotated[tuple[_Registers, ...], Field(description="splits of registers under some Tritons")] = ()
    left_out: Annotated[tuple[_LeftOut, ...], Field(description="kernels that no call runs under some Tritons")] = ()


def findings_path(spec_name: str, folder: Path) -> Path:
    """Where the findings of a spec in a folder are kept."""
    return folder / "tuned" / spec_name / f"{NAME}.yaml"


def read_findings(path: Path) -> Findings:
    """The findings in a file; none where there is no file.

    Raises:
        SpecErrors: the file is invalid: all its errors, each with its line and column.
    """
    if not path.is_file():
        return Findings()
    table, document = read_checked(path, _Table)
    return Findings(
        tuple(
            RegisterSplit(one.fits, one.kernel, minor(one.triton), (one.split[0], one.split[1]))
            for one in table.registers
        ),
        tuple(LeftOut(one.fits, one.kernel, minor(one.triton), one.reason) for one in table.left_out),
        tuple(
            one.replacement(place_at(path, document, "replacements", index))
            for index, one in enumerate(table.replacements)
        ),
    )


def dump_findings(spec_name: str, findings: Findings) -> str:
    """The text of a file that `read_findings` reads back."""
    entries: dict[str, list[dict[str, Any]]] = {
        "registers": [{**asdict(one), "triton": minor_text(one.triton)} for one in findings.registers],
        "left_out": [{**asdict(one), "triton": minor_text(one.triton)} for one in findings.left_out],
        "replacements": [_replacement(one) for one in findings.replacements],
    }
    lines = [line.format(spec_name) for line in HEAD]
    for name, listed in entries.items():
        lines += [NOTES[name], f"{name}:"] if listed else []
        lines += itertools.chain.from_iterable(_entry(one) for one in sorted(listed, key=json.dumps))
    return "\n".join(lines) + "\n"


def _replacement(one: Replacement) -> dict[str, Any]:
    return {
        "fits": one.fits,
        **({} if one.table == "tiles" else {"table": one.table}),
        "target": one.target,
        "tritons": [minor_text(triton) for triton in one.tritons],
        "tile": asdict(one.tile),
        "instead": asdict(one.instead),
    }


def _entry(values: dict[str, Any]) -> list[str]:
    """An entry of a list: the first value behind its dash, the others below, as JSON, which YAML reads."""
    lines = [f"{name}: {value if name == 'fits' else _flow(value)}" for name, value in values.items()]
    return [f"  - {lines[0]}", *(f"    {line}" for line in lines[1:])]


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {json.dumps(each)}' for name, each in value.items())}}}"
    return json.dumps(value)
