"""`mlagen package`: a spec as a wheel that plugs into an engine."""

from __future__ import annotations

from pathlib import Path

import click

from mlagen.cli.console import JSON, SPEC, out, print_json
from mlagen.emit import ENGINES, render
from mlagen.emit.wheel import engine_wheel, write_wheel
from mlagen.plan import load_plan
from mlagen.proofs import Proofs, rendered_key


@click.command()
@SPEC
@click.option(
    "--for", "engine", type=click.Choice(tuple(ENGINES)), required=True, help="The engine that it plugs into."
)
@click.option("--out", "folder", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@JSON
def package(spec: Path, engine: str, folder: Path, as_json: bool) -> None:
    """Writes a wheel that plugs the package of SPEC into an engine, and prints its path.

    It holds the generated package, as `build` writes it, and a plugin over it that the engine finds by its entry
    point. Nothing is compiled or run: `build` and `verify` prove the package.
    """
    plan = load_plan(spec)
    tritons = Proofs(Path("generated")).tritons(rendered_key(render(plan)))
    path = write_wheel(*engine_wheel(plan, engine, tritons), folder)
    if as_json:
        print_json({"engine": engine, "wheel": str(path)})
    else:
        out.print(str(path), markup=False, soft_wrap=True)
