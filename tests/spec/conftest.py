import re
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
    """The text of a valid spec for dsv32.yaml, without partials, which some wrappers do not support."""
    return re.sub(r"^partials:.*\n", "", (specs / "dsv32.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
