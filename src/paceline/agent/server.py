"""The agent's loop: takes the launcher's requests, tells what happens, ends with its launcher.

Requests are ``{"op": NAME, "id": N, ...}``; every one is answered with ``{"re": N, ...}`` or
``{"re": N, "error": TEXT}``. Events are ``{"event": NAME, ...}``. The names of the requests are
the keys of ``OPERATIONS``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import detached_runs, warm
from .files import data, snapshot, transfer
from .files.transfer import ARRIVING, DEPARTING, Arrivals, Departures
from .frames import Message
from .lease import Lease
from .ranks import peer_filters
from .reconnection import Place
from .stream import Requests, Stream
from .supervision import activation, guard, processes
from .supervision.job import NodeJob
from .surveys import checks, facts, probe, retransmissions

TICK_S = 0.05
CLOSING_S = 0.6  # from KILL to the end of the agent itself
LAST_GRACE_S = 3.0  # at most, between TERM and KILL when the launcher has gone
TOGETHER = 0.5  # of that for ranks to save what they have together; then one does so alone
CLEANING_S = 3.0  # at most, for the folders of the job: their disk may hang
CHUNK = 1 << 16
FRESH_S = 24 * 3600.0  # between two times at which the agent shows that it uses its folders
GUARD_KILLED = "its guard (the agent's parent process) was killed"
Work = Callable[[], None]


class Agent:
    """One agent: one launcher, at most one job.

    Args:
        input_fd, output_fd: The framed stream.
        package: Folder that this agent's code lies in.
        lasting: What is left of this process's conversation before.

    Attributes:
        rest: Set when another conversation may follow this one.
        lasting: What that goes on with, once this one is over.
    """

    def __init__(self, input_fd: int, output_fd: int, package: str,
                 lasting: Optional[warm.Lasting] = None) -> None:  # fmt: skip
        self.identity = os.urandom(probe.IDENTITY_BYTES)
        self._package = package
        self._wake_read, wake_write = os.pipe() if lasting is None else lasting.wake
        for fd in (input_fd, output_fd, self._wake_read, wake_write):
            os.set_blocking(fd, False)
        self.stream = Stream(input_fd, output_fd, wake_write)
        self.outbox = self.stream.outbox
        self.job = NodeJob(self.outbox.post, package, lasting.kept if lasting else None)
        self.rest: Optional[warm.Rest] = None
        self.lasting: Optional[warm.Lasting] = None
        self._is_first = lasting is None
        self.lease = Lease()
        self.listeners: Dict[str, socket.socket] = {}
        self.sinks: List[socket.socket] = []  # swallow what a bandwidth test sends
        self.reserved: Optional[socket.socket] = None
        # made for this job, removed with it
        self.folders: List[Path] = [] if lasting is None else lasting.folders
        # of runs with a folder here: what has served of it, None for all
        self.run_keys: Dict[str, Optional[List[str]]] = {}
        self.private: Optional[Path] = None  # instead of the cache
        self.chosen_python = sys.executable
        self.arrivals = Arrivals()
        self.copies = data.Copies(self.identity.hex())
        self.departures = Departures()
        # files of detached runs that the launcher was told of: run → path → mark, size
        self.told: Dict[str, Dict[str, Tuple[str, int]]] = {}
        self.reading: Dict[str, int] = {}  # folders of detached runs that are to stay: descriptors
        self._todo: "queue.SimpleQueue[Work]" = queue.SimpleQueue()
        self._lines: Dict[str, "queue.SimpleQueue[Optional[Work]]"] = {}
        self._wake_write = wake_write
        self._words: Optional[int] = None  # of the fork server
        self._fresh_until = 0.0
        self._leaving_at: Optional[float] = None
        self._alone_at: Optional[float] = None
        self._term = False
        self._parent = os.getppid()  # the guard

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until the launcher says bye, goes away, or lets the lease run out."""
        self.in_thread(self._hello)
        if self._is_first:
            self.in_thread(self._forget_old)
        while not self._done():
            self._wait_and_handle()
            self.job.tick()
            self._watch_launcher()
            self._stay_fresh()
        self._close()
        return 0

    def _stay_fresh(self) -> None:
        """Keeps agents with the same disk from taking a long job's folders for old ones."""
        if time.monotonic() >= self._fresh_until:
            self._fresh_until = time.monotonic() + FRESH_S
            self.in_thread(self._touch_folders)

    def _touch_folders(self) -> None:
        for folder in [
            Path(self._package),
            *self.folders,
            *map(snapshot.run_folder, self.run_keys),
        ]:
            with contextlib.suppress(OSError):
                os.utime(str(folder))
        self.copies.touch()

    def pass_words(self, words: Tuple[int, int]) -> None:
        """What the fork server writes goes where our own standard error goes at that moment.

        It would lose its standard error with the login that it was started under.

        Args:
            words: The pipe for it.
        """
        self._words, self.job.errors = words
        for fd in (2, self._words):
            os.set_blocking(fd, False)

    def _pass_words(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # nobody reads them just now
            os.write(2, os.read(fd, CHUNK))

    def _forget_old(self) -> None:
        snapshot.forget_old(keep=self._package)
        data.forget_old()

    def _hello(self) -> None:
        try:
            self._greet()
        except Exception as error:  # else the launcher would wait for it in vain
            with contextlib.suppress(OSError):
                sys.stderr.write("paceline agent: it cannot greet: %s\n" % describe(error))
            self._leaving_at = time.monotonic()

    def _greet(self) -> None:
        about = {
            "event": "hello",
            "pid": os.getpid(),
            "identity": self.identity.hex(),
            "chosen_python": self.chosen_python,
            "facts": facts.gather(),
        }
        self.outbox.post(about)

    def _done(self) -> bool:
        if self._leaving_at is None:
            return False
        gone = self.outbox.broken or self.outbox.empty
        late = time.monotonic() > self._leaving_at
        return (not self.job.running and gone) or late

    def _wait_and_handle(self) -> None:
        """One round of select; poll() so that many descriptors are no problem."""
        selector = selectors.PollSelector()
        inputs = self.stream.readers() if self._leaving_at is None else []
        listening = {sock.fileno(): sock for sock in self.listeners.values()}
        ranks = self.job.readers(take_output=not self.outbox.full)
        words = [] if self._words is None else [self._words]
        for fd in [*inputs, self._wake_read, *listening, *ranks, *words]:
            selector.register(fd, selectors.EVENT_READ)
        for fd in self.job.writers():
            selector.register(fd, selectors.EVENT_WRITE)
        if self.outbox.pending and not self.outbox.broken:
            selector.register(self.outbox.fd, selectors.EVENT_WRITE)
        for key, events in selector.select(TICK_S if self.job.running else 4 * TICK_S):
            self._handle(key.fd, events, listening)

    def _handle(self, fd: int, events: int, listening: Dict[int, socket.socket]) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, CHUNK)
            while not self._todo.empty():
                self._todo.get()()
        elif fd == self.outbox.fd:
            self.outbox.flush()
        elif fd == self._words:
            self._pass_words(fd)
        elif fd in listening:
            probe.answer(listening[fd], self.identity)
        elif (requests := self._ask(fd)) is not None:
            for message, blob in requests:
                self._dispatch(message, blob)
        elif events & selectors.EVENT_WRITE:
            self.job.writable(fd)
        else:
            self.job.readable(fd)

    def _ask(self, fd: int) -> Optional[Requests]:
        heard = self.outbox.heard
        requests = self.stream.readable(fd)
        if self.outbox.heard > heard:  # the piece of a large file is a sign of life, too
            self.lease.prolong(time.monotonic())
        return requests

    def _dispatch(self, message: Message, blob: bytes) -> None:
        operation = OPERATIONS.get(message.get("op", ""))
        if operation is None:
            self.reply(message, error="unknown request %r" % message.get("op"))
            return
        try:
            operation(self, message, blob)
        except Exception as error:  # the launcher must hear of it, whatever it is
            self.reply(message, error=describe(error))

    def _watch_launcher(self) -> None:
        if self._leaving_at is not None:
            if self._alone_at is not None and time.monotonic() >= self._alone_at:
                self._alone_at = None
                self.job.tell_one({"control": "alone"})
            return
        if over := self.stream.over(leased=self.lease.seconds is not None):
            self.leave(*over)
        elif self.lease.ending(time.monotonic()):
            self.leave("lease", "the lease of %.0f s ran out" % (self.lease.seconds or 0))
        elif os.getppid() != self._parent:
            self.leave("guard", GUARD_KILLED)
        elif self._term:
            self._heed_term()

    def take_term(self, *_: object) -> None:
        """A signal handler: it may interrupt anything, so the work is the loop's."""
        self._term = True

    def _heed_term(self) -> None:
        """A scheduler that cancels a job asks everybody at once, the launcher too.

        So with ranks running it is for the launcher to give them time to save, on all nodes.
        """
        self._term = False
        if self.job.running and not self.outbox.broken:
            self.outbox.post({"event": "asked to end", "time": time.monotonic()})
        else:
            self.leave("term", "asked to end by SIGTERM")

    def is_unwanted(self) -> bool:
        """Whether there is a reason to end before any launcher comes."""
        return self._term or os.getppid() != self._parent

    def leave(self, reason: str, why: str) -> None:
        """Begins the end: TERM for every rank, KILL a little later, then nothing is left.

        KILL at once when the guard was killed: only this node ends then, and the others go on.

        Args:
            reason: One word for the launcher, if it still listens.
            why: The same for people.
        """
        if os.getppid() != self._parent:  # with it the stream from the launcher may end, too
            reason, why = "guard", GUARD_KILLED
        about = {"event": "leaving", "reason": reason, "why": why, "time": time.monotonic()}
        self.outbox.post(about)
        with contextlib.suppress(OSError):  # who would have read it may be gone
            sys.stderr.write("paceline agent: leaving: %s\n" % why)
        grace = min(LAST_GRACE_S, max(0.1, self.lease.last_part - CLOSING_S))
        self._leaving_at = time.monotonic() + grace + CLOSING_S / 2
        self.outbox.hurry()
        if self.job.running and reason == "guard":
            # Sessions go on elsewhere, where all ranks would heed that one of them is to stop.
            self.job.stop(signal.SIGKILL, 0.0)
        elif self.job.running:
            self.job.stop(signal.SIGTERM, grace)
            # Who waits for a rank that is gone, or for word of it, would wait until KILL.
            self._alone_at = time.monotonic() + TOGETHER * grace

    def end_warm(self, place: Place, seconds: float) -> None:
        """Begins the end of the conversation, after which the next one is waited for."""
        self.rest = warm.Rest(place, seconds)
        about = {"event": "leaving", "reason": "rest", "why": "the launcher said so"}
        self.outbox.post(dict(about, time=time.monotonic()))
        self._leaving_at = time.monotonic() + CLOSING_S
        self.outbox.hurry()

    def _close(self) -> None:
        kept = None
        if self.rest is not None and not self.outbox.broken:
            kept = self.job.rest()
        else:
            self.rest = None
            self.job.close()
        if os.getppid() != self._parent:  # nobody ends after us what a script has left running
            processes.kill_job(self.job.token, [os.getpid()], [])
        if self._words is not None:
            self._pass_words(self._words)
        self.stream.close()
        self._wake_guard()
        for listener in [*self.listeners.values(), *self.sinks]:
            listener.close()
        if self.reserved is not None:
            self.reserved.close()
        cleaned = threading.Event()
        self.in_line(DEPARTING, self.departures.drop, {})
        self.in_line(ARRIVING, lambda: self._clean_up(cleaned), {})  # after what is in the line
        for line in self._lines.values():
            line.put(None)
        if cleaned.wait(CLEANING_S) and self.rest is not None and self._words is not None:
            wake, words = (self._wake_read, self._wake_write), (self._words, self.job.errors)
            self.lasting = warm.Lasting(wake, words, kept, self.folders)
        elif kept is not None:
            kept.close()

    def _clean_up(self, cleaned: threading.Event) -> None:
        try:
            self.arrivals.drop()
            self.copies.drop()
            detached_runs.let_go(self.reading)
            for folder in [one for one in self.folders if not self._lasts(one)]:
                snapshot.discard_job_folder(folder)
                self.folders.remove(folder)
            for key, served in self.run_keys.items():
                with contextlib.suppress(OSError):
                    snapshot.discard_run_folder(key, served, self.identity.hex())
            kept = self.private is not None and any(snapshot.cache_folder().glob("runs/*"))
            if self.private is not None and not kept:
                snapshot.remove_tree(self.private)
        finally:
            cleaned.set()

    def _lasts(self, folder: Path) -> bool:
        """Whether a folder serves the next conversation: a fork server has imports from there."""
        return self.rest is not None and folder.name.startswith(warm.FOLDER)

    def _wake_guard(self) -> None:
        """One that somebody stopped could not end after us."""
        if os.getppid() == self._parent > 1:
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGCONT)

    # --- helpers of the operations -----------------------------------------------------------

    def reply(self, request: Message, blob: bytes = b"", **answer: Any) -> None:
        if "id" in request:
            self.outbox.post(dict(answer, re=request["id"]), blob)

    def in_thread(self, work: Work, request: Optional[Message] = None) -> None:
        """Runs what may take long beside the loop; its failure is the request's answer."""
        threading.Thread(target=self._guarded(work, request), daemon=True).start()

    def in_line(self, name: str, work: Work, request: Message) -> None:
        """As :meth:`in_thread`, but one after the other among those of the same name."""
        if name not in self._lines:
            self._lines[name] = queue.SimpleQueue()
            threading.Thread(target=_stand, args=(self._lines[name],), daemon=True).start()
        self._lines[name].put(self._guarded(work, request))

    def on_loop(self, work: Work, request: Message) -> None:
        """Has the loop do what only it may do; from any thread."""
        self._todo.put(self._guarded(work, request))
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def _guarded(self, work: Work, request: Optional[Message]) -> Work:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self.reply(request or {}, error=describe(error))

        return guarded


def _stand(line: "queue.SimpleQueue[Optional[Work]]") -> None:
    """Does one work after the other; ``None`` is the last."""
    for work in iter(line.get, None):
        work()


def describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = " (%s)" % error.filename if error.filename else ""
        return error.strerror + where
    return "%s: %s" % (type(error).__name__, error)


# --- operations: what a launcher can ask --------------------------------------------------------


def renew_lease(agent: Agent, request: Message, _: bytes) -> None:
    """``seconds``; answers with this node's clocks, so that the launcher can compare them.

    And with how quiet the ranks are (see :meth:`NodeJob.looks`).
    """
    now = time.monotonic()
    agent.lease.renew(request["seconds"], now)
    agent.reply(request, monotonic=now, time=time.time(), **agent.job.looks(now))


def prepare(agent: Agent, request: Message, _: bytes) -> None:
    """Starts the fork server, once its interpreter was seen: it may lie on a dead disk.

    ``activate``: scripts that are sourced first, with this agent's environment.
    """

    def begin() -> None:
        agent.job.prepare(request)
        agent.reply(request)

    def look_first() -> None:
        if "/" in request["python"]:
            os.stat(request["python"])
        try:
            agent.job.activate(request)
        except activation.ActivationError as error:
            agent.reply(request, error=str(error), activating=True)
            return
        agent.on_loop(begin, request)

    agent.in_thread(look_first, request)


def listen(agent: Agent, request: Message, _: bytes) -> None:
    """Listeners on ``addresses``; answers the ports by address, errors by address."""
    ports, errors = {}, {}
    for address in request["addresses"]:
        try:
            agent.listeners[address] = probe.listen(address)
            ports[address] = agent.listeners[address].getsockname()[1]
        except OSError as error:
            errors[address] = describe(error)
    agent.reply(request, ports=ports, errors=errors)


def stop_listening(agent: Agent, request: Message, _: bytes) -> None:
    for listener in agent.listeners.values():
        listener.close()
    agent.listeners = {}
    agent.reply(request)


def connect(agent: Agent, request: Message, _: bytes) -> None:
    """Tries ``targets`` at once (see :func:`probe.connect_all`)."""

    def work() -> None:
        results = probe.connect_all(
            request["targets"], request["timeout_s"], request.get("settle_s", 0.25)
        )
        agent.reply(request, results=results)

    agent.in_thread(work, request)


def reserve_port(agent: Agent, request: Message, _: bytes) -> None:
    """Takes and holds a port on ``address``: ``port``, or a free one when that is 0."""
    if agent.reserved is not None:
        agent.reserved.close()
        agent.reserved = None
    agent.job.end_store()  # an earlier attempt's, which may hold that very port
    port = request.get("port", 0)
    try:
        if port:
            agent.reserved = probe.listen(request["address"], port)
        else:
            agent.reserved = probe.listen_outside_ephemeral(
                request["address"], facts.ephemeral_ports()
            )
    except OSError as error:
        holders = probe.who_listens(port) if port else []
        agent.reply(request, error=describe(error), holders=holders)
        return
    peer_filters.attach_filter(
        agent.reserved, peer_filters.NO_HOSTS
    )  # until the job's store serves it
    agent.reply(request, port=agent.reserved.getsockname()[1])


def start(agent: Agent, request: Message, _: bytes) -> None:
    """Starts the ranks; the held port becomes the store's."""
    listener, agent.reserved = agent.reserved, None
    hosts_store = bool(request.get("store")) and listener is not None
    try:
        agent.job.start(request, listener if hosts_store else None)
    finally:
        if listener is not None:
            listener.close()  # the fork server has its own copy
    agent.reply(request)


def add_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """Starts ranks into the running attempt, as ``start`` did the others."""
    agent.job.add(request)
    agent.reply(request)


def tell_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """Passes ``line``, an object, on to every living rank."""
    agent.job.tell(request["line"])
    agent.reply(request)


def kill_ranks(agent: Agent, request: Message, _: bytes) -> None:
    """SIGKILL for some ``ranks``: frozen ones, or such that the others have gone on without."""
    agent.reply(request, killed=agent.job.kill_ranks(request["ranks"]))


def open_store(agent: Agent, request: Message, _: bytes) -> None:
    """A fresh rendezvous store on ``address``, beside the running ranks; answers its port.

    ``addresses``: from which the job's hosts connect.
    """
    agent.job.end_store()
    listener = probe.listen_outside_ephemeral(request["address"], facts.ephemeral_ports())
    with contextlib.closing(listener):  # the fork server has its own copy
        port = listener.getsockname()[1]
        where = {"address": request["address"], "port": port}
        agent.job.open_store(where, listener, request["addresses"])
    agent.reply(request, port=port)


def admit(agent: Agent, request: Message, _: bytes) -> None:
    """Has the store here take connections from ``addresses``: a host has come to the job."""
    agent.job.admit(request["addresses"])
    agent.reply(request)


def dump_stacks(agent: Agent, request: Message, _: bytes) -> None:
    """Looks at what every rank is doing; ``closely``: at its collectives, too, or at them alone."""
    agent.job.dump_stacks(bool(request.get("closely")), bool(request.get("stacks", True)))
    agent.reply(request)


def seen(agent: Agent, request: Message, _: bytes) -> None:
    """What was seen of the living ranks after ``dump_stacks``: the stacks need a moment to come."""

    def work() -> None:  # it reads every process's state
        agent.reply(request, ranks=agent.job.seen(bool(request.get("closely"))))

    agent.in_thread(work, request)


def stop(agent: Agent, request: Message, _: bytes) -> None:
    """``signal`` for every rank, KILL after ``grace_s``."""
    agent.job.stop(request["signal"], request["grace_s"])
    agent.reply(request)


def kill(agent: Agent, request: Message, _: bytes) -> None:
    agent.reply(request, killed=agent.job.kill())


def look(agent: Agent, request: Message, _: bytes) -> None:
    """What is at ``paths`` here: exists, is a file, can be executed."""
    agent.in_thread(lambda: agent.reply(request, paths=[
        {
            "path": path,
            "exists": Path(path).exists(),
            "file": Path(path).is_file(),
            "executable": os.access(path, os.X_OK),
        }
        for path in request["paths"]
    ]), request)  # fmt: skip


def which(agent: Agent, request: Message, _: bytes) -> None:
    """Where ``program`` is on this node's PATH, seen from ``workdir``; null when nowhere."""
    agent.in_thread(lambda: agent.reply(request, path=_where(request)), request)


def _where(request: Message) -> Optional[str]:
    program = request["program"]
    if "/" in program:
        found = str(Path(request["workdir"]) / program)
        return found if os.access(found, os.X_OK) else None
    return shutil.which(program, path=request.get("path"))


def disk(agent: Agent, request: Message, _: bytes) -> None:
    agent.in_thread(
        lambda: agent.reply(request, disks=[facts.disk_facts(path) for path in request["paths"]]),
        request,
    )


def job_processes(agent: Agent, request: Message, _: bytes) -> None:
    """Every living process of this job here, for tests and for the curious."""
    found = processes.job_processes(agent.job.token, [], [])
    agent.reply(request, pids=[process.pid for process in found])


def bye(agent: Agent, request: Message, _: bytes) -> None:
    agent.reply(request)
    agent.leave("bye", "the launcher said so")


def rest(agent: Agent, request: Message, _: bytes) -> None:
    """As ``bye``, but somebody may come within ``seconds`` and begin anew.

    ``place``: where this agent is to be met; ``key``: hexadecimal, as for ``stay``.
    """
    if agent.job.running or agent.private is not None:
        raise RuntimeError("ranks still run" if agent.job.running else "nothing can be kept here")
    place = Place(bytes.fromhex(request["key"]), request["place"])
    agent.reply(request)
    agent.end_warm(place, request["seconds"])


def stay(agent: Agent, request: Message, _: bytes) -> None:
    """From now on the launcher may come again after a break: answers at which ``place``.

    ``key``: hexadecimal, by which both prove themselves there (see :mod:`.reconnection`).
    """
    agent.reply(request, place=agent.stream.stay(bytes.fromhex(request["key"])))


OPERATIONS: Dict[str, Callable[[Agent, Message, bytes], None]] = {
    "lease": renew_lease,
    "stay": stay,
    "rest": rest,
    "prepare": prepare,
    "listen": listen,
    "stop_listening": stop_listening,
    "connect": connect,
    "reserve_port": reserve_port,
    "start": start,
    "add_ranks": add_ranks,
    "tell_ranks": tell_ranks,
    "kill_ranks": kill_ranks,
    "open_store": open_store,
    "admit": admit,
    "dump_stacks": dump_stacks,
    "seen": seen,
    "stop": stop,
    "kill": kill,
    "look": look,
    "which": which,
    "disk": disk,
    "job_processes": job_processes,
    "bye": bye,
    **transfer.OPERATIONS,
    **data.OPERATIONS,
    **detached_runs.OPERATIONS,
    **checks.OPERATIONS,
    **retransmissions.OPERATIONS,
}


def main(package: str, chosen_python: str, temporary: bool) -> int:
    """Serves on standard input and output. Noise on standard output goes elsewhere.

    Args:
        package: Folder that this code lies in.
        chosen_python: The interpreter as the launcher named it.
        temporary: It could not be kept in the cache, so nothing is: all goes at the end.
    """
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # batch systems send them to all, meant for ranks
    guards_errors = guard.fork_agent(package)  # returns in the agent only
    processes.adopt_orphans()
    input_fd, output_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # a stray print must not break a frame

    def errors_go_to(fd: int) -> None:
        for own in (1, 2):  # a stray print must not break a frame
            os.dup2(fd, own)
        guards_errors.go_to(fd)

    lasting: Optional[warm.Lasting] = None
    holder: Optional[socket.socket] = None
    while True:
        agent = Agent(input_fd, output_fd, package, lasting)
        agent.pass_words(lasting.words if lasting is not None else os.pipe())
        agent.stream.errors, agent.stream.on_errors = 2, errors_go_to
        agent.stream.came_by(holder)
        agent.chosen_python = chosen_python
        if temporary:
            agent.private = Path(package).parent
            snapshot.use_instead(agent.private / "paceline")
        signal.signal(signal.SIGTERM, agent.take_term)
        agent.run()
        lasting = agent.lasting
        if agent.rest is None or lasting is None:
            return 0
        agent.stream.end()
        errors_go_to(nothing)
        guards_errors.go_at_once()
        os.chdir("/")  # whoever wants to unmount a disk can
        met = agent.rest.wait(lasting, agent.is_unwanted)
        if met is None:
            lasting.close()
            return 0
        (streams, _, holder), login = met
        login.take()
        input_fd, output_fd = streams.input, streams.output
        errors_go_to(streams.errors)
        os.close(streams.errors)
