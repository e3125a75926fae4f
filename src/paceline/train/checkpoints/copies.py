"""Copies of checkpoints on other hosts' disks, so that losing rank 0's host loses none of them.

Rank 0 sends what it has published to the folder of checkpoints of ranks on other hosts, from a
thread and over connections of its own: neither the training nor its process group notices, and a
group that is made anew only has to meet again. A start looks on every rank's disk anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.schema import integer, optional, record, regex, text, tuple_of
from paceline.train.checkpoints.format import Damaged
from paceline.train.checkpoints.receiver import Receiver, Refused, Talk, send
from paceline.train.checkpoints.store import Store
from paceline.train.comms import Comms, checked
from paceline.train.data.disks import who_sees
from paceline.train.reduce.direct import own_address

PART = 0.05
"""Of the time in which copying uses the line: sharing it with the training, half of that is lost
to a training that does nothing but send."""

_LONGEST_REST_S = 5.0
_CONNECT_S = 5.0
_GREETING = record(host=text(), wanted=optional(integer()), key=regex("([0-9a-f]{64})?", "a key"))
_PLACE = optional(tuple_of(text(), integer(1, 65535)))


def asked(copies: int | None) -> int | None:
    """How many copies are wanted: the script's word, or the environment's; ``None`` for neither.

    Raises:
        SettingError: This is no number of copies.
    """
    said = os.environ.get(jobenv.CHECKPOINT_COPIES, "").strip()
    if copies is None and said and said != "auto":
        if not said.isdecimal() or len(said) > 4:
            raise SettingError(
                f"{jobenv.CHECKPOINT_COPIES}={said[:100]}: no number of copies",
                remedy=f"{jobenv.CHECKPOINT_COPIES}=1, 0 for none, or auto",
            )
        copies = int(said)
    if copies is not None and copies < 0:
        raise SettingError(f"copies={copies}: no number of copies", remedy="0 for none")
    return copies


@dataclass(frozen=True, slots=True)
class Copied:
    """How a round of copying ended.

    Attributes:
        step: Of the checkpoint.
        bytes: That were sent.
        seconds: That it took.
        hosts: That have it now.
        problem: Why it is on fewer hosts than were wanted; else empty.
        stood_in: By host for which another one stood in, why.
    """

    step: int
    bytes: int
    seconds: float
    hosts: tuple[str, ...]
    problem: str = ""
    stood_in: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Peer:
    host: str
    place: tuple[str, int]


class Copies:
    """Every rank has one; rank 0 sends, one rank of each other host takes.

    Args:
        comms: Of all ranks.
        store: This rank's checkpoints.
        keep: How many stay on each disk.
        wanted: On how many other hosts each checkpoint is to be; ``None``: on one where rank 0's
            folder is not seen by all.

    Attributes:
        outcomes: How the rounds ended, in their order; on rank 0.
        own_disk: This rank is known to have another folder than rank 0.
    """

    def __init__(self, comms: Comms, store: Store, keep: int, wanted: int | None) -> None:
        self._comms, self._store, self._keep, self._wanted = comms, store, keep, wanted
        self._key = b""
        self.own_disk = False
        self._receiver: Receiver | None = None
        self._sender: _Sender | None = None
        self._former: _Sender | None = None
        self.outcomes: queue.SimpleQueue[Copied] = queue.SimpleQueue()

    def meet(self) -> str:
        """Finds out who sends to whom; every rank of a group calls it, again in each new group.

        Returns:
            On rank 0, why there are fewer copies than were asked for; else empty.
        """
        self._sends_to([], 0)  # before the others hear no more of it
        rank = self._comms.world.rank
        mine: dict[str, Any] = {"host": self._comms.world.host, "wanted": None, "key": ""}
        if rank == 0:  # its word counts
            key = self._key or secrets.token_bytes(32)
            mine |= {"wanted": self._wanted, "key": key.hex()}
        said = checked(self._comms.texts(json.dumps(mine)), _GREETING)
        hosts, wanted = [one["host"] for one in said], said[0]["wanted"]
        if len(set(hosts)) == 1 or wanted == 0:
            self._sends_to([], 0)
            return "there is no other host" if wanted and not rank else ""
        self._key = bytes.fromhex(said[0]["key"])
        sees = who_sees(self._comms, self._store.root)
        self.own_disk = len(sees) == len(hosts) and not sees[rank]
        takers = leads(hosts, sees) if len(sees) == len(hosts) else []
        place = self._open() if rank in takers else None
        places = checked(self._comms.texts(json.dumps(place)), _PLACE)
        if not len(places) == len(sees) == len(hosts):
            return ""  # a rank was lost meanwhile: all will meet again
        found = [
            _Peer(hosts[one], (place[0], place[1])) for one in takers if (place := places[one])
        ]
        self._sends_to(found if rank == 0 else [], 1 if wanted is None else wanted)
        if rank or not wanted or len(takers) >= wanted:
            return ""
        only = ", ".join(hosts[one] for one in takers)
        return f"only {only} has a disk of its own" if only else "every host sees rank 0's folder"

    def _open(self) -> tuple[str, int] | None:
        """Where this rank takes copies."""
        if self._receiver is None or not self._receiver.alive:
            with contextlib.suppress(OSError):
                self._receiver = Receiver(self._store.root, self._key, own_address())
        if self._receiver is None:
            return None
        self._receiver.admit()
        self._receiver.drop()  # who sent until now sends no more, or is lost
        self._receiver.token = self._store.token
        return self._receiver.place

    def _sends_to(self, peers: Sequence[_Peer], count: int) -> None:
        if self._sender is not None:
            self._sender.close()
            self._former, self._sender = self._sender, None
        if peers:
            key, store, keep = self._key, self._store, self._keep
            self._sender = _Sender(store, keep, key, peers, count, self.outcomes.put, self._former)

    def published(self) -> None:
        """There is a new checkpoint on this disk."""
        if self._sender is not None:
            self._sender.wake()

    def hurry(self, seconds: float) -> None:
        """Waits for what is still to be sent, which now goes as fast as it can."""
        if self._sender is not None:
            self._sender.hurry(seconds)

    def close(self) -> None:
        """Sends and takes nothing more."""
        self._sends_to([], 0)
        if self._receiver is not None:
            self._receiver.close()


def leads(hosts: Sequence[str], sees: Sequence[bool]) -> list[int]:
    """The ranks that take copies: one for each host other than rank 0's with a disk of its own."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(rank for host, rank in first.items() if host != hosts[0] and not sees[rank])


class _Sender:
    """Rank 0's thread that brings the newest and the best checkpoint to peers.

    Where losses follow each other, what was under way comes first: else none would ever be whole.
    """

    def __init__(
        self,
        store: Store,
        keep: int,
        key: bytes,
        peers: Sequence[_Peer],
        count: int,
        tell: Callable[[Copied], None],
        former: _Sender | None = None,
    ) -> None:
        self._store, self._keep, self._key = store, keep, key
        self._peers, self._count, self._tell = peers, count, tell
        self._there: dict[str, set[str]] = {}  # hosts by the name of what they have
        self.under_way = ""  # its name
        if former is not None:
            hosts = {peer.host for peer in peers}
            self._there = {name: had & hosts for name, had in former._there.items()}
            self.under_way = former.under_way
        self._due, self._ended, self._fast = threading.Event(), threading.Event(), threading.Event()
        self._idle = threading.Condition()
        self._asked = self._done = 0
        self._thread = threading.Thread(target=self._work, name="paceline-copying", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with self._idle:
            self._asked += 1
        self._due.set()

    def hurry(self, seconds: float) -> None:
        self._fast.set()
        with self._idle:
            self._idle.wait_for(lambda: self._done == self._asked, seconds)
        self._fast.clear()

    def close(self) -> None:
        self._ended.set()
        self._fast.set()
        self._due.set()

    def _work(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._ended.is_set():
                return
            asked = self._asked
            self._round()
            with self._idle:
                self._done = asked
                self._idle.notify_all()

    def _round(self) -> None:
        found, _ = self._store.found()
        best = self._store.best(found)
        begun = [one for one in found if one.path.name == self.under_way]
        wanted = {one.path.name: one for one in [*begun, *found[:1], *([best] if best else [])]}
        self._there = {name: self._there.get(name, set()) for name in wanted}
        for name, one in wanted.items():
            if not self._ended.is_set():
                self.under_way = name
                self._copy(name, one.step)
        if not self._ended.is_set():
            self.under_way = ""

    def _copy(self, name: str, step: int) -> None:
        """Until enough hosts have it; a host that fails is stood in for by the next."""
        there, sent, begun = self._there[name], 0, time.monotonic()
        problems: dict[str, str] = {}
        before = len(there)
        for peer in self._peers:
            if len(there) >= self._count:
                break
            if peer.host in there:
                continue
            try:
                sent += self._send(peer, name)
                there.add(peer.host)
            except FileNotFoundError:
                return  # pruned meanwhile: there is a newer one
            except (OSError, ValueError, Refused, Damaged) as problem:
                said = str(getattr(problem, "strerror", None) or problem)
                problems[peer.host] = said or type(problem).__name__
            if self._ended.is_set():
                return
        enough = len(there) >= min(self._count, len(self._peers))
        short = "" if enough else "; ".join(f"{host}: {why}" for host, why in problems.items())
        if len(there) > before or short:
            seconds, instead = time.monotonic() - begun, problems if enough else {}
            self._tell(Copied(step, sent, seconds, tuple(sorted(there)), short, instead))

    def _send(self, peer: _Peer, name: str) -> int:
        begun = time.monotonic()
        with socket.create_connection(peer.place, _CONNECT_S) as connection:
            trip = time.monotonic() - begun
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            talk = Talk.called(connection, self._key)
            return send(talk, self._store, name, self._keep, lambda took: self._rest(took - trip))

    def _rest(self, took: float) -> None:
        """Leaves the line to the training for as long as :data:`PART` asks for."""
        if self._ended.is_set():
            raise Refused("the training has ended")
        self._fast.wait(rest(took))


def rest(took: float) -> float:
    """Seconds of silence after a piece that was on its way for ``took`` seconds."""
    return min(_LONGEST_REST_S, max(0.0, took) * (1 / PART - 1))


def figures(copied: Copied) -> dict[str, Any]:
    """For the record of what happened."""
    size, seconds = round(copied.bytes / 1e6, 3), round(copied.seconds, 3)
    return {"step": copied.step, "megabytes": size, "seconds": seconds, "hosts": [*copied.hosts]}
