"""torchrun's options on our command line: understood, or refused with what to type instead.

Spellings with underscores need nothing here: every verb takes ``--nproc_per_node`` for
``--nproc-per-node``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline.spec.errors import SettingError

F = TypeVar("F", bound=Callable[..., Any])

_LOGS = "Leave it out: all output of each rank is in logs/HOST/RANK.log of the run directory"
# option → what to do instead
UNSUPPORTED = {
    "--master-addr": "Leave it out: the address of the first host is found. Where the same command"
    " is typed on each node: --rdzv HOST:PORT --node-rank K",
    "--rdzv-conf": "--rdzv-timeout SECONDS says how long to wait for the other nodes",
    "--monitor-interval": "Leave it out: the end of a rank is noticed at once",
    "--start-method": "Leave it out: ranks are forked from a server that has imported torch",
    "--event-log-handler": "Leave it out: the run directory holds events.jsonl",
    "--role": "Leave it out: all ranks have one role",
    "--log-dir": "--run-dir FOLDER: the logs are in it, at logs/HOST/RANK.log",
    "--redirects": _LOGS,
    "--tee": _LOGS,
    "--local-ranks-filter": "--show rank0, or paceline logs --rank N afterwards",
    "--duplicate-stdout-filters": _LOGS,
    "--duplicate-stderr-filters": _LOGS,
    "--local-addr": "--iface NAME",
    "--logs-specs": _LOGS,
    "--numa-binding": "--bind auto gives each rank CPUs of its own",
    "--signals-to-handle": "Leave it out: see Interrupts in docs/how-to/lost-hosts.md",
    "--shutdown-timeout": "--grace SECONDS",
}
UNSUPPORTED_FLAGS = {
    "--run-path": "Leave it out, and give the path of the script",
    "--virtual-local-rank": "Leave it out: LOCAL_RANK counts the ranks of a node",
    "--use-env": "Leave it out: LOCAL_RANK is in the environment",
    "--use_env": "Leave it out: LOCAL_RANK is in the environment",
}
STORES = ("c10d", "static")  # torch's own store: the one that there is


class Aliased(click.Option):
    """An option that is also understood by other names, which the help does not show."""

    def __init__(self, *args: Any, aliases: tuple[str, ...], **more: Any) -> None:
        super().__init__(*args, **more)
        self._aliases = aliases

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        visible, self.opts = self.opts, [*self.opts, *self._aliases]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = visible


def torchrun_options(command: F) -> F:
    """Adds the options of torchrun that mean something else here."""
    for flag, remedy in {**UNSUPPORTED, **UNSUPPORTED_FLAGS}.items():
        command = click.option(
            flag, is_flag=flag in UNSUPPORTED_FLAGS, hidden=True, expose_value=False,
            callback=_rejecter(flag, remedy),
        )(command)  # fmt: skip
    command = click.option("--standalone", is_flag=True, hidden=True, expose_value=False,
                           callback=_standalone)(command)  # fmt: skip
    return click.option("--rdzv-backend", hidden=True, expose_value=False,
                        callback=_check_backend)(command)  # fmt: skip


def _rejecter(flag: str, remedy: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def reject(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value:
            raise SettingError(f"{flag} is torchrun's, and not needed here", remedy=remedy)

    return reject


def _check_backend(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None and value not in STORES:
        raise SettingError(
            f"--rdzv-backend {value}: there is none but torch's own store (c10d)",
            remedy="Leave it out; --rdzv HOST:PORT where the same command is typed on each node",
        )


def _standalone(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[STANDALONE] = True


STANDALONE = "paceline.standalone"  # this machine alone: -H local
