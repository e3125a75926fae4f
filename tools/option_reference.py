"""Writes docs/reference/options.md from the commands and the recipes' options.

``python tools/option_reference.py`` writes the page; tests/unit/test_option_reference.py compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from paceline.cli import GROUPS as VERB_GROUPS
from paceline.cli import program
from paceline.cli.help import GROUPS as OPTION_GROUPS
from paceline.cli.help import applicable_options, row_of
from paceline.cli.options import settings_registry
from paceline.cli.variables import is_setting, key_of, variable_of
from paceline.cli.verb import Verb
from paceline.recipes import RECIPES
from paceline.recipes.reference import markdown, sections_of
from paceline.spec.helptext import Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"
INTRODUCTION = """\
# Options

<!-- written by tools/option_reference.py -->

This page lists every option of every command. `paceline COMMAND --help` shows them in a terminal;
with `--help-all` also those that are rarely needed.

* [Settings](#settings): options that most commands share.
* [Commands](#commands): each command with its own options, and the settings it takes.
* [Recipes](#recipes): options of `paceline train`.

## Settings

A setting has the same meaning in every command that takes it. Give it in one of three places. If
it is in several, the first of this list counts:

1. the option on the command line,
2. the environment variable,
3. `paceline.toml` in the current folder, under `[run]`. The key is the option without `--`:
   `nproc-per-node = 2`.

Below a command's table, the line "Settings" lists every setting that the command takes. An option
that is in the table but not in this line has no environment variable and no key in `[run]`, even if
another command has a setting of that name. Exception: `train` uses the `data` and `communication`
of `[run]`. See [how settings are read](run.md#settings). Some settings in `paceline.toml` need
[your trust](run.md#settings-that-start-programs).
"""
RECIPE_TEXT = """\
## Recipes

Give these options after the recipe's name, or put them into `paceline.toml` under `[train.image]`,
`[train.text]`, `[train.translation]`, `[train.language]` or `[train.sft]`. Write a key with
underscores or dashes: `global_batch = 64`. These options have no environment variables. Every
recipe also takes `--like RUN`, which means [all settings of an earlier run](recipes.md#settings).
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """Renders the page."""
    parts = [INTRODUCTION]
    settings = settings_registry()
    by_name = {option.name or "": option for option in settings.values()}
    groups = {title: [by_name.pop(name) for name in names if name in by_name]
              for title, names in OPTION_GROUPS.items()}  # fmt: skip
    for title, options in {"The script": list(by_name.values()), **groups}.items():
        parts.append(f"### {title}\n\n{_settings_table(options)}")
    parts.append("## Commands\n\nEvery command also has `--help`.\n")
    for group in VERB_GROUPS.values():
        for name in group:
            command = program.get_command(click.Context(program), name)
            assert command is not None
            parts += _command_sections(command, ("paceline", name))
    parts.append(RECIPE_TEXT)
    for name, recipe in RECIPES.items():
        parts.append(f"### {name}\n\n{_code_flags(markdown(recipe.options))}")
    return "\n".join(parts)


def _settings_table(options: Sequence[click.Option]) -> str:
    rows = ["| option | variable | default | |", "|---|---|---|---|"]
    for option in options:
        row = row_of(option)
        rows.append(f"| {_flags(row)} | `{variable_of(option)}` | {_cell(row.default)} "
                    f"| {_text(row)} |")  # fmt: skip
    return "\n".join(rows) + "\n"


def _command_sections(command: click.Command, words: tuple[str, ...]) -> Iterator[str]:
    """Renders a command and the commands below it."""
    context = click.Context(command, info_name=" ".join(words))
    usage = " ".join([*words, *command.collect_usage_pieces(context)])
    parts = [f"### {' '.join(words)}\n", f"```text\n{usage}\n```\n", _summary(command)]
    shared, rows = [], []
    for option in applicable_options(command, command.get_params(context)):
        if {"--help", "--help-all"}.intersection(option.opts):
            continue
        setting = settings_registry().get(key_of(option))
        if setting is not None and is_setting(option):
            shared.append(f"`--{key_of(option)}`")
            if row_of(setting) == row_of(option):
                continue
        rows.append(row_of(option))
    if isinstance(command, Verb) and command.options_of:
        rows += [row for _, section in sections_of(command.options_of) for row in section]
    if rows:
        table = ["| option | default | |", "|---|---|---|"]
        table += [f"| {_flags(row)} | {_cell(row.default)} | {_text(row)} |" for row in rows]
        parts.append("\n".join(table) + "\n")
    if shared:
        parts.append(f"Settings: {', '.join(shared)}.\n")
    yield "\n".join(parts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command_sections(below, (*words, name))


def _summary(command: click.Command) -> str:
    parts = []
    for text in (command.help or "").strip().split("\n\n"):
        if text.lstrip().startswith("\b"):  # click's mark for lines that stay as they are
            parts.append("```text\n" + text.strip().lstrip("\b").strip("\n") + "\n```")
        else:
            parts.append(_code_flags(" ".join(text.split())))
    return "\n\n".join(parts) + "\n"


def _flags(row: Row) -> str:
    """The option's spellings as code, and its placeholder."""
    flags = re.sub(r"(?<![\w-])(--?[\w-]+)", r"`\1`", row.term)
    return flags.replace("|", "\\|")


def _cell(default: str) -> str:
    if not default:
        return ""
    return default if " " in default else f"`{default}`"


def _text(row: Row) -> str:
    parts = [row.text.strip()]
    if row.choices:
        parts.append(f"One of: {', '.join(row.choices)}.")
    if row.required:
        parts.append("Required.")
    return _code_flags(" ".join(parts).replace("|", "\\|"))


def _code_flags(text: str) -> str:
    """Marks options as code where they are not yet."""
    pieces = text.split("`")
    for at in range(0, len(pieces), 2):
        pieces[at] = re.sub(r"(?<![\w-])(--[a-z][\w-]*(?:=[\w.]+)?)", r"`\1`", pieces[at])
    return "`".join(pieces)


if __name__ == "__main__":
    main()
