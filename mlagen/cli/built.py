"""The result of one spec's build: as plain values, and as text for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from mlagen.cli.console import counted, err, out, report_error
from mlagen.cli.prove import Cases
from mlagen.compile import Resources, check_limits, resource_table, target_table
from mlagen.diffs import base_of, diff_of
from mlagen.emit import Package
from mlagen.errors import MlagenError
from mlagen.plan import Plan
from mlagen.proofs import CasesRow, totals
from mlagen.verify import verify_table


@dataclass
class Built:
    """The result of one spec's build.

    Attributes:
        path: the spec's file.
        plan: the spec's plan.
        package: the rendered package.
        key: key of the package's content in the proofs.
        folder: output folder of the package.
        label: name in progress bars.
        products: wgmma instructions that the plan expects of a kernel, in the form of `check_limits`.
        findings: replacements of kernels over a limit, a line each.
        compiled: resources of every variant, by Triton version.
        cases: results of the cases.
        proves: whether the build adds proofs: it compiles for all targets and verifies.
        samples: whether some looked-up proofs are computed again; true of one package of a build.
        again: number of proofs that were computed again with the same result.
        written: files that were written.
        failures: errors; nothing is written if there are any.
    """

    path: Path
    plan: Plan
    package: Package
    key: str
    folder: Path
    label: str
    products: Mapping[tuple[str, int | None], int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    compiled: dict[str, list[Resources]] = field(default_factory=dict)
    cases: Cases = field(default_factory=Cases)
    proves: bool = False
    samples: bool = False
    again: int = 0
    written: list[Path] = field(default_factory=list)
    failures: list[MlagenError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "spec": str(self.path),
            "package": str(self.folder),
            "files": [file.name for file in self.package.files],
            "written": [str(path) for path in self.written],
            "findings": self.findings,
            "resources": [one.to_json() for resources in self.compiled.values() for one in resources],
            "verified": [
                {**_plain(row), "before": family in self.cases.before} for family, row in self.cases.rows.items()
            ],
            "cases": [one.to_json() for one in self.cases.results],
            "failures": [str(error) for error in self.failures],
        }

    def show(self, verbose: bool) -> None:
        """Print variants, cases and written files on stdout; with `verbose`, every variant and group of cases."""
        name = self.package.name
        if verbose:
            for version, resources in self.compiled.items():
                out.print(f"{name}, every variant compiled with Triton {version}")
                out.print(resource_table(resources))
            if self.cases.results:
                out.print(verify_table(self.cases.results))
        if self.compiled:
            out.print(f"{name}, compiled with Triton {', '.join(self.compiled)}: the most that a variant takes")
            out.print(target_table(self.compiled, lambda one: bool(check_limits([one], self.products))))
        if self.cases.rows or self.cases.results:
            out.print(f"{name}, verified")
            out.print(_cases_table(self.cases))
        for path in self.written:
            out.print(str(path), markup=False, soft_wrap=True)

    def report(self) -> None:
        """Print on stderr every failure with its hint, then the outcome in one line."""
        for error in self.failures:
            report_error(error)
        if self.failures:
            state = f"nothing written, errors above: {len(self.failures)}"
        else:
            state = f"{len(self.written)} written" if self.written else "unchanged"
        parts = [*map(self._compiled, self.compiled)] or ["not compiled"]
        parts.append(self._verified())
        if self.again:
            parts.append(f"{counted(self.again, 'proof')} computed again, with the same results")
        summary = f"{len(self.package.files)} files, {state}; {'; '.join(parts)}"
        err.print(f"{self.folder}: {summary}", markup=False, soft_wrap=True)
        if (base := base_of(diff_of(self.folder))) and not self.failures:
            kept = f"kept as a diff from {base}; --out FOLDER writes a whole package"
            err.print(f"{diff_of(self.folder)}: {kept}", markup=False, soft_wrap=True)
        if any(row.cases < row.of for row in self.cases.rows.values()) and not self.failures:
            err.print(f"{self.folder}: `mlagen verify {self.path}` runs all cases", markup=False, soft_wrap=True)
        if not self.cases.rows and not self.cases.results and not self.failures:
            command = shlex.join(["mlagen", "verify", str(self.path)])
            err.print(f"{self.folder}: no kernel ran; verify with: {command}", markup=False, soft_wrap=True)

    def _compiled(self, version: str) -> str:
        """Return the number of variants under a Triton, and how many of them were looked up."""
        taken = {one.key: one.cached for one in self.compiled[version]}
        return f"{len(taken):,} variants with triton {version}: {sum(taken.values()):,} {self._before} before"

    def _verified(self) -> str:
        """Return the number of cases, and how many of them were looked up."""
        rows, results = self.cases.rows, self.cases.results
        if not rows and not results:
            return "not verified"
        failed = sum(not one.ok for one in results)
        ran, of = totals(rows)
        known, _ = totals({family: rows[family] for family in self.cases.before})
        unproved = sum(one.family not in rows for one in results)
        counts = f"{ran + unproved:,}{f' of {of:,}' * (of > ran)} cases: {known:,} {self._before} before"
        return f"{counts}, {failed:,} failed" if failed else counts

    @property
    def _before(self) -> str:
        """The word for results that were looked up."""
        return "proved" if self.proves else "known"


def _plain(row: CasesRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("family", "device", "cases", "of", "skipped", "share")}


def _cases_table(cases: Cases) -> Table:
    """Return a table with a row per family, red if a case of it failed."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("cases of")
    for column in ("run", "of", "failed", "skipped", "largest error, of its tolerance"):
        table.add_column(column, justify="right")
    for family, row in sorted(cases.rows.items()):
        if row.of:
            share = f"{row.share:.0%}" if row.share else "exact"
            table.add_row(
                family, *(f"{number:,}" for number in (row.cases - row.skipped, row.of, 0, row.skipped)), share
            )
    for family in sorted({one.family for one in cases.results} - {*cases.rows}):
        ran = [one for one in cases.results if one.family == family]
        failed, skipped = (sum(map(is_so, ran)) for is_so in (lambda one: not one.ok, lambda one: bool(one.skipped)))
        worst = max((one.worst.share for one in ran if one.worst is not None), default=0.0)
        shown = (str(len(ran) - skipped), "", str(failed), str(skipped), f"{worst:.0%}" if worst else "exact")
        table.add_row(family, *shown, style="red" if failed else None)
    return table


def report_all(built: list[Built]) -> None:
    """Print the outcome of several builds on stderr, in one line."""
    failed = [one.package.name for one in built if one.failures]
    written = sum(bool(one.written) for one in built)
    summary = f"{written} written, {len(built) - written - len(failed)} unchanged, {len(failed)} failed"
    err.print(
        f"{len(built)} packages: {summary}{': ' if failed else ''}{', '.join(failed)}", markup=False, soft_wrap=True
    )
