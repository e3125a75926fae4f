"""What ``run`` and ``train`` check before the start, and explain after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.cli.verb import say
from paceline.cli.via import Via
from paceline.launch import decide
from paceline.launch.prepare import Inspect
from paceline.remote.openssh import SshOptions
from paceline.rundir.ownership import read_owner
from paceline.rundir.redactor import Redactor
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import Result
from paceline.spec.finding import Finding
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job
from paceline.spec.terminal import for_reader

# of the warnings, these matter to a job of ours; the others are for `paceline check`
TOLD = {"limits", "disk", "torch"}
EXPLAIN_S = 4.0  # for the explanation after a failure; `paceline explain` takes its time


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


def preflight(ctx: click.Context, job: Job, cluster: Cluster, via: Via) -> None:
    """With ``--check full``, all of ``paceline check`` first. NodeError when something fails."""
    if ctx.params["check_level"] != "full" or via.name not in ("ssh", "local"):
        return
    from paceline.checks.examine import examine, judge

    hosts = decide.choose_hosts(job, cluster)
    ssh = SshOptions(ctx.params["ssh_config"], ctx.params["accept_new_host_keys"])
    scene = asyncio.run(examine(hosts, ssh, wishes_of(job, hosts), "full"))
    found = judge(scene, "full")
    refuse(found)
    for finding in found:
        if finding.outcome == "warn":
            say(for_reader(f"paceline: warning: {finding.message}", sys.stderr), err=True)


def wishes_of(job: Job, hosts: Sequence[Host]) -> Any:
    """What the checks need to know of the job."""
    from paceline.checks.check import Wishes

    return Wishes(
        pythons={host.name: decide.python_of(job, host) for host in hosts},
        workdirs={host.name: host.workdir or job.workdir for host in hosts},
        needs_torch=job.needs_torch,
        interface=job.interface.value,
        master_port=job.master_port.value,
    )


def refuse(found: Sequence[Finding]) -> None:
    """NodeError for what would fail."""
    failed = [finding for finding in found if finding.outcome == "fail"]
    if failed:
        raise NodeError(
            f"the checks found what would fail: {failed[0].message}",
            found="\n".join(finding.message for finding in failed[1:]),
            remedy="\n".join(dict.fromkeys(finding.remedy for finding in failed)),
        )


def inspector(ctx: click.Context, job: Job, run_dir: Path | None = None) -> Inspect | None:
    """The quick part: judges what the login brought, writes findings.json, asks nobody.

    Args:
        ctx: The verb's context, with the common options.
        job: What is to run.
        run_dir: Of the run; ``None`` for a plan, which has none.
    """
    if ctx.params["check_level"] == "none":
        return None

    def inspect(hosts: Sequence[Host], facts: Mapping[str, Any],
                noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        from paceline.checks.check import Scene
        from paceline.checks.examine import judge

        wishes = wishes_of(job, hosts)
        scene = Scene(tuple(hosts), {}, facts, dict(wishes.pythons), noise, wishes)
        found = judge(scene, "facts")
        if run_dir is not None:
            _write(run_dir, found)
        refuse(found)
        return [f.message for f in found if f.outcome == "warn" and f.check in TOLD]

    return inspect


def _write(run_dir: Path, found: Sequence[Finding]) -> None:
    text = json.dumps({"findings": [finding.to_json() for finding in found]}, indent=2)
    with contextlib.suppress(OSError):  # a full disk is told where the run itself meets it
        (run_dir / names.FINDINGS).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def explained(run_dir: Path, secrets: Sequence[str]) -> Iterator[None]:
    """Writes down why a job could not be started; the error itself is shown by others."""
    try:
        yield
    except PacelineError as error:
        if read_owner(run_dir) is None:  # else it is in use by another run
            told = Redactor(secrets).text(error.render())
            explain_run(run_dir, Result(error.exit_code, error=told), (), shown=False)
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


def tell_libraries(run_dir: Path) -> None:
    """Shows what the libraries' debugging says that matters, and where all of it is."""
    from paceline.explain.gather import debug_logs
    from paceline.explain.libraries import summary
    from paceline.rundir.directory import short

    with contextlib.suppress(PacelineError, OSError, ValueError):
        lines = summary(debug_logs(run_dir, ())) or ["nothing"]
        folder = short(run_dir / names.DEBUG)
        text = "\n".join([f"paceline: the libraries said ({folder}/HOST/RANK.log):",
                          *(f"  {line}" for line in lines)])  # fmt: skip
        say(for_reader(text, sys.stderr), err=True)
