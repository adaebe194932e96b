"""Facts, shapes and packages that the bench's tests share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from bench_packages import MakePackage, package_in

from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.shapes import Shape
from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan

SPECS = Path(__file__).parents[2] / "specs"


@pytest.fixture(scope="session")
def dsv32(tmp_path_factory: pytest.TempPathFactory) -> BenchPackage:
    """The package of DeepSeek V3.2 as it is generated now, imported under a name of its own."""
    folder = tmp_path_factory.mktemp("generated") / "dsv32_now"
    apply(compare(render(load_plan(SPECS / "dsv32.yaml")), folder))
    return load_package(folder)


@pytest.fixture
def shape() -> Shape:
    """A small decode."""
    return Shape("decode", 3, 16, 512, 64)


@pytest.fixture
def make_package(tmp_path: Path) -> MakePackage:
    """Makes a package without kernels; takes what `package_in` takes after the folder."""
    return partial(package_in, tmp_path)
