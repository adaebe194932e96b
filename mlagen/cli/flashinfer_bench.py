"""`mlagen package --for flashinfer-bench`: the folder of a data set, and the command that runs it."""

from __future__ import annotations

import shlex
from pathlib import Path

from mlagen.cli.console import print_written
from mlagen.emit import render
from mlagen.plan import Plan
from mlagen.proofs import Proofs, rendered_key


def write_data_set(plan: Plan, spec: Path, proofs: Proofs, folder: Path, as_json: bool) -> None:
    """Writes a data set into a folder, and prints its path and the next command.

    Args:
        plan: the plan.
        spec: its file, for the command that proves it.
        proofs: of packages.
        folder: where to write.
        as_json: print JSON.

    Raises:
        UsageError: the package serves no definition.
    """
    from mlagen.emit.flashinfer_bench import trace_set, write_trace_set  # needs numpy; other commands go without it

    tritons = proofs.tritons(rendered_key(render(plan)))
    files, root = trace_set(plan, tritons), folder / f"{plan.spec.name}-flashinfer-bench"
    write_trace_set(files, root)
    run = f"flashinfer-bench run --local {shlex.quote(str(root))}"
    definitions = [Path(name).stem for name in files if name.startswith("definitions/")]
    values = {"folder": str(root), "definitions": definitions, "run": run}
    print_written(root, spec, [run], values, proved=bool(tritons), as_json=as_json)
