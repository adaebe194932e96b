"""Prints the compilations that every package lists for each of its targets under a Triton version, as JSON.

    python listing.py VERSION

A process of its own, since a package chooses the rows of its tables when it is imported.
"""

import json
import sys
from pathlib import Path

import triton

from mlagen.compile.worker import describe, load_package

GENERATED = Path(__file__).parents[2] / "generated"


def main(version: str) -> None:
    """List all packages as the compile worker lists one."""
    triton.__version__ = version
    listed = {}
    for folder in sorted(path.parent for path in GENERATED.glob("*/__init__.py")):
        package = load_package(folder)
        targets = package.SPEC["spec"]["targets"]
        listed[folder.name] = {target: [describe(one) for one in package.variants(target)] for target in targets}
    print(json.dumps(listed))


if __name__ == "__main__":
    main(sys.argv[1])
