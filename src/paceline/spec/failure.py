"""How a job ends: its first failure and its result, from the launcher or from ``result.json``."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.spec.errors import SettingError
from paceline.spec.formatting import format_size
from paceline.spec.schema import (
    MAX_LONG_TEXT,
    RANK,
    Schema,
    choice,
    integer,
    matches,
    optional,
    text,
)

# "agent": it left by itself; "lease": it lost the launcher; "launcher": that was away; "early": a
# rank ended normally while others needed it; "hang": no progress; "record": the run directory
# cannot be written; "forkserver": it died, with its ranks; "stranger": a foreign process connected;
# "replicas": ranks began with different models
Kind = Literal["exception", "exit", "signal", "lost", "forkserver", "record", "agent", "lease",
               "launcher", "early", "hang", "stranger", "replicas"]  # fmt: skip
LAUNCHER_HOST = "this machine"
# Raised by a newcomer that does more than the other ranks did before their first batch
NEWCOMER_MISMATCH = "this process started differently from the ranks that it joins"
# and by one that has joined, if its loop depends on a count that only the others have
NEWCOMER_DIVERGED = "this process trains differently from the ranks that it joined"
# Of a rank that was ended because it did not leave a group in which another one was lost
UNFREED = "hung while a communicator was made, which NCCL does not interrupt"
OUT_OF_MEMORY = "killed by the kernel for its memory"
UNKNOWN = -1  # exit code of a run that left no result

# Errors of a healthy rank whose peer failed: the peer's failure is the cause.
CONNECTIONS_CUT = "its connections were cut"  # by Paceline itself, see train/elastic/waits.py
_LOST = r"Connection (?:closed|reset) by peer|Broken pipe|connectFullMesh|Socket Timeout"
_LOST += f"|{CONNECTIONS_CUT}|received errors while waiting for send/recv from rank"
# gloo's messages for a peer that does not answer; without its prefix, another socket may be meant
_PEER = r"\[[\w.:%]{1,80}\]:\d{1,5}(?:\$\d{1,9})?"
_NO_ANSWER = (
    "(?:Connection timed out|No route to host|(?:Network|Host) is unreachable"
    "|(?:Network|Host) is down)"
)
_ABORTED = (  # on this host: an administrator's ss -K, or a tunnel or firewall that restarts
    "(?:Software caused connection abort|Network dropped connection on reset"
    "|Transport endpoint is not connected|No buffer space available)"
)
_UNREACHABLE = rf"(?:Read error|writev) {_PEER}: {_NO_ANSWER}|SO_ERROR: {_NO_ANSWER}, remote="
_UNREACHABLE += rf"|Connect timeout {_PEER}"
_LOST += rf"|{_UNREACHABLE}|(?:Read error|writev) {_PEER}: {_ABORTED}|SO_ERROR: {_ABORTED}, remote="
_TIMEOUT = r"Timed out waiting \d+ms|Watchdog caught collective|Application timeout"
_TIMEOUT += r"|retrieving ncclUniqueId from .{0,200} got error: (?:wait timeout|Socket Timeout)"
_NETWORK = (
    r"Socket closed|recvValue failed|remote process exited|Connection refused|DistNetworkError"
    r"|failed to recv|Timed out waiting|NCCL.{0,300}(?:abort|remote)"
)
COLLECTIVE_TIMEOUT = re.compile(_TIMEOUT)  # a rank did not come to a collective
PEER_LOST = re.compile(rf"{_LOST}|{_TIMEOUT}|ncclSystemError|ncclRemoteError")  # while it trained
SECONDARY_ERROR = re.compile(f"{_LOST}|{_TIMEOUT}|{_NETWORK}", re.IGNORECASE)  # at any time
# while a rank takes a batch from its DataLoader worker, which has ended
WORKER_GONE = re.compile(
    r"multiprocessing/resource_sharer\.py.*(?:Connection(?:Reset|Refused)|FileNotFound|EOF)Error",
    re.DOTALL,
)
# torch's message for an exception of another process or thread
_CAUGHT = re.compile(
    r"(?:[\w.]{1,100}: )?Caught (?P<type>[\w.]{1,100}) (?P<place>in [^\n]{1,80})\.\n"
    "Original Traceback "
)
_PEER_ADDRESS = re.compile(
    rf"(?:{_UNREACHABLE}).{{0,100}}|trying to connect to \([^,()\s]{{1,80}}, \d{{1,5}}\)"
)
_ADDRESS = re.compile(r"\[([\w.:%]{1,80})\]:\d|\(([^,()\s]{1,80}), \d")


def unreachable_peer(error: str) -> str:
    """The address of the peer that did not answer; empty for another kind of error.

    A closed connection does not count: a rank that leaves its group closes all of its connections.
    """
    match = _PEER_ADDRESS.search(error)
    address = _ADDRESS.search(match[0]) if match else None
    return (address[1] or address[2]) if address else ""


def format_location(host: str, rank: int | None) -> str:
    """``rank 1 on n2``, or the part of it that is known."""
    if rank is None:
        return host or "the job"
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(code: int | None, signum: int | None,
                 memory: Mapping[str, Any] | None = None, peak_bytes: int = 0) -> str:  # fmt: skip
    """Describes how a process ended.

    Args:
        code, signum: Exit status or signal; the other is ``None``.
        memory: Evidence of the OOM killer (see ``agent.supervision.oom.evidence``), if known.
        peak_bytes: Peak memory of the process; 0 when not known.
    """
    if signum is None:
        return f"exit status {code}"
    name = f"killed by {signal_name(signum)}"
    if signum != signal.SIGKILL:
        return name
    if not memory:
        return f"{name} (the kernel's OOM killer, or kill -9)"
    if is_oom_kill(memory):
        return f"{OUT_OF_MEMORY}{_describe_memory(memory, peak_bytes)}"
    if memory.get("kills") == 0 and not memory.get("kernel"):  # its log also has others' processes
        return f"{name} (somebody's kill -9: the kernel's OOM killer did nothing here)"
    return f"{name} (the kernel's OOM killer, or kill -9)"


def is_oom_kill(memory: Mapping[str, Any]) -> bool:
    """Whether the evidence shows that the kernel killed the process for its memory."""
    kills, kernel = memory.get("kills"), memory.get("kernel")
    return bool(kills or (kills is None and kernel and not _is_only_cgroup_kill(kernel)))


def _is_only_cgroup_kill(kernel: Sequence[str]) -> bool:
    """Whether the kernel's log shows only kills of other, limited control groups."""
    limited = any("Memory cgroup" in line or "CONSTRAINT_MEMCG" in line for line in kernel)
    host = any("Out of memory" in line or "CONSTRAINT_NONE" in line for line in kernel)
    return limited and not host


def _describe_memory(memory: Mapping[str, Any], peak_bytes: int) -> str:
    """Describes the process's memory and the limit it exceeded."""
    size = f" at {format_size(peak_bytes)}" if peak_bytes else ""
    limit = memory.get("limit")
    if not limit or not memory.get("kills"):
        return f"{size} (the host's memory was used up)" if not limit else size
    peak = f", peak {format_size(limit['peak'])}" if limit.get("peak") else ""
    return f"{size} (limit {format_size(limit['bytes'])}{peak}, control group {limit['group']})"


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank or a node by a failure.

    Attributes:
        host: Host name; empty if unknown.
        rank: Rank; ``None`` for the whole node.
        time: Seconds of the launcher's monotonic clock, corrected for the node's; 0 from a file.
        code: Exit status, if it exited.
        signal: Number of the signal that ended it, if any.
        headline: The exception's last line, or what happened.
        traceback: Traceback of the exception, if any.
        origin: The rank with the cause, if every rank raises the same exception.
    """

    kind: Kind
    host: str
    rank: int | None
    time: float = 0.0
    code: int | None = None
    signal: int | None = None
    headline: str = ""
    traceback: str = ""
    origin: int | None = None

    @property
    def is_secondary(self) -> bool:
        """Whether it looks like the consequence of another rank's failure."""
        if self.origin is not None:
            return self.origin != self.rank
        if self.kind not in ("exception", "exit") or WORKER_GONE.search(self.traceback):
            return False
        return bool(SECONDARY_ERROR.search(self.headline))

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM ended it, as when a scheduler cancels a job."""
        return self.signal == signal.SIGTERM

    @property
    def is_refusal(self) -> bool:
        """Whether Paceline refused a setting in a rank: the same command would fail again."""
        return self.kind == "exception" and self.headline.startswith(SettingError.__name__)

    @property
    def where(self) -> str:
        """``rank 1 on n2``."""
        return format_location(self.host, self.rank)

    def describe(self) -> str:
        """``rank 1 on n2: ValueError: boom``."""
        headline = _shorten_caught(self.headline)
        return headline if self.kind == "launcher" else f"{self.where}: {headline}"

    @property
    def status(self) -> int:
        """The exit status a shell would give: 128 + n for a signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code else 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FAILURE}

    @classmethod
    def from_json(cls, record: Any) -> Failure | None:
        """Reads the valid fields of a record in ``result.json``; ``None`` without a kind."""
        valid = _valid_fields(_FAILURE, record)
        return cls(**{"host": "", "rank": None, **valid}) if "kind" in valid else None


def _shorten_caught(headline: str) -> str:
    """Returns an exception of a data worker without its traceback, others unchanged."""
    caught = _CAUGHT.match(headline)
    if caught is None:
        return headline
    last_line = rf"^(?:\w{{1,100}}\.){{0,20}}{re.escape(caught['type'])}(?::.*)?$"
    lines = re.findall(last_line, headline, re.MULTILINE)
    return f"{lines[-1]} ({caught['place']})" if lines else headline.partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Recovery:
    """An in-place recovery: the other ranks continued after a loss.

    Attributes:
        ranks: The lost ranks: ``rank 1 on n2``.
        reason: How they were lost.
        seconds: Time from the loss to the new group.
    """

    ranks: tuple[str, ...]
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended.

    Attributes:
        exit_code: 0, the first failing rank's status, or 128 + n after signal n; ``UNKNOWN`` for a
            run that left no result.
        interrupted: Number of the signal that the user sent, if any.
        num_other_failures: Ranks and nodes that failed after the first.
        error: Why it was not started: message, what was found and a remedy as one text.
        recoveries: Losses that did not end the job.
    """

    exit_code: int = UNKNOWN
    failure: Failure | None = None
    interrupted: int | None = None
    num_other_failures: int = 0
    error: str = ""
    recoveries: tuple[Recovery, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the content of ``result.json``."""
        if self.error:
            return {"error": self.error}
        failure = self.failure.to_json() if self.failure else None
        recoveries = {
            "count": len(self.recoveries),
            "seconds": round(sum(recovery.seconds for recovery in self.recoveries), 3),
            "of": [{"who": [*recovery.ranks], "why": recovery.reason, "seconds": recovery.seconds}
                   for recovery in self.recoveries],
        }  # fmt: skip
        record = {"first_failure": failure, "interrupted": self.interrupted}
        return record | ({"recoveries": recoveries} if self.recoveries else {})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Result:
        """Reads the valid fields of ``result.json``."""
        valid = _valid_fields(_RESULT, record)
        failure = Failure.from_json(record.get("first_failure"))
        return cls(valid.get("exit_code", UNKNOWN), failure, valid.get("interrupted"),
                   error=valid.get("error", ""))  # fmt: skip


_SIGNAL = optional(integer(1, 128))
_FAILURE: dict[str, Schema] = {
    "kind": choice(*get_args(Kind)),
    "host": text(255),
    "rank": optional(RANK),
    "code": optional(integer()),
    "signal": _SIGNAL,
    "headline": text(MAX_LONG_TEXT),
    "traceback": text(MAX_LONG_TEXT),
}
_RESULT: dict[str, Schema] = {
    "exit_code": integer(),
    "interrupted": _SIGNAL,
    "error": text(MAX_LONG_TEXT),
}


def _valid_fields(schemas: Mapping[str, Schema], record: Any) -> dict[str, Any]:
    """The fields of a record that match their schema: the file may come from anybody."""
    if not isinstance(record, dict):
        return {}
    return {name: record[name] for name, schema in schemas.items()
            if name in record and matches(schema, record[name])}  # fmt: skip
