"""Sends hostile frames and half-open connections to each ``HOST:PORT`` until it is ended.

Prints how many of each it has made when it gets SIGTERM. It is slowed down to about a thousand
connections a second, so that it does not take the CPUs from those whom it attacks.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

HELD, PAUSE_S = 60, 0.001
counts = {"frames sent": 0, "frames refused": 0, "half open": 0}


def end(*_: object) -> None:
    print(json.dumps(counts), flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, end)
os.nice(19)
if sys.argv[1] == "user":  # any but the job's
    os.setgroups([])
    os.setuid(65534)
places = [(place.rpartition(":")[0], int(place.rpartition(":")[2])) for place in sys.argv[2:]]
held: list[socket.socket] = []
while True:
    pending: dict[socket.socket, bytes] = {}
    for place in places:
        for frame in (b"", os.urandom(2000), b"\0" * 2000, b"\x16\x03\x01" + os.urandom(300)):
            calling = socket.socket()
            calling.setblocking(False)
            calling.connect_ex(place)
            held.append(calling)
            if frame:
                pending[calling] = frame
            else:
                counts["half open"] += 1
            time.sleep(PAUSE_S)
    for calling in select.select([], list(pending), [], 0)[1]:
        with contextlib.suppress(OSError):
            calling.send(pending[calling])
            del pending[calling]
            counts["frames sent"] += 1
    counts["frames refused"] += len(pending)  # not connected, or closed before it could be sent
    while len(held) > HELD * len(places):
        held.pop(0).close()
