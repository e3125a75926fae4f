"""Hangs: noticed from what ranks say and from how quiet they are, and told with the line.

:func:`judge` decides from two looks at all ranks; :class:`HangWatch` takes them. Neither ends
anything. A long evaluation, a compilation or a slow download look quiet, too: so a silence only
makes us look at the ranks' stacks, twice, and only where some wait in a collective for others that
do not move is it called a hang.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.explain.stacks import Frame, Stand, parse
from paceline.launch.fleet import Fleet, Node
from paceline.spec.errors import PacelineError

LEAST_S = 5.0  # of silence of a training that tells its steps
USUAL_GAPS = 4  # as many times the usual time between two steps' tellings
OTHER_PHASE_S = 60.0  # in a phase other than training
UNTOLD_S = 15.0  # without CPU time, of ranks that tell nothing
BUSY_S = 60.0  # until a rank that works alone, while others wait for it, is told of
FROZEN_S = 3.0
WORKS = 0.05  # of a CPU
MOVES = 16 * 1024  # bytes a second that are read or written
LOOK_S = 1.0
STACKS_S = 0.3  # until asked stacks have come
BETWEEN_S = 1.5  # between two looks at the same ranks
PATIENCE_S = 2.0  # for a node's answer
QUIET_S = 2.0  # without CPU time: then one look is enough
TRAINING = "train"
_WAITS = ("_engine_run_backward", "run_backward")  # gradients are exchanged inside


@dataclass(frozen=True, slots=True)
class Look:
    """What one rank was doing at one moment.

    Attributes:
        stand: Where it stood.
        cpu_s: CPU time that it and its children had used.
        pid: On its host.
        moved: Bytes that they had read from and written to files and pipes.
    """

    stand: Stand
    cpu_s: float
    pid: int = 0
    moved: float = 0.0


@dataclass(frozen=True, slots=True)
class Hang:
    """Who keeps the others waiting.

    Attributes:
        host, rank: The one; ``None`` when all wait for each other.
        text: One line.
    """

    host: str
    rank: int | None
    text: str


class Heartbeats:
    """The steps that ranks tell of, and how long it usually takes until the next. Pure."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: list[float] = []
        self._phases: dict[int, str] = {}

    def take(self, rank: int, phase: str, now: float) -> None:
        """A rank has told its step."""
        if self._last is not None and phase == TRAINING:
            self._gaps = [*self._gaps[-20:], now - self._last]
        self._phases[rank] = phase
        self._last = now

    @property
    def known(self) -> bool:
        """Whether enough was told to know what is usual."""
        return len(self._gaps) >= 3

    def silent_s(self, now: float) -> float:
        return 0.0 if self._last is None else now - self._last

    @property
    def patience_s(self) -> float:
        """Seconds of silence that are nothing to look at."""
        least = max(LEAST_S, USUAL_GAPS * max(self._gaps, default=0.0))
        training = all(phase == TRAINING for phase in self._phases.values())
        return least if training else max(least, OTHER_PHASE_S)


def judge(before: Sequence[Look], after: Sequence[Look], between_s: float,
          silent_s: float, ended: Sequence[tuple[str, int]] = ()) -> Hang | None:  # fmt: skip
    """Whether this is a hang, and whose. Pure.

    Args:
        before, after: All living ranks at two moments.
        between_s: Seconds between the two.
        silent_s: For how long nothing was heard.
        ended: Host and number of ranks that have ended with status 0.
    """
    earlier = {look.stand.rank: look for look in before}
    waiting, still, busy = [], [], []
    for look in after:
        was = earlier.get(look.stand.rank)
        if was is None:
            return None
        if look.stand.state == "T":
            still.append(look.stand)
        elif not look.stand.frames:
            return None  # it cannot be asked: nothing is known
        elif waits(look.stand) and waits(was.stand):
            if look.cpu_s - was.cpu_s > WORKS * between_s:
                return None  # data moves
            waiting.append(look.stand)
        elif waits(look.stand) or waits(was.stand):
            return None  # it moves
        elif _works(was, look, between_s):
            busy.append(look.stand)
        elif was.stand.own == look.stand.own:
            still.append(look.stand)
        else:
            return None
    return _verdict(waiting, still, busy, silent_s, ended)


def _verdict(waiting: Sequence[Stand], still: Sequence[Stand], busy: Sequence[Stand],
             silent_s: float, ended: Sequence[tuple[str, int]]) -> Hang | None:  # fmt: skip
    if not waiting:
        return None
    for_it = f"{_names(waiting)} {_verb(waiting)} for it in {where(waiting[0])}"
    if still:
        one = still[0]
        how = "is stopped by a signal" if one.state == "T" else f"stands still {where(one)}"
        return Hang(one.host, one.rank, f"{one.who} {how} while {for_it}")
    if busy:
        one = busy[0]
        if silent_s < BUSY_S:
            return None
        return Hang(one.host, one.rank, f"{one.who} is busy {where(one)} while {for_it}")
    if ended:
        host, rank = ended[0]
        return Hang(host, rank, f"rank {rank} on {host} ended with status 0 while {for_it}")
    places = {where(stand) for stand in waiting}
    if len(waiting) > 1 and len(places) == 1:
        text = f"{_names(waiting)} wait for each other in {places.pop()}: what one sends does not "
        text += "reach the other (paceline check tries each direction)"
        return Hang("", None, text)
    told = "; ".join(f"{stand.who} waits in {where(stand)}" for stand in waiting[:4])
    return Hang("", None, f"{told}: they do not wait for the same") if len(waiting) > 1 else None


def _works(was: Look, look: Look, between_s: float) -> bool:
    """Whether it computes, reads or writes, or waits for a disk: compilers, checkpoints, data."""
    computes = look.cpu_s - was.cpu_s > WORKS * between_s
    moves = look.moved - was.moved > MOVES * between_s
    return computes or moves or was.stand.state == look.stand.state == "D"


def waits(stand: Stand) -> bool:
    """Whether it stood in a collective, or in a backward pass, in which gradients are exchanged."""
    return bool(stand.collective) or any(frame.function in _WAITS for frame in stand.frames)


def where(stand: Stand) -> str:
    """``all_reduce (train.py, line 40, in step)``, or the user's own line alone."""
    own = _line(stand.own)
    if stand.collective:
        return f"{stand.collective}{own and f' ({own})'}"
    if waits(stand):
        return f"the backward pass{own and f' ({own})'}"
    return f"at {own}" if own else "somewhere outside the script"


def _line(frame: Frame | None) -> str:
    if frame is None:
        return ""
    inside = "" if frame.function == "<module>" else f", in {frame.function}"
    return f"{frame.where}{inside}"


def _names(stands: Sequence[Stand]) -> str:
    few = ", ".join(stand.who for stand in stands[:3])
    return few if len(stands) <= 3 else f"{few} and {len(stands) - 3} more"


def _verb(stands: Sequence[Stand]) -> str:
    return "waits" if len(stands) == 1 else "wait"


def frozen_text(host: str, rank: int, seconds: float, pids: Mapping[int, int]) -> str:
    """What to say of a rank that a signal has stopped."""
    pid = f"; on {host}: kill -CONT {pids[rank]}" if rank in pids else ""
    return (
        f"rank {rank} on {host} is frozen: stopped by a signal for {seconds:.0f} s "
        f"(SIGSTOP, or a debugger){pid}"
    )


class HangWatch:
    """Looks every second whether the job goes on, and tells what keeps it.

    Args:
        fleet: The nodes.
        told: Called with every hang that is found, and with ``None`` when the job goes on again.
        over: Called with the hang that has lasted for ``limit_s``.
        limit_s: 0 never calls ``over``.
    """

    def __init__(self, fleet: Fleet, told: Callable[[Hang | None, float], None],
                 over: Callable[[Hang], None], limit_s: float = 0.0) -> None:  # fmt: skip
        self._fleet = fleet
        self._told, self._over, self._limit_s = told, over, limit_s
        self._heartbeats = Heartbeats()
        self._pids: dict[int, int] = {}
        self._ended: list[tuple[str, int]] = []
        self._hang: Hang | None = None
        self._since = 0.0  # of the hang that was told
        self._next_look = 0.0

    def heartbeat(self, rank: int, phase: str) -> None:
        """A rank has told its step."""
        self._heartbeats.take(rank, phase, time.monotonic())

    def started(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def ended(self, host: str, rank: int) -> None:
        """A rank has ended with status 0."""
        self._ended.append((host, rank))

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._silent_s()
            if self._hang is not None and silent_s < LOOK_S * 2 and not self._frozen():
                self._told(None, time.monotonic() - self._since)
                self._hang = None
            hang = self._frozen()
            if hang is None and self._suspicious(silent_s):
                hang = await self._inspect(silent_s)
            if hang is not None:
                self._tell(hang, silent_s)
            self._judge_limit()

    def _tell(self, hang: Hang, silent_s: float) -> None:
        if self._hang is None:
            self._since = time.monotonic() - silent_s
        if self._hang is None or (self._hang.rank, self._hang.host) != (hang.rank, hang.host):
            self._told(hang, silent_s)
            self._hang = hang

    def _judge_limit(self) -> None:
        if self._hang is not None and 0 < self._limit_s < time.monotonic() - self._since:
            self._over(self._hang)
            self._limit_s = 0.0

    def _silent_s(self) -> float:
        """How long no rank has made a step, as far as that is told; else used no CPU."""
        if self._heartbeats.known:
            return self._heartbeats.silent_s(time.monotonic())
        quiet = [node.quiet_s for node in self._fleet.nodes if node.quiet_s is not None]
        return min(quiet, default=0.0)

    def _suspicious(self, silent_s: float) -> bool:
        known = self._heartbeats.known
        patience_s = self._heartbeats.patience_s if known else UNTOLD_S
        if silent_s <= patience_s or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + max(LOOK_S, silent_s / 4)
        return True

    def _frozen(self) -> Hang | None:
        for node in self._fleet.nodes:
            for rank, seconds in sorted(node.frozen.items()):
                if seconds >= FROZEN_S and not node.lost:
                    text = frozen_text(node.name, rank, seconds, self._pids)
                    return Hang(node.name, rank, text)
        return None

    async def _inspect(self, silent_s: float) -> Hang | None:
        """Looks at all ranks twice."""
        before = await self._looks()
        await asyncio.sleep(BETWEEN_S)
        after = await self._looks()
        return judge(before, after, BETWEEN_S + STACKS_S, silent_s, self._ended)

    async def at_the_end(self) -> Hang | None:
        """One quick look, when somebody stops a job that may hang."""
        if self._hang is not None or self._silent_s() < QUIET_S:
            return self._hang
        quiet = [node.quiet_s or 0.0 for node in self._fleet.nodes]
        if min(quiet, default=0.0) < QUIET_S:
            return None
        looks = await self._looks()  # nobody has used a CPU for a while: nobody moves
        return judge(looks, looks, 1.0, self._silent_s(), self._ended)

    async def _looks(self) -> list[Look]:
        await self._fleet.tell("dump_stacks", patience_s=PATIENCE_S)
        await asyncio.sleep(STACKS_S)
        found = await asyncio.gather(*(self._looks_at(node) for node in self._fleet.nodes))
        return [look for looks in found for look in looks]

    async def _looks_at(self, node: Node) -> list[Look]:
        try:
            answer = await asyncio.wait_for(node.channel.request("seen"), PATIENCE_S)
        except (PacelineError, ConnectionError, asyncio.TimeoutError):
            return []
        return [_look(node.name, said) for said in answer["ranks"]]


def _look(host: str, said: dict[str, Any]) -> Look:
    frames = parse(str(line) for line in said["stack"])
    stand = Stand(host, int(said["rank"]), str(said["state"]), frames)
    return Look(stand, float(said["cpu_s"]), int(said["pid"]), float(said["moved"]))
