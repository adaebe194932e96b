"""The site's Markdown is GitHub's: links may leave docs/, and a list may follow a paragraph without an empty line.

A relative link to a file of the repository outside docs/ leads to the repository. Zensical finds this extension by its
name if it runs in the checkout: `python -m zensical build`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

DOCS = Path(__file__).absolute().parent
ROOT = DOCS.parent
LISTS_PRIORITY = 24  # after fenced code was taken out
LINKS_PRIORITY = 1
LIST_AT_ONCE = re.compile(r"^((?![-*] |\d+\. |[ |#>]).+\n)(?=- )", re.MULTILINE)  # a paragraph's line, then a list's


class GitHub(Extension):
    """Both rules.

    Args:
        repository: address of the repository.
    """

    def __init__(self, **settings: str) -> None:
        self.config = {"repository": ["", "address of the repository"]}
        super().__init__(**settings)

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the rules."""
        md.preprocessors.register(_Lists(md), "lists_at_once", LISTS_PRIORITY)
        md.treeprocessors.register(_Links(md, self.getConfig("repository")), "repository_links", LINKS_PRIORITY)


class _Lists(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return LIST_AT_ONCE.sub(r"\1\n", "\n".join(lines)).split("\n")


class _Links(Treeprocessor):
    def __init__(self, md: Markdown, repository: str) -> None:
        super().__init__(md)
        self.repository = repository

    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        folder = (DOCS / context.page.path).parent if context else DOCS
        for link in root.iter("a"):
            link.set("href", self._followed(link.get("href", ""), folder))

    def _followed(self, href: str, folder: Path) -> str:
        parts = urlsplit(href)
        path = Path(os.path.normpath(folder / parts.path))
        if parts.scheme or parts.netloc or not parts.path or not path.is_relative_to(ROOT) or not path.exists():
            return href
        if path.is_relative_to(DOCS) and path.is_file():
            return href
        kind = "tree" if path.is_dir() else "blob"
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"{self.repository}/{kind}/main/{path.relative_to(ROOT).as_posix()}{anchor}"


def makeExtension(**settings: str) -> GitHub:  # noqa: N802
    """Return the extension, as Markdown asks a module for it."""
    return GitHub(**settings)
