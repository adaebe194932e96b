"""`mlagen build`: renders, compiles and verifies packages, then writes them."""

from __future__ import annotations

import random
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from mlagen.backends import expected_products
from mlagen.cli.built import Built, report_all
from mlagen.cli.complete import SpecPath
from mlagen.cli.console import (
    GENERATED,
    JSON,
    OUT,
    TargetName,
    chosen_targets,
    counted,
    err,
    numbered,
    out,
    print_json,
    spec_files,
)
from mlagen.cli.machine import require_libraries
from mlagen.cli.packages import install, unsupported
from mlagen.cli.progress import stage
from mlagen.cli.prove import Prover
from mlagen.cli.record import require_recorded, say_unrecorded
from mlagen.cli.replaced import check_replaced
from mlagen.cli.verify import DEVICE, pick_device
from mlagen.compile import Resources, Settler, check_limits, parse_tritons, toolchain, write_kernels
from mlagen.diffs import base_of, diff_of, steps_of
from mlagen.emit import (
    Drift,
    Package,
    apply,
    check_edits,
    check_place,
    compare,
    orphans,
    removable,
    render,
)
from mlagen.errors import DriftError, LimitError, MlagenError, SpecError, SpecErrors, UsageError
from mlagen.plan import Plan, load_plan
from mlagen.plan.tritons import TRITONS
from mlagen.proofs import NAME, Proofs, rendered_key
from mlagen.verify import mismatches

UNPROVED = "not proved"  # kind of a drift: the package is as its spec makes it, and no proof lists its text


@click.command()
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option("--check", is_flag=True, help="Write nothing. Exit 1 if generated files differ from their specs.")
@click.option("--release", is_flag=True, help="With --check: exit 1 if an sm90 kernel has no GPU record for its text.")
@click.option("--diff", is_flag=True, help="Write nothing. Print the changes that a build would make.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option("--target", "targets", multiple=True, type=TargetName(), help="Compile only for this target; repeatable.")
@click.option(
    "--triton", metavar="VERSIONS", help="Compile with these Tritons: 3.7,3.8 or all; default: the installed one."
)
@click.option(
    "--cache",
    "cache_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write compiled kernels into DIR/NAME instead of a package. The package's warmup() loads them.",
)
@click.option("--no-compile", is_flag=True, help="Do not compile.")
@click.option("--no-verify", is_flag=True, help="Do not run the kernels.")
@click.option("--all-cases", is_flag=True, help="Run all cases instead of a representative set.")
@click.option("--fresh", is_flag=True, help="Compile and run everything. Use no stored proof.")
@click.option("--seed", type=int, help="Seed that picks the proofs to compute again; default: other ones every day.")
@OUT
@DEVICE
@click.option("-v", "--verbose", is_flag=True, help="Also print each variant and each group of cases.")
@JSON
def build(
    specs: tuple[Path, ...],
    check: bool,
    release: bool,
    diff: bool,
    force: bool,
    targets: tuple[str, ...],
    triton: str | None,
    cache_dir: Path | None,
    no_compile: bool,
    no_verify: bool,
    all_cases: bool,
    fresh: bool,
    seed: int | None,
    folder: Path,
    device: str,
    verbose: bool,
    as_json: bool,
) -> None:
    """Render, compile and verify the packages of SPECS (default: specs/*.yaml), then write them to generated/.

    Every kernel variant that a call can launch is compiled for every target, and the kernels run against a float64
    reference. If a check of a package fails, nothing of that package is written. Results are looked up in OUT/proofs,
    in mlagen's own proofs and in the user's cache; three random ones are computed again. A Triton that is not
    installed is downloaded once, into the user's cache.
    """
    if cache_dir is not None and (check or diff or force or no_compile):
        raise UsageError(
            "--cache writes compiled kernels, not a package: leave out --check, --diff, --force and --no-compile"
        )
    _check_options(check=check, release=release, diff=diff, force=force)
    plans = _load_all(spec_files(specs), folder)
    with stage(f"render {counted(len(plans), 'package')}"):
        built = [_begin(path, plan, folder, number, len(plans)) for number, (path, plan) in enumerate(plans, 1)]
    if check or diff:
        _compare_all(built, check, as_json, folder, every=not specs)
        if release:
            require_recorded(one.folder for one in built)
        return
    for one in built:  # before minutes of compilation
        check_place(one.folder if cache_dir is None else cache_dir / one.package.name)
    if not (no_compile and no_verify):  # only here, since --check needs no library
        require_libraries()
    versions = () if no_compile else _chosen_tritons(triton)
    if cache_dir is not None:
        _compile_ahead(plans, built, targets, versions, cache_dir, as_json)
        return
    place = None if no_verify else pick_device(device)
    random.Random(seed).choice(built).samples = True
    prover = Prover(Proofs(folder), versions, place, every=all_cases, fresh=fresh, seed=seed)
    for number, ((_, plan), one) in enumerate(zip(plans, built, strict=True)):
        try:
            one.failures = _build_one(plan, one, targets, force, prover)
        except MlagenError as error:
            one.failures = [error]
        if not as_json:
            out.print("\n" * (number > 0), end="")
            one.show(verbose)
        one.report()
    if len(built) > 1:
        report_all(built)
    say_unrecorded(one.folder for one in built if not one.failures)
    if as_json:
        print_json([one.to_json() for one in built])
    if any(one.failures for one in built):
        raise SystemExit(max(error.exit_code for one in built for error in one.failures))


def _check_options(*, check: bool, release: bool, diff: bool, force: bool) -> None:
    if check and (diff or force):
        raise UsageError("got --check with --diff or --force; takes one of the three")
    if release and not check:
        raise UsageError("--release adds to the checks of --check: pass both")


def _chosen_tritons(option: str | None) -> tuple[str, ...]:
    """Return the Tritons that compile. Say so if it is the installed one, and mlagen does not support it."""
    versions = parse_tritons(option)
    if option is None and (found := unsupported(versions[0])):
        fix = f"pass --triton, or run: {install(versions[0])}"
        err.print(f"triton {found}, so this build proves no package; {fix}", markup=False, soft_wrap=True)
    return versions


def _begin(path: Path, plan: Plan, folder: Path, number: int, of: int) -> Built:
    """Return the record of a build that has not started."""
    package, name = render(plan), plan.spec.name
    return Built(path, plan, package, rendered_key(package), folder / name, numbered(name, number, of))


def _load_all(paths: list[Path], folder: Path) -> list[tuple[Path, Plan]]:
    """Return the plans of all specs. Packages that are kept as diffs come last, behind those that they start from.

    Raises:
        SpecErrors: all errors of all specs.
        UsageError: two specs share a name, so one package would overwrite the other, or a spec is named like the folder
            of proofs.
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
        if plan.spec.name == NAME:
            raise UsageError(f"{path}: name: got '{NAME}', which is the folder of proofs; takes another")
        other = first.setdefault(plan.spec.name, path)
        if other != path:
            raise UsageError(f"{path}: name: got '{plan.spec.name}', which is that of {other} too; takes another")
    return sorted(plans, key=lambda one: steps_of(diff_of(folder / one[1].spec.name)))


def _compare_all(built: list[Built], check: bool, as_json: bool, folder: Path, *, every: bool) -> None:
    proofs = Proofs(folder)
    drifts: list[Drift] = []
    drifted: list[Path] = []
    unverified: list[Path] = []
    for one in built:
        found = compare(_as_proved(one, proofs), one.folder)
        if not found and not proofs.tritons(one.key):
            found = [Drift(one.folder, UNPROVED, None, None)]
        unverified += [one.path] if not found and not proofs.verified(one.key) else []
        drifts += found
        drifted += [one.path] if found else []
    if unverified:
        command = _build_command(unverified, folder)
        err.print(
            f"{len(unverified)} of {len(built)} packages: their cases have not run; run: {command}", soft_wrap=True
        )
    drifts += orphans(folder, [one.package.name for one in built]) if every else []
    faults = proofs.faults()
    if as_json:
        found_faults = [{"path": str(path), "kind": reason} for path, reason in faults]
        print_json(
            [*({"path": str(drift.path), "kind": drift.kind, "note": drift.note} for drift in drifts), *found_faults]
        )
    else:
        for drift in drifts:
            out.print(f"{drift.path}: {drift.kind}{drift.note and f', {drift.note}'}", markup=False)
            if not check or drift.old is not None:  # the whole text of a file that is missing shows no difference
                click.echo(drift.diff(), nl=False)
        for path, reason in faults:
            out.print(f"{path}: {reason}", markup=False)
    if check and (drifts or faults):
        unproved = sum(drift.kind == UNPROVED for drift in drifts)
        files = len(drifts) - unproved + len({path for path, _ in faults})
        differ = "differs from its spec" if files == 1 else "differ from their specs"
        are = "is" if unproved == 1 else "are"
        said = [f"{counted(files, 'generated file')} {differ}"] * bool(files)
        said += [f"{counted(unproved, 'package')} {are} not proved"] * bool(unproved)
        raise DriftError(
            "; ".join(said),
            hint=f"fix with: {_mending_command(drifts, [one.path for one in built] if faults else drifted, folder)}",
        )


def _as_proved(one: Built, proofs: Proofs) -> Package:
    """Return the package with the list of the Tritons that proved it."""
    tritons = proofs.tritons(one.key)
    return one.package if tritons == TRITONS else render(one.plan, tritons)


def _mending_command(drifts: Sequence[Drift], specs: Sequence[Path], folder: Path) -> str:
    """Return the command that fixes drifts and orphans. It renames files that mlagen did not write."""
    moved = [["mv", str(drift.path), f"{drift.path}.mine"] for drift in drifts if drift.kind == "foreign"]
    gone = [str(path) for drift in drifts if drift.kind == "orphan" for path in removable(drift.path)]
    force = ["--force"] * any(drift.kind == "edited" for drift in drifts)
    built = [_build_command(specs, folder, *force)] * bool(specs)
    return " && ".join([*map(shlex.join, [*moved, *[["rm", "-r", *gone]] * bool(gone)]), *built])


def _build_command(specs: Sequence[Path], folder: Path, *options: str) -> str:
    """Return the command that builds the specs into a folder. It leaves out their names if it builds all."""
    specs = [] if len(specs) > 1 and sorted(specs) == spec_files(()) else specs
    place = [] if folder == GENERATED else ["--out", str(folder)]
    return shlex.join(["mlagen", "build", *map(str, specs), *place, *options])


def _build_one(plan: Plan, one: Built, targets: tuple[str, ...], force: bool, prover: Prover) -> list[MlagenError]:
    """Prove and write a package. On a failed check, return the errors and write nothing."""
    check_edits(compare(one.package, one.folder), force=force)
    check_replaced(one.folder, plan.spec, one.path, force=force)
    name, proofs, chosen = plan.spec.name, prover.proofs, chosen_targets(plan, targets)
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        staged = Path(temporary) / name
        apply(compare(one.package, staged))
        one.products = expected_products(plan)
        settler = _settle(plan, one, staged, chosen, prover)
        if prover.device is not None:
            one.cases = prover.verify(one.label, staged, one.key, prover.device)
            if failed := mismatches(one.cases.results):
                return [*failed]
        one.proves = prover.proves and chosen == list(plan.spec.targets)
        if one.proves:
            if one.samples:
                one.again = prover.sample(one.label, staged, one.key, chosen, one.cases)
            _take_in(one, prover, prover.proved_keys(one.label, staged, one.key, chosen))
    one.package = _as_proved(one, proofs)
    one.written = settler.write()
    one.written += apply(compare(one.package, one.folder), force=force)  # compares again, with edits made meanwhile
    if one.proves:
        one.written += proofs.save()
    return []


def _settle(plan: Plan, one: Built, staged: Path, targets: Sequence[str], prover: Prover) -> Settler:
    """Compile a package. Replace kernels over a limit: by other registers, other tiles or portable kernels.

    Raises:
        LimitError, ToolError: a kernel exceeds a limit and has no replacement.
    """
    spec = plan.spec

    def check(taken: Resources) -> list[LimitError]:
        within = _holds_under(prover.proofs, [taken])
        return check_limits([taken], one.products, holds_under=within, spec=spec.name, targets=spec.targets)

    def say(line: str) -> None:
        one.findings.append(line)
        err.print(line, markup=False, soft_wrap=True)

    settler = Settler(one.path, plan, staged, check, say, stage)
    one.compiled = settler.settle(
        prover.versions, lambda version, judge: prover.compile(one.label, staged, targets, version, judge)
    )
    if settler.plan is not plan:
        one.plan, one.package = settler.plan, render(settler.plan)
        one.key = rendered_key(one.package)
    return settler


def _holds_under(proofs: Proofs, resources: list[Resources]) -> dict[str, list[str]]:
    """Return the Tritons under which variants are known to stay within their limits, by key."""
    rows = {taken.key: proofs.variant(taken.key) for taken in resources}
    return {
        key: [version for version in row.figures if not any(row.broken(key, version))]
        for key, row in rows.items()
        if row is not None
    }


def _take_in(one: Built, prover: Prover, proved: dict[str, list[str]]) -> None:
    """Add the results of a build to the proofs, and name the Tritons that no longer prove the package."""
    proofs, name = prover.proofs, one.package.name
    before = proofs.tritons_of(name)
    for taken in one.compiled.values():
        proofs.add_compiled(taken)
    keys = {version: [each.key for each in taken] for version, taken in one.compiled.items()}
    proofs.add_package(name, one.key, {**proved, **keys})
    for row in one.cases.rows.values():
        proofs.add_cases(row)
    lost = [version for version in before if version not in proofs.tritons(one.key)]
    if lost:
        command = _build_command([one.path], one.folder.parent)
        err.print(
            f"{one.folder}: no longer proved under triton {', '.join(lost)}, since kernels changed; fix with: "
            f"{command} --triton {','.join((*prover.versions, *lost))}",
            markup=False,
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
        if base := base_of(diff_of(one.folder)):
            raise UsageError(
                f"{diff_of(one.folder)}: a diff from {base}, and kernels are compiled ahead from a package; "
                "build it with --out FOLDER, then compile ahead with the same --out"
            )
        drifts = compare(_as_proved(one, Proofs(one.folder.parent)), one.folder)
        if drifts:
            raise DriftError(
                f"{drifts[0].path}: {drifts[0].kind}: kernels are compiled ahead from the text that is imported; "
                "for a package in another folder, pass its --out",
                hint=f"fix with: {_build_command([one.path], one.folder.parent)}",
            )
        for target in chosen_targets(plan, targets):
            for version in versions:
                title = f"{one.label}: compile ahead for {target} with triton {version}"
                with stage(title) as bar:
                    path = write_kernels(
                        one.folder,
                        target,
                        cache_dir / name,
                        toolchain=toolchain(version),
                        on_list=bar.expect,
                        on_start=lambda job: bar.show(job.kernel),
                        on_done=bar.step,
                    )
                written.append(path)
                err.print(f"{path}: {path.stat().st_size:,} bytes", markup=False)
                if not as_json:
                    out.print(str(path), markup=False)
    if as_json:
        print_json([str(path) for path in written])
