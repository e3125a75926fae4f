"""Tests child processes that carry a connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import sys
import time
from pathlib import Path

import pytest

from paceline.remote import link
from paceline.remote.link import OutputTooLong, run_process, spawn

HOLDS_PIPES = ["sh", "-c", "sleep 60 & exec sleep 60"]  # like ssh with a ProxyCommand


def test_spawn_can_be_cancelled_at_any_point() -> None:
    async def cancelled_after(steps: int) -> float:
        starting = asyncio.create_task(spawn(HOLDS_PIPES))
        for _ in range(steps):
            await asyncio.sleep(0)
        time.sleep(0.05)  # meanwhile the shell starts its child
        starting.cancel()
        start = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return time.monotonic() - start

    async def cancelled() -> list[float]:
        return [await cancelled_after(steps) for steps in range(8)]  # it has started after nine

    assert max(asyncio.run(cancelled())) < 20


def test_unread_input_of_ended_child_prints_nothing() -> None:
    """Python before 3.11.4, such as that of Debian 12, would print a traceback."""
    messages: list[str] = []

    async def write_in_vain() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: messages.append(context["message"]))
        process = await spawn(["sleep", "0.2"])
        assert process.stdin is not None
        process.stdin.write(bytes(1 << 20))
        await link.wait_for_exit(process)
        while not process.stdin.transport.is_closing():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        del process
        gc.collect()

    asyncio.run(write_in_vain())
    assert not messages


def test_run_process_kills_at_timeout() -> None:
    start = time.monotonic()
    with contextlib.suppress(asyncio.TimeoutError):
        asyncio.run(run_process(HOLDS_PIPES, 0.2))
    assert time.monotonic() - start < 20


def test_run_process_passes_stdin_and_reads_outputs() -> None:
    script = "cat; echo error >&2; exit 3"
    completed = asyncio.run(run_process(["sh", "-c", script], 20, stdin="text"))
    assert (completed.returncode, completed.stdout, completed.stderr) == (3, "text", "error\n")
    completed = asyncio.run(run_process(["true"], 20, stdin="not read" * 100_000))
    assert completed.returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("level", [None, "0", "1"])
def test_proxy_command_bash_reads_no_startup_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str | None
) -> None:
    (tmp_path / ".bashrc").write_text("echo read >&2\n")
    # like ssh: the standard input of the command is a socket
    ssh = ("import socket, subprocess; a, b = socket.socketpair();"
           " subprocess.run(['bash', '-c', 'echo dialled >&2'], stdin=a)")  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHLVL", raising=False)
    if level is not None:
        monkeypatch.setenv("SHLVL", level)
    assert asyncio.run(run_process([sys.executable, "-c", ssh], 20)).stderr == "dialled\n"


def test_run_process_kills_endless_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(OutputTooLong, match="more than 1 MiB"):
        asyncio.run(run_process(["yes"], 60))
