"""Tests the files that lead back to a detached run, which may come from anyone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paceline.agent import detach as there
from paceline.spec.detached import DetachedRecord, SupervisorLocation
from paceline.spec.hosts import Host

RECORD = DetachedRecord(
    run_id="0123456789ab", name="train", command=("paceline", "run", "train.py"),
    hosts=("n1", "n2"), started=1.5e9, launched_by="ada@laptop", launched_in="/home/ada/runs/x",
    supervisor_host="node-1", pid=77, pid_start=12.0, run="/home/ada/.cache/x/run",
)  # fmt: skip
LOCATION = SupervisorLocation(
    "0123456789ab", "n1", "10.0.0.1", "/home/ada/.cache/x", 1.5e9, "ada", 2222,
    "/home/ada/.ssh/key", "/usr/bin/python3", "/home/ada/config",
)  # fmt: skip


def test_records_round_trip_through_json() -> None:
    assert DetachedRecord.read(json.loads(json.dumps(RECORD.to_json()))) == RECORD
    assert SupervisorLocation.read(json.loads(json.dumps(LOCATION.to_json()))) == LOCATION
    assert LOCATION.to_json()["ssh"] == {
        "config": "/home/ada/config", "identity_file": "/home/ada/.ssh/key"
    }  # fmt: skip
    assert LOCATION.to_host() == Host("n1", "10.0.0.1", user="ada", port=2222,
                                      identity_file="/home/ada/.ssh/key",
                                      python="/usr/bin/python3")  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"run_id": "../../x"}, {"run_id": 7}, {"run_id": None}, {"pid": True}, {"run": 3},
     {"folder": "relative"}, {"host": ["n1"]}],
)  # fmt: skip
def test_invalid_required_fields_read_as_none(change: dict[str, object]) -> None:
    tables = [
        (DetachedRecord, {**RECORD.to_json(), **change}),
        (SupervisorLocation, {**LOCATION.to_json(), **change}),
    ]
    (kind, fields) = next((kind, fields) for kind, fields in tables if set(change) <= set(
        RECORD.to_json() if kind is DetachedRecord else LOCATION.to_json()))  # fmt: skip
    assert kind.read(fields) is None


def test_invalid_optional_fields_read_as_absent() -> None:
    record = DetachedRecord.read(
        {**RECORD.to_json(), "hosts": "n1", "ended": "x", "exit_code": 1.5, "name": 3}
    )
    assert record is not None
    assert (record.hosts, record.ended, record.exit_code, record.name) == ((), 0.0, None, "")
    location = SupervisorLocation.read(
        {**LOCATION.to_json(), "ssh": None, "port": "22", "address": ""}
    )
    assert location is not None
    assert (location.ssh_config, location.port, location.address) == (None, None, "n1")


def test_results_are_removed_after_keep_time(tmp_path: Path) -> None:
    """Results of a run that has not ended are kept without limit."""
    day = 86400.0
    ends = {"a1": (8, None), "b2": (6, None), "c3": (8, 30 * day), "d4": (2, day), "e5": (None, 0)}
    for name, (days, keep_s) in ends.items():
        ended = None if days is None else time.time() - days * day
        stored_record = {**RECORD.to_json(), "ended": ended, "keep_s": keep_s}
        if keep_s is None:
            del stored_record["keep_s"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").write_text(json.dumps(stored_record))

    def remaining_runs() -> set[str]:
        there.remove_expired(str(tmp_path))
        return {path.name for path in tmp_path.iterdir()}

    assert (
        remaining_runs() == remaining_runs() == {*ends}
    )  # not yet removed: the clock may be wrong
    for marker in tmp_path.glob("*/expired"):
        os.utime(marker, (time.time() + 900 * day,) * 2)
    assert remaining_runs() == {*ends}
    for marker in tmp_path.glob("*/expired"):
        assert marker.stat().st_mtime < time.time() + day
        os.utime(marker, (time.time() - 1.1 * day,) * 2)
    assert remaining_runs() == {"b2", "c3", "e5"}
