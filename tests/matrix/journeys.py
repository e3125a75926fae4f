"""Defines what users do on every site, as functions that assert what users rely on.

A journey takes a :class:`~sites.Site` and leaves the hosts idle; the last one loses a host.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

from sites import DATA, DEADLINE_S, HOSTS, Command, Site

from background import eventually

RESULT = {rank: f"result of {rank}\n" * 1000 for rank in range(len(HOSTS))}


def login(site: Site) -> None:
    """Checks that logins match the environment; otherwise other journeys would prove nothing."""
    environment = site.environment
    for host in HOSTS:
        account = site.login(host)
        script = 'echo; echo "$(umask) $(taskset -p $$)"; echo "$HOME,$XDG_CACHE_HOME"; pwd; id -un'
        command = site.ssh(host, script)
        limits, places, folder, user = command.out.splitlines()[-4:]
        assert limits.startswith(f"0{environment.umask} ")
        assert limits.endswith("mask: 1") or environment.cpus == "all"
        assert places == f"{account.home},{account.cache or ''}"
        assert (folder, user) == (account.home, account.user)


def check(site: Site) -> None:
    """``check`` finds no fault: it exits with 0 and starts its trial on all hosts."""
    command = site.run("check")
    assert command.status == 0, "check finds fault with hosts on which everything works"


def run_plain(site: Site) -> None:
    """A plain script gets its data; all its output and its results arrive."""
    words = ("--run-dir", "runs/plain", "--no-torch", "--data", str(site.folder / "data"))
    command = site.run("run", *words, "plain.py")
    succeeded(command)
    sizes = sorted(len(text) for text in DATA.values())
    for rank, host in enumerate(HOSTS):
        said = labelled(command, host, rank)
        python = Path(site.lab.plan.host(host).python).parents[1]
        assert said == [f"data {sizes}", f"python {python}", f"rank {rank} of 2", f"wrote {rank}"]
    results_are_home(site, "plain")
    nobody_else_can_write(site)


def detach_and_attach(site: Site) -> None:
    """A detached run continues by itself; ``attach`` shows its end and fetches its results."""
    words = ("--run-dir", "runs/left", "--detach", "--no-torch", "plain.py", "2")
    succeeded(site.run("run", *words))
    attached = site.run("attach", "--lines", "runs/left", hosts=False)
    succeeded(attached)
    results_are_home(site, "left")


def interrupt_resume_and_lose_a_host(site: Site) -> None:
    """Ctrl-C saves and says how to resume; the same command then does the remaining steps.

    With ``--nnodes 1:2``, it continues without a host that loses its power.
    """
    words = (
        "--run-dir",
        "runs/training",
        "--grace",
        "60",
        "--nnodes",
        "1:2",
        "--env",
        "STEP_S=0.1",
    )
    with site.start("run", *words, "training.py", "40") as command:
        command.wait_for("] step 3\n", times=len(HOSTS), patience=DEADLINE_S)
        command.signal(signal.SIGINT)
        command.wait()
    assert command.status == 130, "Ctrl-C did not end the run as Ctrl-C does"
    assert "to resume:" in command.err
    with site.start("run", *words, "training.py", "40") as resumed:
        resumed.wait_for("] step ", times=3 * len(HOSTS), patience=DEADLINE_S)
        site.lab.fault("power-off", "n2")
        resumed.wait()
    succeeded(resumed)
    (saved,) = map(int, re.findall(r"^resumed after step (\d+) ", resumed.out, re.MULTILINE))
    assert saved - max(steps(command, 0)) in (0, 1), "a step that was done is lost"
    left, lost = list(range(saved + 1, 41)), steps(resumed, 1)
    assert steps(resumed, 0) == left, f"after step {saved}"
    assert lost == left[: len(lost)] != [], f"after step {saved}"
    assert "n2" in resumed.err, "nothing says which host was lost"
    assert (site.project / "runs/training/model").is_dir(), "the model is not home"


JOURNEYS: tuple[Callable[[Site], None], ...] = (
    login, check, run_plain, detach_and_attach, interrupt_resume_and_lose_a_host,
)  # fmt: skip


def is_refused(site: Site) -> None:
    """A launch to logins that can run no command is refused at once, and the cause is named."""
    command = site.run("run", "--no-torch", "plain.py")
    assert command.status not in (0, None)
    assert "start-up file" in command.err
    assert "Traceback" not in command.err


# --- helpers of the journeys


def succeeded(command: Command) -> None:
    assert command.status == 0, f"it ended with status {command.status}"


def labelled(command: Command, host: str, rank: int) -> list[str]:
    """Returns a rank's standard output without its label."""
    found = re.findall(rf"^\[{host}/{rank}\] (.*)$", command.out, re.MULTILINE)
    return [str(line) for line in found]


def steps(command: Command, rank: int) -> list[int]:
    found = re.findall(rf"^\[\w+/{rank}\] step (\d+)$", command.out, re.MULTILINE)
    return [int(step) for step in found]


def nobody_else_can_write(site: Site) -> None:
    """Checks that other users cannot change what Paceline keeps on the hosts, whatever the umask.

    Files in a folder that others cannot enter may have any mode.
    """
    for host in HOSTS:
        login = site.login(host)
        cache = f"{login.cache or f'{login.home}/.cache'}/paceline"
        closed = ["-type", "d", "!", "-perm", "/011", "-prune"]
        argv = ["find", cache, *closed, "-o", "!", "-type", "l", "-perm", "/022", "-print"]
        found = site.lab.exec(host, argv, timeout=DEADLINE_S).stdout
        assert not found, f"others can write to these on {host}:\n{found}"


def results_are_home(site: Site, run: str) -> None:
    """Checks that all ranks' results are at the path where they were written, or below the run."""
    for rank, host in enumerate(HOSTS):
        name = f"out-{rank}/result.txt"
        places = (site.project / "runs" / run / "files" / host / name, site.project / name)
        assert eventually(lambda places=places: any(map(Path.exists, places)), DEADLINE_S)  # type: ignore[misc]
        place = next(place for place in places if place.exists())
        assert place.read_text() == RESULT[rank], f"{place} is damaged"
        place.unlink()
