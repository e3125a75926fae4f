"""What a report's page says, as a value, and that value as one HTML file.

The file opens without a network and may be passed on, so all of it is in there: styles, the script
and the library that draws (Apache ECharts). Everything else is text, most of it of strangers, and
gets into the page by :func:`escaped` and :func:`as_json` alone. Only our two scripts are allowed
to run, by their hashes, whatever else should get in.
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
TEXT = 50_000  # of a text

Mood = Literal["good", "bad", "unsure"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text.

    Attributes:
        titles: Of the columns.
        rows: As many cells each.
        about: What they say; stands above.
        folded: Shown when it is asked for.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str
    folded: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, with what it says in words.

    Attributes:
        kind: Which function of ``page.js`` draws it.
        title: Above it.
        says: What is to be seen in it.
        data: For that function.
        table: The numbers behind it.
        height: In CSS pixels.
    """

    kind: str
    title: str
    says: str
    data: Mapping[str, Any]
    table: Table | None = None
    height: int = 280


@dataclass(frozen=True, slots=True)
class Listed:
    """Sentences, numbered where pictures name their numbers.

    Attributes:
        items: Text and mood of each.
        numbered: Begin each with its number.
    """

    items: Sequence[tuple[str, str]]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph; of ``kind`` ``pre`` with its line ends, ``command`` to be typed."""

    text: str
    kind: Literal["", "pre", "command", "small"] = ""
    folded: str = ""  # the words behind which it is hidden
    opened: bool = False  # not until somebody wishes so


Part = Table | Picture | Listed | Words


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Page:
    """A report.

    Attributes:
        title: The run's name.
        mood: How it went.
        outcome: In one sentence.
        figures: Names and values that stand under it.
        sections: In order.
    """

    title: str
    mood: Mood
    outcome: str
    figures: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def open_tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Titles and rows of what a terminal shows of it: the figures, else the tables that are
        not folded away."""
        if self.figures:
            return [(["figure", "value"], [[*figure] for figure in self.figures])]
        parts = [part for section in self.sections for part in section.parts]
        return [([*part.titles], [[*row] for row in part.rows])
                for part in parts if isinstance(part, Table) and not part.folded]  # fmt: skip


# -- as HTML -------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
_MOODS = {"good": "✓", "bad": "✕", "unsure": "?"}


def escaped(text: str, most: int = CELL) -> str:
    """Text of whatever origin as HTML: without what would be obeyed, secrets, or endless length."""
    text = str(text)
    if _NUMBER.fullmatch(text[: most + 1]):  # most cells of most tables
        return text[:most]
    text = redact(clean(text[: most + 1]))
    return escape(text[:most]) + "…" * (len(text) > most)


def as_json(value: Any) -> str:
    """A value for a script block: nothing in it ends the block, or a line of a script."""
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return redact(clean(value[:CELL]))
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value


def html(page: Page) -> str:
    """The file."""
    return "".join(_html(page))


def _html(page: Page) -> Iterator[str]:
    library, script = _asset("echarts.js"), _asset("page.js")
    allowed = " ".join(map(_hash_of, (library, script)))
    drawn = any(isinstance(part, Picture) for section in page.sections for part in section.parts)
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
        f'<h1 class="{page.mood}"><span class="sign" aria-hidden="true">{_MOODS[page.mood]}</span>'
        f" {escaped(page.outcome)}</h1>\n"
    )
    if page.figures:
        yield '<dl class="figures">'
        for name, value in page.figures:
            yield f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"
        yield "</dl>\n"
    yield '<nav aria-label="Sections"><ul>'
    for number, section in enumerate(page.sections):
        yield f'<li><a href="#s{number}">{escaped(section.title)}</a></li>'
    yield '</ul></nav>\n</header>\n<main id="content">\n'
    pictures = list[Mapping[str, Any]]()
    for number, section in enumerate(page.sections):
        title = escaped(section.title)
        yield f'<section aria-labelledby="s{number}"><h2 id="s{number}">{title}</h2>\n'
        for part in section.parts:
            yield from _part(part, pictures)
        yield "</section>\n"
    yield (
        "</main>\n<footer><p>Written by Paceline, from the files of the run directory."
        " Pictures are drawn by Apache ECharts (Apache License 2.0).</p></footer>\n"
    )
    if drawn:
        yield f'<script type="application/json" id="pictures">{as_json(pictures)}</script>\n'
        yield f"<script>{library}</script>\n<script>{script}</script>\n"
    yield "</body></html>\n"


def _part(part: Part, pictures: list[Mapping[str, Any]]) -> Iterator[str]:
    if isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Listed):
        tag = "ol" if part.numbered else "ul"
        yield f'<{tag} class="listed">'
        for mood, text in part.items:
            yield f'<li class="{escape(mood)}">{escaped(text)}</li>'
        yield f"</{tag}>\n"
    elif isinstance(part, Words):
        yield from _words(part)
    else:
        number = len(pictures)
        pictures.append({"kind": part.kind, "title": part.title, **part.data})
        yield f"<figure><figcaption><h3>{escaped(part.title)}</h3>"
        yield f'<p id="says{number}">{escaped(part.says)}</p></figcaption>'
        yield (
            f'<div class="picture" id="p{number}" style="height:{part.height}px" tabindex="0"'
            f' role="img" aria-label="{escaped(part.title)}" aria-describedby="says{number}"></div>'
            f'<p class="readout" id="r{number}" aria-live="polite"></p>'
            '<noscript><p class="small">The picture needs JavaScript; its numbers stand below.</p>'
            "</noscript>"
        )
        if part.table is not None:
            yield from _table(part.table)
        yield "</figure>\n"


def _words(part: Words) -> Iterator[str]:
    if part.kind in ("pre", "command"):
        label = "Command" if part.kind == "command" else "Text"
        text = (
            f'<pre class="{part.kind}" tabindex="0" aria-label="{label}">'
            f"{escaped(part.text, TEXT)}</pre>"
        )
    else:
        text = f'<p class="{part.kind}">{escaped(part.text, TEXT)}</p>'
    if part.folded:
        how = " open" * part.opened
        text = f"<details{how}><summary>{escaped(part.folded)}</summary>{text}</details>"
    yield text + "\n"


def _table(table: Table) -> Iterator[str]:
    if table.folded:
        yield f"<details><summary>{escaped(table.about)}</summary>"
    yield '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
    yield f"<caption>{escaped(table.about)}</caption>" if not table.folded else ""
    yield "<thead><tr>"
    numeric = [_numeric_column([row[at] for row in table.rows if at < len(row)])
               for at in range(len(table.titles))]  # fmt: skip
    for title, of_numbers in zip(table.titles, numeric, strict=True):
        kind = ' class="number"' if of_numbers else ""
        yield f'<th scope="col"{kind}>{escaped(title)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        yield "<tr>"
        for at, cell in enumerate(row):
            tag = "th scope=row" if at == 0 else "td"
            kind = ' class="number"' if at < len(numeric) and numeric[at] else ""
            yield f"<{tag}{kind}>{escaped(cell)}</{tag[:2]}>"
        yield "</tr>"
    yield "</tbody></table></div>"
    yield "</details>" if table.folded else ""
    yield "\n"


def _numeric_column(cells: Sequence[str]) -> bool:
    """Whether a column has numbers, and nothing else."""
    told = [str(cell) for cell in cells if cell]
    return bool(told) and all(len(cell) < 24 and _NUMBER.fullmatch(cell) for cell in told)


@cache
def _asset(name: str) -> str:
    text = files("paceline.report").joinpath("assets", name).read_text(encoding="utf-8")
    if name.endswith(".js"):
        assert "</script" not in text.lower()
    return text


def _hash_of(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
