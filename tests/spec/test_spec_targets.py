"""The target that a GPU runs, and the advice for other GPUs."""

import pytest
from checked_in import package_of

from mlagen.compile.worker import load_package
from mlagen.plan import TARGETS
from mlagen.spec import name_instead, runs
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

THOR = "sm110 (Thor) runs no target's kernels: no target has compute capability 11.0 or an earlier 11.x"


def test_a_spec_names_the_targets_of_the_plan():
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize(("gpu", "target"), RUNS.items())
def test_a_gpu_runs_the_newest_target_of_its_major_version_that_is_not_newer(gpu, target):
    assert runs(gpu, NAMES) == target


def test_only_the_targets_at_hand_count():
    assert runs("sm89", ["sm80", "sm90"]) == "sm80"
    assert runs("sm80", ["sm86", "sm90"]) is None


@pytest.mark.parametrize(
    ("gpu", "advice"),
    [
        ("sm103", "sm103 runs sm100's portable kernels; name sm100"),
        ("sm_103a", "sm103 runs sm100's portable kernels; name sm100"),
        ("SM10.3", "sm103 runs sm100's portable kernels; name sm100"),
        ("compute_103", "sm103 runs sm100's portable kernels; name sm100"),
        ("sm110", THOR),
        ("sm_110a", THOR),
        ("sm11.0", THOR),
        ("gfx90a", "gfx90a runs no target's kernels"),
        ("sm90", None),
        ("sm_90a", None),
        ("turing", None),
        ("h100", "h100 runs sm90's kernels; name sm90"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB runs sm80's kernels; name sm80"),
        ("mi325", "mi325 runs gfx942's kernels; name gfx942"),
        ("v100", "sm70 (Volta) runs no target's kernels: no target has compute capability 7.0 or an earlier 7.x"),
        ("h1000", None),
        ("", None),
    ],
)
def test_a_gpu_that_is_no_target_gets_advice(gpu, advice):
    assert name_instead(gpu) == advice


@pytest.mark.parametrize("gpu", ["sm100", "sm101", "sm103", "sm110", "sm120", "sm121", "gfx942", "gfx90a"])
def test_packages_support_the_advised_target(gpu):
    package = load_package(package_of("odd"))
    assert package._launch.supports(gpu) == runs(gpu, NAMES)
