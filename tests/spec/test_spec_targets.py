"""Which target's kernels a GPU runs, and what to name for it."""

import pytest

from mlagen.plan import TARGETS
from mlagen.spec import instead, runs
from mlagen.spec.targets import TARGETS as NAMES

RUNS = {
    "sm103": "sm100",
    "sm101": "sm100",
    "sm121": "sm120",
    "sm87": "sm86",
    "sm88": "sm86",
    "sm89": "sm89",
    "sm90": "sm90",
    "sm75": None,
    "sm110": None,
    "gfx942": "gfx942",
    "gfx90a": None,
    "gfx1100": None,
}


def test_a_spec_names_the_targets_of_the_plan():
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize(("gpu", "target"), RUNS.items())
def test_a_gpu_runs_the_newest_target_of_its_major_version_that_is_not_newer(gpu, target):
    assert runs(gpu, NAMES) == target


def test_only_the_targets_at_hand_count():
    assert runs("sm89", ["sm80", "sm90"]) == "sm80"
    assert runs("sm80", ["sm86", "sm90"]) is None


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ("sm103", "sm103 runs sm100's kernels; name sm100"),
        ("sm_103a", "sm103 runs sm100's kernels; name sm100"),
        ("sm110", "sm110: no target runs there"),
        ("gfx90a", "gfx90a: no target runs there"),
        ("sm90", None),
        ("sm_90a", None),
        ("turing", None),
    ],
)
def test_what_to_name_instead(gpu, told):
    assert instead(gpu) == told
