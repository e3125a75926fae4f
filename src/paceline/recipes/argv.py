"""Conversion between command-line flags and dataclasses of options. Needs no torch."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from paceline.program import guarded
from paceline.recipes.reference import render_help
from paceline.spec import rundir
from paceline.spec.errors import SettingError

O = TypeVar("O")  # noqa: E741


def check_at_least(flag: str, value: float, minimum: float) -> None:
    """Raises SettingError when a number is too small."""
    if not value >= minimum:
        raise SettingError(f"{flag} {value} must be at least {minimum}", remedy=f"{flag} {minimum}")


def check_fraction(flag: str, value: float) -> None:
    """Raises SettingError when a number is not in [0, 1)."""
    if not 0 <= value < 1:
        raise SettingError(f"{flag} {value} must be at least 0 and less than 1")


def check_part(flag: str, value: float) -> None:
    """Raises SettingError when a number is not in (0, 1)."""
    if not 0 < value < 1:
        raise SettingError(f"{flag} {value} must lie between 0 and 1", remedy=f"{flag} 0.1")


def check_known(
    flag: str,
    value: str,
    known_names: Iterable[str],
    paths: Iterable[str] = (),
    *,
    problem: str = "unknown",
) -> None:
    """Raises SettingError that suggests the nearest name or path when ``value`` is unknown."""
    choices = sorted(known_names)
    if value in choices:
        return
    matches = difflib.get_close_matches(value, [*paths, *choices], 1, cutoff=0.5)
    raise SettingError(
        f"{flag} {value}: {problem}",
        found=f"known names: {', '.join(choices)}",
        remedy=f"did you mean {flag} {matches[0]}?" if matches else f"{flag} {choices[0]}",
    )


def parse(kind: type[O], argv: Sequence[str], prog: str) -> O:
    """Parses flags into an instance of ``kind``.

    Args:
        argv: Flags; ``--like RUN`` takes its defaults from an earlier run.

    Raises:
        SettingError: An unknown flag (with the nearest one) or a value of the wrong kind.
        SystemExit: After ``--help``.
    """
    if help_flags := {"-h", "--help", "--help-all"}.intersection(argv):
        sys.stdout.write(render_help(kind, prog, show_all="--help-all" in help_flags) + "\n")
        raise SystemExit(0)
    run, flags = split_option("--like", argv)
    base: Any = kind() if run is None else load_recorded(kind, Path(run))
    options: O = dataclasses.replace(base, **parse_values(kind, flags, prog))
    return options


def run_command(
    function: Callable[[O], int | None], kind: type[O], prog: str, argv: Sequence[str] | None = None
) -> int:
    """Runs a command in this process, by default with its flags; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: function(parse(kind, flags, prog)))


def explicit_fields(kind: type, argv: Sequence[str], prog: str) -> frozenset[str]:
    """Returns the fields that flags set explicitly, without those of a ``--like`` run.

    Raises:
        SettingError: --data is given twice.
    """
    _, flags = split_option("--like", argv)
    if sum(flag.partition("=")[0] == "--data" for flag in flags) > 1:
        raise SettingError("--data is given more than once", remedy="keep one of them")
    return frozenset(parse_values(kind, flags, prog))


def parse_values(kind: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Parses flags into values by field; the last of several counts."""
    parser = _make_parser(kind, prog)
    namespace, unknown = parser.parse_known_intermixed_args([_dashed(flag) for flag in argv])
    if unknown:
        parser.reject(unknown[0])
    return {name: _frozen(value) for name, value in vars(namespace).items()}


@functools.cache  # one command parses its flags several times
def _make_parser(kind: type, prog: str) -> _Parser:
    parser = _Parser(prog, option_names(kind))
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        parser.add_field(field, hints[field.name])
    return parser


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises SettingError."""

    def __init__(self, prog: str, names: Sequence[str]) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)
        self._names = names

    def add_field(self, field: dataclasses.Field[Any], hint: Any) -> None:
        """Adds the option, or the positional argument, of a field."""
        flag = "--" + field.name.replace("_", "-")
        is_tuple, is_choice = typing.get_origin(hint) is tuple, typing.get_origin(hint) is Literal
        arguments: dict[str, Any] = {"default": argparse.SUPPRESS}
        if hint in (bool, bool | None):
            self.add_argument(flag, action=argparse.BooleanOptionalAction, **arguments)
            return
        if is_choice:
            arguments["choices"] = typing.get_args(hint)
        elif is_tuple:
            arguments |= {"nargs": "*", "type": _KINDS[typing.get_args(hint)[0]]}
        else:
            arguments["type"] = _KINDS[hint]
        self.add_argument(field.name if field.metadata.get("positional") else flag, **arguments)

    def error(self, message: str) -> NoReturn:
        raise SettingError(
            message.removeprefix("argument "), remedy=f"{self.prog} --help lists all options"
        )

    def reject(self, argument: str) -> NoReturn:
        """Raises SettingError for an unknown argument."""
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            self.error(f"{argument}: no option takes this word")
        name = flag.lstrip("-").replace("_", "-")
        known = [_SYNONYMS[name]] if _SYNONYMS.get(name) in self._names else []
        matches = known or difflib.get_close_matches(name, self._names, 1, cutoff=0.5)
        remedy = (
            f"did you mean --{matches[0]}?" if matches else f"{self.prog} --help lists all options"
        )
        raise SettingError(f"{flag}: no such option", remedy=remedy)


# names of other trainers, which resemble another option or none
_SYNONYMS = {
    "batch": "global-batch",
    "batch-size": "global-batch",
    "b": "global-batch",
    "bs": "global-batch",
    "train-batch-size": "global-batch",
    "per-device-train-batch-size": "batch-per-process",
    "per-gpu-batch-size": "batch-per-process",
    "learning-rate": "lr",
    "wd": "weight-decay",
    "lr-scheduler": "schedule",
    "lr-scheduler-type": "schedule",
    "warmup-ratio": "warm-up",
    "checkpoint": "resume",
    "resume-from-checkpoint": "resume",
    "gradient-accumulation-steps": "micro-batch",
}


def _number(kind: type[O], description: str) -> Callable[[str], O]:
    def read(text: str) -> O:
        try:
            return kind(text)  # type: ignore[call-arg]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {description}") from None

    return read


_KINDS: dict[type, Callable[[str], Any]] = {
    str: str,
    int: _number(int, "whole number"),
    float: _number(float, "number"),
}


def _dashed(argument: str) -> str:
    """Converts ``--global_batch=8`` to ``--global-batch=8``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def split_option(flag: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits ``FLAG VALUE`` or ``FLAG=VALUE`` from arguments: the value or ``None``, the rest."""
    remaining = list(argv)
    joined = next((argument for argument in remaining if argument.startswith(f"{flag}=")), None)
    if joined is not None:
        remaining.remove(joined)
        return joined.partition("=")[2], remaining
    if flag not in remaining[:-1]:
        return None, remaining
    index = remaining.index(flag)
    return remaining[index + 1], remaining[:index] + remaining[index + 2 :]


_MAX_CONFIG_BYTES = 16 << 20


def load_recorded(kind: type[O], path: Path) -> O:
    """Loads the options of an earlier run from its config.json or its directory.

    Raises:
        SettingError: The file cannot be read or holds other options.
    """
    file = path / rundir.CONFIG if path.is_dir() else path
    try:
        if not file.is_file():  # reading a pipe would block
            raise ValueError(f"{file} is no file")
        with file.open("rb") as stream:
            values = json.loads(stream.read(_MAX_CONFIG_BYTES))["options"]
        values.pop("run_dir", None)  # a repetition is a separate run
        hints = typing.get_type_hints(kind)
        field_names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - field_names):
            raise ValueError(f"unknown options: {', '.join(unknown)}")
        return kind(**{name: _migrate(value, hints[name]) for name, value in values.items()})
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise SettingError(
            f"--like {path}: no options of an earlier run",
            found=f"{type(error).__name__}: {error}",
            remedy="name the directory of a run of the same recipe",
        ) from None


def _migrate(value: Any, hint: Any) -> Any:
    """Converts a recorded value: some options that are text now were numbers once."""
    return str(value) if hint is str and type(value) is int else _frozen(value)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def to_argv(options: Any) -> list[str]:
    """Returns the flags that give these options, without those at their default."""
    argv: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            argv += as_flags("--" + field.name.replace("_", "-"), value)
    return argv


def option_names(kind: type) -> list[str]:
    """Returns the name of every option, without the leading dashes."""
    return [field.name.replace("_", "-") for field in dataclasses.fields(kind)]


def as_flags(flag: str, value: Any) -> list[str]:
    """Returns the command-line words for one option."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, (tuple, list)):
        return [flag, *(str(item) for item in value)]
    return [f"{flag}={value}"]
