"""`mlagen package`: a spec as a wheel that plugs into an engine, or as a repository of kernels."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mlagen.backends.hub import OWNER, repo_of
from mlagen.cli.console import JSON, SPEC, TargetName, err, out, print_json, stage
from mlagen.compile import parse_tritons, toolchain, write_kernels
from mlagen.emit import ENGINES, Package, apply, compare, render
from mlagen.emit.hub import BENCHMARK, hub_repository, write_repository
from mlagen.emit.wheel import engine_wheel, write_wheel
from mlagen.errors import UsageError
from mlagen.plan import Plan, load_plan
from mlagen.proofs import Proofs, rendered_key

GENERATED = Path("generated")  # where `build` keeps packages and their proofs


@dataclass(frozen=True)
class Request:
    """A package to write.

    Attributes:
        plan: the plan of its spec.
        kind: one of KINDS.
        repo: the value of --repo.
        tritons: the versions under which all kernels of the package are proved to compile within their limits.
        verified: cases of every family are proved.
        archives: kernels compiled ahead, by file name.
    """

    plan: Plan
    kind: str
    repo: str | None = None
    tritons: Sequence[str] = ()
    verified: bool = False
    archives: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A package that was written.

    Attributes:
        path: the file or folder.
        commands: what to run next.
        facts: of the output of --json, beside `proved`.
    """

    path: Path
    commands: Sequence[str]
    facts: Mapping[str, Any]


def _wheel(request: Request) -> Callable[[Path], Written]:
    """A wheel that plugs into an engine. Raises UsageError: the engine calls no attention of the spec's kind."""
    name, data = engine_wheel(request.plan, request.kind, request.tritons, archives=request.archives)
    serve = ENGINES[request.kind].serve_command(request.plan)

    def write(folder: Path) -> Written:
        path = write_wheel(name, data, folder)
        facts = {"engine": request.kind, "wheel": str(path), "serve": serve}
        return Written(path, (f"pip install {shlex.quote(str(path))}", serve), facts)

    return write


def _hub(request: Request) -> Callable[[Path], Written]:
    """A repository of Hugging Face's kernels."""
    repo = repo_of(request.plan, request.repo)
    archives = request.archives
    files = hub_repository(request.plan, repo, request.tritons, verified=request.verified, archives=archives)

    def write(folder: Path) -> Written:
        path = folder / repo.name
        write_repository(files, path)
        quoted = shlex.quote(str(path))
        load = f'from kernels import get_kernel; get_kernel("{repo.id}", version={repo.version}).warmup()'
        commands = [f"LOCAL_KERNELS={repo.id}={quoted} python -c {shlex.quote(load)}"]
        if BENCHMARK in files:
            commands.append(f"kernels benchmark {quoted if path.is_absolute() else f'./{quoted}'}")
        commands.append(f"kernel-builder upload {quoted} --repo-id {repo.id}")
        return Written(path, commands, {"repository": str(path), "repo": repo.id, "next": commands})

    return write


# By the value of --for: makes a package, and returns the function that writes it into a folder.
KINDS: dict[str, Callable[[Request], Callable[[Path], Written]]] = {**dict.fromkeys(ENGINES, _wheel), "hub": _hub}


@click.command()
@SPEC
@click.option(
    "--for", "kind", type=click.Choice(tuple(KINDS)), required=True, help="The engine or the hub that it is for."
)
@click.option(
    "--compiled",
    "targets",
    multiple=True,
    type=TargetName(),
    help="Put kernels compiled for this target into the package, so that a server's start compiles none; repeatable.",
)
@click.option(
    "--triton", metavar="VERSIONS", help="The server's, such as 3.8, with --compiled; default: the installed one."
)
@click.option(
    "--repo",
    metavar="ORG/NAME[@vN]",
    help=f"The place on the Hub, with --for hub; default: {OWNER}/mlagen-SPEC, version 0.",
)
@click.option("--out", "folder", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@JSON
def package(
    spec: Path,
    kind: str,
    targets: tuple[str, ...],
    triton: str | None,
    repo: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Writes the package of SPEC as a wheel for an engine or as a repository of kernels, and prints its path.

    A wheel holds the generated package, as `build` writes it, and a plugin over it that the engine finds by its entry
    point. Its version ends with a hash of its content, so that pip replaces an earlier one. An earlier wheel of the
    same spec in the output folder is removed.

    With --for hub it writes a folder that Hugging Face's `kernels` loads, from the disk or from the Hub. An earlier
    repository of the same spec is replaced if nobody changed it.
    """
    if triton is not None and not targets:
        raise UsageError("--triton: takes none without --compiled, whose kernels it compiles")
    if repo is not None and kind != "hub":
        raise UsageError("--repo: takes none without --for hub")
    plan = load_plan(spec)
    rendered = render(plan)
    KINDS[kind](Request(plan, kind, repo))  # refuses a spec of another kind before anything is compiled
    archives = _compiled(plan, rendered, targets, parse_tritons(triton)) if targets else {}
    proofs, key = Proofs(GENERATED), rendered_key(rendered)
    tritons = proofs.tritons(key)
    written = KINDS[kind](Request(plan, kind, repo, tritons, proofs.verified(key), archives))(folder)
    if as_json:
        print_json({**written.facts, "proved": bool(tritons)})
    else:
        out.print(str(written.path), markup=False, soft_wrap=True)
    said = [] if tritons else [f"not proved; fix with: mlagen build {shlex.quote(str(spec))}"]
    for line in (*said, *written.commands):
        err.print(line, markup=False, soft_wrap=True)


def _compiled(plan: Plan, package: Package, targets: Sequence[str], versions: Sequence[str]) -> dict[str, bytes]:
    """Archives of all that calls of a package can launch on targets, by file name."""
    lacking = [target for target in targets if target not in plan.spec.targets]
    if lacking:
        has = ", ".join(plan.spec.targets)
        raise UsageError(f"--compiled: got {lacking[0]}; {plan.spec.name} takes {has}")
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
