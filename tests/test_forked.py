"""Forked workers: they answer, die and see their surroundings as started ones do."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import forked
import pytest

from mlagen.workers import Limit, Worker, WorkerError, usage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks become children of another process on Linux")

LIMIT = Limit(600)
SERVE = """
import json, os, sys
for line in sys.stdin:
    exec(json.loads(line).get("run", ""))
    seen = {"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "cwd": os.getcwd(), "main": __name__}
    print(json.dumps(seen | {"env": dict(os.environ), "arguments": sys.argv}), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker that is forked: the one before, of the same kind, was started."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    monkeypatch.setattr(forked, "COMPILER", script)
    monkeypatch.setattr(forked, "_sources", {})
    monkeypatch.setattr(forked, "PRELOADED", {"compile": ()})
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-P", str(script), "argument"]
    started, fork = (Worker(command, {**os.environ, "WORKER": "1"}) for _ in range(2))
    started.ask({}, LIMIT)
    started.close()
    yield fork
    fork.close()


def test_a_fork_answers_as_a_child_in_a_group_of_its_own(worker, tmp_path):
    seen = worker.ask({}, LIMIT)
    assert isinstance(worker._process, forked.Forked)
    assert (seen["parent"], seen["group"], seen["main"]) == (os.getpid(), seen["pid"], "__main__")
    assert (seen["cwd"], seen["arguments"]) == (str(tmp_path), [str(tmp_path / "serve.py"), "argument"])
    assert seen["env"] == worker._env
    assert worker.ask({}, LIMIT)["pid"] == seen["pid"]
    found = usage(seen["pid"])
    assert found is not None
    assert found.seconds < 5


@pytest.mark.parametrize(
    ("run", "end"), [("os.kill(os.getpid(), 11)", "SIGSEGV"), ("sys.exit(3)", "exit code 3"), ("1 / 0", "exit code 1")]
)
def test_a_fork_that_dies_is_followed_by_a_fresh_one(worker, run, end):
    before = worker.ask({}, LIMIT)
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": f"print('last words', file=sys.stderr, flush=True); {run}"}, LIMIT)
    assert (caught.value.late, caught.value.end) == ("", end)
    assert caught.value.words.startswith("last words")
    assert worker.ask({}, LIMIT)["pid"] != before["pid"]


def test_a_fork_that_hangs_is_ended(worker):
    worker.ask({}, LIMIT)
    with pytest.raises(WorkerError, match="did nothing for 1 s") as caught:
        worker.ask({"run": "import time; time.sleep(600)"}, Limit(600, idle=1))
    assert caught.value.end == signal.SIGKILL.name


def test_a_fork_has_the_temporary_folder_of_its_environment(worker, tmp_path, monkeypatch):
    other = Worker(worker._command, {**worker._env, "TMPDIR": str(tmp_path)})
    with tempfile.NamedTemporaryFile() as file:
        other.ask({"run": f"import tempfile; open({file.name!r}, 'w').write(tempfile.gettempdir())"}, LIMIT)
        assert Path(file.name).read_text() == str(tmp_path)
    other.close()


def test_workers_of_another_environment_are_started(worker):
    other = Worker(worker._command, {**worker._env, "TRITON_DEBUG": "1"})
    other.ask({}, LIMIT)
    assert not isinstance(other._process, forked.Forked)
    other.close()


def test_a_forked_script_prints_as_a_started_one(tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "_sources", {})
    monkeypatch.setattr(forked, "PRELOADED", {"script": ()})
    (tmp_path / "beside.py").write_text("import os\nNAME = os.environ['NAME']\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside; print(beside.NAME, sys.argv[1:], file=sys.stderr); sys.exit(f'end: {__name__}')"
    )
    started, fork = (forked.run([str(script), "argument"], {**os.environ, "NAME": "a name"}) for _ in range(2))
    assert len(forked._sources) == 1
    assert (fork.returncode, fork.stdout, fork.stderr) == (started.returncode, started.stdout, started.stderr)
    assert (fork.returncode, fork.stderr) == (1, "a name ['argument']\nend: __main__\n")
