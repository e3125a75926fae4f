"""Tests connections that break in the middle of a file, and nodes that send false messages."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Site, eventually, project_at

pytestmark = pytest.mark.lab

MANY = 60 << 20  # bytes; takes long enough on a slow link to break the connection

WRITES = f"""
import os, random
if os.environ["RANK"] == "0":
    block = random.Random(1).randbytes(1 << 20)
    with open("big.bin", "wb") as file:
        for _ in range({MANY} >> 20):
            file.write(block)
"""

# an interpreter whose agent changes one of its messages
FORGING_PYTHON = """#!{python}
import json, os, sys
if "-c" not in sys.argv:
    os.execv({python!r}, [{python!r}] + sys.argv[1:])
real, told = json.dumps, {told!r}
def dumps(message, **more):
    if isinstance(message, dict) and message.get(told[0]) == told[1]:
        message = dict(message, **told[2])
    return real(message, **more)
json.dumps = dumps
sys.argv = ["-c", sys.argv[-1]]
sys.stdin.buffer.raw.readline()  # the guard's line
exec(sys.stdin.buffer.raw.readline())
"""

FORGED_MESSAGES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a log of ours": ("event", "output", {"rank": "../../../stolen"}),
    "another rank": ("event", "output", {"rank": 0}),
    "its loss": ("event", "output", {"event": "lost", "stderr": "n1 is to blame"}),
    "the folder of a run": ("shared", False, {"shared": True, "folder": "/etc"}),
    "files elsewhere": ("event", "node ended", {"time": "x"}),
}


@pytest.fixture(scope="module")
def isolated_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("wire")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    yield site
    assert site.leftovers() == ""


def test_killed_connection_writes_no_partial_file(isolated_site: Site) -> None:
    (isolated_site.project / "writes.py").write_text(WRITES)
    isolated_site.lab.fault("slow", "n1", "100mbit")
    with isolated_site.start("--no-torch", "writes.py") as launch:
        incoming = launch.directory / ".paceline-incoming"

        def is_partially_received() -> bool:
            with contextlib.suppress(FileNotFoundError):  # moved to its final path already
                return any(part.stat().st_size > 1 << 20 for part in incoming.glob("*"))
            return False

        assert eventually(is_partially_received), launch.err
        isolated_site.lab.fault("kill", "n1", "sshd: .*notty")
        isolated_site.lab.heal()
        ended = launch.end()
    target = isolated_site.project / "big.bin"
    assert not target.exists() or target.stat().st_size == MANY
    assert not incoming.exists()
    assert "Traceback" not in ended.err
    assert "n1" in ended.err

    rerun = isolated_site.run("--no-torch", "writes.py")
    assert rerun.code == 0, rerun.err
    received = (isolated_site.project / "big.bin").read_bytes()
    assert len(received) == MANY
    assert len({hashlib.sha256(received[at : at + (1 << 20)]).digest()
                for at in range(0, MANY, 1 << 20)}) == 1  # fmt: skip
    assert rerun.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("forgery", FORGED_MESSAGES)
def test_forged_agent_message_fails_sending_node(isolated_site: Site, forgery: str) -> None:
    path = f"{isolated_site.lab.home_inside()}/python-{time.monotonic_ns()}"
    for name, forged in (("n1", ("no such", None, {})), ("n2", FORGED_MESSAGES[forgery])):
        script = isolated_site.lab.home(name) / Path(path).name
        script.write_text(FORGING_PYTHON.format(python=sys.executable, told=forged))
        script.chmod(0o755)
    ended = isolated_site.run("--no-torch", "--python", path, "tell.py")
    assert ended.code != 0
    assert "n2 sent what no agent" in ended.err, ended.err
    assert "Traceback" not in ended.err
    assert list(ended.directory.parent.rglob("stolen*")) == []
    assert not (ended.directory / "logs" / "n2" / "0.log").exists()


def is_empty(folder: Path) -> bool:
    return not list(folder.glob("*"))


def test_removes_empty_run_folders(isolated_site: Site) -> None:
    assert isolated_site.run("--no-torch", "tell.py").code == 0
    for name in isolated_site.lab.names:  # also after the runs that failed
        runs = isolated_site.lab.home(name) / ".cache/paceline/runs"
        assert eventually(functools.partial(is_empty, runs)), list(runs.glob("*"))
