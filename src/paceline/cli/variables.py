"""The names of an option in the environment and in ``paceline.toml``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
RUN_TABLE = "run"  # [run] in paceline.toml holds defaults for the options of every verb
ENV_PREFIX = "PACELINE_OPT"  # PACELINE_OPT_NNODES=2 stands for --nnodes 2


def as_settings(command: F, exclude: Sequence[click.Parameter] = ()) -> F:
    """Gives each option declared so far its environment variable, except those in ``exclude``."""
    for option in command.__click_params__:  # type: ignore[attr-defined]
        if not isinstance(option, click.Option) or option.hidden or option in exclude:
            continue
        if not is_setting(option):
            option.envvar = [variable_of(option)]
    return command


def is_setting(option: click.Parameter) -> bool:
    """Whether the option may also stand in the environment and in ``paceline.toml``."""
    return isinstance(option, click.Option) and variable_of(option) in (option.envvar or ())


def variable_of(option: click.Option) -> str:
    """Returns the environment variable of an option, by its long flag."""
    return f"{ENV_PREFIX}_{key_of(option).replace('-', '_').upper()}"


def key_of(option: click.Option) -> str:
    """Returns the key of an option in ``[run]``: its first long flag."""
    longs = [flag for flag in option.opts if flag.startswith("--")]
    return (longs or option.opts)[0].lstrip("-")
