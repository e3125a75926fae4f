"""What is imported before a person sees anything: a start that is asked for often, kept light.

Each in an interpreter of its own, which tells what it has imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.completion.shells import VARIABLE

TIMEOUT_S = 120.0
# whoever needs one of them imports it where that is
HEAVY = {
    "torch", "numpy", "rich", "yaml", "psutil", "cloudpickle", "PIL", "safetensors", "zipfile",
    "email", "http.client", "multiprocessing", "unittest", "paceline.report.page",
    "paceline.rendezvous.listener", "paceline.launch.terminal.live",
}  # fmt: skip
# these begin when the hosts are being logged in to
LATER = {"paceline.launch.elastic.attempt", "paceline.launch.elastic.members",
         "paceline.launch.health.hangs", "paceline.launch.elastic.recovery"}  # fmt: skip
OF_A_RUN = {"asyncio", "ssl", "paceline.launch.launcher", "paceline.remote.channel"}

UNTIL_THE_HOSTS = """
import os, sys
from paceline.launch import launcher
from paceline.schedulers import ssh

async def told(*args, **more):
    print("imported", *sys.modules, flush=True)
    os._exit(0)

launcher.READ_DELAY_S = 600.0
ssh.connect_hosts = told
sys.argv = ["paceline", "run", "-p", "1", "job.py"]
from paceline.cli import main
main()
"""
COLLECTING = """
import atexit, gc, sys

def num_collections():
    return gc.get_stats()[0]["collections"]

before = num_collections()
atexit.register(lambda: print("collections", num_collections() - before))
from paceline.__main__ import main
sys.argv = ["paceline", "run", "--help"]
main()
"""
AT_TAB = """
import sys
from paceline.cli import main
main()
print("imported", *sys.modules)
"""


def imported(code: str, cwd: Path, **env: str) -> set[str]:
    """The modules that an interpreter says it has in the end."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env},
                          capture_output=True, text=True, timeout=TIMEOUT_S)  # fmt: skip
    assert "imported " in done.stdout, done.stderr
    return set(done.stdout.rpartition("imported ")[2].split())


def test_a_run_is_light_until_it_talks_to_hosts(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torch\n")
    known = imported(UNTIL_THE_HOSTS, tmp_path)
    assert "paceline.launch.launcher" in known
    assert not known & (HEAVY | LATER)


def test_a_start_hardly_looks_for_garbage(tmp_path: Path) -> None:
    """Python's own threshold makes it look 39 times, which takes a tenth of the CPU time."""
    done = subprocess.run([sys.executable, "-c", COLLECTING], cwd=tmp_path, capture_output=True,
                          text=True, check=True, timeout=TIMEOUT_S)  # fmt: skip
    assert int(done.stdout.rpartition("collections ")[2]) < 20


@pytest.mark.parametrize("line", [
    "run -", "run --hosts ", "train --", "evaluate --", "check --", "forecast --",
    "bench scaling --", "bench collectives --", "warm up --", "status ", "logs ", "explain ",
    "report ", "runs --", "recipe show ", "attach ", "setup --",
])  # fmt: skip
def test_nothing_of_a_run_is_imported_at_tab(tmp_path: Path, line: str) -> None:
    asked = {VARIABLE: "bash_complete", "COMP_LINE": f"paceline {line}"}
    assert not imported(AT_TAB, tmp_path, **asked) & (HEAVY | OF_A_RUN)
