"""Tests the help of every verb: layout, options, defaults and line length."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from each_case import each_case
from paceline.cli import program
from paceline.recipes import RECIPES
from paceline.recipes.use import (
    BenchmarkOptions,
    EvaluateOptions,
    ExportOptions,
    PredictOptions,
    QuantizeOptions,
    TranslateOptions,
)
from paceline.spec.helptext import Row, render


def verbs(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*prefix, name)
        if isinstance(command, click.Group):
            yield from verbs(command, (*prefix, name))


COMMANDS = [(), *verbs(program), *[("train", name) for name in RECIPES]]
CASES = [
    pytest.param((*words, flag), id=" ".join([*words, flag]))
    for words in COMMANDS
    for flag in ("--help", "--help-all")
]


def help_of(*words: str) -> str:
    completed = CliRunner().invoke(program, words, prog_name="paceline", env={"COLUMNS": "80"})
    assert completed.exit_code == 0, completed.output
    return completed.output


def rows(text: str) -> dict[str, str]:
    """Returns the rows of a help text by their first column."""
    help_rows: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if re.match(r"  -", line):
            current = re.split(r"\s{2,}", line.strip())[0]
            help_rows[current] = line
        elif line.startswith(" " * 20) and current:
            help_rows[current] += " " + line.strip()
        else:
            current = ""
    return help_rows


@each_case("words", CASES)
def test_help_layout(words: tuple[str, ...]) -> None:
    text = help_of(*words)
    assert text.startswith(f"Usage: {' '.join(['paceline', *words[:-1]])} ")
    assert "(default: '')" not in text
    assert "[default" not in text
    assert not re.search(r"[│╭╰]", text)
    for line in text.splitlines():
        assert len(line) <= 80 or "/" in line, line
    for label, row in rows(text).items():
        assert row.lower().count("default:") <= 1, row
        assert len(row.strip()) > len(label), f"{label} says nothing"


@pytest.mark.parametrize("verb", ["run", "train", "evaluate"])
def test_help_shows_defaults(verb: str) -> None:
    help_rows = rows(help_of(verb, "--help-all"))
    for flag, default in {
        "--grace SECONDS": "8", "--lease SECONDS": "10", "--check full|quick|none": "quick",
        "--show all|rank0|none": "all", "--bind auto|none": "auto", "--rdzv-timeout SECONDS": "300",
        "--shm-size SIZE": "8g", "-H, --hosts SOURCE": "this machine",
    }.items():  # fmt: skip
        assert f"Default: {default}." in help_rows[flag]


def test_brief_help_refers_to_full_help() -> None:
    brief_help, full_help = help_of("run", "--help"), help_of("run", "--help-all")
    assert len(brief_help.splitlines()) < 54 < len(full_help.splitlines())
    assert "more options: paceline run --help-all" in brief_help
    assert "--sbatch-arg" not in brief_help
    assert "  --detach " in brief_help
    assert "--sbatch-arg" in full_help


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("evaluate", EvaluateOptions),
        ("predict", PredictOptions),
        ("translate", TranslateOptions),
        ("export", ExportOptions),
        ("benchmark", BenchmarkOptions),
        ("quantize", QuantizeOptions),
    ],
)
def test_help_lists_forwarded_options(verb: str, kind: type) -> None:
    text = help_of(verb, "--help")
    for field in dataclasses.fields(kind):
        if field.name not in ("run", "inputs", "sentences"):
            assert f"  --{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize("name", RECIPES)
def test_full_help_of_recipe_lists_options(name: str) -> None:
    full_help = help_of("train", name, "--help-all")
    options = RECIPES[name].options
    for field in dataclasses.fields(options):
        is_shown = f"  --{field.name.replace('_', '-')} " in full_help
        assert is_shown == (field.name not in options.unused), field.name
    assert len(help_of("train", name, "--help").splitlines()) < 75


def test_help_omits_inapplicable_options() -> None:
    assert "  --plan " not in help_of("bench", "collectives", "--help-all")
    assert "  --requeue" not in help_of("bench", "scaling", "--help-all")


def test_help_wraps_between_words() -> None:
    row = Row(
        "--flag",
        "Some a-long-word-with-dashes `as typed` " * 9,
        choices=("one", "two"),
        default="one",
    )
    text = render("paceline x", "About it.", [("Options", [row])], width=50)
    assert text.count("a-long-word-with-dashes") == text.count("`as typed`") == 9
    assert max(map(len, text.splitlines())) <= 50
    assert " ".join(text.split()).endswith("One of: one, two. Default: one.")


@pytest.mark.parametrize("option", ["--seconds", "--price"])
def test_invalid_number_error_shows_value(option: str) -> None:
    result = CliRunner().invoke(program, ["forecast", option, "much", "image"])
    assert result.exit_code == 2
    assert re.search(r"'much' is not a valid number( of seconds)?\.", result.output)


@pytest.mark.parametrize("duration", ["10x", "-1", "1h30", "nan"])
def test_invalid_duration_error_shows_format(duration: str) -> None:
    result = CliRunner().invoke(program, ["run", "--wait-for-nodes", duration, "train.py"])
    assert result.exit_code == 2
    assert "type 90, 10m or 1h30m" in result.output
