"""What every verb is made of: the same settings from three places, and the same help."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from paceline.cli import sources
from paceline.cli.help import has_more, help_of
from paceline.cli.sources import FromFile, is_setting
from paceline.cli.torchrun import STANDALONE
from paceline.schedulers import inside, load
from paceline.spec.errors import SettingError
from paceline.spec.helptext import Row, Section
from paceline.spec.settings import TOML_NAME, Source
from paceline.spec.terminal import clean


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Prints text without anything that a terminal obeys: it may be a stranger's.

    Args:
        text: Of whatever origin.
        err: On standard error.
        nl: End the line.
    """
    click.echo(clean(text), err=err, nl=nl)


class Verb(click.Command):
    """A command whose settings may stand on the line, in the environment, and in the file.

    Args:
        options_of: ``MODULE:CLASS`` of further options, which are passed on.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self._options_of: str | None = more.pop("options_of", None)
        passed_on = {"ignore_unknown_options": True} if self._options_of else {}
        given = more.pop("context_settings", None) or {}
        more["context_settings"] = {**CONTEXT, **passed_on, **given}
        super().__init__(*args, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not any(is_setting(param) for param in self.params) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.default_map = from_file = FromFile(self.params, Path.cwd())
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name_variable(ctx, error)
            raise
        sources.check_environment()
        _ = from_file.toml  # an unknown key is an error, even where every setting was typed
        settle_hosts(ctx, from_file)
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options, and --help-all where the help is short at first."""
        params = super().get_params(ctx)
        if ctx.help_option_names and not any(param.name == ALL for param in params):
            params.insert(len(params) - 1, _HELP_ALL if has_more(self) else _HELP_ALL_HIDDEN)
        return params

    def get_help(self, ctx: click.Context) -> str:
        """The help as people see it; ``meta`` says whether all of it is wanted."""
        return help_of(ctx, self.sections(ctx), bool(ctx.meta.get(ALL)))

    def sections(self, ctx: click.Context) -> list[Section]:
        """What stands before the options: those of a recipe or of what it trained."""
        if self._options_of is None:
            return []
        from paceline.recipes.reference import sections_of

        return sections_of(self._options_of, everything=True)


def _show_all(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


ALL = "help_all"
_HELP_ALL, _HELP_ALL_HIDDEN = (
    click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
        hidden=hidden, help="Show every option and exit.",
    )
    for hidden in (False, True)
)  # fmt: skip


class VerbGroup(Verb, click.Group):
    """A verb that has verbs of its own."""

    def sections(self, ctx: click.Context) -> list[Section]:
        """The verbs, each with its first sentence."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append(Row(name, (command.help or "").strip().partition("\n\n")[0]))
        return [("Commands", rows)]


Registry = Mapping[str, tuple[str, str]]  # name → (where its command is, one line for --help)


class Registered(VerbGroup):
    """A group that imports a verb's module when the verb is used.

    Attributes:
        registry: ``MODULE`` with a ``command``, or ``MODULE:NAME``, by verb.
    """

    registry: ClassVar[Registry]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.registry:
            return None
        module, _, name = self.registry[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Commands", [Row(name, line) for name, (_, line) in self.registry.items()])]


CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("_", "-"),  # torchrun's spellings
}


def name_variable(ctx: click.Context, error: click.BadParameter) -> None:
    """Lets an error about an option's value name the variable that it came from."""
    option = error.param
    if not isinstance(option, click.Option) or option.name is None or error.param_hint:
        return
    if ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT:
        error.param_hint = f"{sources.key_of(option)} (in {sources.variable_in_use(option)})"


TABLES_ARE_HOSTS = f"toml:{TOML_NAME}"


def settle_hosts(ctx: click.Context, from_file: FromFile) -> None:
    """What stands for hosts that nobody named, and how the lab's are reached.

    Without any other word they are those of the allocation that we are in, else of the
    ``[hosts.NAME]`` tables; nodes that meet at ``--rdzv`` need none.
    """
    params = ctx.params
    if "hosts" not in params:
        return
    if ctx.meta.get(STANDALONE):
        stand_alone(ctx)
    open_to_us = not params.get("rdzv") and _takes_hosts(params.get("via"))
    if not open_to_us and weaker(ctx, "hosts", "rdzv" if params.get("rdzv") else "via"):
        params["hosts"] = None  # what was typed now means other hosts than usual
        ctx.set_parameter_source("hosts", ParameterSource.DEFAULT)
    if params["hosts"] is None and open_to_us:
        if around := inside(os.environ):  # a verb that has --via takes its scheduler's hosts
            params["hosts"] = None if "via" in params else around.hosts(os.environ)
        elif from_file.toml.get("hosts"):
            params["hosts"] = TABLES_ARE_HOSTS
            ctx.set_parameter_source("hosts", ParameterSource.DEFAULT_MAP)
    if params["hosts"] is not None and "ssh_config" in params:
        use_lab(ctx)


def stand_alone(ctx: click.Context) -> None:
    """torchrun's --standalone is our ``-H local``."""
    if sources.setting(ctx, "hosts").source is Source.COMMAND_LINE:
        raise SettingError("--standalone means this machine alone", found="-H names hosts, too",
                           remedy="Leave out one of the two")  # fmt: skip
    ctx.params["hosts"] = "local"
    ctx.set_parameter_source("hosts", ParameterSource.COMMANDLINE)


def weaker(ctx: click.Context, one: str, other: str) -> bool:
    """Whether a setting comes from a weaker place than another."""
    return sources.setting(ctx, one).source < sources.setting(ctx, other).source


def _takes_hosts(via: str | None) -> bool:
    """Whether what starts the nodes takes hosts from a description."""
    if via is None:
        return True
    return "ssh_config" in (load(via).starting or ())  # one that logs in to them


def use_lab(ctx: click.Context) -> None:
    """The lab's hosts are reached by the lab's ssh config, unless one is named as strongly."""
    from paceline.hosts.lab import find_lab, lab_name

    name = lab_name(ctx.params["hosts"])
    if name is not None and (
        ctx.params["ssh_config"] is None or weaker(ctx, "ssh_config", "hosts")
    ):
        ctx.params["ssh_config"] = find_lab(name, os.environ).ssh_config
