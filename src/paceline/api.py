"""The Python interface: :func:`prepare` plans a script's run and :func:`execute` runs the plan.

:func:`launch` calls a function on all ranks and returns its results.

Settings come only from the arguments, not from ``paceline.toml`` or ``PACELINE_OPT_…``. All
functions work in any thread and with a running event loop. Python delivers signals to the main
thread only: Ctrl-C does not end a run of another thread, which ends with the process instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from paceline.checks.preflight import inspector
from paceline.hosts import check_keys, read_hosts
from paceline.hosts.lab import find_lab, lab_name
from paceline.launch import call
from paceline.launch.call import Results
from paceline.launch.launcher import plan_job, run_job
from paceline.launch.planning.entry import entry_of, opens_store, preload_of
from paceline.launch.planning.plan_text import describe
from paceline.launch.results.run_outcome import RunOutcome
from paceline.launch.terminal.screen import Screen
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Transport
from paceline.schedulers import DEFAULT, load
from paceline.schedulers.scheduler import Options
from paceline.spec import jobenv
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.formatting import parse_duration
from paceline.spec.hosts import Cluster
from paceline.spec.job import (
    Environment,
    Job,
    NodeCount,
    Processes,
    Show,
    parse_node_count,
    parse_processes,
)
from paceline.spec.plan import Plan
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import Setting, Source
from paceline.transfer.tree import is_no_project, project_root

T = TypeVar("T")
Hosts: TypeAlias = str | Sequence[str] | Cluster


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan and its inputs, as :func:`execute` needs them. ``str`` describes the plan.

    Attributes:
        plan: What runs where, with the source of every setting.
        job: The requested job.
        cluster: Its hosts.
        ssh: The SSH options for its hosts.
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
    follow_links: bool = False,
    wait_for_nodes: float | str | None = None,
    max_restarts: int | None = None,
    restart_window: float | str | None = None,
    ssh_config: str | Path | None = None,
) -> Prepared:
    """Logs in to the hosts, plans what runs where, and logs out.

    No file is sent, and nothing is started except the agents that inspect the hosts.

    Args:
        script: A Python script relative to the current folder, or with ``module`` a module name.
        args: Arguments of the script.
        hosts: A source as for ``-H`` (``"n1,n2"``, a host file, ``"lab"``), a list of names, or a
            :class:`Cluster`. This machine by default.
        nproc_per_node: Processes per host. By default the slots or GPUs of the host, otherwise 1.
        nnodes: Number of hosts, counted from the first, or a range: ``"1:3"``. By default all.
        module: ``script`` is a module.
        torch: The script uses torch: hosts without it are refused, and each imports it once.
        env: Variables for the ranks. Values whose names suggest a secret are not recorded.
        python: The interpreter on the hosts. By default the running one.
        interface: Network interface for the job's traffic. By default detected.
        follow_links: Send files outside the project to which symlinks in it lead.
        wait_for_nodes: Seconds, or a text such as ``"10m"``, to wait for missing hosts. 600 by
            default.
        max_restarts: Restarts of all nodes after failures. By default only after a loss before the
            first step; 0 prevents those too.
        restart_window: Seconds within which failures count. 3600 by default; 0 counts all.
        ssh_config: SSH configuration instead of the user's.

    Raises:
        PacelineError: The job cannot run there. The text says what was found and what to do.
    """
    options = locals()
    entry = entry_of(str(script), tuple(map(str, args)), module=module)
    settings = _common_fields(options)
    job = Job(
        name=Path(script).stem or "run",
        entry=entry,
        **settings,
        preload=preload_of(entry) if torch else (),
        opens_store=opens_store(entry),
        needs_torch=torch,
    )
    cluster, ssh = _resolve_hosts(hosts, ssh_config)
    plan = plan_job(job, cluster, _transport(ssh), inspect=inspector(job))
    return Prepared(plan, job, cluster, ssh)


def execute(prepared: Prepared, *, run_dir: str | Path | None = None,
            show: Show = "all") -> RunOutcome:  # fmt: skip
    """Runs a prepared plan to its end. A failed job is an outcome, not an exception.

    The hosts are checked again first. A plan includes its port, so it can be executed only once at
    a time.

    Args:
        prepared: The plan.
        run_dir: The run directory. By default a new one below ``runs/``.
        show: The ranks whose output appears on this process's streams.

    Raises:
        NodeError: A host no longer matches the plan.
        PacelineError: The job could not be started.
    """
    job, cluster, parent = prepared.job, prepared.cluster, Path(DEFAULT_PARENT)
    return run_job(job, cluster, _transport(prepared.ssh), _screen(show),
                   run_dir=_optional_path(run_dir), parent=parent, inspect=inspector(job),
                   plan=prepared.plan)  # fmt: skip


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
    follow_links: bool = False,
    wait_for_nodes: float | str | None = None,
    max_restarts: int | None = None,
    restart_window: float | str | None = None,
    ship: bool = True,
    keep_warm: float | str = 0.0,
    run_dir: str | Path | None = None,
    show: Show = "all",
    ssh_config: str | Path | None = None,
) -> Results[T]:
    """Calls a function on every rank of a job and returns its results by rank.

    The function can be in a script, a module, a notebook cell or another function. Scripts need no
    ``if __name__ == "__main__"``. Ranks have torchrun's variables, so that
    ``torch.distributed.init_process_group()`` works; a function need not form a group. A coroutine
    function is run to its end. Output and log records appear here, with host and rank.

    The project around the current folder (its git work tree, or the folder) is sent to the hosts,
    and its modules are imported there. Functions and classes of ``__main__`` and of modules outside
    the project travel in the pickle. Returned tensors are copied to the CPU, large ones as files:
    return a model from one rank only.

    Results are unpickled here, and a pickle can run code: call functions only on hosts that you
    trust with this machine. A hash detects damaged results, not malicious ones.

    Args:
        function: A callable that cloudpickle can pickle.
        args, kwargs: Its arguments, equal on every rank.
        hosts, nproc_per_node, nnodes, env, python, interface, follow_links, wait_for_nodes,
            max_restarts, restart_window, ssh_config: As for :func:`prepare`. The Python on the
            hosts must have the minor version of the running one.
        torch: The function uses torch: hosts without it are refused, and each imports it once. By
            default detected from the function's names and the imported modules.
        ship: Send the project's files to hosts that lack them. Otherwise all modules of the project
            travel in the pickle.
        keep_warm: Seconds, or a text such as ``"10m"``, for which the hosts stay warm after the
            call. See ``paceline warm``.
        run_dir: The run directory. By default a new one below ``runs/``.
        show: The ranks whose output appears on this process's streams.

    Returns:
        A sequence by rank, with ``by_host`` and the run's ``outcome``.

    Raises:
        Exception: The exception of the first rank that failed. Its ``__cause__`` is a
            :class:`RankError` with host, rank and traceback.
        RankError: The first rank that failed raised no exception (a signal, a lost host), or its
            result cannot be unpickled.
        SettingError: The function cannot be pickled; the text names the part.
        PacelineError: The job could not be started.
        KeyboardInterrupt: Ctrl-C, after all ranks have ended.
    """
    options = locals()
    entry = call.entry_of_function(function)
    _check_arguments(args, kwargs)
    settings = _common_fields(options)
    job = Job(
        name=call.function_name(function),
        entry=entry,
        **settings,
        ship=Setting("auto") if ship else Setting("never", Source.ARGUMENT),
    )
    cluster, ssh = _resolve_hosts(hosts, ssh_config)
    remote = any(not host.local for host in cluster.hosts)
    root = project_root(job)
    sent = root if ship and not is_no_project(root) else None
    modules = call.unshipped_modules(sent) if remote else []
    with call.temporary_call_folder(_optional_path(run_dir), job.name) as path:
        file = path / names.CALL
        sha256, pickled = call.write_call(file, function, args, kwargs or {}, modules)
        preload = call.preload_of_call(function, pickled) if torch is not False else ()
        if torch and not preload:
            preload = ("torch",)
        job = replace(job, entry=replace(entry, sha256=sha256), preload=preload,
                      needs_torch=bool(preload))  # fmt: skip
        outcome = run_job(job, cluster, _transport(ssh), _screen(show), run_dir=path,
                          parent=path.parent, inspect=call.require_same_python(inspector(job)),
                          keep_warm_s=_seconds("keep_warm", keep_warm))  # fmt: skip
        if outcome.result.interrupted is None:
            return call.collect_results(outcome)
    if outcome.result.interrupted != signal.SIGINT:
        signal.raise_signal(outcome.result.interrupted)  # as without a handler
    raise KeyboardInterrupt


def _common_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job's fields from the arguments that ``prepare`` and ``launch`` share."""
    fields = {
        "workdir": str(Path.cwd()),
        "python": str(options["python"] or this_machine.default_python()),
        "environment": _environment(options["env"]),
        "nproc_per_node": _process_count(options["nproc_per_node"]),
        "nnodes": _argument(_node_count(options["nnodes"])),
        "hosts": _hosts_setting(options["hosts"]),
        "interface": _argument(options["interface"]),
        "follow_links": options["follow_links"],
    }
    if options["max_restarts"] is not None:
        fields["max_restarts"] = _argument(options["max_restarts"])
    for name in ("wait_for_nodes", "restart_window"):
        if options[name] is not None:
            fields[f"{name}_s"] = _argument(_seconds(name, options[name]))
    return fields


def _check_arguments(args: Any, kwargs: Any) -> None:
    """Raises SettingError if a function cannot be called with these arguments."""
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


def _process_count(value: Processes | None) -> Setting[Any]:
    try:
        return _argument(None if value is None else parse_processes(value))
    except ValueError as error:
        raise SettingError(f"nproc_per_node: {error}") from None


def _resolve_hosts(hosts: Hosts | None,
           ssh_config: str | Path | None) -> tuple[Cluster, SshOptions]:  # fmt: skip
    ssh = SshOptions(_optional_path(ssh_config))
    if isinstance(hosts, Cluster):
        return this_machine.mark_local(hosts), ssh
    source = _host_source(hosts)
    cluster = read_hosts(source, environ=os.environ, cwd=Path.cwd())
    lab = lab_name(source or "")
    if lab is not None and ssh_config is None:
        ssh = SshOptions(find_lab(lab, os.environ).ssh_config)
    cluster = this_machine.mark_local(cluster)
    check_keys(cluster.hosts)
    return cluster, ssh


def _host_source(hosts: str | Sequence[str] | None) -> str | None:
    """Returns the hosts as a value of ``-H``."""
    return hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts)


def _optional_path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _environment(env: Mapping[str, str] | None) -> Environment:
    if reserved := [name for name in env or {} if jobenv.is_reserved(name)]:
        raise SettingError(
            f"env holds {reserved[0]}, which says a rank's place: that is decided here",
            remedy="Leave it out; nnodes and nproc_per_node change the plan",
        )
    return Environment(dict(env or {}))


def _transport(ssh: SshOptions) -> Transport:
    return load(DEFAULT).start(Options(ssh=ssh))


def _hosts_setting(hosts: Hosts | None) -> Setting[str | None]:
    if hosts is None:
        return Setting(None, Source.FOUND, "this machine")
    if isinstance(hosts, Cluster):
        return Setting(None, Source.ARGUMENT, hosts.source)
    return Setting(_host_source(hosts), Source.ARGUMENT)


def _node_count(value: int | str | None) -> NodeCount | None:
    if not isinstance(value, str):
        return value
    try:
        return parse_node_count(value)
    except ValueError as error:
        raise SettingError(f"nnodes: {error}", remedy='nnodes=2, or nnodes="1:3"') from None


def _seconds(name: str, value: float | str) -> float:
    try:
        return parse_duration(value)
    except (ValueError, TypeError):
        raise SettingError(
            f"{name}: {value!r} is not a length of time",
            remedy='A number of seconds, or a text: "90", "10m", "1h30m"',
        ) from None


def _argument(value: Any) -> Setting[Any]:
    """Returns a setting with its source; ``None`` stays undecided."""
    return Setting(None) if value is None else Setting(value, Source.ARGUMENT)
