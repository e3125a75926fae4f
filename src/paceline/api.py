"""The launcher from Python: :func:`prepare` says what would run where, :func:`execute` runs that.

What the command line takes from ``paceline.toml`` and the environment is not looked at here: a
call says all that it means. Both functions work in the main thread, outside of an event loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checks.preflight import inspector
from paceline.hosts import read_hosts
from paceline.hosts.lab import find_lab, lab_name
from paceline.launch.entry import entry_of, opens_store, preload_of
from paceline.launch.launcher import plan_job, run_job
from paceline.launch.screen import Screen
from paceline.launch.summary import RunOutcome
from paceline.launch.view import describe
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Transport
from paceline.schedulers import DEFAULT, load
from paceline.schedulers.scheduler import Options
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster
from paceline.spec.job import Environment, Job, Processes, Show
from paceline.spec.plan import Plan
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import Setting, Source


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, and what it was made of: all that :func:`execute` needs. Printed, it is the plan.

    Attributes:
        plan: What runs where, with the source of every setting.
        job: What was asked for.
        cluster: Where.
        ssh: How its hosts are logged in to.
    """

    plan: Plan
    job: Job
    cluster: Cluster
    ssh: SshOptions = SshOptions()

    def __str__(self) -> str:
        return describe(self.plan).rstrip()


def prepare(
    script: str | Path,
    args: Sequence[str | Path | float] = (),
    *,
    hosts: str | Cluster | None = None,
    nproc_per_node: Processes | None = None,
    nnodes: int | None = None,
    module: bool = False,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    python: str | Path | None = None,
    interface: str | None = None,
    max_restarts: int = 0,
    ssh_config: Path | None = None,
) -> Prepared:
    """Finds out what would run where: logs in to the hosts, looks, decides, and lets them go.

    Nothing is sent or started but the agents that look.

    Args:
        script: A Python script, seen from the current folder; a module's name with ``module``.
        args: Its arguments.
        hosts: As ``-H`` takes them (``"n1,n2"``, a host file, ``"lab"``) or a :class:`Cluster`;
            this machine alone without.
        nproc_per_node: Processes a host; found out without (slots, GPUs, else 1).
        nnodes: How many of the hosts, from the first on; all without.
        module: ``script`` is a module.
        torch: The script uses torch: hosts without it are refused, and it is imported once a host.
        env: Variables for the ranks. Values of names that tell of a secret are recorded nowhere.
        python: The interpreter on the hosts; the one that runs this, without.
        interface: Network interface for the job's traffic; found out without.
        max_restarts: How often all nodes may start again after a failure.
        ssh_config: For the logins, instead of the user's.

    Raises:
        PacelineError: The job cannot run there; says what was found and what to do.
    """
    if ours := [name for name in env or {} if jobenv.is_ours(name)]:
        raise SettingError(
            f"env holds {ours[0]}, which says a rank's place: that is decided here",
            remedy="Leave it out; nnodes and nproc_per_node change the plan",
        )
    entry = entry_of(str(script), tuple(map(str, args)), module=module)
    job = Job(
        name=Path(script).stem or "run",
        entry=entry,
        workdir=str(Path.cwd()),
        python=str(python or this_machine.default_python()),
        environment=Environment(dict(env or {})),
        nproc_per_node=_said(nproc_per_node),
        nnodes=_said(nnodes),
        hosts=_described(hosts),
        interface=_said(interface),
        max_restarts=Setting(max_restarts, Source.ARGUMENT) if max_restarts else Setting(0),
        preload=preload_of(entry) if torch else (),
        own_store=opens_store(entry),
        needs_torch=torch,
    )
    ssh = SshOptions(ssh_config)
    if isinstance(hosts, Cluster):
        cluster = hosts
    else:
        cluster = read_hosts(hosts, environ=os.environ, cwd=Path.cwd())
        lab = lab_name(hosts or "")
        if lab is not None and ssh_config is None:
            ssh = SshOptions(find_lab(lab, os.environ).ssh_config)
    cluster = this_machine.mark_me(cluster)
    plan = plan_job(job, cluster, _transport(ssh), inspect=inspector(job))
    return Prepared(plan, job, cluster, ssh)


def execute(prepared: Prepared, *, run_dir: Path | None = None, show: Show = "all") -> RunOutcome:
    """Runs exactly what was prepared, to its end. A job that fails is an outcome, no exception.

    The hosts are looked at again first. The run has the plan's port, so that it can be executed
    once at a time.

    Args:
        prepared: What to run, and where.
        run_dir: The run directory; a fresh one below ``runs/`` without.
        show: Whose output is shown on this process's own streams.

    Raises:
        NodeError: A host is not any more what the plan says of it.
        PacelineError: The job could not be started.
    """
    job, cluster, parent = prepared.job, prepared.cluster, Path(DEFAULT_PARENT)
    return run_job(job, cluster, _transport(prepared.ssh), Screen(show), run_dir=run_dir,
                   parent=parent, inspect=inspector(job), plan=prepared.plan)  # fmt: skip


def _transport(ssh: SshOptions) -> Transport:
    return load(DEFAULT).start(Options(ssh=ssh))


def _described(hosts: str | Cluster | None) -> Setting[str | None]:
    if hosts is None:
        return Setting(None, Source.FOUND, "this machine")
    if isinstance(hosts, Cluster):
        return Setting(None, Source.ARGUMENT, hosts.source)
    return Setting(hosts, Source.ARGUMENT)


def _said(value: Any) -> Setting[Any]:
    """A setting as the call gave it; ``None`` is for others to find out."""
    return Setting(None) if value is None else Setting(value, Source.ARGUMENT)
