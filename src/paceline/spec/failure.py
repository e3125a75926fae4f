"""How a job ends: its first failure and its result, the same values from launcher to explanation.

The launcher decides what failed first, writes the result to ``result.json`` and hands it over to
whoever explains it; ``status`` and ``explain`` make the same values of an older run's file.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.spec.shapes import LONG_TEXT, RANK, Shape, fits, maybe, one_of, text, whole

# "agent": it left by itself; "lease": because it heard nothing of the launcher; "launcher": which
# was away; "early": a rank that ended in order while others needed it; "hang": nothing went on;
# "record": the run directory takes no more; "forkserver": it died, and the ranks with it;
# "stranger": somebody on the network pretends to be a rank
Kind = Literal["exception", "exit", "signal", "lost", "forkserver", "record", "agent", "lease",
               "launcher", "early", "hang", "stranger"]  # fmt: skip
HERE = "this machine"
# So says a process that joins others and does more than they did before their first batch
UNLIKE = "this process began in another way than the ranks that it comes to"
# and one that has joined, and whose loop goes by what only the others have counted
ASTRAY = "this process trains otherwise than the ranks that it has come to"
UNKNOWN = -1  # exit code of a run that left no result

# What a healthy rank says when another one has gone: the other's failure is the cause. Each way of
# saying it stands here once.
GIVEN_UP = "its connections were cut"  # a wait of ours, see train/waits.py
_GONE = r"Connection (?:closed|reset) by peer|Broken pipe|connectFullMesh|Socket Timeout"
_GONE += f"|{GIVEN_UP}"
# gloo, of a line that is silent. Only with its own words before: a program's own sockets say the
# rest, too.
_PEER = r"\[[\w.:%]{1,80}\]:\d{1,5}(?:\$\d{1,9})?"
_SILENCE = (
    "(?:Connection timed out|No route to host|(?:Network|Host) is unreachable"
    "|(?:Network|Host) is down)"
)
_ENDED = (  # by this host itself: an administrator's ss -K, a tunnel or a firewall that restarts
    "(?:Software caused connection abort|Network dropped connection on reset"
    "|Transport endpoint is not connected|No buffer space available)"
)
_SILENT = rf"(?:Read error|writev) {_PEER}: {_SILENCE}|SO_ERROR: {_SILENCE}, remote="
_SILENT += rf"|Connect timeout {_PEER}"
_GONE += rf"|{_SILENT}|(?:Read error|writev) {_PEER}: {_ENDED}|SO_ERROR: {_ENDED}, remote="
_IN_VAIN = r"Timed out waiting \d+ms|Watchdog caught collective|Application timeout"
_NETWORK = (
    r"Socket closed|recvValue failed|remote process exited|Connection refused|DistNetworkError"
    r"|failed to recv|Timed out waiting|NCCL.{0,300}(?:abort|remote)"
)
WAITED = re.compile(_IN_VAIN)  # for a rank that did not come to a collective
PEER_GONE = re.compile(rf"{_GONE}|{_IN_VAIN}|ncclSystemError|ncclRemoteError")  # while it trained
ECHO = re.compile(f"{_GONE}|{_IN_VAIN}|{_NETWORK}", re.IGNORECASE)  # at any time
_OTHER_END = re.compile(
    rf"(?:{_SILENT}).{{0,100}}|trying to connect to \([^,()\s]{{1,80}}, \d{{1,5}}\)"
)
_ADDRESS = re.compile(r"\[([\w.:%]{1,80})\]:\d|\(([^,()\s]{1,80}), \d")


def silent_peer(said: str) -> str:
    """The address of whom a rank could not hear; empty where its error is not of that kind.

    A connection that was closed says nothing of the line: whoever leaves a group closes all.
    """
    about = _OTHER_END.search(said)
    address = _ADDRESS.search(about[0]) if about else None
    return (address[1] or address[2]) if address else ""


def place(host: str, rank: int | None) -> str:
    """``rank 1 on n2``, as far as it is known."""
    if rank is None:
        return host or "the job"
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that ended a rank or a node.

    Attributes:
        kind: How it showed.
        host: Where; empty when not known.
        rank: Which rank; ``None`` when the whole node is meant.
        time: Seconds of the launcher's monotonic clock, already corrected for the node's; 0 for
            that of an older run.
        code: Exit status, if it exited.
        signal: Number of the signal, if one ended it.
        headline: One line: the exception's, or what happened.
        traceback: Of the exception, if there was one.
        origin: The rank that met it, where every rank raises what one of them met.
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
    def echo(self) -> bool:
        """True when this looks like the consequence of somebody else's failure."""
        if self.origin is not None:
            return self.origin != self.rank
        return self.kind in ("exception", "exit") and bool(ECHO.search(self.headline))

    @property
    def wished(self) -> bool:
        """True when somebody asked for it: a scheduler that cancels a job tells every process."""
        return self.signal == signal.SIGTERM

    @property
    def where(self) -> str:
        """``rank 1 on n2``."""
        return place(self.host, self.rank)

    def describe(self) -> str:
        """``rank 1 on n2: ValueError: boom``."""
        return self.headline if self.kind == "launcher" else f"{self.where}: {self.headline}"

    @property
    def status(self) -> int:
        """The exit status a shell would give: 128 + n for a signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code else 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FAILURE}

    @classmethod
    def from_json(cls, said: Any) -> Failure | None:
        """What ``result.json`` says, if that can be believed; ``None`` when it says nothing."""
        known = _fitting(_FAILURE, said)
        return cls(**{"host": "", "rank": None, **known}) if "kind" in known else None


@dataclass(frozen=True, slots=True)
class Recovery:
    """A loss that the other ranks went on after, in place.

    Attributes:
        who: The lost ranks: ``rank 1 on n2``.
        why: How they were lost.
        seconds: From the loss until all others had a new group.
    """

    who: tuple[str, ...]
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended.

    Attributes:
        exit_code: 0, the first failing rank's status, or 128 + n after signal n; ``UNKNOWN`` for a
            run that left no result.
        failure: The first failure, if any.
        interrupted: Number of the signal that the user sent, if any.
        others: Ranks and nodes that failed after the first.
        error: Why it was not started: message, what was found and a remedy as one text.
        recoveries: What was lost on the way without ending the job.
    """

    exit_code: int = UNKNOWN
    failure: Failure | None = None
    interrupted: int | None = None
    others: int = 0
    error: str = ""
    recoveries: tuple[Recovery, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``result.json``."""
        if self.error:
            return {"error": self.error}
        failure = self.failure.to_json() if self.failure else None
        recoveries = {
            "count": len(self.recoveries),
            "seconds": round(sum(one.seconds for one in self.recoveries), 3),
            "of": [{"who": [*one.who], "why": one.why, "seconds": one.seconds}
                   for one in self.recoveries],
        }  # fmt: skip
        about = {"first_failure": failure, "interrupted": self.interrupted}
        return about | ({"recoveries": recoveries} if self.recoveries else {})

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Result:
        """What ``result.json`` says, as far as it can be believed."""
        known = _fitting(_RESULT, said)
        failure = Failure.from_json(said.get("first_failure"))
        return cls(known.get("exit_code", UNKNOWN), failure, known.get("interrupted"),
                   error=known.get("error", ""))  # fmt: skip


_SIGNAL = maybe(whole(1, 128))
_FAILURE: dict[str, Shape] = {
    "kind": one_of(*get_args(Kind)),
    "host": text(255),
    "rank": maybe(RANK),
    "code": maybe(whole()),
    "signal": _SIGNAL,
    "headline": text(LONG_TEXT),
    "traceback": text(LONG_TEXT),
}
_RESULT: dict[str, Shape] = {
    "exit_code": whole(),
    "interrupted": _SIGNAL,
    "error": text(LONG_TEXT),
}


def _fitting(shapes: Mapping[str, Shape], said: Any) -> dict[str, Any]:
    """The fields that are what they should be: a file of a run may come from anybody."""
    if not isinstance(said, dict):
        return {}
    return {name: said[name] for name in shapes if name in said and fits(shapes[name], said[name])}
