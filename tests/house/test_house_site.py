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
LACKS = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(
    bool(LACKS), reason=f"no {', '.join(LACKS)}: pip install -c constraints.txt -e '.[docs]'"
)


def entries(nav: Any) -> list[str]:
    """The pages and patterns of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [entry for one in below for entry in entries(one)]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_navigation_has_each_page_once() -> None:
    of_docs = [entry for entry in entries(SITE["nav"]) if not entry.startswith("../")]
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
    hour = ["README.md", "install.md", "first-package.md", "vllm*.md", "sglang*.md", "transformers*.md"]
    hour += ["own-engine.md", "layouts.md", "tritons.md", "verification.md", "benchmarks/README.md"]
    hour += ["performance/README.md", "decisions/README.md", "api/README.md"]
    assert [entry for entry in order if entry in hour] == hour


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
    for page in DOCS.glob("api/*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            places = [root / name.replace(".", "/") for root in (ROOT, ROOT / "generated")]
            assert any(place.is_dir() or place.with_suffix(".py").is_file() for place in places), f"{page.name}: {name}"


@needs_mkdocs
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in PAGES:
        html = tmp_path / "site" / re.sub(r"(^|/)README$", r"\1index", page.removesuffix(".md"))
        html = html.with_suffix(".html") if html.name == "index" else html / "index.html"
        assert html.is_file(), page
    # Wrappers with their arguments, which no import found: torch and triton stay out.
    reference = (tmp_path / "site" / "api" / "dsv32" / "index.html").read_text(encoding="utf-8")
    assert 'id="dsv32.flash_mla_sparse_fwd"' in reference
    assert "enable_batch_invariant" in reference
    # A link to a file of the repository leads there.
    layouts = (tmp_path / "site" / "layouts" / "index.html").read_text(encoding="utf-8")
    assert f'href="{SITE["repo_url"]}/blob/main/specs/own_layout.yaml"' in layouts


WRONG = {
    "a page that is in no navigation": "other.md",
    "a link to nothing": "'gone.md'",
    "a link to no file of the repository": "'../gone.py'",
    "an anchor of nothing": "'#gone'",
}


def small_site(folder: Path, nav: list[str], **pages: str) -> subprocess.CompletedProcess[str]:
    """A site of few pages under the rules of this one."""
    docs = folder / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "hooks.py", docs)
    for name, text in pages.items():
        (docs / f"{name}.md").write_text(text)
    site = {name: SITE[name] for name in ("site_name", "repo_url", "exclude_docs", "hooks", "validation")}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump({**site, "nav": nav}))
    return build(folder / "mkdocs.yml", folder / "site")


@needs_mkdocs
def test_navigation_takes_pages_and_examples_that_exist(tmp_path: Path) -> None:
    (tmp_path / "examples" / "some").mkdir(parents=True)
    text = "# Title\n\n```\ncode\n- code\n```\n\nOf a paragraph:\n- an item\n"
    done = small_site(tmp_path, ["README.md", "absent*.md", "b*.md", "../examples/*"], README=text, b1="# B")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="b1/"' in page
    assert f'href="{SITE["repo_url"]}/tree/main/examples/some"' in page
    assert "<li>an item</li>" in page
    assert "code\n- code\n" in page


@needs_mkdocs
def test_a_site_with_faults_is_refused(tmp_path: Path) -> None:
    text = "# Title\n\n[a](gone.md), [b](../gone.py), [c](#gone), [d](../mkdocs.yml)\n"
    done = small_site(tmp_path, ["README.md", "absent*.md"], README=text, other="# Other")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line or line.startswith("  - ")]
    assert [what for what, said in WRONG.items() if not any(said in line for line in warnings)] == []
    assert "mkdocs.yml" not in "".join(warnings)
