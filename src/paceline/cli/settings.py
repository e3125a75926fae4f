"""Where a setting comes from: command line before environment before file before default.

A setting is an option that has a variable, ``PACELINE_OPT_…``. Every verb that has such an option
takes its value from the same three places: click asks the variable, then the ``default_map``,
which here is ``[run]`` of ``paceline.toml``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from paceline.cli.options import settings_registry
from paceline.cli.settings_file import FromFile, printable, read_settings_file, unknown_name_error
from paceline.cli.torchrun import STANDALONE
from paceline.cli.variables import ENV_PREFIX, is_setting, key_of, variable_of
from paceline.spec.errors import SettingError
from paceline.spec.settings import TOML_NAME, Setting, Source

TABLES_ARE_HOSTS = f"toml:{TOML_NAME}"  # hosts = …, where the [hosts.NAME] tables are meant
_SOURCES = {
    ParameterSource.COMMANDLINE: Source.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: Source.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP: Source.FILE,
}


class WithSettings(click.Command):
    """A command whose settings may stand on the line, in the environment, and in the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not any(is_setting(param) for param in self.params) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        from_file = FromFile(self.params, Path.cwd())
        ctx.default_map = from_file  # type: ignore[assignment] # click only reads it
        try:
            remaining = super().parse_args(ctx, args)
        except click.BadParameter as error:
            add_variable_hint(ctx, error)
            raise
        check_environment()
        _ = from_file.toml  # an unknown key is an error, even where every setting was typed
        resolve_hosts(ctx, from_file)
        return remaining


def add_variable_hint(ctx: click.Context, error: click.BadParameter) -> None:
    """Lets an error about an option's value name the variable that it came from."""
    option = error.param
    if not isinstance(option, click.Option) or option.name is None or error.param_hint:
        return
    if ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT:
        error.param_hint = f"{key_of(option)} (in {variable_in_use(option)})"


def check_environment() -> None:
    """Raises SettingError for a ``PACELINE_OPT_…`` variable that names no setting."""
    variables = [name for name in os.environ if name.startswith(f"{ENV_PREFIX}_")]
    if not variables:
        return
    legal = [variable_of(option) for option in settings_registry().values()]
    for name in variables:
        if name not in legal:
            raise unknown_name_error(f"the variable {printable(name)} names no option", name, legal)


def resolve_hosts(ctx: click.Context, from_file: FromFile) -> None:
    """Resolves hosts that nobody named, and how the lab's are reached.

    They are those of the allocation that we are in, else of the ``[hosts.NAME]`` tables; nodes that
    meet at ``--rdzv`` need none.
    """
    from paceline.schedulers import current_scheduler

    params = ctx.params
    if "hosts" not in params:
        return
    if ctx.meta.get(STANDALONE):
        use_local_only(ctx)
    accepts_hosts = not params.get("rdzv") and _accepts_hosts(params.get("via"))
    if not accepts_hosts and is_weaker(ctx, "hosts", "rdzv" if params.get("rdzv") else "via"):
        params["hosts"] = None  # what was typed now means other hosts than usual
        ctx.set_parameter_source("hosts", ParameterSource.DEFAULT)
    if params["hosts"] is None and accepts_hosts:
        allocation = current_scheduler(os.environ)
        if allocation is not None:  # with --via: its scheduler's hosts
            reaches_by_ssh = params.get("via", "ssh") == "ssh"
            params["hosts"] = allocation.hosts(os.environ) if reaches_by_ssh else None
        elif from_file.toml.get("hosts"):
            params["hosts"] = TABLES_ARE_HOSTS
            ctx.set_parameter_source("hosts", ParameterSource.DEFAULT_MAP)
    if params["hosts"] is not None and "ssh_config" in params:
        use_lab(ctx)


def use_local_only(ctx: click.Context) -> None:
    """Treats torchrun's --standalone as ``-H local``."""
    if setting(ctx, "hosts").source is Source.COMMAND_LINE:
        raise SettingError("--standalone means this machine alone", found="-H names hosts, too",
                           remedy="Leave out one of the two")  # fmt: skip
    ctx.params["hosts"] = "local"
    ctx.set_parameter_source("hosts", ParameterSource.COMMANDLINE)


def is_weaker(ctx: click.Context, name: str, compared: str) -> bool:
    return setting(ctx, name).source < setting(ctx, compared).source


def _accepts_hosts(via: str | None) -> bool:
    """Returns whether the program that starts the nodes takes hosts from a description."""
    if via is None:
        return True
    from paceline.schedulers import load

    return "ssh_config" in (load(via).start_options or ())  # one that logs in to them


def use_lab(ctx: click.Context) -> None:
    """Uses the lab's ssh config for its hosts, unless a stronger source names another."""
    from paceline.hosts.lab import find_lab, lab_name

    name = lab_name(ctx.params["hosts"])
    if name is not None and (
        ctx.params["ssh_config"] is None or is_weaker(ctx, "ssh_config", "hosts")
    ):
        ctx.params["ssh_config"] = find_lab(name, os.environ).ssh_config


def setting(ctx: click.Context, name: str) -> Setting[Any]:
    source = ctx.get_parameter_source(name)
    kind = _SOURCES.get(source, Source.DEFAULT) if source is not None else Source.DEFAULT
    option = next(p for p in ctx.command.params if isinstance(p, click.Option) and p.name == name)
    details = {Source.FILE: TOML_NAME, Source.ENVIRONMENT: variable_in_use(option)}
    return Setting(ctx.params[name], kind, details.get(kind, ""))


def variable_in_use(option: click.Option) -> str:
    """Returns the variable that gives the option its value, or would."""
    names = option.envvar if isinstance(option.envvar, list) else [variable_of(option)]
    return next((name for name in names if os.environ.get(name)), variable_of(option))


def toml_of(ctx: click.Context) -> Mapping[str, Any]:
    """Returns paceline.toml as the verb's settings were read from it."""
    from_file: object = ctx.default_map
    if isinstance(from_file, FromFile):
        return from_file.toml
    return read_settings_file(Path.cwd())
