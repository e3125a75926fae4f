"""The job's processes on this node: fork server, ranks, store; their pipes and their ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple

from .. import warm
from ..files import safe_paths, snapshot
from ..ranks import flight_recorder, forkserver, peer_filters, process_title, stack_dump
from ..surveys import facts
from . import activation, gloo_threads, oom, processes, stalls

Message = Dict[str, Any]
Post = Callable[..., None]
CHUNK = 1 << 16
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # what torch keeps of compiled code
DRAIN_S = 1.0  # how long after a rank's end its pipes may stay open (grandchildren hold them)
MAX_LINE = 1 << 20
STORE_END_S = 1.0
UNDER_WAY = 16  # ranks that were ordered and have not begun
ORDER_S = 2.0  # for an order to go out to the fork server
LOOK_S = 0.5  # between two looks at the processes' states
OFTEN_S = 0.25  # the same where others go on without one that is lost
SOON_S = 0.1  # where a signal has stopped one
FROZEN_SERVER_S = 1.0  # how long a fork server or a store may stand still before it is given up
STACKS_S = 1.5  # until asked stacks have come, at most
CLOSELY_S = 2.5  # the same where the ranks' recorders are to answer, too
CHILD_S = 0.3  # the same of the stack of a child of a rank
WHILE_S = 0.01  # between two looks whether they have
MOST_CHILDREN = 16  # of a rank that are looked at
BUSY = 0.02  # of a CPU: who uses less does nothing
ROUNDED = 4.0  # ticks by which the work of a process and of some of its threads may be apart
WORK_S = 2.0  # within which it is counted, at most
TICKS = os.sysconf("SC_CLK_TCK")


class Rank:
    """One rank: its pipes, its identity, its end."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.process: Optional[processes.Process] = None
        self.status: Optional[int] = None
        self.ended_at = 0.0
        self.told = False
        self.group_signaled = False  # its child processes were asked to end, too
        self.fds: Dict[int, str] = {}  # read end -> "out" | "err" | "events"
        self.control: Optional[int] = None  # write end of the pipe by which it is told
        self.unsaid = bytearray()  # what did not fit into that pipe yet
        self.partial = b""  # an unfinished line of the events pipe
        self.heard = 0  # bytes that have come through it
        self.of_children = 0  # those of them that other processes wrote
        self.peak = 0  # bytes of memory, at most
        self.seen = stack_dump.StackDump()
        self.active_at = time.monotonic()  # when it last used a CPU or said something
        self.held = stalls.Standstill()
        self.replaced = False  # if it is lost: others go on without it
        self._since = self.active_at  # and the ticks that it had used then
        self._cpu = 0
        self._loops = gloo_threads.Loops()
        self.loops_seen = gloo_threads.Loops()  # when it was looked at
        self._moved = 0  # ticks that gloo's loops had worked then
        self._for_us = 0.0  # ticks, since

    def look(self, now: float) -> None:
        """Notes whether the process works, waits, or is held up."""
        stat = None if self.process is None else processes.read_stat(self.process.pid)
        if stat is None or self.process is None or stat.start != self.process.start:
            return
        if self.seen.disturbed(now):  # afterwards it is known what it worked for our sake
            self.held.look(now, stat, False)
            return
        self._for_us += self.seen.take_cpu() * TICKS
        moved = self._loops.ticks(self.process.pid, now)
        of_loops, seconds = moved - self._moved, now - self._since
        own = stat.cpu - self._cpu - self._for_us - of_loops
        # One tick says nothing: a process that only waits comes to one every few seconds.
        worked = own > max(ROUNDED if of_loops else 1.0, BUSY * TICKS * seconds)
        if worked:
            self.active_at = now
        self.held.look(now, stat, worked)
        if worked or seconds >= WORK_S:
            self._cpu, self._moved, self._since, self._for_us = stat.cpu, moved, now, 0.0

    def note(self, said: Message) -> None:
        """Hears whether others go on without it: then a signal that stopped it is soon told of."""
        able = said.get("event") == "recoverable" and said.get("able") is True
        if able or said.get("event") == "newcomer ready":
            self.replaced = True
            self.held.lasts_s = dict(stalls.LASTS_S, stopped=stalls.REPLACED_S)

    def tell(self, line: bytes) -> None:
        """Writes a line to the rank as soon as its pipe takes it; never waits."""
        if self.control is not None and len(self.unsaid) < MAX_LINE:
            self.unsaid += line
            self.flush()

    def flush(self) -> None:
        """Writes on, as far as the pipe takes it."""
        try:
            while self.unsaid and self.control is not None:
                del self.unsaid[: os.write(self.control, self.unsaid)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, or closed its end
            self.hang_up()

    def hang_up(self) -> None:
        """Closes the pipe to the rank."""
        if self.control is not None:
            os.close(self.control)
            self.control = None
        self.unsaid.clear()

    @property
    def over(self) -> bool:
        """Ended, and everything it wrote was read (or waited for long enough).

        Child processes that were asked to end with it have the grace period, too.
        """
        if self.status is None:
            return False
        if self.group_signaled and self.process is not None:
            self.group_signaled = processes.session_lives(self.process.pid)
            if self.group_signaled:
                return False
        return not self.fds or time.monotonic() - self.ended_at > DRAIN_S

    def end_message(self) -> Message:
        status = self.status or 0
        signaled = os.WIFSIGNALED(status)
        seen: Message = {"state": self.seen.state, "stack": self.seen.stack}
        if self.seen.calls:
            seen["calls"] = self.seen.calls
        return {
            **({"seen": seen} if self.seen.asked or self.seen.calls else {}),
            "event": "rank ended",
            "rank": self.rank,
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "time": self.ended_at,
            "peak_bytes": self.peak,
        }


class NodeJob:
    """What one agent runs for one job.

    Its life: :meth:`prepare` (fork server imports), :meth:`start` (ranks of one attempt), perhaps
    :meth:`add` (ranks in the place of lost ones), :meth:`stop` or the ranks' own end, possibly
    :meth:`start` again, :meth:`close` or :meth:`rest`.

    Args:
        post: Tells the launcher.
        package: Folder or archive that this agent runs from.
        kept: A fork server of an earlier job.
    """

    def __init__(self, post: Post, package: str, kept: Optional[warm.Kept] = None) -> None:
        self._post = post
        self._package = package
        self._kept = kept
        self._wanted: Optional[warm.Wanted] = None  # what the fork server was started with
        self._imported: Optional[Message] = None  # what it said then
        self._sources: List[List[Any]] = []
        self._login: Message = {}
        self.token = ""
        # A cut-off agent of this job may still end its own beside us: ours are not among them.
        self._mark = os.urandom(8).hex()
        self.errors = 2  # descriptor of the fork server's own words
        self.ranks: List[Rank] = []
        self.running = False
        self._server: Optional["subprocess.Popen[bytes]"] = None
        self._channel: Optional[socket.socket] = None
        self._received = b""
        self._store: Optional[processes.Process] = None
        self._runs_program = False  # not Python in the fork server's child
        self._store_listener: Optional[socket.socket] = None  # the store's, to be kept to hosts
        self._store_filter: Optional[peer_filters.PeerFilter] = None
        self._unstarted: Deque[Tuple[Rank, Message]] = deque()
        self._stopping: Optional[int] = None  # the signal that this attempt's ranks are to get
        self._kill_at: Optional[float] = None
        self._looked_at = 0.0
        self._frozen_at: Dict[int, float] = {}  # since when the server and the store stand still
        self._given_up = False  # it was killed for that
        self._mended = False  # a rank here has said that its loss is made good
        self._kills_before: Optional[int] = None
        self._base: Optional[Dict[str, str]] = None  # what the job's scripts made of ours
        self._activated: Set[str] = set()  # what they have set
        self._yielded: Set[str] = set()

    # --- beginning ---------------------------------------------------------------------------

    def activate(self, request: Message) -> None:
        """Sources the job's scripts. It may take long; ActivationError where one fails."""
        before = {n: v for n, v in os.environ.items() if n not in request.get("unset", ())}
        self._base = activation.after(request.get("activate", ()), before)
        self._activated = set(activation.changed(before, self._base))

    def prepare(self, request: Message) -> None:
        """Starts the fork server, which reports when its imports are done.

        One that was kept, and is what a new one would be, has done them already. A second time
        when the first one died.

        Args:
            request: ``python`` (absolute path), ``preload`` (modules), ``env`` (to be added),
                ``unset`` (names to be removed), ``token``; ``defaults``: names of variables that
                yield to what an activation script has set.
        """
        self.token = "%s-%s" % (request["token"], self._mark)
        self._yielded = self._activated.intersection(request.get("defaults", ()))
        request = dict(request, env=self._without_yielded(request["env"]), token=self.token)
        self._received, self._given_up = b"", False
        self._frozen_at.clear()
        env = environment(dict(os.environ) if self._base is None else self._base, request)
        self._login = {"env": warm.of_the_login(env), "umask": warm.umask()}
        self._wanted, self._imported = warm.wanted(request, env, facts.library_folders()), None
        kept, self._kept = self._kept, None
        if kept is not None and kept.serves(self._wanted):
            self._go_on_with(kept)
            return
        if kept is not None:
            kept.close()
        ours, theirs = socket.socketpair()
        try:
            self._server = subprocess.Popen(
                [request["python"], self._package, "forkserver", str(theirs.fileno())]
                + [str(os.getpid()), process_title.ROOM, *request["preload"]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel = ours

    def _go_on_with(self, kept: warm.Kept) -> None:
        self._server, self._channel, self.token = kept.server, kept.channel, kept.token
        self._imported, self._sources = kept.imported, kept.sources
        self._post(dict(kept.imported, seconds=0.0))

    def start(self, request: Message, store_listener: Optional[socket.socket]) -> None:
        """Starts the ranks of one attempt.

        Args:
            request: What :func:`rank.prepare` takes, and ``ranks``: a list of ``rank``,
                ``local_rank``, ``env``, ``cpus``; ``store``: address and port, or null.
            store_listener: The held socket of the store when it is to be on this node.
        """
        if self._channel is None:
            raise RuntimeError("the fork server is gone")
        processes.make_room_for_descriptors(forkserver.PIPES * len(request["ranks"]))
        self.ranks, self._mended = [], False
        self._unstarted.clear()
        self._stopping, self._kill_at = None, None
        if store_listener is not None:
            self.open_store(request["store"], store_listener, _addresses(request["env"]))
        self._begin(request)

    def add(self, request: Message) -> None:
        """Starts ranks into a running attempt, in the place of those that have ended.

        Args:
            request: As for :meth:`start`; what ranks share may be of a node that is new to them.

        Raises:
            RuntimeError: The fork server is gone, or such a rank runs.
        """
        if self._channel is None:
            raise RuntimeError("the fork server is gone")
        wanted = {spec["rank"] for spec in request["ranks"]}
        former = [rank for rank in self.ranks if rank.rank in wanted]
        if any(rank.status is None for rank in former):
            raise RuntimeError("such a rank still runs")
        for rank in former:
            self._end_group(rank)
            if not rank.told:
                self._finish(rank)
        processes.make_room_for_descriptors(forkserver.PIPES * len(wanted))
        self.ranks = [rank for rank in self.ranks if rank.rank not in wanted]
        self._mended = True
        self._begin(request)

    def _begin(self, request: Message) -> None:
        """Orders ranks; of those that are there already nothing changes."""
        ranks = [Rank(spec["rank"], spec["local_rank"]) for spec in request["ranks"]]
        self.ranks += ranks
        self.running = True
        self._runs_program = request["entry"]["kind"] == "binary"
        self._kills_before = oom.kills()
        shared = {k: v for k, v in request.items() if k != "ranks"}
        env = self._without_yielded(request["env"])
        self._order({"attempt": dict(shared, env=env, login=self._login)})
        self._unstarted.extend(zip(ranks, request["ranks"]))
        for _ in range(UNDER_WAY):
            self._start_next()

    def open_store(self, where: Message, listener: socket.socket, addresses: str) -> None:
        """Starts a rendezvous store; one that this node held before has ended already.

        Args:
            where: Its address and port.
            listener: Its socket, which stays the caller's.
            addresses: Of the job's hosts, as :data:`peers.VARIABLE` has them.
        """
        if self._channel is None:
            raise RuntimeError("the fork server is gone")
        self._store_listener = listener.dup()
        self._store_filter = peer_filters.PeerFilter(
            listener, peer_filters.parse_hosts(addresses) or peer_filters.ALL_HOSTS
        )
        self._order({"store": where}, [listener.fileno()])

    def admit(self, addresses: str) -> None:
        """Has the store take connections of these hosts from now on."""
        if self._store_listener is not None and self._store_filter is not None:
            hosts = peer_filters.parse_hosts(addresses) or peer_filters.ALL_HOSTS
            self._store_filter.admit(self._store_listener, hosts)

    def _without_yielded(self, env: Dict[str, str]) -> Dict[str, str]:
        return {name: value for name, value in env.items() if name not in self._yielded}

    def _start_next(self) -> None:
        """Orders the next rank. Few are under way at once: the socket holds only so many orders."""
        if not self._unstarted:
            return
        rank, spec = self._unstarted.popleft()
        ends = []
        for name in ("out", "err", "events"):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            rank.fds[read_end] = name
            ends.append(write_end)
        read_end, rank.control = os.pipe()
        os.set_blocking(rank.control, False)
        ends.append(read_end)
        try:
            self._order({"rank": spec}, ends)
        finally:
            for fd in ends:
                os.close(fd)

    def _order(self, order: Message, fds: Sequence[int] = ()) -> None:
        assert self._channel is not None
        data = json.dumps(order).encode()
        self._channel.settimeout(ORDER_S)  # an order larger than the buffer must go out whole
        try:
            socket.send_fds(self._channel, [forkserver.LENGTH.pack(len(data))], fds)
            self._channel.sendall(data)
        except socket.timeout:
            self._give_up_server()
        except OSError:  # it has just died, which its end of the socket tells
            pass
        finally:
            self._channel.setblocking(False)

    # --- what happens ------------------------------------------------------------------------

    def readers(self, take_output: bool) -> List[int]:
        """Descriptors to watch; without the ranks' output while nobody takes it."""
        fds = [] if self._channel is None else [self._channel.fileno()]
        if self._store_filter is not None and self._store_filter.reject_socket is not None:
            fds.append(self._store_filter.reject_socket.fileno())
        for rank in self.ranks:
            fds += [fd for fd, name in rank.fds.items() if take_output or name == "events"]
        return fds

    def writers(self) -> List[int]:
        """Pipes to ranks that could not take all that these were told."""
        return [r.control for r in self.ranks if r.unsaid and r.control is not None]

    def writable(self, fd: int) -> None:
        """Writes on to one of :meth:`writers`."""
        for rank in self.ranks:
            if rank.control == fd:
                rank.flush()

    def tell(self, line: Message) -> None:
        """Writes a line to every living rank's control pipe; waits for none of them."""
        data = json.dumps(line).encode() + b"\n"
        for rank in self._alive():
            rank.tell(data)

    def tell_one(self, line: Message) -> None:
        """The same to the first rank alone of those that can go on without others."""
        able = [rank for rank in self._alive() if rank.replaced]
        if able:
            first = min(able, key=lambda rank: rank.rank)
            first.tell(json.dumps(line).encode() + b"\n")

    def readable(self, fd: int) -> None:
        """Reads from one of :meth:`readers`."""
        if self._channel is not None and fd == self._channel.fileno():
            self._read_server()
            return
        for rank in self.ranks:
            if fd in rank.fds:
                self._read_rank(rank, fd)
                return
        if self._store_filter is not None and (address := self._store_filter.accept_rejected()):
            self._post({"event": "stranger at the store", "address": address})

    def _read_server(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._server_gone()
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._from_server(json.loads(line))

    def _from_server(self, message: Message) -> None:
        if "event" in message:
            self._sources = message.pop("sources", [])
            self._imported = message if message["event"] == "imported" else None
            self._post(message)
        elif "started" in message:
            self._started(message)
        elif "exited" in message and message.get("store"):
            if self._store is not None and self._store.pid == message["exited"]:
                self._store = None
                self._close_store_socket()
                self._post({"event": "store ended", "time": message["time"]})
        elif "exited" in message:
            rank = self._rank(message["local_rank"])
            if rank.process is None or rank.process.pid != message["exited"]:
                return  # another has its place by now
            rank.status, rank.ended_at = message["status"], message["time"]
            rank.peak = message["peak"]
            if os.WIFSIGNALED(rank.status) and self._stopping is None:
                self._end_group(rank)  # workers that it leaves would hold its pipes open

    def _started(self, message: Message) -> None:
        process = processes.Process(message["started"], message["start"])
        if message.get("store"):
            self._store = process
            return
        rank = self._rank(message["local_rank"])
        rank.process = process
        self._post({"event": "rank started", "rank": rank.rank, "pid": process.pid})
        if self._stopping is not None:  # it was ordered before the stop, and begins after it
            self._signal(rank, self._stopping)
        with contextlib.suppress(OSError):  # a fork server that died is noticed by itself
            self._start_next()

    def _rank(self, local_rank: int) -> Rank:
        return next(rank for rank in self.ranks if rank.local_rank == local_rank)

    def _server_gone(self) -> None:
        """The fork server died: its ranks died with it."""
        assert self._channel is not None
        self._channel.close()
        self._channel = self._store = None
        self._close_store_socket()
        status = self._server.wait() if self._server is not None else 0
        died = {"event": "fork server died", "status": status, "time": time.monotonic()}
        if self._given_up:
            died["frozen"] = True
        elif status == -signal.SIGKILL:
            died["memory"] = oom.evidence(self._kills_before)
        self._post(died)
        self._unstarted.clear()
        for rank in self.ranks:
            if rank.status is None:
                rank.status, rank.ended_at = int(signal.SIGKILL), time.monotonic()

    def _read_rank(self, rank: Rank, fd: int) -> None:
        name = rank.fds[fd]
        if name == "err":
            self._read_events_first(rank)
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if not data:
            del rank.fds[fd]
            os.close(fd)
        elif name == "events":
            self._rank_says(rank, data)
        else:
            self._post({"event": "output", "rank": rank.rank, "stream": name}, data)

    def _read_events_first(self, rank: Rank) -> None:
        """An exception is told before it is printed: so the launcher must hear of it first."""
        for fd, name in list(rank.fds.items()):
            if name == "events":
                self._read_rank(rank, fd)

    def _rank_says(self, rank: Rank, data: bytes) -> None:
        rank.heard += len(data)
        *lines, rank.partial = (rank.partial + data).split(b"\n")
        if len(rank.partial) > MAX_LINE:
            rank.partial = b""
        for line in lines:
            try:  # the user's code may write there too
                said = json.loads(line)
            except ValueError:
                rank.seen.take(line)
                continue
            if isinstance(said, dict) and said.get("kind") == flight_recorder.KIND:
                rank.seen.take_calls(said.get("calls"), said.get("cpu_s"))
            elif isinstance(said, dict):
                rank.active_at = time.monotonic()
                rank.note(said)
                self._post({"event": "said", "rank": rank.rank, "data": said})

    def dump_stacks(self, closely: bool = False, stacks: bool = True) -> None:
        """Looks at what every rank is doing; it is told with the rank's end.

        Args:
            closely: At its collectives, too.
            stacks: At its stack, for which it is interrupted.
        """
        for rank in self._alive():
            if rank.process is not None and stacks:
                rank.seen.ask(rank.process, closely)
            elif rank.process is not None and closely:
                rank.seen.ask_calls(rank.process)

    def seen(self, closely: bool = False) -> List[Message]:
        """What every living rank was doing when :meth:`dump_stacks` looked.

        ``stack`` (innermost line first; empty if it has not come whole), ``state`` as ``ps`` shows
        it, ``cpu_s`` that it and its children have used so far, without what gloo's loops have
        (what those move is among the bytes), ``moved``: bytes that they have read and written,
        ``sent``: those that it has written to others than us and that have arrived, ``switches``:
        how often they have waited for something new; ``call``, ``on`` and ``readers``: what it
        waits in. Not to be called in the loop.

        Args:
            closely: Also what the ``children`` of each rank do.
        """
        ranks = self._alive()
        deadline = time.monotonic() + (CLOSELY_S if closely else STACKS_S)
        _until(deadline, lambda now: all(rank.seen.complete(now) for rank in ranks))
        stats = processes.all_stats()
        found = []
        for rank in ranks:
            if rank.process is None:
                continue
            below = sorted(processes.descendants([rank.process.pid], stats))
            pids = [rank.process.pid, *below]
            ticks = sum(stats[pid].cpu for pid in pids if pid in stats)
            ticks -= rank.loops_seen.ticks(pids[0], time.monotonic())
            about: Message = {"rank": rank.rank, "pid": rank.process.pid, "cpu_s": ticks / TICKS}
            about["moved"] = sum(processes.bytes_moved(pid) for pid in pids)
            told = rank.heard - rank.of_children
            about["sent"] = max(processes.bytes_sent(rank.process.pid) - told, 0)
            about["switches"] = sum(stalls.switches(pid) for pid in pids)
            about.update(self._waits(rank.process.pid, pids), calls=list(rank.seen.calls))
            whole = rank.seen.whole(time.monotonic())
            about.update(state=rank.seen.state, stack=list(rank.seen.stack) if whole else [])
            about["children"] = self._children(rank, below, stats, pids) if closely else []
            found.append(about)
        return found

    def _children(self, rank: Rank, below: Sequence[int], stats: Dict[int, processes.Stat],
                  pids: List[int]) -> List[Message]:  # fmt: skip
        """What the processes do that a rank has started; forks of the rank tell their stack."""
        found, heard = [], rank.heard
        for pid in below[:MOST_CHILDREN]:
            stack: List[str] = []
            if rank.seen.whole(time.monotonic()):  # else it could be another's that comes
                lines = rank.seen.ask_child(processes.Process(pid, stats[pid].start))
                whole = _until(time.monotonic() + CHILD_S, rank.seen.whole)
                stack = list(lines) if whole else []
            found.append({"pid": pid, "name": stats[pid].name, **self._waits(pid, pids),
                          "stack": stack})  # fmt: skip
        rank.of_children += rank.heard - heard
        return found

    def _waits(self, pid: int, pids: List[int]) -> Message:
        waits = stalls.waits_in(pid)
        pipe = waits["call"] in ("write", "writev") and waits["on"].startswith("pipe:")
        readers = stalls.readers(waits["on"], pids) if pipe else []
        return {"call": waits["call"], "on": waits["on"], "readers": readers}

    def looks(self, now: float) -> Message:
        """``quiet_s``: how long none of the ranks here has worked or said a word.

        Null when none runs.
        """
        return {"quiet_s": min((now - rank.active_at for rank in self._alive()), default=None)}

    def _alive(self) -> List[Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    # --- ending ------------------------------------------------------------------------------

    def stop(self, signum: int, grace_s: float) -> None:
        """Signals every rank; what lives after ``grace_s`` seconds is killed."""
        self._stopping = signum
        self._forget_unstarted(signum)
        for rank in self._alive():
            self._signal(rank, signum)
        deadline = time.monotonic() + grace_s
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def kill_ranks(self, wanted: Sequence[int]) -> int:
        """SIGKILLs some ranks, stopped ones too, with what they started; how many there were."""
        found = [rank for rank in self._alive() if rank.rank in wanted]
        for rank in found:
            self._end_group(rank)
        return len(found)

    def _end_group(self, rank: Rank) -> None:
        """SIGKILL for a rank's process group, of which it may be the first to have gone."""
        if rank.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(rank.process.pid, signal.SIGKILL)

    def _forget_unstarted(self, signum: int) -> None:
        """Ranks that were not started yet count as ended by the signal."""
        for rank, _ in self._unstarted:
            rank.status, rank.ended_at = signum, time.monotonic()
        self._unstarted.clear()

    def _signal(self, rank: Rank, signum: int) -> None:
        """Signals a rank, and its process group unless the rank has a handler of its own.

        A rank that saves before it ends needs its data workers until then, and ends them itself.
        A program may be a shell, whose handler runs only after its child has ended.
        """
        process = rank.process
        if process is None or processes.identify(process.pid) != process:
            return
        if not self._runs_program and processes.catches(process.pid, signum):
            processes.send(process, signum)
            signum = signal.SIGCONT
        else:
            rank.group_signaled = signum != signal.SIGKILL
        with contextlib.suppress(OSError):
            try:
                os.killpg(process.pid, signum)
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes no signal
            except ProcessLookupError:  # it does not lead its group yet, so it has none
                os.kill(process.pid, signum)

    def tick(self) -> None:
        """Regular work: kills after the grace, reports ends, sees who stands still."""
        now = time.monotonic()
        if now - self._looked_at >= self._look_s:
            self._looked_at = now
            self._look(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self.kill()
        for rank in self.ranks:
            if rank.over and not rank.told:
                self._finish(rank)
        if self.running and all(rank.told for rank in self.ranks):
            self._end_attempt()

    @property
    def _look_s(self) -> float:
        """Seconds between two looks."""
        if any(rank.held.how == "stopped" for rank in self._alive()):
            return SOON_S
        return OFTEN_S if any(rank.replaced for rank in self.ranks) else LOOK_S

    def _look(self, now: float) -> None:
        for rank in self._alive():
            rank.look(now)
            self._tell_frozen(rank, now)
        if self._server is not None and self._stands_still(self._server.pid, now):
            self._give_up_server()
        self._mended = self._mended or any(rank.replaced for rank in self.ranks)
        # Whoever calls it waits without end; of one that has ended the others make another.
        if self._mended and self._store is not None and self._stands_still(self._store.pid, now):
            processes.send(self._store, signal.SIGKILL)

    def _stands_still(self, pid: int, now: float) -> bool:
        """Whether a signal has stopped this process of ours for too long."""
        stat = processes.read_stat(pid)
        if stat is None or stat.state != "T":
            self._frozen_at.pop(pid, None)
            return False
        return now - self._frozen_at.setdefault(pid, now) >= FROZEN_SERVER_S

    def _tell_frozen(self, rank: Rank, now: float) -> None:
        """Tells once that a rank is held up for too long, and once that it goes on."""
        lasts = rank.held.lasts(now)
        if rank.process is None or lasts == rank.held.told:
            return
        rank.held.told = lasts
        told = {"event": "rank thawed", "rank": rank.rank}
        if lasts:
            pid, how = rank.process.pid, rank.held.how
            told.update(event="rank frozen", how=how, on=stalls.on_what(pid, how), pid=pid)
            told["seconds"] = round(rank.held.seconds(now), 3)
        self._post(told)

    def _give_up_server(self) -> None:
        """It sees no rank's end and starts none: its end is read like that of one that died."""
        if self._server is not None and self._server.poll() is None:
            self._given_up = True
            self._server.kill()

    def _finish(self, rank: Rank) -> None:
        for fd in list(rank.fds):
            self._read_rank(rank, fd)
        for fd in rank.fds:
            os.close(fd)
        rank.fds = {}
        rank.hang_up()
        rank.told = True
        ended = rank.end_message()
        if ended["signal"] == signal.SIGKILL:  # by us, by somebody, or by the kernel for memory
            ended["memory"] = oom.evidence(self._kills_before)
        self._post(ended)

    def _end_attempt(self) -> None:
        """All ranks here are over: ends what they left behind.

        The store stays: ranks of other nodes may still need it.
        """
        self.running, self._kill_at = False, None
        leftover = self.kill()
        if leftover:
            self._post({"event": "leftovers killed", "count": leftover})
        self._post({"event": "node ended", "time": time.monotonic()})

    def kill(self) -> int:
        """SIGKILLs every process of the job but fork server and store; returns how many."""
        for rank in self.ranks:
            rank.group_signaled = False  # nothing is waited for any more
        if self._server is None:
            return 0
        spare = [self._server.pid] if self._channel is not None else []
        spare += [self._store.pid] if self._store else []
        # orphans of the job became children of this process
        return processes.kill_job(self.token, [os.getpid()], spare)

    def end_store(self) -> None:
        """Ends the store of the last attempt and waits until its port is free."""
        self._close_store_socket()
        if self._store is not None:
            processes.send(self._store, signal.SIGKILL)
            processes.await_end(self._store, STORE_END_S)
            self._store = None

    def _close_store_socket(self) -> None:
        if self._store_filter is not None:
            self._store_filter.close()
        if self._store_listener is not None:
            self._store_listener.close()
        self._store_filter = self._store_listener = None

    def rest(self) -> Optional[warm.Kept]:
        """Ends everything of the job on this node but the fork server, which may serve another.

        ``None`` where there is none that has imported.
        """
        self.end_store()
        self.kill()
        ready = None not in (self._server, self._channel, self._wanted, self._imported)
        frozen = self._server is not None and self._server.pid in self._frozen_at
        if not ready or self._received or frozen:
            before, self._kept = self._kept, None
            self.close()
            return before
        assert self._server is not None
        assert self._channel is not None
        assert self._wanted is not None
        assert self._imported is not None
        kept = warm.Kept(self._server, self._channel, self.token, self._wanted, self._imported,
                         self._sources)  # fmt: skip
        self._server = self._channel = None
        return kept

    def close(self) -> None:
        """Ends everything of the job on this node, the fork server included."""
        self._close_store_socket()
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            processes.kill_job(self.token, [os.getpid()], [])
            self._server = None


def _addresses(env: Dict[str, str]) -> str:
    """Of the job's hosts, as its ranks are told them."""
    return env.get(peer_filters.VARIABLE, "")


def _until(deadline: float, so: Callable[[float], bool]) -> bool:
    """Waits until it is so at a moment, or the deadline has passed; whether it is so."""
    while not so(time.monotonic()):
        if time.monotonic() > deadline:
            return False
        time.sleep(WHILE_S)
    return True


def environment(base: Dict[str, str], request: Message) -> Dict[str, str]:
    """The environment of fork server and ranks.

    The interpreter's folder comes first in ``PATH``, as in an activated virtual environment, so
    that programs the script calls by name are those of its own environment.
    """
    env = {name: value for name, value in base.items() if name not in request.get("unset", ())}
    if "/" in request["python"]:
        folder = str(Path(request["python"]).parent)
        env["PATH"] = os.pathsep.join([folder, env.get("PATH", os.defpath)])
    env.update(request["env"])
    if INDUCTOR not in (*env, *request.get("unset", ())):
        # torch's own choice is /tmp/torchinductor_USER, which anybody can make first
        cache = snapshot.cache_folder() / "torchinductor"
        with contextlib.suppress(OSError):
            env[INDUCTOR] = safe_paths.own_folder("paceline-inductor-%d" % os.getuid(), str(cache))
    env["PACELINE_JOB_TOKEN"] = request["token"]
    return env
