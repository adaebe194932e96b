"""Which GPUs run a package's kernels: its `supports`, its device facts and the generator's own rule say the same."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from checked_in import PACKAGES, package_of

from mlagen.bench import load_package
from mlagen.spec import runs

CAPABILITIES = [(major, minor) for major in range(5, 14) for minor in range(10)]
ROCM = ("gfx906", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_package_answers_by_the_rule_of_the_generator(folder: Path) -> None:
    package = load_package(folder)
    for major, minor in CAPABILITIES:
        target = runs(f"sm{major}{minor}", package.spec["targets"])
        assert package.root.supports((major, minor)) == package.root.supports(f"sm{major}{minor}") == target
    for name in ROCM:
        assert package.root.supports(name) == runs(name, package.spec["targets"])


def test_the_answers_are_those_that_people_ask_for() -> None:
    supports = load_package(package_of("dsv32")).root.supports
    asked = ("sm103", "sm121", "sm87", "sm110", "gfx90a", "gfx942")
    assert [supports(gpu) for gpu in asked] == ["sm100", "sm120", "sm86", None, None, "gfx942"]


@pytest.mark.parametrize("gpu", ["cuda:99", "sm_90", "sm90a", "gfx942:xnack-", "", torch.device("cpu")], ids=str)
def test_a_device_that_is_no_gpu_is_a_value_error(gpu: object) -> None:
    with pytest.raises(ValueError, match="takes a"):
        load_package(PACKAGES[0]).root.supports(gpu)


@pytest.mark.parametrize("gpu", [None, 90, (9,), (9.0, 0), [9, 0]], ids=str)
def test_another_type_is_a_type_error(gpu: object) -> None:
    with pytest.raises(TypeError, match="gpu: got "):
        load_package(PACKAGES[0]).root.supports(gpu)


@pytest.mark.parametrize(
    ("index", "capability", "target"), [(90, (10, 3), "sm100"), (91, (12, 1), "sm120"), (92, (11, 0), None)]
)
def test_a_device_runs_the_target_of_its_capability(
    monkeypatch: pytest.MonkeyPatch, index: int, capability: tuple[int, int], target: str | None
) -> None:
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    package, device = load_package(package_of("dsv32")), torch.device("cuda", index)
    assert package.root.supports(device) == target
    if target is None:
        with pytest.raises(ValueError, match=r"device: got sm110, takes one of sm80, "):
            package.device_facts(device)
    else:
        facts = package.device_facts(device)
        assert (facts.target, facts.multiprocessors) == (target, 7)


def test_a_rocm_device_runs_the_kernels_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    package, device = load_package(package_of("dsv32")), torch.device("cuda", 93)
    assert package.root.supports(device) == package.device_facts(device).target == "gfx942"
    with pytest.raises(ValueError, match="takes a device or a name"):  # (9, 4) is none of sm90's kin
        package.root.supports((9, 4))
