"""Identifiers keep to the words that were chosen: a word that another one replaced does not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from checked_in import GOLDEN

ROOT = Path(__file__).resolve().parents[2]

# Each word that is gone, and the word for it.
GONE = {
    "crossed": "interleaved, block by block",
    "few_rows": "rows_32, pdl_rows: the number or its use",
    "in_parts": "q_halves: Q in two e4m3 halves",
    "in_turn": "block_by_block, next_free",
    "manners": "contract",
    "redo": "recompute",
    "redoes": "recomputes",
    "spared": "unused",
    "spoilt": "overflowed",
    "told": "the value's name: advice, refusal, offsets",
    "held": "the value's name: kv_row, proved, contents; kept",
    "wide_calls": "rows64_calls",
    "wide_row": "rows64_row",
    "write_both": "write_keys_query",
    "run_both": "run_keys_query",
    "both_tile": "keys_query_tile",
}
# A kernel is FAMILY_sm90_VARIANT.
TURNED_NAME = re.compile(r"(?:^|_)sm90_(?:topk|mqa_logits|dense_decode|dense_fwd|sparse_fwd|sparse_decode)(?:_|$)")
FILES = (
    *ROOT.glob("mlagen/**/*.py"),
    *ROOT.glob("templates/**/*.jinja"),
    *(path for path in ROOT.glob("tests/**/*.py") if GOLDEN not in path.parents and path != Path(__file__)),
)
PROSE = re.compile(r'\{#.*?#\}|""".*?"""|"[^"\n]*"|#[^\n]*', re.DOTALL)


def identifiers(text: str, *, is_python: bool) -> set[str]:
    """Identifiers of a Python file, or of a template without its comments and strings. Names of tests are sentences."""
    if is_python:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = {token.string for token in tokens if token.type == tokenize.NAME}
    else:
        found = set(re.findall(r"[A-Za-z_]\w*", PROSE.sub("", text)))
    return {name for name in found if not name.startswith("test_")}


def words(name: str) -> str:
    """An identifier in lower case, its words joined by underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def faults(names: set[str]) -> Iterator[str]:
    """Return identifiers with a word that is gone, and the word for it."""
    for name in sorted(names):
        for word, instead in GONE.items():
            if re.search(rf"(?:^|_){word}(?:_|$)", words(name)):
                yield f"{name}: write {instead}"
        if TURNED_NAME.search(words(name)):
            yield f"{name}: write FAMILY_sm90"


def test_identifiers_have_no_word_that_is_gone() -> None:
    assert len(FILES) > 500
    found = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        names = identifiers(path.read_text(encoding="utf-8"), is_python=path.suffix == ".py")
        found += [f"{name}: {fault}" for fault in faults(names)]
    assert found == []


@pytest.mark.parametrize("name", ["_in_turn", "WideRow", "SPARED", "sm90_topk", "DENSE_WIDE_CALLS", "HeldRow", "told"])
def test_a_word_that_is_gone_is_found(name: str) -> None:
    assert list(faults({name}))


def test_text_that_is_no_identifier_may_have_any_word() -> None:
    python = '"""spoilt"""\ndef test_redo():\n    return "in_turn"  # spared\n'
    assert identifiers(python, is_python=True) == {"def", "return"}
    assert identifiers('{# spoilt #}\nx = "redo"  # spared\n', is_python=False) == {"x"}
