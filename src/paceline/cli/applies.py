"""Which option applies where: one table, so that no option is ever accepted and then ignored.

A *manner* is how a command is carried out: a way that starts the nodes now, or a batch system for
which a script is written. An option that is given and does not apply is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click
from click.core import ParameterSource

from paceline.cli.sources import RUN_TABLE, variable_of
from paceline.schedulers.batch import SUBMITTED
from paceline.spec.errors import SettingError
from paceline.spec.settings import TOML_NAME

# manner → how it is asked for, for people
WAYS = {
    "ssh": "--via ssh (the default)",
    "local": "--via local",
    "mpi": "--via mpi",
    "srun": "--via slurm inside an allocation",
    "docker": "--via docker",
    "podman": "--via podman",
    "apptainer": "--via apptainer",
    "rdzv": "--rdzv HOST:PORT",
}
BATCHES = {
    "sbatch": "--via slurm outside an allocation",
    "pbs": "--via pbs",
    "lsf": "--via lsf",
    "kubernetes": "--via kubernetes",
}
MANNERS = {**WAYS, **BATCHES}
# verb (a command's own name) → what is typed
VERBS = {
    "run": "run",
    "train": "train",
    "evaluate": "evaluate",
    "scaling": "bench scaling",
    "collectives": "bench collectives",
}
MEASURING = frozenset({"scaling", "collectives"})

EVERYWHERE = frozenset(MANNERS)
ENGINES = frozenset({"docker", "podman", "apptainer"})
OVER_SSH = frozenset({"ssh", "mpi", "pbs", "lsf"}) | ENGINES
SCRIPTS = frozenset({"sbatch", "pbs", "lsf"})
NOW = frozenset(WAYS)


@dataclass(frozen=True, slots=True)
class Applies:
    """Where an option has an effect.

    Attributes:
        manners: How the nodes are started.
        verbs: Which commands.
        value: Only this value is restricted to them; the others apply everywhere.
        hint: What to type instead; empty for a list of the manners.
    """

    manners: frozenset[str] = EVERYWHERE
    verbs: frozenset[str] = frozenset(VERBS)
    value: object = None
    hint: str = ""


_JOBS = frozenset(VERBS) - MEASURING  # these end in one run whose start can be planned
_AT_THE_SITE = "--sbatch-arg takes any directive of the batch system"
# name of the parameter → where it applies
OPTIONS: dict[str, Applies] = {
    "hosts": Applies(NOW - {"rdzv"}, hint="The batch system, or --rdzv, chooses the hosts"),
    "ssh_config": Applies(OVER_SSH),
    "accept_new_host_keys": Applies(OVER_SSH),
    "nnodes": Applies(),
    "nproc_per_node": Applies(),
    "env": Applies(),
    "unset": Applies(),
    "iface": Applies(),
    "python": Applies(),
    "run_dir": Applies(verbs=frozenset(VERBS) - {"scaling"}, hint="--out FOLDER"),
    "name": Applies(),
    "master_port": Applies(),
    "backend": Applies(),
    "ship": Applies(EVERYWHERE - {"local"}, frozenset({"run", "scaling"}),
                    hint="Only code of yours, for hosts other than this machine, is shipped"),
    "bind": Applies(),
    "lease": Applies(),
    "grace": Applies(),
    "max_restarts": Applies(),
    "hang_timeout": Applies(),
    "check_level": Applies(frozenset({"ssh", "local", "pbs", "lsf"}), _JOBS, value="full",
                           hint="`paceline check` first"),
    "show": Applies(verbs=_JOBS),
    "plan_only": Applies(verbs=_JOBS),
    "as_json": Applies(NOW),
    "verbose": Applies(NOW, _JOBS),
    "via": Applies(),
    "via_arg": Applies(frozenset({"mpi", "srun", "sbatch"}) | ENGINES),
    "mpiexec": Applies(frozenset({"mpi"})),
    "image": Applies(ENGINES | {"kubernetes"}),
    "mount": Applies(ENGINES),
    "shm_size": Applies((ENGINES - {"apptainer"}) | {"kubernetes"},
                        hint="Apptainer's /dev/shm is the host's own"),
    "rdzv": Applies(frozenset({"rdzv"}), _JOBS),
    "rdzv_id": Applies(frozenset({"rdzv"}), _JOBS),
    "rdzv_key_file": Applies(frozenset({"rdzv"}), _JOBS),
    "node_rank": Applies(frozenset({"rdzv"}), _JOBS),
    "rdzv_timeout": Applies(frozenset({"rdzv"}), _JOBS),
    "time_limit": Applies(SCRIPTS),
    "partition": Applies(SCRIPTS),
    "account": Applies(SCRIPTS),
    "cpus_per_task": Applies(frozenset(BATCHES) - {"lsf"}, hint=_AT_THE_SITE),
    "mem": Applies(frozenset(BATCHES)),
    "gres": Applies(frozenset(BATCHES)),
    "sbatch_arg": Applies(SCRIPTS),
    "setup_command": Applies(SCRIPTS),
    "requeue": Applies(frozenset({"sbatch"}), hint=_AT_THE_SITE),
    "array": Applies(SCRIPTS),
    "detach": Applies(frozenset({"sbatch"})),
}  # fmt: skip
# These are for the submission; the job that was submitted finds them in its environment and file.
SUBMISSION = frozenset({"image", "shm_size"}) | {
    name for name, where in OPTIONS.items() if where.manners <= frozenset(BATCHES)
}


def applies(option: str, manner: str, verb: str = "run") -> bool:
    """Whether an option (by its parameter's name) has an effect; one that is not ours always."""
    where = OPTIONS.get(option)
    return where is None or where.value is not None or (
        manner in where.manners and verb in where.verbs
    )  # fmt: skip


def given(ctx: click.Context, names: Iterable[str] = OPTIONS) -> dict[str, str]:
    """Options that somebody gave, by parameter name, each as it was spelled and where."""
    found = {}
    for option in _options(ctx):
        name = option.name or ""
        source = ctx.get_parameter_source(name)
        flag = max(option.opts, key=len)
        spelled = {
            ParameterSource.COMMANDLINE: flag,
            ParameterSource.ENVIRONMENT: f"{flag} ({variable_of(option)})",
            ParameterSource.DEFAULT_MAP: f"{flag} ([{RUN_TABLE}] of {TOML_NAME})",
        }
        value = ctx.params.get(name)
        nothing = value is None or value is False or value == ()  # 0 is a value: --node-rank 0
        if name in names and source in spelled and not nothing:
            found[name] = spelled[source]
    return found


def _options(ctx: click.Context) -> list[click.Option]:
    return [param for param in ctx.command.params if isinstance(param, click.Option)]


def refuse_ignored(ctx: click.Context, manner: str, environ: Mapping[str, str]) -> None:
    """SettingError, exit status 2, for an option that was given and would have no effect."""
    verb = ctx.command.name or "run"
    for name, spelled in given(ctx).items():
        typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if environ.get(SUBMITTED) and name in SUBMISSION and not typed:
            continue  # it has had its effect when this batch was submitted
        where = OPTIONS[name]
        if where.value is not None and ctx.params[name] != where.value:
            continue
        if manner not in where.manners or verb not in where.verbs:
            raise _ignored(spelled, _valued(where, spelled), where, manner, verb)
    about_plans = {"as_json": "prints a plan as JSON", "verbose": "shows all of a plan"}
    for name, what in about_plans.items():
        if ctx.params.get(name) and verb in _JOBS and not ctx.params.get("plan_only"):
            spelled = given(ctx)[name]
            raise SettingError(
                f"{spelled} does not apply to a run",
                found=f"it {what}",
                remedy=f"--plan {spelled.split()[0]}, or leave it out",
            )


def refuse_beside(ctx: click.Context, what: str, names: Iterable[str]) -> None:
    """SettingError, exit status 2, for options that were given and that ``what`` makes void."""
    for spelled in given(ctx, tuple(names)).values():
        raise SettingError(
            f"{spelled} does not go with {what}",
            found="it would have no effect",
            remedy="Leave out one of the two",
        )


def _valued(where: Applies, spelled: str) -> str:
    return spelled if where.value is None else f"{spelled} {where.value}"


def _ignored(spelled: str, option: str, where: Applies, manner: str, verb: str) -> SettingError:
    remedy = f"Leave it out. {where.hint}" if where.hint else "Leave it out, or use one of these"
    if verb not in where.verbs:
        fitting = ", ".join(f"paceline {VERBS[one]}" for one in VERBS if one in where.verbs)
        return SettingError(
            f"{option} does not apply to paceline {VERBS[verb]}",
            found=f"it applies to: {fitting}", remedy=remedy,
        )  # fmt: skip
    fitting = ", ".join(MANNERS[one] for one in MANNERS if one in where.manners)
    return SettingError(
        f"{option} does not apply to {MANNERS[manner]}",
        found=f"it applies to: {fitting}", remedy=remedy,
    )  # fmt: skip
