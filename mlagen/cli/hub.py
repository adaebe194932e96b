"""`mlagen package --for hub`: the folder of a kernel repository, and the commands that use it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from mlagen.backends.engines.hub import Repo
from mlagen.cli.console import print_written
from mlagen.emit import render
from mlagen.emit.hub import BENCHMARK, hub_repository, write_repository
from mlagen.plan import Plan
from mlagen.proofs import Proofs, rendered_key


def write_hub(
    plan: Plan, spec: Path, repo: Repo, archives: Mapping[str, bytes], proofs: Proofs, folder: Path, as_json: bool
) -> None:
    """Write a repository into a folder, and print its path and the next commands.

    Args:
        plan: the plan.
        spec: its file, for the command that proves it.
        repo: the place on the Hub; its name is that of the repository's folder.
        archives: kernels compiled ahead, by file name.
        proofs: of packages.
        folder: where to write.
        as_json: print JSON.
    """
    key, path = rendered_key(render(plan)), folder / repo.name
    tritons = proofs.tritons(key)
    files = hub_repository(plan, repo, tritons, verified=proofs.verified(key), archives=archives)
    write_repository(files, path)
    quoted = shlex.quote(str(path))
    load = f'from kernels import get_kernel; get_kernel("{repo.id}", version={repo.version}).warmup()'
    commands = [f"LOCAL_KERNELS={repo.id}={quoted} python -c {shlex.quote(load)}"]
    if BENCHMARK in files:
        commands.append(f"kernels benchmark {quoted if path.is_absolute() else f'./{quoted}'}")
    commands.append(f"kernel-builder upload {quoted} --repo-id {repo.id}")
    values = {"repository": str(path), "repo": repo.id, "next": commands}
    print_written(path, spec, commands, values, proved=bool(tritons), as_json=as_json)
