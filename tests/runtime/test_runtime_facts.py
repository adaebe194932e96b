"""`_facts` of the runtime room: the interface of the file that `build` writes for each package."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.emit.render import render
from mlagen.plan import load_plan
from mlagen.plan.tritons import MINORS
from mlagen.runtime import _facts, _launch

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.yaml"))
PLANS = {path.stem: load_plan(path) for path in SPECS}


def facts_of(name: str) -> dict[str, object]:
    """The names that a package's `_facts` binds."""
    (text,) = [file.text for file in render(PLANS[name]).files if file.name == "_facts.py"]
    space: dict[str, object] = {}
    exec(text, space)
    return {key: value for key, value in space.items() if key.isupper()}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_packages_facts_have_the_names_and_types_of_the_interface(name: str) -> None:
    interface = {key: value for key, value in vars(_facts).items() if key.isupper()}
    found = facts_of(name)
    assert found.keys() == interface.keys()
    for key, value in found.items():
        assert type(value) is type(interface[key]), key


def test_the_interface_has_the_facts_of_todays_targets() -> None:
    found = facts_of("dsv32")
    for key in ("E4M3_TARGETS", "E4M3_ROUNDING_TARGETS", "PDL_TARGETS", "PDL_MAX_PROGRAMS", "TARGETS"):
        assert found[key] == getattr(_facts, key), key


def test_packages_support_the_tritons_of_the_plan() -> None:
    assert (MINORS[0], MINORS[-1]) == _launch.SUPPORTED


def test_every_module_of_the_room_is_copied_into_some_package() -> None:
    room = {path.name for path in Path(_facts.__file__).parent.glob("*.py")} - {
        "__init__.py",
        "_facts.py",
        "_signatures.py",
    }
    copied = {file.name: file.text for plan in PLANS.values() for file in render(plan).files if file.name in room}
    assert copied.keys() == room
    for name, text in copied.items():
        body = Path(_facts.__file__).with_name(name).read_text(encoding="utf-8")
        assert text.endswith("\n\n" + body)
