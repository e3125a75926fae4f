"""Whether some looks at all ranks show a hang, whose it is, and what holds that rank up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.explain.stacks import (
    Frame,
    RankStack,
    comparable_call,
    describe_frame,
    describe_position,
    first_difference,
    is_regrouping,
    is_waiting,
    parse_frames,
)
from paceline.spec.failure import format_location

BUSY_S = 60.0  # until a rank that works alone, while others wait for it, is told of
WORKS = 0.05  # of a CPU
MOVES = 16 * 1024  # bytes a second that are read or written
SENDS = 2 * 1024  # the same of one that waits for others: a slow network is no hang
SWITCHES = 2.0  # a second: a rank that waits for one thing makes none, one that polls many
_LOADER = "/torch/utils/data/"
_FETCHES = f"{_LOADER}dataloader.py"
_IDLE = ("/multiprocessing/queues.py", "/multiprocessing/connection.py")

# "frozen": a signal or a disk holds it; "still": it waits for something else; "busy": it works;
# "ended": it has left; "last": it alone has not, and stands still; "apart": ranks wait in different
# collectives; "deaf": in the same one
Kind = Literal["frozen", "still", "busy", "ended", "last", "apart", "deaf"]


@dataclass(frozen=True, slots=True)
class Waits:
    """What the main thread of a process waits in, by the kernel's tables; empty when not known.

    Attributes:
        call: The system call.
        on: The file that it is about.
        readers: Of a pipe that it writes to: the job's processes that could read.
    """

    call: str = ""
    on: str = ""
    readers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Child:
    """A process that a rank has started.

    Attributes:
        pid, name: On its host.
        waits: What it waits in.
        frames: Innermost first; empty for what is no fork of the rank.
    """

    pid: int
    name: str
    waits: Waits
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What one rank was doing at one moment.

    Attributes:
        stand: Where it stood.
        cpu_s: CPU time that it and its children had used, without that of gloo's loops: one that
            is woken for nothing uses a whole CPU, and what the others move is in ``sent``.
        pid: On its host.
        moved: Bytes that they had read from and written to files and pipes.
        sent: Bytes that it had written, without those that a network has not taken yet.
        switches: How often they had waited for something new.
        waits: What it waits in.
        children: Looked at only where it is asked for.
        calls: The collectives that it has begun last, as torch's flight recorder has them.
    """

    stand: RankStack
    cpu_s: float
    pid: int = 0
    moved: float = 0.0
    sent: float = 0.0
    switches: int = 0
    waits: Waits = field(default_factory=Waits)
    children: tuple[Child, ...] = ()
    calls: tuple[str, ...] = ()

    @classmethod
    def told(cls, host: str, report: dict[str, Any]) -> Look:
        """Of what an agent answers to ``seen``."""
        stand = RankStack(
            host, int(report["rank"]), str(report["state"]), parse_frames(report["stack"])
        )
        children = tuple(
            Child(
                int(child["pid"]), str(child["name"]), _waits(child), parse_frames(child["stack"])
            )
            for child in report["children"]
        )
        return cls(stand, float(report["cpu_s"]), int(report["pid"]), float(report["moved"]),
                   float(report["sent"]), int(report["switches"]), _waits(report), children,
                   tuple(report["calls"]))  # fmt: skip


def _waits(report: dict[str, Any]) -> Waits:
    return Waits(str(report["call"]), str(report["on"]), tuple(report["readers"]))


@dataclass(frozen=True, slots=True)
class Hang:
    """Who keeps the others waiting.

    Attributes:
        host, rank: The one; ``None`` when all wait for each other.
        text: One line.
        kind: How.
        sure: Whether it waits for one single thing; else it looks up now and then.
        at: Its line.
        begun: See :func:`begun`.
        sides: Of ranks that wait in different collectives, those that wait in the same one.
    """

    host: str
    rank: int | None
    text: str
    kind: Kind = "still"
    sure: bool = True
    at: str = ""
    begun: tuple[tuple[int, str], ...] = ()
    sides: tuple[tuple[int, ...], ...] = ()

    def same(self, other: Hang) -> bool:
        """Whether the other is this one, seen once more."""
        one, two = ((h.host, h.rank, h.kind, h.at) for h in (self, other))
        return one == two

    @property
    def replaceable(self) -> bool:
        """Whether another process in its place could go on: not where the program is at fault."""
        return self.rank is not None and self.kind in ("frozen", "still", "busy")


def begun(looks: Sequence[Look]) -> tuple[tuple[int, str], ...]:
    """By rank, the collective that it has begun last, of those that tell it."""
    return tuple((look.stand.rank, look.calls[-1]) for look in looks if look.calls)


def went_on(before: Sequence[tuple[int, str]], after: Sequence[tuple[int, str]]) -> bool | None:
    """Whether a rank has begun another collective in between; ``None`` when nobody tells."""
    earlier = dict(before)
    both = [(earlier[rank], call) for rank, call in after if rank in earlier]
    return any(was != call for was, call in both) if both else None


def stays(hang: Hang, looks: Sequence[Look]) -> bool:
    """Whether ranks stand as they did when this hang was told, as far as they can be asked."""
    known = [look for look in looks if look.stand.frames or _held(look)]
    theirs = [look for look in known if hang.rank in (None, look.stand.rank)]
    if hang.kind in ("still", "last"):
        return all(describe_position(look.stand) == hang.at for look in theirs)
    if hang.kind == "frozen":
        return all(_held(look) for look in theirs)
    return hang.kind != "busy" and all(is_waiting(look.stand) for look in known)


def judge(before: Sequence[Look], after: Sequence[Look], between_s: float, silent_s: float,
          ended: Sequence[tuple[str, int]] = (),
          closely: Sequence[Look] = ()) -> Hang | None:  # fmt: skip
    """Whether this is a hang, and whose.

    Args:
        before, after: All living ranks at two moments.
        between_s: Seconds between the two.
        silent_s: For how long nothing was heard.
        ended: Host and number of ranks that have ended with status 0.
        closely: They once more, a moment later, and what more is known then.
    """
    earlier = {look.stand.rank: look for look in before}
    known = {look.stand.rank: look for look in closely}
    if len(after) != len(before) or (closely and len(closely) != len(after)):
        return None  # one has come or ended, or cannot be asked: it may be whom the others wait for
    found: dict[str, list[Look]] = {"waits": [], "still": [], "busy": []}
    sure = True
    for look in after:
        was, later = earlier.get(look.stand.rank), known.get(look.stand.rank)
        if was is None or (closely and later is None):
            return None
        how = _how(was, look, between_s)
        if not how or (later is not None and how != "busy" and not _stays(look, later)):
            return None
        if how == "still" and not _held(look):
            sure = sure and look.switches - was.switches <= SWITCHES * between_s
        found[how].append(_with(look, later))
    hang = _verdict(found["waits"], found["still"], found["busy"], silent_s, ended, sure)
    return hang and replace(hang, begun=begun(closely))


def _how(was: Look, look: Look, between_s: float) -> str:
    """What a rank does, by two looks: ``waits``, ``still``, ``busy``; empty when it moves.

    Empty, too, when it cannot be asked: then nothing is known.
    """
    if _held(was) or _held(look):
        return "still" if _held(was) and _held(look) else ""
    if not look.stand.frames or is_waiting(look.stand) != is_waiting(was.stand):
        return ""
    if is_waiting(look.stand):
        moves = (
            look.cpu_s - was.cpu_s > WORKS * between_s or look.sent - was.sent > SENDS * between_s
        )
        return "" if moves else "waits"
    if _works(was, look, between_s):
        return "busy"
    return "still" if was.stand.script_frame == look.stand.script_frame else ""


def stands_still(was: Look, look: Look, between_s: float) -> str:
    """How a rank stands still that nobody waits for; empty where it works, or has moved.

    Args:
        was, look: At two moments.
        between_s: Seconds between the two.
    """
    moved = was.stand.script_frame != look.stand.script_frame or _held(was) != _held(look)
    return "" if moved or _works(was, look, between_s) else _stands_still(look)


def _held(look: Look) -> bool:
    """By a signal or a debugger."""
    return look.stand.state in ("T", "t")


def _stays(look: Look, later: Look) -> bool:
    """Whether it is still where it was: else what is known of it now is of another moment."""
    if _held(look) or _held(later):
        return _held(look) and _held(later)
    return is_waiting(look.stand) == is_waiting(later.stand) and describe_position(
        look.stand
    ) == describe_position(later.stand)


def _with(look: Look, closely: Look | None) -> Look:
    """The same look; a closer one disturbs the process, so that only what is new is taken of it."""
    if closely is None:
        return look
    return replace(look, waits=closely.waits, children=closely.children, calls=closely.calls)


def _verdict(waiting: Sequence[Look], still: Sequence[Look], busy: Sequence[Look], silent_s: float,
             ended: Sequence[tuple[str, int]], sure: bool) -> Hang | None:  # fmt: skip
    if not waiting:
        return None if busy else _last(still, ended, sure)
    # Connections of the former group were cut: who waits on there waits for nobody.
    if anew := [look for look in waiting if is_regrouping(look.stand)]:
        still = [*still, *(look for look in waiting if not is_regrouping(look.stand))]
        waiting = anew
    stands = [look.stand for look in waiting]
    for_it = f"{_names(stands)} {_verb(stands)} for it in {describe_position(stands[0])}"
    if still:
        look = min(still, key=lambda one: one.stand.state != "T")
        one, frozen = look.stand, _held(look)
        others = [other for other in still if other is not look][:3]
        also = "".join(
            f"; {other.stand.label} stands still, too, {_place(other)}" for other in others
        )
        text = f"{one.label} {_stands_still(look)} while {for_it}{also}"
        kind: Kind = "frozen" if frozen else "still"
        return Hang(one.host, one.rank, text, kind, sure, "" if frozen else describe_position(one))
    if busy:
        one = busy[0].stand
        if silent_s < BUSY_S:
            return None
        return Hang(
            one.host,
            one.rank,
            f"{one.label} is busy {describe_position(one)} while {for_it}",
            "busy",
        )
    if ended:
        host, rank = ended[0]
        text = f"rank {rank} on {host} ended with status 0 while {for_it}"
        return Hang(host, rank, text, "ended")
    return _all_wait(waiting) if len(waiting) > 1 else None


def _last(still: Sequence[Look], ended: Sequence[tuple[str, int]], sure: bool) -> Hang | None:
    """Who stands still where all others have ended: for it nobody waits but the job."""
    left = {(look.stand.host, look.stand.rank) for look in still}
    if not still or left.issuperset(ended):
        return None
    one, frozen = still[0].stand, _held(still[0])
    also = "".join(f"; {look.stand.label} stands still, too, {_place(look)}" for look in still[1:4])
    text = f"{one.label} {_stands_still(still[0])}, and all others have ended{also}"
    return Hang(one.host, one.rank, text, "last", sure, "" if frozen else describe_position(one))


def _all_wait(waiting: Sequence[Look]) -> Hang:
    """Nobody is elsewhere: they came to different collectives, or do not hear each other."""
    stands = [look.stand for look in waiting]
    called = first_difference({look.stand.rank: look.calls for look in waiting})
    what = dict(called.calls) if called else {}
    if called is None and (inside := _together(waiting)):
        text = f"{_names(stands)} wait for each other in {inside}: what one sends "
        text += "does not reach the other (paceline check tries each direction)"
        return Hang("", None, text, "deaf")
    since = f": they differ from collective {called.number} on" if called else ""
    since = since or ": they do not wait for the same"

    def at(one: RankStack) -> str:
        call = what.get(one.rank)
        return describe_position(one) + (
            f", its call {called.number} was {call}" if called and call else ""
        )

    # who has not come to that call may be right or wrong
    came = [one for one in stands if not called or one.rank in what]
    places = {
        one.rank: comparable_call(what[one.rank]) if called else describe_position(one)
        for one in came
    }
    by_place: dict[object, list[int]] = {}
    for one in stands:
        by_place.setdefault(places.get(one.rank, ""), []).append(one.rank)
    sides = tuple(map(tuple, by_place.values()))
    common, count = Counter(places.values()).most_common(1)[0]
    many = [one for one in came if places[one.rank] == common]
    lone = next((one for one in came if places[one.rank] != common), None)
    if lone is None or 2 * count <= len(stands):  # nobody knows who is right
        told = "; ".join(f"{one.label} waits in {at(one)}" for one in came[:4])
        return Hang("", None, told + since, "apart", sides=sides)
    text = f"{lone.label} waits in {at(lone)} while {_names(many)} {_verb(many)} in {at(many[0])}"
    return Hang(lone.host, lone.rank, text + since, "apart", sides=sides)


def _together(waiting: Sequence[Look]) -> str:
    """The collective that all wait in; empty where it is not the same, or is not known."""
    last = {look.calls[-1] if look.calls else "" for look in waiting}
    same = len(last) == 1 and "" not in last
    places = {describe_position(look.stand) for look in waiting}
    if len(places) == 1:
        return places.pop()
    if not same:
        return ""
    _, number, what = last.pop().split(" ", 2)
    return f"{what}, call {number} of each"


def _works(was: Look, look: Look, between_s: float) -> bool:
    """Whether it computes, reads or writes, or waits for a disk: compilers, checkpoints, data."""
    computes = look.cpu_s - was.cpu_s > WORKS * between_s
    moves = look.moved - was.moved > MOVES * between_s
    return computes or moves or was.stand.state == look.stand.state == "D"


# --- what holds it up ---------------------------------------------------------------------------


def _stands_still(look: Look) -> str:
    stand = look.stand
    if stand.state == "T":
        return "is stopped by a signal"
    if stand.state == "t":
        return "is held by a debugger"
    if any(_FETCHES in frame.file for frame in stand.frames):
        return f"waits for its data {describe_position(stand)}{_of_workers(look.children)}"
    why = because(look)
    return f"stands still {describe_position(stand)}{why and f' ({why})'}"


def _place(look: Look) -> str:
    return "held up from outside" if _held(look) else describe_position(look.stand)


def _of_workers(children: Sequence[Child]) -> str:
    """What the processes do that make the data."""
    workers = [
        worker for worker in children if any(_LOADER in frame.file for frame in worker.frames)
    ]
    for worker in workers:
        own = RankStack("", 0, "", worker.frames).script_frame
        if own is not None and not any(worker.frames[0].file.endswith(end) for end in _IDLE):
            why = _call_words(worker.waits, worker.pid)
            return (f": its data loader's worker, process {worker.pid}, stands still at"
                    f" {describe_frame(own)}{why and f' ({why})'}")  # fmt: skip
    if stuck := next((worker for worker in children if worker.waits.call), None):
        return f": its process {stuck.pid} ({stuck.name}) {_call_words(stuck.waits, stuck.pid)}"
    return ""


def because(look: Look) -> str:
    """What its main thread waits for, in words; empty when that says nothing new."""
    if look.waits.call in ("wait4", "waitid", "read", "poll", "select"):
        for child in look.children:
            if child.waits.call == "write" and child.waits.on.startswith("pipe:"):
                ends = _readers(child.waits.readers, child.pid, look.pid, look.stand.label)
                return f"its child, process {child.pid} ({child.name}), writes to a full pipe{ends}"
        if look.children and look.waits.call in ("wait4", "waitid"):
            first = look.children[0]
            return f"it waits for its child, process {first.pid} ({first.name}), to end"
    return _call_words(look.waits, look.pid)


def _readers(readers: Sequence[int], writer: int, rank_pid: int, who: str) -> str:
    """Who should read, as the end of a sentence."""
    others = [pid for pid in readers if pid != writer]
    if not readers:
        return ""
    if not others:
        return " that nobody else could read"
    if others == [rank_pid]:
        return f" that only {who} could read"
    return f" that process {others[0]} could read"


def _call_words(waits: Waits, pid: int) -> str:
    call, on = waits.call, waits.on
    if call in ("write", "writev") and on.startswith("pipe:"):
        return f"it writes to a full pipe{_readers(waits.readers, pid, 0, '')}"
    if on.startswith("/") and call in ("flock", "fcntl"):
        return f"it waits for a lock on {on}"
    if on.startswith("/"):
        return f"in {call} of {on}"
    if on.startswith("pipe:"):
        return "it waits for what comes through a pipe"
    if on.startswith("socket:"):
        return "it waits for the network"
    return {
        "nanosleep": "it sleeps", "clock_nanosleep": "it sleeps",
        "futex": "it waits for a lock or a thread",
        "wait4": "it waits for a child", "waitid": "it waits for a child",
    }.get(call, "")  # fmt: skip


# --- words --------------------------------------------------------------------------------------


def _names(stands: Sequence[RankStack]) -> str:
    few = ", ".join(stand.label for stand in stands[:3])
    return few if len(stands) <= 3 else f"{few} and {len(stands) - 3} more"


def _verb(stands: Sequence[RankStack]) -> str:
    return "waits" if len(stands) == 1 else "wait"


def frozen_text(host: str, rank: int, how: str, seconds: float, on: str, pid: int) -> str:
    """What to say of a rank that stands still in a way in which no program does by itself.

    Args:
        host, rank, pid: Which.
        how: See ``agent.held.Standstill``.
        seconds: For how long.
        on: What holds it up, as far as it is known.
    """
    who, long = format_location(host, rank), f"for {seconds:.{0 if seconds >= 1 else 1}f} s"
    by = f": {on}" if on else ""
    if how == "traced":
        return f"{who} is frozen: held by a debugger {long}{by}"
    if how == "paused":
        return f"{who} is frozen: its control group is paused {long} (a container that was paused)"
    if how == "disk":
        return f"{who} is frozen: it waits in the kernel for a disk that does not answer {long}{by}"
    if how == "swapped":
        return f"{who} is swapped out: it has waited for its memory {long}{by}"
    return f"{who} is frozen: stopped by a signal {long} (SIGSTOP); on {host}: kill -CONT {pid}"
