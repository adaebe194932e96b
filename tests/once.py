"""Results that the workers of a run make once: whichever asks first makes one, and the others wait for it."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked


def once(path: Path, make: Callable[[], Any]) -> Any:
    """The JSON of a file; made and written by the first caller. An error is the caller's, and the next one tries again.

    Args:
        path: file of the result, in a folder that the workers share.
        make: returns the result.
    """
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            text = json.dumps(make())
            path.write_text(text, encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))


def findings(folder: Path, command: Sequence[str], env: Mapping[str, str] | None = None, setting: str = "") -> Any:
    """The last line that a Python script prints, as JSON. It runs once for each command and setting.

    Args:
        folder: of the files that the script takes; the findings are kept next to it.
        command: the script and its arguments.
        env: the script's environment; None: this process's.
        setting: the part of the environment that differs between runs.
    """

    def run() -> Any:
        done = forked.run(command, env)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    key = hashlib.sha256(json.dumps([*command, setting]).encode()).hexdigest()[:16]
    return once(folder.with_name(f"{folder.name}-{key}.json"), run)
