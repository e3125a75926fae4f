"""What is to be done about the ranks of an attempt, as :class:`Members` decides it. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.spec.failure import Failure


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


Order = Regroup | Start | Kill | Prepare | Dial | SendAway | Stop | End | Fail
Action = Order | Wait | Recovered | Joined | LeftOut | NotAgain
