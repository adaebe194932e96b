"""Of several processes that warm a package up, one compiles at a time: `_ahead.taking_turns`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mlagen.emit import apply, compare, render
from mlagen.plan import make_plan
from mlagen.spec import load

pytestmark = pytest.mark.thorough

TEXT = """\
name: writer
title: A small model
model: {num_heads: 4, kv_lora_rank: 32, qk_rope_head_dim: 16, v_head_dim: 32, dtype: fp16}
attention: {kind: sparse, topk: 16}
cache: {layout: fp16}
wrappers: [concat_and_cache_mla]
targets: [sm90]
"""
# Prints its progress, and inside waits for a line, or for its end.
RANK = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from writer import _ahead
_ahead.triton.knobs.cache.dir, _ahead.WAIT_SECONDS = sys.argv[1], 0.0
with _ahead.taking_turns("sm90"):
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
"""
WAITS = "writer: waiting for a process that compiles; lock: "


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "writer.yaml").write_text(TEXT)
    apply(compare(render(make_plan(load(folder / "writer.yaml"))), folder / "writer"))
    return folder


class Rank:
    """A process that takes its turn."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    def says(self) -> str:
        return self.stdout.readline().strip()

    def goes_on(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()


@contextmanager
def ranks(site: Path, cache: Path, count: int) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(cache)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(site)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            found.append(Rank(process))
        yield found


def test_one_compiles_while_the_others_wait_and_then_go_on_together(site: Path, tmp_path: Path) -> None:
    cache = tmp_path / "not there yet"
    with ranks(site, cache, 1) as (first,):
        assert first.says() == "in"
        with ranks(site, cache, 2) as others:
            assert [other.says() for other in others] == [f"{WAITS}{cache / '.writer-sm90.lock'}"] * 2
            first.goes_on()
            assert first.says() == "out"
            assert [other.says() for other in others] == ["in"] * 2  # before either is out
            for other in others:
                other.goes_on()
            assert [other.says() for other in others] == ["out"] * 2


def test_a_process_that_dies_leaves_no_lock(site: Path, tmp_path: Path) -> None:
    with ranks(site, tmp_path, 1) as (first,):
        assert first.says() == "in"
        with ranks(site, tmp_path, 1) as (other,):
            assert other.says().startswith(WAITS)
            first.process.kill()
            assert other.says() == "in"
            other.goes_on()
    with ranks(site, tmp_path, 1) as (later,):
        assert later.says() == "in"


@pytest.mark.parametrize("which", ["a file", "read-only"])
def test_without_file_locks_nothing_waits(site: Path, tmp_path: Path, which: str) -> None:
    cache = tmp_path / "cache"
    if which == "a file":
        cache.touch()
    else:
        cache.mkdir()
        (cache / ".writer-sm90.lock").mkdir()  # which root cannot open either
    with ranks(site, cache, 2) as both:
        assert [rank.says() for rank in both] == ["in"] * 2
        for rank in both:
            rank.goes_on()
        assert [rank.says() for rank in both] == ["out"] * 2


def test_warmup_takes_its_turn_before_it_compiles(site: Path) -> None:
    text = (site / "writer" / "__init__.py").read_text()
    turn = text.index("with _ahead.taking_turns(name):\n")
    assert turn < text.index("    _ahead.take_compiled(name)\n") < text.index("    _launch.compile_all(")
