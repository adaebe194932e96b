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
    from mlagen.bench.tune import regimes_of, summary
    from mlagen.bench.tune import tune as sweep

    loaded = load(spec)
    regimes = [
        regime
        for regime in regimes_of(loaded.model.num_heads)
        if (not heads or regime.num_heads in heads) and (not tokens or regime.tokens in tokens)
    ]
    with _staged(spec) as folder, progress() as report:
        kept = read_tiles(tiles) if tiles else None
        tuned = sweep(loaded, folder, budget=budget, log=log, regimes=regimes, tiles=kept, report=report)
    path = tuned.write(spec.parent)
    click.echo(summary(tuned), nl=False)
    state = "" if tuned.complete else ", not every size was swept"
    err.print(f"{path}: {len(tuned.rows)} rows{state}; now run: mlagen build {spec}", markup=False)


@click.command()
@SPEC
@click.option("--only", type=click.Choice(["prefill", "decode"]), help="Leave the other kind out.")
@click.option("--heads", multiple=True, type=int, help="Head counts; default: the spec's, 64 and 16.")
@click.option("--no-peers", is_flag=True, help="Measure the package alone.")
@click.option("--rounds", type=click.IntRange(min=1), help="Interleaved rounds a shape.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="Write the table here too.")
@JSON
def bench(
    spec: Path,
    only: str | None,
    heads: tuple[int, ...],
    no_peers: bool,
    rounds: int | None,
    markdown_path: Path | None,
    as_json: bool,
) -> None:
    """Measures SPEC's kernels on this GPU, interleaved with the peers that import, results checked in the same run."""
    from mlagen.bench import bench_package, default_shapes, markdown, to_json
    from mlagen.bench.package import load_package
    from mlagen.bench.report import line
    from mlagen.bench.run import ROUNDS

    with _staged(spec) as folder:
        kinds = (only,) if only else ("prefill", "decode")
        rows = bench_package(
            folder,
            shapes=default_shapes(load_package(folder).facts, kinds, list(heads) or None),
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
