"""Attacks a job's sockets and files from another host, and as another user of the job's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launches import Site

NONSENSE = (b"A", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 2000, os.urandom(2000))
# asks torch's store for its number of keys (see TCPStoreBackend.hpp)
STORE_REQUEST = b"\0" + (0x3C85F7CE).to_bytes(4, "little") + b"\7"
MAX_REPLAYS = 16
REPLAY_BYTES = 2000
MAX_REPLY_BYTES = 1500  # a certificate without a name, sent to clients that start TLS
# processes of a job; not those of MPI, Slurm and Docker, which start them
OWN = re.compile(r"(\S*/)?(python[\d.]*|paceline) |.*\[(rank|fork)")
_LISTEN = "0A"


def own_listeners(site: Site, host: str) -> dict[str, str]:
    """Returns a job's listening TCP sockets on a host, with their processes' command lines."""
    listeners: dict[str, str] = {}
    for pid, command in site.lab.processes(host):
        if not OWN.match(command):
            continue
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # the process has ended
            sockets = set()
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile, unlike the others
                    sockets.add(str(entry.readlink()))
            tables = [process / "net" / name for name in ("tcp", "tcp6")]
            rows = [line.split() for table in tables for line in table.read_text().splitlines()]
            ports = {
                int(row[1].rpartition(":")[2], 16)
                for row in rows
                if row[3] == _LISTEN and f"socket:[{row[9]}]" in sockets
            }
            for place in site.lab.listeners(host):
                if int(place.rpartition(":")[2]) in ports:
                    listeners[place] = f"{listeners.get(place, '')}{command[-200:]}; "
    return listeners


def greetings(packets: bytes) -> list[bytes]:
    """Returns the first bytes that the clients of captured TCP connections sent.

    ``packets``: Ethernet frames with IPv4 and ARP, as ``capture.py`` writes them.
    """
    streams: dict[bytes, bytes] = {}
    at = 0
    while at + 60 < len(packets):
        kind, ip = packets[at + 12 : at + 14], packets[at + 14 : at + 54]
        if kind != b"\x08\x00":
            at += 42 if kind == b"\x08\x06" else 54 + int.from_bytes(ip[4:6], "big")
            continue
        length, header = int.from_bytes(ip[2:4], "big"), 4 * (ip[0] & 15)
        tcp = packets[at + 14 + header : at + 14 + min(length, REPLAY_BYTES)]
        if ip[9] == 6:
            ends = ip[12:20] + tcp[:4]
            if tcp[13] & 0x12 == 2:
                streams[ends] = b""
            elif ends in streams and len(streams[ends]) < REPLAY_BYTES:
                streams[ends] += tcp[4 * (tcp[12] >> 4) :]
        at += 14 + length
    return sorted(filter(None, streams.values()), key=len)[-MAX_REPLAYS:]


def check_intruders(
    site: Site,
    stranger: str,
    packets: Path,
    since: float,
    hosts: tuple[str, ...] = ("n1", "n2"),
) -> list[str]:
    """Attacks a running job; returns the listening sockets that the other host could try.

    Raises AssertionError if a socket sends more than a greeting, if one keeps unauthenticated
    connections open, or if other users can read or write files of the job.

    Args:
        packets: A capture of the job's start, whose connections are replayed.
        since: Time of the job's start.
    """
    replays = greetings(packets.read_bytes())
    assert replays
    opened = {host: own_listeners(site, host) for host in hosts}
    outside = {}
    for host, listeners in opened.items():
        for place, commands in listeners.items():
            if not place.startswith(("127.", "[::1]")):
                every = ("0.0.0.0:", "[::]:")
                address = f"{site.lab.address(host)}:{place.rpartition(':')[2]}"
                outside[address if place.startswith(every) else place] = commands
    requests = [(stranger, dict.fromkeys(outside, False), {})]
    for host, listeners in opened.items():
        # gloo cannot reject by user: other users of a host may connect to it
        places = {place: "[rank" in commands for place, commands in listeners.items()}
        requests.append((host, places, {"user": True, "since": since}))
    payloads = [payload.hex() for payload in (*NONSENSE, STORE_REQUEST, *replays)]

    def intrude(host: str, places: dict[str, bool], as_user: dict[str, Any]) -> dict[str, Any]:
        request = {"places": places, "payloads": payloads, **as_user}
        done = site.lab.exec(
            host, [sys.executable, "intrude.py"], cwd=site.project, input=json.dumps(request),
            timeout=150, check=True,
        )  # fmt: skip
        return dict(json.loads(done.stdout))

    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(intrude, *zip(*requests, strict=True)))
    for (host, _, _), result in zip(requests, results, strict=True):
        commands = outside if host == stranger else opened[host]
        for place, outcome in result["places"].items():
            detail = host, place, outcome, commands.get(place)
            assert outcome["open"] == 0, detail
            # The store and the proxies to it send nothing; on loopback, ranks may send greetings.
            is_silent = place.startswith("127.") and "[rank" not in commands[place]
            most = 0 if is_silent or place.startswith("@") else MAX_REPLY_BYTES
            assert outcome["most"] <= most, detail
        assert result["files"] == result["environments"] == [], (host, result)
    return sorted(outside)
