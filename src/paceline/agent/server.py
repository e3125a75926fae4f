"""The agent's loop: answers the launcher's requests, reports events, ends with its launcher.

A request is ``{"op": NAME, "id": N, ...}``; the reply is ``{"re": N, ...}`` or ``{"re": N, "error":
TEXT}``. An event is ``{"event": NAME, ...}``. ``OPERATIONS`` has all names of requests.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import detached_runs, warm
from .files import data, data_requests, outputs, safe_paths, snapshot, transfer
from .files.blocks import RECEIVING, SENDING, Downloads, Uploads
from .frames import Message
from .lease import Lease
from .operations import describe_error
from .reconnection import ReconnectListener
from .stream import Requests, Stream
from .supervision import guard, processes, requests
from .supervision.job import NodeJob
from .surveys import checks, facts, probe, retransmissions

TICK_S = 0.05
CLOSING_S = 0.6  # time from KILL to the end of the agent itself
MAX_GRACE_S = 3.0  # longest time between TERM and KILL after the launcher has gone
JOINT_SAVE_SHARE = 0.5  # share of the grace period for a joint save; then one rank saves alone
CLEANUP_TIMEOUT_S = 3.0  # for removing the job's folders, whose disk may hang
CHUNK_BYTES = 1 << 16
TOUCH_INTERVAL_S = 24 * 3600.0  # at which the agent marks its folders as used
GUARD_KILLED = "its guard (the agent's parent process) was killed"
Work = Callable[[], None]


class Agent:
    """Serves one conversation with a launcher, and runs at most one job.

    Args:
        input_fd, output_fd: Descriptors of the framed stream.
        package: Folder of this agent's code.
        resumed: Resources of this process's previous conversation.

    Attributes:
        warm_wait: Set if this process waits for another conversation after this one.
        resumable: Resources for that conversation, set at the end of this one.
    """

    def __init__(self, input_fd: int, output_fd: int, package: str,
                 resumed: Optional[warm.Resumable] = None) -> None:  # fmt: skip
        self.identity = os.urandom(probe.IDENTITY_BYTES)
        self._package = package
        self._wake_read, wake_write = os.pipe() if resumed is None else resumed.wake
        for fd in (input_fd, output_fd, self._wake_read, wake_write):
            os.set_blocking(fd, False)
        self.stream = Stream(input_fd, output_fd, wake_write)
        self.outbox = self.stream.outbox
        self.job = NodeJob(self.outbox.post, package, resumed.idle_server if resumed else None)
        self.warm_wait: Optional[warm.WarmWait] = None
        self.resumable: Optional[warm.Resumable] = None
        self._is_first = resumed is None
        self.lease = Lease()
        self.listeners: Dict[str, socket.socket] = {}
        self.sinks: List[socket.socket] = []  # discard the data of bandwidth tests
        self.reserved: Optional[socket.socket] = None
        # folders of this job, removed at its end
        self.folders: List[Path] = [] if resumed is None else resumed.folders
        # run folders here, by key: files that may be removed at the end, None for all
        self.run_keys: Dict[str, Optional[List[str]]] = {}
        # copies of the code here: files that change later, in microseconds, are the script's
        self.output_roots: Dict[str, int] = {}
        self.private: Optional[Path] = None  # used in place of the cache
        self.chosen_python = sys.executable
        self.uploads = Uploads()
        self.data_copies = data.DataCopies(self.identity.hex())
        self.downloads = Downloads()
        # files of detached runs that the launcher knows: run id → path → version, size
        self.listed_files: Dict[str, Dict[str, Tuple[str, int]]] = {}
        self.run_locks: Dict[str, int] = {}  # descriptors of locked folders of detached runs
        self._tasks: "queue.SimpleQueue[Work]" = queue.SimpleQueue()
        self._queues: Dict[str, "queue.SimpleQueue[Optional[Work]]"] = {}
        self._queues_lock = threading.Lock()
        self._wake_write = wake_write
        self._fork_server_stderr: Optional[int] = None  # read end of its pipe
        self._touch_at = 0.0
        self._exit_deadline: Optional[float] = None
        self._single_save_at: Optional[float] = None
        self._has_term = False
        self._parent = os.getppid()  # the guard

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until the launcher ends the conversation, is lost, or lets the lease expire."""
        self.in_thread(self._send_hello)
        if self._is_first:
            self.in_thread(self._remove_stale)
        while not self._may_exit():
            self._wait_and_handle()
            self.job.tick()
            self._watch_launcher()
            self._touch_regularly()
        self._close()
        return 0

    def _touch_regularly(self) -> None:
        """Marks folders of a long job as used, so that agents on the same disk keep them."""
        if time.monotonic() >= self._touch_at:
            self._touch_at = time.monotonic() + TOUCH_INTERVAL_S
            self.in_thread(self._touch_folders)

    def _touch_folders(self) -> None:
        run_folders = map(snapshot.run_folder, self.run_keys)
        for folder in [Path(self._package), *self.folders, *run_folders]:
            with contextlib.suppress(OSError):
                os.utime(str(folder))
        self.data_copies.touch()

    def forward_stderr(self, pipe: Tuple[int, int]) -> None:
        """Forwards what the fork server writes into ``pipe`` to the current standard error."""
        self._fork_server_stderr, self.job.errors_fd = pipe
        for fd in (2, self._fork_server_stderr):
            os.set_blocking(fd, False)

    def _forward_stderr(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # standard error has no reader at the moment
            os.write(2, os.read(fd, CHUNK_BYTES))

    def _remove_stale(self) -> None:
        snapshot.remove_old(keep=self._package)
        data.remove_old()

    def _send_hello(self) -> None:
        hello: Message = {"event": "hello", "pid": os.getpid(), "identity": self.identity.hex()}
        try:
            self.outbox.post(dict(hello, chosen_python=self.chosen_python, facts=facts.gather()))
        except Exception as error:  # the launcher must not wait in vain
            with contextlib.suppress(OSError):
                sys.stderr.write("paceline agent: it cannot greet: %s\n" % describe_error(error))
            self._exit_deadline = time.monotonic()

    def _may_exit(self) -> bool:
        if self._exit_deadline is None:
            return False
        is_flushed = self.outbox.broken or self.outbox.empty
        is_overdue = time.monotonic() > self._exit_deadline
        return (not self.job.running and is_flushed) or is_overdue

    def _wait_and_handle(self) -> None:
        """Waits for events and handles them; uses poll(), which has no limit of descriptors."""
        selector = selectors.PollSelector()
        stream_fds = self.stream.readers() if self._exit_deadline is None else []
        listeners = {sock.fileno(): sock for sock in self.listeners.values()}
        rank_fds = self.job.readers(take_output=not self.outbox.full)
        stderr_fds = [] if self._fork_server_stderr is None else [self._fork_server_stderr]
        for fd in [*stream_fds, self._wake_read, *listeners, *rank_fds, *stderr_fds]:
            selector.register(fd, selectors.EVENT_READ)
        for fd in self.job.writers():
            selector.register(fd, selectors.EVENT_WRITE)
        if self.outbox.pending and not self.outbox.broken:
            selector.register(self.outbox.fd, selectors.EVENT_WRITE)
        for key, events in selector.select(TICK_S if self.job.running else 4 * TICK_S):
            self._handle(key.fd, events, listeners)

    def _handle(self, fd: int, events: int, listeners: Dict[int, socket.socket]) -> None:
        if fd == self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, CHUNK_BYTES)
            while not self._tasks.empty():
                self._tasks.get()()
        elif fd == self.outbox.fd:
            self.outbox.flush()
        elif fd == self._fork_server_stderr:
            self._forward_stderr(fd)
        elif fd in listeners:
            probe.answer(listeners[fd], self.identity)
        elif (requests := self._read_requests(fd)) is not None:
            for message, blob in requests:
                self._dispatch(message, blob)
        elif events & selectors.EVENT_WRITE:
            self.job.writable(fd)
        else:
            self.job.readable(fd)

    def _read_requests(self, fd: int) -> Optional[Requests]:
        previous_frames = self.outbox.num_received
        requests = self.stream.readable(fd)
        if self.outbox.num_received > previous_frames:  # pieces of files count, too
            self.lease.extend(time.monotonic())
        return requests

    def _dispatch(self, message: Message, blob: bytes) -> None:
        operation = OPERATIONS.get(message.get("op", ""))
        if operation is None:
            self.reply(message, error="unknown request %r" % message.get("op"))
            return
        try:
            operation(self, message, blob)
        except Exception as error:  # every failure must reach the launcher
            self.reply(message, error=describe_error(error))

    def _watch_launcher(self) -> None:
        if self._exit_deadline is not None:
            if self._single_save_at is not None and time.monotonic() >= self._single_save_at:
                self._single_save_at = None
                self.job.send_to_first({"control": "alone"})
            return
        if ending := self.stream.end_reason(leased=self.lease.seconds is not None):
            self.start_exit(*ending)
        elif self.lease.is_ending(time.monotonic()):
            lease_s = self.lease.seconds or 0
            silence = "the launcher was silent for %.0f s" % (lease_s - self.lease.ending_s)
            self.start_exit("lease", "%s of a lease of %.0f s" % (silence, lease_s))
        elif os.getppid() != self._parent:
            self.start_exit("guard", GUARD_KILLED)
        elif self._has_term:
            self._handle_term()

    def on_sigterm(self, *_: object) -> None:
        """Handles SIGTERM: only records it for the loop."""
        self._has_term = True

    def _handle_term(self) -> None:
        """Reports SIGTERM to the launcher while ranks run; otherwise ends the agent.

        A scheduler signals all nodes; the launcher lets the ranks save.
        """
        self._has_term = False
        if self.job.running and not self.outbox.broken:
            self.outbox.post({"event": "asked to end", "time": time.monotonic()})
        else:
            self.start_exit("term", "asked to end by SIGTERM")

    def should_end(self) -> bool:
        """Whether to stop waiting for another launcher."""
        return self._has_term or os.getppid() != self._parent

    def start_exit(self, reason: str, explanation: str) -> None:
        """Begins to end: sends TERM to every rank, and KILL after a grace period.

        If the guard was killed, ranks get KILL at once: only this node ends, the others continue.
        ``reason`` is a word for the launcher, ``explanation`` a sentence for the user.
        """
        if os.getppid() != self._parent:  # the guard's death may also end the stream
            reason, explanation = "guard", GUARD_KILLED
        event = {"event": "leaving", "reason": reason, "why": explanation, "time": time.monotonic()}
        self.outbox.post(event)
        with contextlib.suppress(OSError):  # the reader may be gone
            sys.stderr.write("paceline agent: leaving: %s\n" % explanation)
        grace_s = min(MAX_GRACE_S, max(0.1, self.lease.ending_s - CLOSING_S))
        self._exit_deadline = time.monotonic() + grace_s + CLOSING_S / 2
        self.outbox.start_closing()
        if self.job.running and reason == "guard":
            # SIGTERM at one rank would stop the training on all nodes
            self.job.stop(signal.SIGKILL, 0.0)
        elif self.job.running:
            self.job.stop(signal.SIGTERM, grace_s)
            # ranks that wait for a lost rank could not save together before KILL
            self._single_save_at = time.monotonic() + JOINT_SAVE_SHARE * grace_s

    def start_warm_wait(self, place: ReconnectListener, seconds: float) -> None:
        """Ends the conversation; then the process waits for the next one."""
        self.warm_wait = warm.WarmWait(place, seconds)
        event = {"event": "leaving", "reason": "rest", "why": "the launcher said so"}
        self.outbox.post(dict(event, time=time.monotonic()))
        self._exit_deadline = time.monotonic() + CLOSING_S
        self.outbox.start_closing()

    def _close(self) -> None:
        idle_server = None
        if self.warm_wait is not None and not self.outbox.broken:
            idle_server = self.job.keep_server()
        else:
            self.warm_wait = None
            self.job.close()
        if os.getppid() != self._parent:  # no guard will kill what a script has left running
            processes.kill_job(self.job.token, [os.getpid()], [])
        if self._fork_server_stderr is not None:
            self._forward_stderr(self._fork_server_stderr)
        self.stream.close()
        self._wake_guard()
        for listener in [*self.listeners.values(), *self.sinks]:
            listener.close()
        if self.reserved is not None:
            self.reserved.close()
        is_clean = threading.Event()
        self.in_queue(SENDING, self.downloads.drop, {})
        self.in_queue(RECEIVING, lambda: self._clean_up(is_clean), {})  # after queued requests
        for tasks in self._queues.values():
            tasks.put(None)
        can_resume = self.warm_wait is not None and self._fork_server_stderr is not None
        if is_clean.wait(CLEANUP_TIMEOUT_S) and can_resume:
            assert self._fork_server_stderr is not None
            wake = self._wake_read, self._wake_write
            stderr_pipe = self._fork_server_stderr, self.job.errors_fd
            self.resumable = warm.Resumable(wake, stderr_pipe, idle_server, self.folders)
        elif idle_server is not None:
            idle_server.close()

    def _clean_up(self, is_clean: threading.Event) -> None:
        try:
            self.uploads.drop()
            self.data_copies.close()
            detached_runs.release_folders(self.run_locks)
            with contextlib.suppress(OSError, ValueError):
                outputs.keep_uncollected(self)
            for folder in list(self.folders):
                is_for_fork_server = folder.name.startswith(warm.FOLDER_PREFIX)
                if self.warm_wait is None or not is_for_fork_server:  # which has imported from it
                    snapshot.discard_job_folder(folder)
                    self.folders.remove(folder)
            for key, names in self.run_keys.items():
                with contextlib.suppress(OSError):
                    snapshot.discard_run_folder(key, names, self.identity.hex())
            is_in_use = self.private is not None and any(snapshot.cache_folder().glob("runs/*"))
            if self.private is not None and not is_in_use:
                snapshot.remove_folder(self.private)
        finally:
            is_clean.set()

    def _wake_guard(self) -> None:
        """Continues a stopped guard, so that it can end after the agent."""
        if os.getppid() == self._parent > 1:
            with contextlib.suppress(OSError):
                os.kill(self._parent, signal.SIGCONT)

    # --- helpers of the operations -----------------------------------------------------------

    def reply(self, request: Message, blob: bytes = b"", **answer: Any) -> None:
        """Answers a request; from any thread."""
        if "id" in request:
            self.outbox.post(dict({"re": request["id"]}, **answer), blob)

    def in_thread(self, work: Work, request: Optional[Message] = None) -> None:
        """Runs slow work in a new thread; a failure becomes the request's answer."""
        threading.Thread(target=self._guarded(work, request), daemon=True).start()

    def in_queue(self, name: str, work: Work, request: Message) -> None:
        """Runs slow work in the thread of the queue ``name``, in the order of the calls.

        Can be called from any thread.
        """
        with self._queues_lock:
            if name not in self._queues:
                self._queues[name] = queue.SimpleQueue()
                threading.Thread(target=_run_queue, args=(self._queues[name],), daemon=True).start()
            self._queues[name].put(self._guarded(work, request))

    def on_loop(self, work: Work, request: Message) -> None:
        """Runs work in the loop's thread; can be called from any thread."""
        self._tasks.put(self._guarded(work, request))
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def _guarded(self, work: Work, request: Optional[Message]) -> Work:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self.reply(request or {}, error=describe_error(error))

        return guarded


def _run_queue(tasks: "queue.SimpleQueue[Optional[Work]]") -> None:
    """Runs tasks one after the other until ``None``."""
    for work in iter(tasks.get, None):
        work()


# --- operations ---------------------------------------------------------------------------------


def renew_lease(agent: Agent, request: Message, _: bytes) -> None:
    """Renews the lease for ``seconds``; answers the node's clocks and how long ranks are idle."""
    now = time.monotonic()
    agent.lease.renew(request["seconds"], now)
    agent.reply(request, monotonic=now, time=time.time(), **agent.job.idle_report(now))


def bye(agent: Agent, request: Message, _: bytes) -> None:
    """Ends the agent and its job."""
    agent.reply(request)
    agent.start_exit("bye", "the launcher said so")


def keep_warm(agent: Agent, request: Message, _: bytes) -> None:
    """Ends the conversation; the agent then waits ``seconds`` for another launcher.

    ``place`` is the name of the socket, ``key`` is hexadecimal as for ``stay``.
    """
    if agent.job.running or agent.private is not None:
        raise RuntimeError("ranks still run" if agent.job.running else "nothing can be kept here")
    place = ReconnectListener(bytes.fromhex(request["key"]), request["place"])
    agent.reply(request)
    agent.start_warm_wait(place, request["seconds"])


def allow_reconnect(agent: Agent, request: Message, _: bytes) -> None:
    """Lets the launcher reconnect with ``key`` (hexadecimal); answers the name of the socket."""
    agent.reply(request, place=agent.stream.allow_reconnect(bytes.fromhex(request["key"])))


OPERATIONS: Dict[str, Callable[[Agent, Message, bytes], None]] = {
    "lease": renew_lease,
    "stay": allow_reconnect,
    "rest": keep_warm,
    "bye": bye,
    **requests.OPERATIONS,
    **transfer.OPERATIONS,
    **data_requests.OPERATIONS,
    **outputs.OPERATIONS,
    **detached_runs.OPERATIONS,
    **checks.OPERATIONS,
    **retransmissions.OPERATIONS,
}


def main(package: str, chosen_python: str, temporary: bool) -> int:
    """Serves on standard input and output.

    Args:
        package: Folder of this code.
        chosen_python: The interpreter, as named by the launcher.
        temporary: Whether the code could not be cached; then everything is removed at the end.
    """
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # batch systems send them to all processes
    safe_paths.tighten_umask()
    guard_errors = guard.fork_agent(package)  # returns in the agent only
    processes.adopt_orphans()
    input_fd, output_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # prints must not break frames

    def redirect_errors(fd: int) -> None:
        for standard_fd in (1, 2):  # prints must not break frames
            os.dup2(fd, standard_fd)
        guard_errors.redirect(fd)

    resumed: Optional[warm.Resumable] = None
    holder: Optional[socket.socket] = None
    while True:
        agent = Agent(input_fd, output_fd, package, resumed)
        agent.forward_stderr(resumed.stderr_pipe if resumed is not None else os.pipe())
        agent.stream.errors, agent.stream.on_errors = 2, redirect_errors
        agent.stream.holder = holder
        agent.chosen_python = chosen_python
        if temporary:
            agent.private = Path(package).parent
            snapshot.use_cache(agent.private / "paceline")
        signal.signal(signal.SIGTERM, agent.on_sigterm)
        agent.run()
        resumed = agent.resumable
        if agent.warm_wait is None or resumed is None:
            return 0
        agent.stream.release()
        redirect_errors(null)
        guard_errors.notify()
        os.chdir("/")  # the agent must not keep a disk from being unmounted
        visit = agent.warm_wait.wait(resumed, agent.should_end)
        if visit is None:
            resumed.close()
            return 0
        (streams, _, holder), login = visit
        login.apply()
        input_fd, output_fd = streams.input, streams.output
        redirect_errors(streams.errors)
        os.close(streams.errors)
