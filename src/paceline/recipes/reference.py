"""The reference of a recipe's options, made from its dataclass. Needs no torch."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from paceline.recipes import recipe


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option as people read it.

    Attributes:
        flag: As typed.
        kind: Of the value.
        default: As typed; empty for none.
        text: What it does.
    """

    flag: str
    kind: str
    default: str
    text: str


def options_of(name: str) -> list[Option]:
    """The options of a recipe: its own first, then those that every recipe has.

    Raises:
        SettingError: Unknown recipe.
    """
    kind = recipe(name).options_class()
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        texts |= _texts(one)
    fields = dataclasses.fields(kind)
    own = _texts(kind)
    ordered = sorted(fields, key=lambda field: field.name not in own)
    return [_option(field, texts[field.name]) for field in ordered]


def _texts(kind: type) -> dict[str, str]:
    """The string below each field of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            found[field.target.id] = " ".join(text.split())
    return found


def _option(field: dataclasses.Field[Any], text: str) -> Option:
    flag = "--" + field.name.replace("_", "-")
    if isinstance(field.default, bool):
        both = f"{flag} / --no-{flag[2:]}"
        return Option(both, "", "on" if field.default else "off", text)
    several = field.default if isinstance(field.default, tuple) else (field.default,)
    return Option(flag, _kind(field), " ".join(map(str, several)), text)


def _kind(field: dataclasses.Field[Any]) -> str:
    words = str(field.type)
    if words.startswith("tuple"):
        return "words"
    if isinstance(field.default, str):
        return "one of" if words.startswith(("Literal", "Dtype", "Device", "Backend")) else "text"
    return "whole number" if isinstance(field.default, int) else "number"


def markdown(name: str) -> str:
    """A table of all options of a recipe."""
    rows = ["| option | default | |", "|---|---|---|"]
    for one in options_of(name):
        default = f"`{one.default}`" if one.default else ""
        rows.append(f"| `{one.flag}` | {default} | {one.text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"
