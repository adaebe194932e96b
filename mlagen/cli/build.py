"""`mlagen build`: spec to plan to text, compiled and verified before a byte is written."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mlagen.backends import compile_jobs
from mlagen.cli.complete import SpecPath
from mlagen.cli.console import JSON, err, out, print_json, report_error, spec_files, stage
from mlagen.cli.manifest import MANIFEST, manifest_text, stale_manifest
from mlagen.cli.verify import DEVICE, pick_device, verify_cached
from mlagen.compile import Resources, check_limits, resource_table
from mlagen.compile import compile_jobs as run_jobs
from mlagen.emit import Drift, Package, apply, compare, render
from mlagen.emit.write import write_atomically
from mlagen.errors import DriftError, MlagenError, SpecError, SpecErrors, UsageError
from mlagen.plan import TARGETS, Plan, load_plan
from mlagen.verify import CaseResult, mismatches, verify_table

GENERATED = Path("generated")


@dataclass
class Built:
    """What became of one spec."""

    path: Path
    package: Package
    folder: Path
    written: list[Path] = field(default_factory=list)
    resources: list[Resources] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "spec": str(self.path),
            "package": str(self.folder),
            "files": [file.name for file in self.package.files],
            "written": [str(path) for path in self.written],
            "resources": [one.to_json() for one in self.resources],
            "verified": [one.to_json() for one in self.results],
        }


@click.command()
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if generated files differ from their specs.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(TARGETS)), help="Compile for these alone.")
@click.option("--no-compile", is_flag=True, help="Do not compile.")
@click.option("--no-verify", is_flag=True, help="Do not run the kernels.")
@click.option("--out", "folder", type=click.Path(path_type=Path), default=GENERATED, show_default=True)
@DEVICE
@JSON
def build(
    specs: tuple[Path, ...],
    check: bool,
    diff: bool,
    force: bool,
    targets: tuple[str, ...],
    no_compile: bool,
    no_verify: bool,
    folder: Path,
    device: str,
    as_json: bool,
) -> None:
    """Generates the packages of SPECS (default: specs/*.yaml) into generated/.

    A package is rendered, compiled for every target and verified against the reference first; if any of that fails,
    nothing of it is written.
    """
    if check and (diff or force):
        raise UsageError("--check writes and prints nothing that --diff or --force would change; give one of them")
    plans = _load_all(spec_files(specs))
    built = [Built(path, render(plan), folder / plan.spec.name) for path, plan in plans]
    if check or diff:
        _compare_all(built, check, as_json, folder)
        return
    failures: list[MlagenError] = []
    for (_, plan), one in zip(plans, built, strict=True):
        try:
            _build_one(plan, one, targets, force, None if no_verify else pick_device(device), not no_compile)
        except MlagenError as error:
            report_error(error)
            failures.append(error)
            continue
        if not as_json:
            _print_built(one)
    if as_json:
        print_json([one.to_json() for one in built])
    if failures:
        raise SystemExit(max(error.exit_code for error in failures))


def _load_all(paths: list[Path]) -> list[tuple[Path, Plan]]:
    """Plans of all specs.

    Raises:
        SpecErrors: at least one spec is off: the errors of all of them.
    """
    plans: list[tuple[Path, Plan]] = []
    errors: list[SpecError] = []
    for path in paths:
        try:
            plans.append((path, load_plan(path)))
        except SpecErrors as error:
            errors.extend(error.errors)
    if errors:
        raise SpecErrors(errors)
    return plans


def _compare_all(built: list[Built], check: bool, as_json: bool, folder: Path) -> None:
    drifts: list[Drift] = []
    for one in built:
        found = compare(one.package, one.folder)
        drifts.extend(found or stale_manifest(one.package, one.folder))
    if as_json:
        print_json([{"path": str(drift.path), "kind": drift.kind} for drift in drifts])
    else:
        for drift in drifts:
            out.print(f"{drift.path}: {drift.kind}", markup=False)
            click.echo(drift.diff(), nl=False)
    if check and drifts:
        out_folder = [] if folder == GENERATED else ["--out", str(folder)]
        drifted = [one.path for one in built if any(drift.path.parent == one.folder for drift in drifts)]
        raise DriftError(
            f"{len(drifts)} generated files differ from their specs",
            hint=f"mend with: {shlex.join(['mlagen', 'build', *map(str, drifted), *out_folder])}",
        )


def _build_one(
    plan: Plan, one: Built, targets: tuple[str, ...], force: bool, device: str | None, compiling: bool
) -> None:
    name = plan.spec.name
    drifts = compare(one.package, one.folder)
    if not force:
        apply([drift for drift in drifts if drift.kind == "edited"])
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        staged = Path(temporary) / name
        apply(compare(one.package, staged))
        if compiling:
            jobs = [job for job in compile_jobs(plan) if not targets or job.target in targets]
            if not jobs:
                raise UsageError(
                    f"{name}: none of its targets ({', '.join(plan.spec.targets)}) is {', '.join(targets)}"
                )
            with stage(f"{name}: compile", len(jobs)) as bar:
                one.resources = run_jobs(staged, jobs, on_done=bar.step)
            _raise_all(check_limits(one.resources))
        if device is not None:
            one.results = verify_cached(one.package, staged, device)
            _raise_all(mismatches(one.results))
    one.written = apply(drifts, force=force)
    if compiling and not targets:
        text = manifest_text(one.package, one.resources)
        path = one.folder / MANIFEST
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            one.written.append(path)


def _raise_all(errors: list[Any]) -> None:
    for error in errors[:-1]:
        report_error(error)
    if errors:
        raise errors[-1]


def _print_built(one: Built) -> None:
    if one.resources:
        out.print(resource_table(one.resources))
    if one.results:
        out.print(verify_table(one.results))
    compiled = f"{len(one.resources)} kernels compiled" if one.resources else "not compiled"
    verified = f"{len(one.results)} cases verified" if one.results else "not verified"
    state = f"{len(one.written)} written" if one.written else "unchanged"
    err.print(f"{one.folder}: {len(one.package.files)} files, {state}; {compiled}, {verified}", markup=False)
    for path in one.written:
        out.print(str(path), markup=False, soft_wrap=True)
