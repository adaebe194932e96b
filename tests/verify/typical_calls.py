"""Runs an ordinary case of each family and target of some packages with the Triton that this process imports.

Usage: python typical_calls.py PACKAGE_DIR...

Prints {"triton": version, "ran": [[family, target], ...], "failed": [...]} as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from mlagen.verify.worker import Run

ORDINARY = ["*typical*", "schedule*", "*: attention, holes"]


def main() -> None:
    found: dict[str, Any] = {"ran": [], "failed": []}
    for folder in sys.argv[1:]:
        job = {"package_dir": folder, "device": "cpu", "targets": ["sm90"], "only": ORDINARY}
        run = Run({**job, "families": None, "every": True})
        first: dict[tuple[str, str], int] = {}
        for number, ((_, target), family) in enumerate(zip(run.pairs, run.families, strict=True)):
            first.setdefault((family, target), number)
        for place, number in first.items():
            result, _ = run.result(number)
            found["ran"].append(place)
            if not result.ok:
                found["failed"].append(f"{Path(folder).name}: {result.case}, on {result.target}: {result.detail}")
    import triton

    print(json.dumps({"triton": triton.__version__, **found}))


if __name__ == "__main__":
    main()
