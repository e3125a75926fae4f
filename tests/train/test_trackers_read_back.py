"""Reads back what real trackers recorded of a run that was resumed: each step once.

A test is skipped if its library (the extra ``trackers``) is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

SCRIPT = """
import sys
from paceline.train.trackers import TRACKERS, Record, RunInfo, TrackerThread
from pathlib import Path
name, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
folder.mkdir(exist_ok=True)
about = RunInfo(folder, "project", "run", config={"lr": 0.1})
def opened(run_id):
    import dataclasses
    return TRACKERS[name](dataclasses.replace(about, run_id=run_id))
def warn(text):
    sys.exit(text) if text else None
guard = TrackerThread(name, opened, folder / "notes.json", print, resumed=first > 1)
for step in range(first, last + 1):
    guard.submit(Record("train", step, {"loss": 1 / step}))
guard.close(60)
"""


def needs(name: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test if a library is not installed."""
    is_missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(is_missing, reason=f"not run: {name} is not installed")


def record_steps(name: str, folder: Path) -> None:
    """Records steps 1 to 5 and, resumed after step 3, steps 4 to 8."""
    extra = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    for first, last in ((1, 5), (4, 8)):
        argv = ["-c", SCRIPT, name, str(folder), str(first), str(last)]
        ended = local_ranks.run_ok(1, argv, folder.parent / f"logs{first}", extra=extra)
        assert "Error" not in ended[0].out + ended[0].err


def query_database(database: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    record_steps("tensorboard", tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


def leveldb_records(content: bytes) -> list[bytes]:
    """Returns the records of a file in LevelDB's log format, after a header of seven bytes."""
    records, parts, offset = [], b"", 7
    while offset + 7 <= len(content):
        remaining = 32768 - offset % 32768
        if remaining < 7:
            offset += remaining
            continue
        size, kind = struct.unpack("<HB", content[offset + 4 : offset + 7])
        parts = (b"" if kind in (1, 2) else parts) + content[offset + 7 : offset + 7 + size]
        if kind in (1, 4):
            records.append(parts)
        offset += 7 + size
    return records


@needs("wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    record_steps("wandb", tmp_path / "run")
    from wandb.proto import wandb_internal_pb2

    steps, ids = [], set()
    for path in sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb")):
        for raw in leveldb_records(path.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(raw)
            if entry.HasField("history"):
                steps.append(entry.history.step.num)
            if entry.HasField("run"):
                ids.add(entry.run.run_id)
    assert steps == list(range(1, 9))
    assert len(ids) == 1


@needs("mlflow")
def test_mlflow_local_files(tmp_path: Path) -> None:
    record_steps("mlflow", tmp_path / "run")
    database = tmp_path / "run/mlflow.db"
    if database.exists():
        steps = [
            row[0] for row in query_database(database, "select step from metrics order by step")
        ]
    else:
        (metric,) = (tmp_path / "run/mlruns").glob("*/*/metrics/train/loss")
        steps = [int(line.split()[2]) for line in metric.read_text().splitlines()]
    assert steps == list(range(1, 9))


@needs("trackio")
def test_trackio(tmp_path: Path) -> None:
    record_steps("trackio", tmp_path / "run")
    (database,) = (tmp_path / "run/trackio").glob("project*.db")
    rows = query_database(database, "select step, metrics from metrics order by step")
    steps = [step for step, values in rows if "train/loss" in json.loads(values)]
    assert steps == list(range(1, 9))
    assert os.environ.get("TRACKIO_DIR") is None
