"""Takes a package's kernels that were compiled ahead, then compiles all that it lists; prints how many Triton compiled.

    python taken.py PACKAGE_DIR TARGET

With Triton's cache in TRITON_CACHE_DIR, and the worker's driver in place of a GPU's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton

from mlagen.compile import worker
from mlagen.plan import TARGETS


def main(folder: Path, name: str) -> None:
    target = TARGETS[name]
    described = {"target": name, "backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}
    worker.stand_in(described)
    package = worker.load_package(folder)
    found = {True: 0, False: 0}

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found[cache_hit] += 1

    triton.knobs.compilation.listener = listen
    package._ahead.take_compiled(name)
    for variant in package.variants(name):
        variant.compile()
    print(json.dumps({"compiled": found[False], "taken": found[True]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
