"""`mlagen build`: spec to plan to text, compiled and verified before a byte is written."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from mlagen.backends import expected_products
from mlagen.cli.built import Built, report_all
from mlagen.cli.complete import SpecPath
from mlagen.cli.console import JSON, TargetName, err, numbered, out, print_json, spec_files, stage
from mlagen.cli.manifest import MANIFEST, Manifest, make_manifest, read_manifest, stale_manifest, still_proved
from mlagen.cli.verify import DEVICE, pick_device, verify_cached
from mlagen.compile import (
    Resources,
    check_limits,
    compile_jobs,
    list_variants,
    parse_tritons,
    toolchain,
    write_kernels,
)
from mlagen.emit import Drift, apply, compare, render
from mlagen.emit.write import write_atomically
from mlagen.errors import DriftError, MlagenError, SpecError, SpecErrors, UsageError
from mlagen.plan import Plan, load_plan
from mlagen.verify import mismatches

GENERATED = Path("generated")


@click.command()
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if generated files differ from their specs.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option("--target", "targets", multiple=True, type=TargetName(), help="Compile for these alone.")
@click.option(
    "--triton", metavar="VERSIONS", help="Compile with these, such as 3.7,3.8, or all; default: the installed one."
)
@click.option(
    "--cache",
    "cache_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write no package, but its kernels compiled ahead, into DIR/NAME, where its warmup() takes them.",
)
@click.option("--no-compile", is_flag=True, help="Do not compile.")
@click.option("--no-verify", is_flag=True, help="Do not run the kernels.")
@click.option("--out", "folder", type=click.Path(path_type=Path), default=GENERATED, show_default=True)
@DEVICE
@click.option("-v", "--verbose", is_flag=True, help="Print what each variant takes and each group of cases too.")
@JSON
def build(
    specs: tuple[Path, ...],
    check: bool,
    diff: bool,
    force: bool,
    targets: tuple[str, ...],
    triton: str | None,
    cache_dir: Path | None,
    no_compile: bool,
    no_verify: bool,
    folder: Path,
    device: str,
    verbose: bool,
    as_json: bool,
) -> None:
    """Generates the packages of SPECS (default: specs/*.yaml) into generated/.

    A package is rendered, every kernel variant that a call can launch is compiled for every target, and the kernels are
    verified against the reference first; if any of that fails, nothing of it is written. Tritons that are not installed
    are fetched once, into the user's cache.
    """
    if cache_dir is not None and (check or diff or force or no_compile):
        raise UsageError(
            "--cache compiles and writes no package: it goes without --check, --diff, --force, --no-compile"
        )
    if check and (diff or force):
        raise UsageError("--check writes and prints nothing that --diff or --force would change; give one of them")
    plans = _load_all(spec_files(specs))
    built = [
        Built(path, render(plan), folder / plan.spec.name, numbered(plan.spec.name, number, len(plans)))
        for number, (path, plan) in enumerate(plans, 1)
    ]
    if check or diff:
        _compare_all(built, check, as_json, folder)
        return
    versions = () if no_compile else parse_tritons(triton)  # here, since a check does without Triton
    if cache_dir is not None:
        _compile_ahead(plans, built, targets, versions, cache_dir, as_json)
        return
    for number, ((_, plan), one) in enumerate(zip(plans, built, strict=True)):
        try:
            one.failures = _build_one(plan, one, targets, force, None if no_verify else pick_device(device), versions)
        except MlagenError as error:
            one.failures = [error]
        if not as_json:
            out.print("\n" * (number > 0), end="")
            one.show(verbose)
        one.report()
    if len(built) > 1:
        report_all(built)
    if as_json:
        print_json([one.to_json() for one in built])
    if any(one.failures for one in built):
        raise SystemExit(max(error.exit_code for one in built for error in one.failures))


def _load_all(paths: list[Path]) -> list[tuple[Path, Plan]]:
    """Plans of all specs.

    Raises:
        SpecErrors: at least one spec is off: the errors of all of them.
        UsageError: two specs have one name, so that one's package would overwrite the other's.
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
    first: dict[str, Path] = {}
    for path, plan in plans:
        other = first.setdefault(plan.spec.name, path)
        if other != path:
            raise UsageError(f"{path}: name: got '{plan.spec.name}', which is that of {other} too; takes another")
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
        drifted = [one.path for one in built if any(drift.path.parent == one.folder for drift in drifts)]
        raise DriftError(
            f"{len(drifts)} generated files differ from their specs",
            hint=f"fix with: {_build_command(drifted, folder)}",
        )


def _build_command(specs: Sequence[Path], folder: Path) -> str:
    """The command that builds the specs into a folder, as one would type it."""
    return shlex.join(["mlagen", "build", *map(str, specs), *([] if folder == GENERATED else ["--out", str(folder)])])


def _build_one(
    plan: Plan, one: Built, targets: tuple[str, ...], force: bool, device: str | None, versions: tuple[str, ...]
) -> list[MlagenError]:
    """Compiles, verifies and writes a package; what breaks a limit or a case, and then nothing is written."""
    name = plan.spec.name
    drifts = compare(one.package, one.folder)
    if not force:
        apply([drift for drift in drifts if drift.kind == "edited"])
    chosen = _chosen(plan, targets)
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        staged = Path(temporary) / name
        apply(compare(one.package, staged))
        one.products = expected_products(plan)
        for version in versions:
            one.proofs[version] = _compile(one.label, staged, chosen, version)
        earlier = read_manifest(one.folder)
        holds_under = {} if earlier is None else earlier.holds_under()
        broken: list[MlagenError] = [
            error
            for taken in one.proofs.values()
            for error in check_limits(taken, one.products, holds_under=holds_under, spec=name)
        ]
        if broken:
            return broken
        if device is not None:
            one.device, one.results = device, verify_cached(one.package, staged, device, one.label)
            if failed := mismatches(one.results):
                return [*failed]
        proves = bool(versions) and chosen == list(plan.spec.targets)
        kept = earlier.tritons if earlier is not None and proves else ()
        others = [version for version in kept if version not in versions]
        with stage(f"{one.label}: what still holds under triton {', '.join(others)}", None):
            held = still_proved(earlier, staged, plan.spec.targets, others)
    one.written = apply(drifts, force=force)
    if proves:
        _write_manifest(one, held, [each for each in others if held is None or each not in held.tritons])
    return []


def _write_manifest(one: Built, held: Manifest | None, lost: Sequence[str]) -> None:
    """Writes a package's manifest, and says under which Tritons it is no longer proved."""
    if lost:
        err.print(
            f"{one.folder}: no longer proved under triton {', '.join(lost)}, since kernels changed; fix with: "
            f"{_build_command([one.path], one.folder.parent)} --triton {','.join((*one.proofs, *lost))}",
            markup=False,
        )
    text = make_manifest(one.package, one.proofs, held).text()
    path = one.folder / MANIFEST
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)
        one.written.append(path)


def _compile(label: str, staged: Path, targets: Sequence[str], version: str) -> list[Resources]:
    """Compiles all that calls of a package can launch under one Triton."""
    title = f"{label}: compile with triton {version}"
    with stage(f"{title}: list variants", None):
        chosen = toolchain(version)
        jobs = list_variants(staged, targets, toolchain=chosen)
    with stage(title, len(jobs)) as bar:
        return compile_jobs(
            staged,
            jobs,
            toolchain=chosen,
            on_start=lambda job: bar.show(f"{job.target} {job.kernel}"),
            on_done=bar.step,
        )


def _compile_ahead(
    plans: list[tuple[Path, Plan]],
    built: list[Built],
    targets: tuple[str, ...],
    versions: tuple[str, ...],
    cache_dir: Path,
    as_json: bool,
) -> None:
    written = []
    for (_, plan), one in zip(plans, built, strict=True):
        name = plan.spec.name
        drifts = compare(one.package, one.folder)
        if drifts:
            raise DriftError(
                f"{drifts[0].path}: {drifts[0].kind}: kernels are compiled ahead from the text that is imported",
                hint=f"fix with: {_build_command([one.path], one.folder.parent)}",
            )
        for target in _chosen(plan, targets):
            for version in versions:
                title = f"{one.label}: compile ahead for {target} with triton {version}"
                with stage(title, None) as bar:
                    path = write_kernels(
                        one.folder,
                        target,
                        cache_dir / name,
                        toolchain=toolchain(version),
                        on_list=bar.of,
                        on_start=lambda job: bar.show(job.kernel),
                        on_done=bar.step,
                    )
                written.append(path)
                err.print(f"{path}: {path.stat().st_size:,} bytes", markup=False)
                if not as_json:
                    out.print(str(path), markup=False)
    if as_json:
        print_json([str(path) for path in written])


def _chosen(plan: Plan, targets: tuple[str, ...]) -> list[str]:
    """The spec's targets that were asked for.

    Raises:
        UsageError: it has none of them.
    """
    chosen: list[str] = [target for target in plan.spec.targets if not targets or target in targets]
    if not chosen:
        has = ", ".join(plan.spec.targets)
        raise UsageError(f"{plan.spec.name}: none of its targets ({has}) is {', '.join(targets)}")
    return chosen
