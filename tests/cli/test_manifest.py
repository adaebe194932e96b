"""The manifest as text and as a value, and which of its versions still hold for a package that changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_specs import Run

from mlagen.cli.manifest import COLUMNS, MANIFEST, Manifest, keys_under, make_manifest, read_manifest, still_proved
from mlagen.compile import Resources
from mlagen.emit import Package

TARGETS = ("sm80", "gfx942")
TAKEN = (255, None, 8, 0, 4096)
ONE = Resources(
    module="cache",
    kernel="_write_kernel",
    variant="ALIGNMENT=16",
    target="sm80",
    num_warps=4,
    num_stages=1,
    triton="3.7.1",
    key="00000000000000aa",
    registers=255,
    scalar_registers=None,
    spills=8,
    loop_spills=0,
    shared=4096,
    shared_limit=166912,
    block_h=None,
    tabled=False,
    tensor_memory=0,
    instructions={},
    seconds=1.0,
    cached=False,
)
OTHER = replace(ONE, key="00000000000000bb", target="gfx942", scalar_registers=96, registers=128)


@pytest.fixture(scope="module")
def nothing() -> Package:
    """A package without files."""
    return Package("small", ())


def proofs(*versions: str) -> dict[str, list[Resources]]:
    return {version: [replace(one, triton=version) for one in (ONE, OTHER)] for version in versions}


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path, nothing: Package) -> None:
    made = make_manifest(nothing, proofs("3.7.1", "3.10.0", "3.6.0"))
    (tmp_path / MANIFEST).write_text(made.text())
    assert read_manifest(tmp_path) == made
    assert read_manifest(tmp_path).text() == made.text()  # type: ignore[union-attr]
    data = json.loads(made.text())
    assert data["columns"] == list(COLUMNS)
    assert [row["3.10.0"] for row in data["variants"]] == [[128, 96, 8, 0, 4096], list(TAKEN)]


def test_versions_stand_oldest_first_and_variants_by_target_and_kernel(nothing: Package) -> None:
    made = make_manifest(nothing, proofs("3.10.0", "3.7.1", "3.6.0"))
    assert made.tritons == tuple(made.measured) == ("3.6.0", "3.7.1", "3.10.0")
    assert list(made.variants) == [OTHER.key, ONE.key]
    again = make_manifest(nothing, {version: found[::-1] for version, found in proofs("3.6.0", "3.7.1").items()})
    assert again.text() == make_manifest(nothing, proofs("3.7.1", "3.6.0")).text()


def test_a_variant_of_one_version_alone_has_that_column_alone(tmp_path: Path, nothing: Package) -> None:
    made = make_manifest(nothing, {"3.6.0": [ONE], "3.7.1": [ONE, OTHER]})
    assert [sorted(set(row) & {"3.6.0", "3.7.1"}) for row in json.loads(made.text())["variants"]] == [
        ["3.7.1"],
        ["3.6.0", "3.7.1"],
    ]
    (tmp_path / MANIFEST).write_text(made.text())
    assert read_manifest(tmp_path) == made


def test_versions_that_still_hold_stay_beside_those_compiled_anew(nothing: Package) -> None:
    earlier = make_manifest(nothing, {"3.6.0": [ONE, OTHER], "3.7.1": [ONE]})
    made = make_manifest(nothing, {"3.7.1": [replace(ONE, registers=100)], "3.8.0": [ONE]}, earlier)
    assert made.tritons == ("3.6.0", "3.7.1", "3.8.0")
    assert made.measured["3.6.0"] == earlier.measured["3.6.0"]
    assert made.measured["3.7.1"][ONE.key] == (100, *TAKEN[1:])


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"triton": "3.7.1", "files": {}, "resources": []}',
        '{"triton": ["3.7.1"], "columns": ["registers"], "files": {}, "variants": []}',
    ],
)
def test_what_is_no_manifest_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    assert read_manifest(tmp_path) is None


@pytest.fixture
def package(run: Run, workspace: Path) -> Path:
    """The folder of the small package, as text alone."""
    assert run("build", "--no-compile", "--no-verify").exit_code == 0
    return workspace / "generated" / "small"


def proved(package: Path, *versions: str) -> Manifest:
    """A manifest that says all the package's variants were compiled under the versions."""
    measured: dict[str, dict[str, tuple[int | None, ...]]] = {}
    variants: dict[str, dict[str, Any]] = {}
    for version in versions:
        measured[version] = dict.fromkeys(keys_under(package, TARGETS, version), TAKEN)
        variants |= {key: {"key": key} for key in measured[version]}
    return Manifest(versions, {}, {}, variants, measured)


@pytest.mark.compilation
def test_a_version_holds_as_long_as_no_kernel_changes(package: Path) -> None:
    manifest = proved(package, "3.6.0")
    assert len(manifest.variants) > 10
    held = still_proved(manifest, package, TARGETS, manifest.tritons)
    assert held is not None
    assert (held.tritons, held.measured) == (manifest.tritons, manifest.measured)

    file = package / "sparse_fwd.py"
    text = file.read_text()
    for changed in (
        "# Another header.\n\n" + text,
        text + "\n\ndef _helper() -> int:\n    return 1\n",
    ):
        assert changed != text
        file.write_text(changed)
        held = still_proved(manifest, package, TARGETS, manifest.tritons)
        assert held is not None
        assert held.tritons == manifest.tritons

    file = package / "_sparse_fwd_kernels.py"
    text = file.read_text()
    assert text.count("tl.dot(") > 0
    file.write_text(text.replace("tl.dot(", "1.0 * tl.dot(", 1))
    held = still_proved(manifest, package, TARGETS, manifest.tritons)
    assert held is not None
    assert (held.tritons, held.measured) == ((), {})


@pytest.mark.compilation
def test_only_the_versions_asked_for_are_looked_at_and_each_for_itself(package: Path) -> None:
    manifest = proved(package, "3.6.0", "3.8.0")
    some = next(iter(manifest.variants))
    del manifest.measured["3.8.0"][some]  # a variant that was not compiled under 3.8.0
    for asked, holds in ((("3.6.0", "3.8.0"), ("3.6.0",)), (("3.8.0",), ()), ((), ()), (("3.9.0",), ())):
        held = still_proved(manifest, package, TARGETS, asked)
        assert held is not None
        assert held.tritons == holds
    assert still_proved(None, package, TARGETS, ["3.6.0"]) is None
