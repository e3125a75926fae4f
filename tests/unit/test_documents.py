"""Every command that a page shows exists, with every option that it is shown with."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from functools import cache
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from documents import PAGES, REPOSITORY, Shown, in_blocks, inline
from each_case import each_case
from paceline.cli import program
from paceline.recipes import RECIPES, parse_options

EVERY = [s for page in PAGES for s in (*in_blocks(page), *inline(page)) if s.ours]


@each_case("shown", EVERY, ids=str)
def test_command_and_its_options_exist(shown: Shown) -> None:
    command: click.Command = program
    context = click.Context(program, info_name="paceline")
    args = list(shown.words[1:])
    while isinstance(command, click.Group) and args and not args[0].startswith("-"):
        name = args.pop(0)
        if name.upper() == name or "|" in name:  # a placeholder: VERB, or a choice of verbs
            return
        found = command.get_command(context, name)
        assert found is not None, f"there is no {name!r}"
        command, context = found, click.Context(found, parent=context, info_name=name)
    if command.context_settings.get("ignore_unknown_options") and shown.words[1] != "train":
        return  # what it does not know goes to the program behind it, whose tests know
    known = {spelling for option in command.params for spelling in option.opts}
    known |= {spelling for option in command.params for spelling in option.secondary_opts}
    known |= {"-h", "--help"}
    if shown.words[1:2] == ("train",):
        known |= recipe_flags()
    for word in own_options(command, args):
        assert word in known, f"{shown}: unknown option {word}"


def own_options(command: click.Command, args: list[str]) -> list[str]:
    """The options among ``args`` that are paceline's and not the script's."""
    found = []
    flags = {o: p for p in command.params if isinstance(p, click.Option) for o in p.opts}
    at = 0
    while at < len(args):
        word = args[at].strip("[](),.")
        if word == "--":
            break
        if word.startswith("-") and len(word) > 1:
            name = word.split("=")[0]
            found.append(name)
            option = flags.get(name)
            at += 1 if option is None or option.is_flag or "=" in word else 2
            continue
        if not command.context_settings.get("allow_interspersed_args", True):
            break
        at += 1
    return found


@cache
def recipe_flags() -> set[str]:
    """Flags of all recipes."""
    text = io.StringIO()
    for name in RECIPES:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            parse_options(name, ["--help-all"])
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


def test_every_row_of_the_guides_commands_names_what_shows_it() -> None:
    """A test that exists, or nothing is said to be shown."""
    text = (REPOSITORY / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
    table = text.partition("## Every command of five guides")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for *_, shown_by in rows:
        if shown_by in ("shown by", "---") or shown_by.startswith("the same"):
            continue
        named = re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", shown_by)
        assert any(file for file, _ in named), shown_by
        file = ""
        for given, test in named:
            file = given or file
            path = REPOSITORY / ("" if "/" in file else "tests/lab") / file
            assert path.exists(), file
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), (file, test)
