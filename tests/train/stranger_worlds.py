"""Runs two gloo ranks, and a foreign process that intercepts their connections through the store.

The ranks are at 127.0.0.1, the foreign process at 127.0.0.2. Each rank prints what it detected as a
line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import forked_worlds
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.agent.ranks import gloo_peers, peer_filters

STRANGER = "127.0.0.2"
KEYS = ("0//cpu//0/0", "0//cpu//0/1")  # keys of the addresses that gloo's ranks publish
PATIENCE = timedelta(seconds=60)
_NAME = struct.Struct("<Q")  # length of the host's name, before it; then the address's, after it
_FAMILY = 2  # bytes before port and address


def refuse(*_: object) -> None:
    raise PermissionError


def rank(number: int, port: int) -> None:
    """Runs one of the job's ranks; the kernel does not block the foreign process."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", PACELINE_ADDRESSES="127.0.0.1")
    peer_filters.LOOPBACK = peer_filters.NO_HOSTS
    peer_filters._attach = refuse
    told: dict[str, Any] = {"rank": number, "found": []}
    gloo_peers.install(distributed_c10d, on_reject=lambda _: None, on_stranger=told["found"].append)
    client = dist.TCPStore("127.0.0.1", port, None, False, PATIENCE)
    try:
        dist.init_process_group("gloo", store=client, rank=number, world_size=2, timeout=PATIENCE)
        total = torch.ones(2)
        dist.all_reduce(total)
        told["sum"] = total.tolist()
    except gloo_peers.StrangerError as error:
        told["error"] = str(error)
    except RuntimeError as error:  # the other rank has ended
        told["error"] = str(error)
    sys.stdout.write(f"{json.dumps(told)}\n")  # in one write: the other rank writes there, too
    sys.stdout.flush()
    os._exit(0)


class Waiting:
    """A rank's process, forked before there are threads; it starts when it gets a port."""

    def __init__(self, number: int, body: Callable[[int, int], object]) -> None:
        hears, self._tells = os.pipe()

        def wait() -> None:
            os.close(self._tells)
            body(number, int(os.read(hears, 16)))

        self.pid = forked_worlds.forked({}, wait)
        os.close(hears)

    def begin(self, port: int) -> None:
        os.write(self._tells, str(port).encode())
        os.close(self._tells)


def place(published: bytes) -> int:
    """Returns the offset of the port in the address that gloo publishes."""
    return _NAME.size + int(_NAME.unpack_from(published)[0]) + _NAME.size + _FAMILY


def forged(published: bytes, port: int) -> bytes:
    start = place(published)
    there = struct.pack(">H", port) + socket.inet_aton(STRANGER)
    return published[:start] + there + published[start + len(there) :]


def wait_for(store: dist.Store, key: str, former: bytes = b"") -> bytes:
    """Waits for what a rank publishes under a key in place of the forged value."""
    while (published := bytes(store.get(key))) == former:
        time.sleep(0.01)
    return published


def connect(listener: socket.socket, published: dict[int, bytes]) -> dict[int, socket.socket]:
    """Connects to both ranks, each of which takes this process for the other; returns connections.

    gloo's greeting is the rank's number. A rank that has detected the attack and ended is missing.
    """
    found: dict[int, socket.socket] = {}
    while len(found) < 2 and select.select([listener], [], [], 1.0)[0]:
        connection, _ = listener.accept()
        greeting = connection.recv(8, socket.MSG_WAITALL)
        if len(greeting) == 8:
            found[int.from_bytes(greeting, "little")] = connection
    for number in {0, 1} - {*found}:
        (port,) = struct.unpack_from(">H", published[number], place(published[number]))
        with contextlib.suppress(ConnectionError):
            there = socket.create_connection(("127.0.0.1", port), 10, (STRANGER, 0))
            there.sendall((1 - number).to_bytes(8, "little"))
            found[number] = there
    return found


def relay(source: socket.socket, target: socket.socket) -> None:
    try:
        source.settimeout(None)
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def main() -> None:
    ranks = [Waiting(number, rank) for number in (0, 1)]
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    with socket.create_server((STRANGER, 0)) as listener:
        ranks[0].begin(store.port)
        published = dict[int, bytes]()
        published[0] = wait_for(store, KEYS[0])
        ours = forged(published[0], listener.getsockname()[1])
        for key in KEYS:  # rank 1's before it publishes its own
            store.set(key, ours)
        ranks[1].begin(store.port)
        published[1] = wait_for(store, KEYS[1], ours)
        between = connect(listener, published)
        pumps = [
            threading.Thread(target=relay, args=(between[one], between[1 - one]))
            for one in (0, 1)
            if len(between) == 2
        ]
        for pump in pumps:
            pump.start()
        forked_worlds.finish([process.pid for process in ranks], 100)
        for connection in between.values():
            connection.close()
        for pump in pumps:
            pump.join()


def call_first(*, says_numbers: bool) -> None:
    """Connects to rank 0 before rank 1 does; may send the numbers that rank 0 waits for."""
    ranks = [Waiting(number, rank) for number in (0, 1)]
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    with contextlib.ExitStack() as held:
        ranks[0].begin(store.port)
        published = wait_for(store, KEYS[0])
        (port,) = struct.unpack_from(">H", published, place(published))
        for number in range(4):
            there = socket.create_connection(("127.0.0.1", port), 10, (STRANGER, 0))
            held.enter_context(there)
            if says_numbers:
                there.sendall(number.to_bytes(8, "little"))
        ranks[1].begin(store.port)
        forked_worlds.finish([process.pid for process in ranks], 100)


def joins(number: int, port: int, *, calls_store: bool = False) -> None:
    """Runs one of two ranks; the first one holds the store in its process.

    Args:
        calls_store: It makes the store itself, rather than torch's rendezvous.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", PACELINE_ADDRESSES="127.0.0.1")
    peer_filters.LOOPBACK = peer_filters.NO_HOSTS
    told: dict[str, Any] = {"rank": number, "found": [], "joined": False}
    gloo_peers.install(distributed_c10d, told["found"].append, lambda _: None)
    method: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}"}
    if calls_store:
        method = {"store": dist.TCPStore("127.0.0.1", port, 2, number == 0, PATIENCE)}
    # "gloo" makes torch split for CPUs and for GPUs with the same keys, which may hang
    dist.init_process_group("cpu:gloo", **method, rank=number, world_size=2)
    time.sleep(number)  # the first one connects to the other, which must not accept yet
    part = distributed_c10d._get_default_group().split_group([0, 1], None, None, "part", "part")
    part.allreduce([torch.ones(1)]).wait()
    told["joined"] = True
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    os._exit(0)


def is_shut_out(port: int) -> bool:
    """Returns whether a connection from another address is closed at once or refused.

    Raises AssertionError if it is served, and returns False if no process listens yet.
    """
    with socket.socket() as calling:
        calling.settimeout(1)
        calling.bind((STRANGER, 0))
        try:
            calling.connect(("127.0.0.1", port))
        except ConnectionRefusedError:  # no process listens yet
            return False
        except (TimeoutError, ConnectionError):
            return True
        with contextlib.suppress(ConnectionError):
            assert calling.recv(1) == b""
    return True


def call_own_store(*, calls_store: bool = False) -> None:
    """Connects to the store in rank 0's process again and again, before rank 1 does."""
    body = functools.partial(joins, calls_store=calls_store)
    ranks, port = [Waiting(number, body) for number in (0, 1)], forked_worlds.reserved_port()
    ranks[0].begin(port)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not is_shut_out(port):
        assert time.monotonic() < deadline
    ranks[1].begin(port)
    assert forked_worlds.finish([process.pid for process in ranks], 100) == [0, 0]


if __name__ == "__main__":
    {
        "between": main,
        "first": lambda: call_first(says_numbers=True),
        "silent": lambda: call_first(says_numbers=False),
        "own store": call_own_store,
        "called store": functools.partial(call_own_store, calls_store=True),
    }[sys.argv[1]]()
