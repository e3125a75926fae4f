"""From flags to a dataclass of options and back. Nothing here imports torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from paceline.spec import rundir
from paceline.spec.errors import SettingError

O = TypeVar("O")  # noqa: E741


def at_least(flag: str, value: float, least: float) -> None:
    """Raises SettingError when a number is too small."""
    if not value >= least:
        raise SettingError(f"{flag} {value} must be at least {least}", remedy=f"{flag} {least}")


def below_one(flag: str, value: float) -> None:
    """Raises SettingError when a number is not in [0, 1)."""
    if not 0 <= value < 1:
        raise SettingError(f"{flag} {value} must be at least 0 and less than 1")


def known(flag: str, value: str, names: Iterable[str]) -> None:
    """Raises SettingError, with the nearest name, when ``value`` is none of ``names``."""
    choices = sorted(names)
    if value in choices:
        return
    near = difflib.get_close_matches(value, choices, 1, cutoff=0.5)
    raise SettingError(
        f"{flag} {value}: unknown",
        found=f"known are {', '.join(choices)}",
        remedy=f"did you mean {flag} {near[0]}?" if near else f"{flag} {choices[0]}",
    )


def parse(kind: type[O], argv: Sequence[str], prog: str) -> O:
    """Options from flags.

    Args:
        kind: The recipe's options class.
        argv: Flags as typed; ``--like RUN`` stands for all options of that run.
        prog: Name of the command, for the help.

    Raises:
        SettingError: An unknown flag (with the nearest one) or a value of the wrong kind.
        SystemExit: After ``--help``.
    """
    if wanted := {"-h", "--help", "--help-all"}.intersection(argv):
        from paceline.recipes.reference import help_of

        sys.stdout.write(help_of(kind, prog, everything="--help-all" in wanted) + "\n")
        raise SystemExit(0)
    rest, default = _from_record(kind, list(argv))
    start: Any = kind() if default is None else default
    made: O = dataclasses.replace(start, **values(kind, rest, prog))
    return made


def typed_in(kind: type, argv: Sequence[str], prog: str) -> frozenset[str]:
    """The fields that these flags set themselves; what ``--like`` brings is not among them.

    Raises:
        SettingError: --data is given twice.
    """
    without = list(argv)
    if "--like" in argv[:-1]:
        place = without.index("--like")
        del without[place : place + 2]
    words = [word for word in without if not word.startswith("--like=")]
    return frozenset(values(kind, words, prog, once=True))


def values(kind: type, argv: Sequence[str], prog: str, *, once: bool = False) -> dict[str, Any]:
    """What flags say, by field: of several the last, but ``once`` refuses a second --data."""
    parser = _Parser(prog, option_names(kind))
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        parser.add_field(field, hints[field.name], once)
    given, surplus = parser.parse_known_intermixed_args([_dashed(word) for word in argv])
    if surplus:
        parser.refuse(surplus[0])
    return {name: _frozen(value) for name, value in vars(given).items()}


class _Parser(argparse.ArgumentParser):
    """argparse's parser, but that its complaints are errors of ours."""

    def __init__(self, prog: str, names: Sequence[str]) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)
        self._names = names

    def add_field(self, field: dataclasses.Field[Any], hint: Any, once: bool) -> None:
        """The option, or the words without one, that a field stands for."""
        flag = "--" + field.name.replace("_", "-")
        several, literal = typing.get_origin(hint) is tuple, typing.get_origin(hint) is Literal
        more: dict[str, Any] = {"default": argparse.SUPPRESS}
        if hint in (bool, bool | None):
            self.add_argument(flag, action=argparse.BooleanOptionalAction, **more)
            return
        if once and field.name == "data":
            more["action"] = _StoreOnce
        if literal:
            more["choices"] = typing.get_args(hint)
        elif several:
            more |= {"nargs": "*", "type": _KINDS[typing.get_args(hint)[0]]}
        else:
            more["type"] = _KINDS[hint]
        self.add_argument(field.name if field.metadata.get("positional") else flag, **more)

    def error(self, message: str) -> NoReturn:
        raise SettingError(
            message.removeprefix("argument "), remedy=f"{self.prog} --help lists all options"
        )

    def refuse(self, word: str) -> NoReturn:
        """The error of a word that is no option."""
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            self.error(f"{word}: no option takes this word")
        near = difflib.get_close_matches(flag.lstrip("-"), self._names, 1, cutoff=0.5)
        raise SettingError(
            f"{flag}: no such option",
            remedy=f"did you mean --{near[0]}?"
            if near
            else f"{self.prog} --help lists all options",
        )


class _StoreOnce(argparse.Action):
    """Stores an option's value, and refuses a second one instead of dropping the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        if flag and hasattr(namespace, self.dest):
            raise SettingError(f"{flag} is given more than once", remedy="keep one of them")
        setattr(namespace, self.dest, values)


def _number(kind: type[O], what: str) -> Callable[[str], O]:
    def read(word: str) -> O:
        try:
            return kind(word)  # type: ignore[call-arg]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is no {what}") from None

    return read


_KINDS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: _number(int, "whole number"),
    float: _number(float, "number"),
}


def _dashed(word: str) -> str:
    """``--global_batch=8`` is ``--global-batch=8``."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _from_record(kind: type[O], argv: list[str]) -> tuple[list[str], O | None]:
    """Takes ``--like RUN`` out of the flags: the others change what that run had."""
    joined = next((arg for arg in argv if arg.startswith("--like=")), None)
    if joined is not None:
        argv.remove(joined)
        return argv, recorded(kind, Path(joined.partition("=")[2]))
    if "--like" not in argv[:-1]:
        return argv, None
    place = argv.index("--like")
    return argv[:place] + argv[place + 2 :], recorded(kind, Path(argv[place + 1]))


_MOST_BYTES = 16 << 20  # of a run's config.json, which has kilobytes


def recorded(kind: type[O], path: Path) -> O:
    """The options of an earlier run, from its config.json or its directory.

    Raises:
        SettingError: The file cannot be read or holds other options.
    """
    file = path / rundir.CONFIG if path.is_dir() else path
    try:
        if not file.is_file():  # a pipe would keep us waiting
            raise ValueError(f"{file} is no file")
        with file.open("rb") as stream:
            values = json.loads(stream.read(_MOST_BYTES))["options"]
        values.pop("run_dir", None)  # a repetition is a run of its own
        hints = typing.get_type_hints(kind)
        known_names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known_names):
            raise ValueError(f"unknown options: {', '.join(unknown)}")
        return kind(**{name: _as_now(value, hints[name]) for name, value in values.items()})
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise SettingError(
            f"--like {path}: no options of an earlier run",
            found=f"{type(error).__name__}: {error}",
            remedy="name the directory of a run of the same recipe",
        ) from None


def _as_now(value: Any, hint: Any) -> Any:
    """A recorded value; some options that take words now took only numbers once."""
    return str(value) if hint is str and type(value) is int else _frozen(value)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def to_argv(options: Any) -> list[str]:
    """The flags that make these options again; settings at their default are left out."""
    argv: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            argv += as_flags("--" + field.name.replace("_", "-"), value)
    return argv


def option_names(kind: type) -> list[str]:
    """Every option of a recipe, as typed but for the dashes before it."""
    return [field.name.replace("_", "-") for field in dataclasses.fields(kind)]


def as_flags(flag: str, value: Any) -> list[str]:
    """An option with its value, as typed."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, (tuple, list)):
        return [flag, *(str(item) for item in value)]
    return [f"{flag}={value}"]
