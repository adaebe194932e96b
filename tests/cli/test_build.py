"""`mlagen build`: the files that it writes, its refusals, and the exit code of each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from cli_specs import SPEC, WRITER, Run

from mlagen.compile import installed
from mlagen.plan import TARGETS, load_plan
from mlagen.plan.tritons import TRITONS, minors
from mlagen.proofs.sources import family_names
from mlagen.proofs.table import read_table

TEXT_ONLY = ("--no-compile", "--no-verify")


def test_a_build_writes_the_package_and_a_second_changes_nothing(run: Run, workspace: Path) -> None:
    first = run("build", *TEXT_ONLY)
    assert first.exit_code == 0
    files = {path.name: path.stat().st_mtime_ns for path in (workspace / "generated" / "small").iterdir()}
    assert set(files) == {
        *(
            "__init__.py",
            "_facts.py",
            "_ahead.py",
            "_calls.py",
            "_internals.py",
            "_launch.py",
            "_notes.py",
            "_signatures.py",
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


def files_of(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def proof_rows(name: str) -> dict[str, list]:
    found: dict[str, list] = json.loads(Path("generated", "proofs", f"{name}.json").read_text())["rows"]
    return found


@pytest.fixture
def proved(run: Run, writer: Path) -> Path:
    """The folder of proofs of a package of one small kernel, which was built in full."""
    result = run("build", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    return Path("generated", "proofs")


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_build_writes_its_proofs_and_a_second_looks_them_up(run: Run, proved: Path) -> None:
    version = installed().version
    compiled, (package,), cases = (proof_rows(name) for name in ("compile", "packages", "verify"))
    assert {row[0] for row in compiled.values()} == {"sm80", "gfx942"}
    for row in compiled.values():
        registers, shared, *_ = [*row[2][version], 0]
        assert registers > 0
        assert shared <= TARGETS[row[0]].shared_limit
    names, listed, _ = proof_rows("packages")[package]
    assert (names, listed) == (["writer"], {version: " ".join(compiled)})
    assert sorted(name for row in cases.values() for name in row[1].split()) == sorted(family_names())
    init = Path("generated", "writer", "__init__.py").read_text()
    assert f'"triton": ["{minors([version])[0]}"]' in init
    assert run("build", "--check").exit_code == 0

    before = files_of("generated")
    result = run("build", "--device", "cpu")
    assert result.exit_code == 0
    (line, more) = result.stderr.splitlines()
    variants = f"{len(compiled)} variants with triton {version}: {len(compiled)} proved before"
    assert line.startswith(f"generated/writer: 12 files, unchanged; {variants}; ")
    ran, of, known = re.search(r"; (\d+) of ([\d,]+) cases: (\d+) proved before$", line).groups()
    assert ran == known
    assert int(ran) < int(of.replace(",", ""))
    assert more == "generated/writer: `mlagen verify specs/writer.yaml` runs all cases"
    assert files_of("generated") == before


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_renamed_spec_finds_the_proofs(run: Run, proved: Path, writer: Path) -> None:
    (writer.parent / "mine.yaml").write_text(WRITER.replace("name: writer", "name: mine").replace("A small", "My"))
    result = run("build", "specs/mine.yaml", "--device", "cpu", "--json")
    assert result.exit_code == 0
    (built,) = json.loads(result.stdout)
    assert all(row["before"] for row in built["verified"])
    assert built["cases"] == []
    ((names, *_),) = proof_rows("packages").values()
    assert names == ["mine", "writer"]


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_figure_that_is_changed_or_deleted_by_hand_fails_the_check(run: Run, proved: Path) -> None:
    path, whole = proved / "compile.json", (proved / "compile.json").read_text()
    key, row = next(iter(proof_rows("compile").items()))
    line = next(line for line in whole.splitlines(keepends=True) if key in line)
    figures = json.dumps(row[2])
    other = figures.replace(str(row[2][installed().version][0]), "77")
    assert other != figures
    for text in (whole.replace(line, line.replace(figures, other)), whole.replace(line, "")):
        assert text != whole
        path.write_text(text)
        result = run("build", "--check")
        assert result.exit_code == 1
        assert "generated/proofs/compile.json: " in result.stdout
        command = result.stderr.splitlines()[-1].removeprefix("fix with: mlagen ")
        assert run(*command.split(), "--device", "cpu").exit_code == 0
        assert path.read_text() == whole
        assert run("build", "--check").exit_code == 0


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_forged_figure_is_found_by_compiling_it_again_and_fresh_looks_up_nothing(run: Run, proved: Path) -> None:
    table = read_table(proved / "compile.json")
    for row in table.rows.values():
        row[2][installed().version][0] -= 1
    (proved / "compile.json").write_text(table.text())
    assert run("build", "--check").exit_code == 0
    result = run("build", "--device", "cpu", "--seed", "7")
    assert result.exit_code == 1
    assert "compiled again it is registers" in result.stderr
    assert "(seed 7)" in result.stderr
    fresh = run("build", "--device", "cpu", "--fresh")
    assert fresh.exit_code == 0
    assert fresh.stderr.count(": 0 proved before") == 2
    assert run("build", "--device", "cpu", "--seed", "7").exit_code == 0


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_build_of_several_specs_computes_proofs_of_one_again(run: Run, writer: Path, proved: Path) -> None:
    other = writer.with_name("other.yaml")
    other.write_text(WRITER.replace("name: writer", "name: other"))
    result = run("build", "--device", "cpu", "--seed", "7")
    assert result.exit_code == 0
    assert result.stderr.count(" proofs computed again, with the same results") == 1


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_build_that_leaves_a_step_out_proves_nothing(run: Run, writer: Path) -> None:
    for left_out in (["--no-verify"], ["--no-compile"], ["--no-verify", "--no-compile"], ["--target", "sm80"]):
        result = run("build", "--device", "cpu", *left_out)
        assert result.exit_code == 0
        assert "proved" not in result.output
        assert not Path("generated", "proofs").exists()
        assert not [path for path, text in files_of("generated").items() if b"proved" in text]
        assert '"triton": []' in Path("generated", "writer", "__init__.py").read_text()
        checked = run("build", "--check")
        assert checked.exit_code == 1
        assert checked.stderr.endswith("fix with: mlagen build specs/writer.yaml\n")


@pytest.mark.compilation
@pytest.mark.interpreter
def test_a_version_whose_kernels_changed_is_told_with_what_proves_it_again(run: Run, proved: Path) -> None:
    """Two more versions are said to have proved a small package: one as it is, the other as it was."""
    version, (kept, lost) = installed().version, [one for one in TRITONS if one != installed().version][:2]
    compiled, packages = read_table(proved / "compile.json"), read_table(proved / "packages.json")
    for row in compiled.rows.values():
        row[2] |= {kept: row[2][version], lost: row[2][version]}
    (row,) = packages.rows.values()
    row[1] = {f"{version} {kept} {lost}": row[1][version]}
    packages.rows = {"0123456789abcdef": row}  # of another text
    for table, name in ((compiled, "compile"), (packages, "packages")):
        (proved / f"{name}.json").write_text(table.text())
    for key in compiled.rows:
        del compiled.rows[key][2][lost]
    (proved / "compile.json").write_text(compiled.text())

    result = run("build", "--device", "cpu")
    assert result.exit_code == 0
    assert (
        f"generated/writer: no longer proved under triton {lost}, since kernels changed; "
        f"fix with: mlagen build specs/writer.yaml --triton {version},{lost}"
    ) in " ".join(result.stderr.split())
    init = Path("generated", "writer", "__init__.py").read_text()
    assert f'"triton": {json.dumps(list(minors(sorted((version, kept)))))}' in init
    assert "no longer proved" not in run("build", "--device", "cpu").stderr


def test_no_package_takes_the_folder_of_proofs(run: Run, workspace: Path) -> None:
    (workspace / "specs" / "proofs.yaml").write_text(SPEC.replace("name: small", "name: proofs"))
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 2
    assert "specs/proofs.yaml: name: got 'proofs', which is the folder of proofs; takes another" in result.stderr


def test_a_triton_that_is_not_among_those_proved_is_exit_code_2(run: Run, workspace: Path) -> None:
    result = run("build", "--triton", "3.5")
    assert result.exit_code == 2
    assert "--triton: got '3.5'; takes 3.6" in result.stderr
    assert not (workspace / "generated").exists()


@pytest.mark.interpreter
def test_verified_kernels_are_counted(run: Run, writer: Path) -> None:
    result = run("build", "--no-compile", "--device", "cpu", "--fresh", "--json")
    assert result.exit_code == 0
    (built,) = json.loads(result.stdout)
    assert len(built["cases"]) == sum(row["cases"] for row in built["verified"])
    assert all(case["ok"] for case in built["cases"])


@pytest.mark.compilation
def test_json_on_stdout_is_the_whole_of_stdout(run: Run, writer: Path) -> None:
    (built,) = json.loads(run("build", "--no-verify", "--target", "sm80", "--json").stdout)
    assert {row["target"] for row in built["resources"]} == {"sm80"}
    kernels = ["_layout.py", "_tiles.py", "_cache_kernels.py"]
    runtime = ["_internals.py", "_launch.py", "_ahead.py", "_notes.py", "_calls.py"]
    names = ["_facts.py", *runtime, *kernels, "cache.py", "_signatures.py", "__init__.py"]
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
    ("gpu", "advice"),
    [
        ("sm103", "sm103 runs sm100's portable kernels; name sm100"),
        ("sm110", "sm110 (Thor) runs no target's kernels"),
        ("h100", "h100 runs sm90's kernels; name sm90"),
    ],
)
def test_a_gpu_that_is_no_target_is_told_what_to_name(run: Run, command: str, gpu: str, advice: str) -> None:
    result = run(command, "--target", gpu)
    assert result.exit_code == 2
    assert advice in result.stderr


def test_a_check_names_missing_files_and_a_diff_also_prints_their_text(run: Run, workspace: Path) -> None:
    result = run("build", "--check")
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 12)
    assert result.stderr == "12 generated files differ from their specs\nfix with: mlagen build specs/small.yaml\n"
    assert len(run("build", "--diff").stdout.splitlines()) > 1000


def test_a_check_counts_files_and_unproved_packages_apart(run: Run, workspace: Path) -> None:
    run("build", *TEXT_ONLY)
    assert run("build", "--check").stderr.splitlines()[0] == "1 package is not proved"
    Path("generated", "small", "_facts.py").unlink()
    assert run("build", "--check").stderr.splitlines()[0] == "1 generated file differs from its spec"


def test_a_spec_that_is_named_twice_is_built_once(run: Run, workspace: Path) -> None:
    result = run("build", *TEXT_ONLY, "specs/small.yaml", "specs/small.yaml")
    assert result.exit_code == 0
    assert result.stderr.count("not verified") == 1


def test_of_many_errors_of_a_spec_the_first_are_printed(run: Run, workspace: Path) -> None:
    (workspace / "bad.yaml").write_text("".join(f"field{number}: 1\n" for number in range(40)))
    result = run("build", "bad.yaml")
    lines = result.stderr.splitlines()
    assert (result.exit_code, len(lines)) == (2, 21)
    assert lines[-1] == "and 25 more errors"


@pytest.mark.parametrize("command", [("build", "--no-verify"), ("verify",)])
def test_a_target_the_spec_does_not_name_is_refused(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--target", "sm90")
    assert result.exit_code == 2
    assert "small: none of its targets (sm80, gfx942) is sm90" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "command", [("build", "--no-verify"), ("build", "--no-compile"), ("verify",), ("tune",), ("bench",)]
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    result = run(*command, "specs/small.yaml")
    assert result.exit_code == 3
    first, fix = result.stderr.splitlines()
    assert first == "not installed: torch"
    assert re.fullmatch(r"fix with: pip install ('torch<[\d.]+,>=[\d.]+'|torch)", fix)
    assert not (workspace / "generated").exists()
    assert run("build", *TEXT_ONLY).exit_code == 0  # rendering needs no library


@pytest.mark.compilation
def test_a_build_with_a_triton_that_is_not_supported_says_that_it_proves_nothing(
    run: Run, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"triton {installed().version}; mlagen supports"
    assert said not in run("build", "--no-verify", "--target", "sm80").stderr
    monkeypatch.setattr("mlagen.cli.packages.TRITONS", ("3.4.0", "3.5.1"))
    result = run("build", "--no-verify", "--target", "sm80")
    assert result.exit_code == 0
    assert f"{said} 3.4 to 3.5, so this build proves no package; pass --triton, or run: pip install" in result.stderr


@pytest.mark.thorough
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
