"""Errors of the watched interpreter for kernels that a GPU would not forgive, and none for others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

PROBE = Path(__file__).with_name("sanitizer_probe.py")
ROOT = Path(__file__).parents[2]

FINE = [
    "inside", "masked out", "of two tensors", "all write the same", "own element", "atomics", "rows of 16 bytes",
    "runs of 4", "assumed",
]  # fmt: skip
WRONG = {  # AT: a line of the probe
    "one tile too far": r"_copyAT reads src_ptr\[16\] \(4 of 4 addresses\): src_ptr is \[16\] with "
    r"strides \[1\], 16 elements from end to end",
    "bound off by one": r"_copyAT reads src_ptr\[16\] \(1 of 1 addresses\).*",
    "a store too far": r"_copyAT writes dst_ptr\[12\] \(4 of 4 addresses\).*",
    "past one of two": r"_eitherAT reads other_ptr\[15\] \(1 of 16 addresses\).*",
    "each writes its own": r"_same_place: programs 0 and 1 write different bytes to dst_ptr\[0\]",
    "two values at once": r"_at_once: program 0 writes at once different bytes to dst_ptr\[0\]",
    "two widths": r"_other_width: programs 0 and 1 write different bytes to dst_ptr\[0\]",
    "neighbour's element": r"_neighbour: program 0 reads src_ptr\[1\], which program 1 writes",
    "rows of 4 bytes": r"_hintedAT: tl.multiple_of claims multiples of 16 bytes in dimension 1, but .*",
    "columns of 32 bytes": r"_hintedAT: tl.multiple_of claims multiples of 32 bytes in dimension 0, .*",
    "runs of 2": r"_contiguousAT: tl.max_contiguous claims 4 neighbours, but the values are not so",
    "assumed wrongly": r"_assumesAT: tl.assume claims what is false",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PROBE)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert answers.keys() == {*FINE, *WRONG}
    return dict(answers)


@pytest.mark.parametrize("call", FINE)
def test_what_is_right_is_let_be(said: dict[str, str | None], call: str) -> None:
    assert said[call] is None


@pytest.mark.parametrize("call", WRONG)
def test_what_is_wrong_is_told_with_kernel_line_and_tensor(said: dict[str, str | None], call: str) -> None:
    assert re.fullmatch(WRONG[call].replace("AT", r", sanitizer_probe.py:\d+"), said[call] or "nothing")
