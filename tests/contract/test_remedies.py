"""What a remedy says to type can be typed: its verbs exist and have the options that it names.

Every string of the source is looked at for ``paceline VERB …`` and ``--option``. A verb must be one
of ours; what follows must be an option of that verb. An option that stands alone must be one that
some verb has, or another program's that is listed here by name. The pages of the rules of
``paceline explain`` are in test_rule_remedies.py.
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
TYPED = re.compile(r"\bpaceline ([a-z]+)\b([^.;\n()]*)")
# other programs' options that remedies name beside ours
OTHERS = {
    "--cap-add", "--format", "--index-url", "--now", "--privileged", "--query-gpu", "--shm-size",
    "--user", "--version",
}  # fmt: skip
PARTS = {"remedy", "confirm", "found"}


def options_of(command: click.Command) -> set[str]:
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            own |= options_of(inner) if inner is not None else set()
    return own | {"--help", "--help-all"}


CTX = click.Context(program)
BY_VERB = {verb: options_of(program.get_command(CTX, verb) or program) for verb in VERBS}


def recipe_options() -> set[str]:
    """Options of recipes, which stand behind a recipe's name."""
    found: set[str] = set()
    paths = (SOURCE / "recipes/use/__init__.py", SOURCE / "recipes/language/options.py")
    for path in (*SOURCE.glob("recipes/*.py"), *paths):
        names = re.findall(r"^    ([a-z]\w*): ", path.read_text(encoding="utf-8"), re.MULTILINE)
        found |= {f"--{name.replace('_', '-')}" for name in names}
        found |= {f"--no-{name.replace('_', '-')}" for name in names}
    return found


RECIPES = recipe_options()
EVERY = set.union(*BY_VERB.values()) | RECIPES | OTHERS


def text_of(node: ast.AST) -> str:
    """A string as it is written, values left out."""
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
    """Where it stands, and the text."""
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in PARTS:
                yield f"{where}:{node.value.lineno}", text_of(node.value)
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and ("remed" in node.name or "checks" in where.parts):
                for inner in ast.walk(node):
                    if isinstance(inner, (ast.JoinedStr, ast.Constant)):
                        yield f"{where}:{inner.lineno}", text_of(inner)


def test_what_remedies_say_to_type_exists() -> None:
    found = {(where, text) for where, text in remedies() if "--" in text or "paceline " in text}
    assert len(found) > 150
    wrong = [f"{where}: {what}: {text}" for where, text in sorted(found) for what in unknown(text)]
    assert wrong == []


def unknown(text: str) -> Iterator[str]:
    """What it names and nobody has."""
    yield from (
        f"{option} is nobody's option" for option in OPTION.findall(text) if option not in EVERY
    )
    for verb, rest in TYPED.findall(text):
        if verb not in BY_VERB:
            if OPTION.search(rest):
                yield f"paceline has no verb {verb}"
            continue
        for option in OPTION.findall(rest.split(":")[0]):
            if option not in BY_VERB[verb] | RECIPES:
                yield f"paceline {verb} has no {option}"
