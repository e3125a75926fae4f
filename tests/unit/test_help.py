"""The help of every verb: one form, real options, each default once, lines that fit."""

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


def verbs(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*before, name)
        if isinstance(command, click.Group):
            yield from verbs(command, (*before, name))


EVERY = [(), *verbs(program), *[("train", name) for name in RECIPES]]
CASES = [
    pytest.param((*words, flag), id=" ".join([*words, flag]))
    for words in EVERY
    for flag in ("--help", "--help-all")
]


def help_of(*words: str) -> str:
    done = CliRunner().invoke(program, words, prog_name="paceline", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def rows(text: str) -> dict[str, str]:
    """What stands before a row's text → the whole row."""
    found: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if re.match(r"  -", line):
            last = re.split(r"\s{2,}", line.strip())[0]
            found[last] = line
        elif line.startswith(" " * 20) and last:
            found[last] += " " + line.strip()
        else:
            last = ""
    return found


@each_case("words", CASES)
def test_the_form(words: tuple[str, ...]) -> None:
    text = help_of(*words)
    assert text.startswith(f"Usage: {' '.join(['paceline', *words[:-1]])} ")
    assert "(default: '')" not in text
    assert "[default" not in text
    assert not re.search(r"[│╭╰]", text)
    for line in text.splitlines():
        assert len(line) <= 80 or "/" in line, line
    for left, row in rows(text).items():
        assert row.lower().count("default:") <= 1, row
        assert len(row.strip()) > len(left), f"{left} says nothing"


@pytest.mark.parametrize("verb", ["run", "train", "evaluate"])
def test_every_option_has_its_default(verb: str) -> None:
    found = rows(help_of(verb, "--help-all"))
    for flag, default in {
        "--grace SECONDS": "8", "--lease SECONDS": "10", "--check full|quick|none": "quick",
        "--show all|rank0|none": "all", "--bind auto|none": "auto", "--rdzv-timeout SECONDS": "300",
        "--shm-size SIZE": "8g", "-H, --hosts SOURCE": "this machine",
    }.items():  # fmt: skip
        assert f"Default: {default}." in found[flag]


def test_the_short_help_is_short_and_says_where_the_rest_is() -> None:
    short, whole = help_of("run", "--help"), help_of("run", "--help-all")
    assert len(short.splitlines()) < 54 < len(whole.splitlines())
    assert "more options: paceline run --help-all" in short
    assert "--sbatch-arg" not in short
    assert "  --detach " in short
    assert "--sbatch-arg" in whole


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
def test_what_a_verb_passes_on_stands_in_its_help(verb: str, kind: type) -> None:
    text = help_of(verb, "--help")
    for field in dataclasses.fields(kind):
        if field.name not in ("run", "inputs", "sentences"):
            assert f"  --{field.name.replace('_', '-')} " in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_shows_all_its_options_on_request(name: str) -> None:
    whole = help_of("train", name, "--help-all")
    options = RECIPES[name].options
    for field in dataclasses.fields(options):
        is_shown = f"  --{field.name.replace('_', '-')} " in whole
        assert is_shown == (field.name not in options.unused), field.name
    assert len(help_of("train", name, "--help").splitlines()) < 75


def test_options_without_effect_are_not_offered() -> None:
    assert "  --plan " not in help_of("bench", "collectives", "--help-all")
    assert "  --requeue" not in help_of("bench", "scaling", "--help-all")


def test_lines_wrap_between_words() -> None:
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
def test_what_is_no_number_is_told_so_in_words_of_the_reader(option: str) -> None:
    ended = CliRunner().invoke(program, ["forecast", option, "much", "image"])
    assert ended.exit_code == 2
    assert re.search(r"'much' is not a valid number( of seconds)?\.", ended.output)


@pytest.mark.parametrize("typed", ["10x", "-1", "1h30", "nan"])
def test_a_duration_that_cannot_be_read_is_told_how_one_is_written(typed: str) -> None:
    ended = CliRunner().invoke(program, ["run", "--wait-for-nodes", typed, "train.py"])
    assert ended.exit_code == 2
    assert "type 90, 10m or 1h30m" in ended.output
