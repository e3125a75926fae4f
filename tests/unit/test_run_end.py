"""Tests the last line that a run prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.runs import run_end
from paceline.cli.runs.run_end import report_failure, report_success
from paceline.launch.results.run_outcome import RunOutcome, is_resumable
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result


def summary_text(*events: Event, ranks: int = 3) -> str:
    text = report_success(RunOutcome(Path("/run"), Result(0), events, {}, 1.0, ranks=ranks))
    return text.removeprefix("paceline: finished: ").partition(", 1")[0]


def started(*ranks: int) -> list[Event]:
    return [Event("rank started", f"n{rank + 1}", rank, fields={"pid": 7}) for rank in ranks]


def ended(*ranks: int, code: int = 0) -> list[Event]:
    return [Event("rank ended", f"n{rank + 1}", rank, fields={"code": code}) for rank in ranks]


def test_success_counts_finished_and_names_missing_ranks() -> None:
    assert summary_text(*started(0, 1, 2), *ended(0, 1, 2)) == "3 ranks"
    lost = [*started(0, 1, 2), *ended(1, code=137)]
    assert summary_text(*lost, *started(1), *ended(0, 1, 2)) == "3 ranks"
    assert summary_text(*lost, *ended(0, 2)) == "2 ranks (rank 1 on n2 missing at the end)"
    assert (
        summary_text(*lost, *started(1), *ended(0, 2))
        == "2 ranks (rank 1 on n2 missing at the end)"
    )
    assert (
        summary_text(*started(0, 1, 2), *ended(0))
        == "1 rank (rank 1 on n2, rank 2 on n3 missing at the end)"
    )


def test_success_counts_final_attempt() -> None:
    first = [*started(0, 1, 2), *ended(0, 1, 2, code=1), Event("ended")]
    assert summary_text(*first, *started(0, 1), *ended(0, 1)) == "2 ranks"  # fewer than planned


def test_success_without_events_uses_planned_ranks() -> None:
    assert summary_text() == "3 ranks"


def test_interrupted_run_shows_resume_command() -> None:
    def failure_text(*events: Event) -> list[str]:
        result = Result(130, interrupted=2)
        outcome = RunOutcome(
            Path("/run"), result, events, {}, 1.0, resumable=is_resumable(result, events),
            command=("paceline", "run", "a.py"),
        )  # fmt: skip
        return report_failure(outcome).splitlines()[1:]

    checkpoint = Event("checkpoint", "n1", 0, fields={"step": 1200})
    resume = "to resume: paceline run --run-dir /run a.py"
    assert failure_text() == []
    assert failure_text(checkpoint, Event("stopped", "n1", 0, fields={"saved": 1230})) == [resume]
    killed = "  it had no time to save: the last checkpoint is of step 1,200"
    assert failure_text(checkpoint) == [killed, resume]
    begun = Event("keeps checkpoints", "n1", 0)
    stopped = Event("stopped", "n1", 0, fields={"saved": 0})
    failed = Event("checkpoint failed", "n1", 0, fields={"warning": "the disk is full"})
    assert failure_text(begun) == ["  it had no time to save: there is no checkpoint yet"]
    assert failure_text(begun, failed, stopped) == ["  nothing is saved: the disk is full"]
    assert failure_text(begun, stopped) == []
    assert not is_resumable(Result(1), [checkpoint])
    unrecorded = Failure("record", "this machine", None, headline="cannot write")
    assert is_resumable(Result(1, failure=unrecorded), [checkpoint])


def test_error_without_details_has_no_blank_line() -> None:
    failure = Failure("exception", "n1", 0, 1.0, headline="DataError: a.csv is empty", code=1)
    text = report_failure(
        RunOutcome(Path("/run"), Result(1, failure=failure), [], {}, 1.0, ranks=1)
    )
    assert "" not in text.splitlines()


def test_failed_run_with_checkpoint_shows_resume_command() -> None:
    lost = Failure("lost", "n1", None, headline="n1 does not answer")
    checkpoint = Event("checkpoint", "n1", 0, fields={"step": 1200})

    def final_line(*events: Event) -> str:
        outcome = RunOutcome(Path("/run"), Result(1, failure=lost), events, {}, 1.0,
                             command=("paceline", "run", "a.py"))  # fmt: skip
        return report_failure(outcome).splitlines()[-1]

    assert final_line(checkpoint) == "to resume: paceline run --run-dir /run a.py"
    assert "to resume" not in final_line()


def test_rejected_setting_shows_no_resume_command() -> None:
    setting_error = Failure(
        "exception", "n1", 0, 1.0, headline="SettingError: --lora-rank differs", code=1
    )
    events = [Event("checkpoint", "n1", 0, fields={"step": 1200})]
    outcome = RunOutcome(Path("/run"), Result(1, failure=setting_error), events, {}, 1.0)
    assert "to resume" not in report_failure(outcome)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--resume", "out/ckpt-2.pt"], "out/ckpt-2.pt"), (["--from=./out/ckpt-2.pt"], "ckpt-2.pt"),
     (["--resume", "out/ckpt-3.pt"], ""), (["--steps", "2"], ""), (["--resume", "out/"], "")],
)  # fmt: skip
def test_names_older_checkpoint_in_resume_command(arguments: list[str], named: str) -> None:
    command = ["paceline", "run", "train.py", *arguments]
    note = "\n".join(run_end.older_checkpoint_note(command, "out/ckpt-3.pt"))
    assert named in note
    assert bool(note) == bool(named)
    assert not run_end.older_checkpoint_note([*command, "--epochs", "5"], "30")


def test_diverged_replicas_show_no_resume_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_end, "script_checkpoint", lambda run: "out/last.pt")

    def failure_text(*events: Event) -> str:
        failure = Failure("early", "n1", 0, headline="ended too early")
        return report_failure(RunOutcome(Path("/run"), Result(1, failure), events, {}, 1.0))

    assert "to resume, if" in failure_text()
    summary_text = failure_text(Event("replicas differ", fields={"text": "rank 0 differs"}))
    assert "newest checkpoint of the script: out/last.pt" in summary_text
    assert "to resume" not in summary_text
