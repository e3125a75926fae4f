"""Tests W&B's real client with a server that speaks its protocol, and with unresponsive ones.

Without the library (the extra ``trackers``), the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks
from wandb_server import WandbServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="not run: wandb is not installed"
)

SCRIPT = """
import dataclasses, os, sys, time
from pathlib import Path
from paceline.train.trackers import TRACKERS, Record, RunInfo, TrackerThread
folder, first, last, patience = Path(sys.argv[1]), *map(int, sys.argv[2:])
folder.mkdir(exist_ok=True)
about = RunInfo(folder, "project", "run", config={"lr": 0.1})
def opened(run_id):
    return TRACKERS["wandb"](dataclasses.replace(about, run_id=run_id))
guard = TrackerThread("wandb", opened, folder / "notes.json", print, resumed=first > 1)
began = time.monotonic()
for step in range(first, last + 1):
    guard.submit(Record("train", step, {"loss": 1 / step}))
print(f"trained in {time.monotonic() - began:.3f} s")
guard.close(patience)
print(f"closed after {time.monotonic() - began:.3f} s", flush=True)
os._exit(0)  # as interpreter_exit.py ends a rank: a thread left behind may abort Python's teardown
"""


def run_tracked(url: str, folder: Path, *steps: int, timeout_s: int = 60, **extra_env: str) -> str:
    """Records these steps; returns the output."""
    extra = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "online"}
    args = ["-c", SCRIPT, str(folder), *map(str, (*steps, timeout_s))]
    logs = folder.parent / f"logs{steps[0]}"
    # wandb removes it at an ordinary end; its other process may still use it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temp_dir:
        extra = {**extra, "TMPDIR": temp_dir, **extra_env}
        (ended,) = local_ranks.run_ok(1, args, logs, extra=extra)
    return ended.out


def test_wandb_online(tmp_path: Path) -> None:
    """Records steps 1 to 5 and, resumed after step 3, steps 4 to 8: one run, each step once."""
    with WandbServer() as server:
        for steps in ((1, 5), (4, 8)):
            output = run_tracked(server.url, tmp_path / "run", *steps)
            assert "Error" not in output
    (run,) = server.runs.values()
    records = run.records()
    assert [record["_step"] for record in records] == list(range(1, 9))
    assert [record["train/loss"] for record in records] == [1 / step for step in range(1, 9)]
    assert run.config["lr"] == 0.1
    assert run.summary()["train/loss"] == 1 / 8
    assert run.ended == [0, 0]


def test_wandb_with_a_dead_server(tmp_path: Path) -> None:
    """The run is kept offline under the same id, and a message says so."""
    url = f"http://127.0.0.1:{local_ranks.free_port()}"
    output = run_tracked(url, tmp_path / "run", 1, 5, WANDB_INIT_TIMEOUT="1")
    assert re.search(r"wandb: no server \(.*kept offline, to be sent by: wandb sync /", output)
    assert list((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_with_a_slow_server(tmp_path: Path) -> None:
    """Neither the steps nor the end of the process wait for the server."""
    with WandbServer(slow_s=60) as server:
        output = run_tracked(server.url, tmp_path / "run", 1, 5, timeout_s=1)
    seconds = re.search(r"trained in ([\d.]+) s", output)
    assert seconds is not None
    assert float(seconds[1]) < 50  # minutes, if each step waited for it
    assert "wandb did not finish within 1 s: left behind" in output
