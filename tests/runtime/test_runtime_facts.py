"""`_facts` of the runtime room: the interface of the file that each checked-in package has."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_in import ROOT, package_of, spec_of

from mlagen.plan import TopkPlan, load_plan
from mlagen.plan.tritons import MINORS
from mlagen.runtime import _facts, _launch, _tiles, _topk

SPECS = sorted((ROOT / "specs").glob("*.yaml"))


def facts_of(name: str) -> dict[str, object]:
    """The names that a package's `_facts` binds."""
    text = (package_of(name) / "_facts.py").read_text(encoding="utf-8")
    space: dict[str, object] = {}
    exec(compile(text, "<facts>", "exec", dont_inherit=True), space)
    return {key: value for key, value in space.items() if key.isupper()}


@pytest.mark.parametrize("name", [path.stem for path in SPECS])
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
    files = [path for spec in SPECS for path in package_of(spec.stem).glob("*.py") if path.name in room]
    copied = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert copied.keys() == room
    for name, text in copied.items():
        body = Path(_facts.__file__).with_name(name).read_text(encoding="utf-8")
        assert text.endswith("\n\n" + body)


def test_top_k_has_the_numbers_of_the_plan() -> None:
    family = load_plan(spec_of("dsv32")).find(TopkPlan)
    assert family is not None
    assert (family.most_k, family.long_registers) == (_topk.MOST_K, _topk.LONG_REGISTERS)
    assert (*_topk.SELECTS, _topk.MERGE) == (*family.WRAPPERS,)


def test_the_interface_has_the_tables_of_a_package() -> None:
    text = (package_of("dsv32") / "_tiles.py").read_text(encoding="utf-8")
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
