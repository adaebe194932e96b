"""A workspace with one small spec, and the command line run in it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from cli_specs import SPEC, WRITER, Run
from click.testing import CliRunner, Result

from mlagen.cli import main


@pytest.fixture
def workspace(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "small.yaml").write_text(SPEC)
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    monkeypatch.setattr("mlagen.cli.progress.FIRST_LINE_S", threading.TIMEOUT_MAX / 2)  # a busy machine is slow
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def writer(workspace: Path) -> Path:
    """The spec of the workspace, with one kernel."""
    (workspace / "specs" / "small.yaml").unlink()
    path = workspace / "specs" / "writer.yaml"
    path.write_text(WRITER)
    return path


@pytest.fixture
def run(workspace: Path) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, [os.fspath(argument) for argument in arguments], catch_exceptions=False)

    return call
