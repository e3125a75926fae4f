"""The launcher from Python: :func:`prepare` says what would run where, :func:`execute` runs that.

:func:`launch` runs a function of this process and gives what it returned on every rank.

What the command line takes from ``paceline.toml`` and the environment is not looked at here: a
call says all that it means. All work from any thread, and where an event loop is running. Signals
come to the main thread only: a run that was begun in another one is not ended by Ctrl-C, but ends
when this process does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from paceline.checks.preflight import inspector
from paceline.hosts import read_hosts
from paceline.hosts.lab import find_lab, lab_name
from paceline.launch import call
from paceline.launch.call import Results
from paceline.launch.jobs import plan_job, run_job
from paceline.launch.planning.entry import entry_of, opens_store, preload_of
from paceline.launch.planning.plan_text import describe
from paceline.launch.results.summary import RunOutcome
from paceline.launch.terminal.screen import Screen
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Transport
from paceline.schedulers import DEFAULT, load
from paceline.schedulers.scheduler import Options
from paceline.spec import jobenv
from paceline.spec import rundir as names
from paceline.spec.duration import parse_duration
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster
from paceline.spec.job import Environment, Job, Processes, Show, parse_processes
from paceline.spec.nodes import NodeCount, parse_node_count
from paceline.spec.plan import Plan
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import Setting, Source
from paceline.transfer.tree import project_root

T = TypeVar("T")
Hosts: TypeAlias = str | Sequence[str] | Cluster


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
    hosts: Hosts | None = None,
    nproc_per_node: Processes | None = None,
    nnodes: int | str | None = None,
    module: bool = False,
    torch: bool = True,
    env: Mapping[str, str] | None = None,
    python: str | Path | None = None,
    interface: str | None = None,
    wait_for_nodes: float | str | None = None,
    max_restarts: int | None = None,
    restart_window: float | str | None = None,
    ssh_config: str | Path | None = None,
) -> Prepared:
    """Finds out what would run where: logs in to the hosts, looks, decides, and lets them go.

    Nothing is sent or started but the agents that look.

    Args:
        script: A Python script, seen from the current folder; a module's name with ``module``.
        args: Its arguments.
        hosts: As ``-H`` takes them (``"n1,n2"``, a host file, ``"lab"``), a list of names, or a
            :class:`Cluster`; this machine alone without.
        nproc_per_node: Processes a host; found out without (slots, GPUs, else 1).
        nnodes: How many of the hosts, from the first on, or a range: ``"1:3"``; all without.
        module: ``script`` is a module.
        torch: The script uses torch: hosts without it are refused, and it is imported once a host.
        env: Variables for the ranks. Values of names that tell of a secret are recorded nowhere.
        python: The interpreter on the hosts; the one that runs this, without.
        interface: Network interface for the job's traffic; found out without.
        wait_for_nodes: Seconds, or ``"10m"``, to wait for hosts while there are too few; 600
            without.
        max_restarts: How often all nodes may start again after a failure; without it only after
            a loss before the first step, with 0 not then either.
        restart_window: Seconds within which failures count for that; 3600 without, 0 for all.
        ssh_config: For the logins, instead of the user's.

    Raises:
        PacelineError: The job cannot run there; says what was found and what to do.
    """
    entry = entry_of(str(script), tuple(map(str, args)), module=module)
    settings = _asked(hosts, python, env, nproc_per_node, nnodes, interface, max_restarts,
                      wait_for_nodes, restart_window)  # fmt: skip
    job = Job(
        name=Path(script).stem or "run",
        entry=entry,
        **settings,
        preload=preload_of(entry) if torch else (),
        opens_store=opens_store(entry),
        needs_torch=torch,
    )
    cluster, ssh = _where(hosts, ssh_config)
    plan = plan_job(job, cluster, _transport(ssh), inspect=inspector(job))
    return Prepared(plan, job, cluster, ssh)


def execute(prepared: Prepared, *, run_dir: str | Path | None = None,
            show: Show = "all") -> RunOutcome:  # fmt: skip
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
    return run_job(job, cluster, _transport(prepared.ssh), _screen(show), run_dir=_path(run_dir),
                   parent=parent, inspect=inspector(job), plan=prepared.plan)  # fmt: skip


def launch(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hosts: Hosts | None = None,
    nproc_per_node: Processes | None = None,
    nnodes: int | str | None = None,
    torch: bool | None = None,
    env: Mapping[str, str] | None = None,
    python: str | Path | None = None,
    interface: str | None = None,
    wait_for_nodes: float | str | None = None,
    max_restarts: int | None = None,
    restart_window: float | str | None = None,
    ship: bool = True,
    keep_warm: float | str = 0.0,
    run_dir: str | Path | None = None,
    show: Show = "all",
    ssh_config: str | Path | None = None,
) -> Results[T]:
    """Calls a function as every rank of a job on all hosts; what it returned, by rank.

    The function may stand in a script, a module, a notebook's cell or another function; nothing
    has to be guarded by ``if __name__ == "__main__"``. In a rank it finds torchrun's variables, so
    that ``torch.distributed.init_process_group()`` works, and need not make a group. A coroutine
    function is run to its end. What it prints and logs is shown here, each line with its host and
    rank.

    Modules of the project (the git work tree, or folder, of the current folder) are sent to the
    hosts and imported there; functions and classes of ``__main__`` and of modules that lie
    elsewhere travel in the pickle. Returned tensors come from any device to the CPU, each in memory
    of its own, and large ones as files: return a model from one rank only.

    What a host sends is unpickled here, and whoever writes a pickle may run code where it is
    loaded: a function runs on hosts that you trust with this machine. Its hash is compared first,
    which says that it is what the rank wrote, no more.

    Args:
        function: Anything that can be called and, by cloudpickle, be pickled.
        args, kwargs: What it is called with, the same on every rank.
        hosts, nproc_per_node, nnodes, env, python, interface, wait_for_nodes, max_restarts,
            restart_window, ssh_config: As for :func:`prepare`. The Python there must be of this
            one's minor version.
        torch: The function uses torch: hosts without it are refused, and it is imported once a
            host. Found out without, from the names in the function and what is imported here.
        ship: Send the project's files where they differ. Else all of its modules travel in the
            pickle, and no file is sent.
        keep_warm: How long the hosts stay ready for the next call, or command, in seconds or as
            ``"10m"``: it needs no login and no import. See ``paceline warm``.
        run_dir: The run directory; a fresh one below ``runs/`` without.
        show: Whose output is shown.

    Returns:
        A sequence by rank, with ``by_host`` and the run's ``outcome``.

    Raises:
        Exception: What the function raised on the first rank that failed. Its ``__cause__`` is a
            :class:`RankError` with host, rank and the traceback there.
        RankError: The first rank that failed raised nothing (a signal, a lost host), or what came
            back cannot be loaded here.
        SettingError: The function cannot be pickled; names the part.
        PacelineError: The job could not be started.
        KeyboardInterrupt: Ctrl-C: all ranks have ended.
    """
    entry = call.entry_of_function(function)
    _refuse_odd(args, kwargs)
    settings = _asked(hosts, python, env, nproc_per_node, nnodes, interface, max_restarts,
                      wait_for_nodes, restart_window)  # fmt: skip
    job = Job(
        name=call.name_of(function),
        entry=entry,
        **settings,
        ship=Setting("auto") if ship else Setting("never", Source.ARGUMENT),
    )
    cluster, ssh = _where(hosts, ssh_config)
    remote = any(not host.local for host in cluster.hosts)
    elsewhere = call.modules_elsewhere(project_root(job) if ship else None) if remote else []
    with call.folder_for(_path(run_dir), job.name) as path:
        file = path / names.CALL
        sha256, pickled = call.write_call(file, function, args, kwargs or {}, elsewhere)
        preload = call.preload_of_call(function, pickled) if torch is not False else ()
        if torch and not preload:
            preload = ("torch",)
        job = replace(job, entry=replace(entry, sha256=sha256), preload=preload,
                      needs_torch=bool(preload))  # fmt: skip
        outcome = run_job(job, cluster, _transport(ssh), _screen(show), run_dir=path,
                          parent=path.parent, inspect=call.same_python(inspector(job)),
                          keep_warm_s=_seconds("keep_warm", keep_warm))  # fmt: skip
        if outcome.result.interrupted is None:
            return call.results_of(outcome)
    if outcome.result.interrupted != signal.SIGINT:
        signal.raise_signal(outcome.result.interrupted)  # as if nobody had listened
    raise KeyboardInterrupt


def _asked(
    hosts: Hosts | None,
    python: str | Path | None,
    env: Mapping[str, str] | None,
    nproc_per_node: Processes | None,
    nnodes: int | str | None,
    interface: str | None,
    max_restarts: int | None,
    wait_for_nodes: float | str | None,
    restart_window: float | str | None,
) -> dict[str, Any]:
    """The fields of a job that every call says in the same words."""
    return {
        "workdir": str(Path.cwd()),
        "python": str(python or this_machine.default_python()),
        "environment": _environment(env),
        "nproc_per_node": _processes(nproc_per_node),
        "nnodes": _said(_nodes(nnodes)),
        "hosts": _described(hosts),
        "interface": _said(interface),
        "max_restarts": _said(max_restarts) if max_restarts is not None else Setting(0),
        **_durations(wait_for_nodes_s=wait_for_nodes, restart_window_s=restart_window),
    }


def _refuse_odd(args: Any, kwargs: Any) -> None:
    """SettingError for what a function cannot be called with."""
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise SettingError(
            f"args of launch is a {type(args).__name__}, not the arguments one after the other",
            remedy="A tuple, also of one: launch(train, args=(7,))",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SettingError(
            f"kwargs of launch is a {type(kwargs).__name__}, not arguments by their names",
            remedy='launch(train, kwargs={"epochs": 3})',
        )


def _screen(show: Show) -> Screen:
    if show not in get_args(Show):
        raise SettingError(f"show: {show!r} is not one of {', '.join(get_args(Show))}")
    return Screen(show)


def _processes(said: Processes | None) -> Setting[Any]:
    try:
        return _said(None if said is None else parse_processes(said))
    except ValueError as error:
        raise SettingError(f"nproc_per_node: {error}") from None


def _where(hosts: Hosts | None,
           ssh_config: str | Path | None) -> tuple[Cluster, SshOptions]:  # fmt: skip
    """The hosts that are meant, and how they are logged in to."""
    ssh = SshOptions(_path(ssh_config))
    if isinstance(hosts, Cluster):
        return this_machine.mark_local(hosts), ssh
    source = _typed(hosts)
    cluster = read_hosts(source, environ=os.environ, cwd=Path.cwd())
    lab = lab_name(source or "")
    if lab is not None and ssh_config is None:
        ssh = SshOptions(find_lab(lab, os.environ).ssh_config)
    return this_machine.mark_local(cluster), ssh


def _typed(hosts: str | Sequence[str] | None) -> str | None:
    """As it would be typed behind ``-H``."""
    return hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _environment(env: Mapping[str, str] | None) -> Environment:
    if ours := [name for name in env or {} if jobenv.is_reserved(name)]:
        raise SettingError(
            f"env holds {ours[0]}, which says a rank's place: that is decided here",
            remedy="Leave it out; nnodes and nproc_per_node change the plan",
        )
    return Environment(dict(env or {}))


def _transport(ssh: SshOptions) -> Transport:
    return load(DEFAULT).start(Options(ssh=ssh))


def _described(hosts: Hosts | None) -> Setting[str | None]:
    if hosts is None:
        return Setting(None, Source.FOUND, "this machine")
    if isinstance(hosts, Cluster):
        return Setting(None, Source.ARGUMENT, hosts.source)
    return Setting(_typed(hosts), Source.ARGUMENT)


def _nodes(asked: int | str | None) -> NodeCount | None:
    if not isinstance(asked, str):
        return asked
    try:
        return parse_node_count(asked)
    except ValueError as error:
        raise SettingError(f"nnodes: {error}", remedy='nnodes=2, or nnodes="1:3"') from None


def _durations(**given: float | str | None) -> dict[str, Any]:
    """Those that the call gave. SettingError for what is no length of time."""
    return {name: Setting(_seconds(name, said), Source.ARGUMENT)
            for name, said in given.items() if said is not None}  # fmt: skip


def _seconds(name: str, said: float | str) -> float:
    try:
        return parse_duration(said)
    except (ValueError, TypeError):
        raise SettingError(
            f"{name.removesuffix('_s')}: {said!r} is no length of time",
            remedy='A number of seconds, or a text: "90", "10m", "1h30m"',
        ) from None


def _said(value: Any) -> Setting[Any]:
    """A setting as the call gave it; ``None`` is for others to find out."""
    return Setting(None) if value is None else Setting(value, Source.ARGUMENT)
