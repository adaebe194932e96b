"""The command line: thin commands over the rooms. Results go to stdout, messages to stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from mlagen import __version__
from mlagen.cli.build import build
from mlagen.cli.console import Group, report_error
from mlagen.cli.init import init
from mlagen.cli.measure import bench, tune
from mlagen.cli.package import package
from mlagen.cli.process import bearing_streams, ended_by_signals
from mlagen.cli.record import record
from mlagen.cli.show import doctor, explain, schema, show
from mlagen.cli.verify import verify
from mlagen.errors import MlagenError, ToolError


class _Group(Group):
    """Print an mlagen error, or an error of a file, in one line on stderr and exit with its code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        bearing_streams()
        with ended_by_signals():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MlagenError as error:
            report_error(error)
            sys.exit(error.exit_code)
        except OSError as error:
            path = error.filename2 or error.filename
            broken = ToolError(f"{os.fsdecode(path)}: {error.strerror}" if path is not None else str(error))
            report_error(broken)
            sys.exit(broken.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlagen")
def main() -> None:
    """Generate attention kernels for multi-head latent attention (MLA) from a YAML spec.

    Exit codes: 0 done; 1 a check failed (drift, a wrong result, a kernel over a limit); 2 bad spec or usage; 3 a tool,
    a compiler or a file failed; 128 plus the signal's number after a signal (130 after Ctrl-C).
    """


for command in (init, build, package, verify, record, show, schema, explain, doctor, tune, bench):
    main.add_command(command)
