"""Proofs as they lie in folders: looked up in the one of the packages, then in the one that comes with mlagen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mlagen.compile import Resources
from mlagen.compile.binary import Measured
from mlagen.diffs import diff_of
from mlagen.emit.replace import write_atomically
from mlagen.plan.tritons import TRITONS
from mlagen.proofs.rows import CasesRow, CompileRow, Figures, PackageRow
from mlagen.proofs.sources import MLAGEN, digest_of, family_code, family_names, measuring_code
from mlagen.proofs.table import Table, read_table

NAME = "proofs"  # of the folder among the packages
COMPILE, PACKAGES, VERIFY = "compile.json", "packages.json", "verify.json"
_COLUMNS = {
    COMPILE: ["target", "kernel", list(Figures._fields)],
    PACKAGES: ["names", "variants by Triton"],
    VERIFY: ["package", "families", "device", "set", "environment", "cases", "of", "skipped", "share"],
}

Row = TypeVar("Row", CompileRow, PackageRow, CasesRow)


def shipped_dir() -> Path:
    """The proofs of the known specs: inside an installed package, or in a checkout."""
    installed = MLAGEN / "_proofs"
    return installed if installed.is_dir() else MLAGEN.parent / "generated" / NAME


def cases_key(row: CasesRow) -> str:
    """The key of a proof of cases: all that its result depends on."""
    return digest_of([*map(str, row.place), family_code(row.family)])


def _joined(cases: Mapping[str, CasesRow]) -> dict[str, list[Any]]:
    """The rows of the file: families without cases share one, since every package lacks most of them."""
    rows, without = {}, defaultdict[CasesRow, list[str]](list)
    for key, row in cases.items():
        if row.of:
            rows[key] = row.to_json()
        else:
            without[replace(row, family="")].append(row.family)
    for row, families in without.items():
        together = [replace(row, family=family) for family in sorted(families)]
        shared = replace(row, family=" ".join(one.family for one in together))
        rows[digest_of(map(cases_key, together))] = shared.to_json()
    return rows


def _apart(rows: Mapping[str, CasesRow]) -> dict[str, CasesRow]:
    """The proofs of each family from the rows of the file; none where the code of a family that shares one is new."""
    found = {}
    for key, row in rows.items():
        together = [replace(row, family=family) for family in row.family.split() if family in family_names()]
        if row.of:
            found[key] = row
        elif digest_of(map(cases_key, together)) == key:
            found |= {cases_key(one): one for one in together}
    return found


class _Folder:
    """The three files of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables = {name: read_table(path / name) for name in (COMPILE, PACKAGES, VERIFY)}
        self.stale = self.tables[COMPILE].header.get("code", measuring_code()) != measuring_code()
        self.compiled = {} if self.stale else self._rows(COMPILE, CompileRow.from_json)
        self.packages = self._rows(PACKAGES, PackageRow.from_json)
        self.cases = _apart(self._rows(VERIFY, CasesRow.from_json))

    def _rows(self, name: str, read: Callable[[Sequence[Any]], Row]) -> dict[str, Row]:
        found = {}
        for key, row in self.tables[name].rows.items():
            try:
                found[key] = read(row)
            except (ValueError, TypeError, KeyError, AttributeError):
                self.tables[name].faults.append(f"row {key} is no row")
        return found


class Proofs:
    """The proofs about packages.

    Args:
        out: the folder of the packages; `proofs` lies in it or is made there.
        shipped: the folder of proofs that is looked at next; None: that of mlagen.
    """

    def __init__(self, out: Path, shipped: Path | None = None) -> None:
        self._own = _Folder(out / NAME)
        behind = shipped or shipped_dir()
        same = behind.resolve() == self._own.path.resolve()
        self._behind = self._own if same else _Folder(behind)
        self._out = out

    def faults(self) -> list[tuple[Path, str]]:
        """The files of the packages' folder that are not as mlagen wrote them, with the reason."""
        found = [(self._own.path / name, fault) for name, table in self._own.tables.items() for fault in table.faults]
        if self._own.stale:
            found.append((self._own.path / COMPILE, "was measured by other code than this mlagen's"))
        return found

    def variant(self, key: str) -> CompileRow | None:
        """The row of a kernel variant, with the figures of both folders."""
        rows = [folder.compiled[key] for folder in (self._behind, self._own) if key in folder.compiled]
        if not rows:
            return None
        figures = {version: taken for row in rows for version, taken in row.figures.items()}
        return CompileRow(rows[0].target, rows[0].kernel, figures)

    def figures(self, key: str, version: str) -> Figures | None:
        """The figures of a kernel variant under a Triton; None where they are not known."""
        row = self.variant(key)
        return None if row is None else row.figures.get(version)

    def measured(self, key: str, version: str) -> Measured | None:
        """The same as the result of a compilation."""
        row = self.variant(key)
        return None if row is None or version not in row.figures else row.figures[version].measured(row.target)

    def package(self, key: str) -> PackageRow | None:
        """The row of a package; None without."""
        return self._own.packages.get(key) or self._behind.packages.get(key)

    def all_hold(self, keys: Iterable[str], version: str) -> bool:
        """Whether each of some variants has figures under a Triton, and holds its limits."""
        rows = {key: self.variant(key) for key in keys}
        return all(
            row is not None and version in row.figures and not any(row.broken(key, version))
            for key, row in rows.items()
        )

    def tritons(self, key: str) -> tuple[str, ...]:
        """The Tritons, oldest first, under which all variants of a package compile and hold their limits."""
        row = self.package(key)
        listed = row.keys if row is not None else {}
        return tuple(version for version in TRITONS if version in listed and self.all_hold(listed[version], version))

    def tritons_of(self, name: str) -> tuple[str, ...]:
        """The Tritons under which the package of a name in the folder was proved when it was last built."""
        return tuple(dict.fromkeys(one for row in self._own.packages.values() if name in row.names for one in row.keys))

    def cases(self, wanted: CasesRow) -> CasesRow | None:
        """The proof of a family's cases, of the same package, set, device, environment and code; None without."""
        key = cases_key(wanted)
        return self._own.cases.get(key) or self._behind.cases.get(key)

    def verified(self, key: str) -> bool:
        """Whether cases of each family passed with a package's text and the present code, in any environment."""
        folders = (self._own, self._behind)
        rows = [(key, row) for folder in folders for key, row in folder.cases.items()]
        found = {row.family for one, row in rows if row.package == key and one == cases_key(row)}
        return found >= set(family_names())

    def add_compiled(self, taken: Iterable[Resources]) -> None:
        """Take in results of compilations."""
        for one in taken:
            row, figures = self._own.compiled.get(one.key), Figures.of(one)
            earlier = {} if row is None else row.figures
            known = self.figures(one.key, one.triton)
            if one.cached and known is not None and known.agree(figures):
                figures = known  # a result that was looked up says 0 where tensor memory is not known
            self._own.compiled[one.key] = CompileRow(one.target, one.kernel, {**earlier, one.triton: figures})

    def add_package(self, name: str, key: str, keys: Mapping[str, Sequence[str]]) -> None:
        """Name the variants of a package by Triton; a version that is not named is not proved."""
        self._forget(name)
        row = self._own.packages.get(key)
        names = tuple(sorted({name, *(row.names if row else ())}))
        self._own.packages[key] = PackageRow(names, {version: tuple(found) for version, found in keys.items()})
        for version, found in keys.items():
            for each in found:
                variant = self.variant(each)
                assert variant is not None
                earlier = self._own.compiled.get(each)
                figures = {**(earlier.figures if earlier else {}), version: variant.figures[version]}
                self._own.compiled[each] = CompileRow(variant.target, variant.kernel, figures)

    def _forget(self, name: str) -> None:
        """Drop a name from the packages, and with it a package without any."""
        for key, row in list(self._own.packages.items()):
            names = tuple(one for one in row.names if one != name)
            self._own.packages[key] = PackageRow(names, row.keys)
            if not names:
                del self._own.packages[key]

    def add_cases(self, row: CasesRow) -> None:
        """Take in a proof of cases, in the place of an earlier one of other code."""
        for key, other in list(self._own.cases.items()):
            if other.place == row.place:
                del self._own.cases[key]
        self._own.cases[cases_key(row)] = row

    def save(self) -> list[Path]:
        """Write the rows of the variants and cases of the packages in the folder, and return the files that changed.

        A variant keeps its figures under every Triton, so that a later build under another one computes less.
        """
        own = self._own
        for name in {name for row in own.packages.values() for name in row.names}:
            folder = self._out / name
            if not folder.is_dir() and not diff_of(folder).is_file():
                self._forget(name)
        needed = {key for row in own.packages.values() for keys in row.keys.values() for key in keys}
        own.compiled = {key: row for key, row in own.compiled.items() if key in needed}
        own.cases = {key: row for key, row in own.cases.items() if row.package in own.packages}
        rows: dict[str, dict[str, list[Any]]] = {
            COMPILE: {key: row.to_json() for key, row in own.compiled.items()},
            PACKAGES: {key: row.to_json() for key, row in own.packages.items()},
            VERIFY: _joined(own.cases),
        }
        written = []
        for name, found in rows.items():
            header = {"columns": _COLUMNS[name], **({"code": measuring_code()} if name == COMPILE else {})}
            own.tables[name] = Table(header, found)
            text, path = own.tables[name].text(), own.path / name
            if not path.exists() or path.read_bytes() != text.encode():
                write_atomically(path, text)
                written.append(path)
        own.stale = False
        return written


def carry_over(out: Path, keep: Callable[[Figures], bool]) -> int:
    """Keep figures that a change of the measuring code leaves as they are, and drop the others.

    Args:
        out: the folder of the packages.
        keep: whether the new code gives the same figures.

    Returns:
        How many figures were dropped.
    """
    path, dropped = out / NAME / COMPILE, 0
    table, kept = read_table(path), {}
    for key, row in table.rows.items():
        variant = CompileRow.from_json(row)
        figures = {version: taken for version, taken in variant.figures.items() if keep(taken)}
        dropped += len(variant.figures) - len(figures)
        if figures:
            kept[key] = CompileRow(variant.target, variant.kernel, figures).to_json()
    write_atomically(path, Table({**table.header, "code": measuring_code()}, kept).text())
    return dropped
