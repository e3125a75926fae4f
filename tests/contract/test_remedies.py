"""Tests that commands in remedies can be typed: the subcommands and their options exist.

All strings of the source are searched for ``paceline VERB …`` and ``--option``. The subcommand
must exist and have the options that follow. An option without a subcommand must exist in one of
them, or be listed here by name as another program's. The pages of the rules of
``paceline explain`` are checked by test_rule_remedies.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from paceline.cli import VERBS, program

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
COMMAND_LINE = re.compile(r"\bpaceline ([a-z]+)\b([^.;\n()]*)")
# options of other programs that remedies name
FOREIGN_OPTIONS = {
    "--cap-add", "--format", "--index-url", "--now", "--privileged", "--query-gpu", "--shm-size",
    "--user", "--version",
}  # fmt: skip
PARTS = {"remedy", "confirm", "found"}


def options_of(command: click.Command) -> set[str]:
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            options |= options_of(inner) if inner is not None else set()
    return options | {"--help", "--help-all"}


CTX = click.Context(program)
BY_VERB = {verb: options_of(program.get_command(CTX, verb) or program) for verb in VERBS}


def recipe_options() -> set[str]:
    """Returns the options of recipes, which are typed after the recipe's name."""
    entries: set[str] = set()
    paths = (SOURCE / "recipes/use/__init__.py", SOURCE / "recipes/language/options.py")
    for path in (*SOURCE.glob("recipes/*.py"), *paths):
        names = re.findall(r"^    ([a-z]\w*): ", path.read_text(encoding="utf-8"), re.MULTILINE)
        entries |= {f"--{name.replace('_', '-')}" for name in names}
        entries |= {f"--no-{name.replace('_', '-')}" for name in names}
    return entries


RECIPES = recipe_options()
KNOWN_OPTIONS = set.union(*BY_VERB.values()) | RECIPES | FOREIGN_OPTIONS


def text_of(node: ast.AST) -> str:
    """Returns the text of a string expression, without inserted values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text_of(part) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}\n{text_of(node.orelse)}"
    return ""


def remedies() -> Iterator[tuple[str, str]]:
    """Yields the position and text of each remedy."""
    for path in sorted(SOURCE.rglob("*.py")):
        location = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in PARTS:
                yield f"{location}:{node.value.lineno}", text_of(node.value)
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and ("remed" in node.name or "checks" in location.parts):
                for inner in ast.walk(node):
                    if isinstance(inner, (ast.JoinedStr, ast.Constant)):
                        yield f"{location}:{inner.lineno}", text_of(inner)


def test_commands_in_remedies_exist() -> None:
    entries = {
        (location, text) for location, text in remedies() if "--" in text or "paceline " in text
    }
    assert len(entries) > 150
    wrong = [
        f"{location}: {problem}: {text}"
        for location, text in sorted(entries)
        for problem in unknown_names(text)
    ]
    assert wrong == []


def unknown_names(text: str) -> Iterator[str]:
    """Yields a description of each unknown option and subcommand."""
    yield from (
        f"{option} is nobody's option"
        for option in OPTION.findall(text)
        if option not in KNOWN_OPTIONS
    )
    for verb, tail in COMMAND_LINE.findall(text):
        if verb not in BY_VERB:
            if OPTION.search(tail):
                yield f"paceline has no verb {verb}"
            continue
        for option in OPTION.findall(tail.split(":")[0]):
            if option not in BY_VERB[verb] | RECIPES:
                yield f"paceline {verb} has no {option}"
