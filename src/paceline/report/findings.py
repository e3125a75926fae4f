"""Findings as people read them: the conclusion first, then what to do, then what is well.

Everything is plain lines; :func:`draw` adds colour where there is a terminal. Colour never stands
alone: every outcome is also a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from paceline.spec.finding import Finding, Outcome
from paceline.spec.terminal import clean, clean_line, for_reader

WORDS: dict[Outcome, str] = {"fail": "FAIL", "unknown": "unknown", "warn": "warn", "pass": "ok"}
STYLES: dict[Outcome, str] = {
    "fail": "bold red",
    "unknown": "magenta",
    "warn": "yellow",
    "pass": "green",
}
ORDER: tuple[Outcome, ...] = ("fail", "unknown", "warn", "pass")

Cells = Sequence[Sequence[str]]


def lines(conclusion: str, findings: Sequence[Finding], everything: bool = False) -> list[str]:
    """The text: conclusion, then what to do about it, then the other findings that are not well.

    The finding that the conclusion quotes is not said again.

    Args:
        conclusion: One sentence.
        findings: All of them.
        everything: Also those that are well.
    """
    shown = [f for f in findings if everything or f.outcome != "pass"]
    ranked = sorted(shown, key=lambda finding: ORDER.index(finding.outcome))
    quoted = next((finding for finding in ranked if finding.message in conclusion), None)
    others = [finding for finding in ranked if finding is not quoted]
    first = [conclusion, *(_remedy(quoted) if quoted is not None else [])]
    return first + [line for finding in others for line in _finding(finding)]


def _finding(finding: Finding) -> list[str]:
    return [f"{WORDS[finding.outcome]:<8} {finding.check}: {finding.message}", *_remedy(finding)]


def _remedy(finding: Finding) -> list[str]:
    lines = finding.remedy.splitlines()
    return [f"         {'→' if at == 0 else ' '} {line}" for at, line in enumerate(lines)]


def grid(hosts: Sequence[str], findings: Sequence[Finding]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table hosts × checks; a cell is the gravest outcome's word."""
    checks = list(dict.fromkeys(finding.check for finding in findings))
    rows = [[host, *(_cell(host, check, findings) for check in checks)] for host in hosts]
    return ["host", *checks], rows


def _cell(host: str, check: str, findings: Sequence[Finding]) -> str:
    said = [f.outcome for f in findings if f.check == check and host in f.hosts]
    return WORDS[min(said, key=ORDER.index)] if said else "·"


def matrix(names: Sequence[str], rates: Mapping[tuple[str, str], str],
           title: str) -> tuple[list[str], list[list[str]]]:  # fmt: skip
    """Titles and rows of a table from × to."""
    rows = [[one, *(rates.get((one, two), "·") for two in names)] for one in names]
    return [title, *names], rows


def aligned(titles: Sequence[str], rows: Cells) -> list[str]:
    """A table as lines of plain text, columns two blanks apart."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def fitting(
    titles: list[str], rows: list[list[str]], width: int
) -> tuple[list[str], list[list[str]]]:
    """The table, turned on its side where it is too wide so and narrower that way."""
    turned = [list(column) for column in zip(titles, *rows, strict=True)]
    if _width(titles, rows) <= width or _width(turned[0], turned[1:]) >= _width(titles, rows):
        return titles, rows
    return turned[0], turned[1:]


def _width(titles: Sequence[str], rows: Cells) -> int:
    """Columns of text that a table takes, two blanks between its own."""
    return max(map(len, aligned(titles, rows)))


def environment_lines(environment: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The variables chosen, by host; what all hosts share stands once."""
    if not environment:
        return []
    first, *others = environment.values()
    common = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
    shown = [f"all hosts: {_assignments(common)}"] if common else []
    for host, variables in environment.items():
        own = {k: v for k, v in variables.items() if k not in common}
        shown += [f"{host}: {_assignments(own)}"] if own else []
    return shown


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def draw(text: Sequence[str], tables: Sequence[tuple[list[str], list[list[str]]]],
         after: Sequence[str], out: TextIO) -> None:  # fmt: skip
    """Writes lines, tables and lines; coloured where ``out`` is a terminal."""
    if not out.isatty():
        blocks = [text, *(aligned(*table) for table in tables), after]
        out.write(clean("\n\n".join("\n".join(block) for block in blocks if block)) + "\n")
        return
    _draw_rich(text, tables, after, out)


def _draw_rich(text: Sequence[str], tables: Sequence[tuple[list[str], list[list[str]]]],
               after: Sequence[str], out: TextIO) -> None:  # fmt: skip
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)
    for at, line in enumerate(text):
        style = "bold" if at == 0 else _style(line)
        console.print(Text(for_reader(line, out), style=style), soft_wrap=True)
    for titles, rows in (fitting(*table, console.width) for table in tables):
        drawn = Table(*titles, box=None, pad_edge=False, header_style="dim")
        for row in rows:
            drawn.add_row(*(Text(clean_line(cell), style=_cell_style(cell)) for cell in row))
        console.print()
        console.print(drawn)
    console.print()
    for line in after:
        console.print(Text(for_reader(line, out), style="dim"), soft_wrap=True)


def _cell_style(cell: str) -> str:
    by_word = {WORDS[outcome]: STYLES[outcome] for outcome in ORDER}
    return by_word.get(cell, "")


def _style(line: str) -> str:
    return _cell_style(line.split(" ", 1)[0])
