"""What is a failure, and which was the first: pure, over what all agents reported."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, Failure, Kind, signal_name

_FULL = re.compile(r"No space left on device|Disk quota exceeded|is too full|disk .{0,200}is full")
_MEMORY = "killed by the kernel for its memory"
SETTLE_S = 0.5  # how long to wait for an earlier failure that is still on its way
SETTLE_ECHO_S = 2.5  # the same while only echoes were heard


def failure_of(event: Event, lease_s: float) -> Failure | None:
    """What an agent's event means for the attempt; ``None`` when nothing failed by it.

    Args:
        event: With its time on the launcher's clock.
        lease_s: How long nodes go on without hearing of the launcher.
    """

    def failed(kind: Kind, headline: str, **more: Any) -> Failure:
        return Failure(kind, event.host, event.rank, event.time, headline=headline, **more)

    if event.kind == "exception":
        headline = f"{event['type']}: {event['message']}".strip().removesuffix(":")
        details = {name: event[name] for name in ("traceback", "origin", "code")}
        return failed("exception", headline, **details)
    if event.kind == "rank ended":
        code, signum = event["code"], event["signal"]
        if code == 0:
            return failed("early", "ended with status 0 while the others were still training",
                          code=0)  # fmt: skip
        headline = describe_end(code, signum, event["memory"], event["peak_bytes"])
        return failed("exit" if signum is None else "signal", headline, code=code, signal=signum)
    if event.kind == "stranger":
        return failed("stranger", f"connection with {event['address']}, which is none of this job's"
                                  " hosts: somebody pretends to be one of its ranks")  # fmt: skip
    if event.kind == "fork server died":
        return failed("forkserver", how_it_died(event))
    if event.kind == "asked to end":
        return failed("signal", "asked to end by SIGTERM, by the scheduler or somebody's kill",
                      signal=int(signal.SIGTERM))  # fmt: skip
    if event.kind == "leaving" and event["reason"] == "lease":
        return failed("lease", f"heard nothing of this launcher and ended its ranks "
                               f"(lease {lease_s:g} s)")  # fmt: skip
    if event.kind == "leaving" and event["reason"] == "guard":
        return failed("agent", f"{event['why']}; the agent ended its ranks")
    return None


def how_it_died(event: Event) -> str:
    """Of a fork server, in one line."""
    if event["frozen"]:
        return "the fork server stood still, stopped by a signal (SIGSTOP): it was ended"
    status = event["status"]
    if status >= 0:
        return f"the fork server ended: {describe_end(status, None)}"
    return f"the fork server was {describe_end(None, -status, event['memory'])}"


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
    return next((failure for failure in merged if not failure.is_secondary), merged[0])


def about_full_disk(failure: Failure) -> bool:
    """Whether it failed because a disk took no more."""
    return bool(_FULL.search(failure.headline) or _FULL.search(failure.traceback[-2000:]))


def for_its_memory(failure: Failure) -> bool:
    """Whether the kernel has killed it because there was no memory left for it."""
    return failure.headline.startswith(_MEMORY)


def settle_time(failures: Sequence[Failure]) -> float:
    """How long to wait for others before the first failure is named."""
    return SETTLE_ECHO_S if all(failure.is_secondary for failure in failures) else SETTLE_S


def describe_end(code: int | None, signum: int | None,
                 memory: Mapping[str, Any] | None = None, peak_bytes: int = 0) -> str:  # fmt: skip
    """How a process ended, in words.

    Args:
        code, signum: One of the two.
        memory: What the memory killer left (see ``agent.memory.evidence``), if that is known.
        peak_bytes: Most memory that the process had; 0 when not known.
    """
    if signum is None:
        return f"exit status {code}"
    name = f"killed by {signal_name(signum)}"
    if signum != signal.SIGKILL:
        return name
    if not memory:
        return f"{name} (the kernel's memory killer, or somebody's kill -9)"
    kills, kernel = memory.get("kills"), memory.get("kernel")
    if kills or (kills is None and kernel and not _of_others(kernel)):
        return f"{_MEMORY}{_memory_words(memory, peak_bytes)}"
    if kills == 0 and not kernel:  # the kernel's log tells of processes of others, too
        return f"{name} (somebody's kill -9: the kernel's memory killer did nothing here)"
    return f"{name} (the kernel's memory killer, or somebody's kill -9)"


def _of_others(kernel: Sequence[str]) -> bool:
    """Whether the kernel's log tells of nothing but groups that have limits of their own."""
    limited = any("Memory cgroup" in line or "CONSTRAINT_MEMCG" in line for line in kernel)
    host = any("Out of memory" in line or "CONSTRAINT_NONE" in line for line in kernel)
    return limited and not host


def _memory_words(memory: Mapping[str, Any], peak_bytes: int) -> str:
    """Which limit, and how much there was of it."""
    own = f" at {size_words(peak_bytes)}" if peak_bytes else ""
    limit = memory.get("limit")
    if not limit or not memory.get("kills"):
        return f"{own} (the host's memory was used up)" if not limit else own
    peak = f", peak {size_words(limit['peak'])}" if limit.get("peak") else ""
    return f"{own} (limit {size_words(limit['bytes'])}{peak}, control group {limit['group']})"


def size_words(count: int) -> str:
    """``512 MiB``, ``1.5 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def early_end(failures: Sequence[Failure], early: Sequence[Failure]) -> list[Failure]:
    """The failures, and what they echo where that is a rank that ended in order, but too early.

    Args:
        failures: As reported.
        early: Ranks that had ended with status 0 while others were still training.
    """
    merged = merge(failures)
    if early and all(failure.is_secondary and failure.origin is None for failure in merged):
        before = min((failure.time for failure in failures), default=0.0)
        # the others may notice it before it is really over
        return [*(replace(one, time=min(one.time, before)) for one in early
                  if one.time <= before + SETTLE_S), *failures]  # fmt: skip
    return list(failures)


def own_absence(failures: Sequence[Failure], away_s: float, lease_s: float) -> list[Failure]:
    """The same failures; nodes that ended their ranks while we were away are not at fault.

    Args:
        failures: As reported.
        away_s: The longest time in which this launcher did not run; 0 when it always did.
        lease_s: How long nodes go on without us.
    """
    expired = [failure.time for failure in failures if failure.kind == "lease"]
    if not expired or away_s < lease_s / 2:
        return list(failures)
    headline = f"{own_pause(away_s, lease_s)}; the nodes ended their ranks"
    us = Failure("launcher", LAUNCHER_HOST, None, min(expired), headline=headline)
    return [us, *(failure for failure in failures if failure.time < us.time)]


def own_line(
    failures: Sequence[Failure], silent_s: Mapping[str, float], lease_s: float
) -> list[Failure]:
    """The same failures; hosts that all fell silent together are not at fault each for itself.

    Args:
        failures: As known.
        silent_s: By host, how long those were silent that were given up while nobody was heard.
        lease_s: How long nodes go on without us.
    """
    lost = [failure for failure in failures if failure.host in silent_s and failure.kind == "lost"]
    if not lost:
        return list(failures)
    headline = own_silence(max(silent_s.values()), lease_s)
    first = min(failure.time for failure in lost)
    us = Failure("launcher", LAUNCHER_HOST, None, first, headline=headline)
    return [us, *(failure for failure in failures if failure not in lost)]


def own_silence(silent_s: float, lease_s: float) -> str:
    """What is said when none of the hosts was heard for so long that they left."""
    heard = f"this launcher heard none of its hosts for {silent_s:.1f} s"
    return (f"{heard} (its own line, or all of them at once), and nodes end their ranks before the "
            f"lease of {lease_s:g} s is over")  # fmt: skip


def own_pause(away_s: float, lease_s: float) -> str:
    """What is said of a launcher that was away for so long that its nodes left."""
    if away_s > lease_s:
        than = f"longer than the lease of {lease_s:g} s"
    else:
        than = f"and nodes begin to end their ranks before the lease of {lease_s:g} s is over"
    return f"this launcher was stopped for {away_s:.0f} s, {than}"
