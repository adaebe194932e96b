"""Compilation of real kernels with Triton: results, cache and errors."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from mlagen.compile import Resources, check_limits, compile_jobs, process
from mlagen.compile.cache import ResultCache
from mlagen.errors import ToolError
from mlagen.plan import TARGETS

pytestmark = pytest.mark.compilation

MATRIX = {
    "sm80": "HMMA",
    "sm86": "HMMA",
    "sm89": "HMMA",
    "sm90": "HGMMA",
    "sm100": "UTCHMMA",
    "sm120": "HMMA",
    "gfx942": "v_mfma_f32_32x32x8_bf16",
    "gfx950": "v_mfma_f32_32x32x16_bf16",
}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_every_target_then_all_from_the_cache(package, make_job, cache):
    jobs = [make_job("_tiny_kernel", target) for target in TARGETS]
    done: list[Resources] = []
    results = compile_jobs(package, jobs, workers=2, cache_dir=cache, on_done=done.append)
    assert [result.target for result in results] == list(TARGETS)
    assert sorted(done, key=lambda result: list(TARGETS).index(result.target)) == results
    for result in results:
        assert not result.cached
        assert result.seconds > 0
        assert 0 < result.registers < 256
        assert 0 < result.shared < result.shared_limit == TARGETS[result.target].shared_limit
        assert result.instructions[MATRIX[result.target]] > 0
        assert (result.scalar_registers is None) == (TARGETS[result.target].backend == "cuda")
        assert (result.tensor_memory > 0) == (result.target == "sm100")
    assert check_limits([result for result in results if result.target == "sm90"]) == []

    again = compile_jobs(package, jobs, workers=2, cache_dir=cache)
    assert again == results
    assert all(result.cached for result in again)
    assert json.dumps([result.to_json() for result in again]) == json.dumps([result.to_json() for result in results])
    assert not list(package.rglob("__pycache__"))


def test_order_is_the_jobs_own_and_equal_jobs_compile_once(package, make_job, cache):
    jobs = [
        make_job("_wide_kernel", "sm90"),
        make_job("_tiny_kernel", "gfx942"),
        make_job("_tiny_kernel", "gfx942"),
    ]
    wide, first, second = compile_jobs(package, jobs, workers=2, cache_dir=cache)
    assert (wide.kernel, first.kernel, second.kernel) == ("_wide_kernel", "_tiny_kernel", "_tiny_kernel")
    assert (first.cached, second.cached) == (False, True)
    assert first == second


@pytest.mark.parametrize(
    ("file", "old", "new", "hit"),
    [
        ("tiny.py", "DIM = tl.constexpr(64)", "DIM = tl.constexpr(32)", False),
        ("scale.py", "return x * LOG2_E", "return x / LOG2_E", False),
        ("tiny.py", '"""One kernel', '# A header\n# of two lines.\n"""One kernel', True),
    ],
)
def test_cache_follows_content_not_place(package, copied, make_job, cache, file, old, new, hit):
    job = make_job("_tiny_kernel", "gfx942")
    compile_jobs(package, [job], cache_dir=cache)
    assert compile_jobs(copied, [job], cache_dir=cache)[0].cached
    replace(copied / file, old, new)
    assert compile_jobs(copied, [job], cache_dir=cache)[0].cached is hit


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_sources_with_the_same_ir_are_compiled_once(package, copied, make_job, cache, target):
    job = make_job("_tiny_kernel", target)
    (first,) = compile_jobs(package, [job], cache_dir=cache)
    job = dataclasses.replace(job, kernel="_small_kernel")
    replace(copied / "tiny.py", "def _square(x)", "def _squared(x)")
    replace(copied / "tiny.py", "acc = _square(", "acc = _squared(")
    for file in ("tiny.py", "__init__.py"):
        replace(copied / file, "_tiny_kernel", "_small_kernel")
    (renamed,) = compile_jobs(copied, [job], cache_dir=cache)
    assert renamed.cached
    assert renamed.key != first.key
    assert (renamed.registers, renamed.instructions) == (first.registers, first.instructions)
    replace(copied / "tiny.py", "return x * x", "return x + x")
    (other,) = compile_jobs(copied, [job], cache_dir=cache)
    assert not other.cached


def test_launch_parameters_and_arguments_are_part_of_the_key(package, make_job, cache):
    base = make_job("_tiny_kernel", "gfx942")
    others = [
        make_job("_tiny_kernel", "gfx942", num_warps=8),
        make_job("_tiny_kernel", "gfx942", constexprs=(("BLOCK_M", 64), ("SCALE", 0.25), ("bias_ptr", None))),
        make_job("_tiny_kernel", "gfx950"),
    ]
    compile_jobs(package, [base], cache_dir=cache)
    assert not any(result.cached for result in compile_jobs(package, others, workers=2, cache_dir=cache))


def test_a_corrupt_entry_is_made_anew(package, make_job, cache):
    job = make_job("_tiny_kernel", "gfx942")
    (first,) = compile_jobs(package, [job], cache_dir=cache)
    entries = list(ResultCache(cache).folder.iterdir())
    assert len(entries) == 2  # by its source and by its IR
    for text in ("{", "[]", '{"registers": 1}'):
        for entry in entries:
            entry.write_text(text)
        (again,) = compile_jobs(package, [job], cache_dir=cache)
        assert again == first
        assert not again.cached


def test_a_cache_that_cannot_be_written_is_no_error(package, make_job, tmp_path):
    (tmp_path / "file").touch()
    (result,) = compile_jobs(package, [make_job("_noisy_kernel", "sm90")], cache_dir=tmp_path / "file" / "cache")
    assert not result.cached


def test_a_kernel_over_a_limit_is_reported_with_the_arithmetic(package, make_job, cache):
    result, fits = compile_jobs(
        package, [make_job("_pipelined_kernel", "sm86"), make_job("_pipelined_kernel", "sm90")], cache_dir=cache
    )
    (error,) = check_limits([result, fits])
    assert error.message == (
        f"misfits._pipelined_kernel [BLOCK=128] for sm86 under Triton {result.triton}: "
        "shared memory 131,072 bytes - limit 101,376 bytes = 29,696 bytes too many"
    )
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("target", "block", "unit", "instruction"),
    [("sm90", 4096, "stack bytes a thread", "STL"), ("gfx942", 16384, "vector registers", "scratch_store")],
)
def test_only_spills_inside_a_loop_are_refused(package, make_job, cache, target, block, unit, instruction):
    looped, straight = compile_jobs(
        package,
        [make_job("_wide_kernel", target, constexprs=(("BLOCK", block), ("STEPS", steps))) for steps in (4, 1)],
        cache_dir=cache,
    )
    for result in (looped, straight):
        assert result.spills > 0
        assert any(name.startswith(instruction) for name in result.instructions)
    assert 0 < looped.loop_spills < sum(looped.instructions.values())
    assert straight.loop_spills == 0
    (error,) = check_limits([looped, straight])
    assert (
        f"{looped.loop_spills:,} spill loads and stores - limit 0 = {looped.loop_spills:,} too many; "
        f"spills {looped.spills:,} {unit} with {looped.registers} registers a thread"
    ) in error.message


@pytest.mark.parametrize(
    ("constexprs", "shown"),
    [
        ((("BLOCK_M", 64), ("bias_ptr", None)), "BLOCK_M=64, no bias"),
        (
            (("BLOCK_M", 64), ("SCALE", 0.5), ("bias_ptr", None), ("BLOCK_N", 1)),
            "BLOCK_M=64 SCALE=0.5 BLOCK_N=1, no bias",
        ),
    ],
)
def test_arguments_of_another_kernel_are_named(package, make_job, cache, constexprs, shown):
    with pytest.raises(ToolError) as caught:
        compile_jobs(package, [make_job("_tiny_kernel", "sm90", constexprs=constexprs)], cache_dir=cache)
    names = ", ".join([*(name for name, _ in constexprs), "a_ptr", "b_ptr", "out_ptr", "rows"])
    assert str(caught.value) == (
        f"tiny._tiny_kernel [{shown}] for sm90: the kernel takes "
        f"(a_ptr, b_ptr, bias_ptr, out_ptr, rows, BLOCK_M, SCALE), but the job names ({names})"
    )


def test_a_kernel_that_does_not_compile_is_shown_in_its_file(package, make_job, cache):
    with pytest.raises(ToolError, match=r"misfits\._broken_kernel \[BLOCK=32\] for sm80: .*incompatible dim") as caught:
        compile_jobs(package, [make_job("_broken_kernel", "sm80")], cache_dir=cache)
    lines = (package / "misfits.py").read_text().splitlines()
    assert caught.value.place is not None
    assert caught.value.place.file == package / "misfits.py"
    assert lines[(caught.value.place.line or 0) - 1] == "    return x + y"
    assert "_add_rows(x, y)" in (caught.value.hint or "")


def test_a_package_that_does_not_import_is_reported(copied, make_job, cache):
    replace(copied / "tiny.py", "import triton\n", "import triton\nimport no_such_module\n")
    with pytest.raises(ToolError, match=r"tiny\._tiny_kernel .* ModuleNotFoundError: No module named 'no_such_module'"):
        compile_jobs(copied, [make_job("_tiny_kernel", "sm90")], cache_dir=cache)


def test_a_plain_function_is_no_kernel(package, make_job, cache):
    with pytest.raises(ToolError, match=r"wrapper is not a @triton\.jit function of tiny"):
        compile_jobs(package, [make_job("_tiny_kernel", "sm90", kernel="wrapper")], cache_dir=cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": "huge"}, "no module huge in "),
        ({"kernel": "_huge_kernel"}, "no kernel _huge_kernel in "),
        ({"target": "sm70"}, "no such target"),
    ],
)
def test_a_job_without_a_kernel_is_reported(package, make_job, cache, changes, message):
    with pytest.raises(ToolError, match=message):
        compile_jobs(package, [make_job("_tiny_kernel", "sm90", **changes)], cache_dir=cache)


def test_a_killed_worker_is_reported_with_its_last_output(package, make_job, cache):
    with pytest.raises(ToolError, match=r"deadly\._kernel \[-\] for sm90: the compile worker died") as caught:
        compile_jobs(package, [make_job("_kernel", "sm90")], cache_dir=cache)
    assert "SIGKILL" in caught.value.message
    assert caught.value.hint == "about to die"


def test_a_worker_that_hangs_is_ended(package, make_job, cache, monkeypatch):
    monkeypatch.setattr(process, "TIMEOUT_S", 0.5)
    with pytest.raises(ToolError, match=r"endless\._kernel .* used 0\.5 s of CPU"):
        compile_jobs(package, [make_job("_kernel", "sm90", module="endless")], cache_dir=cache)


def test_ctrl_c_ends_the_workers(package, make_job, cache):
    def interrupt(_: Resources) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_jobs(
            package,
            [make_job("_noisy_kernel", "sm90"), make_job("_kernel", "sm90", module="endless")],
            workers=2,
            cache_dir=cache,
            on_done=interrupt,
        )
    assert time.monotonic() - start < 60


def test_prints_and_the_callers_environment_change_nothing(package, make_job, cache, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    results = compile_jobs(package, [make_job("_noisy_kernel", "sm90")], cache_dir=cache)
    monkeypatch.undo()
    assert results == compile_jobs(package, [make_job("_noisy_kernel", "sm90")], cache_dir=cache.with_name("other"))


def test_gluon_kernels_compile(package, make_job, cache):
    (result,) = compile_jobs(package, [make_job("_copy_kernel", "sm90")], cache_dir=cache)
    assert result.registers > 0


def test_the_worker_needs_nothing_of_mlagen():
    text = Path(process.__file__).with_name("worker.py").read_text()
    assert "import mlagen" not in text
    assert "from mlagen" not in text
