"""Prints the keys of a package's kernels in Triton's cache, asked for in two orders, each in a process of its own.

python keys.py PACKAGE_DIR
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from mlagen.compile.worker import load_package


def keys(package: Any, answer: Any, *, backward: bool) -> None:
    """Sends the key of each kernel by name."""
    kernels = {one.kernel.fn.__name__: one.kernel for one in package.variants("sm90")}
    package._launch.hash_functions()
    answer.send({name: kernels[name].cache_key for name in sorted(kernels, reverse=backward)})


def main(folder: Path) -> None:
    package, found = load_package(folder), []
    forks = multiprocessing.get_context("fork")  # of an import that has hashed nothing
    for backward in (False, True):
        answer, send = forks.Pipe(duplex=False)
        process = forks.Process(target=keys, args=(package, send), kwargs={"backward": backward})
        process.start()
        found.append(answer.recv())
        process.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
