"""Workers and scripts that are forked from a process with torch and Triton, in place of started: each saves a second.

A process per kind imports once the modules that every such worker imports. A fork of it runs the worker's own main
module, with the environment, the folder and the pipes that it would start with. It becomes a child of the test process,
so time limits and signals work as for a started one. Other commands start as they are, and so does the first worker of
each kind and environment, and all of them where there is a GPU or no Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
COMPILER = ROOT / "mlagen" / "compile" / "worker.py"
VERIFIERS = ("mlagen.verify.worker", "mlagen.verify.random.worker")
# Modules by kind of worker, and the environment that they are imported in.
PRELOADED = {
    "script": ("torch",),
    "compile": ("torch", "triton.compiler", "triton.backends.compiler", "triton.experimental.gluon.language"),
    "verify": ("torch", "mlagen.verify.families", "mlagen.verify.interpreter", "mlagen.verify.gluon.functions"),
}
_TIED = 5  # words before the command of a worker, see `mlagen.workers`
READY = {"verify": {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}}
# Variables that these modules read when they are imported: forks have the same, but for those read later.
_STEERING = ("PYTHON", "TRITON_", "TORCH", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "HIP_", "LD_", "LLVM_", "MLIR_")
_PER_TEST = ("TRITON_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_START_SECONDS = 60.0


def install() -> None:
    """Have the workers of this process forked."""
    workers = importlib.import_module("mlagen.workers")
    workers.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)  # type: ignore[attr-defined]


def start(arguments: Sequence[str], *, env: Mapping[str, str], stderr: IO[bytes], **options: Any) -> Any:
    """Start or fork a worker, in place of `subprocess.Popen` in `mlagen.workers`. Its stdin and stdout are pipes."""
    kind = _kind(arguments[_TIED:])
    source = None if kind is None else _source(kind, env)
    if source is None:
        return subprocess.Popen(arguments, env=env, stderr=stderr, **options)
    (stdin, to), (of, stdout) = os.pipe(), os.pipe()
    pid = source.fork(arguments[_TIED + 1 :], env, (stdin, stdout, stderr.fileno()))
    os.close(stdin)
    os.close(stdout)
    return Forked(pid, to, of)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python script with its arguments, in this process's environment unless one is given."""
    env = dict(os.environ if env is None else env)
    source = _source("script", env)
    if source is None:
        return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        pid = source.fork(command, env, (nothing.fileno(), stdout.fileno(), stderr.fileno()))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess([*command], code, stdout.read(), stderr.read())


def _source(kind: str, env: Mapping[str, str]) -> _Source | None:
    """The process to fork from; None for the first of a kind and environment."""
    steering = {name for name in env if name.startswith(_STEERING)} - {*_PER_TEST}
    key = (kind, *((name, env[name]) for name in sorted(steering)))
    known = _sources.get(key)
    if known is None and sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        _sources[key] = _Source(kind, env)
    return known


def _kind(command: Sequence[str]) -> str | None:
    if command[1] == "-m" and command[2] in VERIFIERS:
        return "verify"
    return "compile" if list(command[1:3]) == ["-P", str(COMPILER)] else None


class Forked:
    """As much of a `subprocess.Popen` as `mlagen.workers` reads."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self.returncode = pid, None
        self.stdin = open(stdin, "w", encoding="utf-8")  # noqa: SIM115 -- closed by the worker's owner
        self.stdout = open(stdout, encoding="utf-8")  # noqa: SIM115

    def wait(self) -> int:
        """Return the exit code once it ended, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class _Source:
    """The process that workers of a kind are forked from. It starts with the first of them, and ends with this one."""

    def __init__(self, kind: str, env: Mapping[str, str]) -> None:
        self._modules, self._env = PRELOADED[kind], {**env, **READY.get(kind, {})}
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *self._modules],
                env=self._env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C ends it with the connection
            )
            theirs.close()
            atexit.register(process.wait)
            atexit.register(self._connection.close)  # called first
        return self._connection

    def fork(self, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> int:
        """Fork a child of this process with these arguments of Python and standard files, and return its id."""
        job = {"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd(), "parent": os.getpid()}
        with self._lock:
            connection = self._connected()
            _prctl(_SUBREAPER, 1)  # until the fork has lost its parent
            try:
                socket.send_fds(connection, [json.dumps(job).encode()], files)
                pid = int(connection.recv(64))
                connection.recv(64)
            finally:
                _prctl(_SUBREAPER, 0)
        return pid


_sources: dict[tuple[object, ...], _Source] = {}


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a worker for each message; return its job in the fork, and None in this process at the end."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return None
        if not os.fork():
            if pid := os.fork():
                connection.send(str(pid).encode())
                os._exit(0)  # which leaves the worker to the test process
            connection.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            job: dict[str, Any] = json.loads(message)
            return job
        os.wait()
        connection.send(b"left")
        for descriptor in descriptors:
            os.close(descriptor)


def work(job: Mapping[str, Any]) -> None:
    """Run a main module as a process of its own would."""
    os.setsid()
    until = time.monotonic() + _START_SECONDS
    while os.getppid() != job["parent"] and time.monotonic() < until:
        time.sleep(0.0005)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        sys.exit("the starting process is gone")
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    tempfile.tempdir = None  # of the new environment
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    first, *rest = job["arguments"]
    if first == "-m":
        sys.argv, sys.path[:0] = rest, [job["cwd"]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first != "-P":
        sys.path.insert(0, str(Path(first).resolve().parent))
    sys.argv = rest if first == "-P" else [first, *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Import modules, then serve."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    with contextlib.closing(socket.socket(fileno=descriptor)) as connection:
        job = serve(connection)
    if job is not None:
        work(job)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
