"""Each compiled variant is launched by a case, or is of a kind that `unreached.yaml` lists with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checked_in import PACKAGES
from rotation import SEED

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
DRAWN = PACKAGES[SEED % len(PACKAGES)]
UNREACHED = yaml.safe_load(Path(__file__).with_name("unreached.yaml").read_text())


def values(variant: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The values that tell a variant from its kernel's others, one by one."""
    kernel = variant["kernel"]
    for part in ("constexprs", "dtypes"):
        yield from ((kernel, name, str(value)) for name, value in variant[part].items())
    yield from ((kernel, "absent", name) for name in variant["absent"])


@pytest.mark.parametrize(
    "package", [pytest.param(path, marks=[pytest.mark.slow] * (path != DRAWN), id=path.name) for path in PACKAGES]
)
def test_every_variant_is_reached_or_listed_with_its_reason(package: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("reach.py")), str(package)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    reached = {value for variant in found["reached"] for value in values(variant)}
    assert reached
    for variant in found["missed"]:
        kernel = variant["kernel"]
        assert kernel in (*UNREACHED["combinations"], *UNREACHED["tiles"]), f"no case launches {variant}"
        if kernel in UNREACHED["combinations"]:
            on_gpu = UNREACHED["arguments"].get(kernel, ())
            parts = {value for value in values(variant) if value[1] not in on_gpu}
            assert parts <= reached, f"no case launches a part of {variant}"
