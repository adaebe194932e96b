"""`python -m mlagen.verify.random generated/dsv32 --seconds 60 --report out.json`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mlagen.diffs import check_whole
from mlagen.errors import MlagenError, UsageError
from mlagen.verify import mismatches, verify_package
from mlagen.verify.random.delays import delayed_copies
from mlagen.verify.random.pool import Settings, random_calls, repeat_call
from mlagen.verify.random.report import Report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlagen.verify.random", description="Makes random calls of generated packages on a GPU."
    )
    parser.add_argument("packages", type=Path, nargs="+", help="folders of generated packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="a GPU, or Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=60.0, help="that calls are made; default 60")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn; default 0")
    parser.add_argument("--processes", type=int, default=4, help="that share the GPU; default 4")
    parser.add_argument("--only", nargs="+", default=[], help="shell patterns of family/kernel: topk/*, */sm90")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a call may take; default 180")
    parser.add_argument("--batch", type=int, default=60, help="most calls of a shape in a row; default 60")
    parser.add_argument("--calls", type=int, default=0, help="end after so many calls; default: by time alone")
    parser.add_argument("--cases", action="store_true", help="run all cases of the packages first")
    parser.add_argument("--delays", action="store_true", help="run copies whose sm90 kernels sleep before they wait")
    parser.add_argument("--call", metavar="SHAPE.CALL", help="repeat one call of one package, family and kernel")
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--commit", default="", help="the commit that is tested, for the report")
    return parser


def _packages(paths: list[Path]) -> list[Path]:
    """The packages among paths: generated/* names other files as well.

    Raises:
        UsageError: there is none, or a package is kept as a diff.
    """
    for path in paths:
        check_whole(path)
    found = [path for path in paths if (path / "__init__.py").is_file()]
    if not found:
        raise UsageError(f"no package: {', '.join(map(str, paths))}; takes folders that hold an __init__.py")
    return found


def _require_device(device: str) -> None:
    """Check that the device is there.

    Raises:
        UsageError: a GPU is asked for, and torch sees none.
    """
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UsageError("--device cuda: no CUDA or ROCm device; takes cpu on this machine")


def _settings(options: argparse.Namespace, folders: list[Path]) -> Settings:
    return Settings(
        folders=tuple(str(folder) for folder in folders),
        device=options.device,
        seconds=options.seconds,
        seed=options.seed,
        processes=1 if options.call else options.processes,
        only=tuple(options.only),
        limit=options.limit,
        batch=options.batch,
        delays=options.delays,
        most_calls=options.calls,
    )


def _repeat(settings: Settings, place: str) -> int:
    shape, call = (int(part) for part in place.split("."))
    case, tally = repeat_call(settings, shape, call)
    print(case)
    for _, way, detail in tally.failures:
        print(f"{way}: {detail}")
    print("wrong" if tally.wrong else "skipped" if tally.skipped else "right")
    return int(bool(tally.wrong))


def _cases(folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """How many of a package's cases passed, failed and were skipped."""
    results = verify_package(folder, device=options.device, workers=options.processes)
    for error in mismatches(results):
        print(error, file=sys.stderr, flush=True)
    counts = Counter("skipped" if one.skipped else "passed" if one.ok else "failed" for one in results)
    return {how: counts[how] for how in ("passed", "failed", "skipped")}


def _show(report: Report) -> None:
    for name, counts in sorted(report.stations.items()):
        print(f"{name:48} {counts.calls:8} calls {counts.wrong:6} wrong {counts.seconds:8.1f} s")
    total = report.total
    operators = f", {report.operator_calls} of them through operators" if report.operator_calls else ""
    print(f"{total.calls} calls{operators}, {total.wrong} wrong, {report.hangs} without an answer; ", end="")
    print(f"{report.run['wall_seconds']:.0f} s, of which first calls took {report.compile_seconds:.0f} s of processes")


def main(arguments: list[str] | None = None) -> int:
    """Makes random calls; the table goes to stdout, a line a failure to stderr.

    Returns:
        0: all right; 1: some call was wrong; 2: bad usage; 3: a process broke outside any call.
    """
    options = _parser().parse_args(arguments)
    try:
        with contextlib.ExitStack() as stack:
            options.packages = folders = _packages(options.packages)
            _require_device(options.device)
            if options.delays:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlagen-delays-"))
                folders = delayed_copies(folders, Path(temporary))
            settings = _settings(options, folders)
            if options.call:
                return _repeat(settings, options.call)
            named = tuple(str(folder) for folder in options.packages)
            settings = replace(settings, sources=named, originals=named)
            cases = {folder.name: _cases(folder, options) for folder in folders} if options.cases else {}
            report = random_calls(settings, lambda line: print(line, file=sys.stderr, flush=True))
    except MlagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    report.run |= {"cases": cases, "commit": options.commit, "date": datetime.date.today().isoformat()}
    if options.report:
        options.report.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    _show(report)
    return int(bool(report.total.wrong or any(one["failed"] for one in cases.values())))


if __name__ == "__main__":
    sys.exit(main())
