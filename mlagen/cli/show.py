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

from mlagen.cli import layouts
from mlagen.cli.console import JSON, SPEC, Group, out, print_json
from mlagen.cli.packages import fault, install, packages, said_spec, said_tritons
from mlagen.cli.record import say_unrecorded, unrecorded_of
from mlagen.compile import cached_tritons, default_cache_dir, tritons_dir
from mlagen.emit import render
from mlagen.emit.render import RenderedFile, template_dir
from mlagen.errors import SpecErrors, ToolError, UnprovedError, UsageError
from mlagen.layout import indexer_layout_of, layouts_of
from mlagen.plan import (
    FAMILIES,
    CachePlan,
    DenseDecodePlan,
    IndexerRows,
    IndexUnionPlan,
    LatentFamily,
    Plan,
    Sm90Plan,
    Sm90Row,
    SparseDecodePlan,
    SparseFwdPlan,
    Tuned,
    load_plan,
    make_plan,
)
from mlagen.plan.replacements import read_replacements
from mlagen.plan.sm90 import SM90, Registers, refusal
from mlagen.plan.sm90_caches import cache_refusal
from mlagen.plan.tritons import TRITONS, Span, has_versions, minor_text, minors
from mlagen.plan.tuned import TunedFiles
from mlagen.proofs import Proofs
from mlagen.spec import SparseAttention
from mlagen.spec.load import load, schema_text
from mlagen.verify.gpu_records import names_of


@click.group(cls=Group)
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
    sparse_fwd, cache = plan.find(SparseFwdPlan), plan.find(CachePlan)
    for chunk in sparse_fwd.chunks if sparse_fwd else ():
        columns = f"columns [{chunk.start}, {chunk.start + chunk.columns}) in a block of {chunk.block}"
        out.print(f"{chunk.name}: {columns}{', part of V' if chunk.in_v else ''}", markup=False)
    launches = [f"cache writer: {cache.block_t} tokens a program"] if cache else []
    if plan.latent:
        splits = plan.splits
        out.print(
            f"splits: at most {splits.max_splits}; a program costs {splits.split_overhead} steps and a merge "
            f"{splits.combine_overhead} besides; batch-invariant splits of {splits.batch_invariant_split} indices; "
            f"workspace {splits.workspace_bytes >> 20} MiB, partials in {splits.partials.dtype}"
        )
        combine = f"combine: {', '.join(f'{tile.block_s} splits x {tile.block_d} columns' for tile in splits.combine)}"
        launches = [combine, *launches]
    if launches:
        out.print("; ".join(launches))
    if plan.indexer_rows is not None:
        _print_indexer(plan.indexer_rows)
    for text in plan.fits.values():
        out.print(f"tiles hold for: {text}", markup=False)
    for family in plan.latent:
        _print_tiles(family, dims.num_heads)
        if family.sm90 is not None:
            _print_rescaling(plan.rescale_threshold_log2)
        _print_no_sm90(plan, family)
    for one in (one for each in plan.tiled for one in each.left_out):
        name = f"{one.fits.partition(' ')[0]} {one.kernel}"
        out.print(f"\n{name} left out under {minor_text(one.triton)}: {one.reason}; portable runs", markup=False)
    say_unrecorded([folder] if (folder := Path("generated") / plan.spec.name).is_dir() else [])


def _print_indexer(rows: IndexerRows) -> None:
    """Prints the sizes of the indexer, how it rotates, and how its keys and its query are stored."""
    indexer, layout = rows.indexer, rows.layout
    rope = f"RoPE {indexer.rope} on the {indexer.rope_at} {indexer.rope_head_dim}" if indexer.rope else "no RoPE"
    ratio = f", a key for {indexer.compress_ratio} tokens" if indexer.compress_ratio > 1 else ""
    sizes = f"{indexer.num_heads} heads of {indexer.head_dim} columns, {rope}, topk {indexer.topk}{ratio}"
    out.print(f"indexer: {sizes}; keys {layout.name}, {layout.row_bytes} bytes", markup=False)


def _print_tiles(family: LatentFamily, num_heads: int) -> None:
    """Prints the work of a token's call, and the tables and the sm90 kernels of what does it."""
    work = family.one_token(num_heads)
    cost = f"{work.flops / 1e6:,.0f} MFLOP, {work.bytes / 1e6:,.2f} MB, {work.flops / work.bytes:,.0f} FLOP a byte"
    out.print(f"\n{work.call}: {cost}\n")
    table = Table(box=None, header_style="bold")
    by_version = has_versions(family.tiles)
    versions = ("triton",) if by_version else ()
    for name in ("target", "heads", "tokens", *versions, "tile", "a multiprocessor", "shared", "why"):
        table.add_column(name, justify="right" if name in ("heads", "tokens", "a multiprocessor", "shared") else "left")
    for target, rows in family.tiles:
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
    if family.sm90 is not None:
        _print_sm90(family.sm90)
    if isinstance(family, DenseDecodePlan) and family.few_rows is not None:
        _print_few_rows(family)
    if isinstance(family, SparseDecodePlan) and family.sm90_e4m3 is not None:
        _print_e4m3(family.sm90_e4m3)
    if isinstance(family, SparseFwdPlan | DenseDecodePlan):
        for swap_ab in family.swap_ab:
            _print_swap_ab(swap_ab)
    if isinstance(family, DenseDecodePlan) and family.sm90 is not None and not (family.swap_ab or family.few_rows):
        out.print(f"few rows run it too: its blocks are of {family.sm90.block_n} keys, and swap-AB takes pages of 64")
    if isinstance(family, SparseFwdPlan) and family.union is not None:
        _print_union(family.union)


def _print_no_sm90(plan: Plan, family: LatentFamily) -> None:
    """Prints why a family of a spec for sm90 has no kernel of its own there."""
    if family.sm90 is not None or SM90 not in plan.spec.targets:
        return
    reason = "backend is triton" if plan.spec.backend == "triton" else refusal(plan.spec)
    if reason is None and plan.layout is not None:
        reason = cache_refusal(plan.spec, plan.layout, plan.extra_layout)
    out.print(f"\nsm90 runs the portable kernel: {reason}", markup=False)


def _print_sm90(sm90: Sm90Plan) -> None:
    """Prints the numbers of an sm90 kernel and the calls that run it."""
    out.print(
        f"\nsm90 kernel: {sm90.block_h} heads and {sm90.step} indices a step; registers a thread of WG1 and of the "
        f"producer: {_registers(sm90.registers)}; {sm90.expected_shared:,} bytes of shared memory; "
        f"{sm90.expected_products} wgmma"
    )
    out.print(f"calls that run it, by heads: {_calls(sm90.rows)}")


def _print_rescaling(threshold_log2: int) -> None:
    """Prints where kernels of a family rescale O on sm90."""
    rose = f"rose by more than 2^{threshold_log2}" if threshold_log2 else "rose: weights refer to true maxima"
    out.print(f"sm90 rescales O where a row's maximum {rose}", markup=False)


def _print_few_rows(family: DenseDecodePlan) -> None:
    """Prints the numbers of the other sm90 kernels over e4m3, and which calls run one of 64 rows."""
    for plan, q in ((family.few_rows, "either dtype"), (family.parts, "two bytes a value")):
        if plan is not None:
            out.print(
                f"of {plan.block_h} rows, of a q of {q}: registers {_registers(plan.registers)}; "
                f"{plan.expected_shared:,} bytes of shared memory; {plan.expected_products} wgmma"
            )
    kinds = [("e4m3", [row.min_keys for row in family.wide_calls])]
    if family.parts is not None:
        kinds.append(("two bytes a value", [row.min_keys_parts for row in family.wide_calls]))
    for q, fewest in kinds:
        calls = (
            f"{_most(row.max_rows)}: {'none' if keys is None else f'from {keys:,}'}"
            f"{f' under {_versions(row.tritons)}' if row.tritons else ''}"
            for row, keys in zip(family.wide_calls, fewest, strict=True)
        )
        out.print(f"calls of a q of {q} that run one of 64 rows, by rows and keys of all requests: {'; '.join(calls)}")


def _print_e4m3(sm90: Sm90Plan) -> None:
    """Prints the numbers of the sm90 kernel that the same calls run with a q of e4m3."""
    out.print(
        f"of a q of e4m3, in its place: {sm90.step} indices a step; registers {_registers(sm90.registers)}; "
        f"{sm90.expected_shared:,} bytes of shared memory; {sm90.expected_products} wgmma"
    )


def _print_swap_ab(swap_ab: Sm90Plan) -> None:
    """Prints the numbers of the sm90 kernel of few heads, which runs such calls in the other one's place."""
    out.print(
        f"of up to {swap_ab.block_h} heads: {swap_ab.step} indices a step; registers a thread of WG0 and of WG1: "
        f"{_registers(swap_ab.registers)}; {swap_ab.expected_shared:,} bytes of shared memory; "
        f"{swap_ab.expected_products} wgmma"
    )


def _registers(registers: Registers) -> str:
    """A split of registers, and those of Tritons that have another."""
    others = (f", under Triton {minor_text(triton)} {one} and {two}" for triton, (one, two) in registers.under)
    return " and ".join(map(str, registers.split)) + "".join(others)


def _print_union(union: IndexUnionPlan) -> None:
    """Prints the numbers of the kernels in which neighbouring tokens share rows, and the calls that run them."""
    out.print(
        f"\nshared rows: {union.group} neighbouring tokens of up to {union.heads} heads a tile; lists from a bitmap of "
        f"{union.window_rows:,} rows, {union.expected_shared:,} bytes of shared memory"
    )
    out.print(f"calls that share, by heads, of up to {union.most_rows:,} rows: {_calls(union.rows)}")


def _calls(rows: Sequence[Sm90Row]) -> str:
    """The calls that a table of an sm90 kernel names."""
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
    """Prints where each byte of a cached token of SPEC is, of each of its caches."""
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
    """Names the template line behind a line of a generated file.

    The package's spec is the one in --specs of its name, or else what the package itself says it was generated from.
    """
    match = re.fullmatch(r"(.+):(\d+)", line)
    if match is None:
        raise UsageError(f"got {line!r}; takes FILE:LINE, such as generated/dsv32/sparse_fwd.py:120")
    path, number = Path(match[1]), int(match[2])
    file = _rendered(path, specs)
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


def _rendered(path: Path, specs: Path) -> RenderedFile:
    """A generated file as its spec gives it: the same text as lies there.

    Raises:
        UsageError: there is no such spec, it generates no such file, or another text lies there.
    """
    name, said = path.resolve().parent.name, said_spec(path.parent)
    spec = _spec_of(name, specs)
    if spec is None and said is None:
        raise UsageError(f"{path}: no spec in {specs} is named '{name}', as this folder is; --specs takes its folder")
    plans = [] if spec is None else [load_plan(spec)]
    if said is not None:
        files = TunedFiles(said.name, specs, said.model.num_heads)
        plans.append(make_plan(said, Tuned(files=files, replacements=read_replacements())))
    tritons = said_tritons(path.parent)
    found = [file for plan in plans for file in render(plan, tritons).files if file.name == path.name]
    source = spec or "its spec"
    if not found:
        raise UsageError(f"{path}: {source} generates no file of that name")
    lies = path.read_text(encoding="utf-8") if path.exists() else found[0].text
    same = next((file for file in found if file.text == lies), None)
    if same is None:
        build = f"mlagen build {spec}" if spec else "mlagen build with its spec"
        raise UsageError(f"{path}: differs from what {source} gives, so its lines say nothing; run: {build}")
    return same


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that doctor looks at.

    Attributes:
        what: its name.
        ok: whether it is as it should be; None for what mlagen can do without.
        found: what was found, in one line.
        fix: the command that fixes it, where there is one.
        tool: whether mlagen cannot work while it is not as it should be.
    """

    what: str
    ok: bool | None
    found: str
    fix: str | None = None
    tool: bool = False


def _spec_of(name: str, folder: Path) -> Path | None:
    """The file in a folder whose spec has a name; None without."""
    for path in (folder / f"{name}.yaml", *sorted(folder.glob("*.yaml"))):
        try:
            if path.exists() and load(path).name == name:
                return path
        except SpecErrors:
            if path.stem == name:
                raise
    return None


@click.command()
@click.option("--out", "folder", type=click.Path(path_type=Path), default=Path("generated"), show_default=True)
@JSON
def doctor(folder: Path, as_json: bool) -> None:
    """Says whether this machine has what mlagen needs, and whether its Triton is one that packages were proved with.

    The packages are those of the folder --out, which are read and not imported. Exits 1 where the Triton at hand is not
    one of mlagen's or a package's, or a package is not as this mlagen makes it, and 3 where something is missing.
    """
    checks = [*_checks(), *_packages(folder), _gpu_records(folder)]
    if as_json:
        print_json([{name: getattr(one, name) for name in ("what", "ok", "found", "fix")} for one in checks])
    else:
        width = max(len(one.what) for one in checks)
        for one in checks:
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "[yellow]--[/]"}[one.ok]
            out.print(f"{mark}  {one.what:<{width}}  ", end="")
            out.print(f"{one.found}; fix with: {one.fix}" if one.fix else one.found, markup=False)
    missing = [one.what for one in checks if one.ok is False and one.tool]
    if missing:
        raise ToolError(f"not usable here: {', '.join(missing)}")
    unproved = [one.what for one in checks if one.ok is False]
    if unproved:
        raise UnprovedError(f"to fix: {', '.join(unproved)}")


def _checks() -> list[Check]:
    """What mlagen itself needs."""
    ruff = shutil.which("ruff")
    return [
        Check("python", True, platform.python_version()),
        _library("torch"),
        _triton(),
        Check("tritons", bool(cached_tritons()) or None, f"{', '.join(cached_tritons()) or 'none'} in {tritons_dir()}"),
        _gpu(),
        Check("templates", any(template_dir().glob("*.jinja")), str(template_dir()), tool=True),
        _cache(),
        Check("ruff", ruff is not None or None, ruff or "absent: only tests use it"),
    ]


def _installed(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library(name: str) -> Check:
    version = _installed(name)
    fix = None if version else f"pip install {name}"
    return Check(name, version is not None, version or "not installed", fix, tool=True)


def _triton() -> Check:
    version = _installed("triton")
    if version is None:
        return Check("triton", False, "not installed", f"pip install 'triton=={TRITONS[-1]}'", tool=True)
    if set(minors([version])) <= set(minors(TRITONS)):
        return Check("triton", True, version)
    oldest, *_, newest = minors(TRITONS)
    return Check("triton", False, f"{version}; mlagen proves packages with {oldest} to {newest}", install(version))


def _packages(folder: Path) -> list[Check]:
    """The generated packages of a folder: how many are proved with the installed Triton, and what the others lack."""
    found, version = packages(folder), _installed("triton")
    if not found or version is None:
        return [Check("packages", None, f"{len(found) or 'none'} in {folder}")]
    proofs = Proofs(folder)
    faults = {package.name: fault(package, version, proofs) for package in found}
    checks = [Check(name, False, one.found, one.fix) for name, one in faults.items() if one]
    proved = f"{len(found) - len(checks)} of {len(found)} in {folder} are proved with Triton {version}"
    return [Check("packages", None if checks else True, proved), *checks]


def _gpu_records(folder: Path) -> Check:
    """Whether the sm90 kernels of a folder's packages have a GPU record for their text."""
    kernels = unrecorded_of(packages(folder))
    if not kernels:
        return Check("gpu records", True, "each sm90 kernel has one for its text")
    return Check("gpu records", None, f"{len(kernels)} sm90 kernels have none for their text: {names_of(kernels)}")


def _gpu() -> Check:
    try:
        import torch
    except ImportError:
        return Check("gpu", None, "unknown without torch")
    if not torch.cuda.is_available():
        return Check("gpu", None, "none: kernels run in Triton's interpreter; tune and bench need one")
    return Check("gpu", True, torch.cuda.get_device_name())


def _cache() -> Check:
    folder = default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache", True, os.fspath(folder))
    except OSError as error:
        return Check("cache", None, f"{folder}: {error.strerror}: every build compiles anew")
