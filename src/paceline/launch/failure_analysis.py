"""Decides which events are failures, and which failure came first. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, OUT_OF_MEMORY, Failure, Kind, describe_end

_DISK_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|is too full|disk .{0,200}is full"
    r"|PytorchStreamWriter failed writing|\] \. unexpected pos \d+ vs \d+"  # torch.save
)
_LOST_PEER = re.compile(r"[Cc]onnection|gloo|[Ss]ocket|[Bb]roken pipe|NCCL|[Pp]rocess group")
ASKED_TO_END = "asked to end by SIGTERM, by the scheduler or somebody's kill"
FAILURE_DELAY_S = 0.5  # to wait for reports of earlier failures
ECHO_DELAY_S = 2.5  # the same while all known failures are secondary


def failure_of(event: Event, lease_s: float) -> Failure | None:
    """Returns the failure that an event, with the launcher's time, reports; else ``None``."""

    def failed(kind: Kind, headline: str, **details: Any) -> Failure:
        return Failure(kind, event.host, event.rank, event.time, headline=headline, **details)

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
        headline = f"connection with {event['address']}, which is not one of this job's hosts"
        return failed("stranger", f"{headline} or belongs to another user: somebody pretends to be"
                                  " one of its ranks")  # fmt: skip
    if event.kind == "fork server died":
        return failed("forkserver", describe_fork_server_end(event))
    if event.kind == "asked to end":
        return failed("signal", ASKED_TO_END, signal=int(signal.SIGTERM))
    if event.kind == "leaving" and event["reason"] == "lease":
        return failed("lease", f"heard nothing of this launcher and ended its ranks "
                               f"(lease {lease_s:g} s)")  # fmt: skip
    if event.kind == "leaving" and event["reason"] == "guard":
        return failed("agent", f"{event['why']}; the agent ended its ranks")
    return None


def is_failed_save(event: Event) -> bool:
    """Whether an exception of a rank that the user stops is more than the end of its peers."""
    is_stop = event["type"].rpartition(".")[2] in ("Stopped", "KeyboardInterrupt")
    return not is_stop and _LOST_PEER.search(event["message"]) is None


def describe_fork_server_end(event: Event) -> str:
    """Describes in one line how a fork server ended."""
    if event["frozen"]:
        return "the fork server stood still, stopped by a signal (SIGSTOP): it was ended"
    status = event["status"]
    if status >= 0:
        return f"the fork server ended: {describe_end(status, None)}"
    return f"the fork server was {describe_end(None, -status, event['memory'])}"


def merge(failures: Sequence[Failure]) -> list[Failure]:
    """Returns one failure per rank: an exception and the exit after it are one failure."""
    by_rank: dict[tuple[str, int | None], Failure] = {}
    for failure in sorted(failures, key=lambda f: f.time):
        key = (failure.host, failure.rank)
        earlier = by_rank.get(key)
        if earlier is None:
            by_rank[key] = failure
        elif earlier.kind == "exception" and earlier.code is None:
            # a signal after it is ours: the rank was still exiting when it was stopped
            by_rank[key] = replace(earlier, code=failure.code)
    return sorted(by_rank.values(), key=lambda f: f.time)


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Returns the root failure: the earliest that is not secondary."""
    merged = merge(failures)
    return next((failure for failure in merged if not failure.is_secondary), merged[0])


def is_full_disk(failure: Failure) -> bool:
    """Whether it failed because a disk was full."""
    return bool(_DISK_FULL.search(failure.headline) or _DISK_FULL.search(failure.traceback[-2000:]))


def is_out_of_memory(failure: Failure) -> bool:
    """Whether the kernel killed it for lack of memory."""
    return failure.headline.startswith(OUT_OF_MEMORY)


def are_secondary(failures: Sequence[Failure]) -> bool:
    """Whether all failures look like consequences of another one, which is not known yet."""
    return all(failure.is_secondary for failure in merge(failures))


def settling_delay_s(failures: Sequence[Failure]) -> float:
    """Returns how long to wait for other failures before the first is named."""
    return ECHO_DELAY_S if are_secondary(failures) else FAILURE_DELAY_S


def attribute_early_end(failures: Sequence[Failure], early: Sequence[Failure]) -> list[Failure]:
    """Adds ranks that ended early with status 0 if all failures merely follow from them."""
    merged = merge(failures)
    if early and all(failure.is_secondary and failure.origin is None for failure in merged):
        earliest = min((failure.time for failure in failures), default=0.0)
        # the others may notice before the process has ended
        return [*(replace(end, time=min(end.time, earliest)) for end in early
                  if end.time <= earliest + FAILURE_DELAY_S), *failures]  # fmt: skip
    return list(failures)


def attribute_launcher_pause(failures: Sequence[Failure], pause_s: float,
                             lease_s: float) -> list[Failure]:  # fmt: skip
    """Attributes expired leases to this launcher if it did not run for ``pause_s`` meanwhile."""
    expired = [failure.time for failure in failures if failure.kind == "lease"]
    if not expired or pause_s < lease_s / 2:
        return list(failures)
    headline = f"{describe_launcher_pause(pause_s, lease_s)}; the nodes ended their ranks"
    own_failure = Failure("launcher", LAUNCHER_HOST, None, min(expired), headline=headline)
    return [own_failure, *(failure for failure in failures if failure.time < own_failure.time)]


def attribute_network_loss(
    failures: Sequence[Failure], unreachable_s: Mapping[str, float], lease_s: float
) -> list[Failure]:
    """Attributes the loss of hosts that all became unreachable together to this launcher.

    ``unreachable_s`` is for how long each of them was silent while no host was heard.
    """
    lost = [f for f in failures if f.host in unreachable_s and f.kind == "lost"]
    if not lost:
        return list(failures)
    headline = describe_network_loss(max(unreachable_s.values()), lease_s)
    first = min(failure.time for failure in lost)
    own_failure = Failure("launcher", LAUNCHER_HOST, None, first, headline=headline)
    return [own_failure, *(failure for failure in failures if failure not in lost)]


def describe_network_loss(unreachable_s: float, lease_s: float) -> str:
    """Says that no host was heard for so long that all of them ended their ranks."""
    subject = f"this launcher heard none of its hosts for {unreachable_s:.1f} s"
    return (f"{subject} (its own link, or those of all hosts at once), and nodes end their ranks"
            f" before the lease of {lease_s:g} s is over")  # fmt: skip


def describe_launcher_pause(pause_s: float, lease_s: float) -> str:
    """Says that this launcher was stopped for so long that its nodes ended their ranks."""
    if pause_s > lease_s:
        comparison = f"longer than the lease of {lease_s:g} s"
    else:
        comparison = f"and nodes begin to end their ranks before the lease of {lease_s:g} s is over"
    return f"this launcher was stopped for {pause_s:.0f} s, {comparison}"
