"""Variants that a package lists: from a worker, cached by content, and compiled as in a launch."""

from __future__ import annotations

import re

import pytest

from mlagen.compile import Toolchain, compile_jobs, content_keys, installed, list_variants, process
from mlagen.compile.cache import ResultCache
from mlagen.errors import ToolError
from mlagen.plan.tritons import TRITONS, minor

pytestmark = pytest.mark.compilation

TARGETS = ("gfx942", "sm90")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def replace(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def unlisted(copied):
    """The package without its list."""
    replace(copied / "__init__.py", "def variants(", "def _variants(")
    return copied


def test_variants_are_listed_by_target_as_jobs_that_say_all(package, cache):
    jobs = list_variants(package, TARGETS, cache_dir=cache)
    assert [(job.target, job.variant) for job in jobs] == [
        ("gfx942", "BLOCK_M=64 SCALE=0.5, no bias"),
        ("sm90", "BLOCK_M=64 SCALE=0.5, no bias"),
        ("sm90", "BLOCK_M=64 SCALE=0.5"),
    ]
    bare, given = jobs[1:]
    pointers = (("a_ptr", "*bf16"), ("b_ptr", "*bf16"))
    assert bare.signature == (*pointers, ("out_ptr", "*fp32"), ("rows", "i32"))
    assert bare.constexprs == (("bias_ptr", None), ("BLOCK_M", 64), ("SCALE", 0.5))
    assert given.signature == (*pointers, ("bias_ptr", "*fp32"), ("out_ptr", "*fp32"), ("rows", "i32"))
    assert {(job.module, job.kernel, job.num_warps, job.num_stages) for job in jobs} == {("tiny", "_tiny_kernel", 4, 2)}
    assert list_variants(package, TARGETS[::-1], cache_dir=cache) == [*jobs[1:], jobs[0]]


@pytest.mark.usefixtures("started")
def test_a_list_is_cached_by_content(package, copied, cache, monkeypatch):
    jobs = list_variants(package, TARGETS, cache_dir=cache)
    monkeypatch.setattr(process, "TIMEOUT_S", 0.0)  # no worker answers in time
    assert list_variants(copied, TARGETS, cache_dir=cache) == jobs
    assert content_keys(copied, jobs) == content_keys(package, jobs)
    with pytest.raises(ToolError, match="copied: variants for sm80: the compile worker used 0 s of CPU"):
        list_variants(copied, ["sm80"], cache_dir=cache)
    with pytest.raises(ToolError, match="used 0 s of CPU"):
        list_variants(copied, TARGETS, toolchain=Toolchain("3.6.0"), cache_dir=cache)
    replace(copied / "__init__.py", "else 64, 0.5)", "else 64, 0.25)")
    with pytest.raises(ToolError, match="used 0 s of CPU"):
        list_variants(copied, TARGETS, cache_dir=cache)


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_a_list_that_cannot_be_read_is_made_anew(package, cache, text):
    jobs = list_variants(package, ["gfx942"], cache_dir=cache)
    (entry,) = ResultCache(cache).folder.iterdir()
    entry.write_text(text)
    assert list_variants(package, ["gfx942"], cache_dir=cache) == jobs


def test_rows_of_another_version_are_listed_without_that_triton(package, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles = {}
    for version in TRITONS:
        (job,) = list_variants(package, ["gfx942"], toolchain=Toolchain(version))
        tiles[version] = dict(job.constexprs)["BLOCK_M"]
    assert tiles == {version: 32 if minor(version) < (3, 7) else 64 for version in TRITONS}
    assert not (tmp_path / "mlagen" / "triton").exists()


def test_listed_and_unlisted_jobs_have_equal_resources(package, copied, tmp_path):
    jobs = list_variants(package, TARGETS, cache_dir=tmp_path / "lists")
    listed = compile_jobs(package, jobs, workers=1, cache_dir=tmp_path / "listed")
    made = compile_jobs(unlisted(copied), jobs, workers=1, cache_dir=tmp_path / "made")
    assert not any(one.cached for one in (*listed, *made))
    assert listed == made
    assert [one.key for one in listed] == content_keys(package, jobs)
    assert {one.triton for one in listed} == {installed().version}


def test_targets_of_one_worker_do_not_mix(package, tmp_path):
    """In any order: Triton caches compilations by device, and each target is its own device."""
    listed = list_variants(package, ["sm80", *TARGETS, "sm86"], cache_dir=tmp_path)
    jobs = [job for job in listed if ("bias_ptr", None) in job.constexprs]
    found = compile_jobs(package, jobs, workers=1, cache_dir=tmp_path / "forth")
    back = compile_jobs(package, jobs[::-1], workers=1, cache_dir=tmp_path / "back")
    assert found == back[::-1]
    products = [[name for name in one.instructions if re.search("MMA|mfma", name)] for one in found]
    assert products == [["HMMA"], ["v_mfma_f32_32x32x8_bf16"], ["HGMMA"], ["HMMA"]]


def test_a_package_that_does_not_import_is_reported(copied, cache):
    replace(copied / "tiny.py", "import triton\n", "import triton\nimport no_such_module\n")
    with pytest.raises(ToolError, match=r"copied: variants for sm90: ModuleNotFoundError: No module named 'no_such_m"):
        list_variants(copied, ["sm90"], cache_dir=cache)


def test_a_package_without_variants_is_reported(copied, cache):
    with pytest.raises(ToolError, match="copied: variants for sm90: the package does not list its variants"):
        list_variants(unlisted(copied), ["sm90"], cache_dir=cache)
