"""Which failure was the first: pure, over what all agents reported."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["exception", "exit", "signal", "lost", "forkserver", "record"]

# What a healthy rank says when another one has gone. Such a failure is the first one only if
# there is no other.
_ECHO = re.compile(
    r"Connection (closed|reset) by peer|connectFullMesh|Broken pipe|Socket closed|"
    r"recvValue failed|remote process exited|Connection refused|Application timeout|"
    r"Timed out waiting|DistNetworkError|failed to recv|Socket Timeout|NCCL.*(abort|remote)",
    re.IGNORECASE,
)
SETTLE_S = 0.5  # how long to wait for an earlier failure that is still on its way
SETTLE_ECHO_S = 2.5  # the same while only echoes were heard


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that ended a rank or a node.

    Attributes:
        kind: How it showed.
        host: Where.
        rank: Which rank; ``None`` when the whole node is meant.
        time: Seconds of the launcher's monotonic clock, already corrected for the node's.
        code: Exit status, if it exited.
        signal: Number of the signal, if one ended it.
        headline: One line: the exception's, or what happened.
        traceback: Of the exception, if there was one.
    """

    kind: Kind
    host: str
    rank: int | None
    time: float
    code: int | None = None
    signal: int | None = None
    headline: str = ""
    traceback: str = ""

    @property
    def echo(self) -> bool:
        """True when this looks like the consequence of somebody else's failure."""
        return self.kind in ("exception", "exit") and bool(_ECHO.search(self.headline))

    @property
    def wished(self) -> bool:
        """True when somebody asked for it: a scheduler that cancels a job tells every process."""
        return self.signal == signal.SIGTERM

    def describe(self) -> str:
        """``rank 1 on n2: ValueError: boom``."""
        who = self.host if self.rank is None else f"rank {self.rank} on {self.host}"
        return f"{who}: {self.headline}"

    @property
    def status(self) -> int:
        """The exit status a shell would give: 128 + n for a signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code if self.code else 1


def merge(failures: Sequence[Failure]) -> list[Failure]:
    """One failure a rank: an exception and the exit that follows it are the same failure."""
    by_rank: dict[tuple[str, int | None], Failure] = {}
    for failure in sorted(failures, key=lambda f: f.time):
        key = (failure.host, failure.rank)
        known = by_rank.get(key)
        if known is None:
            by_rank[key] = failure
        elif known.kind == "exception" and known.code is None:
            # a signal that follows is ours: the rank was still on its way out when it was stopped
            by_rank[key] = replace(known, code=failure.code)
    return sorted(by_rank.values(), key=lambda f: f.time)


def first(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not an echo."""
    merged = merge(failures)
    return next((failure for failure in merged if not failure.echo), merged[0])


def settle_time(failures: Sequence[Failure]) -> float:
    """How long to wait for others before the first failure is named."""
    return SETTLE_ECHO_S if all(failure.echo for failure in failures) else SETTLE_S


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_end(code: int | None, signum: int | None) -> str:
    """How a process ended, in words."""
    if signum is not None:
        hint = " (the kernel's memory killer, or somebody's kill -9)" if signum == 9 else ""
        return f"killed by {signal_name(signum)}{hint}"
    return f"exit status {code}"
