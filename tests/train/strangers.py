"""Two ranks of gloo, and a stranger that puts itself between them by the open store.

The ranks are at 127.0.0.1, the stranger at 127.0.0.2. What each rank met is a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.agent.ranks import gloo_peers, peer_filters

STRANGER = "127.0.0.2"
KEYS = ("0//cpu//0/0", "0//cpu//0/1")  # under which ranks publish gloo's addresses
PATIENCE = timedelta(seconds=60)
_NAME = struct.Struct("<Q")  # bytes of the host's name, before it; those of an address after it
_FAMILY = 2  # bytes, before port and address


def rank(number: int, port: int) -> None:
    """One of the job's two; the kernel does not keep the stranger away."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", PACELINE_ADDRESSES="127.0.0.1")
    peer_filters._LOOPBACK = ()
    peer_filters.attach_filter = lambda *_: False
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
    sys.stdout.write(f"{json.dumps(told)}\n")  # at once: the other rank writes there too
    sys.stdout.flush()
    os._exit(0)


def place(published: bytes) -> int:
    """Where the port is in what gloo publishes."""
    return _NAME.size + int(_NAME.unpack_from(published)[0]) + _NAME.size + _FAMILY


def forged(published: bytes, port: int) -> bytes:
    start = place(published)
    there = struct.pack(">H", port) + socket.inet_aton(STRANGER)
    return published[:start] + there + published[start + len(there) :]


def wait_for(store: dist.Store, key: str, former: bytes = b"") -> bytes:
    """What a rank has published there, instead of what we had put in its place."""
    while (published := bytes(store.get(key))) == former:
        time.sleep(0.01)
    return published


def connect(listener: socket.socket, published: dict[int, bytes]) -> dict[int, socket.socket]:
    """The two ranks, each of which takes us for the other; gloo greets by a rank's number."""
    found: dict[int, socket.socket] = {}
    while len(found) < 2 and select.select([listener], [], [], 1.0)[0]:
        connection, _ = listener.accept()
        found[int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")] = connection
    for number in {0, 1} - {*found}:
        (port,) = struct.unpack_from(">H", published[number], place(published[number]))
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
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(number), str(store.port)])

    with socket.create_server((STRANGER, 0)) as listener:
        running, published = [start(0)], dict[int, bytes]()
        published[0] = wait_for(store, KEYS[0])
        ours = forged(published[0], listener.getsockname()[1])
        for key in KEYS:  # of rank 1 before it has one
            store.set(key, ours)
        running.append(start(1))
        published[1] = wait_for(store, KEYS[1], ours)
        between = connect(listener, published)
        pumps = [
            threading.Thread(target=relay, args=(between[one], between[1 - one])) for one in (0, 1)
        ]
        for pump in pumps:
            pump.start()
        for process in running:
            process.wait(100)
        for connection in between.values():
            connection.close()
        for pump in pumps:
            pump.join()


def call_first(*, says_numbers: bool) -> None:
    """Calls rank 0's device before rank 1 does, and may say the numbers that it waits for."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)

    def start(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, str(number), str(store.port)])

    with contextlib.ExitStack() as held:
        running = [start(0)]
        published = wait_for(store, KEYS[0])
        (port,) = struct.unpack_from(">H", published, place(published))
        for number in range(4):
            there = socket.create_connection(("127.0.0.1", port), 10, (STRANGER, 0))
            held.enter_context(there)
            if says_numbers:
                there.sendall(number.to_bytes(8, "little"))
        running.append(start(1))
        for process in running:
            process.wait(100)


if __name__ == "__main__":
    if sys.argv[1:2] in (["first"], ["silent"]):
        call_first(says_numbers=sys.argv[1] == "first")
    elif sys.argv[1:]:
        rank(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
