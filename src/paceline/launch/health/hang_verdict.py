"""Decides from snapshots of all ranks whether they hang, and what holds which rank up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.explain.stacks import (
    RankStack,
    comparable_call,
    describe_frame,
    describe_position,
    first_difference,
    is_regrouping,
    is_waiting,
    parse_call,
    parse_frames,
)
from paceline.explain.units import Frame
from paceline.spec.failure import format_location

BUSY_TIMEOUT_S = 60.0  # before a rank is reported that works while others wait for it
MIN_CPU_SHARE = 0.05  # of one CPU; a rank that uses more is working
MIN_IO_BYTES_PER_S = 16 * 1024  # a rank that reads or writes more is working
MIN_SENT_BYTES_PER_S = 2 * 1024  # a waiting rank that sends more is on a slow network, no hang
MAX_SWITCHES_PER_S = 2.0  # a rank that waits for one thing makes none, one that polls many
_LOADER = "/torch/utils/data/"
_FETCHES = f"{_LOADER}dataloader.py"
_IDLE_FILES = ("/multiprocessing/queues.py", "/multiprocessing/connection.py")
_MULTIPROCESSING = "/multiprocessing/"
_EXCHANGE = "/paceline/train/reduce/"  # over sockets that torch's recorder does not know

# "frozen": a signal or a disk holds it; "still": it waits for something else; "busy": it works;
# "ended": it has left; "last": it alone has not, and is stuck; "apart": ranks wait in different
# collectives; "deaf": in the same one; "children": only processes that ranks started do
Kind = Literal["frozen", "still", "busy", "ended", "last", "apart", "deaf", "children"]


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """The system call in which the main thread of a process waits; empty if unknown.

    Attributes:
        call: Its name.
        on: The file that it concerns.
        readers: The job's processes that could read from the pipe that it writes to.
    """

    call: str = ""
    on: str = ""
    readers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a rank has started.

    Attributes:
        pid, name: Process number and name on its host.
        blocking_call: What it waits in.
        frames: Innermost first; empty unless it is a fork of the rank or of ``multiprocessing``.
    """

    pid: int
    name: str
    blocking_call: BlockingCall
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """What one rank was doing at one moment.

    Attributes:
        cpu_s: CPU time of it and its children, without gloo's event loops: one that is woken for
            nothing uses a whole CPU.
        pid: Process number on its host.
        moved: Bytes that it and its children had read from and written to files and pipes.
        sent: Bytes that it had written, without those that a network has not taken yet.
        switches: How often it and its children had waited for something new.
        blocking_call: What it waits in.
        children: Its children; only in detailed snapshots.
        calls: Its latest collectives, as torch's flight recorder has them.
        unfinished: The collective that its GPU has not completed, for which the script may wait
            anywhere; empty if there is none.
    """

    stack: RankStack
    cpu_s: float
    pid: int = 0
    moved: float = 0.0
    sent: float = 0.0
    switches: int = 0
    blocking_call: BlockingCall = field(default_factory=BlockingCall)
    children: tuple[Child, ...] = ()
    calls: tuple[str, ...] = ()
    unfinished: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.stack.state in ("T", "t")

    @classmethod
    def from_report(cls, host: str, report: dict[str, Any]) -> RankSnapshot:
        """Parses an entry of an agent's answer to ``seen``."""
        frames = parse_frames(report["stack"])
        calls = tuple(filter(parse_call, report["calls"]))  # a script may write others
        unfinished = report["unfinished"] if parse_call(report["unfinished"]) else ""
        stack = RankStack(host, int(report["rank"]), str(report["state"]), frames)
        children = tuple(
            Child(int(child["pid"]), str(child["name"]), _blocking_call(child),
                  parse_frames(child["stack"]))
            for child in report["children"]
        )  # fmt: skip
        return cls(stack, float(report["cpu_s"]), int(report["pid"]), float(report["moved"]),
                   float(report["sent"]), int(report["switches"]), _blocking_call(report),
                   children, calls, unfinished)  # fmt: skip


def _blocking_call(report: dict[str, Any]) -> BlockingCall:
    return BlockingCall(str(report["call"]), str(report["on"]), tuple(report["readers"]))


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang and its cause.

    Attributes:
        host, rank: The rank that the others wait for; ``None`` if all wait for each other.
        kind: See :data:`Kind`.
        is_certain: Whether the rank waits for one single thing; otherwise it wakes up now and then.
        at: The line of code at which it stands.
        calls: See :func:`latest_calls`.
        sides: Groups of ranks that wait in the same collective, if ranks wait in different ones.
    """

    host: str
    rank: int | None
    text: str
    kind: Kind = "still"
    is_certain: bool = True
    at: str = ""
    calls: tuple[tuple[int, str], ...] = ()
    sides: tuple[tuple[int, ...], ...] = ()

    def matches(self, other: Hang) -> bool:
        """Returns whether ``other`` is the same hang at a later moment."""
        this, that = ((h.host, h.rank, h.kind, h.at) for h in (self, other))
        return this == that

    @property
    def is_replaceable(self) -> bool:
        """Whether a new process in the rank's place could go on: the program is not at fault."""
        return self.rank is not None and self.kind in ("frozen", "still", "busy")


def latest_calls(snapshots: Sequence[RankSnapshot]) -> tuple[tuple[int, str], ...]:
    """Returns the latest collective of each rank that reports its collectives."""
    return tuple((snap.stack.rank, snap.calls[-1]) for snap in snapshots if snap.calls)


def has_progressed(first: Sequence[tuple[int, str]],
                   second: Sequence[tuple[int, str]]) -> bool | None:  # fmt: skip
    """Returns whether a rank has begun another collective in between; ``None`` if unknown."""
    earlier = dict(first)
    pairs = [(earlier[rank], call) for rank, call in second if rank in earlier]
    return any(before != after for before, after in pairs) if pairs else None


def persists(hang: Hang, snapshots: Sequence[RankSnapshot]) -> bool:
    """Returns whether the ranks that can be inspected still stand as this hang describes."""
    readable = [snap for snap in snapshots if snap.stack.frames or snap.is_stopped]
    relevant = [snap for snap in readable if hang.rank in (None, snap.stack.rank)]
    if hang.kind in ("still", "last"):
        return all(describe_position(snap.stack) == hang.at for snap in relevant)
    if hang.kind == "frozen":
        return all(snap.is_stopped for snap in relevant)
    return hang.kind != "busy" and all(is_waiting(snap.stack) for snap in readable)


def diagnose(first: Sequence[RankSnapshot], second: Sequence[RankSnapshot], between_s: float,
             idle_s: float, ended: Sequence[tuple[str, int]] = (),
             detailed: Sequence[RankSnapshot] = ()) -> Hang | None:  # fmt: skip
    """Decides whether the job hangs, and which rank holds it up.

    Args:
        first, second: Snapshots of all living ranks at two moments.
        between_s: Seconds between the two.
        idle_s: Seconds without a sign of progress.
        ended: Host and number of ranks that have ended with status 0.
        detailed: Detailed snapshots, taken a moment after the second; empty without.
    """
    earlier = {snap.stack.rank: snap for snap in first}
    details = {snap.stack.rank: snap for snap in detailed}
    if len(second) != len(first) or (detailed and len(detailed) != len(second)):
        return None  # a rank came, ended or cannot be inspected: the others may wait for that one
    groups: dict[str, list[RankSnapshot]] = {"waits": [], "still": [], "busy": []}
    is_certain = True
    for snap in second:
        previous, detail = earlier.get(snap.stack.rank), details.get(snap.stack.rank)
        if previous is None or (detailed and detail is None):
            return None
        activity = _classify(previous, snap, between_s)
        has_moved = detail is not None and activity != "busy" and not _is_unmoved(snap, detail)
        has_moved = has_moved or (detail is not None and _has_finished(snap, detail))
        if not activity or has_moved:
            return None
        if activity == "still" and not snap.is_stopped:
            is_certain = (
                is_certain and snap.switches - previous.switches <= MAX_SWITCHES_PER_S * between_s
            )
        groups[activity].append(_merge_details(snap, detail))
    waiting, blocked, busy = groups["waits"], groups["still"], groups["busy"]
    hang = _verdict(waiting, blocked, busy, idle_s, ended, is_certain)
    if hang is None and blocked and not waiting and not busy:
        hang = _children_hang(blocked, is_certain, bool(detailed))
    return hang and replace(hang, calls=latest_calls(detailed))


def _classify(first: RankSnapshot, second: RankSnapshot, between_s: float) -> str:
    """Returns ``waits``, ``still`` or ``busy``; empty if the rank moves or cannot be inspected."""
    if first.is_stopped or second.is_stopped:
        return "still" if first.is_stopped and second.is_stopped else ""
    if not second.stack.frames or is_waiting(second.stack) != is_waiting(first.stack):
        return ""
    if is_waiting(second.stack):
        computes = second.cpu_s - first.cpu_s > MIN_CPU_SHARE * between_s
        sends = second.sent - first.sent > MIN_SENT_BYTES_PER_S * between_s
        return "" if computes or sends else "waits"
    has_moved = first.stack.script_frame != second.stack.script_frame
    if second.unfinished:  # its GPU has; it waits for that on any line, and may use a whole CPU
        sends = second.sent - first.sent > MIN_SENT_BYTES_PER_S * between_s
        return "" if sends or has_moved else "waits"
    if _is_working(first, second, between_s):
        return "busy"
    return "" if has_moved else "still"


def describe_stall(first: RankSnapshot, second: RankSnapshot, between_s: float) -> str:
    """Describes how a rank is stuck between two snapshots; empty if it works or has moved."""
    is_moved = first.stack.script_frame != second.stack.script_frame
    if is_moved or first.is_stopped != second.is_stopped or _is_working(first, second, between_s):
        return ""
    return _describe_block(second)


def _is_unmoved(first: RankSnapshot, second: RankSnapshot) -> bool:
    """Returns whether both show the same place, so that details of one hold for the other."""
    if first.is_stopped or second.is_stopped:
        return first.is_stopped and second.is_stopped
    position, next_position = describe_position(first.stack), describe_position(second.stack)
    return is_waiting(first.stack) == is_waiting(second.stack) and position == next_position


def _has_finished(first: RankSnapshot, second: RankSnapshot) -> bool:
    """Returns whether the GPU has completed, or the script begun, a collective in between."""
    before, after = (first.unfinished, first.calls[-1:]), (second.unfinished, second.calls[-1:])
    return bool(first.unfinished) and before != after


def _merge_details(snap: RankSnapshot, detail: RankSnapshot | None) -> RankSnapshot:
    """Adds details; the rest is kept because a detailed inspection disturbs the process."""
    if detail is None:
        return snap
    call, children = detail.blocking_call, detail.children
    return replace(snap, blocking_call=call, children=children, calls=detail.calls)


def _verdict(waiting: Sequence[RankSnapshot], blocked: Sequence[RankSnapshot],
             busy: Sequence[RankSnapshot], idle_s: float, ended: Sequence[tuple[str, int]],
             is_certain: bool) -> Hang | None:  # fmt: skip
    if not waiting:
        return None if busy else _remaining_ranks_hang(blocked, ended, is_certain)

    # Connections of the former group were cut: a rank that waits there waits for no other rank.
    if regrouping := [snap for snap in waiting if is_regrouping(snap.stack)]:
        blocked = [*blocked, *(snap for snap in waiting if not is_regrouping(snap.stack))]
        waiting = regrouping

    stacks = [snap.stack for snap in waiting]
    for_it = f"{_join_labels(stacks)} {_wait_verb(stacks)} for it {_place(stacks[0])}"
    if blocked:
        snap = min(blocked, key=lambda snap: snap.stack.state != "T")
        for_it += _describe_unlaunched(waiting[0], snap)
        also = _describe_also([peer for peer in blocked if peer is not snap])
        text = f"{snap.stack.label} {_describe_block(snap)} while {for_it}{also}"
        return _hang_of(snap, text, "frozen" if snap.is_stopped else "still", is_certain)
    if busy:
        stack = busy[0].stack
        text = f"{stack.label} is busy {describe_position(stack)} while {for_it}"
        is_reported = idle_s >= BUSY_TIMEOUT_S
        return Hang(stack.host, stack.rank, text, "busy") if is_reported else None
    if ended:
        host, rank = ended[0]
        text = f"rank {rank} on {host} ended with status 0 while {for_it}"
        return Hang(host, rank, text, "ended")
    on_gpus = any(snap.unfinished for snap in waiting)
    if on_gpus and first_difference({snap.stack.rank: snap.calls for snap in waiting}) is None:
        return None  # the GPUs may still compute what was launched before
    return _deadlock(waiting) if len(waiting) > 1 else None


def _place(stack: RankStack) -> str:
    position = describe_position(stack)
    return position if position.startswith("at ") else f"in {position}"


def _describe_unlaunched(waiting: RankSnapshot, blocked: RankSnapshot) -> str:
    """Names the collective that a GPU has not completed, as the end of a sentence."""
    if not waiting.unfinished:
        return ""
    group, number, call = waiting.unfinished.split(" ", 2)
    launched = [seen.split(" ", 2)[1] for seen in blocked.calls if seen.startswith(f"{group} ")]
    lacks = launched and int(launched[-1]) < int(number)
    who = f", which {blocked.stack.label} has not launched" if lacks else ""
    return f" until its GPU has completed {call}, call {number} of group {group}{who}"


def _remaining_ranks_hang(blocked: Sequence[RankSnapshot], ended: Sequence[tuple[str, int]],
                          is_certain: bool) -> Hang | None:  # fmt: skip
    """Returns the hang of ranks that are stuck although all others have ended."""
    remaining = {(snap.stack.host, snap.stack.rank) for snap in blocked}
    if not blocked or remaining.issuperset(ended):
        return None
    snap, also = blocked[0], _describe_also(blocked[1:])
    text = f"{snap.stack.label} {_describe_block(snap)}, and all others have ended{also}"
    text += _describe_own_ranks(_describe_waiting_child(snap.children))
    return _hang_of(snap, text, "last", is_certain)


def _children_hang(blocked: Sequence[RankSnapshot], is_certain: bool,
                   is_detailed: bool) -> Hang | None:  # fmt: skip
    """Returns the hang of ranks whose processes wait for each other.

    Only detailed snapshots show these processes; without them, the text is empty.
    """
    library_frames = [snap.stack.library_frames for snap in blocked]
    if not all(any(_MULTIPROCESSING in f.file for f in frames) for frames in library_frames):
        return None
    if not is_detailed:
        return Hang("", None, "", "children", is_certain)
    places = [(snap.stack.label, _describe_waiting_child(snap.children)) for snap in blocked]
    if not all(place for _, place in places):
        return None
    text = "all ranks wait for processes that they started, and these wait for others: "
    text += "; ".join(f"of {label}, {place}" for label, place in places[:3])
    text += _describe_own_ranks(text)
    return Hang("", None, text, "children", is_certain, at=text)


def _describe_waiting_child(children: Sequence[Child]) -> str:
    """Names a child that waits in a collective; empty if none does, or if another may work."""
    text = ""
    for child in children:
        stack = RankStack("", 0, "", child.frames)
        if is_waiting(stack):
            text = text or f"process {child.pid} waits {_place(stack)}"
            continue
        is_idle = not child.frames or child.frames[0].file.endswith(_IDLE_FILES)
        if not is_idle or child.blocking_call.on.startswith("/"):
            return ""
    return text


def _describe_own_ranks(text: str) -> str:
    """Says how processes that do not meet get different ranks, as the end of a sentence."""
    hint = ": no two may have the same rank; use RANK * nprocs + i, of WORLD_SIZE * nprocs"
    return hint if " waits in init_process_group " in text else ""


def _hang_of(snap: RankSnapshot, text: str, kind: Kind, is_certain: bool) -> Hang:
    at = "" if snap.is_stopped else describe_position(snap.stack)
    return Hang(snap.stack.host, snap.stack.rank, text, kind, is_certain, at)


def _describe_also(blocked: Sequence[RankSnapshot]) -> str:
    places = [(snap.stack.label, "stopped from outside" if snap.is_stopped
               else describe_position(snap.stack)) for snap in blocked[:3]]  # fmt: skip
    return "".join(f"; {label} is stuck, too, {place}" for label, place in places)


def _deadlock(waiting: Sequence[RankSnapshot]) -> Hang:
    """Returns the hang of ranks that all wait: in different collectives or for lost messages."""
    stacks = [snap.stack for snap in waiting]
    called = first_difference({snap.stack.rank: snap.calls for snap in waiting})
    calls = dict(called.calls) if called else {}
    if called is None and (collective := _common_collective(waiting)):
        text = f"{_join_labels(stacks)} wait for each other in {collective}: what one sends "
        text += "does not reach the other (paceline check tries each direction)"
        return Hang("", None, text, "deaf")
    difference = f": they differ from collective {called.number} on" if called else ""
    difference = difference or ": they do not wait for the same"

    def position(stack: RankStack) -> str:
        call = calls.get(stack.rank)
        suffix = f", its call {called.number} was {call}" if called and call else ""
        return _place(stack) + suffix

    # A rank that has not come to that call may be right or wrong.
    present = [stack for stack in stacks if not called or stack.rank in calls]
    places = {stack.rank: comparable_call(calls[stack.rank]) if called else describe_position(stack)
              for stack in present}  # fmt: skip
    by_place: dict[object, list[int]] = {}
    for stack in stacks:
        by_place.setdefault(places.get(stack.rank, ""), []).append(stack.rank)
    sides = tuple(map(tuple, by_place.values()))

    common, count = Counter(places.values()).most_common(1)[0]
    majority = [stack for stack in present if places[stack.rank] == common]
    lone = next((stack for stack in present if places[stack.rank] != common), None)
    if lone is None or 2 * count <= len(stacks):  # no majority shows which side is right
        text = "; ".join(f"{stack.label} waits {position(stack)}" for stack in present[:4])
        return Hang("", None, text + difference, "apart", sides=sides)
    text = f"{lone.label} waits {position(lone)} while {_join_labels(majority)}"
    text += f" {_wait_verb(majority)} {position(majority[0])}"
    return Hang(lone.host, lone.rank, text + difference, "apart", sides=sides)


def _common_collective(waiting: Sequence[RankSnapshot]) -> str:
    """Returns the collective that all wait in; empty if they differ or it is unknown."""
    places = {describe_position(snap.stack) for snap in waiting}
    if len(places) == 1:
        return places.pop()
    if any(_EXCHANGE in frame.file for snap in waiting for frame in snap.stack.library_frames):
        return ""  # the last call in torch's recorder may be an earlier one
    calls = {snap.calls[-1] if snap.calls else "" for snap in waiting}
    if len(calls) != 1 or "" in calls:
        return ""
    _, number, call = calls.pop().split(" ", 2)
    return f"{call}, call {number} of each"


def _is_working(first: RankSnapshot, second: RankSnapshot, between_s: float) -> bool:
    """Returns whether a rank computes, reads or writes, or waits for a disk."""
    computes = second.cpu_s - first.cpu_s > MIN_CPU_SHARE * between_s
    moves = second.moved - first.moved > MIN_IO_BYTES_PER_S * between_s
    return computes or moves or first.stack.state == second.stack.state == "D"


# --- what holds it up ---------------------------------------------------------------------------


def _describe_block(snap: RankSnapshot) -> str:
    stack = snap.stack
    if stack.state == "T":
        return "is stopped by a signal"
    if stack.state == "t":
        return "is held by a debugger"
    position = describe_position(stack)
    if any(_FETCHES in frame.file for frame in stack.frames):
        return f"waits for its data {position}{_describe_workers(snap.children)}"
    cause = describe_cause(snap)
    return f"is stuck {position}{cause and f' ({cause})'}"


def _describe_workers(children: Sequence[Child]) -> str:
    """Describes what the processes do that load the data."""
    for child in children:
        frame = RankStack("", 0, "", child.frames).script_frame
        is_worker = any(_LOADER in frame.file for frame in child.frames)
        if is_worker and frame is not None and not child.frames[0].file.endswith(_IDLE_FILES):
            cause = _describe_call(child.blocking_call, child.pid)
            return (f": its data loader's worker, process {child.pid}, is stuck at"
                    f" {describe_frame(frame)}{cause and f' ({cause})'}")  # fmt: skip
    for child in children:
        if child.blocking_call.call:
            call = _describe_call(child.blocking_call, child.pid)
            return f": its process {child.pid} ({child.name}) {call}"
    return ""


def describe_cause(snap: RankSnapshot) -> str:
    """Describes what the main thread waits for; empty if that says nothing new."""
    call, children = snap.blocking_call.call, snap.children
    if any(_MULTIPROCESSING in frame.file for frame in snap.stack.library_frames) and (
        place := _describe_waiting_child(children)
    ):
        return f"it waits for processes that it started: {place}"
    if call in ("wait4", "waitid", "read", "poll", "select"):
        for child in children:
            blocked_on = child.blocking_call
            if blocked_on.call == "write" and blocked_on.on.startswith("pipe:"):
                readers = _readers(blocked_on.readers, child.pid, snap.pid, snap.stack.label)
                name = f"its child, process {child.pid} ({child.name}),"
                return f"{name} writes to a full pipe{readers}"
        if children and call in ("wait4", "waitid"):
            return f"it waits for its child, process {children[0].pid} ({children[0].name}), to end"
    return _describe_call(snap.blocking_call, snap.pid)


def _readers(readers: Sequence[int], writer: int, rank_pid: int, rank_name: str) -> str:
    """Names the process that could read from a pipe, as the end of a sentence."""
    pids = [pid for pid in readers if pid != writer]
    if not readers:
        return ""
    if not pids:
        return " that nobody else could read"
    if pids == [rank_pid]:
        return f" that only {rank_name} could read"
    return f" that process {pids[0]} could read"


def _describe_call(blocking_call: BlockingCall, pid: int) -> str:
    call, target = blocking_call.call, blocking_call.on
    if call in ("write", "writev") and target.startswith("pipe:"):
        return f"it writes to a full pipe{_readers(blocking_call.readers, pid, 0, '')}"
    if target.startswith("/") and call in ("flock", "fcntl"):
        return f"it waits for a lock on {target}"
    if target.startswith("/"):
        return f"in {call} of {target}"
    if target.startswith("pipe:"):
        return "it waits for what comes through a pipe"
    if target.startswith("socket:"):
        return "it waits for the network"
    return {
        "nanosleep": "it sleeps", "clock_nanosleep": "it sleeps",
        "futex": "it waits for a lock or a thread",
        "wait4": "it waits for a child", "waitid": "it waits for a child",
    }.get(call, "")  # fmt: skip


def _join_labels(stacks: Sequence[RankStack]) -> str:
    labels = ", ".join(stack.label for stack in stacks[:3])
    return labels if len(stacks) <= 3 else f"{labels} and {len(stacks) - 3} more"


def _wait_verb(stacks: Sequence[RankStack]) -> str:
    return "waits" if len(stacks) == 1 else "wait"


def describe_frozen(host: str, rank: int, state: str, seconds: float, on: str, pid: int) -> str:
    """Describes a rank that something outside of the program holds up.

    ``state`` is of ``agent.supervision.stalls.StallDetector.cause``.
    """
    name, duration = format_location(host, rank), f"{seconds:.{0 if seconds >= 1 else 1}f} s"
    by = f": {on}" if on else ""
    if state == "swapped":
        return f"{name} is swapped out: it has waited for its memory for {duration}{by}"
    reason = {
        "traced": f"held by a debugger for {duration}{by}",
        "paused": f"its control group is paused for {duration} (a container that was paused)",
        "disk": f"it waits in the kernel for a disk that does not answer for {duration}{by}",
    }.get(state, f"stopped by a signal for {duration} (SIGSTOP); on {host}: kill -CONT {pid}")
    return f"{name} is frozen: {reason}"
