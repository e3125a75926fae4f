"""Tests that nothing of a rank's former process is attributed to the process that replaces it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.rundir.directory import RunDirectory
from paceline.spec.events import Event

STARTED = Event("rank started", "n1", 0, fields={"pid": 7})


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "run", ["hunter2-hunter2"])
    yield directory
    directory.close()


def output(text: str, stream: str = "err") -> Event:
    return Event("output", "n1", 0, fields={"stream": stream}, blob=text.encode())


def test_screen_shows_stderr_of_rank_that_raised_and_was_restarted(
    directory: RunDirectory,
) -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen("all", out, err)
    recorder = Recorder(directory, screen)
    recorder.record(STARTED)
    screen.mute("n1", 0)
    recorder.record(output("Traceback\n"))
    recorder.record(STARTED)
    recorder.record(output("step 0\n"))
    screen.close()
    assert (out.getvalue(), err.getvalue()) == ("", "[n1/0] step 0\n")


def test_screen_ends_unfinished_line_when_rank_restarts(directory: RunDirectory) -> None:
    out = io.StringIO()
    screen = Screen("all", out, io.StringIO())
    recorder = Recorder(directory, screen)
    recorder.record(output("killed in this li", "out"))
    assert screen.is_visible("n1", 0) is False
    recorder.record(STARTED)
    recorder.record(output("step 0\n", "out"))
    screen.close()
    assert out.getvalue() == "[n1/0] killed in this li\n[n1/0] step 0\n"


def test_lines_of_former_process_do_not_count_as_visible(directory: RunDirectory) -> None:
    screen = Screen("all", io.StringIO(), io.StringIO())
    recorder = Recorder(directory, screen)
    recorder.record(output("of the former\n"))
    assert screen.is_visible("n1", 0)
    recorder.record(STARTED)
    assert not screen.is_visible("n1", 0)
    screen.close()
