"""Fixtures that the tests of all rooms share."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import forked
import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: workers share the cores, and the threads of each would wait for the others'.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Rendering makes millions of nodes of syntax trees, few of them in cycles. At the default of 700 the collector looks
# through them so often that some files take twice the CPU time.
gc.set_threshold(50_000, 10, 10)

# How long a machine that is busy takes to draw an input says nothing of the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

forked.install()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of a run share, for `once.once`. It is empty when the run begins."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the test start, since it depends on the second that this takes."""
    monkeypatch.setattr(forked, "_source", lambda kind, env: None)


@pytest.fixture(scope="session")
def compiled(shared: Path) -> Path:
    """A folder for compiled kernels, by content. The workers of a run share it; it is empty when the run begins."""
    folder = shared / "compiled"
    folder.mkdir(exist_ok=True)
    return folder
