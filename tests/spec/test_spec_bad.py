"""Each bad/NAME.yaml is refused with exactly the lines of bad/NAME.txt."""

from pathlib import Path

import pytest

from mlagen.errors import SpecErrors
from mlagen.spec import load

HERE = Path(__file__).parent


def names(suffix: str) -> list[str]:
    """Names of all files with a suffix. A file in a folder `specs` also has the rules of such a folder."""
    return sorted(str(path.relative_to(HERE / "bad").with_suffix("")) for path in (HERE / "bad").rglob(f"*{suffix}"))


CASES = names(".yaml")


@pytest.mark.parametrize("case", CASES)
def test_bad_spec_gives_its_lines(case, monkeypatch):
    monkeypatch.chdir(HERE)
    with pytest.raises(SpecErrors) as caught:
        load(Path("bad") / f"{case}.yaml")
    assert f"{caught.value}\n" == Path("bad", f"{case}.txt").read_text(encoding="utf-8")
    assert caught.value.exit_code == 2


def test_every_bad_spec_has_lines_and_all_lines_a_spec():
    assert names(".txt") == CASES
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES)
def test_lines_are_in_order_and_in_no_librarys_words(case):
    lines = (HERE / "bad" / f"{case}.txt").read_text(encoding="utf-8").splitlines()
    places = [tuple(map(int, line.split(":", 3)[1:3])) for line in lines]
    assert places == sorted(places)
    for line in lines:
        assert not any(
            word in line.lower() for word in ("input", "pydantic", "http", "valid", "expected", "tuple", "dict")
        )
