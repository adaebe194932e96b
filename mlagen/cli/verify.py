"""`mlagen verify`: runs a package's kernels against the reference."""

from __future__ import annotations

import fnmatch
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from mlagen.cli.complete import SpecPath
from mlagen.cli.console import JSON, TargetName, chosen_targets, err, numbered, out, print_json, spec_files
from mlagen.cli.machine import require_libraries
from mlagen.cli.progress import stage
from mlagen.cli.random_calls import verify_at_random
from mlagen.emit import apply, compare, render
from mlagen.errors import UsageError
from mlagen.plan import load_plan
from mlagen.verify import CaseResult, mismatches, verify_markdown, verify_package, verify_table

DEVICE: Callable[[Any], Any] = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Run kernels on a GPU, or in Triton's interpreter on the CPU.",
)


GPU_PLACES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # device files of NVIDIA's, AMD's and WSL's drivers


def pick_device(device: str) -> str:
    """Resolve `auto`: cuda if torch sees a GPU, else cpu.

    Raises:
        UsageError: cuda, and torch sees no GPU.
    """
    if device == "cpu" or (device == "auto" and not any(Path(place).exists() for place in GPU_PLACES)):
        return "cpu"  # saves the second of importing torch
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise UsageError("--device cuda: no CUDA or ROCm device; takes auto or cpu on this machine")
    return "cpu"


def _verify(
    folder: Path,
    device: str,
    label: str,
    targets: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> list[CaseResult]:
    """Run cases of a package, with a progress bar. Return no result if no case matches `only`."""
    matching: list[Any] = []

    def choose(tasks: Sequence[Any]) -> Sequence[Any]:
        matching.extend(tasks)
        return tasks

    with stage(f"{label}: verify on {device}") as bar:
        try:
            return verify_package(
                folder,
                device=device,
                targets=targets,
                only=only,
                choose=choose,
                on_tasks=bar.expect,
                on_start=lambda case, target: bar.show(f"{target} {case}"),
                on_done=bar.step,
            )
        except UsageError:
            if matching or not only:
                raise
            return []


def _unmatched(only: Sequence[str], specs: Sequence[Path], device: str) -> UsageError:
    """Return the error for patterns that no case of the specs matches."""
    names: list[str] = []

    def note(tasks: Sequence[Any]) -> Sequence[Any]:
        names.extend(task.case for task in tasks)
        return []

    with stage("list cases"):
        for spec in specs:
            package = render(load_plan(spec))
            with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
                staged = Path(temporary) / package.name
                apply(compare(package, staged))
                verify_package(staged, device=device, choose=note)
    wider = [f"*{pattern}*" for pattern in only if fnmatch.filter(names, f"*{pattern}*")]
    hint = f"; did you mean {shlex.join(wider)}?" if wider else ""
    begin = ", ".join(sorted({name.partition(":")[0] for name in names}))
    found = shlex.join(only)
    return UsageError(
        f"--only: got {found}, which matches no case on {device}; takes patterns of whole names, which begin with "
        f"{begin}{hint}"
    )


@click.command()
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only cases with a name that matches this shell pattern; repeatable.",
)
@click.option(
    "--target", "targets", multiple=True, type=TargetName(), help="On a CPU: run the tiles of this target; repeatable."
)
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@click.option(
    "--random",
    "seconds",
    type=click.FloatRange(0, min_open=True),
    help="Make random calls for this many seconds instead of running the cases.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="With --random: seed of the calls.")
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="With --random: processes that call at the same time.",
)
@DEVICE
@JSON
def verify(
    specs: tuple[Path, ...],
    only: tuple[str, ...],
    targets: tuple[str, ...],
    markdown: bool,
    seconds: float | None,
    seed: int,
    processes: int,
    device: str,
    as_json: bool,
) -> None:
    """Run the kernels of SPECS (default: specs/*.yaml) against a float64 reference. Writes nothing.

    On a GPU kernels run compiled, on a CPU in Triton's interpreter. With --random, --only takes patterns of
    family/kernel, for example 'topk/*' or '*/sm90'. A wrong call prints a line that repeats it.
    """
    require_libraries()
    place = pick_device(device)
    if seconds is not None:
        if targets or markdown:
            raise UsageError("--random takes no --target and no --markdown")
        verify_at_random(spec_files(specs), place, seconds, seed, processes, only, as_json)
        return
    failed = []
    everything: list[CaseResult] = []
    paths = spec_files(specs)
    plans = [load_plan(path) for path in paths]
    chosen = [chosen_targets(plan, targets) if targets else None for plan in plans]
    for number, (plan, tiles) in enumerate(zip(plans, chosen, strict=True), 1):
        package = render(plan)
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            staged = Path(temporary) / package.name
            apply(compare(package, staged))
            label = numbered(package.name, number, len(paths))
            results = _verify(staged, place, label, tiles, only or None)
        if not results and only:
            continue
        everything.extend(results)
        failed.extend(mismatches(results))
        if not as_json:
            if markdown:
                click.echo(f"### {package.name} on {place}\n\n{verify_markdown(results)}")
            else:
                err.print(f"{package.name} on {place}", markup=False)
                out.print(verify_table(results))
    if only and not everything:
        raise _unmatched(only, paths, place)
    if as_json:
        print_json([result.to_json() for result in everything])
    for error in failed[:-1]:
        err.print(str(error), markup=False, style="red")
    if failed:
        raise failed[-1]
