"""Tests which modules are imported before the first output, so that commands start fast.

Each test uses a new interpreter, which prints the imported modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.completion.shells import VARIABLE

TIMEOUT_S = 120.0
# imported only by functions that need them
HEAVY_MODULES = {
    "torch", "numpy", "rich", "yaml", "psutil", "cloudpickle", "PIL", "safetensors", "zipfile",
    "email", "http.client", "multiprocessing", "unittest", "paceline.report.page",
    "paceline.rendezvous.listener", "paceline.launch.terminal.live",
}  # fmt: skip
# imported while the hosts are being logged in to
DEFERRED_MODULES = {"paceline.launch.elastic.attempt", "paceline.launch.elastic.members",
         "paceline.launch.health.hangs", "paceline.launch.elastic.recovery"}  # fmt: skip
UNUSED_BY_SCRIPTS = {"paceline.explain.evidence", "paceline.recipes"}  # until one fails
LAUNCH_MODULES = {"asyncio", "ssl", "paceline.launch.launcher", "paceline.remote.channel"}

IMPORTS_BEFORE_CONNECT = """
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
COLLECTIONS = """
import atexit, gc, sys

def num_collections():
    return gc.get_stats()[0]["collections"]

before = num_collections()
atexit.register(lambda: print("collections", num_collections() - before))
from paceline.__main__ import main
sys.argv = ["paceline", "run", "--help"]
main()
"""
IMPORTS_AT_COMPLETION = """
import sys
from paceline.cli import main
main()
print("imported", *sys.modules)
"""


def imported_modules(code: str, cwd: Path, **env: str) -> set[str]:
    """Returns the modules that an interpreter has imported at its end."""
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env},
                          capture_output=True, text=True, timeout=TIMEOUT_S)  # fmt: skip
    assert "imported " in result.stdout, result.stderr
    return set(result.stdout.rpartition("imported ")[2].split())


def test_run_defers_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torch\n")
    modules = imported_modules(IMPORTS_BEFORE_CONNECT, tmp_path)
    assert "paceline.launch.launcher" in modules
    assert not modules & (HEAVY_MODULES | DEFERRED_MODULES | UNUSED_BY_SCRIPTS)


def test_start_runs_few_garbage_collections(tmp_path: Path) -> None:
    """Python's default threshold causes 39 collections, which take a tenth of the CPU time."""
    result = subprocess.run([sys.executable, "-c", COLLECTIONS], cwd=tmp_path, capture_output=True,
                          text=True, check=True, timeout=TIMEOUT_S)  # fmt: skip
    assert int(result.stdout.rpartition("collections ")[2]) < 20


@pytest.mark.parametrize("line", [
    "run -", "run --hosts ", "train --", "evaluate --", "check --", "forecast --",
    "bench scaling --", "bench collectives --", "warm up --", "status ", "logs ", "explain ",
    "report ", "runs --", "recipe show ", "attach ", "setup --",
])  # fmt: skip
def test_completion_imports_no_launch_modules(tmp_path: Path, line: str) -> None:
    environment = {VARIABLE: "bash_complete", "COMP_LINE": f"paceline {line}"}
    assert not imported_modules(IMPORTS_AT_COMPLETION, tmp_path, **environment) & (
        HEAVY_MODULES | LAUNCH_MODULES
    )
