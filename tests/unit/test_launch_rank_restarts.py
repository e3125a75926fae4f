"""Tests that nothing of a rank's former process is attributed to the process that replaces it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.runs.attached import print_end
from paceline.cli.runs.run_end import report_failure
from paceline.explain.evidence_reader import debug_logs, from_result
from paceline.launch.recorder import Recorder
from paceline.launch.results.run_outcome import RunOutcome
from paceline.launch.terminal.screen import Screen
from paceline.rundir.directory import RunDirectory
from paceline.rundir.records import read_records
from paceline.spec.events import Event, last_attempt, log_offsets, read_events
from paceline.spec.failure import Failure, Result
from paceline.spec.rundir import EVENTS, RESULT

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


def failed(directory: RunDirectory, events: tuple[Event, ...]) -> RunOutcome:
    failure = Failure("exit", "n1", 0, 9.0, code=1, headline="exit status 1")
    return RunOutcome(directory.path, Result(1, failure), events, {}, 1.0)


def test_last_lines_are_of_last_attempt(directory: RunDirectory) -> None:
    recorder = Recorder(directory, Screen("none", io.StringIO(), io.StringIO()))
    for attempt, text in enumerate(("Traceback\n", "hunter2-", "disk quota is used up\n")):
        recorder.event("started", attempt=attempt, world_size=1)
        recorder.record(STARTED)
        recorder.record(output(text))
        if attempt != 1:  # a lost host reports no end, and part of a secret is held back
            ended = {"code": 1, "signal": None, "peak_bytes": 0}
            recorder.record(Event("rank ended", "n1", 0, fields=ended))
        recorder.event("ended", attempt=attempt, exit_code=1, seconds=1.0)
    from_file = read_events(read_records(directory.path / EVENTS))
    for events in (recorder.events, from_file):
        report = report_failure(failed(directory, events))
        assert "its last lines:\n    disk quota is used up\n  logs:" in report
        evidence = from_result(directory.path, Result(1), events)
        assert [log.lines for log in evidence.logs] == [("disk quota is used up",)]
    assert (directory.path / "logs/n1/0.log").read_text().startswith("Traceback\nhunter2-disk")


def test_debug_logs_are_of_last_attempt(directory: RunDirectory) -> None:
    recorder = Recorder(directory, Screen("none", io.StringIO(), io.StringIO()), debug=True)
    for number in range(2):
        recorder.record(STARTED)
        recorder.record(output(f"n1:1:2 [0] NCCL WARN failure {number}\nout {number}\n"))
    (log,) = debug_logs(directory.path, recorder.events)
    assert log.lines == ("n1:1:2 [0] NCCL WARN failure 1",)


def test_agent_log_of_last_attempt_is_evidence(directory: RunDirectory) -> None:
    recorder = Recorder(directory, Screen("none", io.StringIO(), io.StringIO()))
    recorder.agent_log("n1", "of the first\n", is_attempt_over=True)
    recorder.agent_log("n1", "of the second\n")
    evidence = from_result(directory.path, Result(1), recorder.events)
    assert [log.lines for log in evidence.logs] == [("of the second",)]


def test_removed_log_is_read_from_its_beginning() -> None:
    begin = Event("log begins", "n1", 0, fields={"bytes": 10})
    assert log_offsets([begin, STARTED]) == {("n1", 0): 10}
    assert log_offsets([begin, STARTED, STARTED]) == {("n1", 0): 0}


def test_attached_terminal_shows_last_lines_of_last_attempt(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(directory, Screen("none", io.StringIO(), io.StringIO()))
    for text in ("Traceback\n", "disk quota is used up\n"):
        recorder.record(STARTED)
        recorder.record(output(text))
    result = failed(directory, recorder.events).result
    directory.write_json(RESULT, {"seconds": 1.0, **result.to_json(), "exit_code": 1})
    assert print_end(directory.path) == 1
    shown = capsys.readouterr().err
    assert "its last lines:\n    disk quota is used up\n" in shown
    assert "Traceback" not in shown


def test_attempt_that_did_not_start_leaves_evidence_of_former_attempt() -> None:
    events = [Event("started", fields={"attempt": 0}), STARTED, Event("rank ended", "n1", 0),
              Event("ended"), Event("lost", "n2")]  # fmt: skip
    assert last_attempt(events) == events
    restarted = [*events, STARTED, Event("started", fields={"attempt": 1})]
    assert last_attempt(restarted) == restarted[len(events) :]
