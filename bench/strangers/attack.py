"""Sends hostile frames and half-open connections to each ``HOST:PORT`` until it is terminated.

Prints the counts on SIGTERM. It opens at most about a thousand connections a second, which leaves
the CPUs to the processes under attack.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

MAX_OPEN_PER_ADDRESS, PAUSE_S = 60, 0.001
counts = {"frames sent": 0, "frames refused": 0, "half open": 0}


def report_and_exit(*_: object) -> None:
    print(json.dumps(counts), flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, report_and_exit)
os.nice(19)
if sys.argv[1] == "user":  # run as a user who does not own the job
    os.setgroups([])
    os.setuid(65534)
addresses = [
    (address.rpartition(":")[0], int(address.rpartition(":")[2])) for address in sys.argv[2:]
]
connections: list[socket.socket] = []
while True:
    pending: dict[socket.socket, bytes] = {}
    for address in addresses:
        for frame in (b"", os.urandom(2000), b"\0" * 2000, b"\x16\x03\x01" + os.urandom(300)):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(address)
            connections.append(connection)
            if frame:
                pending[connection] = frame
            else:
                counts["half open"] += 1
            time.sleep(PAUSE_S)
    for connection in select.select([], list(pending), [], 0)[1]:
        with contextlib.suppress(OSError):
            connection.send(pending[connection])
            del pending[connection]
            counts["frames sent"] += 1
    counts["frames refused"] += len(pending)  # not connected, or closed before the frame was sent
    while len(connections) > MAX_OPEN_PER_ADDRESS * len(addresses):
        connections.pop(0).close()
