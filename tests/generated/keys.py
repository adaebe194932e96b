"""Prints the keys of a package's kernels in Triton's cache, asked for in an order.

python keys.py PACKAGE_DIR forward|backward
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlagen.compile.worker import load_package


def main(folder: Path, order: str) -> None:
    package = load_package(folder)
    kernels = {one.kernel.fn.__name__: one.kernel for one in package.variants("sm90")}
    package._launch.hash_functions()
    names = sorted(kernels, reverse=order == "backward")
    print(json.dumps({name: kernels[name].cache_key for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
