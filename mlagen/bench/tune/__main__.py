"""`python -m mlagen.bench.tune --spec specs/dsv32.yaml --package generated/dsv32`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlagen.bench.tune.candidates import read_tiles
from mlagen.bench.tune.progress import progress
from mlagen.bench.tune.tuned import summary, tune
from mlagen.errors import MlagenError
from mlagen.plan import load_plan
from mlagen.spec import load


def main(arguments: list[str] | None = None) -> int:
    """Tunes a spec's tiles; the summary goes to stdout."""
    parser = argparse.ArgumentParser(prog="python -m mlagen.bench.tune", description="Finds a spec's tiles on a GPU.")
    parser.add_argument("--spec", type=Path, required=True, help="the spec; the result goes to tuned/ beside it")
    parser.add_argument("--package", type=Path, required=True, help="folder of the package generated from it")
    parser.add_argument("--specs-dir", type=Path, help="write below this folder instead")
    parser.add_argument("--budget", type=float, help="seconds after which no further tile is tried")
    parser.add_argument("--log", type=Path, help="JSON lines of what was measured, to go on from")
    parser.add_argument(
        "--heads",
        type=int,
        nargs="+",
        default=(),
        help="only these heads (dense attention: rows)",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=(), help="only these tokens (dense attention: requests)"
    )
    parser.add_argument("--tiles", type=Path, help="only tiles of this file, which mlagen.bench.tune.candidates wrote")
    options = parser.parse_args(arguments)
    try:
        load_plan(options.spec)  # a bad tuned file is to be seen before, not after
        with progress() as report:
            tuned = tune(
                load(options.spec),
                options.package,
                budget=options.budget,
                log=options.log,
                heads=options.heads,
                tokens=options.tokens,
                tiles=read_tiles(options.tiles) if options.tiles else None,
                report=report,
            )
        path = tuned.write(options.specs_dir or options.spec.parent)
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(summary(tuned), end="")
    print(f"{path}: {tuned.row_count} rows{'' if tuned.complete else ', not every size was swept'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
