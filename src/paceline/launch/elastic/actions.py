"""Actions on the ranks of an attempt, as :class:`Members` decides them. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.spec.failure import Failure


@dataclass(frozen=True, slots=True)
class Regroup:
    """All living ranks form the process groups of a new generation.

    Attributes:
        generation: Its number.
        members: Slots in rank order.
        planned: Ranks join between two steps. If False, ranks were lost: regroup at once.
        store_host: Host that opens a new rendezvous store; empty to reuse the current store.
        holds: Too few nodes are left to train: newcomers get the state, but no batch is computed.
    """

    generation: int
    members: tuple[int, ...]
    planned: bool
    store_host: str = ""
    holds: bool = False


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
    """Reconnect to a host, from ``after_s`` seconds on, until it answers or the job ends."""

    host: str
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SendAway:
    """Exclude a live host and its agent, because it and another host cannot reach each other.

    It is lost like any other then, but dialled not before ``again_s``.
    """

    host: str
    why: str
    again_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Too few nodes are left: the ranks wait and keep their state in memory."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """No lost host came back in time: the ranks save and stop."""

    why: Failure


@dataclass(frozen=True, slots=True)
class End:
    """No recovery follows: ranks that wait for a new group raise their own error."""

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
    """The surviving ranks have formed a group and continue training.

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
    """New ranks have joined the training, ``seconds`` after the first lost rank was lost."""

    slots: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """New ranks for this slot repeatedly failed to join; the others continue without it."""

    slot: int
    why: Failure | None


@dataclass(frozen=True, slots=True)
class NotAgain:
    """These ranks are not replaced; the others continue without them.

    Attributes:
        slots: That were lost, or had not joined yet.
        why: Nobody can join.
    """

    slots: tuple[int, ...]
    why: str


Order = Regroup | Start | Kill | Prepare | Dial | SendAway | Stop | End | Fail
Action = Order | Wait | Recovered | Joined | LeftOut | NotAgain
