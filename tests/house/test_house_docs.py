"""Commands, options and paths in the documents exist."""

import ast
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from mlagen.cli import main
from mlagen.spec import load

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = [
    ROOT / "templates",
    *(ROOT / "templates" / name for name in ("flashinfer_bench", "hub", "sglang", "sm90", "vllm")),
]
INDEXES = [ROOT / "generated" / "README.md", *(folder / "README.md" for folder in TEMPLATES)]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *INDEXES])
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRITES = re.compile(r" > (\S+)$")
COMMAND = re.compile(r"^(?:\$ )?(?:\./dev )?mlagen (.+?)(?:\s+#.*)?$", re.MULTILINE)
FIRST_CELL = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
PACKAGE = re.compile(r"^\| \[(\w+)\]\(\1(?:\.diff)?\) \| ([^|]+) \|", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PLACED = re.compile(r"`(\w+)`\s+(?:of|in)\s+`((?:mlagen|tests)/[\w/]+\.py)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def commands() -> list[str]:
    """Every `mlagen ...` line of the documents' fenced blocks."""
    found = []
    for document in DOCUMENTS:
        for block in FENCE.findall(document.read_text(encoding="utf-8")):
            found += COMMAND.findall(block)
    return sorted(set(found))


def written() -> set[str]:
    """Files that a documented command writes."""
    return {match[1] for line in commands() if (match := WRITES.search(line))}


def parse(command: click.Command, words: list[str]) -> None:
    """Parses a command line as click would, and runs nothing."""
    with command.make_context(command.name, words) as context:
        if isinstance(command, click.Group):
            rest = [*context._protected_args, *context.args]
            _, child, rest = command.resolve_command(context, rest)
            assert child is not None
            parse(child, rest)


@pytest.mark.parametrize("line", commands())
def test_documented_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(WRITES.sub("", line))
    parse(main, words)
    for word in words:
        path = word.partition(":")[0]
        if path.endswith((".yaml", ".py")):
            assert path in written() or (ROOT / path).exists(), f"{line}: no {path}"


def test_readme_opens_with_the_command_that_builds() -> None:
    assert "build specs/dsv32.yaml" in commands()


def exported(package: Path) -> set[str]:
    """The exports of a package's `__init__.py`."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names)


@pytest.mark.parametrize(
    ("document", "modules"),
    [
        ("README.md", {"dsv32"}),
        ("docs/first-package.md", {"dsv32"}),
        ("docs/own-engine.md", {"mlagen.verify"}),
        ("docs/api/mlagen.md", {"mlagen.plan", "mlagen.emit", "mlagen.verify"}),
    ],
)
def test_documented_imports_are_exported(document: str, modules: set[str]) -> None:
    snippets = PYTHON.findall((ROOT / document).read_text(encoding="utf-8"))
    found = set()
    for node in (node for snippet in snippets for node in ast.walk(ast.parse(snippet))):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            found.add(node.module)
            place = ROOT / "generated" / node.module
            names = exported(place if place.is_dir() else ROOT / node.module.replace(".", "/"))
            assert {alias.name for alias in node.names} <= names
    assert found == modules


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_python_can_be_parsed(document: Path) -> None:
    for snippet in PYTHON.findall(document.read_text(encoding="utf-8")):
        ast.parse(snippet)


def test_names_that_documents_find_in_a_module_are_defined_there() -> None:
    """An import does not count: who follows the document wants to change the definition. History keeps old places."""
    documents = (one for one in DOCUMENTS if one.parent.name != "decisions" and one.name != "log.md")
    texts = (one.read_text(encoding="utf-8") for one in documents)
    found = {placed for text in texts for placed in PLACED.findall(text)}
    assert ("Target", "mlagen/spec/targets.py") in found
    for name, module in sorted(found):
        defined = re.search(
            rf"^(?:class |def )?{name}\b(?!\.)", (ROOT / module).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert defined, f"{name} of {module}"


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in main.commands if f"`{name}" not in readme] == []


def links_of(document: Path) -> list[tuple[str, str]]:
    """A document's links to files: path, empty for its own, and anchor, empty without."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    return [(link, anchor) for link, anchor in LINK.findall(text) if "://" not in link]


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = HEADING.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link, anchor in links_of(document):
        target = document.parent / link if link else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{link}#{anchor}"


@pytest.mark.parametrize("folder", TEMPLATES, ids=lambda path: path.name)
def test_index_of_templates_names_every_file_once(folder: Path) -> None:
    named = FIRST_CELL.findall((folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in folder.glob("*.jinja"))


def test_index_of_generated_packages_names_each_as_its_spec_does() -> None:
    named = PACKAGE.findall((ROOT / "generated" / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted((path.stem, load(path).title) for path in ROOT.glob("specs/*.yaml"))


def test_page_of_the_indexer_names_each_package_with_one_as_its_spec_does() -> None:
    specs = {path.stem: load(path).indexer for path in ROOT.glob("specs/*.yaml")}
    said = set()
    for line in (ROOT / "docs" / "indexer.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].isdigit():
            names, topks = cells[0].split(", "), cells[2].split(", ")
            unrotated = cells[3].startswith("none; ")
            style, place = (None, None) if unrotated else re.split(r"[,;] ", cells[3])[:2]
            ratio = 4 if cells[3].endswith("a key stands for 4 tokens") else 1
            for name, topk in zip(names, topks * len(names) if len(topks) == 1 else topks, strict=True):
                said.add((name, int(cells[1]), int(topk), style, place, ratio))
    found = {(name, of) for name, of in specs.items() if of is not None}
    assert said == {(name, of.num_heads, of.topk, of.rope, of.rope_at, of.compress_ratio) for name, of in found}


def test_page_of_random_calls_counts_as_its_reports_do() -> None:
    page = ROOT / "docs" / "random-calls" / "README.md"
    total = 0
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = [link for link, _ in LINK.findall(line) if link.endswith(".json")]
        if len(cells) == 5 and names:
            reports = [json.loads((page.parent / name).read_text(encoding="utf-8")) for name in names]
            sums = [sum(report[key] for report in reports) for key in ("calls", "wrong", "hangs")]
            assert cells[2:] == [f"{count:,}" for count in sums], line
            total += sums[0]
    assert f"| all | | {total:,} | 0 | 0 |" in page.read_text(encoding="utf-8")
    assert f"{total:,} random calls" in (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")


def test_readme_claims_the_speeds_of_its_chart() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (chart,) = re.findall(r"!\[Speed against the best peer on H100, 1\.0 is equal: (.*?)\]", readme)
    speeds = dict(bar.rsplit(" ", 1) for bar in chart.split("; "))
    words = " ".join(readme.split())
    assert f"takes {speeds['sparse prefill, bf16 rows']} times as long in sparse prefill" in words
    assert f"{speeds['sparse decode over fp8_ds_mla']} times in sparse decode over `fp8_ds_mla`" in words
    assert f"{speeds['dense decode, long requests']} times in dense decode of long requests" in words
