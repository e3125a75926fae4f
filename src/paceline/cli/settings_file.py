"""Reads and checks ``paceline.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from paceline.agent.files.planted import is_planted
from paceline.cli.options import settings_registry
from paceline.cli.variables import RUN_TABLE, is_setting, key_of
from paceline.spec.errors import SettingError
from paceline.spec.settings import TOML_NAME

TABLES = ("run", "hosts", "train")


def read_settings_file(cwd: Path) -> dict[str, Any]:
    """Reads paceline.toml of the folder; empty if there is none.

    Raises:
        SettingError: It has an unknown table or an unknown key in ``[run]``, or another user put it
            into a folder where everybody may make files.
        HostsError: It is no TOML, or a ``[hosts.NAME]`` table is wrong.
    """
    from paceline.hosts import load_toml

    if is_planted(str(cwd / TOML_NAME)):
        raise SettingError(
            f"{TOML_NAME} belongs to another user, and everybody may make files in this folder",
            found=str(cwd / TOML_NAME),
            remedy=f"Work in a folder of yours, and copy {TOML_NAME} there if you trust it",
        )
    toml = dict(load_toml(cwd / TOML_NAME))
    for table, content in toml.items():
        if table not in TABLES:
            raise _misplaced_name(table, content)
        if not isinstance(content, Mapping):
            raise SettingError(
                f"{table} in {TOML_NAME} must be a table",
                found=printable(f"{table} = {content!r}"),
                remedy=f"[{RUN_TABLE}]\n{table} = …" if table == "hosts" else f"[{table}]",
            )
    if toml.get(RUN_TABLE):
        _check_keys(toml[RUN_TABLE])
    if toml.get("train"):
        _check_recipes(toml["train"])
    return toml


def _misplaced_name(name: str, content: object) -> SettingError:
    """Returns the error for a name at the top of the file that is none of its tables."""
    if isinstance(content, Mapping):
        return unknown_name_error(
            f"{TOML_NAME} has an unknown table [{printable(name)}]", name, TABLES
        )
    message = f"{TOML_NAME} has a key {printable(name)!r} outside of any table"
    if name.replace("_", "-") in settings_registry():
        return SettingError(message, remedy=f"[{RUN_TABLE}]\n{printable(name)} = …")
    return unknown_name_error(message, name.replace("_", "-"), [*settings_registry()])


def _check_recipes(tables: Mapping[str, Any]) -> None:
    from paceline.recipes import RECIPES

    for name, table in tables.items():
        if name not in RECIPES or not isinstance(table, Mapping):
            raise unknown_name_error(
                f"{TOML_NAME} has an unknown table [train.{printable(name)}]", name, [*RECIPES]
            )


def _check_keys(table: Mapping[str, Any]) -> None:
    legal = list(settings_registry())
    seen: dict[str, str] = {}
    for key in table:
        dashed = key.replace("_", "-")
        if dashed not in legal:
            message = f"{TOML_NAME} has an unknown key {printable(key)!r} in [{RUN_TABLE}]"
            raise unknown_name_error(message, dashed, legal)
        if dashed in seen:
            raise SettingError(
                f"{seen[dashed]} and {key} in [{RUN_TABLE}] of {TOML_NAME} are one key"
            )
        seen[dashed] = key


def printable(text: str) -> str:
    """Returns a text of a file or variable for an error: visible, and not too long."""
    from paceline.hosts import dialect

    return dialect.printable(text)


def unknown_name_error(message: str, name: str, legal: Sequence[str]) -> SettingError:
    from paceline.spec.formatting import closest_match

    suggestion = closest_match(name, legal)
    if suggestion:
        return SettingError(message, remedy=f"Did you mean {suggestion}?")
    return SettingError(message, found=f"there are: {', '.join(sorted(legal))}")


class FromFile(Mapping[str, Any]):
    """``[run]`` of paceline.toml as click's ``default_map`` of one verb.

    It is read when the first setting is looked up that neither the command line nor the
    environment gives, so that ``--help`` works beside a broken file.
    """

    def __init__(self, options: Sequence[click.Parameter], cwd: Path) -> None:
        self._options = {
            o.name: o for o in options if isinstance(o, click.Option) and is_setting(o)
        }
        self._cwd = cwd

    @cached_property
    def toml(self) -> dict[str, Any]:
        return read_settings_file(self._cwd)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        from paceline.cli import trust

        option = self._options[name]
        dashed, table = key_of(option), self.toml[RUN_TABLE]
        key = dashed if dashed in table else dashed.replace("-", "_")
        if dashed in trust.GUARDED:
            trust.require_trust(self._cwd / TOML_NAME, self.toml, dashed)
        return convert_value(option, key, table[key])

    def __contains__(self, name: object) -> bool:
        option = self._options.get(name)  # type: ignore[call-overload]
        if option is None:
            return False
        dashed, table = key_of(option), self.toml.get(RUN_TABLE, {})
        return dashed in table or dashed.replace("-", "_") in table

    def __iter__(self) -> Iterator[str]:
        return (str(name) for name in self._options if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def convert_value(option: click.Option, key: str, value: Any) -> Any:
    """Converts a value of the file for its option; SettingError if that does not accept it."""
    try:
        _check_kind(option, value)
        if option.multiple:
            values = value if isinstance(value, list) else [value]
            return tuple(option.type.convert(item, option, None) for item in values)
        return option.type.convert(value, option, None)
    except (click.BadParameter, ValueError, OverflowError) as error:
        is_table = option.multiple and isinstance(value, dict)
        reason = error.message if isinstance(error, click.BadParameter) else str(error)
        raise SettingError(
            f"{key} = {printable(repr(value))} in [{RUN_TABLE}] of {TOML_NAME} cannot be used",
            found=printable(reason),
            remedy=f'Write a list: {key} = ["A=1", "B=2"]' if is_table else "",
        ) from None


_KINDS: dict[type, tuple[type, ...]] = {  # what TOML may hold for a type of click's
    click.types.BoolParamType: (bool,),
    click.types.IntParamType: (int, str),
    click.types.FloatParamType: (int, float, str),
}


def _check_kind(option: click.Option, value: Any) -> None:
    """Refuses what click would take for something else: true as 1, a date as a word."""
    values = value if option.multiple and isinstance(value, list) else [value]
    allowed = next((a for kind, a in _KINDS.items() if isinstance(option.type, kind)), (str, int))
    for item in values:
        if not isinstance(item, allowed) or (isinstance(item, bool) and bool not in allowed):
            expected = "one of true and false" if bool in allowed else f"a {option.type.name}"
            raise click.BadParameter(f"{item!r} is not {expected}")
        if isinstance(item, str) and not item.replace("\t", " ").isprintable():
            raise click.BadParameter(f"{item!r} has control characters")
