"""The last line of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.results import summary
from paceline.launch.results.summary import RunOutcome, is_resumable, report_failure, report_success
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result


def said(*events: Event, ranks: int = 3) -> str:
    text = report_success(RunOutcome(Path("/run"), Result(0), events, {}, 1.0, ranks=ranks))
    return text.removeprefix("paceline: finished: ").partition(", 1")[0]


def started(*ranks: int) -> list[Event]:
    return [Event("rank started", f"n{rank + 1}", rank, fields={"pid": 7}) for rank in ranks]


def ended(*ranks: int, code: int = 0) -> list[Event]:
    return [Event("rank ended", f"n{rank + 1}", rank, fields={"code": code}) for rank in ranks]


def test_it_counts_the_ranks_that_have_finished_and_says_who_was_missing() -> None:
    assert said(*started(0, 1, 2), *ended(0, 1, 2)) == "3 ranks"
    lost = [*started(0, 1, 2), *ended(1, code=137)]
    assert said(*lost, *started(1), *ended(0, 1, 2)) == "3 ranks"
    assert said(*lost, *ended(0, 2)) == "2 ranks (rank 1 on n2 missing at the end)"
    assert said(*lost, *started(1), *ended(0, 2)) == "2 ranks (rank 1 on n2 missing at the end)"
    assert (
        said(*started(0, 1, 2), *ended(0))
        == "1 rank (rank 1 on n2, rank 2 on n3 missing at the end)"
    )


def test_of_several_attempts_the_last_counts() -> None:
    first = [*started(0, 1, 2), *ended(0, 1, 2, code=1), Event("ended")]
    assert said(*first, *started(0, 1), *ended(0, 1)) == "2 ranks"  # with fewer hosts than planned


def test_where_nothing_was_told_it_is_the_number_that_was_planned() -> None:
    assert said() == "3 ranks"


def test_an_interrupted_run_says_from_where_it_can_go_on() -> None:
    def last_words(*events: Event) -> list[str]:
        result = Result(130, interrupted=2)
        outcome = RunOutcome(
            Path("/run"), result, events, {}, 1.0, resumable=is_resumable(result, events),
            command=("paceline", "run", "a.py"),
        )  # fmt: skip
        return report_failure(outcome).splitlines()[1:]

    made = Event("checkpoint", "n1", 0, fields={"step": 1200})
    resume = "to resume: paceline run --run-dir /run a.py"
    assert last_words() == []
    assert last_words(made, Event("stopped", "n1", 0, fields={"saved": 1230})) == [resume]
    killed = "  it had no time to save: the last checkpoint is of step 1,200"
    assert last_words(made) == [killed, resume]
    assert not is_resumable(Result(1), [made])
    unrecorded = Failure("record", "this machine", None, headline="cannot write")
    assert is_resumable(Result(1, failure=unrecorded), [made])


def test_an_error_without_details_takes_one_line() -> None:
    failure = Failure("exception", "n1", 0, 1.0, headline="DataError: a.csv is empty", code=1)
    text = report_failure(
        RunOutcome(Path("/run"), Result(1, failure=failure), [], {}, 1.0, ranks=1)
    )
    assert "" not in text.splitlines()


def test_a_failed_training_with_checkpoints_says_how_to_resume() -> None:
    lost = Failure("lost", "n1", None, headline="n1 does not answer")
    made = Event("checkpoint", "n1", 0, fields={"step": 1200})

    def last_line(*events: Event) -> str:
        outcome = RunOutcome(Path("/run"), Result(1, failure=lost), events, {}, 1.0,
                             command=("paceline", "run", "a.py"))  # fmt: skip
        return report_failure(outcome).splitlines()[-1]

    assert last_line(made) == "to resume: paceline run --run-dir /run a.py"
    assert "to resume" not in last_line()


def test_a_refused_setting_is_not_typed_again() -> None:
    refused = Failure(
        "exception", "n1", 0, 1.0, headline="SettingError: --lora-rank differs", code=1
    )
    events = [Event("checkpoint", "n1", 0, fields={"step": 1200})]
    outcome = RunOutcome(Path("/run"), Result(1, failure=refused), events, {}, 1.0)
    assert "to resume" not in report_failure(outcome)


def test_what_ranks_saved_that_trained_apart_is_not_to_be_resumed_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summary, "script_checkpoint", lambda run: "out/last.pt")

    def last_words(*events: Event) -> str:
        failure = Failure("early", "n1", 0, headline="ended too early")
        return report_failure(RunOutcome(Path("/run"), Result(1, failure), events, {}, 1.0))

    assert "to resume, if" in last_words()
    said = last_words(Event("replicas differ", fields={"text": "rank 0 differs"}))
    assert "newest checkpoint of the script: out/last.pt" in said
    assert "to resume" not in said
