"""Builds the documentation site: ``python tools/site/build.py [FOLDER]`` (``build/docs``).

It writes Zensical's sources into FOLDER/source, its configuration into FOLDER/zensical.toml and the
site into FOLDER/site. The build fails on broken links. Three things differ from ``docs/``:

* The navigation has the order of docs/index.md; decision records follow the explanations.
* Pages outside of docs/ that a page links to (measurements) and the rules of ``paceline explain``
  become pages of the site.
* ``file=NAME`` of a code block becomes its title.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RULES = "src/paceline/explain/rules"
# where the site has folders of the repository
PLACES = {"docs": "", "bench": "measurements", RULES: "reference/failures"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
ENTRY = re.compile(r"^\* \[([^\]]+)\]\(([^)#]+\.md)\)", re.MULTILINE)

CONFIGURATION = """\
[project]
site_name = "Paceline"
site_description = "Takes a PyTorch training job from one machine to all the machines you have."
docs_dir = "source"
site_dir = "site"
nav = NAV

[project.theme]
font = false
features = ["navigation.indexes", "navigation.sections", "navigation.footer", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"

[project.markdown_extensions.toc]
permalink = true
# anchors as in the repository's viewer: "--" stays
slugify = { object = "pymdownx.slugs.slugify", kwds = { case = "lower" } }

[project.markdown_extensions.tables]

[project.markdown_extensions.pymdownx.highlight]

[project.markdown_extensions.pymdownx.superfences]

[project.plugins.offline]

# in place of the copy on unpkg.com that the plug-in would name; search on file:// needs it
[[project.extra.polyfills]]
path = "assets/iframe-worker.js"
"""


def main(folder: Path) -> int:
    """Builds the site into ``folder``; returns Zensical's exit status."""
    source = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    (source / "assets").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "site" / "iframe-worker.js", source / "assets")
    write_pages(source)
    navigation = json.dumps(list(sections()), ensure_ascii=False)
    text = CONFIGURATION.replace("NAV", navigation.replace('": ', '" = '))
    (folder / "zensical.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=folder, check=False).returncode


def sections() -> Iterator[dict[str, object]]:
    """The navigation: the second-level headings of docs/index.md with the pages listed below."""
    yield {"Home": "index.md"}
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        pages: list[dict[str, object]] = [{title: path} for title, path in ENTRY.findall(body)]
        if heading == "Reference":
            pages.append({"Failures": [_entry(page) for page in failures()]})
        if heading == "Explanation":
            records = sorted((DOCS / "explanation" / "decisions").glob("*.md"))
            pages.append({"Decisions": [_entry(place(page), page) for page in records]})
        yield {heading: pages}


def _entry(page: str, source: Path | None = None) -> dict[str, object]:
    title = re.search(r"^# (.+)", source.read_text(encoding="utf-8"), re.M) if source else None
    return {title[1] if title else PurePosixPath(page).stem: page}


def failures() -> list[str]:
    """The site's pages about failures: the index, then one for each rule."""
    rules = sorted((ROOT / RULES).glob("*.md"))
    return [f"{PLACES[RULES]}/index.md", *map(place, rules)]


def place(file: Path) -> str:
    """Where the site has a file of the repository. ``LookupError`` if it has no place for it."""
    path = file.relative_to(ROOT).as_posix()
    for folder, there in PLACES.items():
        if path.startswith(f"{folder}/"):
            return f"{there}/{path.removeprefix(folder + '/')}".lstrip("/")
        if path == folder:
            return f"{there}/index.md"
    raise LookupError(f"{path} is not part of the site; link to a page under {', '.join(PLACES)}")


def write_pages(source: Path) -> None:
    """Writes all pages, and those they link to, with their links as the site has them."""
    waiting = [*DOCS.rglob("*.md"), *(ROOT / RULES).glob("*.md")]
    written = set()
    while waiting:
        page = waiting.pop()
        if page in written:
            continue
        written.add(page)
        text, targets = site_text(page)
        _write(source / place(page), text)
        waiting += [target for target in targets if target.suffix == ".md"]
    rows = [f"* [`{rule.stem}`]({rule.name}): {_heading(rule)}"
            for rule in sorted((ROOT / RULES).glob("*.md"))]  # fmt: skip
    text = "# Failures that Paceline knows\n\n`paceline explain` names these causes.\n\n"
    _write(source / PLACES[RULES] / "index.md", text + "\n".join(rows) + "\n")


def _heading(rule: Path) -> str:
    return site_text(rule)[0].removeprefix("# ").partition("\n")[0]


def site_text(page: Path) -> tuple[str, list[Path]]:
    """A page's text for the site, and the files of the repository that it links to."""
    text = page.read_text(encoding="utf-8")
    if page.parent == ROOT / RULES:
        text = re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.DOTALL)
        text = text.replace("\n", f"\n\n`paceline explain` calls it `{page.stem}`.\n", 1)
    elif not page.is_relative_to(DOCS):
        text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"  # measurements are read from a link
    targets = []

    def link(match: re.Match[str]) -> str:
        if ":" in match[1]:
            return match[1]
        target = (page.parent / match[1]).resolve()
        if not target.exists():
            return match[1]  # Zensical reports it
        targets.append(target)
        return os.path.relpath(place(target), PurePosixPath(place(page)).parent)

    text = re.sub(r"^(```\w+) file=(\S+)", r'\1 title="\2"', text, flags=re.MULTILINE)
    return LINK.sub(link, text), targets


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").absolute()))
