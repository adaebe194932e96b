"""`mlagen build` in a folder that holds the package of another spec of the same name."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_specs import SPEC, Run

TEXT_ONLY = ("--no-compile", "--no-verify")
FOLDER = Path("generated", "small")


@pytest.fixture
def built(run: Run, workspace: Path) -> Path:
    """A built spec outside of a folder `specs`."""
    (workspace / "my.yaml").write_text(SPEC)
    assert run("build", "my.yaml", *TEXT_ONLY).exit_code == 0
    return workspace / "my.yaml"


def test_the_package_of_another_spec_is_not_replaced_unless_forced(run: Run, built: Path) -> None:
    before = (FOLDER / "__init__.py").read_bytes()
    other = built.with_name("other.yaml")
    other.write_text(SPEC.replace("A small model", "Another model").replace("num_heads: 4", "num_heads: 8"))
    refused = run("build", "other.yaml", *TEXT_ONLY)
    assert refused.exit_code == 1
    said = "generated/small: holds the package of 'A small model', not of 'Another model', and was not replaced\n"
    assert refused.stderr.startswith(said)
    assert "give the spec another name, or replace the package with --force" in refused.stderr
    assert (FOLDER / "__init__.py").read_bytes() == before
    forced = run("build", "other.yaml", *TEXT_ONLY, "--force")
    assert forced.exit_code == 0
    assert forced.stderr.startswith("generated/small: replaces a package; changed in its spec: title, model\n")
    assert (FOLDER / "__init__.py").read_bytes() != before


def test_changed_parts_of_a_spec_are_named(run: Run, built: Path) -> None:
    built.write_text(SPEC.replace("topk: 16", "topk: 32"))
    result = run("build", "my.yaml", *TEXT_ONLY)
    assert result.exit_code == 0
    assert result.stderr.startswith("generated/small: replaces a package; changed in its spec: attention\n")


def test_a_moved_spec_is_the_same(run: Run, built: Path) -> None:
    built.rename(built.with_name("moved.yaml"))
    assert "replace" not in run("build", "moved.yaml", *TEXT_ONLY).stderr
    assert "replace" not in run("build", "specs/small.yaml", *TEXT_ONLY).stderr


def test_in_a_folder_specs_a_title_may_change(run: Run, workspace: Path) -> None:
    assert run("build", *TEXT_ONLY).exit_code == 0
    path = workspace / "specs" / "small.yaml"
    path.write_text(SPEC.replace("A small model", "Another title"))
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 0
    assert result.stderr.startswith("generated/small: replaces a package; changed in its spec: title\n")


def test_a_folder_without_a_package_is_no_ones(run: Run, workspace: Path) -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "notes.txt").write_text("mine")
    result = run("build", *TEXT_ONLY)
    assert result.exit_code == 0
    assert "replace" not in result.stderr
