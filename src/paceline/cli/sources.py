"""Where a setting comes from: command line before environment before file before default.

A setting is an option that has a variable, ``PACELINE_OPT_…``. Every verb that has such an option
takes its value from the same three places: click asks the variable, then the ``default_map``,
which here is ``[run]`` of ``paceline.toml``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from paceline.cli.torchrun import STANDALONE
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.settings import TOML_NAME, Setting, Source

F = TypeVar("F", bound=Callable[..., Any])

TABLES = ("run", "hosts", "train")
RUN_TABLE = "run"  # [run] in paceline.toml holds defaults for the options of every verb
TABLES_ARE_HOSTS = f"toml:{TOML_NAME}"  # hosts = …, where the [hosts.NAME] tables are meant
ENV_PREFIX = "PACELINE_OPT"  # PACELINE_OPT_NNODES=2 stands for --nnodes 2

_SOURCES = {
    ParameterSource.COMMANDLINE: Source.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: Source.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP: Source.FILE,
}


def as_settings(command: F, besides: Sequence[click.Parameter] = ()) -> F:
    """Makes the options that a verb has so far settings: each gets its variable.

    Args:
        command: The verb's function, with its options.
        besides: Options that are only this verb's own.
    """
    for made in command.__click_params__:  # type: ignore[attr-defined]
        if not isinstance(made, click.Option) or made.hidden or made in besides:
            continue
        if not is_setting(made):
            made.envvar = [variable_of(made)]
    return command


def is_setting(option: click.Parameter) -> bool:
    """Whether the option may also stand in the environment and in ``paceline.toml``."""
    return isinstance(option, click.Option) and variable_of(option) in (option.envvar or ())


def variable_of(option: click.Option) -> str:
    """The variable that stands for an option, by its long flag."""
    return f"{ENV_PREFIX}_{key_of(option).replace('-', '_').upper()}"


def key_of(option: click.Option) -> str:
    """The key of ``[run]`` that stands for an option: its first long flag."""
    longs = [flag for flag in option.opts if flag.startswith("--")]
    return (longs or option.opts)[0].lstrip("-")


def all_settings() -> dict[str, click.Option]:
    """Every setting there is, by its key: the options of ``paceline run``."""
    from paceline.cli.run import command

    return {key_of(o): o for o in command.params if isinstance(o, click.Option) and is_setting(o)}


# --- the file


def read_settings_file(cwd: Path) -> dict[str, Any]:
    """paceline.toml of the folder; empty when there is none.

    Raises:
        SettingError: It has an unknown table or an unknown key in ``[run]``.
        HostsError: It is no TOML, or a ``[hosts.NAME]`` table is wrong.
    """
    from paceline.hosts import load_toml

    toml = dict(load_toml(cwd / TOML_NAME))
    for table, content in toml.items():
        if table not in TABLES:
            raise _misplaced(table, content)
        if not isinstance(content, Mapping):
            raise SettingError(
                f"{table} in {TOML_NAME} must be a table",
                found=shown(f"{table} = {content!r}"),
                remedy=f"[{RUN_TABLE}]\n{table} = …" if table == "hosts" else f"[{table}]",
            )
    if toml.get(RUN_TABLE):
        _check_keys(toml[RUN_TABLE])
    if toml.get("train"):
        _check_recipes(toml["train"])
    return toml


def _misplaced(name: str, content: object) -> SettingError:
    """Of what stands at the top of the file, and is none of its tables."""
    if isinstance(content, Mapping):
        return _unknown(f"{TOML_NAME} has an unknown table [{shown(name)}]", name, TABLES)
    message = f"{TOML_NAME} has a key {shown(name)!r} outside of any table"
    if name.replace("_", "-") in all_settings():
        return SettingError(message, remedy=f"[{RUN_TABLE}]\n{shown(name)} = …")
    return _unknown(message, name.replace("_", "-"), [*all_settings()])


def _check_recipes(tables: Mapping[str, Any]) -> None:
    from paceline.recipes import RECIPES

    for name, table in tables.items():
        if name not in RECIPES or not isinstance(table, Mapping):
            raise _unknown(f"{TOML_NAME} has an unknown table [train.{shown(name)}]", name,
                           [*RECIPES])  # fmt: skip


def _check_keys(table: Mapping[str, Any]) -> None:
    legal = list(all_settings())
    seen: dict[str, str] = {}
    for key in table:
        plain = key.replace("_", "-")
        if plain not in legal:
            message = f"{TOML_NAME} has an unknown key {shown(key)!r} in [{RUN_TABLE}]"
            raise _unknown(message, plain, legal)
        if plain in seen:
            raise SettingError(
                f"{seen[plain]} and {key} in [{RUN_TABLE}] of {TOML_NAME} are one key"
            )
        seen[plain] = key


def check_environment() -> None:
    """SettingError for a ``PACELINE_OPT_…`` variable that names no setting."""
    given = [name for name in os.environ if name.startswith(f"{ENV_PREFIX}_")]
    if not given:
        return
    legal = [variable_of(option) for option in all_settings().values()]
    for name in given:
        if name not in legal:
            raise _unknown(f"the variable {shown(name)} names no option", name, legal)


def shown(text: str) -> str:
    """A text of the file or a variable as it may stand in an error: visible, and not too long."""
    from paceline.hosts import dialect

    return dialect.printable(text)


def _unknown(message: str, word: str, legal: Sequence[str]) -> SettingError:
    from paceline.spec.helptext import nearest

    near = nearest(word, legal)
    if near:
        return SettingError(message, remedy=f"Did you mean {near}?")
    return SettingError(message, found=f"there are: {', '.join(sorted(legal))}")


class FromFile(MutableMapping[str, Any]):
    """``[run]`` of paceline.toml as click's ``default_map`` of one verb.

    It is read when the first setting is looked up that neither the command line nor the
    environment gives, so that ``--help`` works beside a broken file.
    """

    def __init__(self, options: Sequence[click.Parameter], cwd: Path) -> None:
        self._options = {
            o.name: o for o in options if isinstance(o, click.Option) and is_setting(o)
        }
        self._cwd = cwd
        self._toml: dict[str, Any] | None = None

    @property
    def toml(self) -> dict[str, Any]:
        """The whole file."""
        if self._toml is None:
            self._toml = read_settings_file(self._cwd)
        return self._toml

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        option = self._options[name]
        key, value = self._entry(option)
        return converted(option, key, value)

    def _entry(self, option: click.Option) -> tuple[str, Any]:
        from paceline.cli import trust

        plain = key_of(option)
        table = self.toml.get(RUN_TABLE, {})
        key = next(one for one in (plain, plain.replace("-", "_")) if one in table)
        trust.require(self._cwd / TOML_NAME, self.toml, plain)
        return key, table[key]

    def __contains__(self, name: object) -> bool:
        option = self._options.get(name)  # type: ignore[call-overload]
        if option is None:
            return False
        plain, table = key_of(option), self.toml.get(RUN_TABLE, {})
        return plain in table or plain.replace("-", "_") in table

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        return (str(name) for name in self._options if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("the settings file is only read")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the settings file is only read")


def converted(option: click.Option, key: str, value: Any) -> Any:
    """A value of the file as its option takes it. SettingError when it cannot be used."""
    try:
        _check_kind(option, value)
        if option.multiple:
            values = value if isinstance(value, list) else [value]
            return tuple(option.type.convert(one, option, None) for one in values)
        return option.type.convert(value, option, None)
    except (click.BadParameter, ValueError, OverflowError) as error:
        found = error.message if isinstance(error, click.BadParameter) else str(error)
        raise SettingError(
            f"{key} = {shown(repr(value))} in [{RUN_TABLE}] of {TOML_NAME} cannot be used",
            found=shown(found),
        ) from None


_KINDS: dict[type, tuple[type, ...]] = {  # what TOML may hold for a type of click's
    click.types.BoolParamType: (bool,),
    click.types.IntParamType: (int, str),
    click.types.FloatParamType: (int, float, str),
}


def _check_kind(option: click.Option, value: Any) -> None:
    """Refuses what click would take for something else: true as 1, a date as a word."""
    given = value if option.multiple and isinstance(value, list) else [value]
    allowed = next((a for kind, a in _KINDS.items() if isinstance(option.type, kind)), (str, int))
    for one in given:
        if not isinstance(one, allowed) or (isinstance(one, bool) and bool not in allowed):
            wanted = "one of true and false" if bool in allowed else f"a {option.type.name}"
            raise click.BadParameter(f"{one!r} is not {wanted}")
        if isinstance(one, str) and not one.replace("\t", " ").isprintable():
            raise click.BadParameter(f"{one!r} has control characters")


class WithSettings(click.Command):
    """A command whose settings may stand on the line, in the environment, and in the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not any(is_setting(param) for param in self.params) or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.default_map = from_file = FromFile(self.params, Path.cwd())
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name_variable(ctx, error)
            raise
        check_environment()
        _ = from_file.toml  # an unknown key is an error, even where every setting was typed
        settle_hosts(ctx, from_file)
        return rest


def name_variable(ctx: click.Context, error: click.BadParameter) -> None:
    """Lets an error about an option's value name the variable that it came from."""
    option = error.param
    if not isinstance(option, click.Option) or option.name is None or error.param_hint:
        return
    if ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT:
        error.param_hint = f"{key_of(option)} (in {variable_in_use(option)})"


# --- hosts: what stands for them where nobody named any


def settle_hosts(ctx: click.Context, from_file: FromFile) -> None:
    """What stands for hosts that nobody named, and how the lab's are reached.

    Without any other word they are those of the allocation that we are in, else of the
    ``[hosts.NAME]`` tables; nodes that meet at ``--rdzv`` need none.
    """
    from paceline.schedulers import current_scheduler

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
        if around := current_scheduler(
            os.environ
        ):  # a verb that has --via takes its scheduler's hosts
            params["hosts"] = None if "via" in params else around.hosts(os.environ)
        elif from_file.toml.get("hosts"):
            params["hosts"] = TABLES_ARE_HOSTS
            ctx.set_parameter_source("hosts", ParameterSource.DEFAULT_MAP)
    if params["hosts"] is not None and "ssh_config" in params:
        use_lab(ctx)


def stand_alone(ctx: click.Context) -> None:
    """torchrun's --standalone is our ``-H local``."""
    if setting(ctx, "hosts").source is Source.COMMAND_LINE:
        raise SettingError("--standalone means this machine alone", found="-H names hosts, too",
                           remedy="Leave out one of the two")  # fmt: skip
    ctx.params["hosts"] = "local"
    ctx.set_parameter_source("hosts", ParameterSource.COMMANDLINE)


def weaker(ctx: click.Context, one: str, other: str) -> bool:
    """Whether a setting comes from a weaker place than another."""
    return setting(ctx, one).source < setting(ctx, other).source


def _takes_hosts(via: str | None) -> bool:
    """Whether what starts the nodes takes hosts from a description."""
    if via is None:
        return True
    from paceline.schedulers import load

    return "ssh_config" in (load(via).start_options or ())  # one that logs in to them


def use_lab(ctx: click.Context) -> None:
    """The lab's hosts are reached by the lab's ssh config, unless one is named as strongly."""
    from paceline.hosts.lab import find_lab, lab_name

    name = lab_name(ctx.params["hosts"])
    if name is not None and (
        ctx.params["ssh_config"] is None or weaker(ctx, "ssh_config", "hosts")
    ):
        ctx.params["ssh_config"] = find_lab(name, os.environ).ssh_config


# --- what the other modules ask


def setting(ctx: click.Context, name: str) -> Setting[Any]:
    """The value of an option, with its source."""
    source = ctx.get_parameter_source(name)
    found = _SOURCES.get(source, Source.DEFAULT) if source is not None else Source.DEFAULT
    option = next(p for p in ctx.command.params if isinstance(p, click.Option) and p.name == name)
    details = {Source.FILE: TOML_NAME, Source.ENVIRONMENT: variable_in_use(option)}
    return Setting(ctx.params[name], found, details.get(found, ""))


def variable_in_use(option: click.Option) -> str:
    """The variable that gives the option its value, or would."""
    names = option.envvar if isinstance(option.envvar, list) else [variable_of(option)]
    return next((name for name in names if os.environ.get(name)), variable_of(option))


def toml_of(ctx: click.Context) -> Mapping[str, Any]:
    """paceline.toml, as the verb's settings were taken from it."""
    if isinstance(ctx.default_map, FromFile):
        return ctx.default_map.toml
    return read_settings_file(Path.cwd())


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
