"""Finds which addresses of a peer answer: listeners and attempted connections.

A listener sends its agent's identity, which reveals addresses that exist on two machines, such as a
container bridge.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from ..supervision import processes

IDENTITY_BYTES = 16
MAX_ATTEMPTS = 512  # connections being tried
MAX_PORT_TRIES = 64
BACKLOG = 128
IDENTITY_TIMEOUT_S = 10.0  # how long a peer that took the connection may take to say who it is
LISTEN = "0A"  # state in /proc/net/tcp
Result = Dict[str, Any]


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens a listening socket on exactly this address. OSError if that is impossible."""
    listener = bind(address, port)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def bind(address: str, port: int) -> socket.socket:
    """Opens a socket on exactly this address, to listen on. OSError if that is impossible."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        if family_of(address) == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def listen_outside_ephemeral(address: str, ephemeral: List[int]) -> socket.socket:
    """Opens a listener on a free port outside the kernel's ephemeral range.

    A port inside the ephemeral range can be taken by any outgoing connection between the moment
    it is chosen and the moment it is used by a restarted job.
    """
    low, high = ephemeral
    lower_ports, upper_ports = range(20000, min(low, 65000)), range(max(high + 1, 20000), 65000)
    choices = [port for port in (*lower_ports, *upper_ports) if port not in range(low, high + 1)]
    for _ in range(MAX_PORT_TRIES if choices else 0):
        port = choices[int.from_bytes(os.urandom(4), "big") % len(choices)]
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return listen(address, 0)


def answer(listener: socket.socket, identity: bytes) -> None:
    """Accepts all waiting connections of a listener and sends them the agent's identity."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    with connection, contextlib.suppress(OSError):
        connection.send(identity)


class _Attempt:
    """One connection being tried."""

    def __init__(self, target: Result) -> None:
        self.target = target
        self.spec = time.monotonic()
        self.socket = socket.socket(family_of(target["address"]), socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.connected = False

    def start(self) -> Optional[Result]:
        """Starts connecting; returns a result if that fails at once."""
        code = self.socket.connect_ex((self.target["address"], self.target["port"]))
        return None if code in (0, errno.EINPROGRESS) else self.failed(code)

    def proceed(self) -> Optional[Result]:
        """Continues once the socket is ready; returns a result if the attempt has ended."""
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self.failed(code)
            self.connected = True
            return None
        try:
            identity = self.socket.recv(IDENTITY_BYTES)
        except OSError as error:
            return self.failed(error.errno or errno.EIO)
        local = str(self.socket.getsockname()[0])
        return self._result(
            ok=identity.hex() == self.target["identity"],
            reached=identity.hex(),
            local_address=local,
            rtt=time.monotonic() - self.spec,
        )

    def deadline(self, timeout_s: float) -> float:
        """When to give up. What has connected is there, but its agent may be busy."""
        return self.spec + timeout_s + (IDENTITY_TIMEOUT_S if self.connected else 0.0)

    def timed_out(self) -> Result:
        """Returns the result of an attempt that has timed out."""
        return self.failed(errno.EBUSY if self.connected else errno.ETIMEDOUT)

    def failed(self, code: int) -> Result:
        return self._result(ok=False, errno=code, error=os.strerror(code))

    def _result(self, **fields: Any) -> Result:
        self.socket.close()
        target = {name: self.target[name] for name in ("host", "address", "port")}
        return dict(target, **fields)


def connect_all(targets: List[Result], timeout_s: float, settle_s: float) -> List[Result]:
    """Tries to connect to all targets, many at once; returns one result per target.

    Args:
        targets: ``{"host", "address", "port", "identity"}`` each.
        timeout_s: For each target.
        settle_s: Time for further addresses once every host has answered on one.

    Returns:
        ``{"host", "address", "port", "ok"}`` with ``local_address``, ``rtt`` (seconds) and
        ``reached`` (identity) if something answered, else ``errno`` and ``error``.
    """
    processes.raise_descriptor_limit(min(len(targets), MAX_ATTEMPTS))
    results: List[Result] = []
    waiting = deque(targets)
    missing = {target["host"] for target in targets}  # that no address of has answered
    deadline = float("inf")
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            results_now = _start_attempts(selector, waiting)
            results_now += _run_round(selector, min(deadline, _next_deadline(selector, timeout_s)))
            results_now += _expire(selector, timeout_s)
            results += results_now
            missing -= {result["host"] for result in results_now if result["ok"]}
            if not missing:
                deadline = min(deadline, time.monotonic() + settle_s)
            if time.monotonic() >= deadline:
                break
        results += [key.data.timed_out() for key in list(selector.get_map().values())]
    return results + [_Attempt(target).timed_out() for target in waiting]


def _start_attempts(selector: selectors.BaseSelector, waiting: Deque[Result]) -> List[Result]:
    """Starts as many attempts as are allowed at once; returns those that failed immediately."""
    failures = []
    while waiting and len(selector.get_map()) < MAX_ATTEMPTS:
        attempt = _Attempt(waiting.popleft())
        failed = attempt.start()
        if failed is None:
            selector.register(attempt.socket, selectors.EVENT_WRITE, attempt)
        else:
            failures.append(failed)
    return failures


def _next_deadline(selector: selectors.BaseSelector, timeout_s: float) -> float:
    attempts = [key.data for key in selector.get_map().values()]
    return min((attempt.deadline(timeout_s) for attempt in attempts), default=0.0)


def _expire(selector: selectors.BaseSelector, timeout_s: float) -> List[Result]:
    """Removes and returns the attempts that have timed out."""
    now = time.monotonic()
    expired = [key for key in selector.get_map().values() if key.data.deadline(timeout_s) <= now]
    for key in expired:
        selector.unregister(key.fileobj)
    return [key.data.timed_out() for key in expired]


def _run_round(selector: selectors.BaseSelector, deadline: float) -> List[Result]:
    """Waits for the next ready sockets; returns the attempts that have ended."""
    ready = selector.select(max(0.0, deadline - time.monotonic()))
    ended = [_step(selector, key.data) for key, _ in ready]
    return [result for result in ended if result is not None]


def _step(selector: selectors.BaseSelector, attempt: _Attempt) -> Optional[Result]:
    was_connected = attempt.connected
    file = attempt.socket
    result = attempt.proceed()
    if result is not None:
        # closed sockets report fileno -1, so the selector is asked by object
        selector.unregister(file)
    elif not was_connected:
        selector.modify(file, selectors.EVENT_READ, attempt)
    return result


def listening_processes(port: int) -> List[Tuple[int, str]]:
    """Returns pid and command line of this user's processes that listen on a TCP port."""
    inodes = {
        int(fields[9])
        for fields in processes.tcp_sockets()
        if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port
    }
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if inodes else []
    return [(pid, command_line(pid)) for pid in pids if inodes & processes.sockets_of([pid])]


def command_line(pid: int) -> str:
    return processes.read_text("/proc/%d/cmdline" % pid).replace("\0", " ").strip()
