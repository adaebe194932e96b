"""`python -m mlagen.bench --package generated/dsv32 --json h200-dsv32.json --commit COMMIT --peer vllm=0.24.0`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mlagen.bench.families import FAMILIES, shapes_of
from mlagen.bench.package import load_package
from mlagen.bench.report.origin import origin
from mlagen.bench.report.rows import Row
from mlagen.bench.report.tables import line, markdown, to_json
from mlagen.bench.run import ROUNDS, bench_package
from mlagen.errors import MlagenError


def main(arguments: list[str] | None = None) -> int:
    """Measures a package. The table goes to stdout, messages to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.bench", description="Measures a generated package on a GPU."
    )
    parser.add_argument("--package", type=Path, required=True, help="folder of the generated package")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--only", choices=tuple(FAMILIES), nargs="+", help="families of kernels; default: all")
    parser.add_argument("--heads", type=int, nargs="+", help="head counts of attention; default: the spec's, 64 and 16")
    parser.add_argument("--tokens", type=int, nargs="+", help="only shapes of these token counts")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"interleaved rounds per shape; default {ROUNDS}")
    parser.add_argument("--no-peers", action="store_true", help="do not measure peers")
    parser.add_argument("--commit", help="commit of mlagen, if this is no checkout; --json needs one")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="version of a peer that has no version of its own",
    )
    options = parser.parse_args(arguments)
    try:
        shapes = shapes_of(load_package(options.package), options.only or tuple(FAMILIES), options.heads)
        if options.tokens:
            shapes = [shape for shape in shapes if shape.tokens in options.tokens]
        found = origin(options.commit, options.peer)
        if options.json:
            found.complete(peers=not options.no_peers)
        rows: list[Row] = []

        def keep(row: Row) -> None:
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
            if options.json:  # after each row: a kernel may yet take the process down
                options.json.write_text(json.dumps([to_json(row) for row in rows], indent=1) + "\n")
            if options.markdown:
                options.markdown.write_text(markdown(rows))

        bench_package(
            options.package,
            shapes=shapes,
            peers=not options.no_peers,
            rounds=options.rounds,
            origin=found,
            on_row=keep,
        )
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
