from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def specs() -> Path:
    return ROOT / "specs"


@pytest.fixture(scope="session")
def valid(specs: Path) -> str:
    """The text of a valid spec, whose file would be dsv32.yaml."""
    return (specs / "dsv32.yaml").read_text(encoding="utf-8")
