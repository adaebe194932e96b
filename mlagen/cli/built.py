"""What became of one spec in a build: as plain values, and as a screen for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlagen.cli.console import err, out, report_error
from mlagen.compile import Resources, check_limits, resource_table, target_table
from mlagen.emit import Package
from mlagen.errors import MlagenError
from mlagen.verify import CaseResult, family_table, verify_table


@dataclass
class Built:
    """What became of one spec.

    Attributes:
        path: the spec's file.
        package: what it renders to.
        folder: where the package goes.
        label: what a progress bar calls it.
        device: where kernels were run; None: nowhere.
        products: warpgroup products that the plan expects of a kernel, as `check_limits` takes them.
        proofs: by Triton version, what every variant takes.
        results: of the cases that were run.
        written: the files that were written.
        failures: why nothing was.
    """

    path: Path
    package: Package
    folder: Path
    label: str
    device: str | None = None
    products: Mapping[tuple[str, int | None], int] = field(default_factory=dict)
    proofs: dict[str, list[Resources]] = field(default_factory=dict)
    results: list[CaseResult] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    failures: list[MlagenError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "spec": str(self.path),
            "package": str(self.folder),
            "files": [file.name for file in self.package.files],
            "written": [str(path) for path in self.written],
            "resources": [one.to_json() for resources in self.proofs.values() for one in resources],
            "verified": [one.to_json() for one in self.results],
            "failures": [str(error) for error in self.failures],
        }

    def show(self, verbose: bool) -> None:
        """Prints what was compiled, verified and written on stdout; with `verbose` every variant and group of cases."""
        name = self.package.name
        if verbose:
            for version, resources in self.proofs.items():
                out.print(f"{name}, every variant compiled with Triton {version}")
                out.print(resource_table(resources))
            if self.results:
                out.print(verify_table(self.results))
        if self.proofs:
            out.print(f"{name}, compiled with Triton {', '.join(self.proofs)}: the most that a variant takes")
            out.print(target_table(self.proofs, lambda one: bool(check_limits([one], self.products))))
        if self.results:
            out.print(f"{name}, verified on {self.device}")
            out.print(family_table(self.results))
        for path in self.written:
            out.print(str(path), markup=False, soft_wrap=True)

    def report(self) -> None:
        """Prints every failure, with its hint, and the outcome in one line on stderr."""
        for error in self.failures:
            report_error(error)
        compiled = [
            f"{len(resources)} kernel variants compiled with triton {version}"
            for version, resources in self.proofs.items()
        ]
        verified = f"{len(self.results)} cases verified" if self.results else "not verified"
        if self.failures:
            state = f"nothing written, errors above: {len(self.failures)}"
        else:
            state = f"{len(self.written)} written" if self.written else "unchanged"
        summary = f"{len(self.package.files)} files, {state}; {', '.join(compiled) or 'not compiled'}, {verified}"
        err.print(f"{self.folder}: {summary}", markup=False, soft_wrap=True)


def report_all(built: list[Built]) -> None:
    """Prints on stderr what became of several specs, in one line."""
    failed = [one.package.name for one in built if one.failures]
    written = sum(bool(one.written) for one in built)
    summary = f"{written} written, {len(built) - written - len(failed)} unchanged, {len(failed)} failed"
    err.print(
        f"{len(built)} packages: {summary}{': ' if failed else ''}{', '.join(failed)}", markup=False, soft_wrap=True
    )
