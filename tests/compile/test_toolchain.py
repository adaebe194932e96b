"""The Tritons that compile: names, folders, and cleanup of a fetch."""

from __future__ import annotations

import pytest

from mlagen.compile import Toolchain, compile_jobs, default_cache_dir, installed, parse_tritons, toolchain
from mlagen.errors import ToolError, UsageError
from mlagen.plan.tritons import TRITONS

OTHERS = [version for version in TRITONS if version != installed().version]
FETCHED = {version: default_cache_dir() / "triton" / version for version in OTHERS}


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("all", TRITONS),
        ("3.8,3.6", ("3.6.0", "3.8.0")),
        ("3.9.0, 3.7 ,3.6.0", ("3.6.0", "3.7.1", "3.9.0")),
        ("3.7,3.7.1", ("3.7.1",)),
    ],
)
def test_versions_are_taken_once_and_oldest_first(text, versions):
    assert parse_tritons(text) == versions


def test_without_a_name_the_installed_one_is_taken():
    assert parse_tritons(None) == (installed().version,)
    assert toolchain(installed().version) == installed()
    assert installed().folder is None


@pytest.mark.parametrize(
    ("text", "word"), [("3.5", "3.5"), ("", ""), ("3.8,", ""), ("3.7.0", "3.7.0"), ("3", "3"), ("3.6,all", "all")]
)
def test_an_unproved_version_is_reported_with_the_proved_ones(text, word):
    with pytest.raises(UsageError) as caught:
        parse_tritons(text)
    assert str(caught.value) == f"--triton: got {word!r}; takes 3.6, 3.7, 3.8, 3.9, with commas between, or all"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and a pip that reaches no package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "mlagen" / "triton"


def test_a_triton_that_was_fetched_is_not_fetched_again(offline):
    folder = offline / OTHERS[0]
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "__init__.py").touch()
    found = toolchain(OTHERS[0])
    assert found == Toolchain(OTHERS[0], folder)
    assert found.tool("cuobjdump") == folder / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"


def test_a_failed_fetch_is_reported_and_leaves_nothing_behind(offline):
    with pytest.raises(ToolError, match=rf"triton {OTHERS[-1]} could not be fetched into .*{OTHERS[-1]}") as caught:
        toolchain(OTHERS[-1])
    assert "triton" in (caught.value.hint or "")
    assert list(offline.iterdir()) == []


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.compilation
def test_another_triton_compiles_and_reads_its_own_machine_code(package, make_job, tmp_path, version):
    if not (FETCHED[version] / "triton" / "__init__.py").is_file():
        pytest.skip(f"triton {version} was not fetched")
    jobs = [make_job("_tiny_kernel", target) for target in ("sm90", "gfx942")]
    found = compile_jobs(package, jobs, toolchain=toolchain(version), workers=1, cache_dir=tmp_path)
    assert [one.triton for one in found] == [version, version]
    assert found[0].instructions["HGMMA"] > 0
    assert all(one.registers > 0 and one.shared > 0 for one in found)
