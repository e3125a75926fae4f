"""The fork server of a node: imports torch once, then every rank is a fork of it.

Runs under the job's own interpreter and environment. It takes start requests (JSON, with the
ranks' pipes as passed descriptors) over a Unix socket and reports every exit. It has one thread and
never imports anything of a CUDA context, so forking is safe. A rank is its own session and
dies with the fork server; the fork server dies with the agent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import procs

Message = Dict[str, Any]
MAX_REQUEST = 1 << 22
MAX_FDS = 250  # the kernel passes at most 253 in one message


def main(fd: int, parent: int, preload: List[str]) -> int:
    """Serves until the agent closes the socket.

    In a forked rank this function returns too: what it returns is the rank's work, to be done
    outside all frames of the server, so that the rank ends as any Python process does.
    """
    procs.die_with_parent(parent)
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
    """Imports; says how long it took and which torch it really is."""
    begun = time.monotonic()
    try:
        for module in modules:
            _import(module)
    except BaseException as error:  # an import may raise SystemExit too
        return {
            "failed": "%s: %s" % (type(error).__name__, error),
            "traceback": traceback.format_exc(),
        }
    return {"ready": True, "import_s": time.monotonic() - begun, "loaded": _loaded()}


def _import(module: str) -> None:
    """Imports a module; one whose name ends in ``?`` only where it is there."""
    try:
        importlib.import_module(module.rstrip("?"))
    except ImportError:
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
        if "nccl" in loaded["backends"]:
            with contextlib.suppress(Exception):  # asks the library itself, without a context
                loaded["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return loaded


class ForkServer:
    """The loop of the fork server."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.children: Dict[int, Message] = {}  # pid -> {"local_rank"} or {"store"}
        self.pidfds: Dict[int, int] = {}  # pidfd -> pid

    def report(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> Optional[Callable[[], int]]:
        """Loops; returns a rank's work in the forked child, ``None`` when the agent has gone."""
        while True:
            channel_fd = self.channel.fileno()
            ready, _, _ = select.select([channel_fd, *self.pidfds], [], [], self._patience())
            self._reap()
            if channel_fd not in ready:
                continue
            request, fds = self._receive()
            if request is None:
                return None
            work = self._start(request, fds)
            if work is not None:
                return work

    def _patience(self) -> Optional[float]:
        # without pidfd_open (kernels before 5.3) exits are found by looking
        return None if len(self.pidfds) == len(self.children) else 0.02

    def _receive(self) -> Tuple[Optional[Message], List[int]]:
        data, fds, _, _ = socket.recv_fds(self.channel, MAX_REQUEST, MAX_FDS)
        while data and not data.endswith(b"\n"):
            more = self.channel.recv(MAX_REQUEST)
            if not more:
                return None, fds
            data += more
        return (json.loads(data) if data else None), fds

    def _start(self, request: Message, fds: List[int]) -> Optional[Callable[[], int]]:
        """Forks the store (if it is to be here) and the ranks; returns work in a child."""
        given = iter(fds)
        store_fd = next(given) if request.get("store") else -1
        pipes = [(next(given), next(given), next(given)) for _ in request["ranks"]]
        if request.get("store") and self._fork({"store": True}, fds, (store_fd,)) == 0:
            return lambda: serve_store(request["store"], store_fd)
        for rank, (out, err, events) in zip(request["ranks"], pipes):
            if self._fork({"local_rank": rank["local_rank"]}, fds, (out, err, events)) == 0:
                from .rank import prepare  # here, so that the server stays small

                return prepare(request, rank, out, err, events)
        for fd in fds:
            os.close(fd)
        return None

    def _fork(self, about: Message, fds: List[int], keep: Tuple[int, ...]) -> int:
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            procs.die_with_parent(server)
            os.setsid()
            self.channel.close()
            for fd in [*self.pidfds, *(fd for fd in fds if fd not in keep)]:
                os.close(fd)
            return 0
        self.children[pid] = about
        with contextlib.suppress(AttributeError, OSError):
            self.pidfds[os.pidfd_open(pid)] = pid
        identity = procs.read_stat(pid)
        self.report(dict(about, started=pid, start=identity.start if identity else 0))
        return pid

    def _reap(self) -> None:
        for pid in list(self.children):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                about = self.children.pop(pid)
                peak = usage.ru_maxrss * 1024
                ended = dict(about, exited=pid, status=status, peak=peak)
                self.report(dict(ended, time=time.monotonic()))
        for fd, pid in list(self.pidfds.items()):
            if pid not in self.children:
                del self.pidfds[fd]
                os.close(fd)


def serve_store(where: Message, listen_fd: int) -> int:
    """Holds the rendezvous store of one attempt, on the chosen address only.

    The socket is bound already: a ``TCPStore`` left to itself listens on every interface. Torch is
    imported when the first rank knocks, for a job that never does need not have it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    select.select([listen_fd], [], [])
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        where["address"],
        where["port"],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    while store is not None:  # its threads serve; the agent's SIGKILL ends it
        signal.pause()
    return 1
