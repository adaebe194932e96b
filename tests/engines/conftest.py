"""Wheels of specs, each written once by the workers of a run."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from once import once
from padded_spec import spec_of

from mlagen.emit import render
from mlagen.emit.wheel import engine_wheel, write_wheel
from mlagen.plan import load_plan
from mlagen.plan.tritons import TRITONS
from mlagen.proofs import Proofs, rendered_key

ROOT = Path(__file__).resolve().parents[2]
WheelOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def wheel_of(shared: Path) -> WheelOf:
    """The wheel of one of the specs that come with mlagen, or of the padded one, by the spec's name."""
    folder = shared / "wheels"
    folder.mkdir(exist_ok=True)

    def make(name: str) -> str:
        plan = load_plan(spec_of(name, folder))
        proved = Proofs(ROOT / "generated").tritons(rendered_key(render(plan)))
        return str(write_wheel(*engine_wheel(plan, "vllm", proved or TRITONS), folder))

    return lambda name: Path(once(folder / f"{name}.json", lambda: make(name)))


@pytest.fixture(scope="session")
def unpacked(wheel_of: WheelOf, shared: Path) -> WheelOf:
    """The folder with a wheel's files, by the spec's name."""
    folder = shared / "unpacked"
    folder.mkdir(exist_ok=True)

    def make(name: str) -> str:
        zipfile.ZipFile(wheel_of(name)).extractall(folder / name)
        return str(folder / name)

    return lambda name: Path(once(folder / f"{name}.json", lambda: make(name)))
