"""`mlagen package`: a wheel that plugs a spec's package into an engine, a repository of kernels, or a data set."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from mlagen.backends.engines.hub import OWNER, repo_of
from mlagen.cli.console import GENERATED, JSON, SPEC, TargetName, print_written
from mlagen.cli.flashinfer_bench import write_data_set
from mlagen.cli.hub import write_hub
from mlagen.cli.progress import stage
from mlagen.compile import parse_tritons, toolchain, write_kernels
from mlagen.emit import ENGINES, Package, apply, compare, render
from mlagen.emit.wheel import engine_wheel, write_wheel
from mlagen.errors import Place, UsageError
from mlagen.plan import Plan, load_plan
from mlagen.proofs import Proofs, rendered_key

HUB, FLASHINFER_BENCH = "hub", "flashinfer-bench"


@click.command()
@SPEC
@click.option(
    "--for",
    "engine",
    type=click.Choice((*ENGINES, HUB, FLASHINFER_BENCH)),
    required=True,
    help="Engine that the wheel plugs into, hub for Hugging Face's Hub, or flashinfer-bench.",
)
@click.option(
    "--compiled",
    "targets",
    multiple=True,
    type=TargetName(),
    help="Include kernels compiled for this target, so that a server compiles none at start; repeatable.",
)
@click.option(
    "--triton",
    metavar="VERSIONS",
    help="With --compiled: the server's Triton, for example 3.8; default: the installed one.",
)
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Folder of wheels.",
)
@click.option(
    "--repo",
    metavar="ORG/NAME[@vN]",
    help=f"With --for hub: the repository to publish to; default: {OWNER}/mlagen-SPEC, version 0.",
)
@JSON
def package(
    spec: Path,
    engine: str,
    targets: tuple[str, ...],
    triton: str | None,
    repo: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Write a wheel that plugs the package of SPEC into an engine, and print its path.

    The wheel contains the generated package, as `build` writes it, and a plugin that the engine finds by its entry
    point. Its version ends with a hash of its content, so pip replaces an earlier one. An earlier wheel of the same
    spec in the output folder is removed.

    With --for hub, write a folder that Hugging Face's `kernels` loads. An earlier folder of the same spec is replaced
    unless it has other or edited files. With --for flashinfer-bench, write a folder of definitions, solutions and
    workloads.
    """
    if triton is not None and not targets:
        raise UsageError("--triton needs --compiled TARGET, since it compiles those kernels")
    if repo is not None and engine != HUB:
        raise UsageError("--repo: takes none without --for hub")
    plan = load_plan(spec)
    if engine == FLASHINFER_BENCH:
        if targets:
            raise UsageError("--compiled: takes none with --for flashinfer-bench: its solutions hold only sources")
        write_data_set(plan, spec, Proofs(GENERATED), folder, as_json)
        return
    rendered, place = render(plan), repo_of(plan, repo)
    if engine != HUB:
        try:
            engine_wheel(plan, engine)  # refuses a spec of another kind before anything is compiled
        except UsageError as error:
            raise UsageError(error.message, place=Place(spec)) from None
    archives = _compiled(plan, rendered, targets, parse_tritons(triton)) if targets else {}
    if engine == HUB:
        write_hub(plan, spec, place, archives, Proofs(GENERATED), folder, as_json)
        return
    tritons = Proofs(GENERATED).tritons(rendered_key(rendered))
    path = write_wheel(*engine_wheel(plan, engine, tritons, archives=archives), folder)
    serve = ENGINES[engine].serve_command(plan)
    values = {"engine": engine, "wheel": str(path), "serve": serve}
    commands = [f"pip install {shlex.quote(str(path))}", serve]
    print_written(path, spec, commands, values, proved=bool(tritons), as_json=as_json)


def _compiled(plan: Plan, package: Package, targets: Sequence[str], versions: Sequence[str]) -> dict[str, bytes]:
    """Return archives of all kernel variants of a package on targets, by file name."""
    lacking = [target for target in targets if target not in plan.spec.targets]
    if lacking:
        has = ", ".join(plan.spec.targets)
        raise UsageError(f"--compiled: got {lacking[0]}; takes a target of {plan.spec.name}: {has}")
    found = {}
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        staged = Path(temporary) / plan.spec.name
        apply(compare(package, staged))
        for target in dict.fromkeys(targets):
            for version in versions:
                title = f"{plan.spec.name}: compile ahead for {target} with triton {version}"
                with stage(title) as bar:
                    archive = write_kernels(
                        staged,
                        target,
                        Path(temporary) / "archives",
                        toolchain=toolchain(version),
                        on_list=bar.expect,
                        on_start=lambda job: bar.show(job.kernel),
                        on_done=bar.step,
                    )
                found[archive.name] = archive.read_bytes()
    return found
