"""Whose word it is that a run goes on somewhere: nobody is logged in to by a stranger's."""

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

BACK = SupervisorLocation(
    "ab" * 6, "n1", "10.0.0.1", "/x", 5.0, "ada", 22, "/k", "/opt/python", "/c"
)


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def written(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    detached_file.write(path, BACK)
    return path


def change(path: Path, **changed: Any) -> None:
    record = json.loads((path / DETACHED).read_text())
    (path / DETACHED).write_text(json.dumps({**record, **changed}))


def test_what_was_written_here_is_believed_also_in_another_place_and_when_it_is_home(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    assert ownership.detached_of(path) == BACK
    moved = path.rename(tmp_path / "moved")
    change(moved, home_since=7.0)
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
def test_nobody_is_logged_in_to_by_what_somebody_else_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    path = written(tmp_path)
    change(path, **CHANGED[changed])

    async def dialled(*_: object) -> Any:
        raise AssertionError("a host was logged in to")

    monkeypatch.setattr(follow, "connect_hosts", dialled)
    monkeypatch.setattr(detached, "find_detached", dialled)
    with pytest.raises(SettingError, match="not written by you") as caught:
        sync.sync_run(path)
    assert caught.value.remedy.endswith(f"paceline attach -H HOST {BACK.run_id}")
    found = asyncio.run(runs_verb._query_hosts([], SshOptions(), [path]))
    assert [host for host, _ in found.unreachable] == ["n1"]


def test_another_users_key_or_a_planted_one_seals_nothing(tmp_path: Path) -> None:
    path, key = written(tmp_path), this_machine.config_folder() / "seal"
    mine = key.read_bytes()
    key.write_bytes(os.urandom(32))
    assert not detached_file.is_authentic(path)
    key.write_bytes(mine)
    key.chmod(0o644)  # others may have read it
    assert not detached_file.is_authentic(path)
    with pytest.raises(SettingError, match="readable by others"):
        detached_file.ensure_key()
    key.rename(key.with_name("real"))
    key.symlink_to("real")
    assert not detached_file.is_authentic(path)


def test_a_host_that_the_user_names_makes_it_the_users_own(tmp_path: Path) -> None:
    path = written(tmp_path)
    change(path, python="/evil")
    about = DetachedRecord(BACK.run_id, "job", (), (), 5.0, "me@here", "/x", "n1", 2, 3.0, "/x/run")
    named = replace(BACK, python="python3")
    assert detached.local_folder(about, named, path.parent) == path
    assert detached_file.is_authentic(path)
    assert ownership.detached_of(path) == named
