"""Random calls in the interpreter: a correct package, broken ones, and lines that repeat a wrong call."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checked_in import GENERATED, package_of

from mlagen.verify.random import mutants
from mlagen.verify.random.__main__ import main
from mlagen.verify.random.dice import Dice
from mlagen.verify.random.pool import Settings, random_calls
from mlagen.verify.random.report import file_hashes

ROOT = Path(__file__).resolve().parents[2]


def _settings(folder: Path, **changes: object) -> Settings:
    settings = {"device": "cpu", "seconds": 60.0, "processes": 1, "batch": 3, "batch_seconds": 60.0, "limit": 60.0}
    return Settings((str(folder),), **{**settings, **changes})  # type: ignore[arg-type]


def _broken(tmp_path: Path, file: str, old: str, new: str) -> Path:
    folder = tmp_path / "dsv32"
    shutil.copytree(package_of("dsv32"), folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    return folder


def test_sizes_are_log_uniform_and_the_same_for_the_same_name():
    assert [Dice("a").size(0, 1000) for _ in range(3)] == [Dice("a").size(0, 1000)] * 3
    dice = Dice("b")
    drawn = [dice.size(0, 1000) for _ in range(3000)]
    assert min(drawn) == 0
    assert 500 < max(drawn) <= 1000
    assert 0.05 < sum(size == 0 for size in drawn) / 3000 < 0.15
    assert 0.4 < sum(size < 32 for size in drawn) / 3000 < 0.6
    assert {dice.size(3, 5) for _ in range(100)} == {3, 4, 5}
    assert dice.size(7, 7) == 7


@pytest.mark.interpreter
def test_each_family_of_a_package_is_called_and_right():
    report = random_calls(_settings(package_of("dsv32"), most_calls=40, seed=3), print)
    assert report.failures == []
    families = {name.split("/")[1] for name in report.stations}
    around = {"cache", "prologue", "indices", "indexer_cache"}
    assert families == {"sparse_fwd", *around, "topk", "mqa_logits", "indexer_select"}
    assert report.total.calls >= 40
    assert report.packages["dsv32"] == file_hashes(package_of("dsv32"))
    assert json.loads(json.dumps(report.to_json()))["wrong"] == 0


@pytest.mark.interpreter
def test_a_broken_kernel_is_found_and_its_line_repeats_it(tmp_path):
    folder = _broken(
        tmp_path, "_topk_kernels.py", "0 - bits, bits + 0x80000000)", "bits - 0x80000000, bits + 0x80000000)"
    )
    lines: list[str] = []
    report = random_calls(_settings(folder, only=("topk/*",), most_wrong=1), lines.append)
    assert report.total.wrong >= 1
    command, _, said = lines[0].partition("  # ")
    assert "differ" in said
    program, *arguments = shlex.split(command)
    assert program == "python"
    again = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert said in again.stdout
    right = [argument if argument != str(folder) else str(package_of("dsv32")) for argument in arguments]
    assert subprocess.run([sys.executable, *right], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.interpreter
def test_a_call_that_hangs_is_wrong_and_the_process_is_replaced(tmp_path):
    folder = _broken(tmp_path, "topk.py", "    _launch.device_facts(logits.device)\n", "    while True: pass\n")
    lines: list[str] = []
    report = random_calls(
        _settings(folder, only=("topk/*", "cache/*"), most_wrong=2, limit=3.0, batch_seconds=0.5), lines.append
    )
    assert report.hangs == 2
    assert all("hang: " in line for line in lines)


def test_the_package_alone_needs_no_pydantic():
    names = ("pydantic", "click", "jinja2", "rich", "yaml")
    program = f"import sys; sys.modules.update(dict.fromkeys({names}))\nimport mlagen.verify.random.__main__\n"
    program += "import mlagen.verify.random.worker, mlagen.verify.random.station"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_bad_usage_is_one_line(capsys):
    arguments = [str(package_of("dsv32")), "--device", "cpu", "--seconds", "1", "--only", "nothing/*"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == "no family and kernel match nothing/*\n"
    assert main([str(GENERATED / "hyv4"), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"{GENERATED / 'hyv4'}: the package is kept as a diff; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the calls run")
def test_random_calls_and_mutants_without_a_gpu_are_refused(capsys):
    assert main([str(package_of("dsv32"))]) == 2
    assert capsys.readouterr().err == "--device cuda: no CUDA or ROCm device; takes cpu on this machine\n"
    with pytest.raises(SystemExit) as ended:
        mutants.main([str(package_of("dsv32"))])
    assert ended.value.code == 2
    done = capsys.readouterr()
    assert "noticed" not in done.out  # it said that 100 % of no mutant were
    assert done.err.endswith("error: mutants run on a GPU, and torch sees none; --list and --read need none\n")


@pytest.mark.interpreter
def test_calls_through_operators_are_right():
    report = random_calls(_settings(package_of("odd"), most_calls=30, seed=2), print)
    assert report.failures == []
    assert 0 < report.operator_calls < report.total.calls
    assert report.to_json()["operator_calls"] == report.operator_calls


@pytest.mark.interpreter
def test_a_wrong_call_of_an_operator_is_found_and_its_line_repeats_it(tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(package_of("odd"), folder)
    text = (folder / "ops.py").read_text()
    old = "        wrapper(*args, **kwargs)\n"
    assert old in text
    (folder / "ops.py").write_text(text.replace(old, "        pass\n"))
    lines: list[str] = []
    settings = _settings(folder, only=("sparse_fwd/*", "merge_states/*"), most_wrong=1)
    assert random_calls(settings, lines.append).total.wrong >= 1
    command, _, said = lines[0].partition("  # ")
    assert ", operator: " in said
    _, *arguments = shlex.split(command)
    again = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert "through its operator" in again.stdout
    assert said in again.stdout
