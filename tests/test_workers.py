"""Worker processes: what they answer, how long they may take, and that none is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from mlagen.workers import Worker, WorkerError, spread

SERVE = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    request = json.loads(line)
    exec(request.get("run", ""))
    print(json.dumps({"pid": os.getpid(), **request}), flush=True)
"""


@pytest.fixture
def worker():
    worker = make()
    yield worker
    worker.close()


def make() -> Worker:
    return Worker([sys.executable, "-c", SERVE], os.environ)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_one_process_answers_request_after_request(worker):
    answers = [worker.ask({"number": number}, 30) for number in range(3)]
    assert [answer["number"] for answer in answers] == [0, 1, 2]
    assert len({answer["pid"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("run", "end"), [("os.kill(os.getpid(), 11)", "SIGSEGV"), ("sys.exit(3)", "exit code 3"), ("1 / 0", "exit code 1")]
)
def test_a_worker_that_dies_is_followed_by_a_fresh_one(worker, run, end):
    before = worker.ask({"run": "print('earlier words', file=sys.stderr, flush=True)"}, 30)
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": f"print('last words', file=sys.stderr, flush=True); {run}"}, 30)
    assert (caught.value.late, caught.value.end) == (False, end)
    assert caught.value.words.startswith("earlier words\nlast words")
    assert not worker.running
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "sys.exit(0)"}, 30)
    assert caught.value.words == ""  # of the process that died now
    assert worker.ask({}, 30)["pid"] != before["pid"]


def test_an_answer_that_takes_too_long_ends_the_process_and_what_it_started(worker):
    child = worker.ask({"run": "request['child'] = subprocess.Popen(['sleep', '600']).pid"}, 30)["child"]
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "time.sleep(600)"}, 0.2)
    assert caught.value.late
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.05)
    assert not alive(child)


def test_words_are_those_since_a_moment(worker):
    worker.ask({"run": "print('before', file=sys.stderr, flush=True)"}, 30)
    printed = worker.printed()
    worker.ask({"run": "print('after', file=sys.stderr, flush=True)"}, 30)
    assert worker.words(printed) == "after"


def test_a_killed_worker_answers_nobody_and_does_not_start_again(worker):
    worker.ask({}, 30)
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "time.sleep(600)"}, 600)
    assert (caught.value.late, caught.value.end) == (False, signal.SIGKILL.name)
    with pytest.raises(WorkerError):
        worker.ask({}, 30)
    assert not worker.running


def test_tasks_are_spread_and_all_done():
    workers = [make(), make()]
    outcomes = list(spread(range(7), workers, lambda worker, task: worker.ask({"task": task}, 30)))
    assert sorted(outcome["task"] for outcome in outcomes) == list(range(7))
    assert not any(alive(pid) for pid in {outcome["pid"] for outcome in outcomes})


def test_what_a_task_raises_ends_the_others_and_is_raised():
    def do(worker: Worker, task: int) -> int:
        pids.append(worker.ask({}, 30)["pid"])
        if task == 1:
            raise KeyboardInterrupt
        worker.ask({"run": "time.sleep(600)"}, 600)
        return task

    pids: list[int] = []
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(spread(range(2), [make(), make()], do))
    assert time.monotonic() - start < 60
    assert not any(map(alive, pids))


def test_no_task_starts_no_process():
    worker = make()
    assert list(spread([], [worker], lambda worker, task: worker.ask(task, 30))) == []
    assert not worker.running
