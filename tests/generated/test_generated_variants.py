"""The lists of compilations of the checked-in packages: their calls are made on a CPU, and nothing is launched."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_in import PACKAGES
from enumerated import CACHE_KERNELS, ROWS_KERNELS, Enumerated, check_every_list, check_tiles, enumerate_package

from mlagen.compile.process import job_of, request_of
from mlagen.plan import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda path: path.name)
def found(request: pytest.FixtureRequest) -> Enumerated:
    return enumerate_package(request.param)


def test_each_kernel_is_listed_with_each_argument_and_no_variant_twice(found: Enumerated) -> None:
    assert set(found.jobs) <= set(TARGETS)
    check_every_list(found)


def test_every_tile_and_alignment_is_listed(found: Enumerated) -> None:
    check_tiles(found)


def test_the_same_variants_are_listed_in_the_same_order_again(found: Enumerated) -> None:
    assert enumerate_package(found.folder).jobs == found.jobs


def test_a_job_equals_its_description(found: Enumerated) -> None:
    for target, jobs in found.jobs.items():
        assert [job_of(target, request_of(job)) for job in jobs] == jobs


def test_every_module_that_launches_lists_calls(found: Enumerated) -> None:
    paths = [path for path in sorted(found.folder.glob("*.py")) if "\ndef variants(" in path.read_text()]
    modules = [path.stem if path.stem == "__init__" else path.stem.removeprefix("_") for path in paths]
    assert "__init__" in modules
    kernels = {job.module for jobs in found.jobs.values() for job in jobs}
    borrowed = {"__init__", "indexer_select"}  # which launch kernels of other modules alone
    assert set(modules) - borrowed <= {name.removeprefix("_").removesuffix("_kernels") for name in kernels}


def test_kernels_over_rows_always_write_maxima_and_lse(found: Enumerated) -> None:
    for jobs in found.jobs.values():
        for job in jobs:
            names = {name for name, _ in (*job.signature, *job.constexprs)}
            if (
                "max_logits_ptr" in names
                and "sparse_decode" not in job.module
                and "partial_ptr" not in dict(job.signature)
            ):
                assert {"max_logits_ptr", "lse_ptr"} <= {name for name, _ in job.signature}


def test_rows_that_are_not_aligned_are_read_without_groups_of_indices(found: Enumerated) -> None:
    for jobs in found.jobs.values():
        given = [dict(job.constexprs) for job in jobs if job.kernel in (*ROWS_KERNELS, *CACHE_KERNELS)]
        assert not [one for one in given if (one["ALIGNMENT"], one["INDEX_GROUP"]) == (1, 16)]


def test_targets_that_launch_dependents_have_both_kinds_of_short_kernels(found: Enumerated) -> None:
    """Kernels of many programs do not wait for those before them; gathers' and merges' are never so many."""
    for target, jobs in found.jobs.items():
        early = TARGETS[target].pdl
        waits = {
            (job.kernel, dict(job.constexprs)["PDL"])
            for job in jobs
            if job.module in ("_cache_kernels", "_extra_cache_kernels", "_indices_kernels", "_splits")
        }
        mapping = ("_map_indices_kernel", "_map_with_options_kernel")
        many = ("_write_kernel", *mapping, "_combine_indices_kernel", "_combine_compact_kernel")
        kernels = {kernel for kernel, _ in waits}
        assert waits == {(kernel, early) for kernel in kernels} | {(kernel, False) for kernel in kernels & {*many}}
        for job in jobs:
            assert job.dependent == dict(job.constexprs).get("PDL", False) or job.kernel not in kernels


def test_sm90_kernels_are_listed_only_for_sm90(found: Enumerated) -> None:
    for target, jobs in found.jobs.items():
        modules = {job.module for job in jobs if "_sm90" in job.module}
        assert target == "sm90" or not modules


def test_a_package_asks_for_one_of_its_targets(found: Enumerated) -> None:
    with pytest.raises(ValueError, match="target: got 'sm70', takes "):
        found.package.variants("sm70")
