"""The real client of W&B with a server that speaks its protocol, and with none that answers.

Without the library (the extra ``trackers``) they count as not run.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks
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


def tracked(url: str, folder: Path, *steps: int, patience: int = 60, **more: str) -> str:
    """What is said while these steps are recorded."""
    extra = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "online"}
    words = ["-c", SCRIPT, str(folder), *map(str, (*steps, patience))]
    logs = folder.parent / f"logs{steps[0]}"
    # What wandb would remove at an ordinary end; its other process may still be there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as leaves:
        extra = {**extra, "TMPDIR": leaves, **more}
        (ended,) = ranks.run_ok(1, words, logs, extra=extra)
    return ended.out


def test_wandb_online(tmp_path: Path) -> None:
    """Steps 1 to 5; then, resumed after step 3, steps 4 to 8: one run, every step once."""
    with WandbServer() as server:
        for steps in ((1, 5), (4, 8)):
            said = tracked(server.url, tmp_path / "run", *steps)
            assert "Error" not in said
    (run,) = server.runs.values()
    records = run.records()
    assert [one["_step"] for one in records] == list(range(1, 9))
    assert [one["train/loss"] for one in records] == [1 / step for step in range(1, 9)]
    assert run.config["lr"] == 0.1
    assert run.summary()["train/loss"] == 1 / 8
    assert run.ended == [0, 0]


def test_wandb_with_a_dead_server(tmp_path: Path) -> None:
    """It is kept for later, under the same id, and said."""
    url = f"http://127.0.0.1:{ranks.free_port()}"
    said = tracked(url, tmp_path / "run", 1, 5, WANDB_INIT_TIMEOUT="1")
    assert re.search(r"wandb: no server \(.*kept offline, to be sent by: wandb sync /", said)
    assert list((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_with_a_slow_server(tmp_path: Path) -> None:
    """Nobody waits for it: not the steps, and not the end of the process."""
    with WandbServer(slow_s=60) as server:
        said = tracked(server.url, tmp_path / "run", 1, 5, patience=1)
    seconds = re.search(r"trained in ([\d.]+) s", said)
    assert seconds is not None
    assert float(seconds[1]) < 50  # where each step waits for it: minutes
    assert "wandb did not finish within 1 s: left behind" in said
