"""`mlagen build`: what it writes, what it refuses, and the exit code of each."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cli_specs import SPEC, WRITER, Run

from mlagen.cli.manifest import keys_under
from mlagen.compile import installed
from mlagen.plan import TARGETS, load_plan
from mlagen.plan.tritons import TRITONS

TEXT_ONLY = ("--no-compile", "--no-verify")


def test_a_build_writes_the_package_and_a_second_changes_nothing(run: Run, workspace: Path) -> None:
    first = run("build", *TEXT_ONLY)
    assert first.exit_code == 0
    files = {path.name: path.stat().st_mtime_ns for path in (workspace / "generated" / "small").iterdir()}
    assert set(files) == {
        *(
            "__init__.py",
            "_facts.py",
            "_calls.py",
            "_launch.py",
            "_splits.py",
            "_tiles.py",
            "_sparse_fwd_kernels.py",
            "sparse_fwd.py",
        )
    }
    second = run("build", *TEXT_ONLY)
    assert second.exit_code == 0
    assert "unchanged" in second.stderr
    assert files == {path.name: path.stat().st_mtime_ns for path in (workspace / "generated" / "small").iterdir()}


@pytest.mark.compilation
def test_compiled_resources_land_in_the_report_and_the_manifest(run: Run, writer: Path) -> None:
    result = run("build", "--no-verify", "--verbose")
    assert result.exit_code == 0
    assert "_write_kernel" in result.stdout
    version = installed().version
    folder = Path("generated", "writer")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["triton"] == [version]
    columns = manifest["columns"]
    assert {row["target"] for row in manifest["variants"]} == {"sm80", "gfx942"}
    for row in manifest["variants"]:
        taken = dict(zip(columns, row[version], strict=True))
        assert taken["registers"] > 0
        assert taken["loop_spills"] == 0
        assert taken["shared"] <= TARGETS[row["target"]].shared_limit
    assert {row["key"] for row in manifest["variants"]} == {*keys_under(folder, ["sm80", "gfx942"], version)}
    assert f"{len(manifest['variants'])} kernel variants compiled with triton {version}" in result.stderr
    assert run("build", "--check").exit_code == 0


@pytest.mark.compilation
def test_a_version_whose_kernels_changed_is_told_with_what_proves_it_again(run: Run, writer: Path) -> None:
    """The manifest of a package of one small kernel, to which two versions are written as if they had compiled it."""
    writer.write_text(WRITER.replace(", gfx942", ""))
    assert run("build", "--no-verify").exit_code == 0
    folder = Path("generated", "writer")
    version, (kept, lost) = installed().version, [one for one in TRITONS if one != installed().version][:2]
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["variants"]
    for row in manifest["variants"]:
        row[kept] = row[version]
    stranger = {**manifest["variants"][0], "key": "0123456789abcdef", lost: manifest["variants"][0][version]}
    del stranger[version], stranger[kept]
    manifest["variants"].append(stranger)
    manifest["triton"] = sorted((version, kept, lost))
    path.write_text(json.dumps(manifest))

    result = run("build", "--no-verify")
    assert result.exit_code == 0
    assert (
        f"generated/writer: no longer proved under triton {lost}, since kernels changed; "
        f"fix with: mlagen build specs/writer.yaml --triton {version},{lost}"
    ) in " ".join(result.stderr.split())
    found = json.loads(path.read_text())
    assert found["triton"] == sorted((version, kept))
    assert stranger["key"] not in {row["key"] for row in found["variants"]}
    assert "no longer proved" not in run("build", "--no-verify").stderr


def test_a_triton_that_is_not_among_those_proved_is_exit_code_2(run: Run, workspace: Path) -> None:
    result = run("build", "--triton", "3.5")
    assert result.exit_code == 2
    assert "--triton: got '3.5'; takes 3.6" in result.stderr
    assert not (workspace / "generated").exists()


@pytest.mark.interpreter
def test_verified_kernels_are_counted(run: Run, writer: Path) -> None:
    result = run("build", "--no-compile", "--device", "cpu", "--json")
    assert result.exit_code == 0
    (built,) = json.loads(result.stdout)
    assert len(built["verified"]) > 50
    assert all(case["ok"] for case in built["verified"])


@pytest.mark.compilation
def test_json_on_stdout_is_the_whole_of_stdout(run: Run, writer: Path) -> None:
    (built,) = json.loads(run("build", "--no-verify", "--target", "sm80", "--json").stdout)
    assert {row["target"] for row in built["resources"]} == {"sm80"}
    kernels = ["_layout.py", "_tiles.py", "_cache_kernels.py"]
    names = ["_facts.py", "_launch.py", "_calls.py", *kernels, "cache.py", "__init__.py"]
    assert [Path(path).name for path in built["written"]] == names


def test_drift_is_exit_code_1_with_a_diff_and_the_mending_command(run: Run, workspace: Path) -> None:
    run("build", *TEXT_ONLY)
    spec = workspace / "specs" / "small.yaml"
    spec.write_text(SPEC.replace("topk: 16", "topk: 17").replace("A small model", "Another model"))
    result = run("build", "--check")
    assert result.exit_code == 1
    assert '+"""MLA attention kernels for Another model.' in result.stdout
    assert "fix with: mlagen build specs/small.yaml" in result.stderr
    assert run("build", "--diff").exit_code == 0


def test_the_mending_command_names_the_folder_that_was_checked(run: Run, workspace: Path) -> None:
    result = run("build", "--check", "--out", "my kernels")
    assert result.exit_code == 1
    assert "fix with: mlagen build specs/small.yaml --out 'my kernels'\n" in result.stderr


def test_a_hand_edited_file_is_refused_and_nothing_is_written(run: Run, workspace: Path) -> None:
    run("build", *TEXT_ONLY)
    edited = workspace / "generated" / "small" / "sparse_fwd.py"
    edited.write_text(edited.read_text() + "# mine\n")
    (workspace / "specs" / "small.yaml").write_text(SPEC.replace("A small model", "Another model"))
    before = {path: path.read_bytes() for path in (workspace / "generated").rglob("*.py")}
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 1
    assert "sparse_fwd.py: edited by hand" in result.stderr
    assert {path: path.read_bytes() for path in (workspace / "generated").rglob("*.py")} == before
    assert run("build", "--force", *TEXT_ONLY).exit_code == 0
    assert "# mine" not in edited.read_text()


def test_a_bad_spec_is_exit_code_2_and_stops_the_good_ones_too(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "other.yaml").write_text(
        SPEC.replace("name: small", "name: other").replace("topk: 16", "topk: 0")
    )
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 2
    assert result.stderr.startswith("specs/other.yaml:4:")
    assert not (workspace / "generated").exists()


def test_two_specs_of_one_name_are_refused_before_one_overwrites_the_other(run: Run, workspace: Path) -> None:
    (workspace / "copy.yaml").write_text(SPEC)
    result = run("build", "specs/small.yaml", "copy.yaml", *TEXT_ONLY)
    assert result.exit_code == 2
    assert result.stderr == "copy.yaml: name: got 'small', which is that of specs/small.yaml too; takes another\n"
    assert not (workspace / "generated").exists()


def test_a_tile_that_does_not_fit_its_target_is_exit_code_1_with_the_arithmetic(run: Run, workspace: Path) -> None:
    tuned = workspace / "specs" / "tuned" / "small" / "sm80.yaml"
    tuned.parent.mkdir(parents=True)
    tile = "block_h: 256, block_n: 256, num_warps: 8, num_stages: 6, indices_ahead: true, programs_per_sm: 1"
    fits = load_plan(workspace / "specs" / "small.yaml").fits["sparse_fwd"]
    tuned.write_text(f"sparse_fwd:\n  - {{{tile}}}\nfits: {{sparse_fwd: {fits}}}\n")
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 1
    assert result.stderr.startswith("specs/tuned/small/sm80.yaml:2:")
    assert "more than the 166,912 a program gets" in result.stderr
    assert not (workspace / "generated").exists()


@pytest.mark.parametrize("arguments", [("build", "--target", "sm999"), ("build", "--check", "--force"), ("bild",)])
def test_bad_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["build", "verify"])
@pytest.mark.parametrize(
    ("gpu", "told"),
    [("sm103", "sm103 runs sm100's portable kernels; name sm100"), ("sm110", "sm110 (Thor) runs no target's kernels")],
)
def test_a_gpu_that_is_no_target_is_told_what_to_name(run: Run, command: str, gpu: str, told: str) -> None:
    result = run(command, "--target", gpu)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_target_the_spec_does_not_name_is_refused(run: Run) -> None:
    result = run("build", "--no-verify", "--target", "sm90")
    assert result.exit_code == 2
    assert "none of its targets (sm80, gfx942) is sm90" in result.stderr


def test_the_module_runs_as_a_command(workspace: Path) -> None:
    command = [sys.executable, "-m", "mlagen", "build", *TEXT_ONLY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generated/small" in done.stdout


@pytest.mark.compilation
def test_kernels_compiled_ahead_lie_in_the_packages_folder_by_target_and_triton(run: Run, writer: Path) -> None:
    run("build", *TEXT_ONLY)
    result = run("build", "--cache", "generated", "--target", "gfx942")
    assert result.exit_code == 0
    (path,) = Path("generated", "writer").glob("kernels-*")
    assert result.stdout.split() == [str(path)]
    assert path.name.startswith(f"kernels-gfx942-triton{installed().version}-")
    with tarfile.open(path) as tar:
        endings = {Path(name).suffix for name in tar.getnames()}
    assert endings == {".json", ".hsaco"}


def test_kernels_are_compiled_ahead_of_no_text_but_the_packages(run: Run, workspace: Path) -> None:
    result = run("build", "--cache", "generated", "--target", "gfx942")
    assert result.exit_code == 1
    assert "fix with: mlagen build specs/small.yaml" in result.stderr
    assert not (workspace / "generated").exists()
    assert run("build", "--cache", "generated", "--check").exit_code == 2
