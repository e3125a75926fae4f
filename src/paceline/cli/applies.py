"""Which option applies where: one table, so that no option is ever accepted and then ignored.

What depends on how the nodes start is defined by the schedulers (``start_options`` and
``submit_options``); the rest is here. An option that is given and does not apply is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click
from click.core import ParameterSource

from paceline.cli.sources import RUN_TABLE, setting, variable_of
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import SUBMITTED_VARIABLE
from paceline.spec.errors import SettingError
from paceline.spec.nodes import NodeRange
from paceline.spec.settings import TOML_NAME

# verb (a command's own name) → what is typed
VERBS = {
    "run": "run",
    "train": "train",
    "evaluate": "evaluate",
    "scaling": "bench scaling",
    "collectives": "bench collectives",
    "forecast": "forecast",
}
MEASURING = frozenset({"scaling", "collectives", "forecast"})


@dataclass(frozen=True, slots=True)
class Manner:
    """How a command is carried out.

    Attributes:
        scheduler: By what.
        submits: It writes a script for later, instead of starting nodes now.
    """

    scheduler: Scheduler
    submits: bool

    def takes(self, option: str) -> bool:
        """Whether an option of which schedulers decide has an effect."""
        known = self.scheduler.submit_options if self.submits else self.scheduler.start_options
        return option in (known or ())

    def __str__(self) -> str:
        """How it is asked for, for people."""
        scheduler = self.scheduler
        if scheduler.start_options is None or scheduler.submit_options is None:
            return scheduler.option
        return f"{scheduler.option} {'outside' if self.submits else 'inside'} an allocation"


def manners() -> list[Manner]:
    """All that there are: first those that start nodes now."""
    every = [load(name) for name in SCHEDULERS]
    now = [Manner(one, submits=False) for one in every if one.start_options is not None]
    return now + [Manner(one, submits=True) for one in every if one.submit_options is not None]


@dataclass(frozen=True, slots=True)
class Applies:
    """Where an option has an effect.

    Attributes:
        chosen: Only where the scheduler says so (:class:`paceline.schedulers.scheduler.Scheduler`).
        verbs: Which commands.
        now: Which of them, where nodes are started now; ``None`` for all.
        value: Only this value is restricted to them; the others apply everywhere.
        hint: What to type instead; empty for a list of the manners.
        submission: It only says how a batch is to be submitted.
    """

    chosen: bool = False
    verbs: frozenset[str] = frozenset(VERBS)
    now: frozenset[str] | None = None
    value: object = None
    hint: str = ""
    submission: bool = False

    def verbs_of(self, manner: Manner) -> frozenset[str]:
        """The commands that take it when they are carried out so."""
        return self.verbs if manner.submits or self.now is None else self.now


_JOBS = frozenset(VERBS) - MEASURING  # these end in one run whose start can be planned
_SEVERAL = frozenset({"scaling", "forecast"})  # a ladder is many runs
_LEFT = frozenset({"run", "train"})  # may go on by themselves
_WATCHED = "Under MPI and --rdzv this command has to stay; a batch needs nobody to watch it"
_ONE_RUN = frozenset(VERBS) - _SEVERAL
_AT_THE_SITE = "--sbatch-arg takes any directive of the batch system"
_CHOSEN = Applies(chosen=True)
_RENDEZVOUS = Applies(chosen=True, verbs=_JOBS)
_BATCH = Applies(chosen=True, submission=True)
# name of the parameter → where it applies
OPTIONS: dict[str, Applies] = {
    "hosts": Applies(chosen=True, hint="The batch system, or --rdzv, chooses the hosts"),
    "ssh_config": _CHOSEN,
    "accept_new_host_keys": _CHOSEN,
    "nnodes": Applies(),
    "fastest": Applies(chosen=True, verbs=frozenset({"run", "train"}),
                       hint="It chooses among hosts that are named"),
    "wait_for_nodes": Applies(chosen=True, verbs=_JOBS,
                              hint="--rdzv-timeout is for nodes that come by themselves"),
    "nproc_per_node": Applies(),
    "env": Applies(),
    "unset": Applies(),
    "activate": Applies(),
    "iface": Applies(),
    "python": Applies(),
    "run_dir": Applies(verbs=_ONE_RUN, hint="--out FOLDER"),
    "name": Applies(),
    "master_port": Applies(),
    "backend": Applies(),
    "ship": Applies(chosen=True, verbs=frozenset({"run"}) | _SEVERAL,
                    hint="Only code of yours, for hosts other than this machine, is shipped"),
    "follow_links": Applies(chosen=True, verbs=_JOBS | _SEVERAL,
                            hint="No folder of this machine is sent"),
    "bind": Applies(),
    "debug": Applies(verbs=_JOBS | {"collectives"}, hint="It would slow what is measured"),
    "lease": Applies(),
    "grace": Applies(),
    "max_restarts": Applies(),
    "restart_window": Applies(),
    "hang_timeout": Applies(),
    "keep_warm": Applies(chosen=True, verbs=_JOBS),
    "check_level": Applies(chosen=True, verbs=_JOBS, value="full",
                           hint="`paceline check` first"),
    "show": Applies(verbs=_JOBS),
    "screen": Applies(verbs=_JOBS),
    "report": Applies(verbs=_JOBS, value=True, hint="paceline report writes it of any run"),
    "notify": Applies(verbs=_JOBS, hint="A measurement is many runs; && COMMAND follows it"),
    "plan_only": Applies(verbs=_JOBS | _SEVERAL),  # of a ladder only its batch has a plan
    "as_json": _CHOSEN,
    "verbose": Applies(chosen=True, verbs=_JOBS),
    "via": Applies(),
    "via_arg": _CHOSEN,
    "mpiexec": _CHOSEN,
    "image": Applies(chosen=True, submission=True),
    "mount": Applies(chosen=True, submission=True),
    "shm_size": Applies(chosen=True, submission=True,
                        hint="Apptainer's /dev/shm is the host's own"),
    "rdzv": _RENDEZVOUS,
    "rdzv_id": _RENDEZVOUS,
    "rdzv_key_file": _RENDEZVOUS,
    "node_rank": _RENDEZVOUS,
    "rdzv_timeout": _RENDEZVOUS,
    "time_limit": _BATCH,
    "partition": _BATCH,
    "account": _BATCH,
    "cpus_per_task": Applies(chosen=True, submission=True, hint=_AT_THE_SITE),
    "mem": _BATCH,
    "gres": _BATCH,
    "gpus": _BATCH,
    "gpus_per_node": _BATCH,
    "constraint": Applies(chosen=True, submission=True, hint=_AT_THE_SITE),
    "sbatch_arg": _BATCH,
    "setup_command": _BATCH,
    "requeue": Applies(chosen=True, verbs=_ONE_RUN, submission=True, hint=_AT_THE_SITE),
    "array": Applies(chosen=True, verbs=_ONE_RUN, submission=True),
    "detach": Applies(chosen=True, now=_LEFT, submission=True, hint=_WATCHED),
    "keep": Applies(chosen=True, verbs=_LEFT, hint=_WATCHED),
    "supervisor": Applies(chosen=True, verbs=_LEFT, hint=_WATCHED),
    "keep_results": Applies(chosen=True, verbs=_LEFT, hint="Results wait only on another host"),
}  # fmt: skip
# These are for the submission (those of containers also for a start now); the job that was
# submitted finds them in its environment and file.
SUBMISSION = frozenset(name for name, where in OPTIONS.items() if where.submission)


def given(ctx: click.Context, names: Iterable[str] = OPTIONS) -> dict[str, str]:
    """Options that somebody gave, by parameter name, each as it was spelled and where."""
    found = {}
    for option in _options(ctx):
        name = option.name or ""
        source = ctx.get_parameter_source(name)
        value = ctx.params.get(name)
        flag = spelling(option, value)
        spelled = {
            ParameterSource.COMMANDLINE: flag,
            ParameterSource.ENVIRONMENT: f"{flag} ({variable_of(option)})",
            ParameterSource.DEFAULT_MAP: f"{flag} ([{RUN_TABLE}] of {TOML_NAME})",
        }
        off = value is False and not option.secondary_opts  # --no-report says something
        nothing = value is None or off or value == ()  # 0 is a value: --node-rank 0
        if name in names and source in spelled and not nothing:
            found[name] = spelled[source]
    return found


def spelling(option: click.Option, value: object) -> str:
    """The long flag by which a value is typed: ``--no-report`` for what is switched off."""
    return max((value is False and option.secondary_opts) or option.opts, key=len)


def _options(ctx: click.Context) -> list[click.Option]:
    return [param for param in ctx.command.params if isinstance(param, click.Option)]


def refuse_ignored(ctx: click.Context, manner: Manner, environ: Mapping[str, str]) -> None:
    """SettingError, exit status 2, for an option that was given and would have no effect."""
    verb = ctx.command.name or "run"
    for name, spelled in given(ctx).items():
        typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if environ.get(SUBMITTED_VARIABLE) and name in SUBMISSION and not typed:
            continue  # it has had its effect when this batch was submitted
        where = OPTIONS[name]
        if where.value is not None and ctx.params[name] != where.value:
            continue
        if verb not in where.verbs_of(manner) or (where.chosen and not manner.takes(name)):
            raise _ignored(name, spelled, manner, verb)
    for name in ("supervisor", "keep_results"):
        typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if typed and not (ctx.params.get("detach") or ctx.params.get("keep")):
            raise SettingError(
                f"{given(ctx)[name]} does not apply to a run that is not left",
                found="this command watches it itself",
                remedy="--detach or --keep beside it, or leave it out",
            )
    if ctx.params.get("detach") and ctx.params.get("keep"):
        settle_leaving(ctx)
    if (ctx.params.get("detach") or ctx.params.get("keep")) and ctx.params.get("keep_warm"):
        refuse_beside(ctx, "a run that is left", ["keep_warm"])
    screen = ctx.get_parameter_source("screen")  # in a file it is for other runs, too
    if ctx.params.get("detach") and screen is ParameterSource.COMMANDLINE:
        refuse_beside(ctx, "--detach, which shows nothing of the run", ["screen"])
    about_plans = {"as_json": "prints a plan as JSON", "verbose": "shows all of a plan"}
    for name, what in about_plans.items():
        if ctx.params.get(name) and verb in _JOBS and not ctx.params.get("plan_only"):
            spelled = given(ctx)[name]
            raise SettingError(
                f"{spelled} does not apply to a run",
                found=f"it {what}",
                remedy=f"--plan {spelled.split()[0]}, or leave it out",
            )


def settle_leaving(ctx: click.Context) -> None:
    """Of --detach and --keep the one that was said more strongly; SettingError for two as strong.

    They start a run in the same way; after that one returns, and the other stays.
    """
    ways = ("detach", "keep")
    sources = {name: setting(ctx, name).source for name in ways}
    if sources["detach"] == sources["keep"]:
        both = given(ctx, ways)
        raise SettingError(
            f"{both['detach']} does not go with {both['keep']}",
            found="the first returns once the run has started, the second goes on to show it",
            remedy="Leave out one of the two",
        )
    ctx.params[min(ways, key=lambda name: sources[name])] = False


def settle_nodes(ctx: click.Context, manner: Manner) -> None:
    """A range of nodes where their number cannot change: it may leave no choice, else is refused.

    SettingError, exit status 2, with the reason.
    """
    nodes, verb = ctx.params.get("nnodes"), ctx.command.name or "run"
    if not isinstance(nodes, NodeRange):
        return
    why = manner.scheduler.fixed_size_reason
    if manner.submits:
        why = "a batch asks for a certain number of nodes"
    elif verb in MEASURING:
        why = "what is measured must not change on the way"
    if why and nodes.least == nodes.most:
        ctx.params["nnodes"] = nodes.least
    elif why:
        here = f"paceline {VERBS[verb]}" if verb in MEASURING else str(manner)
        raise SettingError(
            f"{given(ctx, ['nnodes'])['nnodes']} {nodes} is a range, which does not go with {here}",
            found=why,
            remedy=f"--nnodes {nodes.most or nodes.least}",
        )


def refuse_beside(ctx: click.Context, what: str, names: Iterable[str]) -> None:
    """SettingError, exit status 2, for options that were given and that ``what`` makes void."""
    for spelled in given(ctx, tuple(names)).values():
        raise SettingError(
            f"{spelled} does not go with {what}",
            found="it would have no effect",
            remedy="Leave out one of the two",
        )


def _ignored(name: str, spelled: str, manner: Manner, verb: str) -> SettingError:
    where = OPTIONS[name]
    option = spelled if where.value is None else f"{spelled} {where.value}"
    remedy = f"Leave it out. {where.hint}" if where.hint else "Leave it out, or use one of these"
    verbs = where.verbs_of(manner)
    if verb not in verbs:
        fitting = [f"paceline {VERBS[one]}" for one in VERBS if one in verbs]
        here = f"paceline {VERBS[verb]}"
    else:
        fitting = [str(one) for one in manners() if one.takes(name)]
        here = str(manner)
    return SettingError(
        f"{option} does not apply to {here}",
        found=f"it applies to: {', '.join(fitting)}", remedy=remedy,
    )  # fmt: skip
