"""Tests the lock of a data folder that other users may read."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from paceline.train.data import disk_lock
from paceline.train.data.disk_lock import exclusive_lock


def test_reports_wait_for_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk_lock, "NOTE_AFTER_S", 0.0)
    path = tmp_path / "lock"
    holder = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    release = threading.Timer(0.5, os.close, [holder])
    release.start()
    with exclusive_lock(path) as is_held:
        assert is_held
    release.join()
    assert f"waiting for another process, which holds the lock {path}" in capsys.readouterr().err


def test_symlinked_lock_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError), exclusive_lock(tmp_path / "lock"):
        pass
    assert not (tmp_path / "other").exists()
