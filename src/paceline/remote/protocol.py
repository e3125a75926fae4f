"""What an agent may say: one schema, held against every message before anything else sees it.

No node is believed. An answer must be what was asked for, an event must be of what runs there, and
all of it must have the shape that an agent of this version gives it. Anything else is
:class:`Untrue`, and the node fails for it, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.agent.inside import parts_of
from paceline.agent.reconnection import MARK
from paceline.spec.events import KINDS, STACK, believed
from paceline.spec.shapes import (
    LARGEST,
    LONG_TEXT,
    PROCESS,
    RANK,
    SIZE,
    SMALL,
    Shape,
    Untrue,
    address,
    each,
    flag,
    form,
    free,
    maybe,
    number,
    one_of,
    record,
    refuse,
    row,
    shown,
    table,
    text,
    whole,
)

Message = dict[str, Any]
Fields = Mapping[str, Any]

BOOT = MARK
MOST_BANNER = 4 << 20  # bytes of what a login prints before the agent speaks
MOST_WORDS = 4096


def path_inside(value: Any, where: str) -> None:
    """A relative path that stays below its folder."""
    text()(value, where)
    try:
        parts_of(value)
    except ValueError:
        refuse(where, value, "a path inside the folder")


def anything(value: Any, where: str) -> None:
    """What is looked at elsewhere."""


# --- words --------------------------------------------------------------------------------------

PORT = whole(1, 65535)
WHOLE_TEXT = form("[0-9]{1,8}", "a number")
SHA256 = form("[0-9a-f]{64}", "a SHA-256")
IDENTITY = form("[0-9a-f]{32}", "an identity")
HOLDERS = each(row(PROCESS, text(LONG_TEXT)), 1000)

_ADDRESS = record(interface=SMALL, address=address, prefix=whole(0, 128), family=one_of(4, 6),
                  scope=SMALL, usable=flag)  # fmt: skip
_LINK = record(name=SMALL, kind=SMALL, state=SMALL, mtu=whole(0, 1 << 31),
               speed=whole(-LARGEST), addresses=each(_ADDRESS, 10_000))  # fmt: skip
_DISK = record({"total": SIZE, "free": SIZE, "writable": flag, "noexec": flag}, path=text())
_PYTHON = record(executable=maybe(text()), version=SMALL)
_TORCH = record({"cuda": maybe(SMALL), "hip": maybe(SMALL)}, version=maybe(SMALL))
_NAME = record(hostname=SMALL, resolves_to=maybe(each(address, 1000)),
               hosts_lines=each(text(), 10_000))  # fmt: skip
_CPUS = each(whole(0, 1 << 20), 1 << 16)
_CPU = record(available=_CPUS, cores=each(_CPUS, 1 << 16), nodes=table(_CPUS, WHOLE_TEXT, 1 << 12),
              quota=maybe(number), model=text(), machine=SMALL)  # fmt: skip
_GPU = record(maker=one_of("nvidia", "amd", "intel"), device=SMALL, pci=SMALL, node=whole(-1))
_DEVICES = record(gpus=each(_GPU, 1000), nvidia_driver=maybe(SMALL))
_PORT_OF_CARD = record(name=SMALL, port=whole(0, 1 << 16), active=flag, speed=whole(-1),
                       interfaces=each(SMALL, 1000))  # fmt: skip
_LIMITS = record(nofile=whole(-1), nofile_hard=whole(-1), memlock=whole(-1, 1 << 64), shm=SIZE)

# facts that nothing works without; of the others a node may have none, and says so
_FACTS = record(
    torch=maybe(_TORCH),
    interfaces=maybe(each(_LINK, 10_000)),
    cpu=maybe(_CPU),
    memory=maybe(record(total=SIZE, available=SIZE)),
    devices=maybe(_DEVICES),
    rdma=maybe(each(_PORT_OF_CARD, 1000)),
    limits=maybe(_LIMITS),
    environment=maybe(table(text(LONG_TEXT), SMALL, 10_000)),
    disks=maybe(table(_DISK, SMALL, 100)),
    kernel=maybe(SMALL),
    boot_id=maybe(SMALL),
    errors=table(text(LONG_TEXT), SMALL, 100),
    python=_PYTHON,
    name=_NAME,
    ephemeral_ports=row(whole(0, 65535), whole(0, 65535)),
    clock=record(time=number, monotonic=number),
    user=record({"shell": maybe(text()), "cache": text()}, uid=whole(), home=text()),
)

# --- events -------------------------------------------------------------------------------------

EVENTS: dict[str, Shape] = {
    "hello": record(pid=PROCESS, identity=IDENTITY, chosen_python=text(), facts=_FACTS),
    "said": record(rank=RANK, data=anything),  # by a program in a rank: see events.believed
    **{name: kind.shape() for name, kind in KINDS.items() if kind.by == "agent"},
}


# --- answers ------------------------------------------------------------------------------------

_DONE = record()
_NONE: dict[str, Shape] = {}
_DOES: dict[str, Shape] = {
    "pid": PROCESS, "stack": STACK, "call": SMALL, "on": text(), "readers": each(PROCESS, 10_000)
}  # fmt: skip
_FILE = record(path=path_inside, size=SIZE)
_LOOKED = record(path=text(), exists=flag, file=flag, executable=flag)
_TRIED = record({"local_address": address, "rtt": number, "reached": form("[0-9a-f]{0,64}", "hex"),
                 "errno": whole(0, 1 << 16), "error": text()},
                host=text(), address=address, port=PORT, ok=flag)  # fmt: skip
_OUTPUT = text(LONG_TEXT)
RUN_ID = form("[0-9a-f]{6,64}", "the id of a run")
_LEFT = record(run_id=RUN_ID, about=_OUTPUT, alive=maybe(flag), result=_OUTPUT, where=_OUTPUT,
               metrics=_OUTPUT)  # fmt: skip
_CHANGED = record(path=path_inside, mark=SMALL, size=SIZE)

ANSWERS: dict[str, Shape] = {
    "lease": record({"quiet_s": maybe(number)}, monotonic=number, time=number),
    "prepare": _DONE,
    "listen": record(ports=table(PORT, address), errors=table(text(), address)),
    "stop_listening": _DONE,
    "connect": record(results=each(_TRIED)),
    "reserve_port": record(port=PORT),
    "start": _DONE,
    "add_ranks": _DONE,
    "tell_ranks": _DONE,
    "kill_ranks": record(killed=SIZE),
    "open_store": record(port=PORT),
    "admit": _DONE,
    "dump_stacks": _DONE,
    "seen": record(ranks=each(
        record(_NONE, rank=RANK, cpu_s=number, moved=number, sent=number, switches=SIZE,
               state=SMALL, calls=each(text(), 100),
               children=each(record(_NONE, name=SMALL, **_DOES), 100), **_DOES)
    )),
    "stop": _DONE,
    "kill": record(killed=SIZE),
    "compare_tree": record(exists=flag, missing=each(text()), different=each(text())),
    "lacking_blobs": record(hashes=each(SHA256)),
    "put_blob": _DONE,
    "put_blobs": _DONE,
    "put_file": _DONE,
    "place": _DONE,
    "build_tree": record(root=text(), damaged=each(SHA256)),
    "run_folder": record(shared=flag, folder=text()),
    "discard_run_folder": _DONE,
    "keep_folder": _DONE,
    "look": record(paths=each(_LOOKED)),
    "which": record(path=maybe(text())),
    "disk": record(disks=each(_DISK)),
    "list_results": record(files=each(_FILE)),
    "read_block": record({"sha256": SHA256}),
    "detached_runs": record(runs=each(_LEFT, 200)),
    "run_changes": record(about=_OUTPUT, alive=maybe(flag), root=text(), files=each(_CHANGED),
                          gone=each(path_inside)),
    "read_part": _DONE,
    "ask_run": record(answer=maybe(_OUTPUT)),
    "signal_run": record(sent=flag),
    "discard_run": record(gone=flag),
    "data_folder": record(marks=each(SMALL, 1001), folder=text(), sign=text(),
                          free=SIZE),
    "list_data": record(files=each(row(path_inside, SIZE, whole(-LARGEST)), 2000), last=flag),
    "hash_data": record(hashes=each(form("([0-9a-f]{64})?", "a SHA-256"), 200)),
    "settle_data": _DONE,
    "put_data_files": _DONE,
    "have_data": record(size=SIZE, sha256=SHA256),
    "put_data": _DONE,
    "job_processes": record(pids=each(PROCESS)),
    "stay": record(place=form("paceline-[0-9a-f]{32}", "a place to connect to again")),
    "rest": _DONE,
    "bye": _DONE,
    "clock": record(time=number, monotonic=number),
    "resolve": record(names=table(maybe(each(address, 1000)))),
    "open_ports": record(opened=each(PORT), taken=table(
        record({"holders": HOLDERS}, error=maybe(text()))
    )),
    "half_open": record(peers=each(row(PORT, address)), rejects=each(address)),
    "sink": record(port=PORT),
    "transfer": record({"pmtu": whole(), "rtt": number, "retransmitted": whole(),
                        "segments": whole()}, bytes=SIZE, seconds=number, sent=SIZE),
    "counters": record(bytes=table(row(SIZE, SIZE))),
    "leave_token": record({"step": SMALL, "why": maybe(text()), "errno": maybe(whole())}, ok=flag),
    "see_tokens": record(exists=flag, seen=table(text(LONG_TEXT)), type=SMALL),
    "take_token": _DONE,
    "digest_tree": record({"files": SIZE, "bytes": SIZE, "digest": SHA256}, exists=flag),
    "token_processes": record(processes=each(
        record({"warm": flag}, pid=PROCESS, run=text(), owned=flag, age=number, command=text())
    )),
    "execute": record(code=whole(-1000, 1000), output=_OUTPUT),
    "gpus": record({"missing": flag, "broken": _OUTPUT, "gpus": _OUTPUT, "apps": _OUTPUT}),
    "unanswered": record(connections=each(row(address, SIZE, SIZE), 100)),
    "hear": record(port=PORT),
    "vitals": record(time=number, cpu=row(SIZE, SIZE), memory=row(SIZE, SIZE),
                     links=table(row(SIZE, SIZE), SMALL, 1000), gpus=each(number, 1000)),
    "packages": record(packages=table(SMALL, text())),
    "mpi": record(mpi=record(mpiexec=text(), setvars=text(), libfabric=text(),
                             missing_folders=table(text(), SMALL))),
}  # fmt: skip
_REFUSAL = record({"holders": HOLDERS, "activating": flag}, error=text(LONG_TEXT))


def _among(found: Sequence[str], asked: Sequence[str] | set[str], what: str) -> None:
    """Each once, and none that was not asked for."""
    if len(set(found)) != len(found):
        raise Untrue(f"{what} twice")
    if foreign := set(found) - set(asked):
        raise Untrue(f"{what} that nobody asked for: {shown(min(foreign))}")


def _about_tree(fields: Fields, answer: Message) -> None:
    paths = {entry[0] for entry in fields["manifest"]}
    _among([*answer["missing"], *answer["different"]], paths, "a path")


def _about_blobs(fields: Fields, answer: Message) -> None:
    hashes = {entry[1] for entry in fields["manifest"]}
    _among(sorted({*answer.get("hashes", ()), *answer.get("damaged", ())}), hashes, "a hash")
    if "root" in answer and not answer["root"].endswith(
        f"/jobs/{fields['folder']}/{fields['name']}"
    ):
        refuse("the folder of a tree", answer["root"], "one of the job's folder")


def _about_run_folder(fields: Fields, answer: Message) -> None:
    folder = answer["folder"]
    own = folder.startswith("/") and folder.endswith(f"/paceline/runs/{fields['key']}")
    if not (folder == fields["path"] if answer["shared"] else own):
        refuse("the run's folder", folder, "the run directory or one under its key")


def _about_results(fields: Fields, answer: Message) -> None:
    if len({file["path"] for file in answer["files"]}) != len(answer["files"]):
        raise Untrue("a file twice")


def _about_looks(fields: Fields, answer: Message) -> None:
    if [one["path"] for one in answer["paths"]] != fields["paths"]:
        raise Untrue("other paths than were asked for")


def _about_tries(fields: Fields, answer: Message) -> None:
    key = lambda one: (one["host"], one["address"], one["port"])  # noqa: E731
    tried, asked = map(key, answer["results"]), set(map(key, fields["targets"]))
    if foreign := set(tried) - asked:
        raise Untrue(f"a connection that nobody asked for: {foreign.pop()}")


def _about_listeners(fields: Fields, answer: Message) -> None:
    _among([*answer["ports"]], fields["addresses"], "an address")


def _about_disks(fields: Fields, answer: Message) -> None:
    if len(answer["disks"]) != len(fields["paths"]):
        raise Untrue("other disks than were asked for")


def _about_names(fields: Fields, answer: Message) -> None:
    _among([*answer["names"]], fields["names"], "a name")


def _about_links(fields: Fields, answer: Message) -> None:
    _among([*answer["links"]], fields["interfaces"], "an interface")


def _about_ports(fields: Fields, answer: Message) -> None:
    ports = {str(port) for port in fields["ports"]}
    _among([*map(str, answer["opened"]), *answer["taken"]], ports, "a port")


def _about_tokens(fields: Fields, answer: Message) -> None:
    _among([*answer["seen"]], fields["names"], "a file")


def _about_block(fields: Fields, answer: Message) -> None:
    if fields["last"] != ("sha256" in answer):
        raise Untrue("the hash of a file belongs to its last block")


def _about_data(fields: Fields, answer: Message) -> None:
    place = f"/data/{fields['key']}/"
    if not answer["folder"].endswith(f"{place}files/{fields['name']}"):
        refuse("the folder of data", answer["folder"], "one under its key")
    if place not in answer["sign"]:
        refuse("the sign of a node", answer["sign"], "one under the key")


def _about_hashes(fields: Fields, answer: Message) -> None:
    if len(answer["hashes"]) != len(fields["paths"]):
        raise Untrue("hashes of other files than were asked for")


def _about_changes(fields: Fields, answer: Message) -> None:
    _about_results(fields, answer)
    if {file["path"] for file in answer["files"]} & set(answer["gone"]):
        raise Untrue("a file that is new and gone")


def _about_runs(_: Fields, answer: Message) -> None:
    if len({one["run_id"] for one in answer["runs"]}) != len(answer["runs"]):
        raise Untrue("a run twice")


WITH_BYTES = ("read_block", "read_part")  # as many as were asked for

# what an answer must have to do with its request
RELATIONS: dict[str, Callable[[Fields, Message], None]] = {
    "compare_tree": _about_tree,
    "lacking_blobs": _about_blobs,
    "build_tree": _about_blobs,
    "run_folder": _about_run_folder,
    "list_results": _about_results,
    "look": _about_looks,
    "connect": _about_tries,
    "listen": _about_listeners,
    "disk": _about_disks,
    "resolve": _about_names,
    "open_ports": _about_ports,
    "vitals": _about_links,
    "see_tokens": _about_tokens,
    "read_block": _about_block,
    "run_changes": _about_changes,
    "detached_runs": _about_runs,
    "data_folder": _about_data,
    "hash_data": _about_hashes,
}


# --- a conversation -----------------------------------------------------------------------------


class Conversation:
    """What one agent was asked, and so what it may say."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[str, Fields, frozenset[int]]] = {}
        self._ranks: frozenset[int] = frozenset()
        self._greeted = False

    def ask(self, number: int, op: str, fields: Fields) -> None:
        """A request goes out."""
        self._asked[number] = op, fields, self._ranks
        if op == "start":
            self._ranks = frozenset(rank["rank"] for rank in fields["ranks"])
        elif op == "add_ranks":
            self._ranks |= {rank["rank"] for rank in fields["ranks"]}

    def answer(self, message: Message, blob: bytes) -> int:
        """The number of the request that is answered. Untrue when none is, or not so."""
        whole(1)(message["re"], "the number of an answer")
        if message["re"] not in self._asked:
            raise Untrue("an answer to what nobody asked")
        op, fields, then = self._asked.pop(message["re"])
        wanted = fields["count"] if op in WITH_BYTES and "error" not in message else 0
        if len(blob) != wanted:
            raise Untrue(f"{len(blob)} bytes with the answer to {op} instead of {wanted}")
        where = f"the answer to {op}"
        if "error" in message:
            _REFUSAL(message, where)
        else:
            ANSWERS.get(op, free)(message, where)
            if op in RELATIONS:
                RELATIONS[op](fields, message)
            for one in message["ranks"] if op == "seen" else ():
                if one["rank"] not in then:  # the next start may have given it others meanwhile
                    self._own(one["rank"])
        return int(message["re"])

    def event(self, message: Message, blob: bytes) -> bool:
        """Whether an event is to be heard. Untrue for one that no agent sends."""
        kind = message.get("event")
        if not isinstance(kind, str) or kind not in EVENTS:
            raise Untrue(f"an event called {shown(kind)}")
        EVENTS[kind](message, f"the event {kind}")
        if blob and kind != "output":
            raise Untrue(f"{len(blob)} bytes with the event {kind}")
        if "rank" in message:
            self._own(message["rank"])
        if kind == "hello":
            if self._greeted:
                raise Untrue("hello twice")
            self._greeted = True
        elif not self._greeted and kind not in ("leaving", "asked to end"):
            raise Untrue(f"the event {kind} before hello")
        elif kind == "said":
            return believed(message.get("data"))
        return True

    def _own(self, rank: int) -> None:
        if rank not in self._ranks:
            raise Untrue(f"rank {rank}, which does not run there")


# --- before the first frame ---------------------------------------------------------------------

# words, and how many follow each: of a fresh command, and of one that meets a living agent
BOOT_WORDS = {"have": 0, "need": 0, "old": 2, "system": 1}
RECONNECTION_WORDS = {"meet": 1, "again": 2, "gone": 0, "stranger": 0}


def words_after_mark(line: bytes, known: Mapping[str, int]) -> list[str]:
    """What stands after the mark ``BOOT`` on a line: a word of ``known``, and what it is about."""
    words = line.decode(errors="replace").split()
    if not words or len(words) <= known.get(words[0], MOST_WORDS):
        raise Untrue(f"its first line is {shown(' '.join(words))}")
    return words
