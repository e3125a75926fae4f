"""Writes all packets of this host's networks to FILE until it is killed: ``capture.py FILE``."""

import os
import socket
import sys
from pathlib import Path

os.umask(0o077)
with (
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as every,
    Path(sys.argv[1]).open("wb", buffering=0) as file,
):
    every.setsockopt(socket.SOL_SOCKET, 33, 1 << 25)  # SO_RCVBUFFORCE
    print("captures", flush=True)
    while True:
        packet, (interface, *_) = every.recvfrom(1 << 17)
        if interface != "lo":
            file.write(packet)
