"""Which option applies where: one table, so that no option is accepted and then ignored.

Schedulers say which options depend on how nodes are started (``starting``, ``submitting``); this
table holds the rest. An option that is given and does not apply is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import click
from click.core import ParameterSource

from paceline.cli.settings import setting
from paceline.cli.variables import RUN_TABLE, variable_of
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import SUBMITTED_VARIABLE
from paceline.spec.errors import SettingError
from paceline.spec.job import NodeRange
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
class LaunchMode:
    """How a command is carried out: by which scheduler, and whether as a script for later."""

    scheduler: Scheduler
    submits: bool

    def accepts(self, option: str) -> bool:
        """Returns whether an option that depends on the scheduler has an effect."""
        accepted = self.scheduler.submit_options if self.submits else self.scheduler.start_options
        return option in (accepted or ())

    def __str__(self) -> str:
        """Returns the option that selects the mode, for messages."""
        scheduler = self.scheduler
        if scheduler.start_options is None or scheduler.submit_options is None:
            return scheduler.option
        return f"{scheduler.option} {'outside' if self.submits else 'inside'} an allocation"


def launch_modes() -> list[LaunchMode]:
    schedulers = [load(name) for name in SCHEDULERS]
    starting = [s for s in schedulers if s.start_options is not None]
    submitting = [s for s in schedulers if s.submit_options is not None]
    return [*(LaunchMode(scheduler, submits=False) for scheduler in starting),
            *(LaunchMode(scheduler, submits=True) for scheduler in submitting)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applicability:
    """Where an option has an effect.

    Attributes:
        by_scheduler: Only if the scheduler takes it (``Scheduler.starting``, ``submitting``).
        verbs: Which commands.
        immediate_verbs: Which of them when nodes are started now; ``None`` for all.
        value: Only this value is restricted to them; the others apply everywhere.
        hint: What to type instead; empty for a list of the manners.
        submission: It only says how a batch is to be submitted.
    """

    by_scheduler: bool = False
    verbs: frozenset[str] = frozenset(VERBS)
    immediate_verbs: frozenset[str] | None = None
    value: object = None
    hint: str = ""
    submission: bool = False

    def verbs_in(self, mode: LaunchMode) -> frozenset[str]:
        """Returns the commands that take the option in this mode."""
        return self.verbs if mode.submits or self.immediate_verbs is None else self.immediate_verbs


_JOB_VERBS = frozenset(VERBS) - MEASURING  # these end in one run whose start can be planned
_MULTI_RUN = frozenset({"scaling", "forecast"})  # a ladder is many runs
_DETACHABLE = frozenset({"run", "train"})  # may go on by themselves
_HINT_STAYS = "Under MPI and --rdzv this command has to keep running; a batch runs without it"
_SINGLE_RUN = frozenset(VERBS) - _MULTI_RUN
_HINT_DIRECTIVE = "--sbatch-arg takes any directive of the batch system"
_EVERYWHERE = Applicability()
_BY_SCHEDULER = Applicability(by_scheduler=True)
_RENDEZVOUS = Applicability(by_scheduler=True, verbs=_JOB_VERBS)
_BATCH = Applicability(by_scheduler=True, submission=True)
# name of the parameter → where it applies
OPTIONS: dict[str, Applicability] = {
    **dict.fromkeys((
        "nnodes", "nproc_per_node", "env", "unset", "activate", "iface", "python", "name",
        "master_port", "backend", "bind", "lease", "grace", "max_restarts", "restart_window",
        "hang_timeout", "via", "encrypt"
    ), _EVERYWHERE),
    **dict.fromkeys((
        "ssh_config", "accept_new_host_keys", "as_json", "via_arg", "mpiexec"
    ), _BY_SCHEDULER),
    **dict.fromkeys((
        "rdzv", "rdzv_id", "rdzv_key_file", "node_rank", "rdzv_timeout"
    ), _RENDEZVOUS),
    **dict.fromkeys((
        "image", "mount", "time_limit", "partition", "account", "mem", "gres", "gpus",
        "gpus_per_node", "sbatch_arg", "setup_command"
    ), _BATCH),
    "hosts": Applicability(by_scheduler=True, hint="The batch system chooses the hosts"),
    "fastest": Applicability(by_scheduler=True, verbs=frozenset({"run", "train"}),
                       hint="It chooses among hosts that are named"),
    "wait_for_nodes": Applicability(by_scheduler=True, verbs=_JOB_VERBS,
                              hint="--rdzv-timeout is for nodes that come by themselves"),
    "run_dir": Applicability(verbs=_SINGLE_RUN, hint="--out FOLDER"),
    "ship": Applicability(by_scheduler=True, verbs=frozenset({"run"}) | _MULTI_RUN,
                    hint="Only code of yours, for hosts other than this machine, is shipped"),
    "follow_links": Applicability(by_scheduler=True, verbs=_JOB_VERBS | _MULTI_RUN,
                            hint="No folder of this machine is sent"),
    "debug": Applicability(verbs=_JOB_VERBS | {"collectives"},
                           hint="It would slow what is measured"),
    "keep_warm": Applicability(by_scheduler=True, verbs=_JOB_VERBS),
    "check_level": Applicability(by_scheduler=True, verbs=_JOB_VERBS, value="full",
                           hint="`paceline check` first"),
    "show": Applicability(verbs=_JOB_VERBS),
    "screen": Applicability(verbs=_JOB_VERBS),
    "report": Applicability(verbs=_JOB_VERBS, value=True,
                            hint="paceline report writes it of any run"),
    "notify": Applicability(verbs=_JOB_VERBS,
                            hint="A measurement is many runs; && COMMAND follows it"),
    # of a ladder only its batch has a plan
    "plan_only": Applicability(verbs=_JOB_VERBS | _MULTI_RUN),
    "verbose": Applicability(by_scheduler=True, verbs=_JOB_VERBS),
    "shm_size": Applicability(by_scheduler=True, submission=True,
                        hint="Apptainer's /dev/shm is the host's own"),
    "cpus_per_task": Applicability(by_scheduler=True, submission=True, hint=_HINT_DIRECTIVE),
    "constraint": Applicability(by_scheduler=True, submission=True, hint=_HINT_DIRECTIVE),
    "requeue": Applicability(by_scheduler=True, verbs=_SINGLE_RUN, submission=True,
                             hint=_HINT_DIRECTIVE),
    "array": Applicability(by_scheduler=True, verbs=_SINGLE_RUN, submission=True),
    "detach": Applicability(by_scheduler=True, immediate_verbs=_DETACHABLE, submission=True,
                            hint=_HINT_STAYS),
    "keep": Applicability(by_scheduler=True, verbs=_DETACHABLE, hint=_HINT_STAYS),
    "supervisor": Applicability(by_scheduler=True, verbs=_DETACHABLE, hint=_HINT_STAYS),
    "keep_results": Applicability(by_scheduler=True, verbs=_DETACHABLE,
                                  hint="Results wait only on another host"),
}  # fmt: skip
# These are for the submission (those of containers also for a start now); the job that was
# submitted finds them in its environment and file.
SUBMISSION = frozenset(name for name, where in OPTIONS.items() if where.submission)


def specified_options(ctx: click.Context, names: Iterable[str] = OPTIONS) -> dict[str, str]:
    """Options that somebody gave, by parameter name, each as it was spelled and where."""
    spellings = {}
    for option in ctx.command.params:
        if not isinstance(option, click.Option):
            continue
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
        is_empty = value is None or off or value == ()  # 0 is a value: --node-rank 0
        if name in names and source in spelled and not is_empty:
            spellings[name] = spelled[source]
    return spellings


def spelling(option: click.Option, value: object) -> str:
    """Returns the long flag for a value: ``--no-report`` for what is switched off."""
    return max((value is False and option.secondary_opts) or option.opts, key=len)


def check_applicable(ctx: click.Context, mode: LaunchMode) -> None:
    """Raises SettingError, with exit status 2, for a given option that would have no effect."""
    verb = ctx.command.name or "run"
    for name, spelled in specified_options(ctx).items():
        is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if os.environ.get(SUBMITTED_VARIABLE) and name in SUBMISSION and not is_typed:
            continue  # it has had its effect when this batch was submitted
        rule = OPTIONS[name]
        if rule.value is not None and ctx.params[name] != rule.value:
            continue
        if verb not in rule.verbs_in(mode) or (rule.by_scheduler and not mode.accepts(name)):
            raise _not_applicable(name, spelled, mode, verb)
    is_detached = ctx.params.get("detach") or ctx.params.get("keep")
    for name in ("supervisor", "keep_results"):
        is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_typed and not is_detached:
            raise SettingError(
                f"{specified_options(ctx)[name]} does not apply to a run that is not left",
                found="this command watches it itself",
                remedy="--detach or --keep beside it, or leave it out",
            )
    if ctx.params.get("detach") and ctx.params.get("keep"):
        resolve_detach_or_keep(ctx)
    if is_detached and ctx.params.get("keep_warm"):
        leaving = next(iter(specified_options(ctx, ("detach", "keep")).values()))
        reject_combination(ctx, leaving, ["keep_warm"])
    screen = ctx.get_parameter_source("screen")  # in a file it is for other runs, too
    if ctx.params.get("detach") and screen is ParameterSource.COMMANDLINE:
        reject_combination(ctx, "--detach, which shows nothing of the run", ["screen"])
    plan_only_options = {"as_json": "prints a plan as JSON", "verbose": "shows all of a plan"}
    for name, purpose in plan_only_options.items():
        if ctx.params.get(name) and verb in _JOB_VERBS and not ctx.params.get("plan_only"):
            spelled = specified_options(ctx)[name]
            raise SettingError(
                f"{spelled} does not apply to a run",
                found=f"it {purpose}",
                remedy=f"--plan {spelled.split()[0]}, or leave it out",
            )


def resolve_detach_or_keep(ctx: click.Context) -> None:
    """Keeps --detach or --keep, whichever has the stronger source; SettingError if equal."""
    names = ("detach", "keep")
    sources = {name: setting(ctx, name).source for name in names}
    if sources["detach"] == sources["keep"]:
        both = specified_options(ctx, names)
        raise SettingError(
            f"{both['detach']} cannot be combined with {both['keep']}",
            found="the first returns once the run has started, the second goes on to show it",
            remedy="Leave out one of the two",
        )
    ctx.params[min(names, key=lambda name: sources[name])] = False


def resolve_node_range(ctx: click.Context, mode: LaunchMode) -> None:
    """Resolves a range of nodes; only a fixed one is accepted if their number cannot change."""
    nodes, verb = ctx.params.get("nnodes"), ctx.command.name or "run"
    if not isinstance(nodes, NodeRange):
        return
    reason = mode.scheduler.fixed_size_reason
    if mode.submits:
        reason = "a batch asks for a certain number of nodes"
    elif verb in MEASURING:
        reason = "what is measured must not change on the way"
    if reason and nodes.minimum == nodes.maximum:
        ctx.params["nnodes"] = nodes.minimum
    elif reason:
        context = f"paceline {VERBS[verb]}" if verb in MEASURING else str(mode)
        raise SettingError(
            f"{specified_options(ctx, ['nnodes'])['nnodes']} {nodes} is a range,"
            f" which cannot be combined with {context}",
            found=reason,
            remedy=f"--nnodes {nodes.maximum or nodes.minimum}",
        )


def reject_combination(ctx: click.Context, other: str, names: Iterable[str]) -> None:
    """Raises SettingError, with exit status 2, for given options that ``other`` makes useless."""
    for spelled in specified_options(ctx, tuple(names)).values():
        raise SettingError(
            f"{spelled} cannot be combined with {other}",
            found="it would have no effect",
            remedy="Leave out one of the two",
        )


def _not_applicable(name: str, spelled: str, mode: LaunchMode, verb: str) -> SettingError:
    rule = OPTIONS[name]
    option = spelled if rule.value is None else f"{spelled} {rule.value}"
    remedy = f"Leave it out. {rule.hint}" if rule.hint else "Leave it out, or use one of these"
    verbs = rule.verbs_in(mode)
    if verb not in verbs:
        alternatives = [f"paceline {VERBS[mode]}" for mode in VERBS if mode in verbs]
        context = f"paceline {VERBS[verb]}"
    else:
        alternatives = [str(mode) for mode in launch_modes() if mode.accepts(name)]
        context = str(mode)
    return SettingError(
        f"{option} does not apply to {context}",
        found=f"it applies to: {', '.join(alternatives)}", remedy=remedy,
    )  # fmt: skip
