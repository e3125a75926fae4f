"""From flags to a dataclass of options and back. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
    import tyro

    rest, default = _from_record(kind, list(argv))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if default is None:
                return tyro.cli(kind, args=rest, prog=prog)
            return tyro.cli(kind, args=rest, prog=prog, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        message, remedy = _said(complaint.getvalue())
        raise SettingError(message, remedy=remedy or f"{prog} --help lists all options") from None


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


def recorded(kind: type[O], path: Path) -> O:
    """The options of an earlier run, from its config.json or its directory.

    Raises:
        SettingError: The file cannot be read or holds other options.
    """
    file = path / rundir.CONFIG if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["options"]
        values.pop("run_dir", None)  # a repetition is a run of its own
        known_names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known_names):
            raise ValueError(f"unknown options: {', '.join(unknown)}")
        return kind(**{name: _frozen(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"--like {path}: no options of an earlier run",
            found=f"{type(error).__name__}: {error}",
            remedy="name the directory of a run of the same recipe",
        ) from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _said(box: str) -> tuple[str, str]:
    """Message and suggestion out of the parser's drawn box."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ").strip() for line in text.splitlines() if line.startswith("│")]
    sections = " ".join("\0" if set(line) == {"─"} else line for line in lines).split("\0")
    near = next((part for part in sections if "meant" in part), "")
    flag = re.search(r"--[\w-]+", near)
    return sections[0].strip(), f"did you mean {flag.group()}?" if flag else ""


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
