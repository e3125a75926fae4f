"""States of the ranks and hosts of an attempt, and the actions that change them. Pure.

A *slot* is a rank's number in the plan, which never changes. Ranks train in *generations*: each is
a group of slots in rank order, survivors first as they were, then newcomers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.launch.elastic.retry_policy import RetryPolicy
from paceline.spec.failure import Failure

FORMING_S = 30.0  # for a new group to form, before a missing rank counts as hung

RankState = Literal["in", "joining", "ready", "starting", "lost", "done", "left out"]
HostState = Literal["up", "no server", "lost", "gone"]


@dataclass(frozen=True, slots=True)
class Regroup:
    """All living ranks form the process groups of a new generation.

    Attributes:
        members: Slots in rank order.
        planned: Ranks join between two steps. If False, ranks were lost: regroup at once.
        store_host: Host that opens a new rendezvous store; empty to reuse the current store.
        is_paused: Too few nodes are left to train: newcomers only get the state.
    """

    generation: int
    members: tuple[int, ...]
    planned: bool
    store_host: str = ""
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Fork new ranks on a host for these slots."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill these ranks of a host."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Restart the fork server of a host."""

    host: str


@dataclass(frozen=True, slots=True)
class Dial:
    """Reconnect to a host, after ``delay_s`` seconds, until it answers or the job ends."""

    host: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExcludeHost:
    """Exclude a live host and its agent, because it and another host cannot reach each other.

    It counts as lost then, but is dialled only after ``redial_delay_s`` seconds.
    """

    host: str
    reason: str
    redial_delay_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Too few nodes are left: the ranks wait and keep their state in memory."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """No lost host came back in time: the ranks save and stop."""

    loss: Failure


@dataclass(frozen=True, slots=True)
class End:
    """No recovery follows: ranks that wait for a new group raise their own error."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The attempt has failed.

    Attributes:
        reason: Why another attempt is useless; empty if unknown.
    """

    failures: tuple[Failure, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The surviving ranks have formed a group and continue training.

    Attributes:
        num_survivors: How many ranks continue without them.
        seconds: From the first loss, or from the last progress if a link was blocked, until all
            survivors had the new group.
        is_final: Whether they only save and stop.
        hosts: Where the slots were; a spare may have them by now.
    """

    losses: tuple[Failure, ...]
    slots: tuple[int, ...]
    num_survivors: int
    seconds: float
    is_final: bool = False
    hosts: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """New ranks have joined the training, ``seconds`` after the first lost rank was lost."""

    slots: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class RankAbandoned:
    """New ranks for this slot repeatedly failed to join; the others continue without it."""

    slot: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class RanksNotReplaced:
    """These ranks are not replaced; the others continue without them.

    Attributes:
        slots: Ranks that were lost or had not joined yet.
        reason: Why no rank can join.
    """

    slots: tuple[int, ...]
    reason: str


Order = Regroup | Start | Kill | Prepare | Dial | ExcludeHost | Stop | End | Fail
Action = Order | Wait | Recovered | Joined | RankAbandoned | RanksNotReplaced


@dataclass(slots=True)
class Rank:
    """The state of one slot of the plan, whichever process has it."""

    number: int
    host: str
    state: RankState = "in"
    alive: bool = True  # whether its process lives, as far as its agent has reported
    is_recoverable: bool | None = None  # whether its training can go on without lost ranks
    interrupted_at: float | None = None
    lost_at: float = 0.0
    kill_at: float | None = None
    killed: bool = False  # by us
    killed_at: float | None = None  # when that was noticed first
    frozen: bool = False
    hang_reason: str = ""  # why it is ended; empty unless it hangs
    failed_starts: int = 0  # newcomers in a row that made no step with the others
    started_at: float = 0.0
    joined_step: int | None = None  # the step at which a newcomer joined, until it has made one
    restart_at: float = 0.0
    ready_at: float = 0.0
    strikes: tuple[int, int] = (-1, 0)  # a step, and how many signals ended the rank there
    loss: Failure | None = None
    has_saved: bool = False  # it has saved as requested and is about to end
    session_closed: bool = False  # its training is over, but its script goes on
    joined_generation: int = 0
    connects_to: int | None = None  # generation that was complete and whose connections it opens


@dataclass(slots=True)
class Host:
    """The state of one host."""

    state: HostState = "up"
    is_return_ordered: bool = False  # whether the action that brings it back was issued
    loss: Failure | None = None  # if it is away and no other host has its ranks
    pause_s: float = 0.0  # before it is dialled


@dataclass(frozen=True, slots=True)
class UnexplainedFailure:
    """A failed rank, until ``deadline`` or until another loss explains the failure."""

    deadline: float
    slot: int
    failure: Failure


@dataclass(slots=True)
class Generation:
    """One group of ranks.

    Attributes:
        planned, is_paused: As in :class:`Regroup`.
    """

    number: int
    members: tuple[int, ...]
    formed_at: float = 0.0
    planned: bool = False
    is_paused: bool = False
    regrouping: set[int] = field(default_factory=set)  # slots that do not train in it yet
    connecting: set[int] = field(default_factory=set)  # slots without all connections yet
    gathered_at: float | None = None  # when all members were there to connect


class RankStates:
    """The state of ranks and hosts, and what follows from it without a decision.

    Args:
        timeout_s: Seconds for which the ranks wait for them with their state in memory.
    """

    def __init__(self, hosts_of: Mapping[int, str], min_hosts: int = 1,
                 timeout_s: float = 600.0, policy: RetryPolicy | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self._clock = clock
        self._ranks = {slot: Rank(slot, host) for slot, host in sorted(hosts_of.items())}
        self._hosts = {host: Host() for host in hosts_of.values()}
        self._min_hosts, self._timeout_s = min_hosts, timeout_s
        self._policy = policy or RetryPolicy()
        self._generation = Generation(0, tuple(self._ranks))
        self._formers: list[Generation] = []  # by number
        self._store_host = hosts_of[min(hosts_of)]
        self._store_is_lost = False
        self._step = -1  # the latest that was reported
        self._progress_at: float | None = None  # when a rank last reported progress
        self._progress_before_break: float | None = None  # the same before the group broke
        self._broken_at: float | None = None  # when a member of the generation was lost
        self._losses: list[Failure] = []  # since the last stable generation
        self._lost_slots: dict[int, str] = {}  # with their hosts
        self._unexplained: list[UnexplainedFailure] = []
        self._wait_started_at: float | None = None
        self._retried_step = -1  # step at which the same members had to regroup
        self._blocked_pairs: dict[frozenset[str], int] = {}  # with the step of an error
        self._blocked_at: float | None = None  # the last progress before the first error
        self._exclusions: Counter[str] = Counter()
        self._abandon_reason: Failure | None = None
        self._deadlocked_at: float | None = None
        self.is_stopping = False  # the ranks were asked to save and stop
        self._stop_started_at: float | None = None
        self._closed_reason = ""  # why no rank can join any more
        self._has_ended = False
        self._actions: list[Action] = []

    @property
    def _now(self) -> float:
        return self._clock()

    @property
    def can_recover(self) -> bool:
        """Whether the ranks recover from losses: all of them have reported that they can."""
        members = [self._ranks[slot] for slot in self._generation.members]
        has_session = any(rank.is_recoverable for rank in members)
        are_able = all(rank.is_recoverable for rank in members if rank.state == "in")
        return has_session and are_able and not self._has_ended

    @property
    def has_interrupted(self) -> bool:
        """Whether ranks had an error in a collective and wait for a new group."""
        return any(rank.interrupted_at is not None for rank in self._in_state("in"))

    @property
    def group(self) -> tuple[int, ...]:
        """Slots of the present generation in rank order."""
        return self._generation.members

    @property
    def is_stable(self) -> bool:
        """Whether all members train in the present generation."""
        return not self._generation.regrouping and self._broken_at is None

    @property
    def accepts_newcomers(self) -> bool:
        """Whether newcomers can join."""
        return not self._closed_reason

    @property
    def is_waiting(self) -> bool:
        """Whether too few nodes are left and the ranks wait for another."""
        return self._wait_started_at is not None and not self._has_ended

    @property
    def is_regrouping(self) -> bool:
        """Whether recovering ranks are between two groups, so that their silence is no hang."""
        return self.can_recover and (self.is_waiting or not self.is_stable)

    @property
    def required_hosts(self) -> tuple[int, float]:
        """How many hosts are needed, and for how many seconds the ranks wait for them."""
        return self._min_hosts, self._timeout_s

    @property
    def is_finished(self) -> bool:
        """Whether all ranks of a session have ended with status 0, including the one that saves."""
        first = self._ranks[self._generation.members[0]]
        return bool(first.is_recoverable) and first.state == "done" and not self._in_state("in")

    @property
    def is_pending(self) -> bool:
        """Whether recovering ranks train or are about to train again."""
        return self.can_recover and bool(self._in_state("in"))

    def is_newcomer(self, slot: int) -> bool:
        """Returns whether this is a newcomer that has not joined yet and was not killed."""
        rank = self._ranks[slot]
        return rank.state in ("joining", "ready", "starting") and not rank.killed

    def starting_newcomers(self) -> list[tuple[int, str, float]]:
        """Returns newcomers that cannot join yet, as (slot, host, start time)."""
        if self.is_stopping or not self.can_recover:
            return []
        return [(rank.number, rank.host, rank.started_at) for rank in self._in_state("starting")
                if rank.alive and not rank.killed]  # fmt: skip

    @property
    def ungrouped(self) -> set[int]:
        """Newcomers that are in no group, so that no rank waits for them."""
        return {rank.number for rank in self._in_state("starting", "ready")}

    def is_forming(self, limit_s: float) -> bool:
        """Returns whether ranks form or await a group, or formed one less than ``limit_s`` ago."""
        timeout_s = limit_s if self.is_stable else FORMING_S
        is_recent = self._now - self._generation.formed_at < timeout_s
        is_forming = (self._generation.number > 0 and is_recent) or self.is_waiting
        return self.can_recover and is_forming

    def _in_state(self, *which: RankState) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.state in which]

    def _drop(self, rank: Rank, failure: Failure | None) -> None:
        """Counts the process of a slot as lost."""
        if rank.state == "in":
            rank.lost_at, rank.restart_at = failure.time if failure else self._now, self._now
            rank.failed_starts = 0 if rank.joined_step is None else rank.failed_starts
            self._lost_slots[rank.number] = rank.host
            if failure is not None and failure not in self._losses:
                self._losses.append(failure)
        else:
            self._count_failed_start(rank)
        if rank.number in self._generation.members and self._broken_at is None:
            self._broken_at = self._now
        rank.state, rank.loss, rank.connects_to = "lost", failure, None
        rank.interrupted_at, rank.frozen, rank.hang_reason = None, False, ""

    def _count_failed_start(self, rank: Rank) -> None:
        rank.failed_starts += 1
        rank.restart_at = self._now + (self._policy.newcomer_delay_s(rank.failed_starts) or 0.0)

    def _close(self, reason: str) -> None:
        """Lets no rank join any more, for this reason."""
        self._closed_reason = self._closed_reason or reason
        for rank in self._in_state("starting", "ready"):
            self._kill(rank)
            self._schedule_restart(rank)

    def _schedule_restart(self, rank: Rank) -> None:
        """Restarts a newcomer without counting a failed start."""
        rank.state, rank.failed_starts, rank.restart_at, rank.joined_step = "lost", 0, 0.0, None

    def _confirm_steps(self, which: RankState, step: int | None = None) -> None:
        """Marks newcomers in a state that have made a step with the others since they joined.

        Args:
            which: ``in``, or ``lost`` just now.
            step: The last step of the survivors; ``None`` for the latest reported one.
        """
        completed_step = self._step if step is None else step
        for rank in self._in_state(which):
            if rank.joined_step is not None and completed_step > rank.joined_step:
                rank.joined_step, rank.failed_starts = None, 0

    def _kill(self, rank: Rank) -> None:
        rank.killed, rank.killed_at = True, None
        self._actions.append(Kill(rank.host, (rank.number,)))

    def _fail(self, *failures: Failure, reason: str = "") -> None:
        self._actions += [End("the job has failed"), Fail(failures, reason)]
        self._has_ended = True

    @property
    def _survivors(self) -> tuple[int, ...]:
        members = [self._ranks[slot] for slot in self._generation.members]
        trains = (rank for rank in members if rank.state == "in" and not rank.session_closed)
        return tuple(rank.number for rank in trains)

    @property
    def _is_training_complete(self) -> bool:
        """Whether the training is over for one rank and so for all: no rank joins any more."""
        closed = any(rank.session_closed for rank in self._in_state("in"))
        return closed or bool(self._in_state("done"))

    @property
    def _is_connecting(self) -> bool:
        """Whether all ranks of a new group are there and open its connections."""
        return self._generation.gathered_at is not None and bool(self._generation.connecting)
