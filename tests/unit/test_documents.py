"""Tests that every command and option in the documentation exists."""

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

COMMANDS = [s for page in PAGES for s in (*in_blocks(page), *inline(page)) if s.ours]


@each_case("shown", COMMANDS, ids=str)
def test_documented_commands_and_options_exist(shown: Shown) -> None:
    command: click.Command = program
    context = click.Context(program, info_name="paceline")
    args = list(shown.words[1:])
    while isinstance(command, click.Group) and args and not args[0].startswith("-"):
        name = args.pop(0)
        if name.upper() == name or "|" in name:  # a placeholder: VERB, or a choice of verbs
            return
        matched = command.get_command(context, name)
        assert matched is not None, f"there is no {name!r}"
        command, context = matched, click.Context(matched, parent=context, info_name=name)
    if command.context_settings.get("ignore_unknown_options") and shown.words[1] != "train":
        return  # unknown options go to the wrapped program, whose own tests check them
    valid_flags = {spelling for option in command.params for spelling in option.opts}
    valid_flags |= {spelling for option in command.params for spelling in option.secondary_opts}
    valid_flags |= {"-h", "--help"}
    if shown.words[1:2] == ("train",):
        valid_flags |= recipe_flags()
    for token in paceline_options(command, args):
        assert token in valid_flags, f"{shown}: unknown option {token}"
    # shorter ones in text, and those in the tables of the guide for changing over, name a verb
    is_complete = not shown.inline or (len(shown.words) > 2 and shown.page != "coming-from.md")
    if is_complete and not shown.template:
        missing = missing_options(command, args)
        assert not missing, f"{shown}: without the required option {missing[0]}"


def missing_options(command: click.Command, args: list[str]) -> list[str]:
    """Returns the required options that the arguments do not set."""
    required = [p for p in command.params if isinstance(p, click.Option) and p.required]
    return [option.opts[0] for option in required if not {*option.opts} & {*args}]


def paceline_options(command: click.Command, args: list[str]) -> list[str]:
    """Returns the options that belong to paceline, not to the script."""
    matched = []
    flags = {o: p for p in command.params if isinstance(p, click.Option) for o in p.opts}
    at = 0
    while at < len(args):
        token = args[at].strip("[](),.")
        if token == "--":
            break
        if token.startswith("-") and len(token) > 1:
            name = token.split("=")[0]
            matched.append(name)
            option = flags.get(name)
            at += 1 if option is None or option.is_flag or "=" in token else 2
            continue
        if not command.context_settings.get("allow_interspersed_args", True):
            break
        at += 1
    return matched


@cache
def recipe_flags() -> set[str]:
    """Returns the flags of all recipes."""
    text = io.StringIO()
    for name in RECIPES:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            parse_options(name, ["--help-all"])
    return set(re.findall(r"--[a-z][\w-]*", text.getvalue()))


def test_guide_rows_reference_existing_tests() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
    table = text.partition("## Every command of five guides")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for *_, evidence in rows:
        if evidence in ("shown by", "---") or evidence.startswith("the same"):
            continue
        references = re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", evidence)
        assert any(file for file, _ in references), evidence
        file = ""
        for explicit_file, test in references:
            file = explicit_file or file
            path = REPOSITORY / ("" if "/" in file else "tests/lab") / file
            assert path.exists(), file
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), (file, test)
