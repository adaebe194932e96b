"""Worker processes: their answers, their time limits, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mlagen.workers import Limit, Worker, WorkerError, spread, usage

LIMIT = Limit(600)
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
    answers = [worker.ask({"number": number}, LIMIT) for number in range(3)]
    assert [answer["number"] for answer in answers] == [0, 1, 2]
    assert len({answer["pid"] for answer in answers}) == 1


@pytest.mark.parametrize(
    ("run", "end"), [("os.kill(os.getpid(), 11)", "SIGSEGV"), ("sys.exit(3)", "exit code 3"), ("1 / 0", "exit code 1")]
)
def test_a_worker_that_dies_is_followed_by_a_fresh_one(worker, run, end):
    before = worker.ask({"run": "print('earlier words', file=sys.stderr, flush=True)"}, LIMIT)
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": f"print('last words', file=sys.stderr, flush=True); {run}"}, LIMIT)
    assert (caught.value.late, caught.value.end) == ("", end)
    assert caught.value.words.startswith("earlier words\nlast words")
    assert not worker.running
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "sys.exit(0)"}, LIMIT)
    assert caught.value.words == ""  # of the process that died now
    assert worker.ask({}, LIMIT)["pid"] != before["pid"]


def dies(pid: int) -> bool:
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


SLEEPER = "request['child'] = subprocess.Popen(['sleep', '600']).pid"
LATE = {
    "works": ("while True: pass", Limit(0.2), "used 0.2 s of CPU"),
    "its child works": (
        "subprocess.run([sys.executable, '-c', 'while True: pass'])",
        Limit(0.2, idle=60),
        "used 0.2 s of CPU",
    ),
    "does nothing": ("time.sleep(600)", Limit(60, idle=0.4), "did nothing for 0.4 s"),
    "waits for a GPU": ("time.sleep(600)", Limit(60, wall=0.2), "gave no answer for 0.2 s"),
    "gives no answer and lives on": ("os.close(1); time.sleep(600)", Limit(60, idle=0.4), "did nothing for 0.4 s"),
}


@pytest.mark.parametrize("what", LATE)
def test_a_process_past_a_limit_ends_with_all_that_it_started(worker, what):
    run, limit, words = LATE[what]
    started = worker.ask({"run": SLEEPER}, LIMIT)
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": run}, limit)
    assert (caught.value.late, caught.value.end) == (words, "SIGKILL")
    assert dies(started["pid"])
    assert dies(started["child"])
    assert worker.ask({"run": ""}, LIMIT)["pid"] != started["pid"]


def test_what_a_dead_worker_started_ends_too(worker):
    child = worker.ask({"run": SLEEPER}, LIMIT)["child"]
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "sys.exit(3)"}, LIMIT)
    assert caught.value.end == "exit code 3"
    assert dies(child)


def test_a_process_that_waits_for_a_cpu_is_not_late(worker):
    """It shares one CPU with others, at the lowest priority; its answer takes far more time than work."""
    cpu = min(os.sched_getaffinity(0))
    pinned = f"os.sched_setaffinity(0, [{cpu}])"
    busy = [subprocess.Popen([sys.executable, "-c", f"import os; {pinned}\nwhile True: pass"]) for _ in range(2)]
    try:
        run = f"{pinned}; os.nice(19)\nbegin = time.process_time()\nwhile time.process_time() < begin + 0.1: pass"
        assert worker.ask({"run": run}, Limit(60, idle=0.1))["pid"]
    finally:
        for process in busy:
            process.kill()
            process.wait()


PARENT = """
import os, signal, sys, threading
sys.path.insert(0, {here!r})
from test_workers import LIMIT, make
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
worker = make()
print(worker.ask({{}}, LIMIT)["pid"], flush=True)
worker.ask({{"run": "while True: pass"}}, LIMIT)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_does_not_outlive_the_process_that_asks_it(number):
    """Its request is under way: it would read no end of its stdin before it is done."""
    here = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(here=here)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(number)
        parent.wait()
    assert dies(pid)


def test_usage_is_of_the_whole_group():
    work = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", f"{child}; input()"], stdin=-1, start_new_session=True) as process:
        for _ in range(600):
            now = usage(process.pid)
            if now is not None and now.seconds > 0.2 and not now.wants:
                break
            time.sleep(0.05)
        assert now is not None
        assert now.seconds > 0.2
        process.kill()


def test_words_are_those_since_a_moment(worker):
    worker.ask({"run": "print('before', file=sys.stderr, flush=True)"}, LIMIT)
    printed = worker.printed()
    worker.ask({"run": "print('after', file=sys.stderr, flush=True)"}, LIMIT)
    assert worker.words(printed) == "after"


def test_a_killed_worker_answers_nobody_and_does_not_start_again(worker):
    worker.ask({}, LIMIT)
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(WorkerError) as caught:
        worker.ask({"run": "time.sleep(600)"}, LIMIT)
    assert (caught.value.late, caught.value.end) == ("", signal.SIGKILL.name)
    with pytest.raises(WorkerError):
        worker.ask({}, LIMIT)
    assert not worker.running


def test_tasks_are_spread_and_all_done():
    workers = [make(), make()]
    outcomes = list(spread(range(7), workers, lambda worker, task: worker.ask({"task": task}, LIMIT)))
    assert sorted(outcome["task"] for outcome in outcomes) == list(range(7))
    assert not any(alive(pid) for pid in {outcome["pid"] for outcome in outcomes})


def test_what_a_task_raises_ends_the_others_and_is_raised():
    def do(worker: Worker, task: int) -> int:
        pids.append(worker.ask({}, LIMIT)["pid"])
        if task == 1:
            raise KeyboardInterrupt
        worker.ask({"run": "time.sleep(600)"}, LIMIT)
        return task

    pids: list[int] = []
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(spread(range(2), [make(), make()], do))
    assert time.monotonic() - start < 60
    assert not any(map(alive, pids))


def test_no_task_starts_no_process():
    worker = make()
    assert list(spread([], [worker], lambda worker, task: worker.ask(task, LIMIT))) == []
    assert not worker.running
