"""A host of the lab: its first process, from the fork to the reaping of its last orphan."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.lab import kernel, mounts, network, processes, texts
from paceline.lab.available import missing
from paceline.lab.layout import Layout
from paceline.lab.options import HostPlan, LabPlan

_NAMESPACES = (
    kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
)
_SSHD_DEADLINE = 20.0


@dataclass
class Starting:
    """A host on its way up: its namespaces exist, its network is not plugged in yet.

    Attributes:
        pid: Its first process, as the switch numbers it.
        go: Written to when the network is plugged in.
        report: Where the host says that it is up, or why not.
    """

    pid: int
    go: int
    report: int


Commands = Sequence[Sequence[str]]


def start(plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands) -> Starting:
    """Forks a host. The caller plugs it in, then calls :func:`let_go` and :func:`finish`.

    Args:
        commands: What is to be run on the host when its network is up.
    """
    go_read, go = os.pipe()
    report, report_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        begin = partial(_first_process, plan, layout, host, commands, go_read, report_write)
        _guarded(lambda: _fork_first(begin, report_write), report_write)
    os.close(go_read)
    os.close(report_write)
    os.waitpid(middle, 0)
    first = _read_line(report)
    return Starting(int(first["pid"]) if "pid" in first else _failed(first), go, report)


def let_go(starting: Starting) -> None:
    """Tells the host that its network is plugged in."""
    os.write(starting.go, b"1")
    os.close(starting.go)


def finish(starting: Starting) -> int | None:
    """Waits until the host is up.

    Returns:
        The process id of its sshd on the host, None without one.
    """
    answer = _read_line(starting.report)
    os.close(starting.report)
    if "error" in answer:
        _failed(answer)
    sshd: int | None = answer["sshd"]
    return sshd


def raise_its_own(starting: Starting) -> None:
    """Raises what a host that has ended says; others then fail to plug in what is not there."""
    if select.select([starting.report], [], [], 0)[0]:
        finish(starting)


def _failed(answer: dict[str, Any]) -> NoReturn:
    raise OSError(answer["error"])


def _read_line(fd: int) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(fd, 1)
        if not more:
            return {"error": "the host ended while starting"}
        data += more
    answer: dict[str, Any] = json.loads(data)
    return answer


def _guarded(work: Callable[[], None], report: int) -> NoReturn:
    """Runs ``work`` in a forked child, which never returns into the parent's code."""
    try:
        work()
    except BaseException as error:
        _say(report, {"error": str(error)})
        os._exit(1)
    os._exit(0)


def _say(fd: int, message: dict[str, Any]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def _fork_first(begin: Callable[[], None], report: int) -> None:
    kernel.unshare(_NAMESPACES)  # a PID namespace begins with the next child
    first = os.fork()
    if first:
        _say(report, {"pid": first})
    else:
        _guarded(begin, report)


def _first_process(
    plan: LabPlan, layout: Layout, host: HostPlan, commands: Commands, go: int, report: int
) -> None:
    _close_all_but(go, report)
    _forget_signals()
    os.setsid()
    kernel.set_host_name(host.name)
    mounts.apply(mounts.host_mounts(plan, layout, host))
    os.chdir("/")
    if not os.read(go, 1):
        os._exit(1)
    _bring_up_network(plan, host)
    for argv in commands:
        run(list(argv))
    _say(report, {"sshd": _start_sshd(layout, host) if host.sshd else None})
    os.close(go)
    os.close(report)
    _reap_for_ever()


def _close_all_but(*kept: int) -> None:
    for number in [int(entry.name) for entry in os.scandir("/proc/self/fd")]:
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(number)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _bring_up_network(plan: LabPlan, host: HostPlan) -> None:
    batch(network.host_batch(plan, host))
    # Without root, sshd may not otherwise listen on 22.
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")


def _start_sshd(layout: Layout, host: HostPlan) -> int:
    config, log = str(layout.sshd_config(host.name)), str(layout.sshd_log(host.name))
    sshd = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-f", config, "-E", log],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": texts.USUAL_PATH},
        preexec_fn=kernel.drop_capabilities_on_exec,
        start_new_session=True,
    )
    _wait_for_port_22(sshd, log)
    pid = sshd.pid
    sshd.returncode = 0  # from here on the first process reaps it like any other
    return pid


def _wait_for_port_22(sshd: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + _SSHD_DEADLINE
    while not any(at.endswith(":22") for at in processes.listeners(os.getpid())):
        if sshd.poll() is not None or time.monotonic() > deadline:
            said = Path(log).read_text().strip() if Path(log).exists() else "nothing"
            raise OSError(f"sshd does not start; it says: {said}")
        time.sleep(0.003)


def _reap_for_ever() -> NoReturn:
    """What a first process is for. Without children it sleeps until there is one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def batch(lines: list[str], tool: str = "ip") -> None:
    """Runs ``ip`` (or ``tc``) over all lines at once; raises OSError with what it says."""
    if lines:
        run([tool, "-batch", "-"], "\n".join(lines) + "\n")


def run(argv: list[str], text: str = "", enter: Callable[[], None] | None = None) -> str:
    """Runs a system tool and returns its output; raises OSError with what it says on failure."""
    try:
        done = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": texts.USUAL_PATH},
            preexec_fn=enter,
            check=False,
        )
    except FileNotFoundError:
        raise missing(argv[0]) from None
    if done.returncode:
        raise OSError(f"{' '.join(argv)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
