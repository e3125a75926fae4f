"""The live screen on a terminal of its own: what it leaves there, and what its keys do."""

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


def terminal(*words: str, **how: Any) -> AbstractContextManager[Terminal]:
    """The program on a terminal of its own."""
    return on_terminal([sys.executable, "-c", PROGRAM, *words], **how)


def test_keys_and_what_is_left_on_the_terminal() -> None:
    with terminal() as one:
        assert one.reads(b"written by rank 1")
        assert not one.restored  # keys come singly
        one.types(b"1")
        assert one.reads(b"log of rank 1 on n1")
        one.types(b"s")
        assert one.reads(b"checkpoint of step 7 is complete")
        one.types(b"t")
        assert one.reads(b"no ranks run at this moment")
        one.types(b"?")
        assert one.reads(b"leave it running")
        one.types(b"\x1b")
        one.types(b"x")
        assert one.reads(b"stop the run?")
        one.types(b"y")
        assert one.ends() == 0
        assert one.restored
    head, rest = one.said.split(ENTER, 1)
    tail = rest.rsplit(LEAVE, 1)[1]
    assert b"before" in head
    written = [b"[n1/0]", b"written by rank 0", b"[n1/1]", b"written by rank 1", b"at the end"]
    places = [tail.index(word) for word in [*written, b"after"]]
    assert places == sorted(places)  # all of it, in the order in which it came


@pytest.mark.parametrize("how", ["raise", "term"])
def test_the_terminal_is_given_back_whatever_happens(how: str) -> None:
    with terminal(how) as one:
        assert one.reads(b"written by rank 1")
        if how == "term":
            one.program.send_signal(signal.SIGTERM)
        else:
            one.types(b"x")
            assert one.reads(b"stop the run?")
            one.types(b"k")
        assert (one.ends() == 0) == (how == "term")
        assert one.restored
        assert one.said.count(ENTER) == one.said.count(LEAVE) == 1
        tail = one.said.rsplit(LEAVE, 1)[1]
        assert b"written by rank 1" in tail
        assert (b"on purpose" in tail) == (how == "raise")


def test_ctrl_z_and_back_again() -> None:
    with terminal() as one:
        assert one.reads(b"written by rank 1")
        # what a shell does that has started it as a job of its own
        os.kill(one.program.pid, signal.SIGTSTP)
        assert one.reads(LEAVE)
        assert one.reads(ENTER)  # a session without a shell is not stopped: it goes on
        one.types(b"q")
        assert one.reads(b"[n1/1]")
        one.program.send_signal(signal.SIGTERM)
        assert one.ends() == 0
        assert one.restored


@pytest.mark.parametrize(("columns", "term"), [(50, "xterm"), (80, "dumb"), (0, "xterm")])
def test_lines_where_no_screen_can_be(columns: int, term: str) -> None:
    with terminal(columns=columns, term=term) as one:
        assert one.reads(b"written by rank 1")
        assert one.restored
        one.program.send_signal(signal.SIGTERM)
        assert one.ends() == 0
    assert ENTER not in one.said
    assert b"after" in one.said


def test_no_colours_and_plain_signs() -> None:
    with terminal(NO_COLOR="1", PYTHONIOENCODING="ascii") as one:
        assert one.reads(b"written by rank 1")
        screen = one.said.split(ENTER, 1)[1]
        assert b"-- log ---" in screen
        assert b"\x1b[31" not in screen
        one.program.send_signal(signal.SIGTERM)
        assert one.ends() == 0


def test_the_help_fits_the_narrowest_screen() -> None:
    assert max(map(len, live.HELP.splitlines())) < live.MIN_COLUMNS
    assert len(live.HELP.splitlines()) <= live.MIN_LINES / 2
