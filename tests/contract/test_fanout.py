"""Tests many child processes of the launcher, their cost, and hosts that cannot run agents."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from paceline.remote.fanout import connect_hosts, use_pidfd_watcher
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import ConnectError
from paceline.spec.hosts import Host

CHILDREN = 20


async def _children() -> tuple[int, list[int]]:
    """Returns the number of threads while children run, and their exit statuses."""
    use_pidfd_watcher()
    argv = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
    pipe = asyncio.subprocess.PIPE
    children = [await asyncio.create_subprocess_exec(*argv, stdin=pipe) for _ in range(CHILDREN)]
    use_pidfd_watcher()  # called again for later hosts: earlier children are still watched
    threads = threading.active_count()
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    return threads, [await child.wait() for child in children]


def test_child_processes_need_no_threads() -> None:
    baseline = threading.active_count()
    for _ in range(2):  # also in a second event loop of the same process
        threads, statuses = asyncio.run(_children())
        assert threads <= baseline + 1
        assert statuses == [7] * CHILDREN


def test_rejects_host_without_linux(tmp_path: Path) -> None:
    python = tmp_path / "python"  # called as: python -I -c CODE NAME
    python.write_text(
        "#!/bin/sh\n"
        f'exec {sys.executable} "$1" "$2" "import sys; sys.platform = \'darwin\'; $3" "$4"\n'
    )
    python.chmod(0o755)
    with pytest.raises(ConnectError) as caught:
        asyncio.run(connect_hosts([Host("n1", local=True)], [str(python)], SshOptions()))
    assert "not Linux: n1: this is darwin" in caught.value.found
    assert "-H n1,n2" in caught.value.remedy


def test_reports_host_without_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -f 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConnectError) as caught:
        asyncio.run(connect_hosts([Host("n1", local=True)], [str(python)], SshOptions()))
    assert caught.value.found.startswith("no room for the agent: n1: ")
    assert "df -h ~ /tmp" in caught.value.remedy
