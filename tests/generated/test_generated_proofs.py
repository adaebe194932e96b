"""The checked-in manifests are what the packages' content gives: keys of all that calls launch, and what fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enumerated import CACHE_KERNELS, ROWS_KERNELS, enumerate_package

from mlagen.bench.tune.tunable import SPARSE_DECODE, SPARSE_FWD
from mlagen.cli.manifest import COLUMNS, Manifest, keys_under, read_manifest
from mlagen.compile import CompileJob, compile_jobs, content_keys, installed
from mlagen.compile.process import job_of
from mlagen.emit.render import sha256
from mlagen.plan import TARGETS, SparseDecodePlan, SparseFwdPlan, Tile, TopkPlan, load_plan
from mlagen.plan.topk_sm90 import TopkSm90Tile
from mlagen.plan.tritons import TRITONS, allowed_spills, minor, rows_under

SPECS = Path(__file__).parents[2] / "specs"
GENERATED = SPECS.with_name("generated")
PACKAGES = sorted(path.parent for path in GENERATED.glob("*/__init__.py"))
FIX = "fix with: mlagen build --triton all"


def manifest_of(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert found is not None, f"{folder.name}: no manifest that can be read; {FIX}"
    return found


def listed_under(version: str) -> dict[str, list[CompileJob]]:
    """What each package lists under a version, for all its targets."""
    script = Path(__file__).with_name("listing.py")
    done = subprocess.run([sys.executable, str(script), version], capture_output=True, text=True, check=True)
    return {
        name: [job_of(target, one) for target, variants in by_target.items() for one in variants]
        for name, by_target in json.loads(done.stdout).items()
    }


def broken(variant: dict[str, Any], taken: dict[str, int], version: str) -> Iterator[str]:
    """The limits that a variant breaks under a version: it spills in a loop, or takes more than its target has."""
    if taken["loop_spills"] > allowed_spills(variant["kernel"], minor(version)):
        yield f"{taken['loop_spills']} spill loads and stores in loops"
    if taken["shared"] > TARGETS[variant["target"]].shared_limit:
        yield f"{taken['shared']} bytes of shared memory"


@pytest.mark.parametrize("version", [TRITONS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in TRITONS[1:])])
def test_the_keys_of_a_version_are_those_of_all_that_calls_launch_under_it(version: str) -> None:
    listed = listed_under(version)
    assert set(listed) == {folder.name for folder in PACKAGES}
    stale = []
    for folder in PACKAGES:
        manifest = manifest_of(folder)
        keys = set(content_keys(folder, listed[folder.name]))
        if version in manifest.tritons and keys != manifest.measured[version].keys():
            stale.append(folder.name)
    assert stale == [], FIX


def test_keys_are_listed_here_as_a_worker_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, version = GENERATED / "dsv32", installed().version
    here = content_keys(folder, [job for jobs in enumerate_package(folder).jobs.values() for job in jobs])
    assert keys_under(folder, enumerate_package(folder).jobs, version) == here


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_a_manifest_speaks_of_the_files_beside_it_and_of_the_triton_at_hand(folder: Path) -> None:
    manifest = manifest_of(folder)
    assert manifest.files == {path.name: sha256(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")}
    assert installed().version in manifest.tritons
    assert set(manifest.tritons) <= set(TRITONS)
    assert [version for version in TRITONS if version in manifest.tritons] == list(manifest.tritons)
    assert manifest.variants.keys() == {key for taken in manifest.measured.values() for key in taken}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_every_variant_holds_under_every_version(folder: Path) -> None:
    manifest = manifest_of(folder)
    told = []
    for version, measured in manifest.measured.items():
        for key, values in measured.items():
            variant = manifest.variants[key]
            for why in broken(variant, dict(zip(COLUMNS, (value or 0 for value in values), strict=True)), version):
                told.append(f"{version}: {variant['kernel']} [{variant['variant']}] for {variant['target']}: {why}")
    assert told == []


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_attention_takes_no_more_shared_memory_than_the_plan_expects(folder: Path) -> None:
    """Of rows that are quantised; of others a KB more at most, for what is exchanged between warps.

    Under every version that proved it. From 3.8 on Triton pads and stages what AMD's kernels load, which the plan's
    model, of 3.6 and 3.7, leaves out: at most as much again.
    """
    manifest, plan = manifest_of(folder), load_plan(SPECS / f"{folder.name}.yaml")
    for version, (key, values) in (
        (version, each) for version, taken in manifest.measured.items() for each in taken.items()
    ):
        variant = manifest.variants[key]
        for kernels, named, slack in ((SPARSE_FWD, ROWS_KERNELS, 1024), (SPARSE_DECODE, CACHE_KERNELS, 0)):
            if variant["kernel"] in named:
                given = dict(re.findall(r"(BLOCK_[HN])=(\d+)", variant["variant"]))
                launch = (variant["num_warps"], variant["num_stages"], "INDICES_AHEAD" in variant["variant"])
                tile = Tile(int(given["BLOCK_H"]), int(given["BLOCK_N"]), *launch)
                target = TARGETS[variant["target"]]
                expected = kernels.row(plan, tile, target).expected_shared
                if "ALIGNMENT=16 INDEX_GROUP=16 " not in variant["variant"]:
                    part = plan.of(SparseFwdPlan) if kernels is SPARSE_FWD else plan.of(SparseDecodePlan)
                    (row,) = rows_under(part.unaligned, variant["target"], minor(version))
                    expected = row.expected_shared
                if target.backend == "hip" and minor(version) >= (3, 8):
                    expected *= 2
                assert dict(zip(COLUMNS, values, strict=True))["shared"] <= expected + slack, (version, variant)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_shared_memory_of_top_k_on_sm90_is_the_plans_to_the_byte(folder: Path) -> None:
    """Its kernels find their words from the begin on, so that no version may lay scratch of its own there."""
    plan, manifest = load_plan(SPECS / f"{folder.name}.yaml"), manifest_of(folder)
    topk = plan.find(TopkPlan)
    variants = {key: one for key, one in manifest.variants.items() if one["module"] == "_topk_sm90"}
    assert bool(variants) == bool(topk and topk.sm90)
    for version, measured in manifest.measured.items():
        for key in variants.keys() & measured.keys():
            given = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", variants[key]["variant"])}
            tile = TopkSm90Tile(given["WARPS"], given["HALVES"], given["CAPACITY"])
            expected = topk.sm90.shared_bytes(tile, is_long="IS_LONG" in variants[key]["variant"].split())
            assert dict(zip(COLUMNS, measured[key], strict=True))["shared"] == expected, (version, variants[key])


def sample(folder: Path) -> CompileJob:
    """A variant of a package: neighbours in the alphabet take another target each, and its name decides the kernel."""
    targets = sorted(enumerate_package(folder, ()).package.SPEC["spec"]["targets"])
    target = targets[PACKAGES.index(folder) % len(targets)]
    number = zlib.crc32(folder.name.encode())
    kernels: dict[str, list[CompileJob]] = {}
    for job in enumerate_package(folder, (target,)).jobs[target]:
        kernels.setdefault(job.kernel, []).append(job)
    jobs = [*kernels.values()][number % len(kernels)]
    return jobs[number % len(jobs)]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
@pytest.mark.compilation
def test_a_variant_that_is_compiled_takes_what_the_manifest_says(folder: Path, tmp_path: Path) -> None:
    (taken,) = compile_jobs(folder, [sample(folder)], workers=1, cache_dir=tmp_path)
    measured = manifest_of(folder).measured[taken.triton]
    assert measured[taken.key] == tuple(getattr(taken, column) for column in COLUMNS)
