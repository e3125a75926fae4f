"""What may go on once more: restarts in a window, a failure that repeats, a host lost again."""

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


def test_nothing_is_allowed_by_itself() -> None:
    verdict = RetryPolicy(0, 3600).judge_failure(killed(), 0.0)
    assert not verdict.retries
    assert not verdict.reason


def test_only_the_window_counts() -> None:
    """A job that runs for weeks does not use its restarts up."""
    weeks = RetryPolicy(2, 3600)
    hours = [weeks.judge_failure(killed(), hour * 3601.0) for hour in range(500)]
    assert all(verdict.retries for verdict in hours)
    assert {verdict.number for verdict in hours} == {1}
    crashing = RetryPolicy(2, 3600)
    assert [crashing.judge_failure(killed(), now).retries for now in (0.0, 1.0, 2.0)] == [
        True,
        True,
        False,
    ]
    assert (
        crashing.judge_failure(killed(), 3.0).reason
        == "2 restarts within 1 hour (--max-restarts 2)"
    )
    assert crashing.judge_failure(killed(), 3602.0).retries


def test_all_count_without_a_window() -> None:
    policy = RetryPolicy(1, 0)
    assert policy.judge_failure(killed(), 0.0).retries
    verdict = policy.judge_failure(killed(), 1e7)
    assert (verdict.retries, verdict.reason) == (False, "1 restart used up (--max-restarts 1)")


def test_a_session_that_fails_at_the_same_step() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, step=7).retries
    assert policy.judge_failure(raised(), 5.0, step=8).retries
    assert policy.judge_failure(raised(13), 6.0, step=8).retries  # another line
    verdict = policy.judge_failure(raised(13), 7.0, step=8)
    assert not verdict.retries
    assert "at the same step (8), on the same data: it is the program's own" in verdict.reason


def test_a_script_that_fails_in_the_same_way() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, ran_s=60).retries
    verdict = policy.judge_failure(raised(), 60.0, ran_s=58)
    assert not verdict.retries
    assert (
        "the same failure as before at train.py, line 12, and after as long a time"
        in verdict.reason
    )


def test_a_script_that_came_further_failed_by_chance() -> None:
    policy = RetryPolicy(9, 3600)
    assert policy.judge_failure(raised(), 0.0, ran_s=60).retries
    assert policy.judge_failure(raised(), 200.0, ran_s=140).retries
    assert policy.judge_failure(raised(), 300.0, ran_s=400).retries
    assert policy.judge_failure(raised(), 310.0, ran_s=8).retries  # a disk that fails now and then


def test_a_script_that_fails_as_long_after_its_checkpoint_twice() -> None:
    policy = RetryPolicy(9, 3600)
    verdicts = [
        policy.judge_failure(raised(), float(n), ran_s=s) for n, s in enumerate((60, 20, 22))
    ]
    assert [one.retries for one in verdicts] == [True, True, False]


@pytest.mark.parametrize(
    ("lines", "own"),
    [
        (["epoch 1 step 35 loss 0.53", "epoch 1 step 70 loss 0.31"], False),
        (["step 35 loss 0.53 (3.1 it/s)", "step 35 loss 0.52 (2.9 it/s)"], True),
        (["12:30:01 step 35", "12:30:44 step 35"], True),
        (["35%|###| 35/100 [00:03<00:06, 9.9it/s]", "70%|###| 70/100 [00:03<00:03, 9it/s]"], False),
        (["training", "training"], True),  # it does not count
        (["step 35", ""], True),  # nothing is known of one
    ],
)
def test_a_script_that_counts_on_fails_by_chance(lines: list[str], own: bool) -> None:
    policy = RetryPolicy(9, 3600)
    verdicts = [policy.judge_failure(raised(), 4.0 * n, ran_s=4, output_line=one) for n, one in
                enumerate(lines)]  # fmt: skip
    assert [one.retries for one in verdicts] == [True, not own]


def test_a_script_that_fails_by_the_clock() -> None:
    """As one whose login ends after two hours: it goes on from its own checkpoint each time."""
    policy = RetryPolicy(1, 3600)
    assert all(policy.judge_failure(raised(), one * 7200.0, ran_s=7190).retries for one in range(9))
    always = RetryPolicy(9, 0)
    assert [always.judge_failure(raised(), one * 7200.0, ran_s=7190).retries for one in (0, 1)] == [
        True,
        False,
    ]


def test_what_chance_does_is_never_the_program() -> None:
    reset = Failure("exception", "n1", 0, headline="RuntimeError: Connection reset by peer",
                    traceback=TRACEBACK.format(line=3))  # fmt: skip
    for failure in (killed(), reset, Failure("lost", "n1", None, headline="gone")):
        policy = RetryPolicy(9, 3600)
        assert all(policy.judge_failure(failure, now, ran_s=1).retries for now in (0.0, 1.0, 2.0))


def test_a_host_that_is_lost_again_and_again() -> None:
    policy = RetryPolicy(0, 3600)
    assert [policy.redials("n2", now) for now in (0.0, 10.0, 20.0)] == [True, True, False]
    assert policy.redials("n3", 20.0)
    assert policy.redials("n2", 4000.0)


def test_starts_that_come_to_no_step() -> None:
    """A few are allowed, which are no restarts; after a step they are counted anew."""
    policy = RetryPolicy(0, 3600)
    startup = StartupTracker(Job("a", Entry("script", "a.py"), "/", "python3"), 2)

    def starts_again() -> bool:
        chance = Diagnosis(by_chance=True)
        return policy.judge_attempt(killed(), chance, startup, 0.0, 1.0).is_start

    assert [starts_again() for _ in range(MAX_STARTS)] == [True] * (MAX_STARTS - 1) + [False]
    assert not starts_again()
    assert policy.num_restarts == 0
    assert not policy.judge_attempt(killed(), Diagnosis(), None, 0.0, 1.0).retries
    assert starts_again()


def test_spans() -> None:
    assert [span(s) for s in (3600, 7200, 600, 90, 0.5, 86400)] == [
        "1 hour", "2 hours", "10 minutes", "90 s", "0.5 s", "1 day"]  # fmt: skip


def test_a_crash_that_repeats_is_the_program_s_own() -> None:
    crash = Failure("signal", "n1", 0, signal=11, headline="crashed (SIGSEGV)")
    policy = RetryPolicy(5, 3600)
    assert policy.judge_failure(crash, 0.0, step=7).retries
    assert policy.judge_failure(crash, 1.0, step=8).retries
    assert "same step (8)" in policy.judge_failure(crash, 2.0, step=8).reason
    other = Failure("signal", "n1", 0, signal=7, headline="crashed (SIGBUS)")
    assert RetryPolicy(5, 3600).judge_failure(other, 0.0, ran_s=3).retries
