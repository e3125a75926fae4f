"""What leads back to a run that was left, read from files that anybody may have written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paceline.agent import detach as there
from paceline.spec.detached import DetachedRecord, SupervisorLocation
from paceline.spec.hosts import Host

ABOUT = DetachedRecord(
    run_id="0123456789ab", name="train", command=("paceline", "run", "train.py"),
    hosts=("n1", "n2"), started=1.5e9, launched_by="ada@laptop", launched_in="/home/ada/runs/x",
    supervisor_host="node-1", pid=77, pid_start=12.0, run="/home/ada/.cache/x/run",
)  # fmt: skip
DETACHED = SupervisorLocation(
    "0123456789ab", "n1", "10.0.0.1", "/home/ada/.cache/x", 1.5e9, "ada", 2222,
    "/home/ada/.ssh/key", "/usr/bin/python3", "/home/ada/config",
)  # fmt: skip


def test_both_come_back_from_json_as_they_were() -> None:
    assert DetachedRecord.read(json.loads(json.dumps(ABOUT.to_json()))) == ABOUT
    assert SupervisorLocation.read(json.loads(json.dumps(DETACHED.to_json()))) == DETACHED
    assert DETACHED.to_json()["ssh"] == {
        "config": "/home/ada/config", "identity_file": "/home/ada/.ssh/key"
    }  # fmt: skip
    assert DETACHED.to_host() == Host("n1", "10.0.0.1", user="ada", port=2222,
                                      identity_file="/home/ada/.ssh/key",
                                      python="/usr/bin/python3")  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"run_id": "../../x"}, {"run_id": 7}, {"run_id": None}, {"pid": True}, {"run": 3},
     {"folder": "relative"}, {"host": ["n1"]}],
)  # fmt: skip
def test_what_leads_nowhere_is_nothing(change: dict[str, object]) -> None:
    tables = [
        (DetachedRecord, {**ABOUT.to_json(), **change}),
        (SupervisorLocation, {**DETACHED.to_json(), **change}),
    ]
    (kind, said) = next((kind, said) for kind, said in tables if set(change) <= set(
        ABOUT.to_json() if kind is DetachedRecord else DETACHED.to_json()))  # fmt: skip
    assert kind.read(said) is None


def test_odd_values_of_little_weight_count_as_absent() -> None:
    odd = DetachedRecord.read(
        {**ABOUT.to_json(), "hosts": "n1", "ended": "x", "exit_code": 1.5, "name": 3}
    )
    assert odd is not None
    assert (odd.hosts, odd.ended, odd.exit_code, odd.name) == ((), 0.0, None, "")
    away = SupervisorLocation.read({**DETACHED.to_json(), "ssh": None, "port": "22", "address": ""})
    assert away is not None
    assert (away.ssh_config, away.port, away.address) == (None, None, "n1")


def test_results_wait_on_a_host_for_as_long_as_was_said(tmp_path: Path) -> None:
    """And those of a run that still goes on for ever."""
    day = 86400.0
    ends = {"a1": (8, None), "b2": (6, None), "c3": (8, 30 * day), "d4": (2, day), "e5": (None, 0)}
    for name, (days, keep_s) in ends.items():
        ended = None if days is None else time.time() - days * day
        about = {**ABOUT.to_json(), "ended": ended, "keep_s": keep_s}
        if keep_s is None:
            del about["keep_s"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").write_text(json.dumps(about))

    def left() -> set[str]:
        there.remove_expired(str(tmp_path))
        return {path.name for path in tmp_path.iterdir()}

    assert left() == left() == {*ends}  # the clock may be wrong just now
    for noted in tmp_path.glob("*/expired"):
        os.utime(noted, (time.time() + 900 * day,) * 2)
    assert left() == {*ends}
    for noted in tmp_path.glob("*/expired"):
        assert noted.stat().st_mtime < time.time() + day
        os.utime(noted, (time.time() - 1.1 * day,) * 2)
    assert left() == {"b2", "c3", "e5"}
