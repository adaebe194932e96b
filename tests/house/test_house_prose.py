"""Pages, comments and docstrings become easier to read, never harder: the rates of forms that put readers off."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import FORMS, ROOT, findings, main, prose_of, rates_of, read_rates, rooms

HINT = "see the sentences with: python tests/house/prose.py FILE; lower the rates with: ... --update"
PAGES_OF_NEWCOMERS = ("README.md", "docs/first-package.md")
SPARE = 0.3  # in 1,000 words, so that a sentence taken out of a long room needs no new number


@pytest.mark.parametrize("name", sorted(rooms()))
def test_a_form_becomes_rarer_in_each_page_and_room(name: str) -> None:
    known, found = read_rates().get(name), rates_of(rooms()[name])
    assert known is not None, f"{name} is not in prose.yaml; {HINT}"
    assert {form: rate for form, rate in found.items() if rate > known[form] + SPARE} == {}, HINT


def test_no_rate_is_kept_for_a_page_that_is_gone() -> None:
    assert sorted(read_rates().keys() - rooms().keys()) == [], HINT


@pytest.mark.parametrize("name", PAGES_OF_NEWCOMERS)
def test_pages_of_newcomers_name_their_nouns(name: str) -> None:
    assert rates_of(rooms()[name])["what"] <= 0.5, HINT


@pytest.mark.parametrize("name", sorted(name for name in rooms() if name.endswith(".md")))
def test_every_page_names_its_nouns(name: str) -> None:
    assert rates_of(rooms()[name])["what"] <= 1.0, HINT


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("What breaks a limit is printed.", ["what"]),
        ("Kernels over a limit are printed. What does that cost?", []),
        ("the template of which `what` stands", ["chain"]),
        ("It runs on sm90 alone, and is compiled too.", ["trailing", "trailing"]),
        ("Pass it to the kernel alone with the mask.", []),
    ],
)
def test_forms_are_found(text: str, forms: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n\n```sh\nwhat of which too.\n```\n")
    assert [found.form for found in findings(prose_of(page))] == forms


def test_comments_and_docstrings_of_code_are_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""What it is."""\nwhat = "what"  # what is left\n')
    template = tmp_path / "kernel.py.jinja"
    template.write_text('{% if what %}\n    """What it does."""\nwhat = 1  # what is left\n{% endif %}\n')
    for path in (module, template):
        assert [found.form for found in findings(prose_of(path))] == ["what", "what"]


def test_every_form_has_a_rate_everywhere() -> None:
    assert all(rates.keys() == FORMS.keys() for rates in read_rates().values())


def test_the_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass files, or --update"),
        (["--update", "a.md"], "pass files, or --update"),
        (["absent.md"], "absent.md is no file"),
        ([str(ROOT / "LICENSE")], "expected a .md, .py or .jinja file"),
    ],
)
def test_the_command_refuses_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_the_command_prints_place_form_and_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nIt prints what breaks.\n")
    main([str(page)])
    assert capsys.readouterr().out == f"{page}:3: what: It prints what breaks.\n"
