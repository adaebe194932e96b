"""Commands that change nothing: show, schema, explain, doctor."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

import click
from rich.table import Table

from mlagen.cli import layouts
from mlagen.cli.console import JSON, OUT, SPEC, Group, counted, out, print_json
from mlagen.cli.machine import pip_install
from mlagen.cli.packages import fault, install, packages, said_spec, said_tritons, spec_path, unsupported
from mlagen.cli.record import say_unrecorded, unrecorded_of
from mlagen.compile import cached_tritons, default_cache_dir, tritons_dir
from mlagen.emit import render
from mlagen.emit.render import RenderedFile, source_path, template_dir
from mlagen.errors import ToolError, UnprovedError, UsageError
from mlagen.layout import indexer_layout_of, layouts_of
from mlagen.plan import FAMILIES, IndexerRows, LatentFamily, Plan, Tuned, load_plan, make_plan
from mlagen.plan.tiles.tile import most_text
from mlagen.plan.tiles.tuned import TunedFiles
from mlagen.plan.tritons import TRITONS, has_versions, minor_text, span_text
from mlagen.proofs import Proofs
from mlagen.spec import SparseAttention
from mlagen.spec.load import load, schema_text
from mlagen.verify.gpu_records import names_of


@click.group(cls=Group)
def show() -> None:
    """Print the plan or the cache layouts of a spec."""


@show.command("plan")
@SPEC
@JSON
def show_plan(spec: Path, as_json: bool) -> None:
    """Print every number derived from SPEC, with its reason."""
    plan = load_plan(spec)
    if as_json:
        print_json(_plan_json(plan))
        return
    dims, attention = plan.spec.model, plan.spec.attention
    out.print(f"[bold]{plan.spec.name}[/]  {plan.spec.title}")
    rows = f"d_qk {plan.d_qk} = {dims.kv_lora_rank} latent + {dims.qk_rope_head_dim} RoPE, d_v {plan.d_v}, "
    topk = f"topk {attention.topk} (sizes cases and benchmarks), " if isinstance(attention, SparseAttention) else ""
    out.print(f"{rows * bool(plan.d_qk)}{dims.num_heads} heads, {topk}{dims.dtype}")
    for line in (line for family in plan.families for line in family.describe()):
        out.print(line, markup=False)
    if plan.latent:
        splits = plan.splits
        out.print(
            f"splits: at most {splits.max_splits}; overhead of a program {splits.split_overhead} steps, of a combine "
            f"{splits.combine_overhead}; batch-invariant splits of {splits.batch_invariant_split} indices; "
            f"workspace {splits.workspace_bytes >> 20} MiB, partials in {splits.partials.dtype}"
        )
        out.print(f"combine: {', '.join(f'{tile.block_s} splits x {tile.block_d} columns' for tile in splits.combine)}")
    if plan.indexer_rows is not None:
        _print_indexer(plan.indexer_rows)
    for text in plan.fits.values():
        out.print(f"tiles are valid for: {text}", markup=False)
    for family in plan.latent:
        _print_tiles(family, dims.num_heads)
        if family.sm90 is not None:
            _print_rescaling(plan.rescale_threshold_log2)
        reason = plan.no_sm90(family)
        if reason is not None:
            out.print(f"\nsm90 runs the portable kernel: {reason}", markup=False)
    for one in (one for each in plan.tiled for one in each.left_out):
        name = f"{one.fits.partition(' ')[0]} {one.kernel}"
        out.print(
            f"\n{name} not used under Triton {minor_text(one.triton)}: {one.reason}; its calls run the portable kernel",
            markup=False,
        )
    say_unrecorded([Path("generated") / plan.spec.name])


def _print_indexer(rows: IndexerRows) -> None:
    """Print the sizes, the RoPE and the key layout of the indexer."""
    indexer, layout = rows.indexer, rows.layout
    rope = f"RoPE {indexer.rope} on the {indexer.rope_at} {indexer.rope_head_dim}" if indexer.rope else "no RoPE"
    ratio = f", one key for {indexer.compress_ratio} tokens" if indexer.compress_ratio > 1 else ""
    sizes = f"{indexer.num_heads} heads of {indexer.head_dim} columns, {rope}, topk {indexer.topk}{ratio}"
    out.print(f"indexer: {sizes}; keys {layout.name}, {layout.row_bytes} bytes", markup=False)


def _print_tiles(family: LatentFamily, num_heads: int) -> None:
    """Print the work of a one-token call, and the tile tables and sm90 kernels of its family."""
    work = family.one_token(num_heads)
    cost = f"{work.flops / 1e6:,.0f} MFLOP, {work.bytes / 1e6:,.2f} MB, {work.flops / work.bytes:,.0f} FLOP per byte"
    out.print(f"\n{work.call}: {cost}\n")
    table = Table(box=None, header_style="bold")
    by_version = has_versions(family.tiles)
    versions = ("triton",) if by_version else ()
    numbers = ("heads", "tokens", "programs per SM", "shared memory")
    for name in ("target", *numbers[:2], *versions, "tile", *numbers[2:], "reason"):
        table.add_column(name, justify="right" if name in numbers else "left")
    for target, rows in family.tiles:
        for row in rows:
            table.add_row(
                target,
                most_text(row.max_heads),
                most_text(row.max_tokens),
                *((span_text(row.tritons),) if by_version else ()),
                str(row.tile),
                str(row.programs_per_sm),
                f"{row.expected_shared:,}",
                row.reason,
            )
    out.print(table)
    for line in family.describe_sm90():
        out.print(line, markup=False)


def _print_rescaling(threshold_log2: int) -> None:
    """Print the rule of sm90 kernels that rescales O."""
    lagged, exact = f"when a row's maximum rises by more than 2^{threshold_log2}", "whenever a row's maximum rises"
    out.print(f"sm90 rescales O {lagged if threshold_log2 else exact}", markup=False)


def _plan_json(plan: Plan) -> dict[str, object]:
    return {
        "spec": plan.spec.model_dump(mode="json"),
        "layout": None
        if plan.layout is None
        else {**dataclasses.asdict(plan.layout), "fingerprint": plan.layout.fingerprint},
        "indexer_layout": None
        if plan.indexer_rows is None
        else {
            **dataclasses.asdict(plan.indexer_rows.layout),
            "fingerprint": plan.indexer_rows.layout.fingerprint,
        },
        "fits": plan.fits,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        **{kind.NAME: None for kind in FAMILIES},
        **{family.NAME: dataclasses.asdict(family) for family in plan.families},
    }


@show.command("layout")
@SPEC
@JSON
def show_layout(spec: Path, as_json: bool) -> None:
    """Print the position of each byte of a cached token, for each cache of SPEC."""
    loaded = load(spec)
    parts, dims = loaded.model_dump(), (loaded.model.kv_lora_rank, loaded.model.qk_rope_head_dim)
    keys = (loaded.indexer.head_dim if loaded.indexer else 0, 0)
    caches = (
        ("cache", loaded.cache, dims),
        ("extra_cache", loaded.extra_cache, dims),
        ("indexer_cache", loaded.indexer_cache, keys),
    )
    shown = [
        (name, layout, columns, cache.block_size)
        for (name, cache, columns), layout in zip(caches, (*layouts_of(parts), indexer_layout_of(parts)), strict=True)
        if cache and layout
    ]
    if as_json:
        print_json({name: layouts.as_json(layout, columns, size) for name, layout, columns, size in shown})
        return
    for name, layout, columns, block_size in shown:
        for line in layouts.as_text(layout, columns, block_size):
            out.print(line if line.startswith(" ") else f"{name}: {line}", markup=False)


@show.command("layouts")
@JSON
def show_layouts(as_json: bool) -> None:
    """Print the position of each byte of a cached token, for every named layout."""
    if as_json:
        print_json([layouts.as_json(layout, dims, None) for layout, dims in layouts.named_layouts()])
        return
    out.print(layouts.table())


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    click.echo(schema_text(), nl=False)


@click.command()
@click.argument("line", metavar="FILE:LINE")
@click.option(
    "--specs", type=click.Path(path_type=Path), default=Path("specs"), show_default=True, help="Folder of specs."
)
def explain(line: str, specs: Path) -> None:
    """Name the template line behind a line of a generated file.

    The spec is the one in --specs with the package's name, or else the one recorded in the package.
    """
    match = re.fullmatch(r"(.+):(\d+)", line)
    if match is None:
        raise UsageError(f"got {line!r}; takes FILE:LINE, for example generated/dsv32/sparse_fwd.py:120")
    path, number = Path(match[1]), int(match[2])
    file = _rendered(path, specs)
    if not 1 <= number <= len(file.origins):
        raise UsageError(f"{path} has lines 1 to {len(file.origins)}; got line {number}")
    origin = file.origins[number - 1]
    if not origin:
        raise UsageError(
            f"{path}:{number}: is blank or part of the header, so no template line made it; takes another line"
        )
    template, at = origin.rsplit(":", 1)
    shown = source_path(template)
    text = shown.read_text(encoding="utf-8").split("\n")[int(at) - 1]
    if shown.is_relative_to(Path.cwd()):
        shown = shown.relative_to(Path.cwd())
    click.echo(f"{shown}:{at}: {text.strip()}")


def _rendered(path: Path, specs: Path) -> RenderedFile:
    """Render a generated file again, with the origin of each line.

    Raises:
        UsageError: the spec is not found or generates no such file, or the text on disk differs.
    """
    name, said = path.resolve().parent.name, said_spec(path.parent)
    spec = spec_path(name, [specs])
    if spec is None and said is None:
        lies = "is not a generated file" if path.exists() else "no such file"
        raise UsageError(
            f"{path}: {lies}, and no spec in {specs} is named '{name}'; pass the folder of its package's spec: "
            "--specs FOLDER"
        )
    plans = [] if spec is None else [load_plan(spec)]
    if said is not None:
        files = TunedFiles(said.name, specs, said.model.num_heads)
        plans.append(make_plan(said, Tuned(files=files)))
    tritons = said_tritons(path.parent)
    found = [file for plan in plans for file in render(plan, tritons).files if file.name == path.name]
    source = spec or "its spec"
    if not found:
        raise UsageError(f"{path}: {source} generates no file of that name")
    lies = path.read_text(encoding="utf-8") if path.exists() else found[0].text
    same = next((file for file in found if file.text == lies), None)
    if same is None:
        build = f"mlagen build {spec}" if spec else "mlagen build SPEC"
        raise UsageError(
            f"{path}: differs from the file that {source} generates, so its lines have no origin; run: {build}"
        )
    return same


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of doctor.

    Attributes:
        name: name of the check.
        ok: whether it passed; None if it failed and mlagen works without it.
        found: the finding, in one line.
        fix: the command that fixes it, if there is one.
        tool: whether mlagen does not work if it fails.
    """

    name: str
    ok: bool | None
    found: str
    fix: str | None = None
    tool: bool = False


@click.command()
@OUT
@JSON
def doctor(folder: Path, as_json: bool) -> None:
    """Check this machine: mlagen's dependencies, and whether the installed Triton proved the packages.

    Packages are read from the folder --out, not imported. Exit codes: 1 if mlagen or a package is not proved with the
    installed Triton, or a package is not as this mlagen generates it; 3 if a dependency is missing.
    """
    checks = [*_checks(), *_packages(folder), _gpu_records(folder)]
    if as_json:
        print_json([{name: getattr(one, name) for name in ("name", "ok", "found", "fix")} for one in checks])
    else:
        width = max(len(one.name) for one in checks)
        for one in checks:
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}[one.ok]
            out.print(f"{mark}  {one.name:<{width}}  ", end="")
            out.print(f"{one.found}; fix with: {one.fix}" if one.fix else one.found, markup=False)
    missing = [one.name for one in checks if one.ok is False and one.tool]
    if missing:
        raise ToolError(f"missing here: {', '.join(missing)}; the lines above name the fixes")
    unproved = [one.name for one in checks if one.ok is False]
    if unproved:
        raise UnprovedError(f"failed checks: {', '.join(unproved)}; the lines above name their fixes")


def _checks() -> list[Check]:
    """Return the checks of mlagen's own dependencies."""
    ruff = shutil.which("ruff")
    return [
        Check("python", True, platform.python_version()),
        _library("torch"),
        _triton(),
        Check("tritons", bool(cached_tritons()) or None, f"{', '.join(cached_tritons()) or 'none'} in {tritons_dir()}"),
        _gpu(),
        Check("templates", any(template_dir().glob("*.jinja")), str(template_dir()), tool=True),
        _cache(),
        Check("ruff", ruff is not None or None, ruff or "not installed; only the tests use it"),
    ]


def _installed(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(name: str) -> Check:
    version = _installed(name)
    fix = None if version else pip_install(name)
    return Check(name, version is not None, version or "not installed", fix, tool=True)


def _triton() -> Check:
    version = _installed("triton")
    if version is None:
        return Check("triton", False, "not installed", f"pip install 'triton=={TRITONS[-1]}'", tool=True)
    found = unsupported(version)
    return Check("triton", found is None, found or version, install(version) if found else None)


def _packages(folder: Path) -> list[Check]:
    """Return the number of packages that the installed Triton proved, and the fault of each other one."""
    found, version = packages(folder), _installed("triton")
    if not found or version is None:
        return [Check("packages", None, f"{len(found) or 'none'} in {folder}")]
    proofs = Proofs(folder)
    faults = {package.name: fault(package, version, proofs) for package in found}
    checks = [Check(name, False, one.found, one.fix) for name, one in faults.items() if one]
    proved = f"{len(found) - len(checks)} of {len(found)} in {folder} are proved with Triton {version}"
    return [Check("packages", None if checks else True, proved), *checks]


def _gpu_records(folder: Path) -> Check:
    """Check that the sm90 kernels of a folder's packages have a GPU record for their text."""
    found = packages(folder)
    kernels = unrecorded_of(found)
    if not found:
        return Check("gpu records", None, f"no packages in {folder}")
    if not kernels:
        return Check("gpu records", True, "every sm90 kernel has a GPU record for its text")
    return Check(
        "gpu records",
        None,
        f"{counted(len(kernels), 'sm90 kernel')} without a GPU record for the present text: {names_of(kernels)}",
    )


def _gpu() -> Check:
    try:
        import torch
    except ImportError:
        return Check("gpu", None, "unknown without torch")
    if not torch.cuda.is_available():
        return Check("gpu", None, "none; kernels run in Triton's interpreter, and tune and bench do not work")
    return Check("gpu", True, torch.cuda.get_device_name())


def _cache() -> Check:
    folder = default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache", True, os.fspath(folder))
    except OSError as error:
        return Check("cache", None, f"{folder}: {error.strerror}; every build compiles everything again")
