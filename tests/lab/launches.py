"""Runs ``paceline run`` for the lab's tests, and inspects what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from background import TIMEOUT_S, BackgroundCommand, eventually
from paceline.lab import Lab

JOBS = Path(__file__).with_name("jobs")
SOURCE = Path(__file__).resolve().parents[2] / "src"
TEST_LIMIT_S = 150.0
# environment of commands that are typed on a host; tests of reports are elsewhere (conftest.py)
OURS = {"PYTHONPATH": str(SOURCE), "PACELINE_OPT_REPORT": "no"}


@dataclass(frozen=True)
class Ended:
    """The result of a finished launch."""

    code: int
    out: str
    err: str
    directory: Path

    def lines(self, rank: int) -> list[str]:
        """Returns a rank's standard output as it was shown, without the label."""
        mark = f"/{rank}] "
        return [line.split(mark, 1)[1] for line in self.out.splitlines() if mark in line]

    def said(self, rank: int) -> Any:
        """Returns the only JSON object that a rank printed."""
        (line,) = [line for line in self.lines(rank) if line.startswith("{")]
        return json.loads(line)

    def json(self, name: str) -> Any:
        return json.loads((self.directory / name).read_text())

    def events(self, kind: str) -> list[Any]:
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def paceline(*words: str, cwd: Path | None = None, timeout: float = 200.0,
             text: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs ``paceline WORDS`` on this machine to its end; ``text`` is its standard input."""
    argv = [sys.executable, "-m", "paceline", *words]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **env}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, input=text,
                          timeout=timeout, check=False)  # fmt: skip


def on(lab: Lab) -> tuple[str, ...]:
    """Returns the options that name a lab's hosts."""
    return ("-H", str(lab.hostfile), "--ssh-config", str(lab.ssh_config))


def trust_settings(folder: Path) -> None:
    """Runs ``paceline trust`` in a folder."""
    paceline("trust", cwd=folder).check_returncode()


# Prefix of a command: drops root's capabilities, as ordinary users have none. Root's files stay
# readable, because a checkout may be in root's home.
WITHOUT_CAPABILITIES = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")


def drop_capabilities(lab: Lab, *hosts: str) -> None:
    """Makes logins to hosts start without capabilities."""
    if os.geteuid() != 0:
        return  # ordinary users have none
    for host in hosts:
        folder = lab.layout.etc(host)
        passwd, login_shell = folder / "passwd", folder / "login-shell"
        account, *others = passwd.read_text().splitlines()
        before_shell, _, shell = account.rpartition(":")
        login_shell.write_text(f'#!/bin/sh\nexec {" ".join(WITHOUT_CAPABILITIES)} {shell} "$@"\n')
        login_shell.chmod(0o755)
        # written in place, because this file is mounted
        passwd.write_text("\n".join([f"{before_shell}:{login_shell}", *others]) + "\n")


@dataclass
class Site:
    """A lab and a project folder with the jobs, seen by all its hosts or by the launcher only."""

    lab: Lab
    project: Path
    runs: int = 0

    def argv(self, *words: str, hosts: str | None = None, inside: str | None = None,
             verb: str = "run") -> list[str]:  # fmt: skip
        """Returns a command line; ``inside`` names the host that it will run on."""
        source = ["-H", hosts or str(self.lab.hostfile)]
        config = [] if inside else ["--ssh-config", str(self.lab.ssh_config)]
        return [sys.executable, "-m", "paceline", verb, *source, *config, *words]

    def fresh(self) -> Path:
        """Returns an unused run directory."""
        self.runs += 1
        return self.project.parent / "runs" / str(self.runs)

    def run(self, *words: str | bytes, hosts: str | None = None, inside: str | None = None,
            env: Mapping[str, str | bytes] | None = None, timeout: float = TEST_LIMIT_S,
            cwd: Path | None = None) -> Ended:  # fmt: skip
        """Runs ``paceline run -H … WORDS`` to its end."""
        directory = self.fresh()
        options = ["--run-dir", str(directory)]
        argv = [*self.argv(*options, hosts=hosts, inside=inside), *words]
        with self._popen(argv, inside, env, cwd) as child:
            try:
                out, err = child.communicate(timeout=timeout)
            except BaseException:
                child.kill()
                raise
        text = (out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape"))
        return Ended(child.returncode, *text, directory)

    def _popen(self, argv: Sequence[str | bytes], inside: str | None,
               env: Mapping[str, str | bytes] | None,
               cwd: Path | None) -> subprocess.Popen[bytes]:  # fmt: skip
        mine: dict[str, Any] = {**OURS, **(env or {})}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                                 "stderr": subprocess.PIPE}  # fmt: skip
        folder = cwd or self.project
        if inside:
            return self.lab.popen(inside, argv, env=mine, cwd=folder, **pipes)  # type: ignore[arg-type]
        return subprocess.Popen(argv, env={**os.environ, **mine}, cwd=folder, **pipes)

    def start(self, *words: str, **how: Any) -> Launch:
        """Starts a launch and returns immediately; use the result as a context manager."""
        directory = self.fresh()
        return Launch(self, self.argv("--run-dir", str(directory), *words, **how), directory)

    def processes(self) -> dict[str, list[str]]:
        """Returns the command lines of all processes by host; empty for hosts that are off."""
        activity = self.lab.activity()
        return {name: [line for _, line in running] for name, (running, _) in activity.items()}

    def pid(self, host: str, pattern: str) -> int:
        """Waits for the only process of a host whose command line matches; returns its id."""
        found: list[int] = []

        def is_there() -> bool:
            lines = self.lab.processes(host)
            found[:] = [pid for pid, line in lines if re.search(pattern, line)]
            return len(found) == 1

        assert eventually(is_there), (pattern, found)
        return found[0]

    def have_capabilities(self, *hosts: str) -> bool:
        """Returns whether the rank of any of these hosts has a capability."""
        pids = [self.pid(host, r"\[rank") for host in hosts]
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return not all(re.search(r"^CapEff:\s*0+$", text, re.MULTILINE) for text in texts)

    def clean(self, but: Sequence[str] = ()) -> bool:
        """Returns whether no process and no listener is left on any host that is up."""
        activity = self.lab.activity()
        return not any(any(activity[name]) for name in activity if name not in but)

    def leftovers(self, patience: float = TIMEOUT_S, but: Sequence[str] = ()) -> str:
        """Waits for processes and listeners to end; describes those that are left ("" if none)."""
        if eventually(lambda: self.clean(but), patience):
            return ""
        return f"{self.lab.activity()}"


class Launch(BackgroundCommand):
    """A running launch."""

    def __init__(self, site: Site, argv: list[str], directory: Path) -> None:
        self.directory = directory
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        popen = partial(subprocess.Popen, argv, env=env, cwd=site.project, start_new_session=True)
        super().__init__(directory, popen)

    def end(self, patience: float = TIMEOUT_S) -> Ended:
        """Waits for the launch to end."""
        self.process.wait(patience)
        return Ended(self.process.returncode, self.out, self.err, self.directory)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def project_at(folder: Path) -> Path:
    """Copies the jobs to a new project folder."""
    return Path(shutil.copytree(JOBS, folder, ignore=shutil.ignore_patterns("__pycache__")))


def healed(site: Site) -> Iterator[Site]:
    """Heals the lab after a test and checks that nothing is left running; for fixtures."""
    yield site
    site.lab.heal()
    assert site.leftovers() == ""


def shared_site(new_lab: Any, folder: Path, *more: Path, **options: Any) -> Site:
    """Returns a lab whose hosts all see the project below ``folder``, and further folders."""
    project = project_at(folder / "project")
    return Site(new_lab(share=(str(project), *map(str, more)), **options), project)
