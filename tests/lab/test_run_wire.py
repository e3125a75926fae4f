"""Lines that die in the middle of a file, and nodes that lie."""

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

MANY = 60 << 20  # bytes, so that there is time to cut a line that was made slow

WRITES = f"""
import os, random
if os.environ["RANK"] == "0":
    block = random.Random(1).randbytes(1 << 20)
    with open("big.bin", "wb") as file:
        for _ in range({MANY} >> 20):
            file.write(block)
"""

# an interpreter whose agent says something else than it should
LIAR = """#!{python}
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

LIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "a log of ours": ("event", "output", {"rank": "../../../stolen"}),
    "another rank": ("event", "output", {"rank": 0}),
    "its loss": ("event", "output", {"event": "lost", "stderr": "n1 is to blame"}),
    "the folder of a run": ("shared", False, {"shared": True, "folder": "/etc"}),
    "files elsewhere": ("event", "node ended", {"time": "x"}),
}


@pytest.fixture(scope="module")
def apart(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The hosts do not see the project."""
    folder = tmp_path_factory.mktemp("wire")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    yield site
    assert site.leftovers() == ""


def test_a_killed_connection_leaves_no_half_file(apart: Site) -> None:
    (apart.project / "writes.py").write_text(WRITES)
    apart.lab.fault("slow", "n1", "100mbit")
    with apart.start("--no-torch", "writes.py") as launch:
        incoming = launch.directory / ".paceline-incoming"

        def begun() -> bool:
            with contextlib.suppress(FileNotFoundError):  # smaller ones are soon in their place
                return any(part.stat().st_size > 1 << 20 for part in incoming.glob("*"))
            return False

        assert eventually(begun), launch.err
        apart.lab.fault("kill", "n1", "sshd: .*notty")
        apart.lab.heal()
        ended = launch.end()
    whole = apart.project / "big.bin"
    assert not whole.exists() or whole.stat().st_size == MANY
    assert not incoming.exists()
    assert "Traceback" not in ended.err
    assert "n1" in ended.err

    again = apart.run("--no-torch", "writes.py")
    assert again.code == 0, again.err
    came = (apart.project / "big.bin").read_bytes()
    assert len(came) == MANY
    assert len({hashlib.sha256(came[at : at + (1 << 20)]).digest()
                for at in range(0, MANY, 1 << 20)}) == 1  # fmt: skip
    assert again.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_node_fails_itself(apart: Site, lie: str) -> None:
    path = f"{apart.lab.home_inside()}/python-{time.monotonic_ns()}"
    for name, told in (("n1", ("no such", None, {})), ("n2", LIES[lie])):
        script = apart.lab.home(name) / Path(path).name
        script.write_text(LIAR.format(python=sys.executable, told=told))
        script.chmod(0o755)
    ended = apart.run("--no-torch", "--python", path, "tell.py")
    assert ended.code != 0
    assert "n2 sent what no agent" in ended.err, ended.err
    assert "Traceback" not in ended.err
    assert list(ended.directory.parent.rglob("stolen*")) == []
    assert not (ended.directory / "logs" / "n2" / "0.log").exists()


def is_empty(folder: Path) -> bool:
    return not list(folder.glob("*"))


def test_run_folders_that_stayed_empty_are_removed(apart: Site) -> None:
    assert apart.run("--no-torch", "tell.py").code == 0
    for name in apart.lab.names:  # also after the runs that ended badly
        runs = apart.lab.home(name) / ".cache/paceline/runs"
        assert eventually(functools.partial(is_empty, runs)), list(runs.glob("*"))
