"""Variants that a package lists, loaded into this process, and the facts of any such list."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

from mlagen.compile import CompileJob
from mlagen.compile.process import job_of
from mlagen.compile.worker import describe, load_package
from mlagen.emit import apply, compare, render
from mlagen.plan import TARGETS, Plan

ROWS_KERNELS = ("_sparse_fwd_kernel", "_sparse_fwd_split_kernel")
CACHE_KERNELS = ("_sparse_decode_kernel", "_sparse_decode_split_kernel")
TILE = ("BLOCK_H", "BLOCK_N")
# Strides that this kernel holds in 32 bits of a register: its wrapper refuses others, see `_reaches`.
NARROW = (
    ("_sparse_decode_sm90_kernel", "_sparse_decode_sm90_e4m3_kernel"),
    {"q_head_stride", "q_rope_head_stride", "indices_token_stride", "out_token_stride", "out_head_stride"}
    | {"out_group_stride"},
)

_numbers = itertools.count()


@dataclass(frozen=True)
class Enumerated:
    """A package and, by target, the variants that it lists, as they are and as the jobs that compile them."""

    folder: Path
    package: ModuleType
    variants: dict[str, list[Any]]
    jobs: dict[str, list[CompileJob]]

    def module(self, name: str) -> Any:
        """One of its modules."""
        return importlib.import_module(f"{self.package.__name__}.{name}")

    def of(self, target: str, *kernels: str) -> list[CompileJob]:
        """The jobs of some kernels on a target."""
        return [job for job in self.jobs[target] if job.kernel in kernels]

    @property
    def kernels(self) -> set[tuple[str, str]]:
        """(module, kernel) of every variant."""
        return {(job.module, job.kernel) for jobs in self.jobs.values() for job in jobs}


def enumerate_package(folder: Path, targets: tuple[str, ...] | None = None) -> Enumerated:
    """List the variants of a package for its targets, or some of them."""
    package = load_package(folder)
    variants = {
        target: package.variants(target) for target in (package.SPEC["spec"]["targets"] if targets is None else targets)
    }
    jobs = {target: [job_of(target, describe(one)) for one in found] for target, found in variants.items()}
    return Enumerated(folder, package, variants, jobs)


def write_package(plan: Plan, parent: Path) -> Path:
    """Render a package into a folder of a name that no other package of this process has."""
    folder = parent / f"{plan.spec.name}_{next(_numbers)}"
    apply(compare(render(plan), folder))
    return folder


def enumerate_plan(plan: Plan, parent: Path) -> Enumerated:
    """List the variants of a plan's package, which is written near others."""
    return enumerate_package(write_package(plan, parent))


def kernels_in(found: Enumerated) -> set[tuple[str, str]]:
    """(module, kernel) of every function in the package's text that is compiled by itself."""
    modules = [path.stem for path in found.folder.glob("*.py") if path.stem != "__init__"]
    return {
        (name, kernel)
        for name in modules
        for kernel, value in vars(found.module(name)).items()
        if isinstance(value, JITFunction) and kernel.endswith("_kernel")
    }


def check_every_list(found: Enumerated) -> None:
    """Facts of every package: each kernel is launched, none in a variant twice, and each argument is bound."""
    every = kernels_in(found)
    # A module of the runtime is copied whole, and has the kernel of a wrapper that the package may lack.
    merges = "topk_merge" in found.package.SPEC["spec"]["wrappers"]
    spare = set() if merges else every & {("_topk_kernels", "_merge_kernel")}
    assert found.kernels == every - spare
    for target, variants in found.variants.items():
        jobs = found.jobs[target]
        assert jobs
        assert len(set(jobs)) == len(jobs)
        for variant, job in zip(variants, jobs, strict=True):
            params = variant.kernel.params
            names = [name for name, _ in (*job.signature, *job.constexprs)]
            assert sorted(names) == sorted(param.name for param in params)
            for param in params:
                # Constexprs come last and are all that Triton looks at to tell one launch from another.
                assert param.is_constexpr != param.do_not_specialize, (job.kernel, param.name)
                narrow = job.kernel in NARROW[0] and param.name.removeprefix("extra_") in NARROW[1]
                wide = param.name.endswith("stride") and not narrow
                assert (param.annotation_type == "i64") == wide, (job.kernel, param.name)
            assert [param.is_constexpr for param in params] == sorted(param.is_constexpr for param in params)
            for name, value in job.constexprs:
                assert value is not None or name.endswith("_ptr"), (job.kernel, name)
            given = dict(job.constexprs)
            assert given.get("NUM_STAGES", job.num_stages) == job.num_stages
            assert given.get("HAS_E4M3", TARGETS[target].has_e4m3) == TARGETS[target].has_e4m3
            assert given.get("ROUNDS_E4M3", TARGETS[target].rounds_e4m3) == TARGETS[target].rounds_e4m3
            assert not job.dependent or TARGETS[target].pdl


def check_tiles(found: Enumerated) -> None:
    """Every tile of a table is listed for every alignment that takes it, and no other."""
    for target in found.jobs:
        for family, kernels in (("SPARSE_FWD", ROWS_KERNELS), ("SPARSE_DECODE", CACHE_KERNELS)):
            for kernel in kernels:
                if jobs := found.of(target, kernel):
                    table = {tile[:5] for _, _, tile in _table(found, f"{family}_TILES")[target]}
                    small = {_table(found, f"{family}_UNALIGNED_TILES")[target][:5]}
                    assert _tiles_by(jobs, "INDICES_AHEAD", "ALIGNMENT", "INDEX_GROUP") == {
                        (16, 16): table,
                        (16, 1): small,
                        (1, 1): small,
                    }
        if jobs := found.of(target, "_dense_decode_kernel"):
            small = _table(found, "DENSE_DECODE_UNALIGNED_TILES")[target][:5]
            # Rows that are not aligned take a page for each key.
            assert _tiles_by(jobs, "PAGES_AHEAD", "ALIGNMENT", "WHOLE_PAGES") == {
                (16, True): {small, *(tile[:5] for _, _, tile in _table(found, "DENSE_DECODE_TILES")[target])},
                (16, False): {small},
                (1, False): {small},
            }
        if jobs := [job for job in found.jobs[target] if job.module == "_dense_fwd_kernels"]:
            _check_heads(found, target, jobs)
        for kernel in ("_combine_kernel", "_write_kernel", "_gather_requests_kernel", "_gather_tokens_kernel"):
            if jobs := found.of(target, kernel):
                assert {dict(job.constexprs)["ALIGNMENT"] for job in jobs} == {16, 1}


def _table(found: Enumerated, name: str) -> Any:
    """A table of the package."""
    return getattr(found.module("_tiles"), name)


def _tiles_by(jobs: list[CompileJob], ahead: str, *alignment: str) -> dict[tuple[Any, ...], set[tuple[Any, ...]]]:
    """Tiles that jobs compile, by their alignment."""
    tiles: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for job in jobs:
        given = dict(job.constexprs)
        tile = (*(given[name] for name in TILE), job.num_warps, job.num_stages, given[ahead])
        tiles.setdefault(tuple(given[name] for name in alignment), set()).add(tile)
    return tiles


def _check_heads(found: Enumerated, target: str, jobs: list[CompileJob]) -> None:
    """The same of multi-head attention: each tile with a causal mask and without."""
    described = found.package.SPEC["spec"]["multi_head"]["addressing"] == "descriptors"
    copied = described and target in ("sm90", "sm100", "sm120")
    listed: dict[tuple[str, Any], set[tuple[Any, ...]]] = {}
    for job in jobs:
        given = dict(job.constexprs)
        tile = (given["BLOCK_M"], given["BLOCK_N"], job.num_warps, job.num_stages, given["CAUSAL"])
        listed.setdefault((job.kernel, given.get("ALIGNMENT", 16)), set()).add(tile)
    aligned = "_dense_fwd_descriptor_kernel" if copied else "_dense_fwd_kernel"
    table = {tuple(tile) for _, tile in _table(found, "DENSE_FWD_TILES")[target]}
    small = _table(found, "DENSE_FWD_UNALIGNED_TILES")[target]
    assert listed == {
        (aligned, 16): {(*tile, causal) for tile in table for causal in (True, False)},
        ("_dense_fwd_kernel", 1): {(*small, causal) for causal in (True, False)},
    }
