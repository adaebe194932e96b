"""Wheels of specs, each written once."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from padded_spec import spec_of

from mlagen.emit import render
from mlagen.emit.wheel import engine_wheel, write_wheel
from mlagen.plan import load_plan
from mlagen.plan.tritons import TRITONS
from mlagen.proofs import Proofs, rendered_key

ROOT = Path(__file__).resolve().parents[2]
WheelOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> WheelOf:
    """The wheel of one of the specs that come with mlagen, or of the padded one, by the spec's name."""
    folder = tmp_path_factory.mktemp("wheels")
    made: dict[str, Path] = {}

    def wheel(name: str) -> Path:
        if name not in made:
            plan = load_plan(spec_of(name, folder))
            proved = Proofs(ROOT / "generated").tritons(rendered_key(render(plan)))
            made[name] = write_wheel(*engine_wheel(plan, "vllm", proved or TRITONS), folder)
        return made[name]

    return wheel


@pytest.fixture(scope="session")
def unpacked(wheel_of: WheelOf, tmp_path_factory: pytest.TempPathFactory) -> WheelOf:
    """The folder with a wheel's files, by the spec's name."""
    folder = tmp_path_factory.mktemp("unpacked")

    def unpack(name: str) -> Path:
        if not (folder / name).exists():
            zipfile.ZipFile(wheel_of(name)).extractall(folder / name)
        return folder / name

    return unpack
