"""The keys of proofs depend on code and spec, and not on names and comments."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from checked_in import spec_of

from mlagen.digest import dump
from mlagen.emit import render
from mlagen.plan import load_plan, make_plan
from mlagen.proofs import rendered_key
from mlagen.proofs.sources import CALL, MLAGEN, OPS, SIMULATOR, VERIFY, _closure, family_code, family_names, package_key

SPECS = MLAGEN.parent / "specs"


@pytest.mark.parametrize("path", [*sorted((MLAGEN / "verify").rglob("*.py")), *(MLAGEN / "compile").glob("*.py")])
def test_a_tree_is_written_as_python_3_11_does(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if hasattr(node, "type_params"):
            del node.type_params  # which Python 3.12 brought
    assert dump(tree) == ast.dump(tree, **({"show_empty": True} if hasattr(ast, "TypeVar") and _omits() else {}))


def _omits() -> bool:
    """Whether `ast.dump` leaves out empty lists, as it does from Python 3.13 on."""
    return "body" not in ast.dump(ast.parse(""))


def texts_of(**changes: object) -> dict[str, str]:
    spec = load_plan(spec_of("odd")).spec
    return {file.name: file.text for file in render(make_plan(spec.model_copy(update=changes))).files}


def test_a_renamed_package_has_the_key_of_the_known_one() -> None:
    assert package_key(texts_of(name="mine", title="My model")) == package_key(texts_of())


def test_a_key_does_not_depend_on_the_tritons_that_hold() -> None:
    plan = load_plan(spec_of("odd"))
    packages = [render(plan), render(plan, ("3.7.1",)), render(plan, ("3.6.0", "3.9.0")), render(plan, ())]
    assert len({rendered_key(package) for package in packages}) == 1
    assert len({package.files[-1].text for package in packages}) == 4  # of __init__.py


@pytest.mark.parametrize(
    ("old", "new", "other"),
    [
        ("# Code generated", "# Made", False),
        ("import torch\n", "import torch\n\n# A comment.\n", False),
        ("tl.dot(", "1.0 * tl.dot(", True),
        ("tl.program_id(0)", "tl.program_id(1)", True),
    ],
)
def test_comments_do_not_count_and_code_does(old: str, new: str, other: bool) -> None:
    texts = texts_of()
    name = "_sparse_fwd_kernels.py"
    assert old in texts[name] or not other
    changed = {**texts, name: texts[name].replace(old, new, 1)}
    assert (package_key(changed) != package_key(texts)) == other


def test_the_spec_counts() -> None:
    texts = texts_of()
    init = texts["__init__.py"]
    assert '"topk_length"' in init
    assert package_key({**texts, "__init__.py": init.replace('"topk_length"', '"other"')}) != package_key(texts)


def test_the_families_are_those_that_verification_knows() -> None:
    from mlagen.verify.families import FAMILIES

    assert sorted(family_names()) == sorted(family.name for family in FAMILIES)


def test_a_family_runs_through_its_own_folder_and_what_that_imports() -> None:
    folder = {f"{VERIFY}.merge_states.{path.stem}" for path in (MLAGEN / "verify" / "merge_states").glob("*.py")}
    deep = _closure(folder, deep=True)
    assert {f"{VERIFY}.checks", f"{VERIFY}.tolerance", f"{VERIFY}.merge_states.cases"} <= deep
    assert not {name for name in deep if name.startswith(f"{VERIFY}.topk.")}
    harness = _closure({f"{VERIFY}.worker"}, deep=False)
    assert {f"{VERIFY}.interpreter", f"{CALL}.subject", f"{CALL}.facts"} <= harness
    assert not {name for name in harness if name.count(".") > 2 and not name.startswith(CALL)}
    simulator = {f"{VERIFY}.gluon.{path.stem}" for path in (MLAGEN / "verify" / "gluon").glob("[a-z]*.py")}
    assert simulator <= _closure({SIMULATOR}, deep=True)
    assert len({family_code(family) for family in (*family_names(), OPS)}) == len(family_names())
