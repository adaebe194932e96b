"""Facts, shapes and packages that the bench's tests share."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from bench_packages import MakePackage, package_in

from mlagen.bench.families.sparse_fwd import SparseFwdShape
from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.roofline import Roof
from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture(scope="session")
def dsv32(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """The package of DeepSeek V3.2 as it is generated now, imported under a name of its own."""
    return generated(tmp_path_factory, "dsv32")


@pytest.fixture(scope="session")
def dsv32_fp8(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """The same with a quantised cache."""
    return generated(tmp_path_factory, "dsv32_fp8")


@pytest.fixture(scope="session")
def dsv3(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """The package of DeepSeek V3's dense attention."""
    return generated(tmp_path_factory, "dsv3")


@pytest.fixture(scope="session")
def dots3_sliding(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """Another, with a window."""
    return generated(tmp_path_factory, "dots3_sliding")


def generated(tmp_path_factory: pytest.TempPathFactory, spec: str) -> BenchPackage:
    folder = tmp_path_factory.mktemp("generated") / f"{spec}_now"
    apply(compare(render(load_plan(SPECS / f"{spec}.yaml")), folder))
    return load_package(folder)


@pytest.fixture
def shape() -> SparseFwdShape:
    """A small decode."""
    return SparseFwdShape("decode", 3, 16, 512, 64)


@pytest.fixture
def row() -> Row:
    """A decode with all there can be: times of each kind, a peer that failed, a peer that is not there."""
    return Row(
        package="dsv32",
        device="NVIDIA H200",
        shape=SparseFwdShape("decode", 1, 16, 131072, 2048),
        flops=71_303_168,
        bytes_moved=2_402_304,
        roof=Roof(690e12, 4.445e12, "690 TFLOP/s, 4,445 GB/s: measured"),
        contenders=(
            Contender("ours", 8e-6, 1.0, "graph", 21.04e-6, 1.7e-3, None, 0.01, 0.0, 7.5e-6),
            Contender("vLLM Triton", 19.3e-6, 2.41, "graph", 37e-6, 1.9e-3, None, 0.02, 0.02),
            Contender("FlashMLA", error=math.nan, absent="wrong result: relative error nan"),
            Contender("FA3 p1", absent="not installed (ModuleNotFoundError: No module named 'vllm')"),
        ),
        torch="2.11.0",
        triton="3.6.0",
        rounds=11,
    )


@pytest.fixture
def make_package(tmp_path: Path) -> MakePackage:
    """Makes a package without kernels; takes the arguments of `package_in` after the folder."""
    return partial(package_in, tmp_path)
