"""`mlagen tune` and `mlagen bench`: the commands that need a GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlagen.cli.complete import SpecPath
from mlagen.cli.console import JSON, SPEC, command_line, err, print_json
from mlagen.cli.machine import require_libraries
from mlagen.emit import apply, compare, render
from mlagen.emit.replace import write_atomically
from mlagen.errors import UsageError
from mlagen.plan import load_plan
from mlagen.spec import load

if TYPE_CHECKING:
    from mlagen.bench.report.origin import Origin
    from mlagen.bench.report.rows import Row


@contextmanager
def _staged(spec: Path) -> Iterator[Path]:
    """Render the package of a spec into a temporary folder."""
    package = render(load_plan(spec))
    with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
        folder = Path(temporary) / package.name
        apply(compare(package, folder))
        yield folder


@click.command()
@SPEC
@click.option("--budget", type=float, metavar="SECONDS", help="Try no more tiles after this time.")
@click.option("--log", type=click.Path(path_type=Path), help="Save measurements to this file, and continue from it.")
@click.option("--heads", multiple=True, type=int, help="Only this head count (dense attention: rows); repeatable.")
@click.option(
    "--tokens", multiple=True, type=int, help="Only this token count (dense attention: requests); repeatable."
)
@click.option(
    "--tiles",
    type=click.Path(path_type=Path),
    help="Only the tiles of this file, written by `mlagen.bench.tune.candidates`.",
)
def tune(
    spec: Path,
    budget: float | None,
    log: Path | None,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    tiles: Path | None,
) -> None:
    """Sweep the tiles of SPEC on this GPU and write tuned/SPEC/TARGET.yaml next to it, for the next `build`.

    Tunes sparse attention, over rows and over caches, and dense attention. On sm90, also finds the fewest tokens
    (dense attention: requests) at which the sm90 kernel is faster. Every result is checked against the reference
    before its time counts.
    """
    require_libraries()
    # torch and Triton are slow to import, and most commands need neither
    from mlagen.bench.tune.candidates import read_tiles
    from mlagen.bench.tune.progress import progress
    from mlagen.bench.tune.tuned import summary
    from mlagen.bench.tune.tuned import tune as sweep

    with _staged(spec) as folder, progress() as report:
        kept = read_tiles(tiles) if tiles else None
        loaded = load(spec)
        tuned = sweep(loaded, folder, budget=budget, log=log, heads=heads, tokens=tokens, tiles=kept, report=report)
    path = tuned.write(spec.parent)
    click.echo(summary(tuned), nl=False)
    state = "" if tuned.complete else ", some sizes not swept"
    err.print(f"{path}: {tuned.row_count} rows{state}; now run: mlagen build {spec}", markup=False)


def _measured(
    spec: Path, only: tuple[str, ...], heads: tuple[int, ...], rounds: int | None, origin: Origin, *, peers: bool
) -> list[Row]:
    """Measure a spec's package on this GPU and return the rows."""
    from mlagen.bench import FAMILIES, bench_package, load_package, shapes_of
    from mlagen.bench.report.tables import line
    from mlagen.bench.run import ROUNDS

    with _staged(spec) as folder:
        return bench_package(
            folder,
            shapes=shapes_of(load_package(folder), only or tuple(FAMILIES), heads or None),
            peers=peers,
            rounds=rounds or ROUNDS,
            origin=origin,
            on_row=lambda row: err.print(line(row), markup=False),
        )


@click.command()
@click.argument("spec", required=False, type=SpecPath())
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(
        [
            "prefill",
            "decode",
            "ordered",
            "shared",
            "cache",
            "gather",
            "prologue",
            "compressor",
            "latents",
            "out_quant",
            "kpool",
            "indexer_cache",
            "indices",
            "sparse_decode",
            "dense_decode",
            "dense_fwd",
            "merge_states",
            "mqa_logits",
            "topk",
            "indexer_select",
            "candidates",
            "layer",
        ]
    ),
    help="Only this family of kernels; repeatable.",
)
@click.option(
    "--heads", multiple=True, type=int, help="Head count of attention; repeatable. Default: the spec's, 64 and 16."
)
@click.option("--peers/--no-peers", default=True, help="Also measure the peers that can be imported; default: on.")
@click.option("--rounds", type=click.IntRange(min=1), help="Interleaved rounds per shape.")
@click.option("--commit", help="Commit of mlagen, if this is no checkout; --json needs one.")
@click.option(
    "--peer",
    "versions",
    multiple=True,
    metavar="NAME=VERSION",
    help="Version of a peer that has no version of its own.",
)
@click.option(
    "--from",
    "saved",
    multiple=True,
    metavar="JSON",
    type=click.Path(path_type=Path),
    help="Show the rows of this saved run instead of measuring; repeatable.",
)
@click.option(
    "--against",
    metavar="JSON",
    type=click.Path(path_type=Path),
    help="Compare with a saved run. Exit 1 if a shape is slower.",
)
@click.option(
    "--markdown", "markdown_path", type=click.Path(path_type=Path), help="Also write the tables to this file."
)
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), help="Write a page with charts and tables to this file."
)
@JSON
@click.pass_context
def bench(
    context: click.Context,
    spec: Path | None,
    only: tuple[str, ...],
    heads: tuple[int, ...],
    peers: bool,
    rounds: int | None,
    commit: str | None,
    versions: tuple[str, ...],
    saved: tuple[Path, ...],
    against: Path | None,
    markdown_path: Path | None,
    html_path: Path | None,
    as_json: bool,
) -> None:
    """Time SPEC's kernels on this GPU, interleaved with the peers that can be imported. Every result is checked.

    With --from instead of SPEC, show a saved run; that needs no GPU.
    """
    if (spec is None) != bool(saved):
        raise UsageError("bench takes SPEC, to measure it, or --from JSON, to show a saved run; pass one of them")
    if saved and (heads or rounds or commit or versions or not peers):
        raise UsageError("--heads, --rounds, --commit, --peer and --no-peers need SPEC; --from measures nothing")
    require_libraries()
    from mlagen.bench import markdown, to_json
    from mlagen.bench.report.against import compare
    from mlagen.bench.report.origin import origin
    from mlagen.bench.report.saved import read_rows, rows_of_files

    if html_path:  # reports a missing library before minutes of measuring
        from mlagen.bench.report.page import page
    earlier = read_rows(against) if against else None
    if spec:
        found = origin(commit, versions)
        rows = _measured(spec, only, heads, rounds, found.complete(peers=peers) if as_json else found, peers=peers)
    else:
        rows = [row for row in rows_of_files(saved) if not only or row.shape.family in only]
    if not rows:
        raise UsageError(
            f"{' and '.join(map(str, [spec] if spec else saved))}: has no shapes of {' or '.join(only) or 'any family'}"
        )
    comparison = compare(rows, earlier, str(against)) if earlier else None
    if as_json:
        print_json(json.loads(json.dumps([to_json(row) for row in rows])))
    else:
        click.echo(markdown(rows, comparison), nl=False)
    if markdown_path:
        write_atomically(markdown_path, markdown(rows, comparison))
    if html_path:
        write_atomically(html_path, page(rows, command_line(context), comparison))
    if comparison:
        if not comparison.changes:  # reported last, so that the figures are shown
            raise UsageError(f"{against} has no shape of this run; takes rows of the same device, package and shape")
        err.print(comparison.summary, markup=False)
        if comparison.worse:
            context.exit(1)
