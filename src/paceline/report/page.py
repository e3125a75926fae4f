"""The value of a report's page, and its rendering as one HTML file.

The file works offline and may be passed on: it contains the styles, the script and the drawing
library (Apache ECharts). All other content is untrusted text, which enters the page only through
:func:`escaped` and :func:`as_json`. The content security policy allows only our two scripts, by
their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Literal

from paceline.report.bundle import redact
from paceline.spec.terminal import clean

CELL = 2000  # characters of a cell
TEXT = 50_000  # of a paragraph

Status = Literal["good", "bad", "unsure"]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text with a caption; a collapsed one shows only the caption until it is opened."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    collapsed: bool = True


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing with a description and the numbers behind it.

    Attributes:
        kind: Name of the drawing function in ``page.js``.
        data: Argument of the drawing function.
        height: In CSS pixels.
    """

    kind: str
    title: str
    description: str
    data: Mapping[str, Any]
    table: Table | None = None
    height: int = 280


@dataclass(frozen=True, slots=True)
class ItemList:
    """A list of pairs of CSS class and text; numbered if figures refer to the numbers."""

    items: Sequence[tuple[str, str]]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph; kind ``pre`` keeps line breaks, ``command`` is to be typed.

    With a ``summary``, the text is collapsed below it, unless ``expanded``.
    """

    text: str
    kind: Literal["", "pre", "command", "small"] = ""
    summary: str = ""
    expanded: bool = False


Part = Table | Figure | ItemList | Paragraph


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Page:
    """A report: title, outcome in one sentence, facts (names and values) and sections."""

    title: str
    status: Status
    outcome: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def terminal_tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Titles and rows for a terminal: the facts, else all tables that are not collapsed."""
        if self.facts:
            return [(["figure", "value"], [[*fact] for fact in self.facts])]
        parts = [part for section in self.sections for part in section.parts]
        return [([*part.titles], [[*row] for row in part.rows])
                for part in parts if isinstance(part, Table) and not part.collapsed]  # fmt: skip


_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
_STATUS_SIGNS = {"good": "✓", "bad": "✕", "unsure": "?"}


def escaped(text: str, max_chars: int = CELL) -> str:
    """Escapes untrusted text for HTML, without control characters and secrets, and bounded."""
    text = str(text)
    if _NUMBER.fullmatch(text[: max_chars + 1]):  # true for most cells, and quick
        return text[:max_chars]
    text = redact(clean(text[: max_chars + 1]))
    return escape(text[:max_chars]) + "…" * (len(text) > max_chars)


def as_json(value: Any) -> str:
    """Encodes a value for a script block, which nothing in it can end."""
    text = json.dumps(_redacted(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(clean(value[:CELL]))
    if isinstance(value, Mapping):
        return {str(name): _redacted(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(entry) for entry in value]
    return value


def html(page: Page) -> str:
    return "".join(_html(page))


def _html(page: Page) -> Iterator[str]:
    library, script = _asset("echarts.js"), _asset("page.js")
    allowed = " ".join(map(_csp_hash, (library, script)))
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        f" style-src 'unsafe-inline'; script-src {allowed}\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="generator" content="paceline">\n'
        f"<title>{escaped(page.title)} · Paceline report</title>\n"
        f"<style>{_asset('page.css')}</style></head>\n<body>\n"
        '<a class="skip" href="#content">Skip to the content</a>\n<header>\n'
        f'<p class="name">{escaped(page.title)}</p>\n'
        f'<h1 class="{page.status}"><span class="sign" aria-hidden="true">'
        f"{_STATUS_SIGNS[page.status]}</span> {escaped(page.outcome)}</h1>\n"
    )
    if page.facts:
        yield '<dl class="figures">'
        for name, value in page.facts:
            yield f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
        yield "</dl>\n"
    yield '<nav aria-label="Sections"><ul>'
    for number, section in enumerate(page.sections):
        yield f'<li><a href="#s{number}">{escaped(section.title)}</a></li>'
    yield '</ul></nav>\n</header>\n<main id="content">\n'
    figures = list[Mapping[str, Any]]()
    for number, section in enumerate(page.sections):
        title = escaped(section.title)
        yield f'<section aria-labelledby="s{number}"><h2 id="s{number}">{title}</h2>\n'
        for part in section.parts:
            yield from _part(part, figures)
        yield "</section>\n"
    yield (
        "</main>\n<footer><p>Written by Paceline, from the files of the run directory."
        " Pictures are drawn by Apache ECharts (Apache License 2.0).</p></footer>\n"
    )
    if figures:
        yield f'<script type="application/json" id="pictures">{as_json(figures)}</script>\n'
        yield f"<script>{library}</script>\n<script>{script}</script>\n"
    yield "</body></html>\n"


def _part(part: Part, figures: list[Mapping[str, Any]]) -> Iterator[str]:
    if isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, ItemList):
        tag = "ol" if part.numbered else "ul"
        yield f'<{tag} class="listed">'
        for css_class, text in part.items:
            yield f'<li class="{escape(css_class)}">{escaped(text)}</li>'
        yield f"</{tag}>\n"
    elif isinstance(part, Paragraph):
        yield from _paragraph(part)
    else:
        number = len(figures)
        figures.append({"kind": part.kind, "title": part.title, **part.data})
        yield f"<figure><figcaption><h3>{escaped(part.title)}</h3>"
        yield f'<p id="says{number}">{escaped(part.description)}</p></figcaption>'
        yield (
            f'<div class="picture" id="p{number}" style="height:{part.height}px" tabindex="0"'
            f' role="img" aria-label="{escaped(part.title)}" aria-describedby="says{number}"></div>'
            f'<p class="readout" id="r{number}" aria-live="polite"></p>'
            '<noscript><p class="small">The picture needs JavaScript; its numbers are below.</p>'
            "</noscript>"
        )
        if part.table is not None:
            yield from _table(part.table)
        yield "</figure>\n"


def _paragraph(part: Paragraph) -> Iterator[str]:
    if part.kind in ("pre", "command"):
        label = "Command" if part.kind == "command" else "Text"
        text = (
            f'<pre class="{part.kind}" tabindex="0" aria-label="{label}">'
            f"{escaped(part.text, TEXT)}</pre>"
        )
    else:
        text = f'<p class="{part.kind}">{escaped(part.text, TEXT)}</p>'
    if part.summary:
        state = " open" * part.expanded
        text = f"<details{state}><summary>{escaped(part.summary)}</summary>{text}</details>"
    yield text + "\n"


def _table(table: Table) -> Iterator[str]:
    if table.collapsed:
        yield f"<details><summary>{escaped(table.caption)}</summary>"
    yield '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
    yield f"<caption>{escaped(table.caption)}</caption>" if not table.collapsed else ""
    yield "<thead><tr>"
    numeric = [_numeric_column([row[column] for row in table.rows if column < len(row)])
               for column in range(len(table.titles))]  # fmt: skip
    for title, is_numeric in zip(table.titles, numeric, strict=True):
        kind = ' class="number"' if is_numeric else ""
        yield f'<th scope="col"{kind}>{escaped(title)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>"
        for column, cell in enumerate(row):
            tag = "td" if column else "th scope=row"
            kind = ' class="number"' if column < len(numeric) and numeric[column] else ""
            yield f"<{tag}{kind}>{escaped(cell)}</{tag[:2]}>"
        yield "</tr>"
    yield "</tbody></table></div>"
    yield "</details>" if table.collapsed else ""
    yield "\n"


def _numeric_column(cells: Sequence[str]) -> bool:
    texts = [str(cell) for cell in cells if cell]
    return bool(texts) and all(len(text) < 24 and _NUMBER.fullmatch(text) for text in texts)


@cache
def _asset(name: str) -> str:
    text = files("paceline.report").joinpath("assets", name).read_text(encoding="utf-8")
    if name.endswith(".js"):
        assert "</script" not in text.lower()
    return text


def _csp_hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
