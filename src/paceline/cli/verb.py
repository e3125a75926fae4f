"""The class of all verbs: settings, one form of help, and groups of verbs."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import click

from paceline.cli.help import has_hidden_options, render_help
from paceline.cli.settings import WithSettings
from paceline.spec.errors import SettingError
from paceline.spec.helptext import Row, Section
from paceline.spec.terminal import clean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Prints text, which may be a stranger's, without what a terminal would obey."""
    click.echo(clean(text), err=err, nl=nl)


class Verb(WithSettings):
    """A command of ours: with settings, and with the one form of help.

    Args:
        options_of: ``MODULE:CLASS`` of further options, which are passed on.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self.options_of: str | None = more.pop("options_of", None)
        passed_on = {"ignore_unknown_options": True} if self.options_of else {}
        settings = more.pop("context_settings", None) or {}
        more["context_settings"] = {**CONTEXT, **passed_on, **settings}
        super().__init__(*args, **more)

    def make_parser(self, ctx: click.Context) -> Any:
        """Returns click's parser, changed to refuse repeated options that take one value."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            try:
                values, remaining, order = parse(args)
            except click.NoSuchOption as error:
                if error.option_name == "-n" and any("-p" in param.opts for param in self.params):
                    message = f"{error.message} Did you mean -p N, the ranks of each host?"
                    raise click.NoSuchOption("-n", message, ctx=error.ctx) from None
                if any(param.name == "script" for param in self.params):
                    message = f"{error.message} An option of your script goes after its name."
                    raise click.NoSuchOption(
                        error.option_name, message, error.possibilities, error.ctx
                    ) from None
                raise
            if not ctx.resilient_parsing:
                _reject_repeated(order)
            return values, remaining, order

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the options, with --help-all if the help is short at first."""
        params = super().get_params(ctx)
        if ctx.help_option_names and not any(param.name == HELP_ALL for param in params):
            params.insert(
                len(params) - 1,
                _HELP_ALL_OPTION if has_hidden_options(self) else _HIDDEN_HELP_ALL_OPTION,
            )
        return params

    def get_help(self, ctx: click.Context) -> str:
        """Returns the help; ``meta`` tells whether all of it is wanted."""
        return render_help(ctx, self.sections(ctx), bool(ctx.meta.get(HELP_ALL)))

    def sections(self, ctx: click.Context) -> list[Section]:
        """Returns what precedes the options: those of a recipe, or of the model that it trained."""
        if self.options_of is None:
            return []
        from paceline.recipes.reference import sections_of

        return sections_of(self.options_of)


_SINGLE_VALUED = {  # options that seem to add up, with the way to name several things
    "hosts": "-H A,B names several hosts",
    "data": "Name one folder that holds all the data, or links to it (--follow-links)",
    "gres": "--gres A,B names several resources",
}


def _reject_repeated(order: Sequence[click.Parameter]) -> None:
    """Raises SettingError if an option of ``_SINGLE_VALUED`` was given several times.

    Of other options the last value counts, as everywhere: aliases and wrappers rely on it.
    """
    for param, count in Counter(order).items():
        remedy = _SINGLE_VALUED.get(param.name or "")
        if count > 1 and isinstance(param, click.Option) and remedy and not param.multiple:
            flag = "/".join(sorted(param.opts, key=len))
            raise SettingError(f"{flag} is given {count} times and takes one value", remedy=remedy)


def _print_all_help(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


HELP_ALL = "help_all"
NAMED_PATHS = "paceline.named_paths"  # in a context's meta: data and weights that are typed
_HELP_ALL_OPTION, _HIDDEN_HELP_ALL_OPTION = (
    click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all_help,
        hidden=hidden, help="Show every option and exit.",
    )
    for hidden in (False, True)
)  # fmt: skip


class VerbGroup(Verb, click.Group):
    """A verb that has verbs of its own."""

    def sections(self, ctx: click.Context) -> list[Section]:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append(Row(name, (command.help or "").strip().partition("\n\n")[0]))
        return [("Commands", rows)]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Returns the verbs for TAB, as in the help, without importing them."""
        from click.shell_completion import CompletionItem

        rows = [row for _, section in self.sections(ctx) for row in section]
        items = [CompletionItem(row.term, help=row.text) for row in rows
                 if row.term.startswith(incomplete)]  # fmt: skip
        return items or click.Command.shell_complete(self, ctx, incomplete)


Registry = Mapping[str, tuple[str, str]]  # name → (where its command is, one line for --help)


class Registered(VerbGroup):
    """A group that imports a verb's module, ``MODULE`` or ``MODULE:NAME``, when it is used."""

    registry: ClassVar[Registry]
    package: ClassVar[str]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.registry:
            return None
        module, _, name = self.registry[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"{self.package}.{module}"), name or "command")
        assert isinstance(command, click.Command)
        return command

    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Commands", [Row(name, line) for name, (_, line) in self.registry.items()])]


CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("_", "-"),  # torchrun's spellings
}
