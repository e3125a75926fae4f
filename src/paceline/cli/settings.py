"""Where a setting comes from: command line before environment before file before default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from paceline.cluster.inventory import load_toml
from paceline.cluster.inventory.overrides import TOML_NAME
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.settings import Setting, Source

TABLES = ("run", "hosts", "train")
RUN_TABLE = "run"  # [run] in paceline.toml holds defaults for the options of run and train
ENV_PREFIX = "PACELINE_OPT"  # PACELINE_OPT_NNODES=2 stands for --nnodes 2

_SOURCES = {
    ParameterSource.COMMANDLINE: Source.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: Source.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP: Source.FILE,
}


def read_settings_file(cwd: Path) -> dict[str, Any]:
    """paceline.toml of the folder; empty when there is none."""
    toml = dict(load_toml(cwd / TOML_NAME))
    for table in toml:
        if table not in TABLES:
            raise _unknown(f"{TOML_NAME} has an unknown table [{table}]", table, TABLES)
    return toml


def check_environment(ctx: click.Context) -> None:
    """SettingError for a ``PACELINE_OPT_…`` variable that names no option."""
    legal = [variable_of(p) for p in ctx.command.params if isinstance(p, click.Option)]
    for name in os.environ:
        if name.startswith(f"{ENV_PREFIX}_") and name not in legal:
            raise _unknown(f"the variable {name} names no option", name, legal)


def variable_of(option: click.Option) -> str:
    """The variable that stands for an option, by its long flag."""
    flag = max(option.opts, key=len).lstrip("-")
    return f"{ENV_PREFIX}_{flag.replace('-', '_').upper()}"


def _unknown(message: str, word: str, legal: Sequence[str]) -> SettingError:
    import difflib

    near = difflib.get_close_matches(word, legal, n=1)
    listed = ", ".join(sorted(legal))
    return SettingError(message, found=f"there are: {listed}",
                        remedy=f"Did you mean {near[0]}?" if near else "")  # fmt: skip


def use_file(ctx: click.Context, toml: Mapping[str, Any]) -> None:
    """Lets ``[run]`` stand in for options that were not typed. SettingError on an unknown key."""
    table = toml.get(RUN_TABLE, {})
    names = {name: option for option in ctx.command.params for name in _spellings(option)}
    for key in table:
        if key not in names:
            legal = [name for name in names if "_" not in name]
            raise _unknown(f"{TOML_NAME} has an unknown key {key!r} in [{RUN_TABLE}]", key, legal)
    for key, value in table.items():
        option = names[key]
        assert option.name is not None
        if ctx.get_parameter_source(option.name) is ParameterSource.DEFAULT:
            ctx.params[option.name] = _converted(ctx, option, key, value)
            ctx.set_parameter_source(option.name, ParameterSource.DEFAULT_MAP)


def _spellings(option: click.Parameter) -> list[str]:
    if not isinstance(option, click.Option):
        return []
    longs = [spelling[2:] for spelling in option.opts if spelling.startswith("--")]
    return [*longs, *(name.replace("-", "_") for name in longs)]


def _converted(ctx: click.Context, option: click.Parameter, key: str, value: Any) -> Any:
    try:
        _check_kind(option, value)
        if option.multiple:
            values = value if isinstance(value, list) else [value]
            return tuple(option.type.convert(one, option, ctx) for one in values)
        return option.type.convert(value, option, ctx)
    except click.BadParameter as error:
        raise SettingError(
            f"{key} = {value!r} in [{RUN_TABLE}] of {TOML_NAME} cannot be used",
            found=error.message,
        ) from None


def _check_kind(option: click.Parameter, value: Any) -> None:
    """Refuses what click would take for something else: true as 1, "false" as a word."""
    given = value if option.multiple and isinstance(value, list) else [value]
    switch = isinstance(option.type, click.types.BoolParamType)
    for one in given:
        if isinstance(one, bool) is not switch or isinstance(one, dict | list):
            wanted = "one of true and false" if switch else f"of the kind {option.type.name}"
            raise click.BadParameter(f"{one!r} is not {wanted}")


def setting(ctx: click.Context, name: str) -> Setting[Any]:
    """The value of an option, with its source."""
    source = ctx.get_parameter_source(name)
    found = _SOURCES.get(source, Source.DEFAULT) if source is not None else Source.DEFAULT
    options = (p for p in ctx.command.params if isinstance(p, click.Option) and p.name == name)
    details = {Source.FILE: TOML_NAME, Source.ENVIRONMENT: variable_of(next(options))}
    return Setting(ctx.params[name], found, details.get(found, ""))


def refuse_ours(flag: str, name: str) -> None:
    """SettingError for a variable that the plan decides: it would be overwritten."""
    if jobenv.is_ours(name):
        raise SettingError(
            f"{flag} {name}: that variable says a rank's place, which paceline decides",
            remedy="Leave it out; --master-port, --nnodes and --nproc-per-node change the plan",
        )


def parse_env(given: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """``--env``: ``NAME=VALUE`` pairs, and names to be forwarded with their values."""
    public: dict[str, str] = {}
    forwarded: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or "\0" in one:
            raise SettingError(f"--env {one!r} names no variable", remedy="--env NAME=VALUE")
        refuse_ours("--env", name)
        if equals:
            public[name] = value
        elif name in os.environ:
            forwarded[name] = os.environ[name]
        else:
            raise SettingError(
                f"--env {name}: there is no variable {name} to forward",
                remedy=f"export {name}=…, or --env {name}=VALUE",
            )
    return public, forwarded
