"""The job's process group: how a rank leaves one and forms the next."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_group

from paceline.spec import jobenv
from paceline.train.elastic import waits
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import Control, RegroupMessage
from paceline.train.elastic.device_group import DeviceGroup
from paceline.train.elastic.gloo import wait_for_idle_workers
from paceline.train.elastic.waits import WaitCancelled
from paceline.train.world import World

_FORMING = timedelta(seconds=20)  # for connections of a new group among ranks that are all there
_CONNECTING = timedelta(seconds=0.5)  # for one try to reach the store of a new group
_RETENTION_S = 60.0  # after which no thread of a group that was left has anything to do
_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.02  # between two looks whether all members are there

InitGroup = Callable[[Any, World, timedelta], dist.ProcessGroup | None]
"""Makes the job's process group by a store, for a place, with a timeout.

Returns the group for messages, if they have one of their own."""


@dataclass(frozen=True)
class GroupFactory:
    """Makes the job's process groups on one rank, one after the other.

    Args:
        backend: torch's name of the backend.
        device: Device that default groups are bound to, if any.
        device_group: Aborts collectives that a device runs. With it, messages have a group of their
            own; ``None``: they go over the default group.
    """

    backend: str
    device: torch.device | None
    device_group: DeviceGroup | None

    def make(self, timeout: timedelta | None, **options: Any) -> dist.ProcessGroup | None:
        """Makes the default group, with torch's ``options``, and returns the group for messages."""
        device_group = self.device_group
        with contextlib.nullcontext() if device_group is None else device_group.forming():
            dist.init_process_group(self.backend, timeout=timeout, device_id=self.device, **options)
        if device_group is None:
            return None
        device_group.attach()
        messages: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return messages

    def make_at(self, store: Any, place: World, timeout: timedelta) -> dist.ProcessGroup | None:
        """Makes the group by a store, as :data:`InitGroup`."""
        return self.make(timeout, store=store, rank=place.rank, world_size=place.size)


class Superseded(RuntimeError):
    """Another rank was lost while a group was formed."""


class JobGroup:
    """Leaves and forms the job's process groups on one rank, one after the other.

    Attributes:
        connections: Connections of the present group.
        store: Store by which the present group was made, without a prefix.
        messages: Group for messages beside one whose collectives a device runs; ``None``: it is the
            default group.
    """

    def __init__(
        self,
        control: Control,
        connections: GlooConnections,
        init_group: InitGroup,
        store: Any = None,
        timeout: timedelta | None = None,
        messages: dist.ProcessGroup | None = None,
    ) -> None:
        self._control, self._init_group = control, init_group
        self.connections, self.store, self.messages = connections, store, messages
        self._timeout = self._present_timeout = timeout or default_pg_timeout
        self._retired: list[tuple[float, list[Any]]] = []  # groups, and when they were left

    @contextlib.contextmanager
    def patient(self, timeout: timedelta) -> Iterator[None]:
        """Context in which a collective may wait this long for a late rank."""
        self._present_timeout = timeout
        self._set_timeout(timeout)
        try:
            yield
        finally:
            self._present_timeout = self._timeout
            if dist.is_initialized():  # else there is no group any more
                self._set_timeout(self._timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        for group in filter(None, {_get_default_group(), self.messages}):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    @property
    def device(self) -> DeviceGroup | None:
        """The group whose collectives a device runs; ``None`` without one."""
        return self.connections.device

    def wait_for_device(self) -> None:
        """Waits for collectives that a device runs; does nothing without one.

        Raises:
            RuntimeError: They were aborted.
        """
        if self.device is not None:
            self.device.wait()

    def form(self, message: RegroupMessage, place: World, on_gathered: Callable[[], None]) -> None:
        """Leaves the present group and makes the one that the launcher has announced.

        Raises:
            Superseded: A newer group was announced meanwhile.
            RuntimeError: It cannot be made.
        """
        if message.planned:
            with contextlib.suppress(WaitCancelled):  # the group is left in any case
                self.wait_for_device()  # the others need what it sends until they come here, too
        else:
            self._disconnect()
        os.environ.update({
            jobenv.RANK: str(place.rank), jobenv.WORLD_SIZE: str(place.size),
            jobenv.LOCAL_RANK: str(place.local_rank),
            jobenv.LOCAL_WORLD_SIZE: str(place.local_size), jobenv.ADDRESSES: message.addresses,
        })  # fmt: skip
        if jobenv.PLANNED_WORLD in os.environ:
            os.environ[jobenv.PLANNED_WORLD] = str(place.size)
        with self.connections.tracked(place.size):
            self._check_current(message)  # it may have come before there was anything to be cut
            store = self._connect(message)
            self.connections.note_store()
            notes = PrefixStore(f"generation/{message.generation}", store)
            self._wait_for_members(notes, message)
            on_gathered()
            if message.planned:
                # Not before: what this rank has sent in the last operation of the former group
                # may not have been read yet, and a connection that ends may swallow it. gloo wakes
                # no thread that waits for the rest of a message; here none does.
                self._disconnect()
            default_store = PrefixStore("default_pg", notes)
            self.messages = self._init_group(default_store, place, _FORMING)
        self._check_current(message)
        if self.device is not None:
            self.device.connect()
        self._set_timeout(self._present_timeout)
        store.set_timeout(self._timeout)
        self.store = store

    def _check_current(self, message: RegroupMessage) -> None:
        if self._control.newer(message.generation):
            raise Superseded

    def _disconnect(self) -> None:
        """Ends all connections of the present group, and leaves it."""
        self.connections.shut_down(spare_forming=True)
        wait_for_idle_workers()
        if self.device is not None:
            self.device.leave()
        self._retire_group()

    def _connect(self, message: RegroupMessage) -> TCPStore:
        """Connects to the group's store.

        The store's host may be lost, too; a later message of the launcher then says so.
        """
        deadline = time.monotonic() + _FORMING.total_seconds()
        while True:
            try:
                store = TCPStore(
                    message.address, message.port, None, False, _CONNECTING, wait_for_workers=False
                )
            except RuntimeError as error:
                if self._control.newer(message.generation):
                    raise Superseded from None
                if time.monotonic() > deadline:
                    host = message.store_host or message.address
                    place = f"trying to connect to ({host}, {message.port}), the group's store"
                    raise RuntimeError(f"{place}: {error}") from None
            else:
                store.set_timeout(_FORMING)
                return store

    def _wait_for_members(self, notes: Any, message: RegroupMessage) -> None:
        interval_s = _MIN_POLL_S
        arrived = notes.add("here", 1)
        while arrived < len(message.members):
            self._check_current(message)
            time.sleep(interval_s)
            interval_s = min(_MAX_POLL_S, 1.2 * interval_s)
            arrived = notes.add("here", 0)

    def _retire_group(self) -> None:
        """Leaves the present group, and keeps what it is made of for a while.

        Its destructor joins gloo's threads and holds the interpreter's lock meanwhile, for which a
        thread may wait that lets go of a tensor. If a wait was given up, its thread never ends, and
        the group stays.
        """
        self.release_retired()
        self.messages = None
        if dist.is_initialized():
            groups = [*dist.distributed_c10d._world.pg_map]
            self._retired.append((time.monotonic(), groups))
            if waits.has_abandoned():  # the groups stay for good
                for group in groups:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        # Groups are numbered, and meet under their number: one that did not come about on this
        # rank alone has been counted, and the next would wait for the others where they are not.
        dist.distributed_c10d._world.group_count = 0

    def release_retired(self) -> None:
        """Releases groups that were left long ago, with their threads and descriptors."""
        if self._retired:
            current = time.monotonic()
            self._retired = [entry for entry in self._retired if current - entry[0] < _RETENTION_S]
