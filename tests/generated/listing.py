"""Prints the variants that packages list for each of their targets under a Triton version, as JSON.

    python listing.py VERSION PACKAGE_DIR...

A process of its own, since a package chooses the rows of its tables when it is imported.
"""

import json
import sys
from pathlib import Path

import triton

from mlagen.compile.worker import describe, load_package


def main(version: str, folders: list[str]) -> None:
    """List packages as the compile worker lists one."""
    triton.__version__ = version
    listed = {}
    for folder in map(Path, folders):
        package = load_package(folder)
        targets = package.SPEC["spec"]["targets"]
        listed[folder.name] = {target: [describe(one) for one in package.variants(target)] for target in targets}
    print(json.dumps(listed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
