"""Tests the decisions about ranks and nodes that are lost, replaced and rejoin."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from each_case import each_case
from paceline.launch.elastic.members import (
    CONNECT_TIMEOUT_S,
    DEADLOCK_TIMEOUT_S,
    EXCLUSION_S,
    JOIN_WINDOW_S,
    KILL_RETRY_S,
    STATE_TRANSFER_S,
    STOP_TIMEOUT_S,
    Members,
)
from paceline.launch.elastic.rank_events import (
    EXIT_GRACE_S,
    INTERRUPT_TIMEOUT_S,
    PROGRAM_FAILURE_WAIT_S,
    SAVED_EXIT_CODE,
)
from paceline.launch.elastic.rank_states import (
    Action,
    Dial,
    End,
    ExcludeHost,
    Fail,
    Joined,
    Kill,
    Prepare,
    RankAbandoned,
    RanksNotReplaced,
    Recovered,
    Regroup,
    Start,
    Stop,
    Wait,
)
from paceline.launch.elastic.retry_policy import MAX_STRIKES, NEWCOMER_DELAYS_S, RetryPolicy
from paceline.spec.failure import NEWCOMER_DIVERGED, NEWCOMER_MISMATCH, UNFREED, Failure

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n3"}
BOOM = "ValueError: boom"
RESET = "RuntimeError: Connection closed by peer"


class Job:
    """Simulates the ranks of a job, with a clock."""

    def __init__(self, places: dict[int, str] | None = None, recoverable: bool = True,
                 **how: object) -> None:  # fmt: skip
        self.places = places or {0: "n1", 1: "n2", 2: "n3"}
        self.members = Members(self.places, clock=self.read_clock, **how)  # type: ignore[arg-type]
        self.now, self.look_s = 100.0, 0.0
        if recoverable:
            for slot in self.places:
                self.members.set_recoverable(slot, True)
        assert self.decide() == []

    def read_clock(self) -> float:
        self.now += self.look_s
        return self.now

    def decide(self, after: float = 0.0) -> list[Action]:
        self.now += after
        return self.members.decide()

    def failure(self, slot: int, kind: str = "signal", text: str = "killed by SIGKILL") -> Failure:
        return Failure(kind, self.places[slot], slot, self.now, headline=text)  # type: ignore[arg-type]

    def kill(self, slot: int) -> None:
        self.members.rank_lost(slot, self.failure(slot))

    def raises(self, slot: int, text: str = BOOM, ends: bool = True) -> None:
        self.members.rank_lost(slot, self.failure(slot, "exception", text))
        if ends:
            self.members.rank_lost(slot, self.failure(slot, "exit", "exit status 1"))

    def lose(self, host: str, **how: bool) -> None:
        lost = Failure("lost", host, None, self.now, headline="no word")
        self.members.node_lost(host, lost, **how)

    def server_dies(self, host: str) -> None:
        died = Failure("forkserver", host, None, self.now, headline="the fork server died")
        self.members.server_died(host, died)
        for slot in [slot for slot, where in self.places.items() if where == host]:
            self.kill(slot)

    def settle(self, slots: Sequence[int] | None = None, step: int | None = None) -> None:
        """Lets these members, or all, report that they train in the new group."""
        number = self.members._generation.number
        for slot in self.members.group if slots is None else slots:
            self.members.regrouped(slot, number, step)

    def start_again(self, slot: int) -> None:
        """Kills a rank, lets the others continue without it, and starts a newcomer."""
        self.kill(slot)
        self.decide()
        self.settle()
        self.decide()

    def join(self, *slots: int) -> None:
        """Lets the started newcomers of these ranks get ready and join the group."""
        for slot in slots:
            self.members.newcomer_ready(slot)
        assert [type(item) for item in self.decide(JOIN_WINDOW_S)] == [Regroup]
        self.settle()
        assert [type(item) for item in self.decide()] == [Joined]


@pytest.mark.parametrize("cause", [NEWCOMER_MISMATCH, NEWCOMER_DIVERGED])
def test_diverging_newcomer_is_not_replaced(cause: str) -> None:
    """The newcomer reports it before its first batch, or after some steps with the others."""
    job = Job()
    job.start_again(2)
    job.join(2)
    job.raises(2, f"JobError: {cause}: after epochs they had told each other less")
    assert job.decide() == [Regroup(3, (0, 1), False)]
    job.settle()
    (outcome, not_replaced) = job.decide()
    assert isinstance(outcome, Recovered)
    assert not_replaced == RanksNotReplaced((2,), cause)
    assert job.decide(600.0) == []


def test_end_strays_kills_diverged_newcomer() -> None:
    """For example, its loop counts steps from its own start, and misses the others' evaluation."""
    job = Job()
    assert not job.members.end_strays([(0, 1), (2,)], "hung")  # no newcomer: the script is at fault
    job.start_again(2)
    job.join(2)
    assert not job.members.end_strays([(0, 2), (1,)], "hung")  # older ranks disagree, too
    assert not job.members.end_strays([(0, 1, 2)], "hung")
    assert job.members.end_strays([(0, 1), (2,)], "hung for longer than 30 s")
    assert job.decide() == [Kill("n3", (2,))]
    job.kill(2)
    assert isinstance(job.decide()[0], Regroup)
    job.settle()
    outcome, not_replaced = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.losses[0].headline == "hung for longer than 30 s"
    assert not_replaced == RanksNotReplaced((2,), NEWCOMER_DIVERGED)


def test_replaces_rank_whose_loader_worker_was_killed() -> None:
    """A rank whose loader worker failed by itself is not replaced."""
    job = Job()
    message_format = "RuntimeError: DataLoader worker (pid 77) {}"
    job.raises(1, message_format.format("is killed by signal: Killed"))
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job = Job()
    job.raises(1, message_format.format("is killed by signal: Bus error"))
    assert isinstance(job.decide(PROGRAM_FAILURE_WAIT_S)[-1], Fail)


@pytest.mark.parametrize("closed", [(0,), (0, 1)])
def test_newcomer_cannot_join_after_training(closed: tuple[int, ...]) -> None:
    """The newcomers would form a group of their own and train from the beginning."""
    job = Job()
    job.start_again(2)
    for slot in closed:
        job.members.close_session(slot)
    job.members.newcomer_ready(2)
    assert job.decide(JOIN_WINDOW_S) == []
    for slot in (0, 1):
        job.members.rank_finished(slot)
    assert job.decide() == [Kill("n3", (2,))]


@pytest.mark.parametrize("how", ["kill", "raises", "lose"])
def test_rank_failure_after_training_fails_job(how: str) -> None:
    """The rank's script may still export the model, which other ranks would not do for it."""
    job = Job()
    for slot in (0, 1, 2):
        job.members.close_session(slot)
    job.members.rank_finished(0)
    if how == "kill":
        job.kill(1)
    elif how == "raises":
        job.raises(1)
    else:
        job.lose("n2")
    outcome = job.decide(PROGRAM_FAILURE_WAIT_S)
    assert [type(item) for item in outcome][:2] == [End, Fail]
    assert [item.host for item in outcome[1].failures] == ["n2"]  # type: ignore[union-attr]
    assert not job.members.is_finished


def test_recovery_time_starts_at_last_progress() -> None:
    """A silent host's ranks may train with the others until the launcher gives the host up."""
    job = Job()
    last_heartbeat = job.now
    job.decide(6.0)
    job.members.record_progress(40)
    lost = Failure("lost", "n2", None, last_heartbeat, headline="no word")
    job.members.node_lost("n2", lost)
    job.decide(0.2)
    job.now += 0.3
    job.settle()
    outcome = next(item for item in job.decide() if isinstance(item, Recovered))
    assert outcome.seconds == pytest.approx(0.5)


def test_regroup_excludes_ranks_with_closed_session() -> None:
    job = Job()
    job.members.close_session(0)
    job.kill(2)
    assert job.decide() == [Regroup(1, (1,), False)]
    job.settle([1])
    assert [type(item) for item in job.decide()] == [Recovered]  # no newcomer is started
    job.members.close_session(1)
    for slot in (0, 1):
        job.members.rank_finished(slot)
    assert job.decide() == []
    assert job.members.is_finished
    last = Job()
    last.members.close_session(0)
    last.members.close_session(1)
    last.kill(2)
    assert [type(item) for item in last.decide()] == [End, Fail]


def test_late_host_adds_ranks() -> None:
    job = Job({0: "n1", 1: "n2"})
    job.members.add_host("n3", (2,))
    assert job.decide() == [Start("n3", (2,))]
    job.members.newcomer_ready(2)
    assert job.decide(JOIN_WINDOW_S) == [Regroup(1, (0, 1, 2), True)]
    job.settle()
    assert job.decide() == [Joined((2,), pytest.approx(JOIN_WINDOW_S))]
    job.places[2] = "n3"
    job.members.record_step(1)
    job.kill(2)
    assert job.decide() == [Regroup(2, (0, 1), False), Start("n3", (2,))]


def test_spare_replaces_lost_host() -> None:
    """The job does not wait for the lost host, which may return as a spare."""
    job = Job({0: "n1", 1: "n2"})
    job.lose("n2")
    decisions = job.decide()
    assert Dial("n2") in decisions
    assert Regroup(1, (0,), False) in decisions
    job.members.add_host("n3", (1,))
    job.settle()
    outcome, *remaining_actions = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.hosts == ("n2",)
    assert remaining_actions == [Start("n3", (1,))]
    job.join(1)
    assert job.members.group == (0, 1)
    assert job.decide(99.0) == []


def test_ignores_start_failure_of_replaced_host() -> None:
    """The error may arrive late; a restart then would give two processes the same rank."""
    job = Job()
    job.start_again(1)
    job.lose("n2")
    job.decide()
    job.members.add_host("n4", (1,))
    assert job.decide() == [Start("n4", (1,))]
    job.members.start_failed("n2", (1,))
    assert job.decide(99.0) == []
    job.join(1)


def test_finished_rank_is_not_restarted_on_spare() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.lose("n2")
    assert job.decide() == [Dial("n2")]
    job.members.add_host("n4", (1,))
    assert job.decide(JOIN_WINDOW_S) == []


def test_added_host_ends_wait_for_min_hosts() -> None:
    job = Job({0: "n1", 1: "n2"}, min_hosts=2)
    job.lose("n2")
    assert Wait(("n2",)) in job.decide()
    job.members.add_host("n3", (2,))
    decisions = job.decide()
    assert Regroup(1, (0,), False) in decisions
    assert Start("n3", (2,)) in decisions


def test_killed_rank_is_replaced() -> None:
    job = Job()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle([0])
    assert job.decide(0.1) == []
    job.settle([2])
    (outcome,) = job.decide(0.1)
    assert isinstance(outcome, Recovered)
    assert (outcome.slots, outcome.num_survivors, round(outcome.seconds, 3)) == ((1,), 2, 0.1)
    job.members.newcomer_ready(1)
    assert job.decide(2.0) == [Regroup(2, (0, 2, 1), True)]
    job.settle()
    assert job.decide() == [Joined((1,), pytest.approx(2.2))]
    assert job.members.group == (0, 2, 1)
    assert job.members.is_stable
    assert job.members.can_recover


def test_replaced_rank_zero_joins_at_end_of_group() -> None:
    """The rank that writes checkpoints changes only if it is lost."""
    job = Job()
    job.kill(0)
    assert job.decide() == [Regroup(1, (1, 2), False), Start("n1", (0,))]
    job.settle()
    job.decide()
    job.join(0)
    assert job.members.group == (1, 2, 0)


def test_can_recover_requires_all_ranks() -> None:
    job = Job(recoverable=False)
    assert not job.members.can_recover
    for slot in (0, 1):
        job.members.set_recoverable(slot, True)
    assert not job.members.can_recover
    job.members.set_recoverable(2, True)
    assert job.members.can_recover
    job.members.set_recoverable(1, False)
    assert not job.members.can_recover


def test_second_loss_during_regroup() -> None:
    job = Job(HOSTS)
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2, 3, 4), False), Start("n1", (1,))]
    job.settle([0, 2])
    job.kill(3)
    assert job.decide(0.1) == [Regroup(2, (0, 2, 4), False), Start("n2", (3,))]
    job.members.regrouped(4, 1, None)  # a late message of the former group
    assert job.decide() == []
    job.settle()
    (outcome,) = job.decide(0.1)
    assert isinstance(outcome, Recovered)
    assert (outcome.slots, outcome.num_survivors, len(outcome.losses)) == ((1, 3), 3, 2)
    job.join(1, 3)
    assert job.members.group == (0, 2, 4, 1, 3)


def test_loss_during_join_restarts_newcomers() -> None:
    """It is not known whether the newcomers have the state, so they start again."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide() == [Regroup(2, (0, 2, 1), True)]
    job.settle([0])
    job.kill(2)
    assert job.decide() == [Kill("n2", (1,)), Regroup(3, (0,), False), Start("n3", (2,))]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]
    job.join(1, 2)
    assert job.members.group == (0, 1, 2)


def test_newcomer_that_dies_during_join_is_retried() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.decide()
    job.kill(1)
    assert job.decide() == [Regroup(3, (0, 2), False)]
    assert job.decide(NEWCOMER_DELAYS_S[1]) == [Start("n2", (1,))]


def test_abandons_newcomer_after_repeated_deaths() -> None:
    job = Job()
    job.start_again(1)
    for wait_s in NEWCOMER_DELAYS_S[1:]:
        job.kill(1)
        assert job.decide(wait_s / 2) == []
        assert job.decide(wait_s) == [Start("n2", (1,))]
    job.raises(1)
    assert [type(item) for item in job.decide(60)] == [RankAbandoned]
    assert job.decide(600) == []
    assert job.members.can_recover
    job.kill(2)
    assert job.decide()[0] == Regroup(2, (0,), False)
    job.lose("n2")
    job.members.server_up("n2")
    assert Start("n2", (1,)) in job.decide()  # its problem may be solved


def test_abandons_newcomer_that_hangs_after_joining() -> None:
    """The newcomer hangs before its first batch, and the others continue without it."""
    job = Job()
    job.members.record_step(5)
    job.start_again(1)
    for step, wait_s in enumerate([*NEWCOMER_DELAYS_S[1:], 60.0], 10):
        job.members.record_step(step)
        job.join(1)
        job.members.set_hung(1, "hung for longer than 30 s: is stuck")
        assert job.decide() == [Kill("n2", (1,))]
        job.kill(1)
        (group,) = job.decide()
        assert isinstance(group, Regroup)
        job.settle(step=step)
        job.members.record_step(step + 1)  # they continue without it
        recovered, *last = [*job.decide(), *job.decide(wait_s)]
        assert isinstance(recovered, Recovered)
    (abandoned,) = last
    assert isinstance(abandoned, RankAbandoned)
    assert abandoned.failure is not None
    assert abandoned.failure.headline.startswith("hung")


@pytest.mark.parametrize("outcome", ["by itself", "by those who are left"])
def test_newcomer_step_resets_retries(outcome: str) -> None:
    job = Job()
    job.start_again(1)
    for step in range(20):
        job.members.record_step(2 * step)
        job.join(1)
        if outcome == "by itself":
            job.members.record_step(2 * step + 1)
        job.kill(1)
        job.decide()
        job.settle(step=2 * step + 1)
        assert Start("n2", (1,)) in job.decide() or outcome == "by itself"


def test_abandons_newcomer_that_hangs_before_joining() -> None:
    job = Job()
    job.start_again(1)
    assert job.members.starting_newcomers() == [(1, "n2", job.now)]
    assert job.members.ungrouped == {1}
    for wait_s in NEWCOMER_DELAYS_S[1:]:
        job.members.set_hung(1, "hung before it joined: it sleeps")
        assert job.decide() == [Kill("n2", (1,))]
        assert job.members.starting_newcomers() == []
        job.kill(1)
        assert Start("n2", (1,)) in [*job.decide(), *job.decide(wait_s)]
    job.members.set_hung(1, "hung before it joined: it sleeps")
    job.decide()
    job.kill(1)
    (abandoned,) = job.decide()
    assert isinstance(abandoned, RankAbandoned)
    assert abandoned.failure is not None
    assert abandoned.failure.headline == "hung before it joined: it sleeps"


def test_is_newcomer_until_finished_or_stopped() -> None:
    """Ranks that were ended by the launcher do not count as newcomers."""
    job = Job()
    assert not job.members.is_newcomer(1)
    job.start_again(1)
    assert job.members.is_newcomer(1)
    job.members.rank_finished(1)
    assert not job.members.is_newcomer(1)
    for wait_s in NEWCOMER_DELAYS_S[1:]:
        assert job.decide(wait_s) == [Start("n2", (1,))]
        job.members.start_failed("n2", (1,), "no answer")
    (abandoned,) = job.decide(60)
    assert isinstance(abandoned, RankAbandoned)
    assert abandoned.failure is not None
    assert abandoned.failure.headline == "no answer"
    job = Job()
    job.start_again(1)
    job.members.stop()
    assert not job.members.is_newcomer(1)


def test_join_window_collects_newcomers() -> None:
    job = Job(HOSTS)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Regroup(1, (0, 1, 4), False)]
    job.settle()
    job.decide()
    job.members.server_up("n2")
    assert job.decide() == [Start("n2", (2, 3))]
    job.members.newcomer_ready(3)
    assert job.decide(JOIN_WINDOW_S / 2) == []
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(2, (0, 1, 4, 2, 3), True)]


def test_join_window_expires() -> None:
    job = Job(HOSTS)
    job.kill(2)
    job.kill(3)
    assert job.decide()[1:] == [Start("n2", (2, 3))]
    job.settle()
    job.decide()
    job.members.newcomer_ready(3)
    assert job.decide(JOIN_WINDOW_S / 2) == []
    assert job.decide(JOIN_WINDOW_S / 2) == [Regroup(2, (0, 1, 4, 3), True)]


def test_loss_of_all_ranks_fails_job() -> None:
    job = Job()
    for slot in job.places:
        job.kill(slot)
    actions = job.decide()
    assert [type(item) for item in actions] == [End, Fail]
    assert isinstance(actions[1], Fail)
    assert [failure.rank for failure in actions[1].failures] == [0, 1, 2]
    assert job.decide(10) == []
    assert not job.members.can_recover


def test_loss_of_all_members_fails_despite_starting_newcomer() -> None:
    job = Job()
    job.kill(1)
    job.decide()
    job.kill(0)
    job.kill(2)
    assert [type(item) for item in job.decide()] == [End, Fail]


# --- fork servers, nodes, the store


def test_dead_fork_server_is_prepared_and_ranks_restarted() -> None:
    job = Job(HOSTS)
    job.server_dies("n2")
    assert job.decide() == [Prepare("n2"), Regroup(1, (0, 1, 4), False)]
    job.settle()
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert [failure.kind for failure in outcome.losses] == ["forkserver"]
    assert job.decide(1) == []
    job.members.server_up("n2")
    assert job.decide() == [Start("n2", (2, 3))]
    job.join(2, 3)


def test_starts_rank_only_after_previous_process_ended() -> None:
    job = Job(HOSTS)
    died = Failure("forkserver", "n2", None, job.now)
    job.members.server_died("n2", died)
    job.decide()
    job.members.server_up("n2")
    job.kill(2)
    assert job.decide() == [Start("n2", (2,))]
    job.kill(3)
    assert job.decide() == [Start("n2", (3,))]


def test_store_moves_from_dead_fork_server() -> None:
    job = Job(HOSTS)
    job.server_dies("n1")
    assert job.decide() == [Prepare("n1"), Regroup(1, (2, 3, 4), False, "n2")]
    job.settle()
    job.decide()
    job.members.store_ended("n1")  # no longer used
    job.kill(4)
    assert job.decide() == [Regroup(2, (2, 3), False), Start("n3", (4,))]


def test_lost_node_is_redialed_and_rejoins() -> None:
    job = Job()
    job.lose("n1")
    assert job.decide() == [Dial("n1"), Regroup(1, (1, 2), False, "n2")]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]
    assert job.decide(300) == []
    job.members.server_up("n1")
    assert job.decide() == [Start("n1", (0,))]
    job.join(0)
    job.lose("n1")
    assert job.decide() == [Dial("n1"), Regroup(3, (1, 2), False)]


def test_node_loss_restarts_its_starting_newcomers() -> None:
    job = Job()
    job.start_again(1)
    job.lose("n2")
    assert job.decide() == [Dial("n2")]
    job.members.server_up("n2")
    assert job.decide() == [Start("n2", (1,))]


def test_does_not_dial_node_without_redial() -> None:
    job = Job()
    job.lose("n2", redials=False)
    assert job.decide() == [Regroup(1, (0, 2), False)]


def test_store_loss_restarts_newcomers() -> None:
    """Newcomers need the store to read the start parameters of the others."""
    job = Job()
    job.kill(1)
    job.decide()
    job.lose("n1")
    assert job.decide() == [Kill("n2", (1,)), Dial("n1"), Regroup(2, (2,), False, "n3")]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]


def test_regroup_replaces_ended_store() -> None:
    job = Job()
    job.members.store_ended("n1")
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False, "n1"), Start("n2", (1,))]


def test_store_end_during_regroup() -> None:
    job = Job()
    job.kill(1)
    job.decide()
    job.settle([0])
    job.members.store_ended("n1")
    assert job.decide() == [Kill("n2", (1,)), Regroup(2, (0, 2), False, "n1")]


def test_replaces_ended_store_before_newcomers_start() -> None:
    job = Job()
    job.lose("n2")
    job.decide()
    job.settle()
    job.decide()
    job.members.store_ended("n1")
    job.members.server_up("n2")
    assert job.decide() == [Regroup(2, (0, 2), True, "n1"), Start("n2", (1,))]


# --- too few nodes


def test_waits_for_lost_node_below_min_hosts() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Wait(("n2",))]
    job.members.interrupt_rank(0)
    assert job.decide(30) == []
    job.members.server_up("n2")
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]
    job.join(1)


def test_node_wait_timeout_saves_and_stops() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    assert job.decide(60) == [Regroup(1, (0, 2), False)]
    job.settle()
    actions = job.decide()
    assert [type(item) for item in actions] == [Recovered, Stop]
    assert isinstance(actions[0], Recovered)
    assert actions[0].is_final
    assert isinstance(actions[1], Stop)
    assert actions[1].loss.host == "n2"


def test_node_wait_timeout_blames_missing_node() -> None:
    """The missing node is blamed, not the rank that was lost last."""
    job = Job(min_hosts=3, timeout_s=60)
    job.start_again(1)
    job.lose("n2")
    assert job.decide(1) == [Dial("n2")]
    job.kill(2)
    paused_group = Regroup(2, (0,), False, is_paused=True)
    assert job.decide(1) == [Wait(("n2",)), paused_group, Start("n3", (2,))]
    job.settle()
    assert job.decide(60) == [Regroup(3, (0,), False)]
    job.settle()
    stop = job.decide()[-1]
    assert isinstance(stop, Stop)
    assert (stop.loss.host, stop.loss.kind) == ("n2", "lost")


def test_stops_even_if_ranks_do_not_regroup() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.decide(60)
    assert job.decide(STOP_TIMEOUT_S / 2) == []
    assert [type(item) for item in job.decide(STOP_TIMEOUT_S)] == [Stop]


def test_does_not_wait_for_node_without_redial() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2", redials=False)
    assert job.decide() == [Wait(("n2",)), Regroup(1, (0, 2), False)]


def test_abandon_host_ends_node_wait() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Wait(("n2",))]
    job.members.abandon_host("n2")
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered, Stop]


def test_dead_fork_server_does_not_count_as_lost_node() -> None:
    job = Job(min_hosts=3)
    job.server_dies("n2")
    assert job.decide() == [Prepare("n2"), Regroup(1, (0, 2), False)]


def test_stop_during_node_wait_regroups_to_save() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.members.stop()
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.is_final


def test_rank_loss_during_node_wait() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.kill(2)
    assert job.decide(1) == [Regroup(1, (0,), False, is_paused=True), Start("n3", (2,))]
    job.settle()
    assert job.decide(30) == []
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(2, (0, 2), True, is_paused=True)]
    job.settle()
    (joined,) = job.decide()
    assert isinstance(joined, Joined)
    assert job.members.is_waiting
    job.kill(0)  # the only rank with the state
    assert job.decide()[0] == Regroup(3, (2,), False, is_paused=True)
    job.settle()
    job.members.server_up("n2")
    assert job.decide()[0] == Regroup(4, (2,), False)
    job.settle()
    (outcome,) = (item for item in job.decide() if isinstance(item, Recovered))
    assert (outcome.slots, outcome.num_survivors) == ((0, 1, 2), 0)


def test_node_wait_timeout_includes_joined_newcomer() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.kill(2)
    job.decide()
    job.settle()
    job.members.newcomer_ready(2)
    job.decide()
    job.settle()
    job.decide()
    assert job.decide(60) == [Regroup(3, (0, 2), False)]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered, Stop]


# --- failures of the script


def test_exception_without_restarts_fails_job() -> None:
    job = Job()
    job.raises(1)
    assert job.decide(PROGRAM_FAILURE_WAIT_S / 2) == []
    (end, fail) = job.decide(PROGRAM_FAILURE_WAIT_S)
    assert isinstance(end, End)
    assert isinstance(fail, Fail)
    assert [failure.headline for failure in fail.failures] == [BOOM]


def test_exception_uses_restart_budget() -> None:
    job = Job(policy=RetryPolicy(1))
    job.members.record_step(7)
    job.raises(1)
    assert job.decide(PROGRAM_FAILURE_WAIT_S) == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle(step=8)
    job.decide()
    job.join(1)
    job.members.record_step(20)
    job.raises(2, "ValueError: other")
    assert [type(item) for item in job.decide(PROGRAM_FAILURE_WAIT_S)] == [End, Fail]


def test_repeated_exception_at_same_step_fails_job() -> None:
    policy = RetryPolicy(9)
    judge = Mock(side_effect=policy.judge_failure)
    policy.judge_failure = judge  # type: ignore[method-assign]
    job = Job(policy=policy)
    job.members.record_step(8)
    job.raises(1)
    assert [type(item) for item in job.decide(PROGRAM_FAILURE_WAIT_S)] == [Regroup, Start]
    job.settle(step=8)
    job.raises(2)
    assert [type(item) for item in job.decide(PROGRAM_FAILURE_WAIT_S)] == [Recovered, End, Fail]
    assert [call.kwargs["step"] for call in judge.call_args_list] == [8, 8]


def test_exception_on_all_ranks_fails_job() -> None:
    job = Job(policy=RetryPolicy(9))
    for slot in job.places:
        job.raises(slot)
    actions = job.decide()
    assert [type(item) for item in actions] == [End, Fail]


def test_secondary_failure_is_replaced_with_lost_rank() -> None:
    job = Job()
    job.raises(2, RESET)
    job.now += 0.2
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0,), False), Start("n2", (1,)), Start("n3", (2,))]


def test_secondary_failure_without_cause_fails_job() -> None:
    job = Job()
    job.raises(2, RESET)
    assert job.decide(INTERRUPT_TIMEOUT_S / 2) == []
    assert [type(item) for item in job.decide(INTERRUPT_TIMEOUT_S)] == [End, Fail]


def test_kills_failed_rank_that_does_not_exit() -> None:
    job = Job(policy=RetryPolicy(9))
    job.raises(1, ends=False)
    assert job.decide(PROGRAM_FAILURE_WAIT_S) == [Regroup(1, (0, 2), False)]
    assert job.decide(EXIT_GRACE_S) == [Kill("n2", (1,))]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]


def test_repeated_signals_without_progress_fail_job() -> None:
    job = Job()
    job.members.record_step(5)
    for _ in range(MAX_STRIKES - 1):
        job.kill(1)
        job.decide()
        job.settle(step=5)
        job.decide()
        job.decide(max(NEWCOMER_DELAYS_S))
        job.join(1)
    job.kill(1)
    assert [type(item) for item in job.decide()] == [End, Fail]


def test_repeated_crash_at_same_step_fails_job() -> None:
    """Simultaneous crashes of two ranks count once, and a killed rank does not count."""
    job = Job({0: "n1", 1: "n2", 2: "n3", 3: "n4"})
    job.members.record_step(5)

    def crash(slot: int) -> None:
        failure = replace(job.failure(slot, "signal", "crashed (SIGSEGV)"), signal=11)
        job.members.rank_lost(slot, failure)

    crash(0)
    crash(1)
    assert [type(item) for item in job.decide()] == [Regroup, Start, Start]
    job.settle(step=5)
    job.kill(2)
    job.decide()
    job.settle(step=5)
    crash(3)
    outcome = job.decide()
    assert [type(item) for item in outcome][-2:] == [End, Fail]
    assert [item.host for item in outcome[-1].failures] == ["n2"]  # type: ignore[union-attr]
    assert "same step (5), on the same data" in outcome[-1].reason  # type: ignore[union-attr]


def test_recovers_from_any_number_of_signals_with_progress() -> None:
    job = Job()
    for step in range(50):
        job.members.record_step(step)
        job.kill(1)
        assert [type(item) for item in job.decide()] == [Regroup, Start]
        job.settle(step=step)
        job.decide()
        job.join(1)


# --- interrupted ranks


def test_error_without_loss_is_retried_once() -> None:
    job = Job()
    job.members.record_step(3)
    job.members.interrupt_rank(0)
    assert job.decide(INTERRUPT_TIMEOUT_S / 2) == []
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    job.settle(step=3)
    assert job.decide() == []
    job.members.interrupt_rank(1)
    assert [type(item) for item in job.decide(INTERRUPT_TIMEOUT_S)] == [End]
    assert job.decide(INTERRUPT_TIMEOUT_S) == []


def test_retry_group_only_once_per_step() -> None:
    job = Job()
    job.members.record_step(7)
    assert job.members.retry_group()
    assert job.decide() == [Regroup(1, (0, 1, 2), False)]
    assert not job.members.retry_group()
    job.settle(step=7)
    assert job.decide() == []
    assert not job.members.retry_group()
    job.members.record_step(8)
    assert job.members.retry_group()
    assert job.decide() == [Regroup(2, (0, 1, 2), False)]
    job.settle(step=8)
    job.members.record_step(20)
    job.members.rank_finished(1)
    assert not job.members.retry_group()


def test_interrupt_before_loss_is_known() -> None:
    job = Job()
    job.members.interrupt_rank(0)
    assert job.decide(0.1) == []
    job.kill(1)
    assert job.decide()[0] == Regroup(1, (0, 2), False)
    job.members.interrupt_rank(2)  # a late report of the former group
    job.settle()
    assert [type(item) for item in job.decide(INTERRUPT_TIMEOUT_S * 2)] == [Recovered]


# --- blocked links


def report_unreachable(job: Job, *pairs: tuple[int, str]) -> None:
    """Lets ranks report hosts that they cannot reach in the current group."""
    for slot, host in pairs:
        number = job.members._generation.number
        job.members.interrupt_rank(slot, unreachable_host=host, generation=number)


def test_blocked_link_excludes_host_after_retry() -> None:
    """The ranks first try again together, because the link may work again."""
    job = Job()
    job.members.record_step(3)
    report_unreachable(job, (1, "n3"), (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    assert job.members.is_forming(1.0)
    job.members.interrupt_rank(0, generation=0)  # a late message of the former group
    assert job.decide(INTERRUPT_TIMEOUT_S) == []
    report_unreachable(job, (1, ""), (2, ""), (0, ""))
    cause = "n3 and n2 cannot reach each other"
    assert job.decide(INTERRUPT_TIMEOUT_S) == [
        ExcludeHost("n3", cause, EXCLUSION_S), Dial("n3", EXCLUSION_S), Regroup(2, (0, 1), False)
    ]  # fmt: skip
    job.settle(step=3)
    assert job.members.is_forming(1.0)  # no time for a step yet
    job.now += 1.0
    assert not job.members.is_forming(1.0)
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert [failure.headline for failure in outcome.losses] == [cause]
    assert outcome.slots == (2,)


def test_recovery_time_includes_interrupt_timeouts() -> None:
    job = Job()
    job.members.record_progress(3)
    job.now += 14.0
    job.members.record_step(3)  # the step is also in the error
    report_unreachable(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    report_unreachable(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=3)
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.seconds == pytest.approx(14.0 + 2 * INTERRUPT_TIMEOUT_S)


def test_separate_excludes_host_without_retry() -> None:
    job = Job()
    job.members.record_progress(3)
    job.now += 7.0
    assert job.members.separate([("n1", "n2")], job.now - 7.0)
    cause = "n2 and n1 cannot reach each other"
    assert job.decide() == [
        ExcludeHost("n2", cause, EXCLUSION_S), Dial("n2", EXCLUSION_S), Regroup(1, (0, 2), False)
    ]  # fmt: skip
    job.settle(step=3)
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.seconds == pytest.approx(7.0)
    assert not job.members.separate([("n1", "n2")], job.now)  # already excluded


def test_separate_excludes_isolated_host() -> None:
    job = Job()
    assert job.members.separate([("n1", "n2"), ("n2", "n3")], job.now)
    assert [item.host for item in job.decide() if isinstance(item, ExcludeHost)] == ["n2"]


def test_separate_does_nothing_during_regroup() -> None:
    lines = [("n1", "n2")]
    job = Job()
    job.kill(2)
    assert not job.members.separate(lines, job.now)  # a new group is due
    job.decide()
    assert not job.members.separate(lines, job.now)  # the new group is not complete yet
    job.members.group_gathered(0, 1)
    assert job.members.separate(lines, job.now)  # the new group cannot connect
    job = Job()
    job.members.rank_finished(2)
    assert not job.members.separate(lines, job.now)  # the job is about to end


def test_connect_timeout_excludes_unreachable_host() -> None:
    """gloo would give up only after minutes; time in which a rank still computes does not count."""
    job = Job()
    job.members.record_step(3)
    report_unreachable(job, (1, "n3"), (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    assert job.decide(2 * CONNECT_TIMEOUT_S) == []
    job.members.group_gathered(0, 1)
    job.members.group_connected(0, 3)
    assert job.decide(CONNECT_TIMEOUT_S / 2) == []
    assert [type(item) for item in job.decide(CONNECT_TIMEOUT_S / 2)] == [
        ExcludeHost,
        Dial,
        Regroup,
    ]


def test_connect_timeout_spares_newcomer_in_state_transfer() -> None:
    job = job_with_returning_host()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(3, (0, 1, 2), True)]
    job.members.group_gathered(0, 3)
    job.members.group_connected(0, 3)
    cause = "n3 and n2 cannot reach each other"
    assert job.decide(CONNECT_TIMEOUT_S)[0] == ExcludeHost("n3", cause, 2 * EXCLUSION_S)
    job.settle()
    job.decide()
    job.members.server_up("n3")
    job.decide()
    job.members.newcomer_ready(2)
    job.decide()
    job.members.group_gathered(0, 5)
    for slot in job.places:
        job.members.group_connected(slot, 3)
    assert job.decide(99 * CONNECT_TIMEOUT_S) == []  # sending the state of a large model


def job_with_returning_host() -> Job:
    job = Job()
    job.members.record_step(3)
    report_unreachable(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    report_unreachable(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=3)
    job.decide()
    job.members.server_up("n3")
    assert job.decide() == [Start("n3", (2,))]
    return job


def test_excluded_host_rejoins() -> None:
    job = job_with_returning_host()
    job.join(2)
    assert job.members.group == (0, 1, 2)


def test_repeated_exclusion_doubles() -> None:
    """The newcomer's host is excluded, because it has no progress to lose."""
    job = job_with_returning_host()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(3, (0, 1, 2), True)]
    report_unreachable(job, (0, "n3"), (1, ""))
    cause = "n3 and n1 cannot reach each other"
    assert job.decide(INTERRUPT_TIMEOUT_S) == [
        ExcludeHost("n3", cause, 2 * EXCLUSION_S), Dial("n3", 2 * EXCLUSION_S),
        Regroup(4, (0, 1), False),
    ]  # fmt: skip
    job.settle()
    assert job.decide() == []


def test_failed_group_kills_newcomers() -> None:
    job = job_with_returning_host()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    job.decide()
    report_unreachable(job, (0, ""), (1, ""))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Kill("n3", (2,)), Regroup(4, (0, 1), False)]


@pytest.mark.parametrize(
    ("pairs", "removed"),
    [
        ([(0, "n2")], ["n2"]),  # keeps the rank that saves
        ([(1, "n1")], ["n2"]),
        ([(0, "n2"), (2, "n1")], ["n1"]),  # unreachable for most
        ([(1, "n1"), (1, "n3")], ["n2"]),
        ([(0, "n3"), (0, "n4"), (1, "n3"), (1, "n4")], ["n4", "n3"]),  # two halves of the job
    ],
)
def test_selects_host_to_exclude(pairs: list[tuple[int, str]], removed: list[str]) -> None:
    job = Job({0: "n1", 1: "n2", 2: "n3", 3: "n4"})
    job.members.record_step(3)
    report_unreachable(job, *pairs)
    job.decide(INTERRUPT_TIMEOUT_S)
    report_unreachable(job, *pairs)
    assert [
        item.host for item in job.decide(INTERRUPT_TIMEOUT_S) if isinstance(item, ExcludeHost)
    ] == removed


def test_exclusion_below_min_hosts_waits() -> None:
    job = Job(min_hosts=3)
    report_unreachable(job, (1, "n3"))
    job.members.record_step(3)
    job.decide(INTERRUPT_TIMEOUT_S)
    report_unreachable(job, (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S)[1:] == [Dial("n3", EXCLUSION_S), Wait(("n3",))]


def test_unreachable_reports_expire() -> None:
    job = Job()
    job.members.record_step(3)
    report_unreachable(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=9)
    for _ in range(2):
        report_unreachable(job, (0, ""))
        actions = job.decide(INTERRUPT_TIMEOUT_S)
    assert [type(item) for item in actions] == [End]


# --- frozen ranks


def test_frozen_rank_is_killed_and_replaced() -> None:
    job = Job()
    job.members.set_frozen(1, stopped=True)
    job.members.set_frozen(1, stopped=False)
    assert job.decide() == []
    job.members.set_frozen(1, stopped=True)
    assert job.decide() == [Kill("n2", (1,))]
    assert job.decide(1) == []
    job.kill(1)
    regroup, start = job.decide()
    assert (regroup, start) == (Regroup(1, (0, 2), False), Start("n2", (1,)))
    job.settle()
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert "SIGSTOP" in outcome.losses[0].headline


def test_kill_is_repeated_until_rank_exits() -> None:
    """The request may be lost, and no newcomer starts while the former process lives."""
    job = Job()
    job.raises(1, RESET, ends=False)
    job.kill(2)
    assert job.decide() == [Regroup(1, (0,), False), Start("n3", (2,))]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]
    assert job.decide(EXIT_GRACE_S) == [Kill("n2", (1,))]
    assert job.decide() == job.decide(KILL_RETRY_S / 2) == []
    assert job.decide(KILL_RETRY_S / 2) == [Kill("n2", (1,))]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]
    assert job.decide(KILL_RETRY_S) == []


def test_hung_rank_is_killed_and_replaced() -> None:
    job = Job()
    job.members.set_hung(1, "hung for longer than 30 s: is stuck")
    assert job.decide() == [Kill("n2", (1,))]
    job.kill(1)
    job.decide()
    job.settle()
    (outcome,) = job.decide()
    assert isinstance(outcome, Recovered)
    assert outcome.losses[0].headline == "hung for longer than 30 s: is stuck"


def test_hung_survivor_is_killed_and_excluded() -> None:
    job = Job()
    job.kill(2)
    assert job.decide()[0] == Regroup(1, (0, 1), planned=False)
    job.members.set_hung(0, "stuck")
    assert job.decide() == [Kill("n1", (0,))]
    job.kill(0)
    assert job.decide()[0] == Regroup(2, (1,), planned=False)


def test_deadlock_of_all_survivors_fails_job() -> None:
    job = Job()
    job.kill(2)
    assert job.decide()[0] == Regroup(1, (0, 1), planned=False)
    job.members.set_hung(0, "stuck")
    job.members.set_hung(1, "stuck")
    assert job.decide() == []
    assert job.decide(DEADLOCK_TIMEOUT_S / 2) == []
    job.members.regrouped(1, 1, None)  # rank 1 has continued
    assert job.decide() == [Kill("n1", (0,))]
    job = Job()
    job.kill(2)
    job.decide()
    job.members.set_hung(0, "stuck")
    job.members.set_hung(1, "stuck")
    job.decide()
    assert [type(item) for item in job.decide(DEADLOCK_TIMEOUT_S)] == [Kill, Kill]
    job.kill(0)
    job.kill(1)
    ended = job.decide()
    assert [type(item) for item in ended] == [End, Fail]
    assert isinstance(ended[1], Fail)
    assert {item.headline for item in ended[1].failures[-2:]} == {"stuck"}


def connecting() -> Job:
    """Returns a job that loses a newcomer while the ranks connect the group that it joins."""
    job = Job()
    job.look_s = 1e-6  # makes immediate actions due at the next decision
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == [Regroup(2, (0, 2, 1), True)]
    for slot in job.places:
        job.members.rank_arrived(slot)
        job.members.group_gathered(slot, 2)
    job.kill(1)
    assert job.decide()[0] == Regroup(3, (0, 2), False)
    return job


def test_kills_ranks_stuck_in_communicator() -> None:
    job = connecting()
    assert not any(isinstance(item, Kill) for item in job.decide(CONNECT_TIMEOUT_S - 1))
    kills = [Kill("n1", (0,)), Kill("n3", (2,))]
    assert [item for item in job.decide(1) if isinstance(item, Kill)] == kills
    job.kill(0)
    job.kill(2)
    (failed,) = (item for item in job.decide() if isinstance(item, Fail))
    cause = f"{UNFREED}: rank 1 was lost then; ranks 0, 2 were not freed"
    assert {(item.kind, item.headline) for item in failed.failures} == {("hang", cause)}


def test_freed_rank_continues_without_stuck_ranks() -> None:
    job = connecting()
    job.members.rank_arrived(2)
    actions = job.decide(CONNECT_TIMEOUT_S)
    assert [item for item in actions if isinstance(item, Kill)] == [Kill("n1", (0,))]
    job.kill(0)
    assert job.decide()[0] == Regroup(4, (2,), False)
    job = connecting()
    for slot in (0, 2):
        job.members.rank_arrived(slot)  # and one computes for long before the other arrives
    assert not any(isinstance(item, Kill) for item in job.decide(99 * CONNECT_TIMEOUT_S))


def test_frozen_rank_is_not_killed_if_job_cannot_recover() -> None:
    job = Job(recoverable=False)
    job.members.set_frozen(1, stopped=True)
    assert job.decide() == []


def test_hang_of_only_rank_with_state_fails_job() -> None:
    """No other rank has the state, so the attempt fails instead of waiting forever."""
    job = Job()
    job.members.set_frozen(0, True)
    job.kill(1)
    job.kill(2)
    job.decide()
    job.members.newcomer_ready(1)
    assert job.decide(60.0) == []  # it may thaw
    job.members.set_hung(0, "hung for longer than 30 s")
    assert Kill("n1", (0,)) in job.decide()
    job.kill(0)
    (failed,) = [item for item in job.decide() if isinstance(item, Fail)]
    assert "hung for longer" in " ".join(item.headline for item in failed.failures)


def test_no_kill_if_all_ranks_are_frozen() -> None:
    job = Job()
    for slot in job.places:
        job.members.set_frozen(slot, stopped=True)
    assert job.decide() == []


# --- the end


def test_normal_end() -> None:
    job = Job()
    for slot in job.places:
        job.members.rank_finished(slot)
    assert job.decide() == []
    assert not job.members.is_pending


def test_end_of_training_kills_newcomer() -> None:
    job = Job()
    job.start_again(1)
    job.members.rank_finished(0)
    assert job.decide() == []
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == []
    job.members.rank_finished(2)
    assert job.decide() == [Kill("n2", (1,))]


def test_loss_after_rank_zero_finished_is_ignored() -> None:
    job = Job()
    job.members.rank_finished(0)
    job.members.rank_finished(2)
    job.kill(1)
    assert not any(isinstance(item, Fail) for item in job.decide())
    assert not job.members.is_pending


def test_loss_of_saving_rank_fails_job() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.members.rank_finished(2)
    job.kill(0)
    assert [type(item) for item in job.decide()] == [End, Fail]


def test_interrupt_after_early_finish_ends_attempt() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.members.interrupt_rank(0)
    assert [type(item) for item in job.decide(INTERRUPT_TIMEOUT_S)] == [End]


# --- ranks that are asked to save and stop


def save_and_exit(job: Job, *slots: int, raises: bool = True) -> None:
    """Lets ranks save and exit: scripts raise an exception, recipes have a special exit status."""
    for slot in slots:
        if raises:
            text = "Stopped: stopped on SIGTERM after step 7"
            job.members.rank_lost(slot, job.failure(slot, "exception", text))
        code = 1 if raises else SAVED_EXIT_CODE
        ended = replace(job.failure(slot, "exit", f"exit status {code}"), code=code)
        job.members.rank_lost(slot, ended)


@pytest.mark.parametrize("raises", [True, False])
def test_stopped_ranks_are_not_lost(raises: bool) -> None:
    job = Job()
    job.members.stop()
    save_and_exit(job, 1, 2, raises=raises)
    assert job.decide() == []
    assert job.members.is_pending
    save_and_exit(job, 0, raises=raises)
    assert job.decide() == []
    assert not job.members.is_pending
    assert job.members.is_finished


@pytest.mark.parametrize("loss_time", ["before the stop", "at the stop", "after the stop"])
def test_survivors_save_after_loss_around_stop(loss_time: str) -> None:
    """No host is reconnected, and no rank is started or waited for."""
    job = Job(min_hosts=3, timeout_s=60)
    if loss_time == "before the stop":
        job.lose("n2")
        assert job.decide() == [Dial("n2"), Wait(("n2",))]
    if loss_time == "at the stop":
        job.lose("n2")
    job.members.stop()
    if loss_time == "after the stop":
        assert job.decide(2.0) == []
        job.lose("n2")
    assert job.decide() == [Regroup(1, (0, 2), False)]
    assert job.members.can_recover
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]
    job.members.server_up("n2")
    assert job.decide(99.0) == []
    save_and_exit(job, 2, 0)
    assert job.decide() == []
    assert job.members.is_finished


def test_stop_completes_pending_regroup() -> None:
    job = Job()
    job.kill(1)
    assert Regroup(1, (0, 2), False) in job.decide()
    job.members.stop()
    assert job.decide() == [Kill("n2", (1,))]  # the newcomer
    job.kill(1)
    job.settle()
    (outcome,) = job.decide()
    assert outcome == Recovered((job.failure(1),), (1,), 2, 0.0, is_final=True)


def test_second_loss_during_stop() -> None:
    job = Job()
    job.members.stop()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.kill(0)
    assert job.decide() == [Regroup(2, (2,), False)]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered]


def test_failure_during_stop_regroups_to_save() -> None:
    job = Job()
    job.raises(1)
    job.members.stop()
    job.raises(2)
    assert job.decide() == [Regroup(1, (0,), False)]


def test_regroups_if_member_exits_during_stop() -> None:
    job = Job()
    job.members.stop()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    save_and_exit(job, 0)
    assert job.decide() == [Regroup(2, (2,), False)]


def test_stop_kills_ready_newcomer() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.members.stop()
    assert job.decide(JOIN_WINDOW_S) == [Kill("n2", (1,))]


def test_joining_newcomer_is_killed_after_survivors_save() -> None:
    """The other ranks have stopped without admitting the newcomer."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == [Regroup(2, (0, 2, 1), True)]
    job.members.stop()
    assert job.decide() == []
    save_and_exit(job, 2)
    assert job.decide() == []
    save_and_exit(job, 0)
    assert Kill("n2", (1,)) in job.decide()
    assert not job.members.is_pending


def test_stop_kills_newcomer_after_state_transfer_timeout() -> None:
    """The state may be large and time is limited by --grace, so the others save without it."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert [type(item) for item in job.decide(JOIN_WINDOW_S)] == [Regroup]
    job.members.stop()
    assert job.decide() == []  # the transfer may end soon
    assert job.decide(STATE_TRANSFER_S) == [Kill("n2", (1,))]
    assert job.decide(0.1) == []
    job.kill(1)
    assert job.decide() == [Regroup(3, (0, 2), False)]


def test_loss_of_all_ranks_during_stop_fails_job() -> None:
    job = Job({0: "n1", 1: "n2"})
    job.members.stop()
    job.kill(0)
    job.kill(1)
    assert [type(item) for item in job.decide()] == [End, Fail]
    assert not job.members.is_pending


def test_stop_after_failure_is_ignored() -> None:
    job = Job({0: "n1"})
    job.raises(0)
    assert [type(item) for item in job.decide(PROGRAM_FAILURE_WAIT_S)] == [End, Fail]
    job.members.stop()
    assert job.decide(10) == []
    assert not job.members.can_recover


# --- closed admission

ADMISSION_CLOSED = "the script is in its second session.epochs"


def test_closed_admission_prevents_replacement() -> None:
    job = Job()
    for slot in job.places:
        job.members.close_admission(slot, ADMISSION_CLOSED)
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered, RanksNotReplaced]
    job.lose("n2")
    job.members.server_up("n2")
    assert job.decide(60) == []
    job.kill(2)
    assert job.decide() == [Regroup(2, (0,), False)]
    job.settle()
    assert job.decide()[-1] == RanksNotReplaced((2,), ADMISSION_CLOSED)
    assert job.members.can_recover


@pytest.mark.parametrize("ready", [False, True])
def test_close_admission_kills_newcomers(ready: bool) -> None:
    job = Job(HOSTS)
    job.kill(1)
    job.start_again(3)
    if ready:
        job.members.newcomer_ready(1)  # it waits for the other
    assert job.decide() == []
    job.members.close_admission(0, ADMISSION_CLOSED)
    ended = [Kill("n1", (1,)), Kill("n2", (3,))]
    assert sorted(map(str, job.decide())) == sorted(
        map(str, [*ended, RanksNotReplaced((1, 3), ADMISSION_CLOSED)])
    )
    job.kill(1)
    job.kill(3)
    assert job.decide(KILL_RETRY_S + 1) == []
    assert job.members.is_stable


def test_close_admission_during_join_regroups_without_newcomer() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide() == [Regroup(2, (0, 2, 1), True)]
    job.members.close_admission(2, ADMISSION_CLOSED)
    assert job.decide() == [Kill("n2", (1,)), Regroup(3, (0, 2), False)]
    job.kill(1)
    job.settle()
    assert job.decide() == [RanksNotReplaced((1,), ADMISSION_CLOSED)]
    assert job.members.group == (0, 2)


def test_joined_newcomer_survives_close_admission() -> None:
    """The rank that closes admission is already in a group with the newcomer."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.decide()
    job.settle([0])
    job.members.close_admission(0, ADMISSION_CLOSED)
    assert job.decide() == []
    job.settle([1, 2])
    assert [type(item) for item in job.decide()] == [Joined]
    assert job.members.group == (0, 2, 1)


def test_does_not_wait_for_node_after_close_admission() -> None:
    job = Job(min_hosts=3)
    job.members.close_admission(0, ADMISSION_CLOSED)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(item) for item in job.decide()] == [Recovered, Stop]


# --- random events


@each_case("seed", range(60))
def test_random_event_order_terminates(seed: int) -> None:
    """Each generation has only live members with the state, and lost ranks return in the end."""
    rng = random.Random(seed)
    job = Job(dict(HOSTS), min_hosts=3 if seed % 3 else 1, timeout_s=1e6)
    alive = dict.fromkeys(HOSTS, True)
    failed = False

    def apply_actions(actions: Sequence[Action]) -> None:
        nonlocal failed
        for action in actions:
            if isinstance(action, (Fail, Stop)):
                failed = True
            elif isinstance(action, Regroup) and not action.planned:
                assert all(alive[slot] for slot in action.members)
                assert action.is_paused <= job.members.is_waiting
            elif isinstance(action, Start):
                assert not any(alive[slot] for slot in action.slots)
                alive.update(dict.fromkeys(action.slots, True))
            elif isinstance(action, Kill):
                for slot in action.slots:
                    alive[slot] = False
                    job.kill(slot)
            elif isinstance(action, ExcludeHost):
                alive.update({slot: False for slot in HOSTS if HOSTS[slot] == action.host})

    def random_event(calm: bool) -> None:
        slot = rng.choice(list(HOSTS))
        host = HOSTS[slot]
        there = job.members._hosts[host].state
        event_kind = rng.randrange(4) if calm else rng.randrange(9 if seed % 2 else 8)
        if event_kind == 0 and alive[slot]:
            job.members.newcomer_ready(slot)
        elif event_kind in (1, 2) and alive[slot]:
            job.members.record_step(job.members._step + 1)
            job.members.regrouped(slot, job.members._generation.number, None)
        elif event_kind == 3 and there != "up":
            job.members.server_up(host)
        elif event_kind == 4 and alive[slot]:
            alive[slot] = False
            job.kill(slot)
        elif event_kind == 5 and alive[slot]:
            unreachable = rng.choice(["", *HOSTS.values()])
            job.members.interrupt_rank(slot, unreachable_host=unreachable)
        elif event_kind == 6:
            removed = [slot for slot in HOSTS if HOSTS[slot] == host]
            alive.update(dict.fromkeys(removed, False))
            if rng.random() < 0.5:
                job.lose(host)
            elif there == "up":
                job.server_dies(host)
        elif event_kind == 7:
            job.members.store_ended(host)
        elif event_kind == 8 and alive[slot]:
            job.members.close_admission(slot, ADMISSION_CLOSED)

    for _ in range(rng.randrange(5, 40)):
        random_event(calm=False)
        apply_actions(job.decide(rng.random() * 0.2))
    for _ in range(3000):
        in_progress = job.members._in_state("lost", "starting", "ready", "joining")
        if failed or (job.members.is_stable and not in_progress):
            break
        random_event(calm=True)
        apply_actions(job.decide(0.1))
    else:
        raise AssertionError(f"no end: {job.members._ranks} {job.members._hosts}")
    if not failed:
        there = {item.number for item in job.members._in_state("in")}
        assert set(job.members.group) == there
        abandoned = {item.number for item in job.members._in_state("left out")}
        assert there | abandoned == set(HOSTS)


def test_interrupt_timeout_exceeds_detection_time() -> None:
    """A silent host is detected before an interrupted rank learns that no host was lost."""
    assert INTERRUPT_TIMEOUT_S > 2.5
