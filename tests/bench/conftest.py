"""Facts and shapes that the bench's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.bench.package import BenchPackage, load_package
from mlagen.bench.shapes import Shape

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.fixture(scope="session")
def dsv32() -> BenchPackage:
    """The generated package of DeepSeek V3.2, imported."""
    return load_package(GENERATED / "dsv32")


@pytest.fixture
def shape() -> Shape:
    """A small decode."""
    return Shape("decode", 3, 16, 512, 64)
