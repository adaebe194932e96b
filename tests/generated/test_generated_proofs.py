"""The checked-in proofs follow from the packages' content: rows of all that calls launch, and limits that hold."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checked_in import GOLDEN, PACKAGES, key_of, package_of, spec_of
from enumerated import CACHE_KERNELS, ROWS_KERNELS, enumerate_package
from rotation import SEED, drawn

from mlagen.backends import expected_products
from mlagen.bench.tune.tunable import SPARSE_DECODE, SPARSE_FWD
from mlagen.compile import CompileJob, content_keys, installed, list_variants
from mlagen.compile.process import job_of
from mlagen.plan import TARGETS, SparseDecodePlan, SparseFwdPlan, Tile, TopkPlan, load_plan
from mlagen.plan.sm90.topk import TopkSm90Tile
from mlagen.plan.tiles.allowed import read_allowed
from mlagen.plan.tritons import TRITONS, minor, rows_under
from mlagen.proofs import Figures, Proofs
from mlagen.proofs.cases import proved_before
from mlagen.proofs.sample import Sample

ROOT = Path(__file__).parents[2]

FIX = "fix with: mlagen build --triton all"
OLDEST = TRITONS[0]
by_package = pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
SOME = drawn([folder.name for folder in PACKAGES], len(PACKAGES) // 2)  # listed under OLDEST in every run
by_package_and_version = pytest.mark.parametrize(
    ("folder", "version"),
    [
        pytest.param(
            *(folder, version),
            id=f"{folder.name}-{version}",
            marks=[] if version == OLDEST and folder.name in SOME else pytest.mark.slow,
        )
        for version in TRITONS
        for folder in PACKAGES
    ],
)


@functools.cache
def proofs() -> Proofs:
    return Proofs(GOLDEN)  # which looks into generated/proofs next


@functools.cache
def listed_under(version: str, *, some: bool) -> dict[str, list[CompileJob]]:
    """The lists of the packages in SOME under a version, for all their targets; or of the others."""
    folders = [str(folder) for folder in PACKAGES if (folder.name in SOME) == some]
    command = [sys.executable, str(Path(__file__).with_name("listing.py")), version, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        name: [job_of(target, one) for target, variants in by_target.items() for one in variants]
        for name, by_target in json.loads(done.stdout).items()
    }


def listed_of(folder: Path, version: str) -> list[CompileJob]:
    return listed_under(version, some=folder.name in SOME)[folder.name]


@functools.cache
def rows_of(folder: Path, version: str) -> list[tuple[CompileJob, Figures | None]]:
    """Every variant of a package under a version, with its figures."""
    jobs = listed_of(folder, version)
    return [(job, proofs().figures(key, version)) for job, key in zip(jobs, content_keys(folder, jobs), strict=True)]


def test_the_files_are_as_mlagen_wrote_them() -> None:
    assert proofs().faults() == []


@by_package_and_version
def test_a_package_consists_of_all_that_calls_launch(folder: Path, version: str, shared: Path) -> None:
    row = proofs().package(key_of(folder.name, shared))
    assert row is not None, FIX
    if version in row.keys:
        assert set(content_keys(folder, listed_of(folder, version))) == set(row.keys[version]), FIX


def test_every_allowance_is_of_a_variant_that_spills_as_many() -> None:
    wrong = []
    for one in (each for each in read_allowed() if not each.reason.startswith("of no package")):
        row = proofs().variant(one.key)
        version = next(version for version in TRITONS if minor(version) == one.triton)
        figures = None if row is None else row.figures.get(version)
        if row is None or figures is None or (row.kernel, figures.loop_spills) != (one.kernel, one.spills):
            wrong.append((one.key, version))
    assert wrong == []


def test_variants_are_listed_here_as_a_worker_lists_them(tmp_path: Path) -> None:
    folder = package_of("dsv32")
    here = enumerate_package(folder).jobs
    assert list_variants(folder, list(here), cache_dir=tmp_path) == [job for jobs in here.values() for job in jobs]


@by_package
def test_a_package_is_proved_under_the_triton_at_hand(folder: Path, shared: Path) -> None:
    assert installed().version in proofs().tritons(key_of(folder.name, shared)), FIX


def over(job: CompileJob, taken: Figures, products: dict[tuple[str, int | None], int]) -> Iterator[str]:
    """Faults of a variant that holds its limits in the file: only its plan knows its products."""
    expected = products.get((job.kernel, job.block_h))
    if expected is not None and job.target == "sm90" and taken.products != expected:
        yield f"{taken.products} warpgroup products, expected {expected}"


@by_package_and_version
def test_every_variant_has_the_products_of_its_plan(folder: Path, version: str) -> None:
    products = dict(expected_products(load_plan(spec_of(folder.name))))
    reported = [
        f"{job.kernel} [{job.variant}]: {why}"
        for job, taken in rows_of(folder, version)
        if taken is not None
        for why in over(job, taken, products)
    ]
    assert reported == []


@by_package_and_version
def test_attention_takes_no_more_shared_memory_than_the_plan_expects(folder: Path, version: str) -> None:
    """Of rows that are quantised; of others a KB more at most, for exchanges between warps.

    From 3.8 on Triton pads and stages the loads of AMD's kernels. The plan's model, of 3.6 and 3.7, leaves that out: at
    most as much again.
    """
    plan = load_plan(spec_of(folder.name))
    for job, taken in rows_of(folder, version):
        for kernels, named, slack in ((SPARSE_FWD, ROWS_KERNELS, 1024), (SPARSE_DECODE, CACHE_KERNELS, 0)):
            if job.kernel in named and taken is not None:
                given, target = dict(job.constexprs), TARGETS[job.target]
                launch = (job.num_warps, job.num_stages, bool(given["INDICES_AHEAD"]))
                tile = Tile(int(given["BLOCK_H"] or 0), int(given["BLOCK_N"] or 0), *launch)
                expected = kernels.row(plan, tile, target).expected_shared
                if (given["ALIGNMENT"], given["INDEX_GROUP"]) != (16, 16):
                    part = plan.of(SparseFwdPlan) if kernels is SPARSE_FWD else plan.of(SparseDecodePlan)
                    (row,) = rows_under(part.unaligned, job.target, minor(version))
                    expected = row.expected_shared
                if target.backend == "hip" and minor(version) >= (3, 8):
                    expected *= 2
                assert taken.shared <= expected + slack, job


@by_package_and_version
def test_shared_memory_of_top_k_on_sm90_is_the_plans_to_the_byte(folder: Path, version: str) -> None:
    """Its kernels find their words from the begin on, so that no version may lay scratch of its own there."""
    topk = load_plan(spec_of(folder.name)).find(TopkPlan)
    rows = [(job, taken) for job, taken in rows_of(folder, version) if job.module == "_topk_sm90"]
    assert bool(rows) == bool(topk and topk.sm90)
    for job, taken in rows:
        given = dict(job.constexprs)
        tile = TopkSm90Tile(*(int(given[name] or 0) for name in ("WARPS", "HALVES", "CAPACITY")))
        expected = topk.sm90.shared_bytes(tile, is_long=bool(given.get("IS_LONG")))
        assert taken is None or taken.shared == expected, job


@pytest.mark.parametrize("number", range(5))
@pytest.mark.compilation
def test_a_variant_compiled_again_equals_its_proof(number: int, tmp_path: Path) -> None:
    chance = random.Random(SEED + number)
    folder = chance.choice(PACKAGES)
    target = chance.choice(sorted(enumerate_package(folder, ()).package.SPEC["spec"]["targets"]))
    jobs = enumerate_package(folder, (target,)).jobs[target]
    Sample(folder, SEED + number).compile(jobs, proofs(), installed(), 1)


@pytest.mark.parametrize("number", range(1))
@pytest.mark.interpreter
def test_a_case_run_again_equals_its_proof(number: int, shared: Path) -> None:
    for folder in random.Random(SEED + number).sample(PACKAGES, len(PACKAGES)):
        if rows := proved_before(proofs(), key_of(folder.name, shared), "cpu", every=False):
            assert Sample(folder, SEED + number).verify(rows) == 1
            return
    pytest.skip("no cases are proved with these versions; they are with those of constraints.txt")
