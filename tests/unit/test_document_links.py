"""Tests that links between pages, and from the source code to pages, are valid."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from each_case import each_case

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE_LINK = re.compile(r"\b(docs/[a-z/_-]+\.md)#([a-z0-9-]+)")


def prose_lines(page: Path) -> list[str]:
    """Returns the lines of a page without its code blocks."""
    collected, code = [], False
    for line in page.read_text().splitlines():
        code ^= line.startswith("```")
        if not code:
            collected.append(line)
    return collected


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as common Markdown renderers generate them."""
    collected, counts = set(), Counter[str]()
    for line in prose_lines(page):
        if re.match(r"#{1,6} ", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            collected.add(f"{name}-{counts[name]}" if counts[name] else name)
            counts[name] += 1
    return collected


@each_case("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_resolve(page: Path) -> None:
    for line in prose_lines(page):
        for target in LINK.findall(line):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, anchor = target.partition("#")
            target_path = (page.parent / file).resolve() if file else page
            assert target_path.exists(), target
            assert not anchor or anchor in anchors(target_path), target


def test_documentation_links_in_source_resolve() -> None:
    for source in ROOT.glob("src/**/*.py"):
        for file, anchor in PAGE_LINK.findall(source.read_text()):
            assert anchor in anchors(ROOT / file), (source.name, file, anchor)


def test_modules_in_architecture_page_exist() -> None:
    """Decision records are exempt: they name the modules of their time."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    package = ROOT / "src" / "paceline"
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py))`", text):
        assert (ROOT / name).exists() or any(package.rglob(name.rstrip("/"))), name


def test_tests_in_security_page_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text()
    listed_tests = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(listed_tests) > 20
    for name in listed_tests:
        assert (ROOT / name).is_file(), name


def test_index_lists_pages_except_decisions() -> None:
    docs = ROOT / "docs"
    listed = {docs / target for target in LINK.findall((docs / "index.md").read_text())}
    pages = set(docs.glob("*/*.md"))
    assert pages - listed == set()
