"""What happens in a run: every kind of event with its fields, defined here once.

A rank tells its agent, the agent the launcher, and the launcher adds what it sees itself. Each is
one :class:`Event`: the wire is held against :data:`KINDS`, ``events.jsonl`` holds one event a line,
and the screen, ``status``, ``explain`` and the report are made of the same values, in memory of a
run that has just ended and from the file of an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.spec.failure import place
from paceline.spec.shapes import (
    LARGEST,
    LONG_TEXT,
    PROCESS,
    RANK,
    SIZE,
    SMALL,
    Shape,
    address,
    each,
    fits,
    flag,
    free,
    maybe,
    number,
    one_of,
    record,
    text,
    whole,
)

Message = Mapping[str, Any]

MEMORY = maybe(record({
    "kills": maybe(whole(-LARGEST)),
    "limit": maybe(record(bytes=SIZE, peak=maybe(SIZE), group=text())),
    "kernel": each(text(), 100),
}))  # fmt: skip
STACK = each(text(), 1000)

# Of a step, see train/pace.py, with the words that people read for it, wherever it is told.
PART_NAMES = {
    "data": "waiting for data",
    "computing": "computing",
    "waiting": "waiting for slower ranks",
    "moving": "communication",
    "saving": "saving checkpoints",
    "other": "other",
}
PARTS = tuple(PART_NAMES)

# By name: what it may be, and in which unit. A field means the same in every kind of event.
FIELDS: dict[str, Shape] = {
    "address": address,
    "able": flag,  # whether the training can go on without ranks that are lost
    "attempt": whole(),  # number of the start, from 0
    "before": number,  # seconds of a step
    "bytes": SIZE,  # of a file
    "bucket_bytes": SIZE,  # of gradients that travel together; 0: DDP's own
    "backend": SMALL,  # of torch.distributed
    "backends": each(SMALL, 50),  # that torch was built with
    "calls": SIZE,  # collectives
    "cause": SMALL,  # why a rank is slow: see train/straggler.py
    "code": maybe(whole(0, 255)),  # exit status; null after a signal
    "copy": text(),  # a folder on the host
    "count": SIZE,  # processes
    "cuda": maybe(SMALL),  # version that torch was built for
    "device": SMALL,
    "do": one_of("stop", "save", "stacks"),
    "epoch": number,
    "epochs": maybe(number),
    "error": text(LONG_TEXT),
    "exchanges": flag,  # gradients, or in a way that cannot be seen
    "executable": text(),  # path of the interpreter
    "exit_code": whole(),
    "first_bytes": SIZE,  # of the bucket that is sent first
    "folder": text(),  # on the rank's node
    "generation": whole(),  # number of the group of ranks in an attempt, from 0
    "frozen": flag,  # a signal had stopped it
    "home": text(),  # the folder on the launching machine that ``copy`` is a copy of
    "hooked": flag,  # the script shows its exceptions itself
    "hosts": each(text(255)),
    "how": SMALL,  # a rank is held up: see agent/held.py
    "in_children": flag,  # programs that it started have done most of its work
    "its_host": text(255),  # of the rank that it is about
    "largest_call": SIZE,  # elements of the largest tensor in a collective
    "megabytes": number,  # 10**6 bytes
    "memory": MEMORY,  # what the memory killer left: see agent/memory.py
    "members": each(RANK),  # of a generation, in the order of their ranks in it
    "message": text(LONG_TEXT),  # of the exception
    "nccl": SMALL,  # version
    "on": text(),  # what holds it up
    "optimizer_steps": SIZE,  # that were counted: not those after the first exchange of gradients
    "origin": maybe(RANK),  # the rank that met what all raise
    "parameters": SIZE,  # of the model
    "part": number,  # of the time of a step
    "parts": record(dict.fromkeys(PARTS, number)),  # of the time of the steps
    "peak_bytes": SIZE,  # most memory that the rank had
    "phase": SMALL,  # of the training: train, evaluate, …
    "pid": PROCESS,  # on its host
    "planned": flag,  # the group changes because ranks join, not because some are gone
    "problem": text(LONG_TEXT),
    "python": SMALL,  # version
    "rank": RANK,
    "ranks_s": each(each(number, 20), 1 << 20),  # of each rank: seconds of a step in each of PARTS
    "rates": each(number, 1 << 20),  # of each rank: its own samples a second
    "reason": SMALL,  # one word, for the launcher
    "resumed": flag,  # the training continues an earlier one
    "samples": SIZE,  # over all ranks
    "saved": whole(),  # the step of the newest checkpoint that is whole; 0: there is none
    "seconds": number,
    # when another rank failed, or as it crashed: innermost line first; its last collectives
    "seen": record({"calls": each(text(), 100)}, state=SMALL, stack=STACK),
    "sha256": SMALL,  # of a file, in hexadecimal
    "shares": each(SIZE),  # samples of each rank
    "signal": maybe(whole(1, 128)),  # its number; null after an exit
    "source": text(),  # of what was resumed
    "split": SMALL,  # of the data: train, test, …
    "status": whole(-1000, 1000),  # as Python's subprocess gives it: -9 after signal 9
    "stderr": text(LONG_TEXT),  # the end of what ssh and the agent wrote
    "step": maybe(whole()),  # global step
    "keep": whole(),  # checkpoints that stay, besides the best; 0: all
    "steps": maybe(whole()),  # of the whole training
    "straggler": RANK,  # a rank that holds the others up
    "stream": one_of("out", "err"),
    "text": text(LONG_TEXT),
    "time": number,  # seconds of the teller's monotonic clock; in the file see Event
    "torch": SMALL,  # version
    "traceback": text(LONG_TEXT),
    "tried": SIZE,  # ways
    "trouble": text(LONG_TEXT),  # what it said that no agent says
    "type": text(),  # of the exception
    "warning": text(LONG_TEXT),
    "why": text(LONG_TEXT),
    "words": text(LONG_TEXT),  # a scheduler's own
    "world": SIZE,  # ranks
    "world_size": SIZE,  # ranks
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event.

    Attributes:
        by: Who tells it. What an agent or the launcher tells is not believed of a rank.
        needs, may: Names of the fields that it has, and of those that it may have.
        written: Whether it stands in events.jsonl.
    """

    by: Literal["rank", "agent", "launcher"]
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    written: bool = True

    def shape(self) -> Shape:
        """Of the message that tells it."""
        may = {name: FIELDS[name] for name in self.may}
        return record(may, **{name: FIELDS[name] for name in self.needs})


def _kind(by: Literal["rank", "agent", "launcher"], needs: str = "", may: str = "",
          written: bool = True) -> Kind:  # fmt: skip
    return Kind(by, tuple(needs.split()), tuple(may.split()), written)


KINDS: dict[str, Kind] = {
    # what a program in a rank tells, through the pipe to its agent; it may tell others, too
    "world joined": _kind("rank", may="world_size backend"),
    "world left": _kind("rank"),
    "joined": _kind("rank", may="world device backend"),
    "prepared": _kind("rank", may="parameters"),
    "resumed": _kind("rank", may="step source"),
    "communication": _kind("rank", may="step text"),  # another way is taken, or would help
    "keeps checkpoints": _kind("rank", may="keep"),  # and makes one when it is asked to
    "saving": _kind("rank", may="step"),  # the checkpoint that was asked for; told by rank 0
    "checkpoint": _kind("rank", may="step megabytes seconds"),
    "checkpoint copied": _kind("rank", may="step megabytes seconds hosts"),  # which have it now
    "checkpoint copy failed": _kind("rank", may="step problem warning"),
    "checkpoint failed": _kind("rank", may="step problem warning"),
    "checkpoint skipped": _kind("rank", may="warning"),
    "overlap settled": _kind(
        "rank", may="step bucket_bytes first_bytes seconds before tried"
    ),  # of the exchange of gradients with computing
    "stopped": _kind("rank", may="step why saved"),  # for it was asked to
    "straggler": _kind("rank", may="straggler its_host cause seconds part text"),  # by rank 0
    "straggler over": _kind("rank", may="straggler its_host text"),
    "trained": _kind("rank", may="steps samples seconds parts straggler its_host cause"),
    "stopped early": _kind("rank", may="step why"),
    "model saved": _kind("rank", may="step sha256 folder"),
    "model kept elsewhere": _kind("rank", may="folder"),
    "shares": _kind("rank", may="step shares why"),  # of the global batch, from that step on
    "gradient exchange": _kind(
        "rank", may="optimizer_steps calls largest_call exchanges in_children"
    ),  # what a rank, or a process that it started, has exchanged; told at its end
    "slow rank": _kind("rank", may="warning"),
    "warning": _kind("rank", may="warning"),
    "failed": _kind("rank", may="error"),
    "stranger": _kind("rank", "address time"),  # a connection of its group leads there
    "stranger refused": _kind("rank", "address", may="time"),  # it is none of the job's hosts
    "exception": _kind("rank", "type message traceback time", "hooked origin code"),
    "returned": _kind("rank", "bytes sha256"),  # what a function returned lies in its file
    "raised": _kind("rank", "bytes sha256"),  # the same of what it raised
    "recoverable": _kind("rank", "able", may="why"),  # before its first step
    "interrupted": _kind("rank", may="step error generation"),  # it waits for word; of which group
    "gathered": _kind("rank", "generation"),  # all of a new group are there: connections are made
    "door closed": _kind("rank", "why"),  # nobody can join any more
    "session closed": _kind("rank"),  # the training is over on this rank, its script may go on
    "newcomer ready": _kind("rank"),  # to join the others
    "stuck": _kind("rank", "seconds", may="step"),  # in a collective that nothing frees
    "regrouped": _kind("rank", "generation", may="step seconds"),  # it trains in the new group
    "begin": _kind("rank", may="resumed", written=False),
    "heartbeat": _kind("rank", may="step phase", written=False),
    "metrics": _kind("rank", may="step split", written=False),  # to metrics.jsonl
    "progress": _kind("rank", may="step steps epoch epochs", written=False),
    "pace": _kind("rank", "ranks_s rates", may="step", written=False),  # by rank 0, now and then
    "say": _kind("rank", "text", written=False),  # to the rank's log
    # what an agent tells
    "imported": _kind("agent", "seconds python executable", "torch cuda nccl backends"),
    "import failed": _kind("agent", "error traceback", written=False),
    "fork server died": _kind("agent", "status time", "memory frozen", written=False),
    "rank started": _kind("agent", "rank pid"),
    "output": _kind("agent", "rank stream", written=False),  # to the rank's log; with bytes
    "rank ended": _kind("agent", "rank code signal time peak_bytes", "memory seen"),
    "stranger at the store": _kind("agent", "address"),  # and refused
    "store ended": _kind("agent", "time", written=False),  # not by us
    "rank frozen": _kind("agent", "rank how seconds on pid"),
    "rank thawed": _kind("agent", "rank"),
    "leftovers killed": _kind("agent", "count"),
    "node ended": _kind("agent", "time", written=False),  # all its ranks have
    "asked to end": _kind("agent", "time", written=False),  # by SIGTERM
    "leaving": _kind("agent", "reason why time", written=False),
    # what the launcher sees
    "connected": _kind("launcher", "hosts"),
    "copied": _kind("launcher", "copy home"),
    "started": _kind("launcher", "attempt world_size"),
    "ended": _kind("launcher", "attempt exit_code seconds"),
    "connection ended": _kind("launcher", "stderr trouble", written=False),
    "connection restored": _kind("launcher", "seconds"),  # after a break, or a silence
    "lost": _kind("launcher", "why"),
    "regroup": _kind("launcher", "generation members planned"),
    "newcomer late": _kind("launcher", "text why"),  # it stands still instead of joining
    "newcomer lost": _kind("launcher", "why"),  # before it had joined
    "recovery": _kind("launcher", "text", may="seconds"),  # in the words of the screen
    "scheduler": _kind("launcher", "words"),
    "asked": _kind("launcher", "do", may="text"),  # by a person, on the way: see launch/control.py
    "hang": _kind("launcher", "text"),
    "hang over": _kind("launcher", "seconds"),
}
_OWN = {"event", "host", "rank", "time"}  # of every line
_IN_RESULT = {"hooked", "origin", "traceback"}  # not in events.jsonl: of the first failure only


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        kind: One of :data:`KINDS`, or another name that a program gave to what it tells.
        host: Where; empty when the whole job is meant.
        rank: Whose; ``None`` when the node or the job is meant.
        time: While the job runs, seconds of the launcher's monotonic clock, corrected for the
            node's (0: now); in the file, and as it is read from there, seconds since 1970 at the
            launcher.
        fields: The rest: see :data:`FIELDS`. ``event[name]`` is ``None`` for one that is missing.
        blob: Bytes that came with it.
    """

    kind: str
    host: str = ""
    rank: int | None = None
    time: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    blob: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    @property
    def where(self) -> str:
        """``rank 1 on n2``."""
        return place(self.host, self.rank)

    @property
    def resumable(self) -> bool:
        """Whether it tells of a training that stopped and can be resumed."""
        return self.kind == "stopped" and self["saved"] != 0

    @property
    def written(self) -> Mapping[str, Any] | None:
        """The fields that stand in events.jsonl; ``None`` when it is not written there."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return self.fields
        if not kind.written:
            return None
        unwritten = _IN_RESULT | {"time"}
        return {name: value for name, value in self.fields.items() if name not in unwritten}

    @classmethod
    def heard(cls, host: str, message: Message, blob: bytes = b"") -> Event:
        """Of an agent's message that has passed the wire's schema."""
        told = message["data"] if message["event"] == "said" else message
        kind = told_kind(told) if message["event"] == "said" else str(message["event"])
        timed = kind in KINDS and "time" in KINDS[kind].needs
        own = {"event", "rank"} if told is message else {"kind"}
        own = {"kind", *_OWN} if told.get("kind") == "event" else own
        fields = {name: value for name, value in told.items() if name not in own}
        when = float(told["time"]) if timed else 0.0
        return cls(str(kind), host, message.get("rank"), when, fields, blob)

    @classmethod
    def read(cls, line: Message) -> Event | None:
        """Of a line of events.jsonl, as far as it can be believed; ``None`` of any other object."""
        name, host, rank, when = (line.get(own) for own in ("event", "host", "rank", "time"))
        if not isinstance(name, str):
            return None
        kind = KINDS.get(name)
        known = None if kind is None else {*kind.needs, *kind.may}
        fields = {
            name: value for name, value in line.items()
            if name not in _OWN
            and (known is None or (name in known and fits(FIELDS[name], value)))
        }  # fmt: skip
        return cls(
            name,
            host if isinstance(host, str) and fits(text(255), host) else "",
            rank if isinstance(rank, int) and fits(RANK, rank) else None,
            float(when) if isinstance(when, (int, float)) and fits(number, when) else 0.0,
            fields,
        )


def told_kind(data: Message) -> str | None:
    """The kind of what a rank told: its library names its own kinds, a program any event."""
    return str(data.get("event", "event")) if data.get("kind") == "event" else data.get("kind")


def believed(data: Any) -> bool:
    """Whether what a rank told is to be heard: a program may write to its pipe what it likes."""
    if not isinstance(data, dict) or not isinstance(data.get("event", ""), str):
        return False
    if not fits(free, data):
        return False
    name = told_kind(data)
    if not isinstance(name, str) or not fits(SMALL, name):
        return False
    kind = KINDS.get(name)
    if kind is None:
        return bool(data["kind"] == "event")
    return kind.by == "rank" and fits(kind.shape(), data)


def read_events(lines: Iterable[Message]) -> tuple[Event, ...]:
    """The events in lines of events.jsonl."""
    return tuple(event for event in map(Event.read, lines) if event is not None)


# host, folder of a shipped copy there, the folder here that it is a copy of
Home = tuple[str, str, str]


def homes(events: Iterable[Event]) -> list[Home]:
    """Where shipped copies of folders of the launching machine were."""
    copied = [(event.host, event["copy"], event["home"]) for event in events
              if event.kind == "copied"]  # fmt: skip
    return [one for one in copied if one[1] and one[2] and one[1].count("/") > 1][:10_000]


def at_home(homes: Sequence[Home], host: str, text: str) -> str:
    """The text with the user's own paths in place of those of shipped copies on the host."""
    for name, copy, home in homes:
        if name == host and copy in text:
            text = text.replace(copy, home)
    return text
