"""Tests the live screen on a pseudo-terminal: its keys, and what remains on the terminal."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest

from paceline.launch.terminal import live
from terminals import ENTER, LEAVE, Terminal, on_terminal

PROGRAM = """
import asyncio, os, sys, time
from paceline.launch.terminal.run_state import RunState
from paceline.launch.terminal.screen import Screen
from paceline.spec.errors import NodeError
from paceline.spec.events import Event

class Actions:
    async def save(self): return "checkpoint of step 7 is complete"
    async def stacks(self): raise NodeError("no ranks run at this moment")
    def stop(self, *, immediately=False):
        over.set()
        return "stopping"

async def main():
    global over
    over = asyncio.Event()
    state, screen = RunState(), Screen("all", display="live")
    for rank in (0, 1):
        state.apply(Event("rank started", "n1", rank, 0.0, {"pid": 5}), time.monotonic())
    state.apply(Event("keeps checkpoints", "n1", 0, 0.0, {}), time.monotonic())
    screen.note("before")
    asyncio.get_running_loop().add_signal_handler(15, over.set)
    screen.start_live(state, title="the run", actions=Actions(), delay_s=0.0)
    while screen._live is not None and not screen._live.is_visible:
        await asyncio.sleep(0.01)
    screen.output("n1", 0, "out", b"written by rank 0\\n")
    screen.output("n1", 1, "out", b"written by rank 1\\n")
    try:
        await over.wait()
        if "raise" in sys.argv:
            raise RuntimeError("on purpose")
        screen.note("at the end")
    finally:
        if "raise" not in sys.argv:
            screen.close()

asyncio.run(main())
print("after", flush=True)
"""


def terminal(*arguments: str, **how: Any) -> AbstractContextManager[Terminal]:
    """Runs the program on its own terminal."""
    return on_terminal([sys.executable, "-c", PROGRAM, *arguments], **how)


def test_keys_act_and_log_remains_after_exit() -> None:
    with terminal() as session:
        assert session.reads(b"written by rank 1")
        assert not session.restored  # single keys are read without Enter
        session.types(b"1")
        assert session.reads(b"log of rank 1 on n1")
        session.types(b"s")
        assert session.reads(b"checkpoint of step 7 is complete")
        session.types(b"t")
        assert session.reads(b"no ranks run at this moment")
        session.types(b"?")
        assert session.reads(b"leave it running")
        session.types(b"\x1b")
        session.types(b"x")
        assert session.reads(b"stop the run?")
        session.types(b"y")
        assert session.ends() == 0
        assert session.restored
    head, remainder = session.said.split(ENTER, 1)
    tail = remainder.rsplit(LEAVE, 1)[1]
    assert b"before" in head
    written = [b"[n1/0]", b"written by rank 0", b"[n1/1]", b"written by rank 1", b"at the end"]
    places = [tail.index(text) for text in [*written, b"after"]]
    assert places == sorted(places)  # all output, in its original order


@pytest.mark.parametrize("how", ["raise", "term"])
def test_restores_terminal_on_error_and_signal(how: str) -> None:
    with terminal(how) as session:
        assert session.reads(b"written by rank 1")
        if how == "term":
            session.program.send_signal(signal.SIGTERM)
        else:
            session.types(b"x")
            assert session.reads(b"stop the run?")
            session.types(b"k")
        assert (session.ends() == 0) == (how == "term")
        assert session.restored
        assert session.said.count(ENTER) == session.said.count(LEAVE) == 1
        tail = session.said.rsplit(LEAVE, 1)[1]
        assert b"written by rank 1" in tail
        assert (b"on purpose" in tail) == (how == "raise")


def test_ctrl_z_suspends_and_resumes_screen() -> None:
    with terminal() as session:
        assert session.reads(b"written by rank 1")
        # like a shell that has started it as its own job
        os.kill(session.program.pid, signal.SIGTSTP)
        assert session.reads(LEAVE)
        assert session.reads(ENTER)  # without a shell, the session is not stopped and continues
        session.types(b"q")
        assert session.reads(b"[n1/1]")
        session.program.send_signal(signal.SIGTERM)
        assert session.ends() == 0
        assert session.restored


@pytest.mark.parametrize(("columns", "term"), [(50, "xterm"), (80, "dumb"), (0, "xterm")])
def test_prints_lines_on_unsuitable_terminal(columns: int, term: str) -> None:
    with terminal(columns=columns, term=term) as session:
        assert session.reads(b"written by rank 1")
        assert session.restored
        session.program.send_signal(signal.SIGTERM)
        assert session.ends() == 0
    assert ENTER not in session.said
    assert b"after" in session.said


def test_supports_no_color_and_ascii() -> None:
    with terminal(NO_COLOR="1", PYTHONIOENCODING="ascii") as session:
        assert session.reads(b"written by rank 1")
        screen = session.said.split(ENTER, 1)[1]
        assert b"-- log ---" in screen
        assert b"\x1b[31" not in screen
        session.program.send_signal(signal.SIGTERM)
        assert session.ends() == 0


def test_help_fits_smallest_screen() -> None:
    assert max(map(len, live.HELP.splitlines())) < live.MIN_COLUMNS
    assert len(live.HELP.splitlines()) <= live.MIN_LINES / 2
