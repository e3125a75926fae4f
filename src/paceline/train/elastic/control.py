"""Messages of the launcher to a rank that trains, and the thread that receives them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.train.elastic.connections import GlooConnections
from paceline.train.world import World


@dataclass(frozen=True, slots=True)
class RegroupMessage:
    """The members of a new group, and the store by which they meet.

    Attributes:
        members: Slot, host, local rank and local size of each rank, in rank order; empty: the
            launcher is gone, and other ranks with it.
        address, port: Of the store by which they meet.
        planned: No rank is lost: others join between two steps.
        is_paused: There are too few nodes to train: no batch is begun in this group.
        addresses: From which the job's hosts connect; empty: not known.
        store_host: Address of the host to which ``address`` leads; empty: it is that host's own.
    """

    generation: int
    members: tuple[tuple[int, str, int, int], ...]
    address: str
    port: int
    planned: bool
    is_paused: bool = False
    addresses: str = ""
    store_host: str = ""

    @property
    def is_last(self) -> bool:
        """Whether no group follows: this rank is to save its state and end."""
        return not self.members

    def place_of(self, slot: int) -> World | None:
        """Returns the place of a slot in the new group; ``None`` if it is no member."""
        for rank, (member, host, local_rank, local_size) in enumerate(self.members):
            if member == slot:
                return World(rank, len(self.members), local_rank, local_size, host, True)
        return None


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Request of the launcher for a checkpoint; numbered from 1."""

    number: int


class Order(Enum):
    """Order of the launcher or of the agent."""

    END = "end"  # no further group will be formed
    SAVE_AND_EXIT = "alone"  # the agent is about to end this rank, and the launcher is silent


Message = RegroupMessage | SaveRequest | Order


def parse_control(line: str) -> Message:
    """Reads one line of the launcher.

    Raises:
        ValueError: It is no message.
    """
    content = json.loads(line)
    if not isinstance(content, Mapping):
        raise ValueError(line)
    try:
        kind = content.get("control")
        if kind == "save":
            return SaveRequest(int(content["number"]))
        if kind in ("end", "alone"):
            return Order(kind)
        members = tuple(
            (int(m["slot"]), str(m["host"]), int(m["local_rank"]), int(m["local_size"]))
            for m in content["members"]
        )
        return RegroupMessage(
            int(content["generation"]),
            members,
            str(content["store"]["address"]),
            int(content["store"]["port"]),
            bool(content["planned"]),
            bool(content.get("holds")),
            str(content.get("addresses", "")),
            str(content["store"].get("host", "")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(line) from error


class Control:
    """Listens to the launcher in a thread of its own.

    Args:
        descriptor: From which the launcher's lines are read.
        connections: Cut as soon as a rank is lost.

    Attributes:
        save_asked: Number of the last checkpoint that the launcher asked for; 0: none.
        is_ending: All ranks save and end together: none is to do so alone.
        on_shutdown: Called with the new generation when connections were shut down.
    """

    def __init__(self, descriptor: int, connections: GlooConnections) -> None:
        self._descriptor, self._connections = descriptor, connections
        self._changed = threading.Condition()
        self._latest: RegroupMessage | None = None
        self._has_ended = False
        self.save_asked = 0
        self.is_ending = False
        self.on_shutdown: Callable[[int], None] = lambda generation: None
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._listen, name="paceline-control", daemon=True).start()

    def _listen(self) -> None:
        pending = b""
        while True:
            try:
                received = os.read(self._descriptor, 1 << 16)
            except OSError:
                received = b""
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in filter(None, lines):
                with contextlib.suppress(ValueError):
                    self._handle(parse_control(line.decode()))
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        with self._changed:
            latest = 0 if self._latest is None else self._latest.generation
            if message is Order.SAVE_AND_EXIT:
                if self.is_ending:
                    return
                message = RegroupMessage(latest + 1, (), "", 0, False)
            if isinstance(message, SaveRequest):
                self.save_asked = max(self.save_asked, message.number)
            elif message is Order.END:
                self._has_ended = True
            elif self._latest is None or message.generation > latest:
                self._latest, self._has_ended = message, False
                if not message.planned:
                    self._connections.shut_down()
                    self.on_shutdown(message.generation)
            self._changed.notify_all()

    def newer(self, generation: int) -> RegroupMessage | None:
        """Returns the newest message if its generation is later; connections are cut by then."""
        with self._changed:
            latest = self._latest
        return latest if latest is not None and latest.generation > generation else None

    def wait(self, generation: int, *, planned: bool | None = False) -> RegroupMessage | None:
        """Waits for a message of a later generation; ``None``: there will be none.

        Args:
            planned: Whether ranks are to join, rather than lost; ``None``: either.
        """

        def matching() -> RegroupMessage | None:
            message = self.newer(generation)
            return message if message is not None and planned in (None, message.planned) else None

        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or matching() is not None)
            return matching()
