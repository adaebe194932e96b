import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "layout"))  # layout_specs: any layout


@pytest.fixture(scope="session")
def specs() -> Path:
    return ROOT / "specs"


@pytest.fixture(scope="session")
def valid(specs: Path) -> str:
    """The text of a valid spec, whose file would be dsv32.yaml."""
    return (specs / "dsv32.yaml").read_text(encoding="utf-8")
