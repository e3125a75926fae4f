"""Which ranks train together, and what is to be done when some are lost or can come back. Pure.

What becomes known is told to :class:`Members` by one method each; :meth:`Members.decide` then says
what is to be done, each thing once. A *slot* is a rank's number in the plan, which never changes.
Ranks train in *generations*: each is a group of slots in rank order, survivors first as they were,
then newcomers. A group that lost a member is made anew without it at once; who is started in its
place joins between two steps, when it is ready.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.launch.allowance import Verdict, signature
from paceline.spec.failure import ASTRAY, UNLIKE, Failure

ANSWER_S = 3.0  # how long a rank that was interrupted waits until somebody is known to be lost
TOGETHER_S = 1.0  # newcomers that are ready wait so long for others that are about to be
OWN_S = 0.5  # a failure of the program's own waits so long for the same on other ranks
LEAVING_S = 1.0  # a rank that has failed may take so long to end
RETRIES_S = (0.0, 1.0, 5.0)  # before each try to start a newcomer; after the last it is left out
MOST_STRIKES = 3  # signals that end the same rank without a step in between
KILL_AGAIN_S = 5.0  # after which a rank that was to be ended and lives is ended once more
LAST_S = 10.0  # all that have the training's state hang for so long: they are ended, too
SAVED = 143  # the exit status of a rank that was asked to stop, and has saved
TOO_SOON = "it ended with status 0 before it had joined"
STOPPED = "Stopped:"  # so begins what it raises
# A child of a rank, ended from outside: the system's choice where memory is short
WORKER_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Terminated)")
JOINS_S = 1.0  # in which who joins may still get the state when the ranks are asked to stop
STOP_S = 10.0  # for the last regrouping, before ranks are asked to stop in any case
MEET_S = 15.0  # for connections of a new group, once all its ranks are there
FORMING_S = 30.0  # for a new group, after which one that is not there is a hang
APART_S = 30.0  # to which a host that was sent away is dialled later, twice as long each time
LONGEST_APART_S = 600.0

Standing = Literal["in", "joining", "ready", "starting", "lost", "done", "left out"]
Standstill = Literal["up", "no server", "lost", "gone"]


@dataclass(frozen=True, slots=True)
class Regroup:
    """A new generation: all living ranks are told.

    Attributes:
        generation: Its number.
        members: Slots in rank order.
        planned: Somebody joins, between two steps; else somebody is gone, and it is done at once.
        store_host: Where a fresh store is opened for it; empty when the former one serves.
        holds: Too few nodes are there to train: who joins gets the state, and no batch is given.
    """

    generation: int
    members: tuple[int, ...]
    planned: bool
    store_host: str = ""
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Newcomers are forked on a host, for these slots."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """These ranks of a host are ended."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """A host's fork server is started once more."""

    host: str


@dataclass(frozen=True, slots=True)
class Dial:
    """A host is dialled, until it is back or the job is over; ``after_s``: not before."""

    host: str
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendAway:
    """A host that lives is left out, with its agent: another and it do not hear each other.

    It is lost like any other then, but dialled not before ``again_s``.
    """

    host: str
    why: str
    again_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Too few nodes are left: the ranks wait with their state in memory."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody came back: the ranks save and stop."""

    why: Failure


@dataclass(frozen=True, slots=True)
class End:
    """There is no recovery: who waits for word raises its error."""

    why: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The attempt has failed.

    Attributes:
        failures: Of its ranks.
        why: Why there is no use in another one; empty where nobody knows.
    """

    failures: tuple[Failure, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The survivors train on.

    Attributes:
        losses: What was lost, in order.
        slots: Who was.
        others: How many train on without them.
        seconds: From the first loss until all of them had the new group; where a line fell silent,
            from the last sign that they went on.
        last: They only save and stop.
        hosts: On which the slots were; a spare may have them by now.
    """

    losses: tuple[Failure, ...]
    slots: tuple[int, ...]
    others: int
    seconds: float
    last: bool = False
    hosts: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """Newcomers train with the others; ``seconds``: since the first of them was lost."""

    slots: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Newcomers for this slot do not get as far as joining: the others go on without."""

    slot: int
    why: Failure | None


@dataclass(frozen=True, slots=True)
class NotAgain:
    """Nobody is started in the place of these: the others go on without.

    Attributes:
        slots: That were lost, or had not joined yet.
        why: Nobody can join.
    """

    slots: tuple[int, ...]
    why: str


After = Callable[[Failure, float, int | None], Verdict]
Order = Regroup | Start | Kill | Prepare | Dial | SendAway | Stop | End | Fail
Action = Order | Wait | Recovered | Joined | LeftOut | NotAgain


@dataclass(slots=True)
class _Slot:
    number: int
    host: str
    standing: Standing = "in"
    alive: bool = True  # its process, as far as its agent has told
    able: bool | None = None  # whether its training can go on without others
    interrupted_at: float | None = None
    lost_at: float = 0.0
    kill_at: float | None = None
    killed: bool = False  # by us
    killed_at: float | None = None  # when that was looked at first
    frozen: bool = False
    hung: str = ""  # why it is ended
    tries: int = 0  # newcomers in a row that made no step with the others
    started_at: float = 0.0
    joined_at: int | None = None  # the step, of a newcomer that is not known to have made one
    next_try: float = 0.0
    ready_at: float = 0.0
    strikes: tuple[int, int] = (-1, 0)  # step, and how many signals ended it there
    last: Failure | None = None
    saved: bool = False  # as it was asked to, and is about to end
    session_closed: bool = False  # its training is over, and its script goes on by itself
    came: int = 0  # in which generation it joined


@dataclass(slots=True)
class _Node:
    standing: Standstill = "up"
    ordered: bool = False  # what brings it back
    why: Failure | None = None  # it is away, and no other has taken its ranks
    pause_s: float = 0.0  # before it is dialled


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank that failed by itself, until it is known whether others are the cause."""

    until: float
    slot: int
    failure: Failure


@dataclass(slots=True)
class _Generation:
    number: int
    members: tuple[int, ...]
    begun: float = 0.0
    planned: bool = False
    holds: bool = False
    unsettled: set[int] = field(default_factory=set)
    unformed: set[int] = field(default_factory=set)  # do not have all connections yet
    met_at: float | None = None  # when all were there to make them


def _never(failure: Failure, now: float, step: int | None) -> Verdict:
    return Verdict(False)


class Members:
    """The ranks of one attempt.

    Args:
        places: Host by slot.
        least: So many nodes must be there for the ranks to train.
        patience_s: How long they wait for that, with their state in memory.
        after: Asked of a failure of the program's own, the time and the step: may it go on?
    """

    def __init__(self, places: Mapping[int, str], least: int = 1, patience_s: float = 600.0,
                 after: After = _never) -> None:  # fmt: skip
        self._slots = {slot: _Slot(slot, host) for slot, host in sorted(places.items())}
        self._nodes = {host: _Node() for host in places.values()}
        self._least, self._patience_s, self._after = least, patience_s, after
        self._generation = _Generation(0, tuple(self._slots))
        self._store_host = places[min(places)]
        self._store_lost = False
        self._step = -1  # the latest that was told
        self._sign_at: float | None = None  # when a rank has said last that it goes on
        self._went_on_at: float | None = None  # the last such sign before a group was torn
        self._torn_at: float | None = None  # since when a member of the generation is gone
        self._losses: list[Failure] = []  # since the last generation that was settled
        self._gone: dict[int, str] = {}  # and on which host
        self._held: list[_Held] = []
        self._waiting_since: float | None = None
        self._alone_at = -1  # step at which the same members had to regroup
        self._silent: dict[frozenset[str], int] = {}  # hosts of a line, and the step of an error
        self._silent_since: float | None = None  # the last sign before the first of them
        self._sent_away: Counter[str] = Counter()
        self._crash: tuple[Failure, int, int] | None = None  # the last, its step and generation
        self._gave_up: Failure | None = None
        self._all_hang_since: float | None = None
        self._stopping = False  # the ranks were asked to save and stop
        self._stopping_since: float | None = None
        self._closed = ""  # why nobody can join any more
        self._over = False
        self._news: list[Action] = []

    # --- what is asked about them ------------------------------------------------------------

    @property
    def recovers(self) -> bool:
        """Whether losses are recovered from: all ranks have said that they can."""
        members = [self._slots[slot] for slot in self._generation.members]
        able = any(one.able for one in members)  # not if none has ever said so and all have ended
        return able and not self._over and all(one.able for one in members if one.standing == "in")

    @property
    def at_a_loss(self) -> bool:
        """Whether ranks had an error in a collective, and wait to hear who is lost."""
        return any(one.interrupted_at is not None for one in self._standing("in"))

    @property
    def members(self) -> tuple[int, ...]:
        """Slots of the present generation in rank order."""
        return self._generation.members

    @property
    def settled(self) -> bool:
        """Whether all members train in the present generation."""
        return not self._generation.unsettled and self._torn_at is None

    @property
    def stopping(self) -> bool:
        """Whether the ranks were asked to save and stop."""
        return self._stopping

    @property
    def open(self) -> bool:
        """Whether newcomers can join."""
        return not self._closed

    @property
    def waiting(self) -> bool:
        """Whether too few nodes are left, and the ranks wait for another, in a group or in none."""
        return self._waiting_since is not None and not self._over

    @property
    def awaited(self) -> tuple[int, float]:
        """How many nodes are needed, and for how long they are waited for, in seconds."""
        return self._least, self._patience_s

    @property
    def finished(self) -> bool:
        """Whether the ranks of a session have ended in order, the one that saves among them."""
        first = self._slots[self._generation.members[0]]
        return bool(first.able) and first.standing == "done" and not self._standing("in")

    @property
    def pending(self) -> bool:
        """Whether ranks train, or are about to again."""
        return not self._over and bool(self._standing("in"))

    # --- what becomes known ------------------------------------------------------------------

    def said_able(self, slot: int, able: bool) -> None:
        """A rank has said whether its training goes on without ranks that are lost."""
        self._slots[slot].able, self._slots[slot].session_closed = able, False

    def session_closed(self, slot: int) -> None:
        """A rank's training is over: nobody can do in its place what its script does now."""
        self._slots[slot].session_closed = True

    def stepped(self, step: int | None, now: float | None = None) -> None:
        """A rank has told its step; ``now``: as a sign that it goes on."""
        if step is not None:
            self._step = max(self._step, step)
            self._prove("in")
        self._sign_at = self._sign_at if now is None else now

    def comes(self, slot: int) -> bool:
        """Whether this is a newcomer that has not joined yet, and that we have not ended."""
        one = self._slots[slot]
        return one.standing in ("joining", "ready", "starting") and not one.killed

    def starting(self) -> list[tuple[int, str, float]]:
        """Newcomers that cannot join yet: slot, host and when each was started."""
        some = [one for one in self._standing("starting") if one.alive and not one.killed]
        return [(one.number, one.host, one.started_at) for one in some]

    @property
    def outside(self) -> set[int]:
        """Newcomers that are in no group: nobody waits for them."""
        return {one.number for one in self._standing("starting", "ready")}

    def forming(self, now: float, limit_s: float) -> bool:
        """Whether a group is being made or was just now, or nodes are waited for: that is no hang.

        Args:
            now: The time.
            limit_s: Seconds that ranks may stand still, also in a group that was made.
        """
        patience_s = limit_s if self.settled else FORMING_S
        just_now = self._generation.number > 0 and now - self._generation.begun < patience_s
        return just_now or self.waiting

    def interrupted(self, slot: int, now: float, *, silent: str = "",
                    generation: int | None = None) -> None:  # fmt: skip
        """A rank had an error in a collective, and waits for word.

        Args:
            slot: Which.
            now: The time.
            silent: The host that it could not hear; empty when its error is of another kind.
            generation: The newest group that it knew of.
        """
        host = self._slots[slot].host
        if silent in self._nodes and silent != host:
            if self._step > max(self._silent.values(), default=-1) + 1:
                self._silent, self._silent_since = {}, None
            self._silent[frozenset((host, silent))] = self._step
            self._silent_since = self._silent_since or self._sign_at or now
        late = generation is not None and generation < self._generation.number
        if not late or self._generation.planned:  # else it will find the present group's word
            self._slots[slot].interrupted_at = now

    def gathered(self, generation: int, now: float) -> None:
        """All ranks of a new group are there, and make its connections."""
        if generation == self._generation.number and self._generation.met_at is None:
            self._generation.met_at = now

    def formed(self, slot: int, size: int) -> None:
        """A rank has all connections of a group of that size."""
        if size == len(self._generation.members):
            self._generation.unformed.discard(slot)

    def ready(self, slot: int, now: float) -> None:
        """A newcomer can join."""
        one = self._slots[slot]
        if one.standing == "starting":
            one.standing, one.ready_at = "ready", now

    def closed(self, slot: int, why: str, now: float) -> None:
        """A member is past the place of the script at which newcomers join.

        All of them pass it together. Where this one has not made the group in which somebody was
        about to join, nobody makes it any more: another one follows.
        """
        if self._closed or self._slots[slot].standing != "in":
            return
        self._close(why)
        never_made = self._generation.planned and slot in self._generation.unsettled
        if never_made and self._torn_at is None:
            self._torn_at = now

    def regrouped(self, slot: int, generation: int, step: int | None, now: float) -> None:
        """A rank trains in a new generation, from that step on."""
        self.stepped(step)
        if generation != self._generation.number:
            return
        if step is not None:
            self._prove("lost", step)
        one = self._slots[slot]
        one.interrupted_at = None
        if one.hung and not one.killed:  # it has come out after all
            one.hung, one.frozen = "", False
        if one.standing == "joining":
            one.standing, one.able, one.joined_at = "in", True, self._step
            one.came = generation
        self._generation.unsettled.discard(slot)
        if self.settled:
            self._settle(now)

    def done(self, slot: int, now: float) -> None:
        """A rank has ended in order."""
        one = self._slots[slot]
        one.alive = False
        if one.standing == "in":
            one.standing = "done"
            group = self._generation
            if self._stopping and not group.planned and slot in group.unsettled:
                self._torn_at = now  # it had left before it heard of the group: others wait for it
            group.unsettled.discard(slot)
        elif one.standing in ("joining", "ready", "starting"):
            self._drop(one, Failure("early", one.host, slot, now, 0, headline=TOO_SOON), now)

    def rank_lost(self, slot: int, failure: Failure, now: float) -> None:
        """A rank was ended by a signal, or has failed by itself."""
        one = self._slots[slot]
        if self._stopping and failure.kind == "exception":
            one.saved = failure.headline.startswith(STOPPED)
            return  # its end follows
        if self._stopping and failure.kind == "exit" and (one.saved or failure.code == SAVED):
            self.done(slot, now)
            return
        ended = failure.kind in ("signal", "exit")
        one.alive = one.alive and not ended
        held = any(held.slot == slot for held in self._held)
        if held or one.standing in ("lost", "left out", "done"):
            return
        if not ended:
            one.kill_at = now + LEAVING_S
        if one.standing != "in":
            self._drop(one, replace(failure, headline=one.hung or failure.headline), now)
        elif one.session_closed and failure.kind == "signal":
            self._fail(failure)
        elif failure.kind == "signal" or WORKER_KILLED.search(failure.headline):
            self._ended_by_signal(one, failure, now)
        elif why := next((one for one in (UNLIKE, ASTRAY) if one in failure.headline), ""):
            self._drop(one, failure, now)
            self._close(why)  # the next one would do the same
        else:
            until = now + (ANSWER_S if failure.echo else OWN_S)
            self._held.append(_Held(until, slot, failure))
            one.interrupted_at = None

    def server_died(self, host: str, failure: Failure, now: float) -> None:
        """A host's fork server has died, and its ranks with it: their ends are told, too."""
        if self._nodes[host].standing == "up":
            self._nodes[host] = _Node("no server")
        self._lose_host(host, failure, now)

    def server_up(self, host: str) -> None:
        """A host's fork server can start ranks."""
        if self._nodes[host].standing != "up":
            self._nodes[host] = _Node()
            for one in self._standing("left out"):
                if one.host == host and self.open:  # what stood in its way may be over
                    self._put_off(one)

    def node_lost(self, host: str, failure: Failure, now: float, *, redials: bool = True) -> None:
        """A host has gone away, or its agent has; its ranks count as gone, whatever they do."""
        if self._nodes[host].standing not in ("lost", "gone"):
            self._nodes[host] = _Node("lost" if redials else "gone", why=failure)
        for one in self._slots.values():
            if one.host == host:
                one.alive, one.kill_at = False, None
        self._lose_host(host, failure, now)

    def node_gone(self, host: str) -> None:
        """A host that was lost will not come back."""
        self._nodes[host].standing = "gone"

    def came(self, host: str, slots: Sequence[int], now: float) -> None:
        """A host that had no part in the job can start ranks.

        They are further ones, or lost ones of another host, which is not waited for any more.
        """
        self._nodes[host] = _Node()
        for number in slots:
            if (one := self._slots.get(number)) is not None:
                self._nodes[one.host] = _Node("gone")
                one.host = host
                if one.standing != "done":
                    one.standing, one.tries, one.next_try = "lost", 0, now
                    one.joined_at = None
            else:
                new = _Slot(number, host, "lost", alive=False, lost_at=now, next_try=now)
                self._slots[number] = new

    def store_ended(self, host: str) -> None:
        """The rendezvous store there is gone; newcomers find in it how the others began."""
        if host == self._store_host and not self._store_lost:
            self._store_lost = True
            for one in self._standing("starting"):
                self._kill(one)
                self._put_off(one)

    def start_failed(self, host: str, slots: Sequence[int], now: float, why: str = "") -> None:
        """The agent could not start newcomers."""
        for slot in slots:
            one = self._slots[slot]
            if one.host != host:  # a spare has taken its ranks over meanwhile
                continue
            one.alive = False
            if one.standing == "starting":
                self._drop(one, Failure("agent", host, slot, now, headline=why), now)

    def frozen(self, slot: int, stopped: bool) -> None:
        """A signal has stopped a rank for too long, or no longer does."""
        self._slots[slot].frozen = stopped

    def hung(self, slot: int, headline: str) -> None:
        """The others have waited for a rank for too long: it is ended, with these words."""
        self._slots[slot].frozen, self._slots[slot].hung = True, headline

    def astray(self, sides: Sequence[Sequence[int]], headline: str) -> bool:
        """Ranks wait in different collectives, for good.

        Where those that were there first all wait in one, who has come since goes another way, as
        a loop does that counts from its own beginning: it is ended, and nobody else comes.

        Args:
            sides: The slots that wait in the same one.
            headline: Why these are ended.

        Returns:
            Whether the others go on.
        """
        trains = {one.number: one.came for one in self._standing("in")}
        first = {slot for slot, came in trains.items() if came == min(trains.values())}
        theirs = next((side for side in sides if first <= {*side}), None)
        if theirs is None or self._stopping:
            return False
        strays = [slot for slot in trains if slot not in theirs]
        for slot in strays:
            self.hung(slot, headline)
        if strays:
            self._close(ASTRAY)
        return bool(strays)

    def deaf(self, now: float) -> bool:
        """All ranks wait for each other in one collective, for too long.

        Returns:
            Whether they do it again in a new group: once at a step, and while all are there.
        """
        gone = self._standing("done") or self._standing("joining")
        if gone or self._alone_at >= self._step or not self.settled or self._gave_up is not None:
            return False
        for one in self._standing("in"):
            one.interrupted_at = now - ANSWER_S
        return True

    def apart(self, lines: Sequence[tuple[str, str]], since: float, now: float) -> bool:
        """Hosts do not hear each other, which is certain: nobody tries to meet once more.

        Args:
            lines: Two hosts each.
            since: When the ranks gave their last sign.
            now: The time.

        Returns:
            Whether the others go on without one host of each line.
        """
        meets = self._meets and not self._stopping
        if self._torn_at is not None or not (self.settled or meets) or self._held:
            return False
        if self._over or self._gave_up is not None or self._standing("done"):
            return False
        self._silent = {frozenset(line): self._step for line in lines}  # not what errors thought
        self._silent_since = since
        return self._divide(now)

    def stop(self) -> None:
        """The ranks are asked to save and stop.

        They go on without what is lost meanwhile, or was, whatever number of nodes was wanted: in
        a group of who is left they can finish their step and save. Nobody joins any more.
        """
        if self._over or self._stopping:
            return
        self._stopping = True
        for one in self._standing("ready", "starting"):
            self._kill(one)

    # --- how it stands -----------------------------------------------------------------------

    def _standing(self, *which: Standing) -> list[_Slot]:
        return [one for one in self._slots.values() if one.standing in which]

    def _drop(self, one: _Slot, failure: Failure | None, now: float) -> None:
        """A slot's process is out of the job."""
        if one.standing == "in":
            one.lost_at, one.next_try = failure.time if failure else now, now
            one.tries = 0 if one.joined_at is None else one.tries
            self._gone[one.number] = one.host
            if failure is not None and failure not in self._losses:
                self._losses.append(failure)
        else:
            one.tries += 1
            one.next_try = now + RETRIES_S[min(one.tries, len(RETRIES_S) - 1)]
        if one.number in self._generation.members and self._torn_at is None:
            self._torn_at = now
        one.standing, one.last = "lost", failure
        one.interrupted_at, one.frozen, one.hung = None, False, ""

    def _close(self, why: str) -> None:
        """Nobody joins any more, for this reason."""
        self._closed = self._closed or why
        for one in self._standing("starting", "ready"):
            self._kill(one)
            self._put_off(one)

    def _put_off(self, one: _Slot) -> None:
        """A newcomer has to begin once more, by no fault of its own."""
        one.standing, one.tries, one.next_try, one.joined_at = "lost", 0, 0.0, None

    def _prove(self, which: Standing, step: int | None = None) -> None:
        """Newcomers that are so have made a step with the others, or not; all make it together.

        Args:
            which: ``in``, or ``lost`` just now.
            step: That those had made together who are left; else the latest that was told.
        """
        made = self._step if step is None else step
        for one in self._standing(which):
            if one.joined_at is not None and made > one.joined_at:
                one.joined_at, one.tries = None, 0

    def _lose_host(self, host: str, failure: Failure, now: float) -> None:
        self.store_ended(host)
        here = [one for one in self._slots.values() if one.host == host]
        if any(one.session_closed and one.standing == "in" for one in here) and not self._over:
            self._fail(failure)
        for one in here:
            if one.standing in ("in", "joining", "ready", "starting"):
                self._drop(one, failure, now)
                one.tries, one.next_try, one.joined_at = 0, now, None

    def _ended_by_signal(self, one: _Slot, failure: Failure, now: float) -> None:
        if one.killed:
            headline = one.hung or "stood still, stopped by a signal (SIGSTOP): it was ended"
            failure = replace(failure, headline=headline)
        step, count = one.strikes
        one.strikes = (self._step, count + 1 if step == self._step else 1)
        if one.strikes[1] >= MOST_STRIKES:
            self._fail(failure)
        elif (first := self._crashed_before(failure)) is not None:
            self._fail(first, why=f"ranks crash at the same step ({self._step}), on the same data:"
                       " it is the program's own")  # fmt: skip
        else:
            self._drop(one, failure, now)

    def _crashed_before(self, failure: Failure) -> Failure | None:
        """The crash of another rank at this step, after which the others have done it again."""
        if not signature(failure):
            return None
        before, group = self._crash, self._generation.number
        self._crash = failure, self._step, group
        if before is None or (before[1], signature(before[0])) != (self._step, signature(failure)):
            return None
        return before[0] if before[2] != group else None

    def _fail(self, *failures: Failure, why: str = "") -> None:
        self._news += [End("the job has failed"), Fail(failures, why)]
        self._over = True

    def _settle(self, now: float) -> None:
        """All members train in the present generation."""
        if self._generation.planned:
            joined = tuple(s for s in self._generation.members if self._slots[s].lost_at)
            if joined:
                since = min(self._slots[slot].lost_at for slot in joined)
                self._news.append(Joined(joined, now - since))
        elif self._gone and not self._generation.holds:
            since = min((failure.time for failure in self._losses), default=now)
            since = max(since, self._went_on_at or since)  # nobody heard it, and they did
            gone = dict(sorted(self._gone.items()))
            others = len({*self._generation.members} - {*gone})
            seconds = max(0.0, now - since)
            last = self._stopping or self._gave_up is not None
            self._news.append(Recovered(tuple(self._losses), (*gone,), others, seconds, last,
                                        (*gone.values(),)))  # fmt: skip
        for slot in self._generation.members:
            self._slots[slot].lost_at = 0.0
        if not self._generation.holds:  # else all of it is told once they train on
            self._losses, self._gone = [], {}
        for one in self._standing("lost"):
            if one.joined_at is not None:  # it has joined in vain, as if it had not
                one.joined_at, one.tries = None, one.tries + 1
                one.next_try = now + RETRIES_S[min(one.tries, len(RETRIES_S) - 1)]

    # --- what is to be done ------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """What is to be done now; nothing is said twice."""
        if not self._over:
            self._judge_held(now)
        if not self._over and not self._standing("in"):
            self._all_gone()
        if not self._over:
            self._end_ranks(now)
            self._reunite(now)
            self._bring_back()
            self._mend(now)
            self._give_up(now)
            self._start(now)
            self._take_in(now)
        news, self._news = self._news, []
        return news

    def _judge_held(self, now: float) -> None:
        """Who failed because another was lost is lost, too; else it is the program's own doing."""
        if self._stopping:  # whose fault it is does not matter any more
            self._release(self._held, now)
        if self._losses:
            self._release([held for held in self._held if held.failure.echo], now)
        all_of_them = {held.slot for held in self._held} >= set(self._survivors)
        due = [held for held in self._held if all_of_them or now >= held.until]
        if not due:
            return
        first = min(due, key=lambda held: (held.failure.echo, held.failure.time)).failure
        step = self._step if self._step >= 0 else None
        if not all_of_them and self._after(first, now, step).again:
            self._release(due, now)
        else:
            self._fail(*(held.failure for held in due))

    def _release(self, held: Sequence[_Held], now: float) -> None:
        self._held = [one for one in self._held if one not in held]
        for one in held:
            if self._slots[one.slot].session_closed and not (self._stopping or self._over):
                self._fail(one.failure)
            else:
                self._drop(self._slots[one.slot], one.failure, now)

    def _all_gone(self) -> None:
        """Nobody has the state any more: in order, or lost."""
        if self.finished:
            self._over = True
        elif self._losses:
            self._fail(*self._losses)
        if self.finished or (self._over and self._stopping):
            for host in self._nodes:
                left = tuple(s.number for s in self._standing("joining", "ready", "starting")
                             if s.host == host)  # fmt: skip
                if left:
                    self._news.append(Kill(host, left))

    def _end_ranks(self, now: float) -> None:
        """Kills who stands still, where the others go on without it, and who does not end.

        Also once more, where the order has not come through: nobody starts in its place before.
        """
        if self._stopping:
            self._stopping_since = self._stopping_since or now
            if now >= self._stopping_since + JOINS_S:  # a large state, or a slow line
                for one in self._standing("joining"):
                    if not one.killed:
                        self._kill(one)
        trains = self._standing("in")
        moving = [one for one in trains if not one.frozen]
        # Their state is out of reach: better to go on from a checkpoint than to wait for them.
        all_hang = bool(trains) and all(one.hung for one in trains)
        self._all_hang_since = (self._all_hang_since or now) if all_hang else None
        given_up = self._all_hang_since is not None and now >= self._all_hang_since + LAST_S
        # Where others were lost, and wait for who stands still, no user has paused the job.
        waited = bool(self._standing("ready"))
        for one in self._slots.values():
            late = one.kill_at is not None and now >= one.kill_at
            over = bool(moving) or ((waited or given_up) and bool(one.hung))
            frozen = (
                one.frozen and over and not (one.killed or one.session_closed) and self.recovers
            )
            if one.killed and one.killed_at is None:
                one.killed_at = now
            lives_on = one.killed_at is not None and now >= one.killed_at + KILL_AGAIN_S
            if one.alive and (late or frozen or lives_on):
                self._kill(one)
            if late:
                one.kill_at = None

    def _kill(self, one: _Slot) -> None:
        one.killed, one.killed_at = True, None
        self._news.append(Kill(one.host, (one.number,)))

    def _bring_back(self) -> None:
        if self._stopping:
            return
        for host, node in self._nodes.items():
            if not node.ordered and node.standing in ("no server", "lost"):
                node.ordered = True
                no_server = node.standing == "no server"
                self._news.append(Prepare(host) if no_server else Dial(host, node.pause_s))

    def _mend(self, now: float) -> None:
        """A generation that lost members, or holds, is followed by one that trains on."""
        torn = self._torn_at is not None or (self._store_lost and bool(self._generation.unsettled))
        if not torn and not (self._generation.holds and self.settled):
            return
        if torn:
            for one in self._standing("joining"):  # whether it has the state is not known
                self._kill(one)
                self._put_off(one)
        there = [host for host, node in self._nodes.items() if node.standing in ("up", "no server")]
        if len(there) < self._least and self._gave_up is None and not self._stopping:
            self._wait(now, there)
            if self._gave_up is None:
                if torn and self._can_be_given:
                    self._group(self._survivors, now, planned=False)
                return
        self._waiting_since = None
        if self._survivors:
            self._group(self._survivors, now, planned=False)
        else:  # the others' training is over: nobody does what is left to do of this one's
            self._fail(*self._losses)

    @property
    def _can_be_given(self) -> bool:
        """Whether a rank was lost whose host is there: another is to have the state, too."""
        up = {host for host, node in self._nodes.items() if node.standing == "up"}
        lost = any(one.host in up for one in self._standing("lost"))
        return lost and bool(self._survivors) and not self._ends

    @property
    def _survivors(self) -> tuple[int, ...]:
        every = [self._slots[slot] for slot in self._generation.members]
        return tuple(one.number for one in every if one.standing == "in" and not one.session_closed)

    @property
    def _ends(self) -> bool:
        """Whether the training is over for one of its ranks, so for all: nobody joins any more."""
        closed = any(one.session_closed for one in self._standing("in"))
        return closed or bool(self._standing("done"))

    def _wait(self, now: float, there: Sequence[str]) -> None:
        if self._waiting_since is None:
            self._waiting_since = now
            if self.open:
                self._news.append(Wait(tuple(host for host in self._nodes if host not in there)))
        away_for_now = any(node.standing == "lost" for node in self._nodes.values())
        nobody_comes = not (self.open and away_for_now)
        if nobody_comes or now - self._waiting_since >= self._patience_s:
            away = [node.why for node in self._nodes.values() if node.why is not None]
            self._gave_up = min(away or self._losses, key=lambda failure: failure.time)

    def _group(self, members: tuple[int, ...], now: float, *, planned: bool) -> None:
        host = self._new_store_host(members) if self._store_lost else ""
        if host:
            self._store_host, self._store_lost = host, False
        number = self._generation.number + 1
        former, holds = self._generation, self._waiting_since is not None
        if not (former.unsettled or former.holds):  # it had trained
            self._went_on_at = self._sign_at
        self._generation = _Generation(number, members, now, planned, holds, set(members),
                                       set(members))  # fmt: skip
        self._torn_at = None
        for slot in members:
            self._slots[slot].interrupted_at = None
        self._news.append(Regroup(number, members, planned, host, holds))

    def _new_store_host(self, members: Sequence[int]) -> str:
        """A host that can hold it: its fork server is up."""
        hosts = [self._slots[slot].host for slot in members]
        return next((h for h in hosts if self._nodes[h].standing == "up"), hosts[0])

    def _give_up(self, now: float) -> None:
        why = None if self._stopping else self._gave_up
        if why is not None and (self.settled or now - self._generation.begun > STOP_S):
            self._news.append(Stop(why))
            self._over = True

    def _reunite(self, now: float) -> None:
        """Ranks were interrupted, or do not meet, although nobody is lost.

        They try once more together. Where that is in vain, and they do not hear each other, one
        end of that line is left out; where it is for another reason, it is the end.
        """
        if self._torn_at is not None or (self._gave_up is not None and not self._stopping):
            return
        if self._stopping and not self.settled:
            return
        newcomers = self._standing("joining")
        if not self.settled and self._late_to_meet(now) and self._part(now):
            return
        asking = [one.interrupted_at for one in self._standing("in")
                  if one.interrupted_at is not None]  # fmt: skip
        if not asking or now - min(asking) < ANSWER_S or self._held:
            return
        alone = self._stopping or not self._standing("done")
        tried = bool(newcomers) or self._alone_at >= self._step or not alone
        new_hosts = self._new_hosts
        apart = self._apart(new_hosts) if tried and alone else None
        if apart is not None and (not newcomers or apart[0] in new_hosts):
            self._part(now)
        elif newcomers or not tried:
            for one in newcomers:
                self._kill(one)
                self._drop(one, None, now)
            self._alone_at = self._step
            self._group(self._survivors, now, planned=False)
        else:
            self._news.append(End("no rank was lost"))
            for one in self._standing("in"):
                one.interrupted_at = None

    @property
    def _new_hosts(self) -> set[str]:
        """From which ranks join, and which have none that trains."""
        trains = {one.host for one in self._standing("in")}
        return {one.host for one in self._standing("joining")} - trains

    @property
    def _meets(self) -> bool:
        """Whether all ranks of a new group are there, and make its connections."""
        return self._generation.met_at is not None and bool(self._generation.unformed)

    def _late_to_meet(self, now: float) -> bool:
        """Whether connections of a new group are waited for in vain: gloo may wait for minutes."""
        since = self._generation.met_at
        late = since is not None and now - since >= MEET_S
        return late and self._meets and not self._standing("done")

    def _part(self, now: float) -> bool:
        """Leaves out hosts until the others hear each other, as far as is known; whether any."""
        before = self._sent_away.total()
        unformed = [self._slots[slot].host for slot in self._generation.members
                    if slot in self._generation.unformed]  # fmt: skip
        for host in sorted(self._new_hosts & {*unformed}):  # whose line nobody knew
            others = [one for one in dict.fromkeys(unformed) if one not in self._new_hosts]
            if others and not self._settled_by(host):
                self._send_away(host, others, now)
        self._divide(now)
        return self._sent_away.total() > before

    def _divide(self, now: float) -> bool:
        """Leaves out one end of each line that is known to be silent; whether there was any."""
        before = self._sent_away.total()
        while (apart := self._apart(self._new_hosts)) is not None:
            self._send_away(*apart, now)
        return self._sent_away.total() > before

    def _settled_by(self, host: str) -> bool:
        """Whether an error has said whom this host does not hear."""
        return any(host in pair and step >= self._step - 1 for pair, step in self._silent.items())

    def _apart(self, new_hosts: set[str]) -> tuple[str, tuple[str, ...]] | None:
        """A host to go on without, and those of which it hears nothing; ``None``: there is none.

        A newcomer before who has the training's state, then who is at odds with most others, then
        whoever is not the host of the rank that saves.
        """
        order = [self._slots[slot].host for slot in self._generation.members
                 if self._slots[slot].standing in ("in", "joining")]  # fmt: skip
        pairs = [pair for pair, step in self._silent.items()
                 if step >= self._step - 1 and pair <= {*order}]  # fmt: skip
        if not pairs:
            return None
        count = Counter(host for pair in pairs for host in pair)
        gone = max(count, key=lambda host: (host in new_hosts, count[host], host != order[0],
                                            order.index(host)))  # fmt: skip
        others = {host for pair in pairs if gone in pair for host in pair} - {gone}
        return gone, tuple(sorted(others, key=order.index))

    def _send_away(self, host: str, others: Sequence[str], now: float) -> None:
        """A host counts as lost, and comes back as lost ones do, but not at once."""
        if len(others) == 1:
            headline = f"{host} and {others[0]} do not hear each other"
        else:
            headline = f"{host} and others ({', '.join(others)}) do not hear each other"
        began = now if self._silent_since is None else self._silent_since
        pause_s = min(LONGEST_APART_S, APART_S * 2 ** self._sent_away[host])
        self._sent_away[host] += 1
        self._news.append(SendAway(host, headline, pause_s))
        self.node_lost(host, Failure("lost", host, None, began, headline=headline), now)
        self._nodes[host].pause_s = pause_s

    def _start(self, now: float) -> None:
        """Newcomers for what is lost, where their host can start them."""
        ends = self._over or self._stopping or self._gave_up or self._ends
        if ends or self._torn_at is not None:
            return
        if not self.open:
            self._leave_out()
            return
        for host, node in self._nodes.items():
            lost = [
                one
                for one in self._standing("lost")
                if one.host == host and not one.alive and one.joined_at is None
            ]  # else the others say whether it made a step
            for one in lost:
                if one.tries >= len(RETRIES_S):
                    one.standing = "left out"
                    self._news.append(LeftOut(one.number, one.last))
            due = [one for one in lost if one.standing == "lost" and now >= one.next_try]
            if due and node.standing == "up":
                if self._store_lost and self.settled:
                    self._group(self._survivors, now, planned=True)
                for one in due:
                    one.standing, one.alive, one.kill_at = "starting", True, None
                    one.started_at = now
                    one.killed, one.killed_at = False, None
                self._news.append(Start(host, tuple(one.number for one in due)))

    def _leave_out(self) -> None:
        """Nobody can join: what is lost stays lost, which is told once the others train on."""
        lost = self._standing("lost")
        if not lost or not self.settled:
            return
        for one in lost:
            one.standing = "left out"
        self._news.append(NotAgain(tuple(one.number for one in lost), self._closed))

    def _take_in(self, now: float) -> None:
        """Newcomers that are ready join; those that are nearly ready are waited for, a little."""
        ready = self._standing("ready")
        if self._over or self._stopping or not ready or not self.settled or self._ends:
            return  # alone they would train all of it anew
        first = min(one.ready_at for one in ready)
        if self._standing("starting") and now - first < TOGETHER_S:
            return
        for one in ready:
            one.standing = "joining"
        joining = tuple(one.number for one in ready)
        self._group(self._survivors + joining, now, planned=True)
