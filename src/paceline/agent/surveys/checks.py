"""Answers a check's requests beyond facts: names, ports, bandwidth, folders, left-overs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sysconfig
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

from .. import challenge, warm
from ..files import safe_paths, snapshot
from ..operations import describe_error
from ..supervision import processes, stalls
from . import facts, host_load, probe

if TYPE_CHECKING:
    from ..operations import Agent
Message = Dict[str, Any]
BLOCK_BYTES = 1 << 18
SEND_BUFFER = 1 << 20  # bytes; small, so that what was sent was also received soon after
MAX_UNPROVEN = 64  # connections to a sink that may be proving the key; beyond that the oldest goes
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SYN_RECV = "03"  # state in /proc/net/tcp
RTF_REJECT = 0x200
MAX_TOKEN_BYTES = 1 << 10
MAX_OUTPUT_BYTES = 1 << 16  # of a command, from its end
MAX_HASHED_FILES, MAX_HASHED_BYTES = 64, 1 << 20  # of a tree, and of each of its files
NVIDIA_SMI_TIMEOUT_S = 10.0
SO_MAX_PACING_RATE = 47


# --- names ------------------------------------------------------------------------------------


def resolve_names(names: List[str]) -> Dict[str, Optional[List[str]]]:
    """Resolves names in parallel; ``None`` for a name if the name server does not answer."""
    addresses: Dict[str, Optional[List[str]]] = {}

    def resolve(name: str) -> None:
        addresses[name] = facts.resolve_name(name)

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return addresses


# --- connections and routes -------------------------------------------------------------------


def half_open_connections() -> List[List[Any]]:
    """Returns [port, peer] of connections of which only the peer's first packet arrived.

    If a peer that cannot connect is in this list, this node's packets do not reach it; otherwise
    its packets do not arrive here.
    """
    return [
        [int(fields[1].rsplit(":", 1)[1], 16), decode_address(fields[2].rsplit(":", 1)[0])]
        for fields in processes.tcp_sockets()
        if fields[3] == SYN_RECV
    ]


def decode_address(text: str) -> str:
    """Decodes an address of /proc/net/tcp: hexadecimal words in the machine's byte order."""
    groups = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", group) for group in groups)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def reject_routes() -> List[str]:
    """Returns IPv4 destinations that the routing table refuses (``ip route add unreachable …``)."""
    routes = [line.split() for line in processes.read_text("/proc/net/route").splitlines()[1:]]
    return [decode_address(route[1]) for route in routes if int(route[3], 16) & RTF_REJECT]


# --- bandwidth --------------------------------------------------------------------------------


def serve_sink(listener: socket.socket, key: bytes) -> None:
    """Discards what callers with the key send and answers its size (8 bytes), until closed."""
    listener.setblocking(True)
    unproven: Deque[socket.socket] = deque()  # oldest first
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        unproven.append(connection)
        if len(unproven) > MAX_UNPROVEN:
            with contextlib.suppress(OSError):
                unproven.popleft().shutdown(socket.SHUT_RDWR)
        arguments = (connection, key, unproven)
        threading.Thread(target=_receive_all, args=arguments, daemon=True).start()


def _receive_all(connection: socket.socket, key: bytes, unproven: Deque[socket.socket]) -> None:
    count = 0
    with connection, contextlib.suppress(OSError, ValueError):
        try:
            challenge.run(connection, challenge.listener_handshake(key))
        finally:
            with contextlib.suppress(ValueError):  # it has made room for others
                unproven.remove(connection)
        connection.settimeout(None)
        buffer = bytearray(BLOCK_BYTES)
        while received := connection.recv_into(buffer):
            count += received
        connection.sendall(struct.pack("!Q", count))


def send_to_sink(request: Message) -> Message:
    """Sends to a sink for ``seconds``; returns how much arrived, and in what time.

    Args:
        request: ``address``, ``port`` and ``key`` of the sink, ``seconds``, ``timeout_s``, and
            ``pace`` (bytes a second, 0 for as fast as it goes).

    Raises OSError if the sink does not know the key, or if less than a block arrives in time.
    """
    family = probe.family_of(request["address"])
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(request["timeout_s"])
        buffer = SEND_BUFFER // 8 if request.get("pace") else SEND_BUFFER
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        if request.get("pace"):
            bytes_per_s = min(int(request["pace"]), (1 << 32) - 1)
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", bytes_per_s))
        sock.connect((request["address"], request["port"]))
        _prove(sock, bytes.fromhex(request["key"]))
        sock.settimeout(request["timeout_s"])
        started_s = time.monotonic()
        try:
            _send_for(sock, started_s + request["seconds"])
            sock.shutdown(socket.SHUT_WR)
            arrived = struct.unpack("!Q", _receive_exactly(sock, 8))[0]
        except socket.timeout:  # if some of it did arrive, the link is only slow
            arrived = _count_acknowledged(sock)
            if arrived < BLOCK_BYTES:
                raise
        seconds = time.monotonic() - started_s
        return dict(tcp_info(sock), bytes=arrived, seconds=seconds)


def _prove(sock: socket.socket, key: bytes) -> None:
    try:
        challenge.run(sock, challenge.caller_handshake(key))
    except ValueError:
        raise OSError("something else answers there") from None


def _send_for(sock: socket.socket, deadline: float) -> None:
    block = bytes(BLOCK_BYTES)
    while time.monotonic() < deadline:
        sock.send(block)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise OSError("the receiver went away")
        data += chunk
    return data


def tcp_info(sock: socket.socket) -> Message:
    """Returns retransmitted and sent segments, path MTU and round trip in seconds."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    except (AttributeError, OSError):
        return {}
    info = {
        "pmtu": struct.unpack_from("=I", raw, 60)[0],
        "rtt": struct.unpack_from("=I", raw, 68)[0] / 1e6,
        "retransmitted": struct.unpack_from("=I", raw, 100)[0],
    }
    if len(raw) >= 140:
        info["segments"] = struct.unpack_from("=I", raw, 136)[0]
    return info


def _count_acknowledged(sock: socket.socket) -> int:
    """Returns the bytes that the peer's kernel has received."""
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    return int(struct.unpack_from("=Q", raw, 120)[0]) if len(raw) == 128 else 0


def interface_counters() -> Dict[str, List[int]]:
    """Returns bytes received and sent by interface."""
    names = [name for _, name in socket.if_nameindex()]
    return host_load.link_bytes(processes.read_text("/proc/self/net/dev"), names)


# --- folders ----------------------------------------------------------------------------------


def write_token(folder: str, name: str, content: str) -> Message:
    """Writes a file by rename, as checkpoints are; ``error`` would fail the whole request."""
    path, temporary = Path(folder) / name, Path(folder) / (name + ".new")
    step = "write"
    try:
        # in a folder of several users, one of them may have made a link of that name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(safe_paths.open_file(folder, temporary.name, flags), "w") as file:
            file.write(content)
        step = "rename"
        os.replace(str(temporary), str(path))
    except OSError as error:
        return {"ok": False, "step": step, "why": error.strerror, "errno": error.errno}
    return {"ok": True}


def read_tokens(folder: str, names: List[str]) -> Message:
    """Returns which of the other nodes' files are visible here, and the folder's file system."""
    os.listdir(folder) if os.path.isdir(folder) else []  # network file systems look again
    seen = {}
    for name in names:
        with contextlib.suppress(OSError):
            fd = safe_paths.open_file(folder, name, os.O_RDONLY)
            with os.fdopen(fd, "rb") as file:
                seen[name] = file.read(MAX_TOKEN_BYTES).decode(errors="replace")
    return {
        "exists": os.path.isdir(folder),
        "seen": seen,
        "type": stalls.find_mount("self", folder)[0],
    }


def remove_token(folder: str, name: str) -> Message:
    """Removes a file of :func:`write_token`."""
    for path in (Path(folder) / name, Path(folder) / (name + ".new")):
        with contextlib.suppress(OSError):
            path.unlink()
    return {}


def digest_tree(path: str) -> Message:
    """Hashes names and sizes below ``path`` and the content of some small files."""
    root = Path(path)
    if not root.exists():
        return {"exists": False}
    entries = sorted(_entries(root))
    digest = hashlib.sha256()
    interval = max(1, len(entries) // MAX_HASHED_FILES)
    for at, (name, size) in enumerate(entries):
        digest.update(("%s\0%d\n" % (name, size)).encode("utf-8", "surrogateescape"))
        if at % interval == 0 and size <= MAX_HASHED_BYTES:
            with contextlib.suppress(OSError):
                digest.update(snapshot.hash_file(root / name if name else root).encode())
    total = sum(size for _, size in entries)
    return {"exists": True, "files": len(entries), "bytes": total, "digest": digest.hexdigest()}


def _entries(root: Path) -> Iterator[Tuple[str, int]]:
    if root.is_file():
        yield "", root.stat().st_size
        return
    for folder, _, names in safe_paths.walk(str(root)):
        for name in names:
            file = root / folder / name
            with contextlib.suppress(OSError):
                yield file.relative_to(root).as_posix(), file.stat().st_size


# --- processes --------------------------------------------------------------------------------


def token_processes() -> List[Message]:
    """Returns visible processes of any Paceline job, and whether an agent owns them.

    ``owned`` is False if no ancestor of the process is an agent: its job's supervisor is gone.
    ``warm``: that agent has no job, and waits for one. ``age`` is in seconds.
    """
    stats = processes.all_stats()
    uptime = float(open("/proc/uptime").read().split()[0])
    reports = []
    for pid, stat in stats.items():
        run = _token_of(pid)
        if run is None or stat.state in "ZX":
            continue
        agent = _agent_of(stat, stats)
        reports.append({
            "pid": pid,
            "run": run,
            "owned": agent is not None,
            "warm": agent is not None and agent.name == warm.PROCESS_NAME,
            "age": max(0.0, uptime - stat.start / CLOCK_TICKS),
            "command": probe.command_line(pid)[:200],
        })  # fmt: skip
    return reports


def _token_of(pid: int) -> Optional[str]:
    """Returns the run id in a process's environment; ``None`` if it belongs to no job."""
    with contextlib.suppress(OSError):
        entries = Path("/proc/%d/environ" % pid).read_bytes().split(b"\0")
        variables = dict(entry.split(b"=", 1) for entry in reversed(entries) if b"=" in entry)
        if b"PACELINE_JOB_TOKEN" in variables:
            return variables.get(b"PACELINE_RUN_ID", b"").decode(errors="replace")
    return None


def _agent_of(stat: processes.Stat, stats: Dict[int, processes.Stat]) -> Optional[processes.Stat]:
    """Returns the ancestor that is an agent; ``None`` if there is none."""
    parent = stat.parent
    while parent > 1 and parent in stats:
        if "sys.stdin.buffer.raw.readline" in probe.command_line(parent):
            return stats[parent]
        parent = stats[parent].parent
    return None


# --- devices and packages -----------------------------------------------------------------------

GPU_FIELDS = (
    "index,name,driver_version,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
)


def query_nvidia_smi() -> Message:
    """Returns nvidia-smi's output, ``missing`` if there is none, or ``broken`` if it fails.

    A key ``error`` would make the whole request fail.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"missing": True}
    queries = ("--query-gpu=" + GPU_FIELDS, "--query-compute-apps=gpu_uuid,pid,used_memory")
    try:
        gpus, apps = (
            subprocess.run([tool, query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=NVIDIA_SMI_TIMEOUT_S)
            for query in queries
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"broken": "nvidia-smi did not answer within %g s" % NVIDIA_SMI_TIMEOUT_S}
    if gpus.returncode:
        return {"broken": gpus.stdout.decode(errors="replace").strip()}
    return {"gpus": gpus.stdout.decode(errors="replace"), "apps": apps.stdout.decode()}


def list_packages() -> Dict[str, str]:
    """Returns installed distributions and versions, from the names of their folders."""
    versions: Dict[str, str] = {}
    for folder in facts.searched_folders():
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                match = re.match(r"(.+)-([^-]+)\.dist-info$", name)
                if match:
                    versions.setdefault(match.group(1).lower().replace("_", "-"), match.group(2))
    return versions


MPI_FOLDERS = ("FI_PROVIDER_PATH", "I_MPI_ROOT", "CCL_ROOT")  # variables
SETVARS = ("/opt/intel/oneapi/setvars.sh", "~/intel/oneapi/setvars.sh")


def find_mpi() -> Message:
    """Returns the paths of MPI's launcher, oneAPI's script and libfabric; empty if missing."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders += ["/usr/lib/%s" % multiarch, "/usr/lib64", "/usr/lib", "/usr/local/lib"]
    fabrics = [os.path.join(folder, "libfabric.so.1") for folder in folders if folder]
    folders_set = {name: os.environ[name] for name in MPI_FOLDERS if os.environ.get(name)}
    launcher = shutil.which("mpiexec") or shutil.which("mpirun")
    return {
        "mpiexec": os.path.realpath(launcher) if launcher else "",
        "setvars": _first_file([os.path.expanduser(path) for path in SETVARS]),
        "libfabric": _first_file(fabrics),
        "missing_folders": {
            name: paths[:1000]
            for name, paths in folders_set.items()
            if not any(map(os.path.isdir, paths.split(os.pathsep)))
        },
    }


def _first_file(paths: List[str]) -> str:
    return next(filter(os.path.isfile, paths), "")


def run_command(request: Message) -> Message:
    """Runs ``argv`` with ``input``; returns exit status and the end of its merged output."""
    completed = subprocess.run(
        request["argv"],
        input=request.get("input", "").encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=request["timeout_s"],
    )
    return {
        "code": completed.returncode,
        "output": completed.stdout[-MAX_OUTPUT_BYTES:].decode(errors="replace"),
    }


# --- operations ---------------------------------------------------------------------------------


def _in_thread(work: Callable[[Message], Message]) -> Callable[[Agent, Message, bytes], None]:
    """Makes an operation that runs slow work in a thread and answers its result."""

    def operation(agent: Agent, request: Message, _: bytes) -> None:
        agent.in_thread(lambda: agent.reply(request, **work(request)), request)

    return operation


def listen(agent: Agent, request: Message, _: bytes) -> None:
    """Opens listeners on ``addresses``; answers ports and errors by address."""
    ports, errors = {}, {}
    for address in request["addresses"]:
        try:
            agent.listeners[address] = probe.listen(address)
            ports[address] = agent.listeners[address].getsockname()[1]
        except OSError as error:
            errors[address] = describe_error(error)
    agent.reply(request, ports=ports, errors=errors)


def stop_listening(agent: Agent, request: Message, _: bytes) -> None:
    for listener in agent.listeners.values():
        listener.close()
    agent.listeners = {}
    agent.reply(request)


def connect(request: Message) -> Message:
    """Tries ``targets`` at once (see :func:`probe.connect_all`)."""
    settle_s = request.get("settle_s", 0.25)
    return {"results": probe.connect_all(request["targets"], request["timeout_s"], settle_s)}


def stat_paths(request: Message) -> Message:
    """Answers what is at ``paths``: whether it exists, is a file, can be executed."""
    return {"paths": [
        {
            "path": path,
            "exists": os.path.exists(path),
            "file": os.path.isfile(path),
            "executable": os.access(path, os.X_OK),
        }
        for path in request["paths"]
    ]}  # fmt: skip


def which(request: Message) -> Message:
    """Answers where ``program`` is on this node's PATH, seen from ``workdir``; null if nowhere."""
    program = request["program"]
    if "/" not in program:
        return {"path": shutil.which(program, path=request.get("path"))}
    path = os.path.join(request["workdir"], program)
    return {"path": path if os.access(path, os.X_OK) else None}


def open_ports(agent: Agent, request: Message, _: bytes) -> None:
    """Opens listeners on ``ports`` of ``address``; answers the opened ports and others' holders."""
    address, opened, unavailable = request["address"], [], {}
    for port in request["ports"]:
        try:
            agent.listeners["%s %d" % (address, port)] = probe.listen(address, port)
            opened.append(port)
        except OSError as error:
            unavailable[str(port)] = {
                "error": error.strerror,
                "holders": probe.listening_processes(port),
            }
    agent.reply(request, opened=opened, taken=unavailable)


def open_sink(agent: Agent, request: Message, _: bytes) -> None:
    """Opens a sink on ``address``, for callers with ``key``, until the agent ends.

    Answers its port.
    """
    listener = probe.listen(request["address"])
    agent.sinks.append(listener)
    arguments = (listener, bytes.fromhex(request["key"]))
    threading.Thread(target=serve_sink, args=arguments, daemon=True).start()
    agent.reply(request, port=listener.getsockname()[1])


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "listen": listen,
    "stop_listening": stop_listening,
    "connect": _in_thread(connect),
    "look": _in_thread(stat_paths),
    "which": _in_thread(which),
    "disk": _in_thread(
        lambda request: {"disks": [facts.disk_facts(path) for path in request["paths"]]}
    ),
    "clock": lambda agent, request, _: agent.reply(request, **facts.clock_facts()),
    "resolve": _in_thread(lambda request: {"names": resolve_names(request["names"])}),
    "open_ports": open_ports,
    "half_open": lambda agent, request, _: agent.reply(
        request, peers=half_open_connections(), rejects=reject_routes()
    ),
    "sink": open_sink,
    "transfer": _in_thread(send_to_sink),
    "counters": lambda agent, request, _: agent.reply(request, bytes=interface_counters()),
    "leave_token": _in_thread(
        lambda request: write_token(request["folder"], request["file"], request["content"])
    ),
    "see_tokens": _in_thread(lambda request: read_tokens(request["folder"], request["names"])),
    "take_token": _in_thread(lambda request: remove_token(request["folder"], request["file"])),
    "digest_tree": _in_thread(lambda request: digest_tree(request["path"])),
    "token_processes": _in_thread(lambda request: {"processes": token_processes()}),
    "execute": _in_thread(run_command),
    "gpus": _in_thread(lambda request: query_nvidia_smi()),
    "vitals": lambda agent, request, _: agent.in_queue(
        "vitals",
        lambda: agent.reply(request, **host_load.read_counters(request["interfaces"])),
        request,
    ),
    "packages": _in_thread(lambda request: {"packages": list_packages()}),
    "mpi": _in_thread(lambda request: {"mpi": find_mpi()}),
}
