"""What is decided when ranks and nodes are lost and come back."""

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
    """The ranks of a job, and a clock."""

    def __init__(self, places: dict[int, str] | None = None, able: bool = True,
                 **how: object) -> None:  # fmt: skip
        self.places = places or {0: "n1", 1: "n2", 2: "n3"}
        self.members = Members(self.places, clock=self.read_clock, **how)  # type: ignore[arg-type]
        self.now, self.look_s = 100.0, 0.0
        if able:
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
        """These members, or all, say that they train in the new group."""
        number = self.members._generation.number
        for slot in self.members.group if slots is None else slots:
            self.members.regrouped(slot, number, step)

    def start_again(self, slot: int) -> None:
        """A rank is killed, the others train on without it, and a newcomer is started."""
        self.kill(slot)
        self.decide()
        self.settle()
        self.decide()

    def join(self, *slots: int) -> None:
        """Newcomers of these slots, already started, are ready and taken in."""
        for slot in slots:
            self.members.newcomer_ready(slot)
        assert [type(one) for one in self.decide(JOIN_WINDOW_S)] == [Regroup]
        self.settle()
        assert [type(one) for one in self.decide()] == [Joined]


@pytest.mark.parametrize("why", [NEWCOMER_MISMATCH, NEWCOMER_DIVERGED])
def test_a_newcomer_that_does_not_do_as_the_others_ends_alone(why: str) -> None:
    """It says so before its first batch, or after its first steps with the others."""
    job = Job()
    job.start_again(2)
    job.join(2)
    job.raises(2, f"JobError: {why}: after epochs they had told each other less")
    assert job.decide() == [Regroup(3, (0, 1), False)]
    job.settle()
    (told, never) = job.decide()
    assert isinstance(told, Recovered)
    assert never == RanksNotReplaced((2,), why)
    assert job.decide(600.0) == []


def test_where_ranks_wait_apart_those_that_came_later_are_at_fault() -> None:
    """Its loop counts from its own beginning, say, and is not where the others evaluate."""
    job = Job()
    assert not job.members.end_strays([(0, 1), (2,)], "hung")  # nobody has come: it is the program
    job.start_again(2)
    job.join(2)
    assert not job.members.end_strays([(0, 2), (1,)], "hung")  # those that were there part as well
    assert not job.members.end_strays([(0, 1, 2)], "hung")
    assert job.members.end_strays([(0, 1), (2,)], "hung for longer than 30 s")
    assert job.decide() == [Kill("n3", (2,))]
    job.kill(2)
    assert isinstance(job.decide()[0], Regroup)
    job.settle()
    told, never = job.decide()
    assert isinstance(told, Recovered)
    assert told.losses[0].headline == "hung for longer than 30 s"
    assert never == RanksNotReplaced((2,), NEWCOMER_DIVERGED)


def test_a_rank_whose_loader_worker_was_killed_is_replaced() -> None:
    """But not one whose worker has failed by itself."""
    job = Job()
    said = "RuntimeError: DataLoader worker (pid 77) {}"
    job.raises(1, said.format("is killed by signal: Killed"))
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job = Job()
    job.raises(1, said.format("is killed by signal: Bus error"))
    assert isinstance(job.decide(PROGRAM_FAILURE_WAIT_S)[-1], Fail)


@pytest.mark.parametrize("closed", [(0,), (0, 1)])
def test_nobody_joins_ranks_whose_training_is_over(closed: tuple[int, ...]) -> None:
    """Those that come would be a group of their own, and train everything from the beginning."""
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
def test_after_the_training_nobody_does_a_ranks_work_in_its_place(how: str) -> None:
    """Its script exports the model, say: with what others have done the run has not ended well."""
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
    told = job.decide(PROGRAM_FAILURE_WAIT_S)
    assert [type(one) for one in told][:2] == [End, Fail]
    assert [one.host for one in told[1].failures] == ["n2"]  # type: ignore[union-attr]
    assert not job.members.is_finished


def test_the_others_stood_still_only_since_they_last_went_on() -> None:
    """Nobody hears a host, and its ranks train with the others until it is given up."""
    job = Job()
    heard = job.now
    job.decide(6.0)
    job.members.record_progress(40)
    lost = Failure("lost", "n2", None, heard, headline="no word")
    job.members.node_lost("n2", lost)
    job.decide(0.2)
    job.now += 0.3
    job.settle()
    told = next(one for one in job.decide() if isinstance(one, Recovered))
    assert told.seconds == pytest.approx(0.5)


def test_who_has_closed_its_session_is_in_no_new_group() -> None:
    job = Job()
    job.members.close_session(0)
    job.kill(2)
    assert job.decide() == [Regroup(1, (1,), False)]
    job.settle([1])
    assert [type(one) for one in job.decide()] == [Recovered]  # and nobody is started
    job.members.close_session(1)
    for slot in (0, 1):
        job.members.rank_finished(slot)
    assert job.decide() == []
    assert job.members.is_finished
    last = Job()
    last.members.close_session(0)
    last.members.close_session(1)
    last.kill(2)
    assert [type(one) for one in last.decide()] == [End, Fail]


def test_a_host_that_was_late_gets_further_ranks() -> None:
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


def test_a_spare_takes_the_ranks_of_a_lost_host() -> None:
    """Which is not waited for: it may come back as a spare."""
    job = Job({0: "n1", 1: "n2"})
    job.lose("n2")
    done = job.decide()
    assert Dial("n2") in done
    assert Regroup(1, (0,), False) in done
    job.members.add_host("n3", (1,))
    job.settle()
    told, *then = job.decide()
    assert isinstance(told, Recovered)
    assert told.hosts == ("n2",)
    assert then == [Start("n3", (1,))]
    job.join(1)
    assert job.members.group == (0, 1)
    assert job.decide(99.0) == []


def test_a_start_that_failed_on_a_lost_host_is_none_of_the_spare_s() -> None:
    """Its answer may come late: else two processes would have the same rank."""
    job = Job()
    job.start_again(1)
    job.lose("n2")
    job.decide()
    job.members.add_host("n4", (1,))
    assert job.decide() == [Start("n4", (1,))]
    job.members.start_failed("n2", (1,))
    assert job.decide(99.0) == []
    job.join(1)


def test_a_rank_that_had_ended_does_not_begin_again_on_a_spare() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.lose("n2")
    assert job.decide() == [Dial("n2")]
    job.members.add_host("n4", (1,))
    assert job.decide(JOIN_WINDOW_S) == []


def test_a_late_host_ends_the_wait_for_too_few() -> None:
    job = Job({0: "n1", 1: "n2"}, min_hosts=2)
    job.lose("n2")
    assert Wait(("n2",)) in job.decide()
    job.members.add_host("n3", (2,))
    done = job.decide()
    assert Regroup(1, (0,), False) in done
    assert Start("n3", (2,)) in done


def test_a_killed_rank_is_dropped_at_once_and_comes_back() -> None:
    job = Job()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle([0])
    assert job.decide(0.1) == []
    job.settle([2])
    (told,) = job.decide(0.1)
    assert isinstance(told, Recovered)
    assert (told.slots, told.num_survivors, round(told.seconds, 3)) == ((1,), 2, 0.1)
    job.members.newcomer_ready(1)
    assert job.decide(2.0) == [Regroup(2, (0, 2, 1), True)]
    job.settle()
    assert job.decide() == [Joined((1,), pytest.approx(2.2))]
    assert job.members.group == (0, 2, 1)
    assert job.members.is_stable
    assert job.members.can_recover


def test_rank_zero_is_replaced_behind_the_others() -> None:
    """Who writes changes only when it is lost."""
    job = Job()
    job.kill(0)
    assert job.decide() == [Regroup(1, (1, 2), False), Start("n1", (0,))]
    job.settle()
    job.decide()
    job.join(0)
    assert job.members.group == (1, 2, 0)


def test_nothing_is_recovered_before_all_said_that_they_can() -> None:
    job = Job(able=False)
    assert not job.members.can_recover
    for slot in (0, 1):
        job.members.set_recoverable(slot, True)
    assert not job.members.can_recover
    job.members.set_recoverable(2, True)
    assert job.members.can_recover
    job.members.set_recoverable(1, False)
    assert not job.members.can_recover


def test_a_second_loss_while_the_group_is_made_anew() -> None:
    job = Job(HOSTS)
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2, 3, 4), False), Start("n1", (1,))]
    job.settle([0, 2])
    job.kill(3)
    assert job.decide(0.1) == [Regroup(2, (0, 2, 4), False), Start("n2", (3,))]
    job.members.regrouped(4, 1, None)  # a late word of the former group
    assert job.decide() == []
    job.settle()
    (told,) = job.decide(0.1)
    assert isinstance(told, Recovered)
    assert (told.slots, told.num_survivors, len(told.losses)) == ((1, 3), 3, 2)
    job.join(1, 3)
    assert job.members.group == (0, 2, 4, 1, 3)


def test_a_loss_while_newcomers_join() -> None:
    """Whether they have the state is not known: they begin once more."""
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
    assert [type(one) for one in job.decide()] == [Recovered]
    job.join(1, 2)
    assert job.members.group == (0, 1, 2)


def test_a_newcomer_that_dies_while_it_joins() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.decide()
    job.kill(1)
    assert job.decide() == [Regroup(3, (0, 2), False)]
    assert job.decide(NEWCOMER_DELAYS_S[1]) == [Start("n2", (1,))]


def test_a_newcomer_that_dies_is_tried_again_and_then_left_out() -> None:
    job = Job()
    job.start_again(1)
    for wait_s in NEWCOMER_DELAYS_S[1:]:
        job.kill(1)
        assert job.decide(wait_s / 2) == []
        assert job.decide(wait_s) == [Start("n2", (1,))]
    job.raises(1)
    assert [type(one) for one in job.decide(60)] == [RankAbandoned]
    assert job.decide(600) == []
    assert job.members.can_recover
    job.kill(2)
    assert job.decide()[0] == Regroup(2, (0,), False)
    job.lose("n2")
    job.members.server_up("n2")
    assert Start("n2", (1,)) in job.decide()  # what stood in its way may be over


def test_a_newcomer_that_joins_and_makes_no_step_is_left_out_as_one_that_does_not_join() -> None:
    """It hangs between the door and its first batch: the others train on without it meanwhile."""
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
        job.members.record_step(step + 1)  # they go on without it
        recovered, *last = [*job.decide(), *job.decide(wait_s)]
        assert isinstance(recovered, Recovered)
    (left_out,) = last
    assert isinstance(left_out, RankAbandoned)
    assert left_out.failure is not None
    assert left_out.failure.headline.startswith("hung")


@pytest.mark.parametrize("told", ["by itself", "by those who are left"])
def test_a_newcomer_that_has_made_a_step_begins_with_all_its_tries(told: str) -> None:
    job = Job()
    job.start_again(1)
    for step in range(20):
        job.members.record_step(2 * step)
        job.join(1)
        if told == "by itself":
            job.members.record_step(2 * step + 1)
        job.kill(1)
        job.decide()
        job.settle(step=2 * step + 1)
        assert Start("n2", (1,)) in job.decide() or told == "by itself"


def test_a_newcomer_that_does_not_come_as_far_as_joining_is_ended_with_the_reason() -> None:
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
    (left_out,) = job.decide()
    assert isinstance(left_out, RankAbandoned)
    assert left_out.failure is not None
    assert left_out.failure.headline == "hung before it joined: it sleeps"


def test_a_newcomer_s_end_is_told_of_until_it_has_joined() -> None:
    """And not of those that were ended by us."""
    job = Job()
    assert not job.members.is_newcomer(1)
    job.start_again(1)
    assert job.members.is_newcomer(1)
    job.members.rank_finished(1)
    assert not job.members.is_newcomer(1)
    for wait_s in NEWCOMER_DELAYS_S[1:]:
        assert job.decide(wait_s) == [Start("n2", (1,))]
        job.members.start_failed("n2", (1,), "no answer")
    (left_out,) = job.decide(60)
    assert isinstance(left_out, RankAbandoned)
    assert left_out.failure is not None
    assert left_out.failure.headline == "no answer"
    job = Job()
    job.start_again(1)
    job.members.stop()
    assert not job.members.is_newcomer(1)


def test_newcomers_that_are_nearly_ready_are_waited_for() -> None:
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


def test_but_not_for_long() -> None:
    job = Job(HOSTS)
    job.kill(2)
    job.kill(3)
    assert job.decide()[1:] == [Start("n2", (2, 3))]
    job.settle()
    job.decide()
    job.members.newcomer_ready(3)
    assert job.decide(JOIN_WINDOW_S / 2) == []
    assert job.decide(JOIN_WINDOW_S / 2) == [Regroup(2, (0, 1, 4, 3), True)]


def test_all_lost() -> None:
    job = Job()
    for slot in job.places:
        job.kill(slot)
    actions = job.decide()
    assert [type(one) for one in actions] == [End, Fail]
    assert isinstance(actions[1], Fail)
    assert [failure.rank for failure in actions[1].failures] == [0, 1, 2]
    assert job.decide(10) == []
    assert not job.members.can_recover


def test_all_lost_while_a_newcomer_starts() -> None:
    job = Job()
    job.kill(1)
    job.decide()
    job.kill(0)
    job.kill(2)
    assert [type(one) for one in job.decide()] == [End, Fail]


# --- fork servers, nodes, the store


def test_a_dead_fork_server_is_prepared_and_its_ranks_come_back() -> None:
    job = Job(HOSTS)
    job.server_dies("n2")
    assert job.decide() == [Prepare("n2"), Regroup(1, (0, 1, 4), False)]
    job.settle()
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert [failure.kind for failure in told.losses] == ["forkserver"]
    assert job.decide(1) == []
    job.members.server_up("n2")
    assert job.decide() == [Start("n2", (2, 3))]
    job.join(2, 3)


def test_nothing_starts_where_a_rank_has_not_ended() -> None:
    job = Job(HOSTS)
    died = Failure("forkserver", "n2", None, job.now)
    job.members.server_died("n2", died)
    job.decide()
    job.members.server_up("n2")
    job.kill(2)
    assert job.decide() == [Start("n2", (2,))]
    job.kill(3)
    assert job.decide() == [Start("n2", (3,))]


def test_the_store_moves_with_a_lost_fork_server() -> None:
    job = Job(HOSTS)
    job.server_dies("n1")
    assert job.decide() == [Prepare("n1"), Regroup(1, (2, 3, 4), False, "n2")]
    job.settle()
    job.decide()
    job.members.store_ended("n1")  # nobody's any more
    job.kill(4)
    assert job.decide() == [Regroup(2, (2, 3), False), Start("n3", (4,))]


def test_a_lost_node_is_dialled_and_comes_back() -> None:
    job = Job()
    job.lose("n1")
    assert job.decide() == [Dial("n1"), Regroup(1, (1, 2), False, "n2")]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered]
    assert job.decide(300) == []
    job.members.server_up("n1")
    assert job.decide() == [Start("n1", (0,))]
    job.join(0)
    job.lose("n1")
    assert job.decide() == [Dial("n1"), Regroup(3, (1, 2), False)]


def test_a_node_that_is_lost_while_its_newcomers_start() -> None:
    job = Job()
    job.start_again(1)
    job.lose("n2")
    assert job.decide() == [Dial("n2")]
    job.members.server_up("n2")
    assert job.decide() == [Start("n2", (1,))]


def test_a_node_that_cannot_be_dialled() -> None:
    job = Job()
    job.lose("n2", redials=False)
    assert job.decide() == [Regroup(1, (0, 2), False)]


def test_newcomers_of_a_store_that_is_gone_begin_once_more() -> None:
    """They read in it how the others began."""
    job = Job()
    job.kill(1)
    job.decide()
    job.lose("n1")
    assert job.decide() == [Kill("n2", (1,)), Dial("n1"), Regroup(2, (2,), False, "n3")]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]


def test_a_store_that_ended_is_replaced_before_it_is_needed() -> None:
    job = Job()
    job.members.store_ended("n1")
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False, "n1"), Start("n2", (1,))]


def test_a_store_that_ends_in_the_midst() -> None:
    job = Job()
    job.kill(1)
    job.decide()
    job.settle([0])
    job.members.store_ended("n1")
    assert job.decide() == [Kill("n2", (1,)), Regroup(2, (0, 2), False, "n1")]


def test_a_store_that_ended_when_newcomers_are_to_start() -> None:
    job = Job()
    job.lose("n2")
    job.decide()
    job.settle()
    job.decide()
    job.members.store_ended("n1")
    job.members.server_up("n2")
    assert job.decide() == [Regroup(2, (0, 2), True, "n1"), Start("n2", (1,))]


# --- too few nodes


def test_too_few_nodes_wait_for_one() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Wait(("n2",))]
    job.members.interrupt_rank(0)
    assert job.decide(30) == []
    job.members.server_up("n2")
    assert job.decide() == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered]
    job.join(1)


def test_in_vain_they_save_and_stop() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    assert job.decide(60) == [Regroup(1, (0, 2), False)]
    job.settle()
    actions = job.decide()
    assert [type(one) for one in actions] == [Recovered, Stop]
    assert isinstance(actions[0], Recovered)
    assert actions[0].is_final
    assert isinstance(actions[1], Stop)
    assert actions[1].loss.host == "n2"


def test_in_vain_for_a_node_whose_rank_was_lost_before() -> None:
    """The node that is missing is to blame, not the rank whose loss came last."""
    job = Job(min_hosts=3, timeout_s=60)
    job.start_again(1)
    job.lose("n2")
    assert job.decide(1) == [Dial("n2")]
    job.kill(2)
    held = Regroup(2, (0,), False, is_paused=True)
    assert job.decide(1) == [Wait(("n2",)), held, Start("n3", (2,))]
    job.settle()
    assert job.decide(60) == [Regroup(3, (0,), False)]
    job.settle()
    stop = job.decide()[-1]
    assert isinstance(stop, Stop)
    assert (stop.loss.host, stop.loss.kind) == ("n2", "lost")


def test_they_are_asked_to_stop_also_when_they_do_not_regroup() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.decide(60)
    assert job.decide(STOP_TIMEOUT_S / 2) == []
    assert [type(one) for one in job.decide(STOP_TIMEOUT_S)] == [Stop]


def test_nobody_waits_for_a_node_that_cannot_come_back() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2", redials=False)
    assert job.decide() == [Wait(("n2",)), Regroup(1, (0, 2), False)]


def test_the_wait_is_over_once_it_is_known_that_a_node_cannot_come_back() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Wait(("n2",))]
    job.members.abandon_host("n2")
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered, Stop]


def test_a_dead_fork_server_is_no_lost_node() -> None:
    job = Job(min_hosts=3)
    job.server_dies("n2")
    assert job.decide() == [Prepare("n2"), Regroup(1, (0, 2), False)]


def test_a_job_that_is_stopped_while_they_wait_can_save() -> None:
    job = Job(min_hosts=3, timeout_s=60)
    job.lose("n2")
    job.decide()
    job.members.stop()
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert told.is_final


def test_a_loss_while_they_wait() -> None:
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
    job.kill(0)  # the one that had the state alone
    assert job.decide()[0] == Regroup(3, (2,), False, is_paused=True)
    job.settle()
    job.members.server_up("n2")
    assert job.decide()[0] == Regroup(4, (2,), False)
    job.settle()
    (told,) = (one for one in job.decide() if isinstance(one, Recovered))
    assert (told.slots, told.num_survivors) == ((0, 1, 2), 0)


def test_in_vain_those_that_were_given_the_state_meanwhile_save_it_too() -> None:
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
    assert [type(one) for one in job.decide()] == [Recovered, Stop]


# --- failures of the program's own


def test_an_exception_without_restarts_ends_the_job() -> None:
    job = Job()
    job.raises(1)
    assert job.decide(PROGRAM_FAILURE_WAIT_S / 2) == []
    (end, fail) = job.decide(PROGRAM_FAILURE_WAIT_S)
    assert isinstance(end, End)
    assert isinstance(fail, Fail)
    assert [failure.headline for failure in fail.failures] == [BOOM]


def test_an_exception_with_a_restart_left() -> None:
    job = Job(policy=RetryPolicy(1))
    job.members.record_step(7)
    job.raises(1)
    assert job.decide(PROGRAM_FAILURE_WAIT_S) == [Regroup(1, (0, 2), False), Start("n2", (1,))]
    job.settle(step=8)
    job.decide()
    job.join(1)
    job.members.record_step(20)
    job.raises(2, "ValueError: other")
    assert [type(one) for one in job.decide(PROGRAM_FAILURE_WAIT_S)] == [End, Fail]


def test_an_exception_at_the_same_step_again_is_the_program_s_own() -> None:
    policy = RetryPolicy(9)
    asked = Mock(side_effect=policy.judge_failure)
    policy.judge_failure = asked  # type: ignore[method-assign]
    job = Job(policy=policy)
    job.members.record_step(8)
    job.raises(1)
    assert [type(one) for one in job.decide(PROGRAM_FAILURE_WAIT_S)] == [Regroup, Start]
    job.settle(step=8)
    job.raises(2)
    assert [type(one) for one in job.decide(PROGRAM_FAILURE_WAIT_S)] == [Recovered, End, Fail]
    assert [call.kwargs["step"] for call in asked.call_args_list] == [8, 8]


def test_an_exception_on_all_ranks_is_nothing_to_recover_from() -> None:
    job = Job(policy=RetryPolicy(9))
    for slot in job.places:
        job.raises(slot)
    actions = job.decide()
    assert [type(one) for one in actions] == [End, Fail]


def test_who_failed_because_another_was_lost_comes_back_too() -> None:
    job = Job()
    job.raises(2, RESET)
    job.now += 0.2
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0,), False), Start("n2", (1,)), Start("n3", (2,))]


def test_an_echo_of_nothing_is_a_failure() -> None:
    job = Job()
    job.raises(2, RESET)
    assert job.decide(INTERRUPT_TIMEOUT_S / 2) == []
    assert [type(one) for one in job.decide(INTERRUPT_TIMEOUT_S)] == [End, Fail]


def test_a_rank_that_failed_and_does_not_end_is_ended() -> None:
    job = Job(policy=RetryPolicy(9))
    job.raises(1, ends=False)
    assert job.decide(PROGRAM_FAILURE_WAIT_S) == [Regroup(1, (0, 2), False)]
    assert job.decide(EXIT_GRACE_S) == [Kill("n2", (1,))]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]


def test_signals_without_a_step_in_between_are_the_program_s_own() -> None:
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
    assert [type(one) for one in job.decide()] == [End, Fail]


def test_a_sample_at_which_each_rank_crashes_is_the_program_s_own() -> None:
    """Not two that crash at once, nor one that somebody kills."""
    job = Job({0: "n1", 1: "n2", 2: "n3", 3: "n4"})
    job.members.record_step(5)

    def crash(slot: int) -> None:
        failure = replace(job.failure(slot, "signal", "crashed (SIGSEGV)"), signal=11)
        job.members.rank_lost(slot, failure)

    crash(0)
    crash(1)
    assert [type(one) for one in job.decide()] == [Regroup, Start, Start]
    job.settle(step=5)
    job.kill(2)
    job.decide()
    job.settle(step=5)
    crash(3)
    told = job.decide()
    assert [type(one) for one in told][-2:] == [End, Fail]
    assert [one.host for one in told[-1].failures] == ["n2"]  # type: ignore[union-attr]
    assert "same step (5), on the same data" in told[-1].reason  # type: ignore[union-attr]


def test_any_number_of_signals_with_steps_in_between() -> None:
    job = Job()
    for step in range(50):
        job.members.record_step(step)
        job.kill(1)
        assert [type(one) for one in job.decide()] == [Regroup, Start]
        job.settle(step=step)
        job.decide()
        job.join(1)


# --- who waits for word


def test_an_error_without_a_loss_is_tried_once_more_together() -> None:
    job = Job()
    job.members.record_step(3)
    job.members.interrupt_rank(0)
    assert job.decide(INTERRUPT_TIMEOUT_S / 2) == []
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    job.settle(step=3)
    assert job.decide() == []
    job.members.interrupt_rank(1)
    assert [type(one) for one in job.decide(INTERRUPT_TIMEOUT_S)] == [End]
    assert job.decide(INTERRUPT_TIMEOUT_S) == []


def test_ranks_that_all_wait_for_each_other_try_again_once_at_a_step() -> None:
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


def test_an_error_before_the_loss_is_known() -> None:
    job = Job()
    job.members.interrupt_rank(0)
    assert job.decide(0.1) == []
    job.kill(1)
    assert job.decide()[0] == Regroup(1, (0, 2), False)
    job.members.interrupt_rank(2)  # of the former group, a little late
    job.settle()
    assert [type(one) for one in job.decide(INTERRUPT_TIMEOUT_S * 2)] == [Recovered]


# --- a line between two hosts that is silent


def apart(job: Job, *pairs: tuple[int, str]) -> None:
    """These ranks could not hear these hosts, in the present group."""
    for slot, host in pairs:
        number = job.members._generation.number
        job.members.interrupt_rank(slot, unreachable_host=host, generation=number)


def test_of_two_hosts_that_do_not_hear_each_other_one_is_left_out() -> None:
    """At first they try once more together: the line may be back."""
    job = Job()
    job.members.record_step(3)
    apart(job, (1, "n3"), (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    assert job.members.is_forming(1.0)
    job.members.interrupt_rank(0, generation=0)  # a late word of the former group
    assert job.decide(INTERRUPT_TIMEOUT_S) == []
    apart(job, (1, ""), (2, ""), (0, ""))
    why = "n3 and n2 cannot reach each other"
    assert job.decide(INTERRUPT_TIMEOUT_S) == [
        ExcludeHost("n3", why, EXCLUSION_S), Dial("n3", EXCLUSION_S), Regroup(2, (0, 1), False)
    ]  # fmt: skip
    job.settle(step=3)
    assert job.members.is_forming(1.0)  # ranks have had no time for a step yet
    job.now += 1.0
    assert not job.members.is_forming(1.0)
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert [failure.headline for failure in told.losses] == [why]
    assert told.slots == (2,)


def test_it_is_told_how_long_no_step_was_made_and_not_how_long_ago_somebody_noticed() -> None:
    job = Job()
    job.members.record_progress(3)
    job.now += 14.0
    job.members.record_step(3)  # which the error tells, too
    apart(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    apart(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=3)
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert told.seconds == pytest.approx(14.0 + 2 * INTERRUPT_TIMEOUT_S)


def test_where_lines_are_known_to_be_deaf_nobody_tries_to_meet_once_more() -> None:
    job = Job()
    job.members.record_progress(3)
    job.now += 7.0
    assert job.members.separate([("n1", "n2")], job.now - 7.0)
    why = "n2 and n1 cannot reach each other"
    assert job.decide() == [
        ExcludeHost("n2", why, EXCLUSION_S), Dial("n2", EXCLUSION_S), Regroup(1, (0, 2), False)
    ]  # fmt: skip
    job.settle(step=3)
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert told.seconds == pytest.approx(7.0)
    assert not job.members.separate([("n1", "n2")], job.now)  # it is gone already


def test_a_host_that_is_cut_off_from_all_others_is_the_one_that_goes() -> None:
    job = Job()
    assert job.members.separate([("n1", "n2"), ("n2", "n3")], job.now)
    assert [one.host for one in job.decide() if isinstance(one, ExcludeHost)] == ["n2"]


def test_a_deaf_line_is_no_reason_to_part_while_something_else_is_settled() -> None:
    lines = [("n1", "n2")]
    job = Job()
    job.kill(2)
    assert not job.members.separate(lines, job.now)  # a group without it follows
    job.decide()
    assert not job.members.separate(lines, job.now)  # which is not there yet
    job.members.group_gathered(0, 1)
    assert job.members.separate(lines, job.now)  # and does not come about
    job = Job()
    job.members.rank_finished(2)
    assert not job.members.separate(lines, job.now)  # it has all that it needs


def test_they_are_not_waited_for_until_gloo_gives_up() -> None:
    """Which it does after minutes; a rank that computes yet has nothing to do with that."""
    job = Job()
    job.members.record_step(3)
    apart(job, (1, "n3"), (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Regroup(1, (0, 1, 2), False)]
    assert job.decide(2 * CONNECT_TIMEOUT_S) == []
    job.members.group_gathered(0, 1)
    job.members.group_connected(0, 3)
    assert job.decide(CONNECT_TIMEOUT_S / 2) == []
    assert [type(one) for one in job.decide(CONNECT_TIMEOUT_S / 2)] == [ExcludeHost, Dial, Regroup]


def test_a_newcomer_that_does_not_meet_all_others_is_left_out_and_no_slow_one() -> None:
    job = left_out_and_back()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(3, (0, 1, 2), True)]
    job.members.group_gathered(0, 3)
    job.members.group_connected(0, 3)
    why = "n3 and n2 cannot reach each other"
    assert job.decide(CONNECT_TIMEOUT_S)[0] == ExcludeHost("n3", why, 2 * EXCLUSION_S)
    job.settle()
    job.decide()
    job.members.server_up("n3")
    job.decide()
    job.members.newcomer_ready(2)
    job.decide()
    job.members.group_gathered(0, 5)
    for slot in job.places:
        job.members.group_connected(slot, 3)
    assert job.decide(99 * CONNECT_TIMEOUT_S) == []  # the state of a large model is on its way


def left_out_and_back() -> Job:
    job = Job()
    job.members.record_step(3)
    apart(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    apart(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=3)
    job.decide()
    job.members.server_up("n3")
    assert job.decide() == [Start("n3", (2,))]
    return job


def test_a_host_that_was_left_out_comes_back_when_the_line_does() -> None:
    job = left_out_and_back()
    job.join(2)
    assert job.members.group == (0, 1, 2)


def test_while_it_does_not_the_host_is_left_out_again_for_longer() -> None:
    """The newcomer, whoever of the others does not hear it: it has nothing to lose."""
    job = left_out_and_back()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    assert job.decide() == [Regroup(3, (0, 1, 2), True)]
    apart(job, (0, "n3"), (1, ""))
    why = "n3 and n1 cannot reach each other"
    assert job.decide(INTERRUPT_TIMEOUT_S) == [
        ExcludeHost("n3", why, 2 * EXCLUSION_S), Dial("n3", 2 * EXCLUSION_S),
        Regroup(4, (0, 1), False),
    ]  # fmt: skip
    job.settle()
    assert job.decide() == []


def test_newcomers_with_whom_no_group_comes_about_are_ended() -> None:
    job = left_out_and_back()
    job.members.record_step(90)
    job.members.newcomer_ready(2)
    job.decide()
    apart(job, (0, ""), (1, ""))
    assert job.decide(INTERRUPT_TIMEOUT_S) == [Kill("n3", (2,)), Regroup(4, (0, 1), False)]


@pytest.mark.parametrize(
    ("pairs", "gone"),
    [
        ([(0, "n2")], ["n2"]),  # not who saves
        ([(1, "n1")], ["n2"]),
        ([(0, "n2"), (2, "n1")], ["n1"]),  # whom most do not hear
        ([(1, "n1"), (1, "n3")], ["n2"]),
        ([(0, "n3"), (0, "n4"), (1, "n3"), (1, "n4")], ["n4", "n3"]),  # two halves
    ],
)
def test_who_is_left_out(pairs: list[tuple[int, str]], gone: list[str]) -> None:
    job = Job({0: "n1", 1: "n2", 2: "n3", 3: "n4"})
    job.members.record_step(3)
    apart(job, *pairs)
    job.decide(INTERRUPT_TIMEOUT_S)
    apart(job, *pairs)
    assert [
        one.host for one in job.decide(INTERRUPT_TIMEOUT_S) if isinstance(one, ExcludeHost)
    ] == gone


def test_without_so_many_hosts_the_others_wait() -> None:
    job = Job(min_hosts=3)
    apart(job, (1, "n3"))
    job.members.record_step(3)
    job.decide(INTERRUPT_TIMEOUT_S)
    apart(job, (2, "n2"))
    assert job.decide(INTERRUPT_TIMEOUT_S)[1:] == [Dial("n3", EXCLUSION_S), Wait(("n3",))]


def test_what_was_silent_long_ago_is_forgotten() -> None:
    job = Job()
    job.members.record_step(3)
    apart(job, (1, "n3"))
    job.decide(INTERRUPT_TIMEOUT_S)
    job.settle(step=9)
    for _ in range(2):
        apart(job, (0, ""))
        actions = job.decide(INTERRUPT_TIMEOUT_S)
    assert [type(one) for one in actions] == [End]


# --- frozen ranks


def test_a_frozen_rank_is_ended_and_replaced() -> None:
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
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert "SIGSTOP" in told.losses[0].headline


def test_a_rank_that_lives_on_is_ended_again() -> None:
    """The order may be lost on its way, and nobody starts in its place while it lives."""
    job = Job()
    job.raises(1, RESET, ends=False)
    job.kill(2)
    assert job.decide() == [Regroup(1, (0,), False), Start("n3", (2,))]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered]
    assert job.decide(EXIT_GRACE_S) == [Kill("n2", (1,))]
    assert job.decide() == job.decide(KILL_RETRY_S / 2) == []
    assert job.decide(KILL_RETRY_S / 2) == [Kill("n2", (1,))]
    job.kill(1)
    assert job.decide() == [Start("n2", (1,))]
    assert job.decide(KILL_RETRY_S) == []


def test_a_rank_that_hangs_is_ended_and_replaced_with_the_reason() -> None:
    job = Job()
    job.members.set_hung(1, "hung for longer than 30 s: is stuck")
    assert job.decide() == [Kill("n2", (1,))]
    job.kill(1)
    job.decide()
    job.settle()
    (told,) = job.decide()
    assert isinstance(told, Recovered)
    assert told.losses[0].headline == "hung for longer than 30 s: is stuck"


def test_a_survivor_that_is_not_freed_is_ended_and_the_others_meet_without_it() -> None:
    job = Job()
    job.kill(2)
    assert job.decide()[0] == Regroup(1, (0, 1), planned=False)
    job.members.set_hung(0, "stuck")
    assert job.decide() == [Kill("n1", (0,))]
    job.kill(0)
    assert job.decide()[0] == Regroup(2, (1,), planned=False)


def test_when_all_survivors_hang_they_are_ended_after_a_while_and_the_attempt_with_them() -> None:
    job = Job()
    job.kill(2)
    assert job.decide()[0] == Regroup(1, (0, 1), planned=False)
    job.members.set_hung(0, "stuck")
    job.members.set_hung(1, "stuck")
    assert job.decide() == []
    assert job.decide(DEADLOCK_TIMEOUT_S / 2) == []
    job.members.regrouped(1, 1, None)  # one has come out after all
    assert job.decide() == [Kill("n1", (0,))]
    job = Job()
    job.kill(2)
    job.decide()
    job.members.set_hung(0, "stuck")
    job.members.set_hung(1, "stuck")
    job.decide()
    assert [type(one) for one in job.decide(DEADLOCK_TIMEOUT_S)] == [Kill, Kill]
    job.kill(0)
    job.kill(1)
    ended = job.decide()
    assert [type(one) for one in ended] == [End, Fail]
    assert isinstance(ended[1], Fail)
    assert {one.headline for one in ended[1].failures[-2:]} == {"stuck"}


def connecting() -> Job:
    """A newcomer is lost while all make the connections of the group in which it joins."""
    job = Job()
    job.look_s = 1e-6  # what is due at once is due at the next look
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == [Regroup(2, (0, 2, 1), True)]
    for slot in job.places:
        job.members.rank_arrived(slot)
        job.members.group_gathered(slot, 2)
    job.kill(1)
    assert job.decide()[0] == Regroup(3, (0, 2), False)
    return job


def test_ranks_that_are_not_freed_from_a_communicator_are_ended() -> None:
    job = connecting()
    assert not any(isinstance(one, Kill) for one in job.decide(CONNECT_TIMEOUT_S - 1))
    kills = [Kill("n1", (0,)), Kill("n3", (2,))]
    assert [one for one in job.decide(1) if isinstance(one, Kill)] == kills
    job.kill(0)
    job.kill(2)
    (failed,) = (one for one in job.decide() if isinstance(one, Fail))
    why = f"{UNFREED}: rank 1 was lost then; ranks 0, 2 were not freed"
    assert {(one.kind, one.headline) for one in failed.failures} == {("hang", why)}


def test_one_that_is_freed_goes_on_without_those_that_are_not() -> None:
    job = connecting()
    job.members.rank_arrived(2)
    actions = job.decide(CONNECT_TIMEOUT_S)
    assert [one for one in actions if isinstance(one, Kill)] == [Kill("n1", (0,))]
    job.kill(0)
    assert job.decide()[0] == Regroup(4, (2,), False)
    job = connecting()
    for slot in (0, 2):
        job.members.rank_arrived(slot)  # and it computes for long before the other one comes
    assert not any(isinstance(one, Kill) for one in job.decide(99 * CONNECT_TIMEOUT_S))


def test_a_frozen_rank_of_a_script_that_cannot_go_on_without_it_is_left_alone() -> None:
    job = Job(able=False)
    job.members.set_frozen(1, stopped=True)
    assert job.decide() == []


def test_the_last_rank_with_the_state_is_ended_when_it_hangs_for_too_long() -> None:
    """Nobody else has the state: the attempt fails, instead of waiting for ever."""
    job = Job()
    job.members.set_frozen(0, True)
    job.kill(1)
    job.kill(2)
    job.decide()
    job.members.newcomer_ready(1)
    assert job.decide(60.0) == []  # it may be continued
    job.members.set_hung(0, "hung for longer than 30 s")
    assert Kill("n1", (0,)) in job.decide()
    job.kill(0)
    (failed,) = [one for one in job.decide() if isinstance(one, Fail)]
    assert "hung for longer" in " ".join(one.headline for one in failed.failures)


def test_a_job_that_is_stopped_as_a_whole_is_left_alone() -> None:
    job = Job()
    for slot in job.places:
        job.members.set_frozen(slot, stopped=True)
    assert job.decide() == []


# --- the end


def test_the_end_in_order() -> None:
    job = Job()
    for slot in job.places:
        job.members.rank_finished(slot)
    assert job.decide() == []
    assert not job.members.is_pending


def test_newcomers_that_come_too_late_are_ended() -> None:
    job = Job()
    job.start_again(1)
    job.members.rank_finished(0)
    assert job.decide() == []
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == []
    job.members.rank_finished(2)
    assert job.decide() == [Kill("n2", (1,))]


def test_a_loss_after_rank_zero_has_ended_changes_nothing() -> None:
    job = Job()
    job.members.rank_finished(0)
    job.members.rank_finished(2)
    job.kill(1)
    assert not any(isinstance(one, Fail) for one in job.decide())
    assert not job.members.is_pending


def test_the_loss_of_who_saves_is_a_failure() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.members.rank_finished(2)
    job.kill(0)
    assert [type(one) for one in job.decide()] == [End, Fail]


def test_a_rank_that_ended_early_is_not_waited_for() -> None:
    job = Job()
    job.members.rank_finished(1)
    job.members.interrupt_rank(0)
    assert [type(one) for one in job.decide(INTERRUPT_TIMEOUT_S)] == [End]


# --- ranks that are asked to save and stop


def saves(job: Job, *slots: int, raises: bool = True) -> None:
    """These ranks have saved, and end: a script raises, a recipe has an exit status of its own."""
    for slot in slots:
        if raises:
            text = "Stopped: stopped on SIGTERM after step 7"
            job.members.rank_lost(slot, job.failure(slot, "exception", text))
        code = 1 if raises else SAVED_EXIT_CODE
        ended = replace(job.failure(slot, "exit", f"exit status {code}"), code=code)
        job.members.rank_lost(slot, ended)


@pytest.mark.parametrize("raises", [True, False])
def test_ranks_that_stop_are_not_lost(raises: bool) -> None:
    job = Job()
    job.members.stop()
    saves(job, 1, 2, raises=raises)
    assert job.decide() == []
    assert job.members.is_pending
    saves(job, 0, raises=raises)
    assert job.decide() == []
    assert not job.members.is_pending
    assert job.members.is_finished


@pytest.mark.parametrize("known", ["before the stop", "at the stop", "after the stop"])
def test_who_is_left_saves_without_who_is_lost_around_the_stop(known: str) -> None:
    """And nobody is dialled, started or waited for."""
    job = Job(min_hosts=3, timeout_s=60)
    if known == "before the stop":
        job.lose("n2")
        assert job.decide() == [Dial("n2"), Wait(("n2",))]
    if known == "at the stop":
        job.lose("n2")
    job.members.stop()
    if known == "after the stop":
        assert job.decide(2.0) == []
        job.lose("n2")
    assert job.decide() == [Regroup(1, (0, 2), False)]
    assert job.members.can_recover
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered]
    job.members.server_up("n2")
    assert job.decide(99.0) == []
    saves(job, 2, 0)
    assert job.decide() == []
    assert job.members.is_finished


def test_a_group_that_is_on_its_way_at_the_stop_comes_about() -> None:
    job = Job()
    job.kill(1)
    assert Regroup(1, (0, 2), False) in job.decide()
    job.members.stop()
    assert job.decide() == [Kill("n2", (1,))]  # the newcomer
    job.kill(1)
    job.settle()
    (told,) = job.decide()
    assert told == Recovered((job.failure(1),), (1,), 2, 0.0, is_final=True)


def test_a_second_loss_while_they_stop() -> None:
    job = Job()
    job.members.stop()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.kill(0)
    assert job.decide() == [Regroup(2, (2,), False)]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered]


def test_a_rank_that_fails_while_it_stops_keeps_nobody_from_saving() -> None:
    job = Job()
    job.raises(1)
    job.members.stop()
    job.raises(2)
    assert job.decide() == [Regroup(1, (0,), False)]


def test_nobody_waits_in_a_group_for_who_has_just_left() -> None:
    job = Job()
    job.members.stop()
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    saves(job, 0)
    assert job.decide() == [Regroup(2, (2,), False)]


def test_newcomers_do_not_join_a_job_that_is_stopped() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.members.stop()
    assert job.decide(JOIN_WINDOW_S) == [Kill("n2", (1,))]


def test_a_newcomer_at_the_door_is_ended_when_the_others_have_saved() -> None:
    """They have stopped without opening."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide(JOIN_WINDOW_S) == [Regroup(2, (0, 2, 1), True)]
    job.members.stop()
    assert job.decide() == []
    saves(job, 2)
    assert job.decide() == []
    saves(job, 0)
    assert Kill("n2", (1,)) in job.decide()
    assert not job.members.is_pending


def test_who_gets_the_state_for_long_keeps_nobody_from_saving() -> None:
    """It is large, or the line slow, and there is --grace only: the others save without it."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert [type(one) for one in job.decide(JOIN_WINDOW_S)] == [Regroup]
    job.members.stop()
    assert job.decide() == []  # it may be there in a moment
    assert job.decide(STATE_TRANSFER_S) == [Kill("n2", (1,))]
    assert job.decide(0.1) == []
    job.kill(1)
    assert job.decide() == [Regroup(3, (0, 2), False)]


def test_all_are_lost_while_they_stop() -> None:
    job = Job({0: "n1", 1: "n2"})
    job.members.stop()
    job.kill(0)
    job.kill(1)
    assert [type(one) for one in job.decide()] == [End, Fail]
    assert not job.members.is_pending


def test_a_job_that_has_failed_is_not_asked_to_save() -> None:
    job = Job({0: "n1"})
    job.raises(0)
    assert [type(one) for one in job.decide(PROGRAM_FAILURE_WAIT_S)] == [End, Fail]
    job.members.stop()
    assert job.decide(10) == []
    assert not job.members.can_recover


# --- when nobody can join any more

PAST = "the script is in its second session.epochs"


def test_who_is_lost_where_nobody_can_join_is_not_started_again() -> None:
    job = Job()
    for slot in job.places:
        job.members.close_admission(slot, PAST)
    assert job.decide() == []
    job.kill(1)
    assert job.decide() == [Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered, RanksNotReplaced]
    job.lose("n2")
    job.members.server_up("n2")
    assert job.decide(60) == []
    job.kill(2)
    assert job.decide() == [Regroup(2, (0,), False)]
    job.settle()
    assert job.decide()[-1] == RanksNotReplaced((2,), PAST)
    assert job.members.can_recover


@pytest.mark.parametrize("ready", [False, True])
def test_a_newcomer_that_comes_too_late_is_ended(ready: bool) -> None:
    job = Job(HOSTS)
    job.kill(1)
    job.start_again(3)
    if ready:
        job.members.newcomer_ready(1)  # and the other is waited for
    assert job.decide() == []
    job.members.close_admission(0, PAST)
    ended = [Kill("n1", (1,)), Kill("n2", (3,))]
    assert sorted(map(str, job.decide())) == sorted(
        map(str, [*ended, RanksNotReplaced((1, 3), PAST)])
    )
    job.kill(1)
    job.kill(3)
    assert job.decide(KILL_RETRY_S + 1) == []
    assert job.members.is_stable


def test_a_group_that_nobody_makes_any_more_is_followed_by_one_without_the_newcomer() -> None:
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    assert job.decide() == [Regroup(2, (0, 2, 1), True)]
    job.members.close_admission(2, PAST)
    assert job.decide() == [Kill("n2", (1,)), Regroup(3, (0, 2), False)]
    job.kill(1)
    job.settle()
    assert job.decide() == [RanksNotReplaced((1,), PAST)]
    assert job.members.group == (0, 2)


def test_a_newcomer_that_has_joined_stays_although_its_word_comes_late() -> None:
    """Who says that nobody can join any more has made the group with it."""
    job = Job()
    job.start_again(1)
    job.members.newcomer_ready(1)
    job.decide()
    job.settle([0])
    job.members.close_admission(0, PAST)
    assert job.decide() == []
    job.settle([1, 2])
    assert [type(one) for one in job.decide()] == [Joined]
    assert job.members.group == (0, 2, 1)


def test_a_lost_node_that_could_not_join_is_not_waited_for() -> None:
    job = Job(min_hosts=3)
    job.members.close_admission(0, PAST)
    job.lose("n2")
    assert job.decide() == [Dial("n2"), Regroup(1, (0, 2), False)]
    job.settle()
    assert [type(one) for one in job.decide()] == [Recovered, Stop]


# --- whatever happens


@each_case("seed", range(60))
def test_any_order_of_events_comes_to_an_end(seed: int) -> None:
    """A generation has only living members with the state; who is lost comes back in the end."""
    chance = random.Random(seed)
    job = Job(dict(HOSTS), min_hosts=3 if seed % 3 else 1, timeout_s=1e6)
    alive = dict.fromkeys(HOSTS, True)
    failed = False

    def obey(actions: Sequence[Action]) -> None:
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

    def anything(calm: bool) -> None:
        slot = chance.choice(list(HOSTS))
        host = HOSTS[slot]
        there = job.members._hosts[host].state
        what = chance.randrange(4) if calm else chance.randrange(9 if seed % 2 else 8)
        if what == 0 and alive[slot]:
            job.members.newcomer_ready(slot)
        elif what in (1, 2) and alive[slot]:
            job.members.record_step(job.members._step + 1)
            job.members.regrouped(slot, job.members._generation.number, None)
        elif what == 3 and there != "up":
            job.members.server_up(host)
        elif what == 4 and alive[slot]:
            alive[slot] = False
            job.kill(slot)
        elif what == 5 and alive[slot]:
            silent = chance.choice(["", *HOSTS.values()])
            job.members.interrupt_rank(slot, unreachable_host=silent)
        elif what == 6:
            gone = [slot for slot in HOSTS if HOSTS[slot] == host]
            alive.update(dict.fromkeys(gone, False))
            if chance.random() < 0.5:
                job.lose(host)
            elif there == "up":
                job.server_dies(host)
        elif what == 7:
            job.members.store_ended(host)
        elif what == 8 and alive[slot]:
            job.members.close_admission(slot, PAST)

    for _ in range(chance.randrange(5, 40)):
        anything(calm=False)
        obey(job.decide(chance.random() * 0.2))
    for _ in range(3000):
        under_way = job.members._in_state("lost", "starting", "ready", "joining")
        if failed or (job.members.is_stable and not under_way):
            break
        anything(calm=True)
        obey(job.decide(0.1))
    else:
        raise AssertionError(f"no end: {job.members._ranks} {job.members._hosts}")
    if not failed:
        there = {one.number for one in job.members._in_state("in")}
        assert set(job.members.group) == there
        left_out = {one.number for one in job.members._in_state("left out")}
        assert there | left_out == set(HOSTS)


def test_the_constants_fit_together() -> None:
    """Silence is noticed before an interrupted rank is told that nobody is lost."""
    assert INTERRUPT_TIMEOUT_S > 2.5
