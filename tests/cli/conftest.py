"""A workspace with one small spec, and the command line run in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_specs import SPEC, Run
from click.testing import CliRunner, Result

from mlagen.cli import main


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that all workspaces share, so that what several of them build is compiled once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def workspace(tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "small.yaml").write_text(SPEC)
    monkeypatch.setenv("XDG_CACHE_HOME", str(results))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(workspace: Path) -> Run:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, [os.fspath(argument) for argument in arguments], catch_exceptions=False)

    return call
