"""Many connections to each ``HOST:PORT``; prints as JSON how many of them stay open."""

import json
import select
import socket
import sys

TRIES = 100
SECONDS = 1.0

held = {}
for where in sys.argv[1:]:
    address, port = where.rsplit(":", 1)
    calling = [socket.socket() for _ in range(TRIES)]
    for one in calling:
        one.setblocking(False)
        one.connect_ex((address, int(port)))
    select.select([], [], [], SECONDS)
    open_ = 0
    for one in calling:
        try:
            one.send(b"A")
            one.recv(1)
        except BlockingIOError:
            open_ += select.select([], [one], [], 0)[1] != []
        except OSError:
            pass
    held[where] = open_
    for one in calling:
        one.close()
print(json.dumps(held))
