"""Tests when a failed attempt may be repeated: restart budget, repeated failures, lost hosts."""

from __future__ import annotations

import pytest

from paceline.launch.elastic.retry_policy import MAX_STARTS, Diagnosis, RetryPolicy, StartupTracker
from paceline.spec.failure import Failure
from paceline.spec.formatting import span
from paceline.spec.job import Entry, Job

TRACEBACK = 'Traceback\n  File "/a/train.py", line {line}, in <module>\n    1 / 0\nValueError: x\n'


def raised(line: int = 12, headline: str = "ValueError: x") -> Failure:
    return Failure("exception", "n1", 0, headline=headline, traceback=TRACEBACK.format(line=line))


def killed() -> Failure:
    return Failure("signal", "n1", 0, signal=9, headline="killed by SIGKILL")


def test_zero_max_restarts_allows_no_retry() -> None:
    verdict = RetryPolicy(0, 3600).judge_failure(killed(), 0.0)
    assert not verdict.retries
    assert not verdict.reason


def test_restarts_are_counted_within_window() -> None:
    """A job that runs for weeks does not use up its restarts."""
    weeks = RetryPolicy(2, 3600)
    hours = [weeks.judge_failure(killed(), hour * 3601.0) for hour in range(500)]
    assert all(verdict.retries for verdict in hours)
    assert {verdict.number for verdict in hours} == {1}
    crashing = RetryPolicy(2, 3600)
    assert [crashing.judge_failure(killed(), time_s).retries for time_s in (0.0, 1.0, 2.0)] == [
        True,
        True,
        False,
    ]
    assert (
        crashing.judge_failure(killed(), 3.0).reason
        == "2 restarts within 1 hour (--max-restarts 2)"
    )
    assert crashing.judge_failure(killed(), 3602.0).retries


def test_zero_window_limits_total_restarts() -> None:
    policy = RetryPolicy(1, 0)
    assert policy.judge_failure(killed(), 0.0).retries
    verdict = policy.judge_failure(killed(), 1e7)
    assert (verdict.retries, verdict.reason) == (False, "1 restart used up (--max-restarts 1)")


def test_failure_repeated_at_same_step_is_not_retried() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, step=7).retries
    assert policy.judge_failure(raised(), 5.0, step=8).retries
    assert policy.judge_failure(raised(13), 6.0, step=8).retries  # another line
    verdict = policy.judge_failure(raised(13), 7.0, step=8)
    assert not verdict.retries
    assert "at the same step (8), on the same data: it is the program's own" in verdict.reason


def test_failure_repeated_after_equal_time_is_not_retried() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, ran_s=60).retries
    verdict = policy.judge_failure(raised(), 60.0, ran_s=58)
    assert not verdict.retries
    assert (
        "the same failure as before at train.py, line 12, and after as long a time"
        in verdict.reason
    )


def test_failures_after_different_times_are_retried() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, ran_s=60).retries
    assert policy.judge_failure(raised(), 200.0, ran_s=140).retries
    assert policy.judge_failure(raised(), 300.0, ran_s=400).retries
    assert policy.judge_failure(raised(), 310.0, ran_s=8).retries  # an occasional disk error


def test_failure_at_equal_time_after_resume_is_not_retried() -> None:
    policy = RetryPolicy(9, 3600)
    verdicts = [
        policy.judge_failure(raised(), float(n), ran_s=s) for n, s in enumerate((60, 20, 22))
    ]
    assert [item.retries for item in verdicts] == [True, True, False]


@pytest.mark.parametrize(
    ("lines", "is_deterministic"),
    [
        (["epoch 1 step 35 loss 0.53", "epoch 1 step 70 loss 0.31"], False),
        (["step 35 loss 0.53 (3.1 it/s)", "step 35 loss 0.52 (2.9 it/s)"], True),
        (["12:30:01 step 35", "12:30:44 step 35"], True),
        (["35%|###| 35/100 [00:03<00:06, 9.9it/s]", "70%|###| 70/100 [00:03<00:03, 9it/s]"], False),
        (["training", "training"], True),  # no number in the output
        (["step 35", ""], True),  # no output of one attempt
    ],
)
def test_progress_in_output_allows_retry(lines: list[str], is_deterministic: bool) -> None:
    policy = RetryPolicy(9, 3600)
    verdicts = [policy.judge_failure(raised(), 4.0 * n, ran_s=4, output_line=item) for n, item in
                enumerate(lines)]  # fmt: skip
    assert [item.retries for item in verdicts] == [True, not is_deterministic]


def test_periodic_failures_are_retried_with_window() -> None:
    """For example, a login expires every two hours; the script continues from a checkpoint."""
    policy = RetryPolicy(1, 3600)
    assert all(
        policy.judge_failure(raised(), item * 7200.0, ran_s=7190).retries for item in range(9)
    )
    without_window = RetryPolicy(9, 0)
    assert [
        without_window.judge_failure(raised(), item * 7200.0, ran_s=7190).retries for item in (0, 1)
    ] == [
        True,
        False,
    ]


def test_external_failures_are_retried() -> None:
    reset = Failure("exception", "n1", 0, headline="RuntimeError: Connection reset by peer",
                    traceback=TRACEBACK.format(line=3))  # fmt: skip
    for failure in (killed(), reset, Failure("lost", "n1", None, headline="gone")):
        policy = RetryPolicy(9, 3600)
        assert all(
            policy.judge_failure(failure, time_s, ran_s=1).retries for time_s in (0.0, 1.0, 2.0)
        )


def test_redials_lost_host_twice_per_window() -> None:
    policy = RetryPolicy(0, 3600)
    assert [policy.redials("n2", time_s) for time_s in (0.0, 10.0, 20.0)] == [True, True, False]
    assert policy.redials("n3", 20.0)
    assert policy.redials("n2", 4000.0)


def test_limits_starts_before_first_step() -> None:
    """A few are allowed without counting as restarts; the count is reset after a step."""
    policy = RetryPolicy(0, 3600)
    startup = StartupTracker(Job("a", Entry("script", "a.py"), "/", "python3"))

    def retries_start() -> bool:
        chance = Diagnosis(by_chance=True)
        return policy.judge_attempt(killed(), chance, startup, 0.0, 1.0).is_start

    assert [retries_start() for _ in range(MAX_STARTS)] == [True] * (MAX_STARTS - 1) + [False]
    assert not retries_start()
    assert policy.num_restarts == 0
    assert not policy.judge_attempt(killed(), Diagnosis(), None, 0.0, 1.0).retries
    assert retries_start()


def test_formats_time_spans() -> None:
    assert [span(s) for s in (3600, 7200, 600, 90, 0.5, 86400)] == [
        "1 hour", "2 hours", "10 minutes", "90 s", "0.5 s", "1 day"]  # fmt: skip


def test_crash_repeated_at_same_step_is_not_retried() -> None:
    crash = Failure("signal", "n1", 0, signal=11, headline="crashed (SIGSEGV)")
    policy = RetryPolicy(5, 3600)
    assert policy.judge_failure(crash, 0.0, step=7).retries
    assert policy.judge_failure(crash, 1.0, step=8).retries
    assert "same step (8)" in policy.judge_failure(crash, 2.0, step=8).reason
    bus_error = Failure("signal", "n1", 0, signal=7, headline="crashed (SIGBUS)")
    assert RetryPolicy(5, 3600).judge_failure(bus_error, 0.0, ran_s=3).retries
