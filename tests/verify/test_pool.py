"""Worker processes: their answers, and the fate of those that die."""

import json

import pytest
from verify_packages import REFUSES_ALL, write_package

from mlagen.errors import ToolError, UsageError
from mlagen.verify import CaseResult, verify_package

pytestmark = pytest.mark.interpreter


def test_results_come_in_the_order_of_the_cases_and_as_they_are_done(tmp_path):
    package = write_package(tmp_path)
    seen: list[CaseResult] = []
    counts: list[int] = []
    started: list[tuple[str, str]] = []
    results = verify_package(
        package,
        targets=["sm90"],
        only=["refuses: kv_c,*", "writer: no ?*s (concat)"],
        on_tasks=lambda tasks: counts.append(len(tasks)),
        on_start=lambda case, target: started.append((case, target)),
        on_done=seen.append,
    )
    assert [result.case.split(", ")[0] for result in results] == [
        "writer: no slots (concat)",
        "writer: no tokens (concat)",
    ] + 5 * ["refuses: kv_c"]
    assert [result.ok for result in results] == [False, False] + [True] * 5
    assert results[0].detail.startswith("ValueError: kv_c, k_pe")
    assert sorted(seen, key=results.index) == results
    assert counts[-1] == len(results)
    assert sorted(started) == sorted((result.case, result.target) for result in results)
    for result in results:
        assert CaseResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_stray_prints_do_not_reach_the_protocol(tmp_path):
    noise = 'print("{\\"event\\": \\"done\\"}"); os.write(1, b"junk\\n"); sys.stdout.flush()'
    package = write_package(tmp_path, f"{noise}; {REFUSES_ALL}", extra=noise)
    results = verify_package(package, targets=["sm90"], workers=1, only=["refuses: k_pe,*"])
    assert len(results) == 8
    assert all(result.ok for result in results)


def test_a_worker_that_dies_in_a_case_fails_that_case_alone(tmp_path):
    die = 'if getattr(kv_c, "ndim", 0) == 1: os.kill(os.getpid(), 11)'
    package = write_package(tmp_path, f"{die}\n    {REFUSES_ALL}")
    counts: list[int] = []
    results = verify_package(
        package, targets=["sm90"], workers=1, only=["refuses: kv_c,*"], on_tasks=lambda tasks: counts.append(len(tasks))
    )
    assert counts == [5]  # the fresh worker's cases are counted already
    failed = [result for result in results if not result.ok]
    assert len(results) == 5
    assert [result.case for result in failed] == ["refuses: kv_c, a dimension short (concat)"]
    assert "SIGSEGV" in failed[0].detail


def test_a_case_that_hangs_is_ended(tmp_path):
    hang = 'if getattr(kv_c, "ndim", 0) == 1: time.sleep(600)'
    package = write_package(tmp_path, f"{hang}\n    {REFUSES_ALL}")
    only = ["refuses: kv_c, a dim*", "refuses: kv_c, wider*"]
    results = verify_package(package, targets=["sm90"], workers=1, only=only, timeout=2)
    assert [result.ok for result in results] == [False, True]
    assert results[0].detail.startswith("no answer: the worker did nothing for 2 s")


def test_a_package_that_does_not_import_is_a_broken_tool(tmp_path):
    package = write_package(tmp_path, extra="import no_such_module_here")
    with pytest.raises(ToolError, match="No module named 'no_such_module_here'"):
        verify_package(package, workers=1)


def test_no_case_and_no_device_are_usage_errors(tmp_path):
    package = write_package(tmp_path)
    with pytest.raises(UsageError, match="no case matches nothing"):
        verify_package(package, workers=1, only=["nothing*"])
    with pytest.raises(UsageError, match="device is 'tpu', takes one of cpu, cuda"):
        verify_package(package, device="tpu")
