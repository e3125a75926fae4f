"""Runs the job on this node: the fork server, the ranks, and their pipes, orders and exits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from typing import (
    TYPE_CHECKING,
    Any,
    Deque,
    Dict,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from .. import warm
from ..ranks import forkserver, peer_filters, process_title
from ..ranks import tunnels as rank_tunnels
from ..surveys import facts
from . import activation, oom, processes, stalls
from .rank_process import Post, RankProcess
from .store import Store

if TYPE_CHECKING:
    from .tunnels import Tunnels

Message = Dict[str, Any]
CHUNK_BYTES = 1 << 16
MAX_STARTING = 16  # ranks that are ordered but not started yet
ORDER_TIMEOUT_S = 2.0  # for sending an order to the fork server
SAMPLE_S = 0.5  # interval at which the states of the processes are sampled
SAMPLE_RECOVERABLE_S = 0.25  # the same if the job can continue without a lost rank
SAMPLE_STOPPED_S = 0.1  # the same while a signal has stopped a rank


class NodeJob:
    """Runs one job on this node: call :meth:`prepare`, then :meth:`start` for each attempt.

    Args:
        post: Sends a message to the launcher.
        package, idle_server: Folder of this agent's code; a fork server of an earlier job.
    """

    def __init__(
        self, post: Post, package: str, idle_server: Optional[warm.IdleServer] = None
    ) -> None:
        self._post = post
        self._package = package
        self._idle_server = idle_server
        self._server_spec: Optional[warm.ServerSpec] = None  # how the fork server was started
        self._imported: Optional[Message] = None  # its event after the imports
        self._server_sources: List[List[Any]] = []
        self._login_settings: Message = {}
        self.token = ""
        # an agent of this job that was cut off may still be killing processes with its own token
        self._token_suffix = os.urandom(8).hex()
        self.errors_fd = 2  # standard error of the fork server
        self.ranks: List[RankProcess] = []
        self.running = False
        self._server: Optional["subprocess.Popen[bytes]"] = None
        self._channel: Optional[socket.socket] = None
        self._channel_buffer = b""
        self.store = Store()
        self._tunnels: Optional[Tunnels] = None  # of an encrypted job
        self._runs_program = False  # the ranks execute a program, not Python in the fork server
        self._queued_ranks: Deque[Tuple[RankProcess, Message]] = deque()
        self._stop_signal: Optional[int] = None  # signal that also ends ranks that start late
        self._kill_at: Optional[float] = None
        self._sampled_at = 0.0
        self._stop_timer = stalls.StopTimer()  # of the fork server and the store
        self._killed_frozen = False  # the fork server was killed because it stood still
        self._had_recovery = False  # the job can continue, or has continued, without a rank here
        self._initial_oom_kills: Optional[int] = None
        self._activated_env: Optional[Dict[str, str]] = None  # environment after the job's scripts
        self._activated_names: Set[str] = set()  # variables that the scripts have set
        self._yielded_names: Set[str] = set()  # of these, variables that Paceline leaves alone

    # --- start -------------------------------------------------------------------------------

    def activate(self, request: Message) -> None:
        """Sources the job's activation scripts, which may take long.

        Raises ActivationError if a script fails.
        """
        environ = {n: v for n, v in os.environ.items() if n not in request.get("unset", ())}
        self._activated_env = activation.activate(request.get("activate", ()), environ)
        self._activated_names = set(activation.changed_names(environ, self._activated_env))

    def prepare(self, request: Message) -> None:
        """Starts the fork server, or adopts an idle one that was started the same way.

        It is called again if the fork server died.

        Args:
            request: ``python`` (absolute path), ``preload`` (modules), ``env`` (added),
                ``package`` (folder that comes first in ``PYTHONPATH``), ``unset`` (removed names),
                ``token``, ``defaults`` (names that yield to activation scripts).
        """
        self.token = "%s-%s" % (request["token"], self._token_suffix)
        self._yielded_names = self._activated_names.intersection(request.get("defaults", ()))
        request = dict(request, env=self._apply_defaults(request["env"]), token=self.token)
        self._channel_buffer, self._killed_frozen = b"", False
        self._stop_timer.clear()
        env = activation.job_environment(
            dict(os.environ) if self._activated_env is None else self._activated_env, request
        )
        self._login_settings = {"env": warm.login_variables(env), "umask": warm.current_umask()}
        self._server_spec = warm.make_spec(request, env, facts.library_folders())
        self._imported = None
        idle_server, self._idle_server = self._idle_server, None
        if idle_server is not None and idle_server.matches(self._server_spec):
            self._server, self._channel = idle_server.server, idle_server.channel
            self.token = idle_server.token
            self._imported, self._server_sources = idle_server.imported, idle_server.sources
            self._post(dict(idle_server.imported, seconds=0.0))
            return
        if idle_server is not None:
            idle_server.close()
        channel, child_channel = socket.socketpair()
        try:
            self._server = subprocess.Popen(
                [request["python"], self._package, "forkserver", str(child_channel.fileno())]
                + [str(os.getpid()), process_title.PADDING, *request["preload"]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.errors_fd,
                stderr=self.errors_fd,
                pass_fds=[child_channel.fileno()],
                start_new_session=True,
            )
        except OSError:
            channel.close()
            raise
        finally:
            child_channel.close()
        channel.setblocking(False)
        self._channel = channel

    def start(self, request: Message, store_listener: Optional[socket.socket]) -> None:
        """Starts the ranks of one attempt.

        Args:
            request: As for ``prepare`` in ``ranks/process.py``; also ``ranks`` (``rank``,
                ``local_rank``, ``env`` and ``cpus`` of each) and ``store`` (address and port, and
                the key of a closed store; or null), ``encryption`` (see ``tunnels.py``; or null).
            store_listener: Reserved socket of the store if it is on this node.
        """
        self._require_server()
        processes.raise_descriptor_limit(forkserver.PIPES * len(request["ranks"]))
        self.ranks, self._had_recovery = [], False
        self._queued_ranks.clear()
        self._stop_signal, self._kill_at = None, None
        self._open_tunnels(request)
        if store_listener is not None:
            addresses = request["env"].get(peer_filters.VARIABLE, "")
            self.open_store(request["store"], store_listener, addresses)
        self._order_ranks(request)

    def add(self, request: Message) -> None:
        """Starts ranks in the running attempt; they replace ranks that have ended.

        Raises RuntimeError if the fork server is gone, or a rank to be replaced still runs.
        """
        self._require_server()
        numbers = {spec["rank"] for spec in request["ranks"]}
        former_ranks = [rank for rank in self.ranks if rank.rank in numbers]
        if any(rank.status is None for rank in former_ranks):
            raise RuntimeError("such a rank still runs")
        for rank in former_ranks:
            rank.kill_group()
            if not rank.is_reported:
                self._report_exit(rank)
        processes.raise_descriptor_limit(forkserver.PIPES * len(numbers))
        self.ranks = [rank for rank in self.ranks if rank.rank not in numbers]
        self._had_recovery = True
        self._open_tunnels(request)
        self._order_ranks(request)

    def _open_tunnels(self, request: Message) -> None:
        """Encrypts connections to other nodes, if the job says so; keeps tunnels that are open."""
        settings = request.get("encryption")
        if settings == (None if self._tunnels is None else self._tunnels.settings):
            return
        self._close_tunnels()
        if settings:
            from .tunnels import Tunnels  # here, for most jobs need no TLS

            hosts = request["env"].get(peer_filters.VARIABLE, "")
            self._tunnels = Tunnels(
                settings,
                hosts,
                lambda address: self._post({"event": "connection altered", "address": address}),
            )
            self.store.encryption = self._tunnels.encryption

    def _close_tunnels(self) -> None:
        if self._tunnels is not None:
            self._tunnels.close()
        self._tunnels = self.store.encryption = None

    def admit(self, addresses: str) -> None:
        """Lets these hosts connect to the store and the tunnels instead of the former ones."""
        self.store.admit(addresses)
        if self._tunnels is not None:
            self._tunnels.admit(addresses)

    def _require_server(self) -> None:
        if self._channel is None:
            raise RuntimeError("the fork server is gone")

    def _order_ranks(self, request: Message) -> None:
        """Has the fork server start ranks beside the running ones."""
        specs, store = request["ranks"], request.get("store") or {}
        if "key" in store:
            endpoint = self.store.connect(store)
            place = {"MASTER_ADDR": endpoint["address"], "MASTER_PORT": str(endpoint["port"])}
            if self._tunnels is not None:
                place[rank_tunnels.VARIABLE] = self._tunnels.description
                # processes that a rank starts have no tunnels, whatever the user has set
                place.update(dict.fromkeys(rank_tunnels.INTERFACE_VARIABLES, "lo"))
            specs = [dict(spec, env=dict(spec["env"], **place)) for spec in specs]
        ranks = [RankProcess(spec["rank"], spec["local_rank"]) for spec in specs]
        self.ranks += ranks
        self.running = True
        self._runs_program = request["entry"]["kind"] == "binary"
        self._initial_oom_kills = oom.count_kills()
        shared = {k: v for k, v in request.items() if k not in ("ranks", "store", "encryption")}
        env = self._apply_defaults(request["env"])
        self._send_order({"attempt": dict(shared, env=env, login=self._login_settings)})
        self._queued_ranks.extend(zip(ranks, specs))
        for _ in range(MAX_STARTING):
            self._start_next()

    def open_store(self, store: Message, listener: socket.socket, addresses: str) -> None:
        """Has the fork server start a rendezvous store; this node's former one must have ended.

        Args:
            store: Address and port of the store, or of the gateway to a closed one, and its key.
            listener: The socket that listens there, which the caller closes.
            addresses: The job's hosts, as in :data:`peer_filters.VARIABLE`.
        """
        self._require_server()
        self.store.restrict(listener, addresses)
        if "key" not in store:
            self._send_order({"store": store}, [listener.fileno()])
            return
        with self.store.open_gateway(store, listener) as local:
            self._send_order({"store": self.store.connect(store)}, [local.fileno()])

    def _apply_defaults(self, env: Dict[str, str]) -> Dict[str, str]:
        return {name: value for name, value in env.items() if name not in self._yielded_names}

    def _start_next(self) -> None:
        """Orders the next rank; only a few at once, because the socket's buffer is limited."""
        if not self._queued_ranks:
            return
        rank, spec = self._queued_ranks.popleft()
        child_fds = rank.open_pipes()
        try:
            self._send_order({"rank": spec}, child_fds)
        finally:
            for fd in child_fds:
                os.close(fd)

    def _send_order(self, order: Message, fds: Sequence[int] = ()) -> None:
        assert self._channel is not None
        data = json.dumps(order).encode()
        # an order may be larger than the socket's buffer
        self._channel.settimeout(ORDER_TIMEOUT_S)
        try:
            socket.send_fds(self._channel, [forkserver.LENGTH.pack(len(data))], fds)
            self._channel.sendall(data)
        except socket.timeout:
            self._kill_server()
        except OSError:  # it has just died; the next read notices
            pass
        finally:
            self._channel.setblocking(False)

    # --- input and output --------------------------------------------------------------------

    def readers(self, take_output: bool) -> List[int]:
        """Returns descriptors to read; those of the ranks' output only if ``take_output``."""
        fds = [] if self._channel is None else [self._channel.fileno()]
        fds += self.store.readers()
        fds += [] if self._tunnels is None else self._tunnels.readers()
        for rank in self.ranks:
            fds += [fd for fd, name in rank.fds.items() if take_output or name == "events"]
        return fds

    def writers(self) -> List[int]:
        """Returns control pipes with unsent data."""
        return [r.control_fd for r in self.ranks if r.unsent and r.control_fd is not None]

    def writable(self, fd: int) -> None:
        """Continues writing to one of :meth:`writers`."""
        for rank in self.ranks:
            if rank.control_fd == fd:
                rank.flush()

    def send_to_ranks(self, line: Message) -> None:
        """Sends a line to every running rank; never blocks."""
        data = json.dumps(self.store.localize(line)).encode() + b"\n"
        for rank in self.running_ranks():
            rank.send(data)

    def send_to_first(self, line: Message) -> None:
        """Sends a line to the lowest rank that can continue without others."""
        candidates = [rank for rank in self.running_ranks() if rank.is_replaceable]
        if candidates:
            first = min(candidates, key=lambda rank: rank.rank)
            first.send(json.dumps(line).encode() + b"\n")

    def readable(self, fd: int) -> None:
        """Reads from one of :meth:`readers`."""
        if self._channel is not None and fd == self._channel.fileno():
            self._read_server()
            return
        for rank in self.ranks:
            if fd in rank.fds:
                rank.read(fd, self._post)
                return
        if self._tunnels is not None and fd in self._tunnels.readers():
            if address := self._tunnels.accept_rejected():
                self._post({"event": "stranger at the tunnels", "address": address})
        elif address := self.store.accept_rejected():
            self._post({"event": "stranger at the store", "address": address})

    def _read_server(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_server_exit()
            return
        self._channel_buffer += data
        *lines, self._channel_buffer = self._channel_buffer.split(b"\n")
        for line in lines:
            self._handle_message(json.loads(line))

    def _handle_message(self, message: Message) -> None:
        if "event" in message:
            self._server_sources = message.pop("sources", [])
            self._imported = message if message["event"] == "imported" else None
            self._post(message)
        elif "started" in message:
            self._on_started(message)
        elif "exited" in message and message.get("store"):
            if self.store.process is not None and self.store.process.pid == message["exited"]:
                self.store.on_exit()
                self._post({"event": "store ended", "time": message["time"]})
        elif "exited" in message:
            rank = self._by_local_rank(message["local_rank"])
            if rank.process is None or rank.process.pid != message["exited"]:
                return  # another process has this rank's place by now
            rank.status, rank.ended_at = message["status"], message["time"]
            rank.peak_bytes = message["peak"]
            if os.WIFSIGNALED(rank.status) and self._stop_signal is None:
                rank.kill_group()  # its workers would hold its pipes open

    def _on_started(self, message: Message) -> None:
        process = processes.Process(message["started"], message["start"])
        if message.get("store"):
            self.store.process = process
            return
        rank = self._by_local_rank(message["local_rank"])
        rank.process = process
        self._post({"event": "rank started", "rank": rank.rank, "pid": process.pid})
        if self._stop_signal is not None:  # it was ordered before the stop and started after it
            rank.signal(self._stop_signal, self._runs_program)
        with contextlib.suppress(OSError):  # a fork server that died is noticed by itself
            self._start_next()

    def _by_local_rank(self, local_rank: int) -> RankProcess:
        return next(rank for rank in self.ranks if rank.local_rank == local_rank)

    def _on_server_exit(self) -> None:
        """Reports that the fork server died; its ranks died with it."""
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        self.store.on_exit()
        status = self._server.wait() if self._server is not None else 0
        event = {"event": "fork server died", "status": status, "time": time.monotonic()}
        if self._killed_frozen:
            event["frozen"] = True
        elif status == -signal.SIGKILL:
            event["memory"] = oom.evidence(self._initial_oom_kills)
        self._post(event)
        self._queued_ranks.clear()
        for rank in self.ranks:
            if rank.status is None:
                rank.status, rank.ended_at = int(signal.SIGKILL), time.monotonic()

    def idle_report(self, now_s: float) -> Message:
        """Returns ``quiet_s``: seconds since a rank here was last active; ``None`` if none runs."""
        idle_s = [now_s - rank.active_at for rank in self.running_ranks()]
        return {"quiet_s": min(idle_s, default=None)}

    def running_ranks(self) -> List[RankProcess]:
        return [rank for rank in self.ranks if rank.status is None]

    # --- end ---------------------------------------------------------------------------------

    def stop(self, signum: int, grace_s: float) -> None:
        """Signals every rank; kills survivors after ``grace_s``. SIGINT is a user's request.

        Ranks that are not ordered yet count as ended by the signal.
        """
        self._stop_signal = signum
        for rank, _ in self._queued_ranks:
            rank.status, rank.ended_at = signum, time.monotonic()
        self._queued_ranks.clear()
        for rank in self.running_ranks():
            rank.signal(signum, self._runs_program, grace_s)
        deadline = time.monotonic() + grace_s
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    def kill_ranks(self, numbers: Sequence[int]) -> int:
        """SIGKILLs ranks and their process groups; returns the number of ranks."""
        targets = [rank for rank in self.running_ranks() if rank.rank in numbers]
        for rank in targets:
            rank.kill_group()
        return len(targets)

    def tick(self) -> None:
        """Does periodic work: reports exits and stalls, kills ranks after the grace period."""
        now_s = time.monotonic()
        if now_s - self._sampled_at >= self._sample_interval_s:
            self._sampled_at = now_s
            self._sample_all(now_s)
        if self._kill_at is not None and now_s >= self._kill_at:
            self._kill_at = None
            self.kill()
        for rank in self.ranks:
            rank.stop_children()
            if rank.is_finished and not rank.is_reported:
                self._report_exit(rank)
        if self.running and all(rank.is_reported for rank in self.ranks):
            self._end_attempt()

    @property
    def _sample_interval_s(self) -> float:
        """Interval at which the states of the processes are sampled."""
        if any(rank.stall.cause == "stopped" for rank in self.running_ranks()):
            return SAMPLE_STOPPED_S
        return SAMPLE_RECOVERABLE_S if any(rank.is_replaceable for rank in self.ranks) else SAMPLE_S

    def _sample_all(self, now_s: float) -> None:
        for rank in self.running_ranks():
            rank.sample(now_s)
            if (report := rank.stall_report(now_s)) is not None:
                self._post(report)
        if self._server is not None and self._stop_timer.is_stopped(self._server.pid, now_s):
            self._kill_server()
        self._had_recovery = self._had_recovery or any(rank.is_replaceable for rank in self.ranks)
        # Clients of a stopped store wait without end; if it ends, the ranks open another.
        store = self.store.process
        if self._had_recovery and store and self._stop_timer.is_stopped(store.pid, now_s):
            processes.send(store, signal.SIGKILL)

    def _kill_server(self) -> None:
        """Kills a fork server that hangs; :meth:`_on_server_exit` handles its end."""
        if self._server is not None and self._server.poll() is None:
            self._killed_frozen = True
            self._server.kill()

    def _report_exit(self, rank: RankProcess) -> None:
        rank.close_pipes(self._post)
        rank.is_reported = True
        report = rank.exit_report()
        if report["signal"] == signal.SIGKILL:  # the kernel may have killed it for memory
            report["memory"] = oom.evidence(self._initial_oom_kills)
        self._post(report)

    def _end_attempt(self) -> None:
        """Kills processes that the ended ranks left; the store stays for other nodes' ranks."""
        self.running, self._kill_at = False, None
        num_killed = self.kill()
        if num_killed:
            self._post({"event": "leftovers killed", "count": num_killed})
        self._post({"event": "node ended", "time": time.monotonic()})

    def kill(self) -> int:
        """SIGKILLs the job's processes except fork server and store; returns their number."""
        for rank in self.ranks:
            # its processes have no grace period any more
            rank.is_group_signaled = rank.is_interrupted = False
        if self._server is None:
            return 0
        spared = [self._server.pid] if self._channel is not None else []
        spared += [self.store.process.pid] if self.store.process else []
        # this process has adopted the job's orphans
        return processes.kill_job(self.token, [os.getpid()], spared)

    def keep_server(self) -> Optional[warm.IdleServer]:
        """Ends the job except for its fork server; returns an idle server for the next job.

        If this one cannot be reused, it is ended, and an earlier idle one is returned if there is.
        """
        self.store.end()
        self._close_tunnels()
        self.kill()
        server, channel = self._server, self._channel
        spec, imported = self._server_spec, self._imported
        if (
            (server is None or channel is None or spec is None or imported is None)
            or self._channel_buffer
            or self._stop_timer.has_started(server.pid)
        ):
            former, self._idle_server = self._idle_server, None
            self.close()
            return former
        self._server = self._channel = None
        return warm.IdleServer(server, channel, self.token, spec, imported, self._server_sources)

    def close(self) -> None:
        """Ends all processes of the job on this node, including the fork server."""
        self.store.close_sockets()
        self._close_tunnels()
        if self._idle_server is not None:
            self._idle_server.close()
            self._idle_server = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            processes.kill_job(self.token, [os.getpid()], [])
            self._server = None
