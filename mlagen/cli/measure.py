"""`mlagen tune` and `mlagen bench`: what needs a GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from mlagen.cli.console import JSON, SPEC, err, print_json
from mlagen.emit import apply, compare, render
from mlagen.emit.write import write_atomically
from mlagen.plan import load_plan
from mlagen.spec import load


@contextmanager
def _staged(spec: Path) -> Iterator[Path]:
    """The package of a spec, rendered into a temporary folder."""
    package = render(load_plan(spec))
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        folder = Path(temporary) / package.name
        apply(compare(package, folder))
        yield folder


@click.command()
@SPEC
@click.option("--budget", type=float, metavar="SECONDS", help="Try no further tile after so long.")
@click.option("--log", type=click.Path(path_type=Path), help="Keep what was measured here, and go on from it.")
@click.option("--heads", multiple=True, type=int, help="Only the classes measured at these heads; repeatable.")
@click.option("--tokens", multiple=True, type=int, help="Only these token counts; repeatable.")
@click.option("--tiles", type=click.Path(path_type=Path), help="Only tiles of this file of `mlagen.bench.candidates`.")
def tune(
    spec: Path,
    budget: float | None,
    log: Path | None,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    tiles: Path | None,
) -> None:
    """Sweeps the tiles of SPEC on this GPU and writes specs/tuned/SPEC/TARGET.yaml, which `build` reads.

    Every candidate's result is checked against the reference before its time counts.
    """
    from mlagen.bench.candidates import read_tiles
    from mlagen.bench.progress import progress  # torch and Triton are slow to import, and most commands need neither
    from mlagen.bench.tune import summary
    from mlagen.bench.tune import tune as sweep

    with _staged(spec) as folder, progress() as report:
        kept = read_tiles(tiles) if tiles else None
        loaded = load(spec)
        tuned = sweep(loaded, folder, budget=budget, log=log, heads=heads, tokens=tokens, tiles=kept, report=report)
    path = tuned.write(spec.parent)
    click.echo(summary(tuned), nl=False)
    state = "" if tuned.complete else ", not every size was swept"
    count = len(tuned.rows) + len(tuned.kvcache_rows)
    err.print(f"{path}: {count} rows{state}; now run: mlagen build {spec}", markup=False)


@click.command()
@SPEC
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["prefill", "decode", "cache", "gather", "index", "kvcache"]),
    help="Only this family of kernels; repeatable.",
)
@click.option("--heads", multiple=True, type=int, help="Head counts of attention; default: the spec's, 64 and 16.")
@click.option("--no-peers", is_flag=True, help="Measure the package alone.")
@click.option("--rounds", type=click.IntRange(min=1), help="Interleaved rounds a shape.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="Write the table here too.")
@JSON
def bench(
    spec: Path,
    only: tuple[str, ...],
    heads: tuple[int, ...],
    no_peers: bool,
    rounds: int | None,
    markdown_path: Path | None,
    as_json: bool,
) -> None:
    """Measures SPEC's kernels on this GPU, interleaved with the peers that import, results checked in the same run."""
    from mlagen.bench import FAMILIES, bench_package, load_package, markdown, shapes_of, to_json
    from mlagen.bench.report import line
    from mlagen.bench.run import ROUNDS

    with _staged(spec) as folder:
        rows = bench_package(
            folder,
            shapes=shapes_of(load_package(folder), only or tuple(FAMILIES), heads or None),
            peers=not no_peers,
            rounds=rounds or ROUNDS,
            on_row=lambda row: err.print(line(row), markup=False),
        )
    if markdown_path:
        write_atomically(markdown_path, markdown(rows))
    if as_json:
        print_json(json.loads(json.dumps([to_json(row) for row in rows])))
    else:
        click.echo(markdown(rows), nl=False)
