"""What the site needs beyond mkdocs: patterns in `nav`, and documents that are written for GitHub.

They link to files of the repository by relative paths. On the site those lead to the repository; what does not exist is
left to mkdocs, whose strict build refuses it. And a list may follow a paragraph without an empty line between.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BEFORE_MKDOCS = 1  # its own processor of links has priority 0
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LIST_AT_ONCE = re.compile(r"^((?![-*] |\d+\. |[ |#>]).+\n)(?=- )", re.MULTILINE)  # a line of a paragraph, then a list's


def on_config(config: Any) -> Any:
    """Expands the patterns of `nav`, in the order of names, and adds the processor of links."""
    repository = config.repo_url.rstrip("/")
    config.nav = _expanded(config.nav, _named(config.nav), repository)
    config.markdown_extensions.append(_Links(repository))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Notes which page the next links are of, and sets lists apart from the paragraphs before them."""
    _Processor.folder = Path(page.file.abs_src_path).parent
    fences = FENCED.findall(markdown)
    texts = [LIST_AT_ONCE.sub(r"\1\n", text) for text in FENCED.split(markdown)]
    return "".join(part for pair in zip(texts, [*fences, ""], strict=True) for part in pair)


def _named(entry: Any) -> set[str]:
    """The pages that an entry of `nav` names."""
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        return set().union(*map(_named, entry))
    return {entry}


def _expanded(entries: list[Any], named: set[str], repository: str) -> list[Any]:
    """Entries with each pattern replaced by the pages that fit it and have no entry of their own.

    One that leaves docs/ stands for folders, of which each becomes a link to the repository.
    """
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            inner = {
                title: _expanded(below, named, repository) if isinstance(below, list) else below
                for title, below in entry.items()
            }
            found.append(inner)
        elif entry.startswith("../"):
            folders = sorted(path for path in ROOT.glob(entry.removeprefix("../")) if path.is_dir())
            found += [{f"Example: {path.name}": _address(repository, path)} for path in folders]
        elif "*" in entry:
            pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(entry))
            found += [page for page in pages if page not in named]
        else:
            found.append(entry)
    return found


def _address(repository: str, path: Path) -> str:
    """Where the repository shows a file or a folder."""
    return f"{repository}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT).as_posix()}"


class _Links(Extension):
    """Adds the processor of links.

    Args:
        repository: address of the repository.
    """

    def __init__(self, repository: str) -> None:
        super().__init__()
        self.repository = repository

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Registers it before mkdocs' own."""
        md.treeprocessors.register(_Processor(md, self.repository), "repository_links", BEFORE_MKDOCS)


class _Processor(Treeprocessor):
    folder = ROOT  # of the page at hand

    def __init__(self, md: Markdown, repository: str) -> None:
        super().__init__(md)
        self.repository = repository

    def run(self, root: Element) -> None:
        """Replaces the address of each link that mkdocs could not follow."""
        for link in root.iter("a"):
            link.set("href", self._followed(link.get("href", "")))

    def _followed(self, href: str) -> str:
        parts = urlsplit(href)
        if parts.scheme or parts.netloc or not parts.path:
            return href
        path = (self.folder / parts.path).resolve()
        of_site = path.is_file() and path.is_relative_to(DOCS)
        if of_site or not path.exists() or not path.is_relative_to(ROOT):
            return href
        return _address(self.repository, path) + (f"#{parts.fragment}" if parts.fragment else "")
