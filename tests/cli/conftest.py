"""A workspace with one small spec, and the command line run in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlagen.cli import main

SPEC = """\
name: small
title: A small model
model: {num_heads: 4, kv_lora_rank: 32, qk_rope_head_dim: 16, v_head_dim: 32, dtype: fp16}
attention: {kind: sparse, topk: 16}
cache: {layout: fp16}
wrappers: [flash_mla_sparse_fwd]
targets: [sm80, gfx942]
"""

Run = Callable[..., Result]


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
