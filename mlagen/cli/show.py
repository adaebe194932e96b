"""Commands that look and change nothing: show, schema, explain, doctor."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from mlagen.backends import compile_jobs
from mlagen.cli import layouts
from mlagen.cli.console import JSON, SPEC, out, print_json
from mlagen.compile import default_cache_dir
from mlagen.emit import render
from mlagen.emit.render import template_dir
from mlagen.errors import ToolError, UsageError
from mlagen.layout import layouts_of
from mlagen.plan import HopperPlan, HopperRow, KvcachePlan, Plan, SparsePlan, UnionPlan, load_plan
from mlagen.plan.tritons import MINORS, Span, has_versions, minor, minor_text
from mlagen.spec import SparseAttention
from mlagen.spec.load import load, schema_text

DENSE_KEYS = 4096  # at which a call of dense attention is counted
ANY = 1 << 30  # more rows than a token can name


@click.group()
def show() -> None:
    """Prints what follows from a spec."""


@show.command("plan")
@SPEC
@JSON
def show_plan(spec: Path, as_json: bool) -> None:
    """Prints every number derived from SPEC."""
    plan = load_plan(spec)
    if as_json:
        print_json(_plan_json(plan))
        return
    dims, attention = plan.spec.model, plan.spec.attention
    out.print(f"[bold]{plan.spec.name}[/]  {plan.spec.title}")
    rows = f"d_qk {plan.d_qk} = {dims.kv_lora_rank} latent + {dims.qk_rope_head_dim} RoPE, d_v {plan.d_v}, "
    topk = f"topk {attention.topk}, " if isinstance(attention, SparseAttention) else ""
    out.print(f"{rows if plan.d_qk else ''}{dims.num_heads} heads, {topk}{dims.dtype}")
    for chunk in plan.sparse.chunks if plan.sparse else ():
        lanes = f"lanes [{chunk.start}, {chunk.start + chunk.lanes}) in a block of {chunk.block}"
        out.print(f"{chunk.name}: {lanes}{', part of V' if chunk.in_v else ''}", markup=False)
    splits, cache = plan.splits, plan.cache
    writer = [] if cache is None else [f"cache writer: {cache.block_t} tokens a program"]
    if splits is not None:
        out.print(
            f"splits: at most {splits.max_splits}; a program costs {splits.split_overhead} steps and a merge "
            f"{splits.merge_overhead} besides; batch-invariant splits of {splits.batch_invariant_split} indices; "
            f"workspace {splits.workspace_bytes >> 20} MiB, partials in {splits.partials.dtype}"
        )
        merge = f"merge: {', '.join(f'{tile.block_s} splits x {tile.block_d} lanes' for tile in splits.merge)}"
        writer = [merge, *writer]
    out.print("; ".join(writer))
    for text in plan.fits.values():
        out.print(f"tiles hold for: {text}", markup=False)
    heads = dims.num_heads
    if plan.sparse is not None:
        _print_tiles("one token", plan.flops(1, heads), plan.bytes_moved(1, heads, ANY), plan.sparse)
    if plan.kvcache is not None:
        moved = plan.bytes_kvcache(1, heads, *(ANY for _ in plan.kvcache_topks))
        _print_tiles("one token over the cache", plan.flops_kvcache(1, heads), moved, plan.kvcache)
    if plan.dense is not None:
        flops, moved = plan.flops_dense(1, heads, DENSE_KEYS), plan.bytes_dense(1, heads, DENSE_KEYS)
        _print_tiles(f"one token over {DENSE_KEYS:,} keys", flops, moved, plan.dense)


def _print_tiles(call: str, flops: int, moved: int, kernels: SparsePlan | KvcachePlan) -> None:
    """Prints the work of a call, and the tables and the Hopper kernel of what does it."""
    out.print(f"\n{call}: {flops / 1e6:,.0f} MFLOP, {moved / 1e6:,.2f} MB, {flops / moved:,.0f} FLOP a byte\n")
    table = Table(box=None, header_style="bold")
    by_version = has_versions(kernels.tiles)
    versions = ("triton",) if by_version else ()
    for name in ("target", "heads", "tokens", *versions, "tile", "a multiprocessor", "shared", "why"):
        table.add_column(name, justify="right" if name in ("heads", "tokens", "a multiprocessor", "shared") else "left")
    for target, rows in kernels.tiles:
        for row in rows:
            table.add_row(
                target,
                _most(row.max_heads),
                _most(row.max_tokens),
                *((_versions(row.tritons),) if by_version else ()),
                str(row.tile),
                str(row.programs_per_sm),
                f"{row.expected_shared:,}",
                row.reason,
            )
    out.print(table)
    if kernels.hopper is not None:
        _print_hopper(kernels.hopper)
    if isinstance(kernels, SparsePlan):
        for swapped in kernels.swapped:
            _print_swapped(swapped)
    if isinstance(kernels, SparsePlan) and kernels.union is not None:
        _print_union(kernels.union)


def _print_hopper(hopper: HopperPlan) -> None:
    """Prints the numbers of a Hopper kernel and the calls that run it."""
    right, copying = hopper.registers
    out.print(
        f"\nHopper kernel: {hopper.block_h} heads and {hopper.step} indices a step; registers a thread: {right} of the "
        f"right warpgroup, {copying} of the copying one; {hopper.expected_shared:,} bytes of shared memory; "
        f"{hopper.expected_products} wgmma"
    )
    out.print(f"calls that run it, by heads: {_calls(hopper.rows)}")


def _print_swapped(swapped: HopperPlan) -> None:
    """Prints the numbers of the Hopper kernel of few heads, which runs such calls in the other one's place."""
    multiplying, _ = swapped.registers
    out.print(
        f"of up to {swapped.block_h} heads: {swapped.step} indices a step; registers a thread: {multiplying} of those "
        f"that multiply; {swapped.expected_shared:,} bytes of shared memory; {swapped.expected_products} wgmma"
    )


def _print_union(union: UnionPlan) -> None:
    """Prints the numbers of the kernels in which neighbouring tokens share rows, and the calls that run them."""
    out.print(
        f"\nshared rows: {union.group} neighbouring tokens of up to {union.heads} heads a tile; lists from a bitmap of "
        f"{union.window_rows:,} rows, {union.expected_shared:,} bytes of shared memory"
    )
    out.print(f"calls that share, by heads, of up to {union.most_rows:,} rows: {_calls(union.rows)}")


def _calls(rows: Sequence[HopperRow]) -> str:
    """The calls that a table of a Hopper kernel names."""
    return "; ".join(
        f"{_most(row.max_heads)}: {'none' if row.min_tokens is None else f'from {row.min_tokens} tokens'}"
        for row in rows
    )


def _versions(tritons: Span | None) -> str:
    """The versions of Triton that a row of a table holds for."""
    return "any" if tritons is None else " to ".join(dict.fromkeys(map(minor_text, tritons)))


def _most(number: int | None) -> str:
    """The most that a row of a table holds."""
    return "any" if number is None else f"to {number}"


def _plan_json(plan: Plan) -> dict[str, object]:
    return {
        "spec": plan.spec.model_dump(mode="json"),
        "layout": None
        if plan.layout is None
        else {**dataclasses.asdict(plan.layout), "fingerprint": plan.layout.fingerprint},
        "fits": plan.fits,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "sparse": None if plan.sparse is None else dataclasses.asdict(plan.sparse),
        "kvcache": None if plan.kvcache is None else dataclasses.asdict(plan.kvcache),
        "dense": None if plan.dense is None else dataclasses.asdict(plan.dense),
        "cache": None if plan.cache is None else dataclasses.asdict(plan.cache),
        "compile_jobs": [dataclasses.asdict(job) for job in compile_jobs(plan)],
    }


@show.command("layout")
@SPEC
@JSON
def show_layout(spec: Path, as_json: bool) -> None:
    """Prints where each byte of a cached token of SPEC is, of both caches if it has two."""
    loaded = load(spec)
    dims = (loaded.model.kv_lora_rank, loaded.model.qk_rope_head_dim)
    caches = (("cache", loaded.cache), ("extra_cache", loaded.extra_cache))
    shown = [
        (name, layout, cache.block_size)
        for (name, cache), layout in zip(caches, layouts_of(loaded.model_dump()), strict=True)
        if cache and layout
    ]
    if as_json:
        print_json({name: layouts.as_json(layout, dims, block_size) for name, layout, block_size in shown})
        return
    for name, layout, block_size in shown:
        for line in layouts.as_text(layout, dims, block_size):
            out.print(line if line.startswith(" ") else f"{name}: {line}", markup=False)


@show.command("layouts")
@JSON
def show_layouts(as_json: bool) -> None:
    """Prints where each byte of a cached token is, of every layout that has a name."""
    if as_json:
        print_json([layouts.as_json(layout, dims, None) for layout, dims in layouts.named_layouts()])
        return
    out.print(layouts.table())


@click.command()
def schema() -> None:
    """Prints the JSON Schema of a spec, for editors."""
    click.echo(schema_text(), nl=False)


@click.command()
@click.argument("line", metavar="FILE:LINE")
@click.option("--specs", type=click.Path(path_type=Path), default=Path("specs"), show_default=True)
def explain(line: str, specs: Path) -> None:
    """Names the template line behind a line of a generated file."""
    match = re.fullmatch(r"(.+):(\d+)", line)
    if match is None:
        raise UsageError(f"got {line!r}; takes FILE:LINE, such as generated/dsv32/sparse_attention.py:120")
    path, number = Path(match[1]), int(match[2])
    spec = specs / f"{path.resolve().parent.name}.yaml"
    if not spec.exists():
        raise UsageError(f"{path}: no {spec} generates this folder")
    found = [file for file in render(load_plan(spec)).files if file.name == path.name]
    if not found:
        raise UsageError(f"{path}: {spec} generates no file of that name")
    (file,) = found
    if path.exists() and path.read_text(encoding="utf-8") != file.text:
        raise UsageError(f"{path}: differs from what {spec} gives, so its lines say nothing; run: mlagen build {spec}")
    if not 1 <= number <= len(file.origins):
        raise UsageError(f"{path} has lines 1 to {len(file.origins)}; got {number}")
    origin = file.origins[number - 1]
    if not origin:
        raise UsageError(f"{path}:{number}: a line of the header, or a blank one: no template line is behind it")
    template, at = origin.rsplit(":", 1)
    text = (template_dir() / template).read_text(encoding="utf-8").split("\n")[int(at) - 1]
    shown = template_dir() / template
    if shown.is_relative_to(Path.cwd()):
        shown = shown.relative_to(Path.cwd())
    click.echo(f"{shown}:{at}: {text.strip()}")


@click.command()
@JSON
def doctor(as_json: bool) -> None:
    """Says whether this machine has what mlagen needs, and what each missing part costs."""
    checks = _checks()
    if as_json:
        print_json([{"what": what, "ok": ok, "found": found} for what, ok, found in checks])
    else:
        for what, ok, found in checks:
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}[ok]
            out.print(f"{mark}  {what:<12} ", end="")
            out.print(found, markup=False)
    broken = [what for what, ok, _ in checks if ok is False]
    if broken:
        raise ToolError(f"not usable here: {', '.join(broken)}")


def _checks() -> list[tuple[str, bool | None, str]]:
    """(what, whether it is there, what was found); None for what mlagen can do without."""
    checks: list[tuple[str, bool | None, str]] = [("python", True, platform.python_version())]
    for library in ("torch", "triton"):
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            checks.append((library, False, "not installed"))
            continue
        fits = True
        if library == "triton":
            fits = MINORS[0] <= minor(version) <= MINORS[-1]
        oldest, newest = map(minor_text, (MINORS[0], MINORS[-1]))
        checks.append((library, fits, version if fits else f"{version}; takes {oldest} to {newest}"))
    checks.append(_gpu())
    checks.append(("templates", any(template_dir().glob("*.jinja")), str(template_dir())))
    checks.append(_cache())
    checks.append(
        ("ruff", shutil.which("ruff") is not None or None, shutil.which("ruff") or "absent: only tests use it")
    )
    return checks


def _gpu() -> tuple[str, bool | None, str]:
    try:
        import torch
    except ImportError:
        return ("gpu", None, "unknown without torch")
    if not torch.cuda.is_available():
        return ("gpu", None, "none: kernels run in Triton's interpreter; tune and bench need one")
    return ("gpu", True, torch.cuda.get_device_name())


def _cache() -> tuple[str, bool | None, str]:
    folder = default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ("cache", True, os.fspath(folder))
    except OSError as error:
        return ("cache", None, f"{folder}: {error.strerror}: every build compiles anew")
