"""Copies of checkpoints on other hosts' disks, so that losing rank 0's host loses none of them.

Rank 0 sends what it has published to the folder of checkpoints of ranks on other hosts, from a
thread and over connections of its own: neither the training nor its process group notices, and a
group that is made anew only has to meet again. A start looks on every rank's disk anyway.
"""

from __future__ import annotations

import contextlib
import ipaddress
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

from paceline.agent.ranks import tunnels
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.schema import integer, optional, record, regex, text, tuple_of
from paceline.train.checkpoints.receiver import CopyChannel, CopyRefused, Receiver, send_checkpoint
from paceline.train.checkpoints.store import Store
from paceline.train.comms import Comms, parse_texts
from paceline.train.data.disks import visible_ranks
from paceline.train.reduce.direct import own_address

LINE_SHARE = 0.05
"""Of the time in which copying uses the line: sharing it with the training, half of that is lost
to a training that does nothing but send."""

_MAX_REST_S = 5.0
_CONNECT_S = 5.0
_PREDECESSOR_S = 2.0  # for a closed sender to end its connection
_TIMEOUT_S = 15.0  # for each acknowledgement, when another host could take the copy
_GREETING = record(
    host=text(), wanted=optional(integer()), key=regex("([0-9a-f]{64})?", "a key"), address=text()
)
_PLACE = optional(tuple_of(text(), integer(1, 65535)))


def num_copies(copies: int | None) -> int | None:
    """Returns the number of copies set by script or environment; ``None`` for neither.

    Raises SettingError for an invalid one.
    """
    setting = os.environ.get(jobenv.CHECKPOINT_COPIES, "").strip()
    if copies is None and setting and setting != "auto":
        if not setting.isdecimal() or len(setting) > 4:
            raise SettingError(
                f"{jobenv.CHECKPOINT_COPIES}={setting[:100]}: no number of copies",
                remedy=f"{jobenv.CHECKPOINT_COPIES}=1, 0 for none, or auto",
            )
        copies = int(setting)
    if copies is not None and copies < 0:
        raise SettingError(f"copies={copies}: no number of copies", remedy="0 for none")
    return copies


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of a round of copying.

    Attributes:
        hosts: That have it now.
        problem: Why it is on fewer hosts than were wanted; else empty.
        replaced_hosts: By host for which another one stood in, why.
    """

    step: int
    bytes: int
    seconds: float
    hosts: tuple[str, ...]
    problem: str = ""
    replaced_hosts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Peer:
    host: str
    place: tuple[str, int]


class CopyCoordinator:
    """Copies checkpoints from rank 0 to one rank of each other host. Every rank has one.

    Args:
        keep: How many stay on each disk.
        num_wanted: Number of other hosts that get each checkpoint. ``None``: one, unless all ranks
            see rank 0's folder.

    Attributes:
        outcomes: How the rounds ended, in their order; on rank 0.
        has_own_disk: This rank is known to have another folder than rank 0.
    """

    def __init__(self, comms: Comms, store: Store, keep: int, num_wanted: int | None) -> None:
        self._comms, self._store, self._keep, self._num_wanted = comms, store, keep, num_wanted
        self._key, self._source = b"", ""  # the address of rank 0
        self.has_own_disk = False
        self._receiver: Receiver | None = None
        self._sender: _Sender | None = None
        self._former_sender: _Sender | None = None
        self.outcomes: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()

    def negotiate(self) -> str:
        """Decides who sends to whom; a collective, repeated in each new group.

        Returns:
            On rank 0, why there are fewer copies than were asked for; else empty.
        """
        self._replace_sender([], 0)  # before the others hear no more of it
        rank = self._comms.world.rank
        host = self._comms.world.host
        greeting: dict[str, Any] = {"host": host, "wanted": None, "key": "", "address": ""}
        if rank == 0:  # its word counts
            key = self._key or secrets.token_bytes(32)
            with contextlib.suppress(OSError, ValueError):
                own = own_address()
                # its name may lead to itself here; from there no other host can be reached
                if tunnels.current() or not ipaddress.ip_address(own).is_loopback:
                    greeting["address"] = own
            greeting |= {"wanted": self._num_wanted, "key": key.hex()}
        greetings = parse_texts(self._comms.texts(json.dumps(greeting)), _GREETING)
        hosts, num_wanted = [greeting["host"] for greeting in greetings], greetings[0]["wanted"]
        if len(set(hosts)) == 1 or num_wanted == 0:
            self._replace_sender([], 0)
            return "there is no other host" if num_wanted and not rank else ""
        self._key = bytes.fromhex(greetings[0]["key"])
        visible = visible_ranks(self._comms, self._store.root)
        self.has_own_disk = len(visible) == len(hosts) and not visible[rank]
        receivers = receiving_ranks(hosts, visible) if len(visible) == len(hosts) else []
        self._source = greetings[0]["address"]
        address = self._start_receiver() if rank in receivers else None
        addresses = parse_texts(self._comms.texts(json.dumps(address)), _PLACE)
        if not len(addresses) == len(visible) == len(hosts):
            return ""  # a rank was lost meanwhile: all will meet again
        peers = [
            _Peer(hosts[receiver], (address[0], address[1]))
            for receiver in receivers
            if (address := addresses[receiver])
        ]
        self._replace_sender(peers if rank == 0 else [], 1 if num_wanted is None else num_wanted)
        if rank or not num_wanted or len(receivers) >= num_wanted:
            return ""
        if not receivers:
            return "every host sees rank 0's folder"
        host_names = ", ".join(hosts[receiver] for receiver in receivers)
        return f"only {host_names} has a disk of its own"

    def _start_receiver(self) -> tuple[str, int] | None:
        """Starts this rank's receiver and returns its address."""
        if self._receiver is None or not self._receiver.is_alive:
            with contextlib.suppress(OSError):
                self._receiver = Receiver(self._store.root, self._key, own_address(), self._keep)
        if self._receiver is None:
            return None
        self._receiver.sender = self._source
        self._receiver.admit_hosts()
        self._receiver.drop_sender()  # who sent until now sends no more, or is lost
        self._receiver.token = self._store.token
        return self._receiver.address

    def _replace_sender(self, peers: Sequence[_Peer], count: int) -> None:
        if self._sender is not None:
            self._sender.close()
            self._former_sender, self._sender = self._sender, None
        if peers:
            self._sender = _Sender(
                self._store,
                self._key,
                peers,
                count,
                self.outcomes.put,
                self._former_sender,
                self._source,
            )

    def on_published(self) -> None:
        """Called when there is a new checkpoint on this disk."""
        if self._sender is not None:
            self._sender.wake()

    def hurry(self, seconds: float) -> None:
        """Waits for pending copies, which are sent without pauses."""
        if self._sender is not None:
            self._sender.hurry(seconds)

    def close(self) -> None:
        """Stops sending and receiving."""
        self._replace_sender([], 0)
        if self._receiver is not None:
            self._receiver.close()


def receiving_ranks(hosts: Sequence[str], visible: Sequence[bool]) -> list[int]:
    """Returns one rank for each host that has a disk of its own, except rank 0's host."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(rank for host, rank in first.items() if host != hosts[0] and not visible[rank])


class _Sender:
    """Thread of rank 0 that sends the newest and the best checkpoint to peers.

    Where losses follow each other, what was under way comes first: else none would ever be whole.
    """

    def __init__(
        self,
        store: Store,
        key: bytes,
        peers: Sequence[_Peer],
        count: int,
        report: Callable[[CopyResult], None],
        predecessor: _Sender | None = None,
        source: str = "",
    ) -> None:
        self._source = (source, 0) if source else None
        self._store, self._key = store, key
        self._peers, self._count, self._report = [*peers], count, report
        self._holders: dict[tuple[str, bool], set[str]] = {}  # see _send_newest
        self.in_progress = ""  # its name
        self._predecessor = predecessor
        if predecessor is not None:
            hosts = {peer.host for peer in peers}
            self._holders = {copy: had & hosts for copy, had in predecessor._holders.items()}
            self.in_progress = predecessor.in_progress
        self._wakeup, self._closed = threading.Event(), threading.Event()
        self._fast = threading.Event()
        self._idle = threading.Condition()
        self._num_requested = self._num_finished = 0
        self._thread = threading.Thread(target=self._work, name="paceline-copying", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with self._idle:
            self._num_requested += 1
        self._wakeup.set()

    def hurry(self, seconds: float) -> None:
        self._fast.set()
        with self._idle:
            self._idle.wait_for(lambda: self._num_finished == self._num_requested, seconds)
        self._fast.clear()

    def close(self) -> None:
        self._closed.set()
        self._fast.set()
        self._wakeup.set()

    def _work(self) -> None:
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None:  # a receiver may end the second of two connections
            predecessor._thread.join(_PREDECESSOR_S)
        del predecessor
        while True:
            self._wakeup.wait()
            self._wakeup.clear()
            if self._closed.is_set():
                return
            requested = self._num_requested
            self._send_newest()
            with self._idle:
                self._num_finished = requested
                self._idle.notify_all()

    def _send_newest(self) -> None:
        checkpoints, _ = self._store.scan()
        best_checkpoint = self._store.best_of(checkpoints)
        selected = [
            checkpoint for checkpoint in checkpoints if checkpoint.path.name == self.in_progress
        ]
        selected += checkpoints[:1]
        selected += [best_checkpoint] if best_checkpoint else []
        # one that turns out to be the best is written, and sent, again
        steps = {(checkpoint.path.name, checkpoint.manifest.info.get("best") is True):
                 checkpoint.step for checkpoint in selected}  # fmt: skip
        self._holders = {copy: self._holders.get(copy, set()) for copy in steps}
        for (name, is_best), step in steps.items():
            if not self._closed.is_set():
                self.in_progress = name
                self._copy(name, step, self._holders[name, is_best])
        if not self._closed.is_set():
            self.in_progress = ""

    def _copy(self, name: str, step: int, hosts: set[str]) -> None:
        """Sends a checkpoint until enough hosts have it; the next host replaces one that fails.

        Args:
            hosts: Those that have it; gets those to which it was sent.
        """
        sent, start = 0, time.monotonic()
        problems: dict[str, str] = {}
        num_before = len(hosts)
        candidates = [peer for peer in self._peers if peer.host not in hosts]
        for index, peer in enumerate(candidates, 1):
            if len(hosts) >= self._count:
                break
            num_others = len(candidates) - index
            try:
                sent += self._send(
                    peer, name, is_replaceable=num_others >= self._count - len(hosts)
                )
                hosts.add(peer.host)
            except FileNotFoundError:
                return  # pruned meanwhile: there is a newer one
            except Exception as problem:  # peers are not trusted: whatever it is, the next one
                message = str(getattr(problem, "strerror", None) or problem)
                problems[peer.host] = message or type(problem).__name__
                self._peers.remove(peer)  # the last to be asked from now on
                self._peers.append(peer)
            if self._closed.is_set():
                return
        problem_text = ""
        if len(hosts) < min(self._count, len(self._peers)):
            failures = sorted(problems.items())
            problem_text = "; ".join(f"{host}: {reason}" for host, reason in failures)
            problems = {}
        if len(hosts) > num_before or problem_text:
            seconds, has_copy = time.monotonic() - start, tuple(sorted(hosts))
            self._report(CopyResult(step, sent, seconds, has_copy, problem_text, problems))

    def _send(self, peer: _Peer, name: str, *, is_replaceable: bool) -> int:
        start = time.monotonic()
        tunnels.open_known([peer.place])
        with socket.create_connection(peer.place, _CONNECT_S, self._source) as connection:
            round_trip_s = time.monotonic() - start
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit = {"timeout_s": _TIMEOUT_S} if is_replaceable else {}
            talk = CopyChannel.connect(connection, self._key, **limit)

            def pause(duration_s: float) -> None:
                if self._closed.is_set():
                    raise CopyRefused("the training has ended")
                self._fast.wait(rest_seconds(duration_s - round_trip_s))

            return send_checkpoint(talk, self._store, name, pause)


def rest_seconds(duration_s: float) -> float:
    """Returns the pause after a piece that took ``duration_s`` seconds to send."""
    return min(_MAX_REST_S, max(0.0, duration_s) * (1 / LINE_SHARE - 1))
