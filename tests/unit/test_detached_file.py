"""Tests that records of detached runs are authenticated, so that forged ones cause no login."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.runs import detached, sync
from paceline.cli.verbs import runs as runs_verb
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.rundir import detached_file, ownership
from paceline.spec.detached import DETACHED, DetachedRecord, SupervisorLocation
from paceline.spec.errors import SettingError
from paceline.transfer import follow

LOCATION = SupervisorLocation(
    "ab" * 6, "n1", "10.0.0.1", "/x", 5.0, "ada", 22, "/k", "/opt/python", "/c"
)


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write_record(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    detached_file.write(path, LOCATION)
    return path


def modify_record(path: Path, **changed: Any) -> None:
    record = json.loads((path / DETACHED).read_text())
    (path / DETACHED).write_text(json.dumps({**record, **changed}))


def test_sealed_record_stays_authentic_after_move(
    tmp_path: Path,
) -> None:
    path = write_record(tmp_path)
    assert ownership.detached_of(path) == LOCATION
    moved = path.rename(tmp_path / "moved")
    modify_record(moved, home_since=7.0)
    assert detached_file.is_authentic(moved)
    assert this_machine.config_folder().joinpath("seal").stat().st_mode & 0o777 == 0o600


CHANGED: dict[str, Any] = {
    "another ssh configuration": {"ssh": {"config": "/evil", "identity_file": "/k"}},
    "another interpreter": {"python": "/evil"},
    "another host": {"address": "10.0.0.66"},
    "no seal": {detached_file.SEAL: None},
    "a seal of letters": {detached_file.SEAL: "ü\ud800"},
}


@pytest.mark.parametrize("changed", CHANGED)
def test_forged_record_causes_no_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    path = write_record(tmp_path)
    modify_record(path, **CHANGED[changed])

    async def fail_on_connect(*_: object) -> Any:
        raise AssertionError("a host was logged in to")

    monkeypatch.setattr(follow, "connect_hosts", fail_on_connect)
    monkeypatch.setattr(detached, "find_detached", fail_on_connect)
    with pytest.raises(SettingError, match="not written by you") as caught:
        sync.sync_run(path)
    assert caught.value.remedy.endswith(f"paceline attach -H HOST {LOCATION.run_id}")
    query = asyncio.run(runs_verb._query_hosts([], SshOptions(), [path]))
    assert [host for host, _ in query.unreachable] == ["n1"]


def test_rejects_foreign_readable_or_linked_key(tmp_path: Path) -> None:
    path, key = write_record(tmp_path), this_machine.config_folder() / "seal"
    key_bytes = key.read_bytes()
    key.write_bytes(os.urandom(32))
    assert not detached_file.is_authentic(path)
    key.write_bytes(key_bytes)
    key.chmod(0o644)  # other users may have read it
    assert not detached_file.is_authentic(path)
    with pytest.raises(SettingError, match="readable by others"):
        detached_file.ensure_key()
    key.rename(key.with_name("real"))
    key.symlink_to("real")
    assert not detached_file.is_authentic(path)


def test_host_named_by_user_renews_seal(tmp_path: Path) -> None:
    path = write_record(tmp_path)
    modify_record(path, python="/evil")
    detached_record = DetachedRecord(
        LOCATION.run_id, "job", (), (), 5.0, "me@here", "/x", "n1", 2, 3.0, "/x/run"
    )
    location = replace(LOCATION, python="python3")
    assert detached.local_folder(detached_record, location, path.parent) == path
    assert detached_file.is_authentic(path)
    assert ownership.detached_of(path) == location
