"""Links between the documents, and from the program's texts to them, lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from each_case import each_case

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
TOLD = re.compile(r"\b(docs/[a-z/_-]+\.md)#([a-z0-9-]+)")


def plain_lines(page: Path) -> list[str]:
    """The lines of a page without its blocks of code."""
    found, code = [], False
    for line in page.read_text().splitlines():
        code ^= line.startswith("```")
        if not code:
            found.append(line)
    return found


@cache
def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as the usual renderers make them."""
    found, known = set(), Counter[str]()
    for line in plain_lines(page):
        if re.match(r"#{1,6} ", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{name}-{known[name]}" if known[name] else name)
            known[name] += 1
    return found


@each_case("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for line in plain_lines(page):
        for target in LINK.findall(line):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, anchor = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_places_that_the_program_names_are_there() -> None:
    for source in ROOT.glob("src/**/*.py"):
        for file, anchor in TOLD.findall(source.read_text()):
            assert anchor in anchors(ROOT / file), (source.name, file, anchor)


def test_modules_that_the_map_names_exist() -> None:
    """Decision records are not held to this: they name what was there at the time."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    package = ROOT / "src" / "paceline"
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py))`", text):
        assert (ROOT / name).exists() or any(package.rglob(name.rstrip("/"))), name


def test_tests_that_the_page_about_security_names_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).is_file(), name


def test_index_lists_every_page_but_decisions() -> None:
    docs = ROOT / "docs"
    listed = {docs / target for target in LINK.findall((docs / "index.md").read_text())}
    pages = set(docs.glob("*/*.md"))
    assert pages - listed == set()
