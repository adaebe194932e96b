"""`_facts` of the runtime room: the interface of the file that `build` writes for each package."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.emit.render import render
from mlagen.plan import TopkPlan, load_plan
from mlagen.plan.tritons import MINORS
from mlagen.runtime import _facts, _launch, _tiles, _topk

SPECS = sorted((Path(__file__).parents[2] / "specs").glob("*.yaml"))
PLANS = {path.stem: load_plan(path) for path in SPECS}


def facts_of(name: str) -> dict[str, object]:
    """The names that a package's `_facts` binds."""
    (text,) = [file.text for file in render(PLANS[name]).files if file.name == "_facts.py"]
    space: dict[str, object] = {}
    exec(compile(text, "<facts>", "exec", dont_inherit=True), space)
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
    generated = {"_facts.py", "_signatures.py", "_tiles.py"}  # interfaces of files that each package has its own of
    room = {path.name for path in Path(_facts.__file__).parent.glob("*.py")} - generated - {"__init__.py"}
    copied = {file.name: file.text for plan in PLANS.values() for file in render(plan).files if file.name in room}
    assert copied.keys() == room
    for name, text in copied.items():
        body = Path(_facts.__file__).with_name(name).read_text(encoding="utf-8")
        assert text.endswith("\n\n" + body)


def test_top_k_has_the_numbers_of_the_plan() -> None:
    family = PLANS["dsv32"].find(TopkPlan)
    assert family is not None
    assert (family.most_k, family.long_registers) == (_topk.MOST_K, _topk.LONG_REGISTERS)
    assert (*_topk.SELECTS, _topk.MERGE) == (*family.WRAPPERS,)


def test_the_interface_has_the_tables_of_a_package() -> None:
    (text,) = [file.text for file in render(PLANS["dsv32"]).files if file.name == "_tiles.py"]
    space: dict[str, object] = {"__name__": "mlagen.runtime._tiles", "__package__": "mlagen.runtime"}
    exec(compile(text, "<facts>", "exec", dont_inherit=True), space)
    names = [name for name in vars(_tiles) if "topk" in name.lower()]
    assert names
    for name in names:
        interface, found = getattr(_tiles, name), space[name]
        if isinstance(interface, type):
            assert interface.__annotations__ == getattr(found, "__annotations__", None), name
        elif isinstance(interface, list):
            assert isinstance(found, list)
            assert [type(one).__name__ for one in interface[0]] == [type(one).__name__ for one in found[0]], name
        else:
            assert type(interface) is type(found), name
