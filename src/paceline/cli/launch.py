"""What ``run`` and ``train`` share: options, hosts, the launcher's call, and what failed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli import trust
from paceline.cli.applies import refuse_ignored, settle_nodes
from paceline.cli.flags import LAUNCH, with_settings
from paceline.cli.sources import TABLES_ARE_HOSTS, parse_env, refuse_ours, setting, toml_of
from paceline.cli.torchrun import torchrun_options
from paceline.cli.verb import say
from paceline.cli.via import VIA_OPTIONS, Via, hosts_source, manner_of, ssh_of, submit, via_of
from paceline.schedulers import current_scheduler
from paceline.spec.command import shell_text
from paceline.spec.errors import PacelineError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import HERE, Failure, Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job
from paceline.spec.rundir import DEBUG, DEFAULT_PARENT, FORECAST, PLAN, REPORT
from paceline.spec.settings import TOML_NAME, Setting, Source
from paceline.spec.terminal import for_reader, wrapped

if TYPE_CHECKING:
    from paceline.launch.launcher import Left
    from paceline.launch.prepare import Inspect, Package
    from paceline.launch.screen import Screen
    from paceline.launch.summary import RunOutcome
    from paceline.remote.transport import Transport

F = TypeVar("F", bound=Callable[..., Any])
REPORT_S = 3.0  # for the page; usually it takes a tenth
EXPLAIN_S = 4.0  # for the explanation after a failure; `paceline explain` takes its time


def launch_options(command: F) -> F:
    """Adds the common options to a verb."""
    return torchrun_options(with_settings(command, [*LAUNCH, *VIA_OPTIONS]))


def read_cluster(ctx: click.Context, source: str | None) -> Cluster:
    """The hosts, with what paceline.toml says of them; this machine is marked.

    Args:
        ctx: The verb's context, with its settings.
        source: Where the hosts are described: ``hosts`` of the settings, or what stands for it.
    """
    from paceline.hosts import apply_overrides, read_hosts
    from paceline.hosts.lab import lab_name
    from paceline.remote.this_machine import mark_me

    cwd, toml = Path.cwd(), toml_of(ctx)
    cluster = mark_me(apply_overrides(read_hosts(source, environ=os.environ, cwd=cwd), toml))
    if any(host.python or host.env for host in cluster.hosts) and lab_name(source or "") is None:
        from_file = setting(ctx, "hosts").source is Source.FILE
        trust.require_hosts(cwd / TOML_NAME, toml, described=from_file)
    return cluster


def chosen_hosts(ctx: click.Context) -> Cluster:
    """The hosts that the settings name, and where they were named, said on standard error."""
    cluster = read_cluster(ctx, ctx.params["hosts"])
    say_hosts(ctx, cluster)
    return cluster


def say_hosts(ctx: click.Context, cluster: Cluster) -> None:
    """Names hosts that were not typed with the command, and where they come from."""
    source = setting(ctx, "hosts").source
    if source is not Source.COMMAND_LINE and not all(host.local for host in cluster.hosts):
        say(f"paceline: hosts: {named(cluster)} ({origin(ctx, cluster)})", err=True)


def described_by(ctx: click.Context) -> Setting[str | None]:
    """The setting that names the hosts, in the words of a plan."""
    found = setting(ctx, "hosts")
    if found.value is None:
        where = "--rdzv" if ctx.params["rdzv"] else ""
        chosen = where or ("the allocation" if current_scheduler(os.environ) else "this machine")
        return Setting(None, Source.FOUND, chosen)
    where = {Source.COMMAND_LINE: f"-H {found.value}"}.get(found.source, found.detail)
    tables = found.value == TABLES_ARE_HOSTS
    return Setting(found.value, found.source, f"[hosts] of {where}" if tables else where)


def named(cluster: Cluster, most: int = 6) -> str:
    """The hosts' names, the middle of a long list left out."""
    names = [host.name for host in cluster.hosts]
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, … {names[-1]}: {len(names)} hosts"


def origin(ctx: click.Context, cluster: Cluster) -> str:
    """Where the hosts come from: which setting, and what that names unless it lists them."""
    found = setting(ctx, "hosts")
    if found.value is None or found.source is Source.DEFAULT:
        return cluster.source
    where = found.detail or found.source.label
    if found.value == TABLES_ARE_HOSTS:
        return f"[hosts] of {where}"
    listed = "," in found.value or len(cluster.hosts) == 1
    return where if listed else f"{where}: {found.value}"


def job_of(ctx: click.Context, entry: Entry, name: str, **more: Any) -> Job:
    """The job that the options describe.

    Args:
        ctx: The verb's context, with the common options.
        entry: What every rank runs.
        name: The run's name unless the user gave one.
        more: Fields of the job that only this verb sets.
    """
    from paceline.remote import this_machine

    if ctx.params["notify"]:
        from paceline.launch import notify

        notify.check(ctx.params["notify"])
    public, forwarded = parse_env(ctx.params["env"])
    for hidden in ctx.params["unset"]:
        refuse_ours("--unset", hidden)
    environment = Environment(public, forwarded, ctx.params["unset"], setting(ctx, "env").source)
    return Job(
        name=ctx.params["name"] or name,
        entry=entry,
        workdir=str(Path.cwd()),
        python=ctx.params["python"] or this_machine.default_python(image=ctx.params["image"]),
        environment=environment,
        activate=activation_of(ctx),
        nproc_per_node=setting(ctx, "nproc_per_node"),
        nnodes=setting(ctx, "nnodes"),
        wait_for_nodes_s=setting(ctx, "wait_for_nodes"),
        hosts=described_by(ctx),
        interface=setting(ctx, "iface"),
        master_port=setting(ctx, "master_port"),
        backend=ctx.params["backend"],
        ship=setting(ctx, "ship"),
        follow_links=ctx.params["follow_links"],
        bind=setting(ctx, "bind"),
        debug=setting(ctx, "debug"),
        lease_s=setting(ctx, "lease"),
        grace_s=setting(ctx, "grace"),
        hang_timeout_s=setting(ctx, "hang_timeout"),
        max_restarts=setting(ctx, "max_restarts"),
        restart_window_s=setting(ctx, "restart_window"),
        notify=ctx.params["notify"],
        report=ctx.params["report"],
        typed=typed(environment),
        **more,
    )


def typed(environment: Environment) -> str:
    """The command as it was typed, for who wants to repeat it; without secrets."""
    from paceline.rundir.directory import Redactor

    return Redactor(environment.secrets()).text(shell_text(["paceline", *sys.argv[1:]]))


def activation_of(ctx: click.Context) -> Setting[tuple[str, ...]]:
    """The scripts by paths that mean the same on every host; ``~`` is each host's own."""
    given = setting(ctx, "activate")
    for one in given.value:
        if not one or not one.replace("\t", " ").isprintable():
            raise SettingError(f"--activate {one!r} is no file", remedy="--activate FILE")
    paths = tuple(one if one.startswith("~") else str(Path.cwd() / one) for one in given.value)
    return Setting(paths, given.source, given.detail)


def prepare(ctx: click.Context) -> tuple[Cluster, Via]:
    """Reads the hosts and how they are started."""
    manner = manner_of(ctx.params, os.environ)
    refuse_ignored(ctx, manner, os.environ)
    settle_nodes(ctx, manner)
    via = via_of(ctx.params)
    if not via.scheduler.accepts_hosts:
        return unknown_nodes(ctx.params["nnodes"]), via
    if via.kind != "run":
        return read_cluster(ctx, None), via
    cluster = read_cluster(ctx, hosts_source(ctx.params, os.environ))
    say_hosts(ctx, cluster)
    return cluster, via


def unknown_nodes(nodes: int) -> Cluster:
    """Places for nodes that are not known before they come."""
    return Cluster(tuple(Host(f"node{place}") for place in range(nodes)), "--rdzv")


def launch(
    ctx: click.Context,
    job: Job,
    cluster: Cluster,
    via: Via,
    package: bool = False,
    parent: Path = Path(DEFAULT_PARENT),
    after: Callable[[Path], None] | None = None,
) -> int:
    """Runs the job, or prints its plan; returns the exit status.

    Args:
        ctx: The verb's context, with the common options.
        job, cluster, via: What, where, and how the nodes are started.
        package: Ship this installation's ``paceline`` to the nodes.
        parent: Folder of run directories when the user named none.
        after: Called with the run directory once the job has ended well.
    """
    from paceline.rundir.directory import claimed, fresh_path

    if via.kind == "submit":
        directory = ctx.params["run_dir"] or fresh_path(parent, job.name)
        return submit(ctx, job, directory, via.scheduler)
    if via.kind == "join":
        from paceline.launch.entry import entry_argv
        from paceline.rendezvous.typed import serve

        assert via.endpoint is not None
        return serve(via.endpoint, entry_argv(job.entry, "python"), job.python)
    assert via.transport is not None
    if ctx.params.get("fastest"):
        from paceline.cli.forecast import fastest_of

        cluster, why = fastest_of(job, cluster, ctx.params["run_dir"] or parent / job.name)
        say(wrapped(f"paceline: {why}", 80), err=True)
    via.agree_on(job)
    plan_only = ctx.params["plan_only"]
    run_dir = None
    if not plan_only:
        run_dir = ctx.params["run_dir"] or ctx.with_resource(claimed(parent, job.name))
    inspect = inspection(ctx, job, cluster, via, run_dir)
    if run_dir is None:
        as_json, verbose = ctx.params["as_json"], ctx.params["verbose"]
        return show_plan(job, cluster, via.transport, as_json=as_json, verbose=verbose,
                         package=package, inspect=inspect)  # fmt: skip
    if ctx.params["detach"] or ctx.params["keep"]:
        from paceline.cli.leave import leave_run

        return leave_run(ctx, job, cluster, via.transport, package, run_dir)
    from paceline.launch.screen import Screen

    screen = Screen(ctx.params["show"], look=ctx.params["screen"])
    return carry_out(job, cluster, via.transport, screen, run_dir=run_dir, parent=parent,
                     package=package, inspect=inspect, after=after,
                     keep_warm_s=ctx.params["keep_warm"],
                     is_fresh=ctx.params["run_dir"] is None)  # fmt: skip


def carry_out(
    job: Job,
    cluster: Cluster,
    transport: Transport,
    screen: Screen,
    *,
    run_dir: Path,
    parent: Path,
    package: Package,
    inspect: Inspect | None,
    after: Callable[[Path], None] | None = None,
    keep_warm_s: float = 0.0,
    left: Left | None = None,
    is_fresh: bool = False,
) -> int:
    """Runs a job and says how it ended; its exit status.

    Args:
        job, cluster, transport, screen, run_dir, parent, package, inspect, keep_warm_s, left: As
            ``run_job`` takes them.
        after: Called with the run directory once the job has ended well.
        is_fresh: Nobody named the run directory: it goes again if there is not even a plan.
    """
    from paceline.launch.launcher import run_job, secrets_of
    from paceline.schedulers.submission import submitting_arguments

    secrets = secrets_of(job, cluster)
    with told(job, run_dir.absolute(), secrets, screen) as end:
        with refusals_recorded(job, run_dir, secrets, is_fresh=is_fresh):
            outcome = run_job(job, cluster, transport, screen, run_dir=run_dir, parent=parent,
                              package=package, inspect=inspect, keep_warm_s=keep_warm_s,
                              left=left)  # fmt: skip
        outcome = replace(outcome, command=submitting_arguments(outcome.path, os.environ))
        end.append(outcome)
        show_end(job, outcome, after)
    return outcome.result.exit_code


@contextlib.contextmanager
def told(job: Job, run_dir: Path, secrets: Sequence[str],
         screen: Screen) -> Iterator[list[RunOutcome]]:  # fmt: skip
    """Tells those of a job who are to know how it ended, when all of its files are there.

    Its outcome is put into the list; without one it was not started, for the error that comes.
    """
    from paceline.launch import notify

    began = time.monotonic()
    end: list[RunOutcome] = []
    for warning in notify.doubts(job.notify):
        screen.note(warning)
    ended: notify.Ended | None = None
    try:
        yield end
    except Exception as error:
        headline = f"an error of ours: {error!r}"
        result = Result(1, Failure("launcher", HERE, None, headline=headline))
        if isinstance(error, PacelineError):
            result = Result(error.exit_code, error=error.render())
        ended = notify.Ended(run_dir, job.name, result, time.monotonic() - began, secrets=secrets)
        raise
    finally:
        for one in end:
            ended = notify.Ended(run_dir, job.name, one.result, one.seconds, one.metrics,
                                 one.resumable, secrets)  # fmt: skip
        if ended is not None:
            notify.tell(job.notify, ended, screen.note)
            screen.close()


def show_end(job: Job, outcome: RunOutcome, after: Callable[[Path], None] | None) -> None:
    """Says how a job ended, and why, and writes the page about it."""
    from paceline.launch.summary import report_failure, report_success

    if job.debug.value:
        tell_libraries(outcome.path)
    if text := report_failure(outcome):
        say(text, err=True)
        shown = outcome.result.failure is not None
        explain_run(outcome.path, outcome.result, outcome.events, shown)
    elif after is not None:
        after(outcome.shown)
    else:
        say(report_success(outcome), err=True)
    if not text and forecasts_near(outcome.path)[1]:
        from paceline.cli.forecast import after_run

        if beside := after_run(outcome.path):
            say(beside, err=True)
    report_run(job, outcome.path)


FORECASTS = "forecast-"  # begins the names of folders of forecasts


def forecasts_near(run: Path) -> tuple[list[Path], list[Path]]:
    """Folders in which forecasts may lie that were made before a run, and those that do."""
    folders = sorted({run.absolute().parent, Path(DEFAULT_PARENT).absolute()})
    name = f"{FORECASTS}*/{FORECAST}"
    return folders, [path for folder in folders for path in folder.glob(name)]


def inspection(ctx: click.Context, job: Job, cluster: Cluster, via: Via,
               run_dir: Path | None) -> Inspect | None:  # fmt: skip
    """What --check asks for: everything now, before a run; and a look at the nodes once they came.

    Args:
        ctx: The verb's context, with the common options.
        job, cluster, via: What, where, and how the nodes are started.
        run_dir: Of the run; ``None`` for a plan, which has none.
    """
    level = ctx.params["check_level"]
    if level == "none":
        return None
    from paceline.checks.preflight import inspector, preflight

    links: Sequence[dict[str, Any]] = ()
    if level == "full" and run_dir is not None and via.scheduler.is_direct:
        warnings, links = preflight(job, cluster, ssh_of(ctx.params))
        for warning in warnings:
            say(for_reader(f"paceline: warning: {warning}", sys.stderr), err=True)
    return inspector(job, run_dir, links)


def show_plan(job: Job, cluster: Cluster, transport: Transport, *, as_json: bool,
              verbose: bool, package: bool, inspect: Inspect | None) -> int:  # fmt: skip
    """Prints the plan that a run would execute."""
    from paceline.launch.launcher import plan_job
    from paceline.launch.view import describe, everything

    plan = plan_job(job, cluster, transport, package, inspect)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2))
    else:
        more = "\nAll variables and the command of every rank: --plan -v, or --plan --json"
        say(everything(plan) if verbose else f"{describe(plan)}{more}")
    return 0


# --- after a failure


@contextlib.contextmanager
def refusals_recorded(job: Job, run_dir: Path, secrets: Sequence[str], *,
                      is_fresh: bool) -> Iterator[None]:  # fmt: skip
    """Writes down why a job could not be started, with a page; the error is shown by others."""
    from paceline.rundir.directory import Redactor
    from paceline.rundir.ownership import read_owner

    try:
        yield
    except PacelineError as error:
        if read_owner(run_dir) is not None:  # it is in use by another run
            raise
        if is_fresh and not (run_dir / PLAN).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # other runs are in it
                run_dir.parent.rmdir()
        else:
            text = Redactor(secrets).text(error.render())
            explain_run(run_dir, Result(error.exit_code, error=text), (), shown=False)
            report_run(job, run_dir)
        raise


def explain_run(run_dir: Path, result: Result, events: tuple[Event, ...],
                shown: bool) -> None:  # fmt: skip
    """The conclusion after a failed run: into findings.json, and shown.

    A problem in here must not hide how the run ended, nor keep the user waiting for it.
    """
    from paceline.rundir.directory import short

    with contextlib.suppress(PacelineError, OSError, ValueError):
        try:
            with at_most(EXPLAIN_S):
                from paceline.cli.explain import after_failure

                text = after_failure(run_dir, result, events)
        except TimeoutError:
            text = f"paceline: to look for the cause: paceline explain {short(run_dir)}"
        if shown and text:
            say(for_reader(text, sys.stderr), err=True)


def report_run(job: Job, run_dir: Path) -> None:
    """Writes the page of a run that is over; a problem in here costs a warning."""
    from paceline.rundir.directory import short
    from paceline.rundir.ownership import read_owner

    if not job.report or not run_dir.is_dir() or read_owner(run_dir) is not None:
        return
    try:
        with at_most(REPORT_S):
            from paceline.report.writer import write_at_end

            warning = write_at_end(run_dir)
    except TimeoutError as error:
        warning = f"the report was given up: {error}"
    text = f"warning: {warning}" if warning else f"report {short(run_dir / REPORT)}"
    say(for_reader(f"paceline: {text}", sys.stderr), err=True)


def tell_libraries(run_dir: Path) -> None:
    """Shows what the libraries' debugging says that matters, and where all of it is."""
    from paceline.explain.evidence_reader import debug_logs
    from paceline.explain.libraries import summarize
    from paceline.rundir.directory import short

    with contextlib.suppress(PacelineError, OSError, ValueError):
        lines = summarize(debug_logs(run_dir, ())) or ["nothing"]
        folder = short(run_dir / DEBUG)
        text = "\n".join([f"paceline: the libraries said ({folder}/HOST/RANK.log):",
                          *(f"  {line}" for line in lines)])  # fmt: skip
        say(for_reader(text, sys.stderr), err=True)


class Enough(KeyboardInterrupt):
    """Ctrl-C, as a class of its own.

    Once a plain KeyboardInterrupt has passed through ``exec`` or ``eval``, as it can in anything
    that makes a data class, Python dies of SIGINT at the end, whatever status it is given.
    """


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in what takes longer, Enough at Ctrl-C.

    By a signal, which reaches into regular expressions, too: a thread would go on beside us and,
    inside such an expression, keep the interpreter to itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    def interrupted(*_: object) -> None:
        raise Enough

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, interrupted)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
