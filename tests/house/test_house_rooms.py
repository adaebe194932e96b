"""Rooms import only rooms below them, and each has a family's files under the family's name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.plan import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
NAMES = [family.NAME for family in FAMILIES]
# Files and folders of a family.
PLACES = {
    "plan": ("mlagen/plan/families/{}.py",),
    "backends": ("mlagen/backends/{}/portable.py",),
    "verify": ("mlagen/verify/{}/cases.py", "mlagen/verify/chains/{}/cases.py"),
    "bench": ("mlagen/bench/families/{}.py",),
    "peers": ("mlagen/bench/peers/{}.py",),
}
IMPORTED = re.compile(r"(?m)^ *from mlagen\.verify(?:\.| import )(\w+)")


def test_rooms_import_only_rooms_below_them() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_found_by_its_name_in_every_room(room: str, name: str) -> None:
    assert any((ROOT / place.format(name)).is_file() for place in PLACES[room])


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not (ROOT / "mlagen" / "verify" / "chains" / name).is_dir()]
)
def test_a_family_of_verify_imports_no_other(name: str) -> None:
    strangers = {"chains", "families", "worker", *NAMES} - {name}
    paths = [*(ROOT / "mlagen" / "verify" / name).glob("*.py")]
    assert paths
    for path in paths:
        assert not strangers & set(IMPORTED.findall(path.read_text(encoding="utf-8"))), path
