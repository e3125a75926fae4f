"""The events of a run: every kind with its fields.

Ranks send events to their agent, agents send them to the launcher, and the launcher adds its own.
Messages are validated by :data:`KINDS`, ``events.jsonl`` holds one event a line, and the screen,
``status``, ``explain`` and the report use the same :class:`Event`, from memory or from the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.spec.failure import format_location
from paceline.spec.schema import (
    MAX_INTEGER,
    MAX_LONG_TEXT,
    PROCESS,
    RANK,
    SHORT_TEXT,
    SIZE,
    Schema,
    address,
    any_json,
    boolean,
    choice,
    integer,
    list_of,
    matches,
    memory_bytes,
    number,
    optional,
    record,
    text,
)

Message = Mapping[str, Any]

MEMORY = optional(record({
    "kills": optional(integer(-MAX_INTEGER)),
    "limit": optional(record(bytes=SIZE, peak=optional(SIZE), group=text())),
    "kernel": list_of(text(), 100),
}))  # fmt: skip
STACK = list_of(text(), 1000)

# Parts of a step (see train/measure/pace.py), with the label that people read.
PART_NAMES = {
    "data": "waiting for data",
    "computing": "computing",
    "waiting": "waiting for slower ranks",
    "moving": "communication",
    "saving": "saving checkpoints",
    "other": "other",
}
PARTS = tuple(PART_NAMES)

# Schema by name of the field, with its unit. A field means the same in every kind of event.
FIELDS: dict[str, Schema] = {
    "address": address,
    "able": boolean,  # whether the training can go on without ranks that are lost
    "attempt": integer(),  # number of the start, from 0
    "batches": list_of(SHORT_TEXT, 16),  # checksums of a rank's first inputs, in hexadecimal
    "before": number,  # seconds of a step before the change
    "bytes": SIZE,  # of a file
    "bucket_bytes": SIZE,  # gradient bucket size; 0: DDP's default
    "backend": SHORT_TEXT,  # of torch.distributed
    "backends": list_of(SHORT_TEXT, 50),  # that torch was built with
    "calls": SIZE,  # collectives
    "cause": SHORT_TEXT,  # why a rank is slow: see train/measure/straggler.py
    "code": optional(integer(0, 255)),  # exit status; null after a signal
    "copy": text(),  # folder on the host
    "count": SIZE,  # processes
    "cuda": optional(SHORT_TEXT),  # version that torch was built for
    "device": SHORT_TEXT,
    "do": choice("stop", "save", "stacks"),
    "epoch": number,
    "epochs": optional(number),
    "error": text(MAX_LONG_TEXT),
    "exchanges": boolean,  # whether it exchanges gradients, or may do so unseen
    "executable": text(),  # path of the interpreter
    "exit_code": integer(),
    "first": SIZE,  # number of the first tensor of ``sums``
    "first_bytes": SIZE,  # of the bucket that is sent first
    "folder": text(),  # on the rank's node
    "generation": integer(),  # number of the group of ranks in an attempt, from 0
    "frozen": boolean,  # a signal had stopped it
    "group_rank": SIZE,  # of a process in the group in which it has trained
    "group_size": SIZE,  # ranks of that group; 0 if it is not known
    "home": text(),  # folder on the launching machine that ``copy`` is a copy of
    "hooked": boolean,  # the script shows its exceptions itself
    "hosts": list_of(text(255)),
    "how": SHORT_TEXT,  # why a rank is stuck: see agent/supervision/stalls.py
    "in_children": boolean,  # its child processes have done most of the work
    "its_host": text(255),  # host of the rank that the event concerns
    "largest_call": SIZE,  # elements of the largest tensor in a collective
    "late": boolean,  # while the job runs; otherwise the event begins a start
    "megabytes": number,  # 10**6 bytes
    "memory": MEMORY,  # what the OOM killer left: see agent/supervision/oom.py
    "members": list_of(RANK),  # of a generation, in the order of their ranks in it
    "message": text(MAX_LONG_TEXT),  # of the exception
    "moving_s": number,  # seconds of a step in which gradients are sent
    "nccl": SHORT_TEXT,  # version
    "on": text(),  # what it waits for
    "optimizer_steps": SIZE,  # before the first exchange of gradients
    "origin": optional(RANK),  # the rank with the cause of what all raise
    "parameters": SIZE,  # of the model
    "part": number,  # of the time of a step
    "parts": record(dict.fromkeys(PARTS, number)),  # of the time of the steps
    "peak_bytes": SIZE,  # most memory that the rank had
    "phase": SHORT_TEXT,  # of the training: train, evaluate, …
    "pid": PROCESS,  # on its host
    "planned": boolean,  # the group changes because ranks join, not after a loss
    "problem": text(MAX_LONG_TEXT),
    "python": SHORT_TEXT,  # version
    "rank": RANK,
    # of each rank: seconds of a step in each of PARTS
    "ranks_s": list_of(list_of(number, 20), 1 << 20),
    "rates": list_of(number, 1 << 20),  # of each rank: its own samples a second
    "reason": SHORT_TEXT,  # one word, for the launcher
    "replica": SIZE,  # number of a DistributedDataParallel of the script
    "resumed": boolean,  # the training continues an earlier one
    "run_id": SHORT_TEXT,  # of the start
    "samples": SIZE,  # over all ranks
    "saved": integer(),  # step of the newest complete checkpoint; 0: none
    "seconds": number,
    # its state when another rank failed or it crashed: innermost frame first; last collectives
    "seen": record({"calls": list_of(text(), 100)}, state=SHORT_TEXT, stack=STACK),
    "sha256": SHORT_TEXT,  # of a file, in hexadecimal
    "shares": list_of(SIZE),  # samples of each rank
    "signal": optional(integer(1, 128)),  # its number; null after an exit
    "source": text(),  # of what was resumed
    "split": SHORT_TEXT,  # of the data: train, test, …
    "status": integer(-1000, 1000),  # as Python's subprocess gives it: -9 after signal 9
    "stall_s": number,  # seconds of a step for which a rank waits for gradients
    "stderr": text(MAX_LONG_TEXT),  # the end of what ssh and the agent wrote
    "step": optional(integer()),  # global step
    "keep": integer(),  # checkpoints kept besides the best; 0: all
    "steps": optional(integer()),  # of the whole training
    "straggler": RANK,  # a rank that the others wait for
    "stream": choice("out", "err"),
    "sums": list_of(record(name=text(255), value=SHORT_TEXT), 100),  # checksum of each parameter
    "text": text(MAX_LONG_TEXT),
    "time": number,  # seconds of the sender's monotonic clock; in the file see Event
    "to_launcher": boolean,  # the connection between a node and its launcher
    "torch": SHORT_TEXT,  # version
    "traceback": text(MAX_LONG_TEXT),
    "tried": SIZE,  # settings tried
    "trouble": text(MAX_LONG_TEXT),  # the protocol violation
    "type": text(),  # of the exception
    "warning": text(MAX_LONG_TEXT),
    "why": text(MAX_LONG_TEXT),
    "words": text(MAX_LONG_TEXT),  # the scheduler's message
    "world": SIZE,  # ranks
    "world_size": RANK,  # ranks
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event.

    Attributes:
        sender: Who sends it; a rank cannot send events of agents or the launcher.
        required, optional: Names of its fields.
        is_recorded: Whether it is written to events.jsonl.
    """

    sender: Literal["rank", "agent", "launcher"]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_recorded: bool = True

    def shape(self) -> Schema:
        """The schema of its messages."""
        may = {name: FIELDS[name] for name in self.optional}
        return record(may, **{name: FIELDS[name] for name in self.required})


def _kind(sender: Literal["rank", "agent", "launcher"], required: str = "", optional: str = "",
          is_recorded: bool = True) -> Kind:  # fmt: skip
    return Kind(sender, tuple(required.split()), tuple(optional.split()), is_recorded)


KINDS: dict[str, Kind] = {
    # sent by a program in a rank through the pipe to its agent; it may send other kinds, too
    "joining": _kind("rank", is_recorded=False),  # a process group, and waits for the others
    "world joined": _kind("rank", optional="world_size backend"),
    "world left": _kind("rank"),
    "joined": _kind("rank", optional="world device backend"),
    "prepared": _kind("rank", optional="parameters"),
    "resumed": _kind("rank", optional="step source"),
    "communication": _kind("rank", optional="step text"),  # another method is used, or would help
    "keeps checkpoints": _kind("rank", optional="keep"),  # and makes one on request
    "saving": _kind("rank", optional="step"),  # the requested checkpoint; by rank 0
    "checkpoint": _kind("rank", optional="step megabytes seconds"),
    "checkpoint copied": _kind("rank", optional="step megabytes seconds hosts"),
    "checkpoint copy failed": _kind("rank", optional="step problem warning"),
    "checkpoint failed": _kind("rank", optional="step problem warning"),
    "checkpoint skipped": _kind("rank", optional="warning"),
    # the overlap of the exchange of gradients with computing
    "overlap settled": _kind("rank", optional="step bucket_bytes first_bytes seconds before tried"),
    "stopped": _kind("rank", optional="step why saved"),  # on request
    "straggler": _kind("rank", optional="straggler its_host cause seconds part text"),  # by rank 0
    "straggler over": _kind("rank", optional="straggler its_host text"),
    "trained": _kind("rank", optional="steps samples seconds parts straggler its_host cause"),
    "stopped early": _kind("rank", optional="step why"),
    "model saved": _kind("rank", optional="step sha256 folder"),
    "model kept elsewhere": _kind("rank", optional="folder"),
    "shares": _kind("rank", optional="step shares why"),  # of the global batch, from that step on
    # sent at the end of a rank, children included
    "gradient exchange": _kind(
        "rank",
        optional="optimizer_steps calls largest_call group_rank group_size exchanges in_children",
    ),
    "replica timings": _kind(
        "rank", "replica step members bytes seconds moving_s stall_s", is_recorded=False
    ),
    "replica inputs": _kind("rank", "replica members batches", is_recorded=False),
    "same order": _kind("rank", is_recorded=False),  # of samples, in several epochs
    "replica checksums": _kind(
        "rank", "replica step members first sums", optional="exchanges", is_recorded=False
    ),
    "slow rank": _kind("rank", optional="warning"),
    "warning": _kind("rank", optional="warning"),
    "failed": _kind("rank", optional="error"),
    "stranger": _kind("rank", "address time"),  # its group has a connection to that address
    "stranger refused": _kind("rank", "address", optional="time"),  # no host of the job
    "exception": _kind("rank", "type message traceback time", "hooked origin code"),
    "returned": _kind("rank", "bytes sha256"),  # a function returned; the value is in its file
    "raised": _kind("rank", "bytes sha256"),  # a function raised; the exception is in its file
    "recoverable": _kind("rank", "able", optional="why"),  # before its first step
    "interrupted": _kind("rank", optional="step error generation"),  # waits for the launcher
    "arrived": _kind("rank", "generation"),  # it has left the former group and waits for others
    "gathered": _kind("rank", "generation"),  # a new group is complete and connects
    "door closed": _kind("rank", "why"),  # nobody can join any more
    "session closed": _kind("rank"),  # the training is over on this rank; its script may continue
    "newcomer ready": _kind("rank"),  # to join the others
    "stuck": _kind("rank", "seconds", optional="step"),  # in a collective
    "regrouped": _kind("rank", "generation", optional="step seconds"),  # it trains in the new group
    "begin": _kind("rank", optional="resumed", is_recorded=False),
    "heartbeat": _kind("rank", optional="step phase", is_recorded=False),
    "metrics": _kind("rank", optional="step split", is_recorded=False),  # to metrics.jsonl
    "progress": _kind("rank", optional="step steps epoch epochs", is_recorded=False),
    "pace": _kind("rank", "ranks_s rates", "step", is_recorded=False),  # by rank 0, periodically
    "say": _kind("rank", "text", is_recorded=False),  # to the rank's log
    # sent by an agent
    "imported": _kind("agent", "seconds python executable", "torch cuda nccl backends"),
    "import failed": _kind("agent", "error traceback", is_recorded=False),
    "fork server died": _kind("agent", "status time", "memory frozen", is_recorded=False),
    "rank started": _kind("agent", "rank pid"),
    "output": _kind("agent", "rank stream", is_recorded=False),  # to the rank's log; with bytes
    "rank ended": _kind("agent", "rank code signal time peak_bytes", "memory seen"),
    "stranger at the store": _kind("agent", "address"),  # refused
    "stranger at the tunnels": _kind("agent", "address"),  # refused, with --encrypt
    # bytes between its host and the address were changed: with --encrypt, or to the launcher
    "connection altered": _kind("agent", "address", optional="to_launcher"),
    "store ended": _kind("agent", "time", is_recorded=False),  # unexpectedly
    "rank frozen": _kind("agent", "rank how seconds on pid"),
    "rank thawed": _kind("agent", "rank"),
    "leftovers killed": _kind("agent", "count"),
    "node ended": _kind("agent", "time", is_recorded=False),  # all its ranks have
    "asked to end": _kind("agent", "time", is_recorded=False),  # by SIGTERM
    "leaving": _kind("agent", "reason why time", is_recorded=False),
    # recorded by the launcher
    # where output of a rank's start begins in its file, unless at byte 0; recorded before the start
    "log begins": _kind("launcher", "bytes"),
    "debug log begins": _kind("launcher", "bytes"),
    "connected": _kind("launcher", "hosts", optional="late run_id"),
    "copied": _kind("launcher", "copy home"),
    "started": _kind("launcher", "attempt world_size"),
    "ended": _kind("launcher", "attempt exit_code seconds"),
    "connection ended": _kind("launcher", "stderr trouble", is_recorded=False),
    "connection restored": _kind("launcher", "seconds"),  # after a break, or a silence
    "lost": _kind("launcher", "why"),
    "regroup": _kind("launcher", "generation members planned"),
    "newcomer late": _kind("launcher", "text why"),  # does not join
    "newcomer lost": _kind("launcher", "why"),  # before it had joined
    "recovery": _kind("launcher", "text", optional="seconds"),  # as on the screen
    "scheduler": _kind("launcher", "words"),
    "measured": _kind("launcher", "text"),  # of a script's DistributedDataParallel
    "replicas differ": _kind("launcher", "text"),  # of a script's DistributedDataParallel
    "asked": _kind("launcher", "do", optional="text"),  # by a person: see launch/control.py
    "hang": _kind("launcher", "text"),
    "hang over": _kind("launcher", "seconds"),
}
_COMMON_KEYS = {"event", "host", "rank", "time"}  # in every line
_FREE_KINDS = {"metrics", "progress"}  # besides a program's own: values under any names
MAX_OTHERS_BYTES = 16 << 10  # in memory, of further fields of a known kind
_IN_RESULT = {"hooked", "origin", "traceback"}  # only in result.json, for the first failure


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        kind: One of :data:`KINDS`, or a name of the program's own.
        host: Host name; empty for the whole job.
        rank: Rank; ``None`` for the node or the job.
        time: While the job runs, seconds of the launcher's monotonic clock, corrected for the
            node's (0: now); from the file, seconds since 1970 at the launcher.
        fields: Other fields: see :data:`FIELDS`. ``event[name]`` is ``None`` for a missing one.
        blob: Bytes that came with the message.
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
        return format_location(self.host, self.rank)

    @property
    def resumable(self) -> bool:
        """Whether it reports a training that stopped and can be resumed."""
        return self.kind == "stopped" and self["saved"] != 0

    @property
    def recorded_fields(self) -> Mapping[str, Any] | None:
        """The fields for events.jsonl; ``None`` if the event is not recorded."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return self.fields
        if not kind.is_recorded:
            return None
        omitted = _IN_RESULT | {"time"}
        return {name: value for name, value in self.fields.items() if name not in omitted}

    @classmethod
    def from_message(cls, host: str, message: Message, blob: bytes = b"") -> Event:
        """Builds an event from an agent's validated message."""
        is_report = message["event"] == "said"  # by a rank, passed on
        data = message["data"] if is_report else message
        kind = str(reported_kind(data) if is_report else message["event"])
        is_timed = kind in KINDS and "time" in KINDS[kind].required
        # the launcher writes the other common keys, also if a hostile rank sends values for them
        omitted = {"kind"} if kind in _FREE_KINDS else {"kind", *_COMMON_KEYS}
        fields = {name: value for name, value in data.items() if name not in omitted}
        if (allowed := allowed_fields(kind)) is not None and kind not in _FREE_KINDS:
            known = {name: value for name, value in fields.items() if name in allowed}
            unexpected = {name: value for name, value in fields.items() if name not in allowed}
            if memory_bytes(unexpected, MAX_OTHERS_BYTES) > MAX_OTHERS_BYTES:
                fields = known
        time = float(data["time"]) if is_timed else 0.0
        return cls(kind, host, message.get("rank"), time, fields, blob)

    @classmethod
    def read(cls, line: Message) -> Event | None:
        """Builds an event from a line of events.jsonl, without its invalid fields."""
        name, host, rank, time = (line.get(key) for key in ("event", "host", "rank", "time"))
        if not isinstance(name, str):
            return None
        allowed = allowed_fields(name)
        fields = {
            name: value for name, value in line.items()
            if name not in _COMMON_KEYS
            and (allowed is None or (name in allowed and matches(FIELDS[name], value)))
        }  # fmt: skip
        return cls(
            name,
            host if isinstance(host, str) and matches(text(255), host) else "",
            rank if isinstance(rank, int) and matches(RANK, rank) else None,
            float(time) if isinstance(time, (int, float)) and matches(number, time) else 0.0,
            fields,
        )


def allowed_fields(kind: str) -> set[str] | None:
    """The names of the fields of a kind; ``None`` for a program's own, which has any."""
    known = KINDS.get(kind)
    return None if known is None else {*known.required, *known.optional}


def reported_kind(data: Message) -> str | None:
    """The kind of a rank's report: Paceline's library names a kind, a program any event."""
    return str(data.get("event", "event")) if data.get("kind") == "event" else data.get("kind")


def is_valid_report(data: Any) -> bool:
    """Whether a rank's report is accepted: a program may write anything to its pipe."""
    if not isinstance(data, dict) or not isinstance(data.get("event", ""), str):
        return False
    if not matches(any_json, data):
        return False
    name = reported_kind(data)
    if not isinstance(name, str) or not matches(SHORT_TEXT, name):
        return False
    kind = KINDS.get(name)
    if kind is None:
        return bool(data["kind"] == "event")
    return kind.sender == "rank" and matches(kind.shape(), data)


def read_events(lines: Iterable[Message]) -> tuple[Event, ...]:
    """The events in lines of events.jsonl."""
    return tuple(event for event in map(Event.read, lines) if event is not None)


def replica_difference(events: Iterable[Event]) -> str:
    """Which ranks trained different models in the last attempt; empty if none are known to."""
    text = ""
    for event in events:
        if event.kind == "started":
            text = ""
        elif event.kind == "replicas differ":
            text = str(event["text"] or "")
    return text


def events_of_start(events: tuple[Event, ...], run_id: str) -> tuple[Event, ...]:
    """The events of one of several starts in a run directory.

    Args:
        run_id: Of the start. If no event has it, which is so with those of earlier versions, the
            last start is returned.
    """
    run_ids = [(number, event["run_id"]) for number, event in enumerate(events)
               if event.kind == "connected" and event["run_id"]]  # fmt: skip
    begin = next((number for number, value in run_ids if value == run_id), None)
    if begin is not None:
        later = (number for number, value in run_ids if number > begin and value != run_id)
        return events[begin : next(later, None)]
    first_attempts = [number for number, event in enumerate(events)
                      if event.kind == "started" and not event["attempt"]]  # fmt: skip
    begin = max(first_attempts, default=0)
    while begin and events[begin].kind != "connected":
        begin -= 1
    return events[begin:] if len(first_attempts) > 1 else events


def last_attempt(events: Sequence[Event]) -> Sequence[Event]:
    """The events from the first start of a rank in the last attempt on.

    A rank may start, and even end, before all hosts have begun and ``started`` is recorded.
    """
    begin, is_over, is_started = 0, False, False
    for index, event in enumerate(events):
        if event.kind == "ended":
            is_over = True
        elif event.kind in ("started", "rank started"):
            # the end of an attempt may be in the part of a huge file that is not read
            if is_over or (is_started and event.kind == "started"):
                begin, is_over, is_started = index, False, False
            is_started = is_started or event.kind == "started"
    return events[begin:]


def log_offsets(events: Iterable[Event],
                kind: str = "log begins") -> dict[tuple[str, int | None], int]:  # fmt: skip
    """Bytes in each log before the output of its rank's last start, by host and rank.

    Args:
        kind: ``debug log begins`` for the logs of the ranks' libraries.
    """
    offsets: dict[tuple[str, int | None], int] = {}
    pending: dict[tuple[str, int | None], int] = {}
    for event in events:
        where = event.host, event.rank
        if event.kind == kind:
            pending[where] = offsets[where] = event["bytes"] or 0
        elif event.kind == "rank started":  # the log may have been removed since an earlier start
            offsets[where] = pending.pop(where, 0)
    return offsets


# host, folder of a shipped copy there, the launching machine's folder that it is a copy of
ShippedCopy = tuple[str, str, str]


def shipped_copies(events: Iterable[Event]) -> list[ShippedCopy]:
    """Lists the copies of the launching machine's folders on hosts."""
    copied = ((event.host, event["copy"], event["home"]) for event in events
              if event.kind == "copied")  # fmt: skip
    # a folder right below the root would match too much text
    return [entry for entry in copied if all(entry[1:]) and entry[1].count("/") > 1][:10_000]


def restore_local_paths(copies: Sequence[ShippedCopy], host: str, text: str) -> str:
    """Replaces the paths of a host's shipped copies in a text by the user's own paths."""
    for name, copy, source in copies:
        if name == host and copy in text:
            text = text.replace(copy, source)
    return text
