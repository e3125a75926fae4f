"""Child processes under links."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from pathlib import Path

import pytest

from paceline.remote import link
from paceline.remote.link import OutputTooLong, run_process, spawn

HOLDS_PIPES = ["sh", "-c", "sleep 60 & exec sleep 60"]  # as ssh's ProxyCommand does


def test_starting_a_command_can_be_cancelled_at_any_point() -> None:
    async def cancelled_after(steps: int) -> float:
        starting = asyncio.create_task(spawn(HOLDS_PIPES))
        for _ in range(steps):
            await asyncio.sleep(0)
        time.sleep(0.05)  # the shell starts its child meanwhile
        starting.cancel()
        start = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return time.monotonic() - start

    async def cancelled() -> list[float]:
        return [await cancelled_after(steps) for steps in range(8)]  # started after nine

    assert max(asyncio.run(cancelled())) < 20


def test_a_command_is_killed_when_its_time_is_over() -> None:
    start = time.monotonic()
    with contextlib.suppress(asyncio.TimeoutError):
        asyncio.run(run_process(HOLDS_PIPES, 0.2))
    assert time.monotonic() - start < 20


def test_a_command_gets_its_input_and_both_outputs_are_read() -> None:
    script = "cat; echo error >&2; exit 3"
    done = asyncio.run(run_process(["sh", "-c", script], 20, stdin="text"))
    assert (done.returncode, done.stdout, done.stderr) == (3, "text", "error\n")
    done = asyncio.run(run_process(["true"], 20, stdin="not read" * 100_000))
    assert done.returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("level", [None, "0", "1"])
def test_bash_for_a_proxy_command_reads_no_start_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str | None
) -> None:
    (tmp_path / ".bashrc").write_text("echo read >&2\n")
    # as ssh does it: the standard input of the command is a socket
    ssh = ("import socket, subprocess; a, b = socket.socketpair();"
           " subprocess.run(['bash', '-c', 'echo dialled >&2'], stdin=a)")  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHLVL", raising=False)
    if level is not None:
        monkeypatch.setenv("SHLVL", level)
    assert asyncio.run(run_process([sys.executable, "-c", ssh], 20)).stderr == "dialled\n"


def test_a_command_that_prints_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(OutputTooLong, match="more than 1 MiB"):
        asyncio.run(run_process(["yes"], 60))
