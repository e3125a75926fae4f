"""The fork server of a node: imports torch once; every rank is a fork of it.

Runs under the job's interpreter. An order on its Unix socket is a 32-bit big-endian length and
JSON: ``{"attempt": …}`` is shared by the ranks, ``{"rank": …}`` starts one and brings its four
pipes, ``{"store": …}`` starts the store and brings its socket. It has one thread and no CUDA
context, so forking is safe. It dies with the agent, the ranks with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import warm
from ..supervision import processes
from . import process_title

Message = Dict[str, Any]
LENGTH = struct.Struct(">I")
ONECCL = "oneccl_bindings_for_pytorch"
PIPES = 4  # of a rank: output, errors, events; and control, from which it reads


def main(fd: int, parent: int, preload: List[str]) -> int:
    """Serves until the agent closes the socket.

    Also returns in a forked rank, with that rank's work done outside all frames of the server.
    """
    processes.die_with_parent(parent)
    process_title.show(process_title.agent_title([sys.executable, *sys.argv]))
    for signum in (signal.SIGINT, signal.SIGTERM):  # a scheduler tells every process; the agent
        signal.signal(signum, signal.SIG_IGN)  # ends this one, when the ranks have ended
    channel = socket.socket(fileno=fd)
    server = ForkServer(channel)
    gc.disable()  # an import makes many objects and hardly any garbage
    report = _preload(preload)
    gc.freeze()  # so that ranks neither scan nor copy the pages of what was imported
    gc.enable()
    server.report(report)
    work = server.serve()
    if work is None:
        return 0
    return work()


def _preload(modules: List[str]) -> Message:
    """Imports the modules; reports how long it took and the version of torch."""
    started_s = time.monotonic()
    try:
        for module in modules:
            _import(module)
    except BaseException as error:  # an import may raise SystemExit too
        return {
            "event": "import failed",
            "error": "%s: %s" % (type(error).__name__, error),
            "traceback": traceback.format_exc(),
        }
    seconds = round(time.monotonic() - started_s, 3)
    sources = warm.list_sources(list(sys.modules.values()))
    return dict(_loaded(), event="imported", seconds=seconds, sources=sources)


def _import(module: str) -> None:
    """Imports a module; if the name ends in ``?``, only if that is possible."""
    try:
        importlib.import_module(module.rstrip("?"))
    except Exception:  # such as TypeError in an old Python
        if not module.endswith("?"):
            raise


def _loaded() -> Message:
    torch = sys.modules.get("torch")
    loaded: Message = {"python": sys.version.split()[0], "executable": sys.executable}
    if torch is not None:
        loaded["torch"] = str(torch.__version__)
        loaded["cuda"] = torch.version.cuda
        distributed = torch.distributed
        loaded["backends"] = [
            name
            for name in ("gloo", "nccl", "xccl", "mpi", "ucc")
            if distributed.is_available() and getattr(distributed, "is_%s_available" % name, bool)()
        ]
        if importlib.util.find_spec(ONECCL) is not None:  # it joins torch when it is imported
            loaded["backends"].append("ccl")
        if "nccl" in loaded["backends"]:
            with contextlib.suppress(Exception):  # asks the library itself, without a context
                loaded["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return loaded


class ForkServer:
    """The loop of the fork server."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.attempt: Message = {}  # what the ranks of this attempt share
        self.children: Dict[int, Message] = {}  # pid -> {"local_rank"} or {"store"}
        self.pidfds: Dict[int, int] = {}  # pidfd -> pid

    def report(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> Optional[Callable[[], int]]:
        """Serves orders; returns a rank's work in the forked child, ``None`` at the agent's end."""
        channel_fd = self.channel.fileno()
        while True:
            poll = select.poll()  # select() ends at descriptor 1024
            for fd in [channel_fd, *self.pidfds]:
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(self._poll_timeout_ms())]
            self._reap()
            if channel_fd not in ready:
                continue
            order, fds = self._receive()
            if order is None:
                return None
            work = self._execute(order, fds)
            if work is not None:
                return work

    def _poll_timeout_ms(self) -> Optional[int]:
        # without pidfd_open (kernels before 5.3) exits are found by looking
        return None if len(self.pidfds) == len(self.children) else 20

    def _receive(self) -> Tuple[Optional[Message], List[int]]:
        head, fds, _, _ = socket.recv_fds(self.channel, LENGTH.size, PIPES)
        if not head:
            return None, fds
        (length,) = LENGTH.unpack(head)
        data = bytearray()
        while len(data) < length:
            chunk = self.channel.recv(length - len(data))
            if not chunk:
                return None, fds
            data += chunk
        return json.loads(data), fds

    def _execute(self, order: Message, fds: List[int]) -> Optional[Callable[[], int]]:
        """Executes an order; returns a rank's work in the forked child, else ``None``."""
        if "attempt" in order:
            self.attempt = order["attempt"]
        elif "store" in order:
            if self._fork({"store": True}) == 0:
                return lambda: serve_store(order["store"], fds[0])
        elif self._fork({"local_rank": order["rank"]["local_rank"]}) == 0:
            from .process import prepare  # here, so that the server stays small

            return prepare(self.attempt, order["rank"], *fds)
        for fd in fds:
            os.close(fd)
        return None

    def _fork(self, child: Message) -> int:
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.EXIT_SIGNALS)
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(server)
            os.setsid()
            self.channel.close()
            for fd in self.pidfds:
                os.close(fd)
            return 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.EXIT_SIGNALS)
        self.children[pid] = child
        with contextlib.suppress(AttributeError, OSError):
            self.pidfds[os.pidfd_open(pid)] = pid
        identity = processes.read_stat(pid)
        self.report(dict(child, started=pid, start=identity.start if identity else 0))
        return pid

    def _reap(self) -> None:
        for pid in list(self.children):
            exited_pid, status, usage = os.wait4(pid, os.WNOHANG)
            if exited_pid:
                child = self.children.pop(pid)
                peak = usage.ru_maxrss * 1024
                report = dict(child, exited=pid, status=status, peak=peak)
                self.report(dict(report, time=time.monotonic()))
        for fd, pid in list(self.pidfds.items()):
            if pid not in self.children:
                del self.pidfds[fd]
                os.close(fd)


def serve_store(endpoint: Message, listen_fd: int) -> int:
    """Serves the rendezvous store of one attempt on its bound socket.

    A ``TCPStore`` by itself listens on every interface. Torch is imported at the first connection.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.EXIT_SIGNALS)
    process_title.show("%s %s store" % (sys.executable, sys.argv[0]))
    select.select([listen_fd], [], [])
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        endpoint["address"],
        endpoint["port"],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    while store is not None:  # its threads serve; the agent's SIGKILL ends it
        signal.pause()
    return 1
