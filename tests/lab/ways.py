"""The same things for every way to start nodes: how each is called, and what has to hold of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, Ended, Site, eventually, project_at

# where tools/system-parts.sh puts what is not a Debian package
PARTS = Path(os.environ.get("PACELINE_TEST_PARTS", "/opt/paceline-test"))
IMAGE_RECIPE = ["image", "--dtype", "float64", "--epochs", "1", "--global-batch", "64"]
PATIENCE_S = 100.0  # for one run on a busy machine; a test has 120


def intel_mpiexec() -> str | None:
    """Intel MPI's hydra, from PyPI's impi-rt."""
    places = [Path(sys.prefix) / "bin", PARTS / "impi" / "bin"]
    found = [p / "mpiexec.hydra" for p in places if (p / "mpiexec.hydra").exists()]
    return str(found[0]) if found else None


def mpiexec(flavour: str) -> str:
    """The mpiexec of an MPI that is installed here; skips the test otherwise."""
    path = {
        "intel": intel_mpiexec(),
        "mpich": shutil.which("mpiexec.hydra", path="/usr/bin"),
        "openmpi": shutil.which("mpiexec.openmpi", path="/usr/bin"),
    }[flavour]
    if path is None:
        missing(f"{flavour} is not installed")
    return str(path)


def missing(why: str) -> None:
    """Skips; where CI runs, a part that is missing is a failure."""
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(f"{why}: tools/system-parts.sh all")


@dataclass
class Way:
    """A way to start two nodes of a lab, typed on its first host.

    Attributes:
        site: The lab and its project folder.
        options: What ``paceline run`` and ``train`` get for it.
        host: Where it is typed.
        prefix: Command before ``paceline`` (``salloc …``).
        env: Further variables.
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
            env={"PYTHONPATH": str(SOURCE), **(self.env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace",
        )  # fmt: skip

    def run(self, *words: str, verb: str = "run") -> Ended:
        """To the end."""
        directory = self.site.fresh()
        with self.popen(verb, directory, *words) as child:
            try:
                out, err = child.communicate(timeout=PATIENCE_S)
            except BaseException:
                child.kill()
                raise
        return Ended(child.returncode, out, err, 0.0, directory)

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """Under way; ended at the end of the ``with``."""
        directory = self.site.fresh()
        with self.popen("run", directory, *words) as child:
            try:
                yield child, directory
            finally:
                if child.poll() is None:
                    child.kill()

    # --- what has to hold, whichever way it is

    def reports_its_place(self) -> None:
        """Ranks in the order of the hosts, nothing of the scheduler's in their environment."""
        ended = self.run("--no-torch", "-p", "2", "tell.py", "a b", "$HOME;x'\"")
        assert ended.code == 0, ended.err
        places = [ended.said(rank)["place"] for rank in range(4)]
        assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
        assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
        words = [bytes.fromhex(word).decode() for word in ended.said(3)["argv"]]
        assert words == ["a b", "$HOME;x'\""]
        assert ended.json("result.json")["exit_code"] == 0
        assert {p.name for p in (ended.directory / "logs").iterdir()} >= {"n1", "n2"}

    def names_a_rank_that_raises(self) -> None:
        ended = self.run("--no-torch", "end.py", "raise", "1")
        assert ended.code == 1, ended.err
        assert "failed first: rank 1 on n2: ValueError: boom on 1" in ended.err
        assert ended.err.count("Traceback") == 1

    def names_a_rank_that_is_killed(self) -> None:
        ended = self.run("--no-torch", "end.py", "kill", "1")
        assert ended.code == 128 + signal.SIGKILL, ended.err
        assert "rank 1 on n2: killed by SIGKILL" in ended.err

    def stops_on(self, signum: int) -> None:
        with self.started("--no-torch", "--grace", "1", "end.py", "ignore") as (child, directory):
            assert self.waits(directory, 2)
            child.send_signal(signum)
            child.send_signal(signum)
            _, err = child.communicate(timeout=20)
        assert child.returncode == 128 + signum, err
        assert "stopped by" in err

    def waits(self, directory: Path, ranks: int) -> bool:
        """Until so many ranks have written that they wait."""
        logs = directory / "logs"
        return eventually(
            lambda: sum("waiting" in p.read_text() for p in logs.glob("*/[0-9]*.log")) >= ranks, 20
        )

    def trains(self, folder: Path) -> dict[str, Any]:
        """The image recipe on 2 × 2; its parameters."""
        words = ["-p", "2", *IMAGE_RECIPE]
        ended = self.run(*words, verb="train")
        assert ended.code == 0, ended.err
        return parameters(ended.directory)


def parameters(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(directory / "model" / "model.safetensors")
    return loaded


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Over all parameters."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def reference(site: Site) -> dict[str, Any]:
    """The image recipe's parameters on the same hosts over SSH; made once a site."""
    known: dict[str, Any] | None = getattr(site, "reference", None)
    if known is None:
        known = Way(site, ("-H", str(site.lab.hostfile))).trains(site.project)
        site.reference = known  # type: ignore[attr-defined]
    return known


def site_in(new_lab: Any, folder: Path, **options: Any) -> Site:
    """A lab of two hosts that see one project folder and the installed parts."""
    project = project_at(folder / "project")
    share = (str(folder), str(PARTS)) if PARTS.is_dir() else (str(folder),)
    return Site(new_lab(**{"hosts": 2, "share": share, **options}), project)
