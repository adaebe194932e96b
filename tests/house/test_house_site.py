"""The documents as a site: every page is in the navigation, reached from the index, and built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_house_docs import links_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md"))
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
LACKS = [name for name in ("mkdocstrings", "zensical") if importlib.util.find_spec(name) is None]
needs_zensical = pytest.mark.skipif(
    bool(LACKS), reason=f"no {', '.join(LACKS)}: pip install -c constraints.txt -e '.[docs]'"
)


def entries(nav: Any) -> list[str]:
    """The pages and patterns of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [entry for one in below for entry in entries(one)]


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        env={**os.environ, "NO_COLOR": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_navigation_has_each_page_once() -> None:
    of_docs = [entry for entry in entries(SITE["nav"]) if "://" not in entry]
    named = [entry for entry in of_docs if "*" not in entry]
    matched = [
        path.relative_to(DOCS).as_posix()
        for entry in of_docs
        if "*" in entry
        for path in DOCS.glob(entry)
        if path.relative_to(DOCS).as_posix() not in named
    ]
    assert sorted([*named, *matched]) == PAGES


def test_navigation_follows_a_first_hour() -> None:
    order = entries(SITE["nav"])
    hour = ["README.md", "install.md", "first-package.md", "layouts.md", "vllm.md", "sglang.md", "own-engine.md"]
    hour += ["verification.md", "tritons.md", "performance/README.md", "benchmarks/README.md", "api/README.md"]
    hour += ["decisions/README.md"]
    assert [entry for entry in order if entry in hour] == hour


def test_navigation_has_each_example() -> None:
    examples = [entry for entry in entries(SITE["nav"]) if "/examples/" in entry]
    folders = sorted(path.name for path in (ROOT / "examples").iterdir() if (path / "README.md").is_file())
    assert examples == [f"{SITE['repo_url']}/tree/main/examples/{name}" for name in folders]


@pytest.mark.parametrize("index", [page for page in PAGES if page.endswith("README.md")])
def test_index_links_each_page_beside_it(index: str) -> None:
    linked = {link for link, _ in links_of(DOCS / index)}
    beside = {path.name for path in (DOCS / index).parent.glob("*.md")} - {"README.md"}
    assert sorted(beside - linked) == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, left = set(), [DOCS / "README.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        for link, _ in links_of(page):
            target = (page.parent / link).resolve()
            found = target.glob("*.md") if target.is_dir() else [target]
            left += [one for one in found if one.suffix == ".md" and one.is_relative_to(DOCS)]
    assert sorted(set(PAGES) - {path.relative_to(DOCS).as_posix() for path in reached}) == []


def test_api_pages_are_of_packages_that_exist() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md")}
    named = [(page, name) for page, text in texts.items() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert named
    for page, name in named:
        places = [root / name.replace(".", "/") for root in (ROOT, ROOT / "generated")]
        assert any(place.is_dir() or place.with_suffix(".py").is_file() for place in places), f"{page}: {name}"


@needs_zensical
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if path.name not in ("docs", "mkdocs.yml", ".git", ".cache", "build"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    for page in PAGES:
        html = site / re.sub(r"(^|/)README$", r"\1index", page.removesuffix(".md"))
        html = html.with_suffix(".html") if html.name == "index" else html / "index.html"
        assert html.is_file(), page
    for html in site.glob("**/*.html"):
        for source in re.findall(r'<img [^>]*src="([^"]+)"', html.read_text(encoding="utf-8")):
            assert (html.parent / source).resolve().is_file(), f"{html}: {source}"
    # Wrappers with their arguments, which no import found: torch and triton stay out.
    reference = (site / "api" / "dsv32" / "index.html").read_text(encoding="utf-8")
    assert 'id="dsv32.flash_mla_sparse_fwd"' in reference
    assert "enable_batch_invariant" in reference
    # A link to a file of the repository leads there.
    layouts = (site / "layouts" / "index.html").read_text(encoding="utf-8")
    assert f'href="{SITE["repo_url"]}/blob/main/tests/generated/golden/own_layout.yaml"' in layouts


def small_site(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A site of two pages under the rules of this one."""
    docs = folder / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "site.py", docs)
    (docs / "README.md").write_text(text)
    (docs / "b1.md").write_text("# A page named B\n")
    site = {name: SITE[name] for name in ("site_name", "repo_url", "exclude_docs", "markdown_extensions", "validation")}
    nav = ["README.md", {"Others": ["b*.md"]}]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump({**site, "nav": nav, "plugins": ["literate-nav"]}))
    return build(folder)


@needs_zensical
def test_the_site_renders_documents_as_github_does(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    text = "# Title\n\n```\ncode\n- code\n```\n\nOf a paragraph:\n- an item, [c](../mkdocs.yml), [s](../specs/)\n"
    done = small_site(tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="./b1/"' in page
    assert "A page named B" in page
    assert f'<li>an item, <a href="{SITE["repo_url"]}/blob/main/mkdocs.yml">' in page
    assert f'href="{SITE["repo_url"]}/tree/main/specs"' in page
    assert "code\n- code\n" in page


@needs_zensical
def test_an_anchor_of_nothing_is_refused(tmp_path: Path) -> None:
    done = small_site(tmp_path, "# Title\n\n[a](#gone)\n")
    assert done.returncode == 1
    assert "anchor does not exist" in re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
