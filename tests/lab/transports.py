"""Defines the transports under test, and helpers that their tests share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from launches import OURS, TEST_LIMIT_S, TIMEOUT_S, Ended, Site, eventually, project_at

# where tools/system-parts.sh installs what is not a Debian package
PARTS = Path(os.environ.get("PACELINE_TEST_PARTS", "/opt/paceline-test"))
IMAGE_RECIPE = ["image", "--dtype", "float64", "--epochs", "1", "--global-batch", "64"]


def intel_mpiexec() -> str | None:
    """Returns the path of Intel MPI's hydra, from PyPI's impi-rt."""
    places = [Path(sys.prefix) / "bin", PARTS / "impi" / "bin"]
    found = [p / "mpiexec.hydra" for p in places if (p / "mpiexec.hydra").exists()]
    return str(found[0]) if found else None


def mpiexec(flavour: str) -> str:
    """Returns the path of an MPI's mpiexec; skips the test if that MPI is not installed."""
    path = {
        "intel": intel_mpiexec(),
        "mpich": shutil.which("mpiexec.hydra", path="/usr/bin"),
        "openmpi": shutil.which("mpiexec.openmpi", path="/usr/bin"),
    }[flavour]
    if path is None:
        missing(f"{flavour} is not installed")
    return str(path)


def missing(why: str) -> None:
    """Skips the test because a part is missing; in CI, the test fails."""
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(f"{why}: tools/system-parts.sh all")


def fetched(script: Path) -> Path:
    """Returns a published third-party script; skips the test if it could not be fetched."""
    if not script.exists():
        pytest.skip(f"not run: {script} could not be fetched (tools/system-parts.sh all)")
    return script


@dataclass
class Transport:
    """A way to start two nodes of a lab, typed on its first host.

    Attributes:
        site: The lab and its project folder.
        options: Options of ``paceline run`` and ``train`` that select the transport.
        host: Host on which commands are typed.
        prefix: Command before ``paceline`` (``salloc …``).
        env: Further environment variables.
    """

    site: Site
    options: tuple[str, ...]
    host: str = "n1"
    prefix: tuple[str, ...] = ()
    env: dict[str, str] | None = None

    def argv(self, verb: str, directory: Path, *words: str) -> list[str]:
        paceline = [sys.executable, "-m", "paceline", verb, "--run-dir", str(directory)]
        return [*self.prefix, *paceline, *self.options, *words]

    def popen(self, verb: str, directory: Path, *words: str) -> subprocess.Popen[str]:
        return self.site.lab.popen(
            self.host, self.argv(verb, directory, *words), cwd=self.site.project,
            env={**OURS, **(self.env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace",
        )  # fmt: skip

    def run(self, *words: str, verb: str = "run") -> Ended:
        """Runs a command to its end."""
        directory = self.site.fresh()
        with self.popen(verb, directory, *words) as child:
            try:
                out, err = child.communicate(timeout=TEST_LIMIT_S)
            except BaseException:
                child.kill()
                raise
        return Ended(child.returncode, out, err, directory)

    @contextlib.contextmanager
    def started(self, *words: str,
                verb: str = "run") -> Iterator[tuple[subprocess.Popen[str], Path]]:  # fmt: skip
        """Starts a command; kills it at the end of the ``with`` block."""
        directory = self.site.fresh()
        with self.popen(verb, directory, *words) as child:
            try:
                yield child, directory
            finally:
                if child.poll() is None:
                    child.kill()

    def verb(self, *words: str) -> str:
        """Runs ``paceline WORDS`` in another terminal of the same host; returns its output."""
        env = {**OURS, **(self.env or {})}
        argv = [sys.executable, "-m", "paceline", *words]
        done = self.site.lab.exec(
            self.host, argv, env=env, timeout=TIMEOUT_S, check=True, cwd=self.site.project
        )
        return done.stdout

    def waits(self, directory: Path, ranks: int) -> bool:
        """Waits until this many ranks have printed that they wait."""
        return eventually(lambda: said_in_logs(directory, "waiting") >= ranks)

    def trains(self, *words: str) -> Ended:
        """Trains the image recipe on 2 × 2 ranks."""
        ended = self.run("-p", "2", *IMAGE_RECIPE, *words, verb="train")
        assert ended.code == 0, ended.err
        return ended


class ByHand(Transport):
    """Types the same command on the second host, too; results are those of the first host."""

    def _second(self) -> Transport:
        return Transport(self.site, self.options, host="n2", env=self.env)

    def run(self, *words: str, verb: str = "run") -> Ended:
        with self._second().started(*words, verb=verb) as (second, _):
            ended = super().run(*words, verb=verb)
            assert (second.wait(TIMEOUT_S) == 0) == (ended.code == 0)
        return ended

    @contextlib.contextmanager
    def started(self, *words: str,
                verb: str = "run") -> Iterator[tuple[subprocess.Popen[str], Path]]:  # fmt: skip
        with self._second().started(*words, verb=verb) as (second, _):
            with super().started(*words, verb=verb) as first:
                yield first
            assert second.wait(TIMEOUT_S) != 0


def said_in_logs(directory: Path, word: str) -> int:
    """Returns how many ranks have printed a word."""
    return sum(word in p.read_text() for p in (directory / "logs").glob("*/[0-9]*.log"))


def parameters(directory: Path) -> dict[str, Any]:
    """Returns the parameters that a run has trained."""
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(directory / "model" / "model.safetensors")
    return loaded


def largest_difference(one: Path, other: Path) -> float:
    """Returns the largest difference of any parameter between two runs."""
    mine, others = parameters(one), parameters(other)
    assert mine.keys() == others.keys()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


def contents(directory: Path) -> set[str]:
    """Returns the paths of all files in a run directory."""
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


def reference(site: Site) -> Path:
    """Returns the run directory of the image recipe, trained over SSH.

    One pytest worker makes it for all, in any lab: all labs use the same host names.
    """
    session = site.project.parents[2 if "PYTEST_XDIST_WORKER" in os.environ else 1]
    made = session / "reference"
    with (session / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_symlink():
            made.symlink_to(Transport(site, ("-H", "n1,n2")).trains().directory)
    return made.resolve()


def site_in(new_lab: Any, folder: Path, **options: Any) -> Site:
    """Returns a lab of two hosts that see one project folder and the installed parts."""
    project = project_at(folder / "project")
    share = (str(folder), str(PARTS)) if PARTS.is_dir() else (str(folder),)
    return Site(new_lab(**{"hosts": 2, "share": share, **options}), project)


def check_secret_is_unseen(transport: Transport) -> None:
    """Checks that a forwarded secret does not appear on the network."""
    secret = "T0p-secret-0123456789-of-mine"
    transport = replace(transport, env={**(transport.env or {}), "T_SECRET": secret})
    with sniffed(transport.site) as seen:
        done = transport.run("--env", "T_SECRET", "--no-torch", "-p", "1", "tell.py")
    assert done.code == 0, done.err
    assert len(seen) > 10_000
    assert secret.encode() not in seen


@contextlib.contextmanager
def sniffed(site: Site) -> Iterator[bytearray]:
    """Captures all frames that the second host sends and receives, with a packet socket there."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))\n"
        "sys.stdout.buffer.write(b'!'); sys.stdout.buffer.flush()\n"
        "while True: sys.stdout.buffer.write(s.recv(65535)); sys.stdout.buffer.flush()\n"
    )
    pipe = subprocess.PIPE
    seen = bytearray()
    argv = [sys.executable, "-c", code]
    with site.lab.popen("n2", argv, stdout=pipe, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.read(1) == b"!"
            yield seen
            time.sleep(0.3)
        finally:
            child.kill()
        seen += child.stdout.read()
