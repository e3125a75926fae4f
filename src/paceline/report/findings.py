"""Renders findings for people: the conclusion, its remedy, then the other findings.

Everything is plain lines; :func:`draw` adds colour on a terminal. No information is in the colour
alone: every outcome is also a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from paceline.spec.finding import Finding, Outcome
from paceline.spec.terminal import clean, clean_line, format_for

LABELS: dict[Outcome, str] = {"fail": "FAIL", "unknown": "unknown", "warn": "warn", "pass": "ok"}
STYLES: dict[Outcome, str] = {
    "fail": "bold red", "unknown": "magenta", "warn": "yellow", "pass": "green",
}  # fmt: skip
ORDER: tuple[Outcome, ...] = ("fail", "unknown", "warn", "pass")

Cells = Sequence[Sequence[str]]


def lines(conclusion: str, findings: Sequence[Finding], include_passed: bool = False) -> list[str]:
    """The conclusion with its remedy, then the other findings that did not pass.

    The finding that the conclusion quotes is not repeated.
    """
    selected = [finding for finding in findings if include_passed or finding.outcome != "pass"]
    ranked = sorted(selected, key=lambda finding: ORDER.index(finding.outcome))
    quoted = next((finding for finding in ranked if finding.message in conclusion), None)
    text = [conclusion, *(_remedy(quoted) if quoted is not None else [])]
    for finding in ranked:
        if finding is not quoted:
            text.append(f"{LABELS[finding.outcome]:<8} {finding.check}: {finding.message}")
            text += _remedy(finding)
    return text


def _remedy(finding: Finding) -> list[str]:
    lines = finding.remedy.splitlines()
    return [f"         {' ' if index else '→'} {line}" for index, line in enumerate(lines)]


def grid(hosts: Sequence[str], findings: Sequence[Finding]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a table of hosts and checks; a cell has the gravest outcome's label."""
    checks = list(dict.fromkeys(finding.check for finding in findings))
    rows = [[host, *(_cell(host, check, findings) for check in checks)] for host in hosts]
    return ["host", *checks], rows


def _cell(host: str, check: str, findings: Sequence[Finding]) -> str:
    outcomes = [f.outcome for f in findings if f.check == check and host in f.hosts]
    return LABELS[min(outcomes, key=ORDER.index)] if outcomes else "·"


def matrix(
    names: Sequence[str], rates: Mapping[tuple[str, str], str]
) -> tuple[list[str], list[list[str]]]:
    rows = [[source, *(rates.get((source, target), "·") for target in names)] for source in names]
    return ["from \\ to", *names], rows


def aligned(titles: Sequence[str], rows: Cells) -> list[str]:
    """Formats a table as lines of plain text, with two blanks between columns."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def fitting(
    titles: list[str], rows: list[list[str]], width: int
) -> tuple[list[str], list[list[str]]]:
    """Transposes a table that is too wide, if that makes it narrower."""
    transposed = [list(column) for column in zip(titles, *rows, strict=True)]
    table_width = max(map(len, aligned(titles, rows)))
    transposed_width = max(map(len, aligned(transposed[0], transposed[1:])))
    if table_width <= width or transposed_width >= table_width:
        return titles, rows
    return transposed[0], transposed[1:]


def environment_lines(environment: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines with the chosen variables of each host, those of all hosts once."""
    if not environment:
        return []
    first, *other_hosts = environment.values()
    common = {name: value for name, value in first.items()
              if all(other.get(name) == value for other in other_hosts)}  # fmt: skip
    lines = [f"all hosts: {_assignments(common)}"] if common else []
    for host, variables in environment.items():
        specific = {name: value for name, value in variables.items() if name not in common}
        lines += [f"{host}: {_assignments(specific)}"] if specific else []
    return lines


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def draw(text: Sequence[str], tables: Sequence[tuple[list[str], list[list[str]]]],
         footer: Sequence[str], out: TextIO, is_plain: bool = False) -> None:  # fmt: skip
    """Writes lines, tables and lines, in colour if ``out`` is a terminal unless ``is_plain``."""
    if is_plain or not out.isatty():
        blocks = [text, *(aligned(*table) for table in tables), footer]
        out.write(clean("\n\n".join("\n".join(block) for block in blocks if block)) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)
    for index, line in enumerate(text):
        style = _style(line.split(" ", 1)[0]) if index else "bold"
        console.print(Text(format_for(line, out), style=style), soft_wrap=True)
    for titles, rows in (fitting(*table, console.width) for table in tables):
        drawn = Table(*titles, box=None, pad_edge=False, header_style="dim")
        for row in rows:
            drawn.add_row(*(Text(clean_line(cell), style=_style(cell)) for cell in row))
        console.print()
        console.print(drawn)
    console.print()
    for line in footer:
        console.print(Text(format_for(line, out), style="dim"), soft_wrap=True)


def _style(label: str) -> str:
    return next((STYLES[outcome] for outcome in ORDER if LABELS[outcome] == label), "")
