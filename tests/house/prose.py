"""Count forms of English that are hard to read, in documents and in the comments and docstrings of the code."""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
RATES = Path(__file__).with_name("prose.yaml")

# Left out: records of the past, generated tables and notices.
LEFT_OUT = ("CHANGELOG.md", "docs/performance/log.md", "docs/benchmarks/h", "generated", "tests/generated/golden")

# The forms, by their name in prose.yaml.
FORMS = {
    # "what" in place of a noun: "What breaks a limit is printed". A question keeps its "what".
    "what": re.compile(r"\bwhat(?:ever)?\b(?![^.!?]*\?)", re.IGNORECASE),
    # Chains of relative clauses: "the kernels of which", "the files in which".
    "chain": re.compile(r"\b(?:of|in|by|to|from|for|with|on) which\b|\bwhose\b", re.IGNORECASE),
    # "only" as a trailing "alone", "also" as a trailing "too", "as well as" as "beside".
    "trailing": re.compile(r"\b(?:alone|too)(?=[.,;:)])|\bbeside\b", re.IGNORECASE),
}
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
TARGET = re.compile(r"(?<=\])\([^)\s]*\)")  # of a link
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
JINJA = re.compile(r"\{[%#].*?[%#]\}|\{\{.*?\}\}", re.DOTALL)


class Finding(NamedTuple):
    """A form found in a text: its line, its name and the sentence around it."""

    line: int
    form: str
    words: str


def _blanked(text: str, *patterns: re.Pattern[str]) -> str:
    """Return the text with matches of the patterns blanked. Line numbers stay the same."""
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def prose_of(path: Path) -> str:
    """Return the prose of a file: Markdown without code, or the comments and docstrings of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _blanked(text, FENCE, COMMENT, CODE, TARGET)
    if path.suffix == ".jinja":
        return _template_prose(text)
    lines = [""] * (text.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += token.string.lstrip("#")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            said = node.body[0]
            for number in range(said.lineno, (said.end_lineno or said.lineno) + 1):
                lines[number - 1] = text.splitlines()[number - 1]
    return _blanked("\n".join(lines), CODE)


def _template_prose(text: str) -> str:
    """Return the comments and docstrings of a template. It does not parse as Python, so quotes are counted."""
    quoted, lines = False, []
    for line in _blanked(text, JINJA).splitlines():
        marks = line.count('"""')
        inside = quoted or marks
        comment = re.search(r"(?:^|\s)#(.*)", line)
        lines.append(line if inside else comment[1] if comment else "")
        quoted ^= marks == 1
    return _blanked("\n".join(lines), CODE)


def findings(text: str) -> Iterator[Finding]:
    """Yield each form found in a text."""
    for form, pattern in FORMS.items():
        for match in pattern.finditer(text):
            before = text[: match.start()]
            begin = max(before.rfind(". ") + 1, before.rfind(".\n") + 1, before.rfind("\n\n") + 1)
            end = re.compile(r"\.\s|\n\n|\Z").search(text, match.end())
            sentence = " ".join(text[begin : end.start() + 1 if end else len(text)].split())
            yield Finding(text.count("\n", 0, match.start()) + 1, form, sentence[:200])


def rooms() -> Mapping[str, list[Path]]:
    """Return the files of each page and room. A page is a document, a room a folder of mlagen, templates or tests."""
    found: dict[str, list[Path]] = {}
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    for path in sorted(documents):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(LEFT_OUT):
            found["docs/decisions" if name.startswith("docs/decisions/") else name] = [
                *found.get("docs/decisions" if name.startswith("docs/decisions/") else name, []),
                path,
            ]
    for top, pattern in (("mlagen", "*.py"), ("templates", "*.jinja"), ("tests", "*.py")):
        for path in sorted((ROOT / top).rglob(pattern)):
            inside = path.relative_to(ROOT).parts
            found.setdefault("/".join(inside[:2]) if len(inside) > 2 else top, []).append(path)
    return found


def rates_of(paths: list[Path]) -> dict[str, float]:
    """Return how often each form occurs in 1,000 words."""
    texts = [prose_of(path) for path in paths]
    words = sum(len(WORD.findall(text)) for text in texts)
    counts = {form: sum(len(pattern.findall(text)) for text in texts) for form, pattern in FORMS.items()}
    return {form: round(1000 * count / words, 1) if words else 0.0 for form, count in counts.items()}


def read_rates() -> dict[str, dict[str, float]]:
    """Return the highest rates that each page and room may have."""
    found: dict[str, dict[str, float]] = yaml.safe_load(RATES.read_text(encoding="utf-8"))
    return found


def update() -> None:
    """Lower the known rates to today's, and add the rates of new pages and rooms."""
    known = read_rates() if RATES.exists() else {}
    lines = ["# How often a form may occur in 1,000 words. Made by: python tests/house/prose.py --update"]
    for name, paths in sorted(rooms().items()):
        rates = {form: min(rate, known.get(name, {}).get(form, rate)) for form, rate in rates_of(paths).items()}
        lines.append(f"{name}: {{{', '.join(f'{form}: {rate:g}' for form, rate in rates.items())}}}")
    RATES.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sentences of the given files that have a form, or lower the rates."""
    parser = argparse.ArgumentParser(
        prog="python tests/house/prose.py",
        description="Print each sentence that has one of the hard forms, with its file, line and form.",
        epilog=f"Forms: {', '.join(FORMS)}. The rates that each page and room may have are in tests/house/prose.yaml.",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="a .md, .py or .jinja file")
    parser.add_argument("--update", action="store_true", help="lower the rates in prose.yaml to today's")
    given = parser.parse_args(arguments)
    if bool(given.files) == given.update:
        parser.error("pass files, or --update")
    for path in given.files:
        if not path.is_file():
            parser.error(f"{path} is no file")
        if path.suffix not in (".md", ".py", ".jinja"):
            parser.error(f"{path}: expected a .md, .py or .jinja file")
        for found in sorted(findings(prose_of(path))):
            print(f"{path}:{found.line}: {found.form}: {found.words}")
    if given.update:
        update()


if __name__ == "__main__":
    main()
