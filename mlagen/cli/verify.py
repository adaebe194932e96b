"""`mlagen verify`: runs a package's kernels against the reference."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from mlagen.cli.complete import SpecPath
from mlagen.cli.console import JSON, TargetName, err, numbered, out, print_json, spec_files, stage
from mlagen.compile import default_cache_dir
from mlagen.emit import Package, apply, compare, render
from mlagen.emit.write import write_atomically
from mlagen.plan import load_plan
from mlagen.verify import CaseResult, mismatches, verify_markdown, verify_package, verify_table

DEVICE: Callable[[Any], Any] = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where kernels run: a GPU, or Triton's interpreter on the CPU.",
)


def pick_device(device: str) -> str:
    """`auto` resolved: cuda where torch sees a GPU, else cpu."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _cache_file(package: Package, device: str) -> Path:
    """Where results are kept: named by all that decides them, the package's bytes, the cases and the versions."""
    digest = hashlib.sha256()
    for file in package.files:
        digest.update(file.text.encode())
    for path in sorted((Path(__file__).resolve().parents[1] / "verify").rglob("*.py")):
        digest.update(path.read_bytes())
    for library in ("torch", "triton", "numpy"):
        digest.update(importlib.metadata.version(library).encode())
    digest.update(device.encode())
    return default_cache_dir() / "verified" / f"{digest.hexdigest()}.json"


def verify_cached(package: Package, folder: Path, device: str, label: str) -> list[CaseResult]:
    """Runs all cases on a package in `folder`, unless the same bytes passed before on this kind of device.

    Args:
        package: what lies in the folder.
        folder: the folder.
        device: where kernels run.
        label: what the progress bar calls the package.
    """
    path = _cache_file(package, device)
    try:
        return [CaseResult.from_json(value) for value in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    results = _verify(folder, device, label)
    if not mismatches(results):
        try:
            write_atomically(path, json.dumps([result.to_json() for result in results]))
        except OSError as error:
            err.print(f"results not cached: {error}", markup=False)
    return results


def _verify(
    folder: Path,
    device: str,
    label: str,
    targets: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> list[CaseResult]:
    """Runs cases of a package behind a bar."""
    with stage(f"{label}: verify on {device}", None) as bar:
        return verify_package(
            folder,
            device=device,
            targets=targets,
            only=only,
            on_count=bar.of,
            on_start=lambda case, target: bar.show(f"{target} {case}"),
            on_done=bar.step,
        )


@click.command()
@click.argument("specs", nargs=-1, type=SpecPath())
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Cases whose name matches this shell pattern; repeatable."
)
@click.option("--target", "targets", multiple=True, type=TargetName(), help="On a CPU: run the tiles of these targets.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@DEVICE
@JSON
def verify(
    specs: tuple[Path, ...], only: tuple[str, ...], targets: tuple[str, ...], markdown: bool, device: str, as_json: bool
) -> None:
    """Runs the kernels of SPECS (default: specs/*.yaml) against a float64 reference.

    On a GPU with the real compiler, on a CPU through Triton's interpreter; nothing is written.
    """
    place = pick_device(device)
    failed = []
    everything: list[CaseResult] = []
    paths = spec_files(specs)
    for number, path in enumerate(paths, 1):
        package = render(load_plan(path))
        with tempfile.TemporaryDirectory(prefix="mlagen-") as temporary:
            staged = Path(temporary) / package.name
            apply(compare(package, staged))
            label = numbered(package.name, number, len(paths))
            results = _verify(staged, place, label, targets or None, only or None)
        everything.extend(results)
        failed.extend(mismatches(results))
        if not as_json:
            if markdown:
                click.echo(f"### {package.name} on {place}\n\n{verify_markdown(results)}")
            else:
                err.print(f"{package.name} on {place}", markup=False)
                out.print(verify_table(results))
    if as_json:
        print_json([result.to_json() for result in everything])
    for error in failed[:-1]:
        err.print(str(error), markup=False, style="red")
    if failed:
        raise failed[-1]
