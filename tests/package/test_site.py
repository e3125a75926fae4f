"""Tests the documentation site: it has every page, its search works, it contacts no other host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chromium import PROGRAM, Chromium

pytest.importorskip("zensical")

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "src" / "paceline" / "explain" / "rules"
PAGES = [
    *(page.relative_to(ROOT / "docs").with_suffix(".html") for page in ROOT.glob("docs/**/*.md")),
    *(Path("reference/failures", f"{rule.stem}.html") for rule in RULES.glob("*.md")),
]
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")
MAX_POLLS = 100


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "tools/site/build.py", str(folder)]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def test_site_and_search_index_have_every_page(site: Path) -> None:
    missing = [page for page in PAGES if not (site / page).is_file()]
    assert not missing
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    indexed = {item["location"].partition("#")[0] or "index.html" for item in items}
    assert {page.as_posix() for page in PAGES} <= indexed


def test_navigation_names_every_page(site: Path) -> None:
    text = (site.parent / "zensical.toml").read_text(encoding="utf-8")
    missing = [page for page in PAGES if f'"{page.with_suffix(".md").as_posix()}"' not in text]
    assert not missing, "add them to docs/index.md"


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = LOADED.findall(page.read_text(encoding="utf-8"))
        assert loaded
        foreign = [address for address in loaded if re.match(r"(?:\w+:)?//", address)]
        assert not foreign, page


def test_broken_link_fails_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("docs", "bench", "tools/site", "src/paceline/explain/rules"):
        shutil.copytree(ROOT / folder, copy / folder)
    with (copy / "docs" / "index.md").open("a", encoding="utf-8") as file:
        for broken in ("no-such-page.md", "reference/run.md#no-such-heading"):
            file.write(f"\nSee [this]({broken}).\n")
    command = [sys.executable, "tools/site/build.py"]
    result = subprocess.run(command, cwd=copy, check=False, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "page does not exist" in output
    assert "anchor does not exist" in output


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="needs Chromium")
def test_search_works_from_disk(site: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        browser.show(site / "index.html", 1200)
        browser.ask("document.querySelector('.md-search__button').click()")
        for letter in "straggler":
            browser.press(letter)
        for _ in range(MAX_POLLS):  # a web worker searches; the results are in a shadow tree
            tree = json.dumps(browser.do("DOM.getDocument", depth=-1, pierce=True))
            if re.search(r"\b\d+ results?\b", tree):
                break
            time.sleep(0.1)
        assert re.search(r"\b\d+ results?\b", tree)
        assert not browser.complaints
