"""`mlagen init --gpu`: names that people type and drivers print, and the GPUs of this machine."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import get_args

import pytest
from cli_specs import Run
from click.testing import CliRunner

from mlagen.cli import machine, main
from mlagen.errors import UsageError
from mlagen.spec.gpus import GPUS, OTHERS, TARGETS, target_of
from mlagen.spec.load import parse
from mlagen.spec.targets import Target

INIT = importlib.import_module("mlagen.cli.init")  # the module; the package has the command under its name
TYPED = {
    "h100 H200 sm90 sm90a sm_90 compute_90": "sm90",
    "rtx4090 RTX-4090 4090 4070ti l40s sm89": "sm89",
    "a6000 rtx3090ti 3090 orin sm86 sm87": "sm86",
    "a100 a800": "sm80",
    "dgx-spark DGX_Spark spark gb10 rtx5090 sm120 sm121": "sm120",
    "b200 b300 gb300 sm100 sm103": "sm100",
    "mi300x MI325 gfx942": "gfx942",
    "mi355x": "gfx950",
}
PRINTED = {
    "NVIDIA H100 80GB HBM3": "sm90",
    "NVIDIA H100 PCIe": "sm90",
    "NVIDIA H100 NVL": "sm90",
    "NVIDIA H20-3e": "sm90",
    "NVIDIA GH200 480GB": "sm90",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "sm90",
    "NVIDIA A100-SXM4-80GB": "sm80",
    "NVIDIA A100 80GB PCIe": "sm80",
    "NVIDIA A10G": "sm86",
    "NVIDIA RTX A6000": "sm86",
    "NVIDIA GeForce RTX 3080 Ti": "sm86",
    "NVIDIA GeForce RTX 4090": "sm89",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "sm89",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "sm89",
    "NVIDIA RTX 6000 Ada Generation": "sm89",
    "NVIDIA L40S": "sm89",
    "NVIDIA B200": "sm100",
    "NVIDIA GB10": "sm120",
    "NVIDIA GeForce RTX 5090": "sm120",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "sm120",
    "AMD Instinct MI300X": "gfx942",
    "AMD Instinct MI325 OAM": "gfx942",
    "AMD Instinct MI355X": "gfx950",
}
WITHOUT = {  # words of the error
    "sm70": "sm70 (Volta) runs no target's kernels",
    "Tesla V100-SXM2-32GB": "sm70 (Volta) runs no target's kernels",
    "Tesla T4": "sm75 (Turing) runs no target's kernels",
    "sm110": "sm110 (Thor) runs no target's kernels",
    "AMD Instinct MI250X": "gfx90a runs no target's kernels",
    "gfx90a": "gfx90a runs no target's kernels",
    "h1000": "did you mean h100?",
    "rtx 6000": "did you mean rtx-a6000 or rtx-pro-6000 or rtx-6000-ada?",
    "sm9": "",
    "": "",
}


def test_every_target_has_gpus_and_no_gpu_two_targets() -> None:
    assert get_args(Target) == TARGETS
    assert set(GPUS) == set(TARGETS)
    assert not set(OTHERS) & set(TARGETS)
    assert {name: target_of(name) for names in GPUS.values() for name in names} == {
        name: target for target, names in GPUS.items() for name in names
    }


@pytest.mark.parametrize(("names", "target"), TYPED.items())
def test_names_as_people_type_them_are_accepted(names: str, target: str) -> None:
    assert {target_of(name) for name in names.split()} == {target}


@pytest.mark.parametrize(("name", "target"), PRINTED.items())
def test_names_as_drivers_print_them_are_accepted(name: str, target: str) -> None:
    assert target_of(name) == target


@pytest.mark.parametrize(("name", "said"), WITHOUT.items())
def test_another_gpu_is_refused_with_the_nearest_names(name: str, said: str) -> None:
    takes = r"--gpu: got .*; takes a GPU, for example a100, .* or a target: sm80, "
    with pytest.raises(UsageError, match=takes) as caught:
        target_of(name)
    assert said in str(caught.value)


def targets(text: str) -> tuple[str, ...]:
    return parse(text, Path("my.yaml")).targets


def test_gpus_pick_targets_each_once(run: Run, workspace: Path) -> None:
    words = [word for gpu in ("H200", "h100", "RTX PRO 6000", "gfx942") for word in ("--gpu", gpu)]
    result = run("init", "dsv3", *words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert targets(result.stdout) == ("sm90", "sm120", "gfx942")


def test_all_are_named_where_they_are_asked_for(run: Run, workspace: Path) -> None:
    assert targets(run("init", "dsv3", "--gpu", "all").stdout) == TARGETS


def test_without_a_gpu_and_a_terminal_one_is_asked_for_in_a_line(
    run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INIT, "gpus_of_machine", list)
    result = run("init", "dsv3")
    line = "--gpu: missing, and this machine has no GPU; pass a GPU, for example --gpu h200, or --gpu all\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


def test_a_terminal_is_asked(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INIT, "gpus_of_machine", list)
    monkeypatch.setattr(INIT, "is_terminal", lambda: True)
    result = CliRunner().invoke(main, ["init", "dsv3"], input="rtx4090\n")
    assert result.exit_code == 0
    assert targets(result.stdout) == ("sm89",)
    assert "GPU (for example h200, " in result.stderr


def test_the_gpus_of_this_machine_are_taken(run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INIT, "gpus_of_machine", lambda: ["sm103", "sm90"])
    result = run("init", "dsv3")
    assert targets(result.stdout) == ("sm100", "sm90")
    assert result.stderr == "targets: this machine's GPUs, sm103 and sm90; pass --gpu NAME or --gpu all for others\n"


def test_nvidia_smi_says_compute_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=compute_cap ] && printf "9.0\\n9.0\\n12.1\\n[N/A]\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "KFD", tmp_path / "none")
    assert machine.gpus_of_machine() == ["sm90", "sm121"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpus_of_machine() == []


def test_rocms_driver_lists_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, version in enumerate((0, 90402, 90402, 90500)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"simd_count 1\ngfx_target_version {version}\n")
    monkeypatch.setattr(machine, "KFD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus_of_machine() == ["gfx942", "gfx950"]
