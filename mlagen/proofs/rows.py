"""The rows of the three files: figures of a kernel variant, variants of a package, cases of a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlagen.compile import Resources
from mlagen.compile.binary import Measured
from mlagen.compile.resources import TENSOR_MEMORY_COLUMNS
from mlagen.plan import SM90_MODULES, TARGETS
from mlagen.plan.tiles.allowed import allowed_spills
from mlagen.plan.tritons import minor

PRODUCTS = ("HGMMA", "QGMMA")  # warpgroup products of 16-bit and of 8-bit operands


class Figures(NamedTuple):
    """Figures of a kernel variant under a Triton; see `Resources`.

    Attributes:
        products: warpgroup products in the code of an sm90 module's kernel; 0 of any other.
        tensor_memory: columns; None: not known, but no more than the target has.
    """

    registers: int
    shared: int = 0
    spills: int = 0
    loop_spills: int = 0
    scalar_registers: int = 0
    products: int = 0
    tensor_memory: int | None = 0

    @classmethod
    def of(cls, taken: Resources) -> Figures:
        """The figures of a compiled kernel."""
        judged = taken.module in SM90_MODULES
        return cls(
            registers=taken.registers,
            shared=taken.shared,
            spills=taken.spills,
            loop_spills=taken.loop_spills,
            scalar_registers=taken.scalar_registers or 0,
            products=sum(taken.instructions.get(name, 0) for name in PRODUCTS) if judged else 0,
            tensor_memory=taken.tensor_memory,
        )

    def to_json(self) -> list[int | None]:
        """Plain values, without the zeros at the end."""
        values = list(self)
        while len(values) > 1 and values[-1] == 0:
            values.pop()
        return values

    def measured(self, target: str) -> Measured:
        """The result of a compilation with these figures; of its instructions only the products are known."""
        return Measured(
            registers=self.registers,
            scalar_registers=self.scalar_registers if TARGETS[target].backend == "hip" else None,
            spills=self.spills,
            loop_spills=self.loop_spills,
            shared=self.shared,
            tensor_memory=self.tensor_memory or 0,
            instructions={PRODUCTS[0]: self.products} if self.products else {},
            seconds=0.0,
        )

    def agree(self, other: Figures) -> bool:
        """Whether both are results of one compilation: equal, but for columns that one of them does not know."""
        unknown = None in (self.tensor_memory, other.tensor_memory)
        return self[:-1] == other[:-1] and (unknown or self.tensor_memory == other.tensor_memory)


@dataclass(frozen=True)
class CompileRow:
    """A kernel variant: its target, its name, and its figures by Triton."""

    target: str
    kernel: str
    figures: Mapping[str, Figures]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> CompileRow:
        """A row of the file.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        target, kernel, figures = row
        TARGETS[target]
        return cls(target, kernel, {version: Figures(*values) for version, values in figures.items()})

    def to_json(self) -> list[Any]:
        """A row of the file."""
        return [
            self.target,
            self.kernel,
            {version: self.figures[version].to_json() for version in sorted(self.figures)},
        ]

    def broken(self, key: str, version: str) -> Iterator[str]:
        """The limits that the figures of the variant with a key break; the plan judges the number of products."""
        taken = self.figures[version]
        if taken.loop_spills > allowed_spills(key, minor(version)):
            yield f"{taken.loop_spills} spill loads and stores in loops"
        if taken.shared > TARGETS[self.target].shared_limit:
            yield f"{taken.shared:,} bytes of shared memory"
        if (taken.tensor_memory or 0) > TENSOR_MEMORY_COLUMNS:
            yield f"{taken.tensor_memory} columns of tensor memory"


@dataclass(frozen=True)
class PackageRow:
    """A package: the names it goes by in the folder, and the keys of its variants by Triton."""

    names: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> PackageRow:
        """A row of the file.

        Raises:
            ValueError, TypeError, AttributeError: it is none.
        """
        names, listed = row
        keys: dict[str, list[str]] = {}
        for versions, found in listed.items():
            for version in versions.split():
                keys.setdefault(version, []).extend(found.split())
        return cls(tuple(names), {version: tuple(found) for version, found in keys.items()})

    def to_json(self) -> list[Any]:
        """A row of the file: each variant stands once, behind all the versions under which the package has it."""
        versions: dict[str, list[str]] = {}
        for version in sorted(self.keys):
            for key in dict.fromkeys(self.keys[version]):
                versions.setdefault(key, []).append(version)
        listed: dict[str, list[str]] = {}
        for key in sorted(versions):
            listed.setdefault(" ".join(versions[key]), []).append(key)
        return [list(self.names), {among: " ".join(listed[among]) for among in sorted(listed)}]


@dataclass(frozen=True)
class CasesRow:
    """Cases of a family that passed.

    Attributes:
        package: the key of the package.
        family: the family's name.
        device: where they ran.
        every: whether all cases ran, or a representative set of them.
        environment: the versions they ran with.
        cases: how many ran or were skipped.
        of: how many the family has.
        skipped: how many could not run.
        share: the largest error as a share of its tolerance, rounded up.
    """

    package: str
    family: str
    device: str
    every: bool
    environment: str
    cases: int
    of: int
    skipped: int
    share: float

    def __post_init__(self) -> None:
        if not (0 <= self.skipped <= self.cases <= self.of and 0 <= self.share <= 1):
            raise ValueError("no proof: not all cases passed")

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> CasesRow:
        """A row of the file.

        Raises:
            ValueError, TypeError: it is none.
        """
        package, family, device, ran, environment, cases, of, skipped, share = row
        return cls(package, family, device, ran == "all", environment, cases, of, skipped, share)

    def to_json(self) -> list[Any]:
        """A row of the file."""
        ran = "all" if self.every else "representative"
        return [
            *(self.package, self.family, self.device, ran, self.environment),
            *(self.cases, self.of, self.skipped, self.share),
        ]

    @property
    def place(self) -> tuple[object, ...]:
        """The identity of the proof in a folder: a later one with the same takes its place."""
        return self.package, self.family, self.device, self.every, self.environment
