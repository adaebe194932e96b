"""Every kernel that a call can run has a name: forced by it, the kernel runs, and no other of its family does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checked_in import package_of

from mlagen.compile.worker import load_package
from mlagen.verify.call.case import SM90_KERNELS
from mlagen.verify.call.subject import kernels_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("forced.py")
# The whole packages, and dsv3_prefill_tma with its own kernels.
PACKAGES = sorted(["dsv3_prefill_tma", *(path.parent.name for path in (ROOT / "generated").glob("*/__init__.py"))])
QUICK = ("dsv3_fp8", "dsv32_fp8_tensor", "dsv32")  # which have most kernels between them
PORTABLE = ("portable", "portable_descriptor")
# The kernels that a call launches, by the first one's name; a kernel of its own where no other name is given.
LAUNCHED = {
    "dense_fwd/portable_descriptor": "_dense_fwd_descriptor_kernel",
    "dense_decode/sm90_rows32": "_dense_decode_sm90_rows32_kernel",
    "dense_decode/sm90_q_halves": "_dense_decode_sm90_q_halves_kernel",
    "candidates/portable": "_topk_kernel",
    "candidates/sm90": "_topk_sm90_kernel",
    "topk/sm90_collect": "_topk_collect_sm90_kernel",
    "indexer_select/portable": "_topk_kernel",
    "indexer_select/sm90": "_topk_sm90_kernel",
}


# Kernels that launch another one of their family as well, by its name.
ALSO = {"topk/sm90_collect": "topk/sm90"}


def launched_by(name: str) -> str:
    """The kernel that calls launch when forced, `family/kernel`."""
    family, _, kernel = name.partition("/")
    return LAUNCHED.get(name, f"_{family}_kernel" if kernel == "portable" else f"_{family}_{kernel}_kernel")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PACKAGES]
)
def test_a_kernel_that_is_forced_by_name_is_launched(name: str) -> None:
    command = [sys.executable, str(SCRIPT), str(package_of(name))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {one: wrong for one, (wrong, _) in found.items() if wrong} == {}
    kernels = {one.partition("/")[2] for one in found}
    if found:
        assert kernels == set(kernels_of(load_package(package_of(name))))
    for one, (_, launched) in found.items():
        family = one.partition("/")[0]
        others = {launched_by(other) for other in found if other.partition("/")[0] == family} - {launched_by(one)}
        others -= {launched_by(ALSO.get(one, one))}
        assert launched_by(one) in launched
        assert not others & set(launched), f"{one} launches {launched}"


def test_packages_have_no_kernels_that_verification_does_not_name() -> None:
    every = {kernel for name in PACKAGES for kernel in kernels_of(load_package(package_of(name)))}
    assert every == {*PORTABLE, *SM90_KERNELS}


def test_a_kernel_that_the_package_lacks_is_refused() -> None:
    launch = importlib.import_module("generated.dsv3")._launch
    message = "^kernel: got 'sm90_rows32', takes None or 'portable' or 'sm90' or 'sm90_swap_ab'$"
    with pytest.raises(ValueError, match=message):
        launch.force(kernel="sm90_rows32")
