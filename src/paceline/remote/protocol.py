"""Validates every message of an agent before anything else uses it.

Nodes are not trusted. An answer must fit its request, an event must concern ranks of that node, and
each must match the schema of this version. Anything else raises :class:`InvalidValue`, which ends
the connection to that node only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from paceline.agent.files.safe_paths import split_path
from paceline.agent.files.snapshot import MAX_RESULTS
from paceline.agent.frames import (
    MAX_ANSWER,
    MAX_ANSWER_BLOB,
    MAX_EVENT,
    MAX_HELLO,
    MAX_OUTPUT,
    Decoder,
)
from paceline.agent.reconnection import MARK
from paceline.spec.events import KINDS, STACK, is_valid_report
from paceline.spec.schema import (
    MAX_INTEGER,
    MAX_LONG_TEXT,
    PROCESS,
    RANK,
    SHORT_TEXT,
    SIZE,
    InvalidValue,
    Schema,
    address,
    any_json,
    boolean,
    choice,
    describe_value,
    dict_of,
    integer,
    list_of,
    memory_bytes,
    number,
    optional,
    record,
    regex,
    reject,
    text,
    tuple_of,
)

Message = dict[str, Any]
Fields = Mapping[str, Any]

BOOT = MARK
MAX_BANNER_BYTES = 4 << 20  # output of a login before the agent starts
MAX_FIELDS = 4096
MAX_EVENT_BYTES = 8 << 20  # in memory


def make_decoder(noise: bytes = b"", is_greeted: bool = True) -> Decoder:
    """A decoder for an agent's frames, with the noise of an earlier link.

    ``is_greeted``: the agent has sent its hello, which may be longer than other events.
    """
    max_json, max_event = (MAX_ANSWER, MAX_EVENT) if is_greeted else (MAX_HELLO, MAX_HELLO)
    decoder = Decoder(max_json, MAX_ANSWER_BLOB, max_event)
    decoder.add_noise(noise)
    return decoder


def relative_path(value: Any, path: str) -> None:
    """A relative path that stays below its folder."""
    text()(value, path)
    try:
        split_path(value)
    except ValueError:
        reject(path, value, "a path inside the folder")


def unchecked(value: Any, path: str) -> None:
    """Accepts any value, which is validated later."""


# --- values -------------------------------------------------------------------------------------

PORT = integer(1, 65535)
INTEGER_TEXT = regex("[0-9]{1,8}", "a number")
SHA256 = regex("[0-9a-f]{64}", "a SHA-256")
IDENTITY = regex("[0-9a-f]{32}", "an identity")
FOLDER = regex("/[^\x00-\x1f\x7f-\x9f\u2028\u2029]*", "an absolute path of usual characters")

# commands that users are told to type contain these texts: without quotes, except for the paths
INTERFACE = regex(r"[^\s\x00-\x1f\x7f-\x9f!$`;&|<>()'\"\\]{0,256}", "the name of an interface")
_PATH = regex("[^\x00-\x1f\x7f-\x9f\u2028\u2029]*", "a path of usual characters")
_PYTHON_VERSION = regex(r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9A-Za-z.+-]{1,60})?", "a version of Python")
_VERSION = regex(r"[0-9A-Za-z][0-9A-Za-z_.+!~-]{0,99}", "a version")
_HOST_NAME = regex(r"\w[\w.+~@:-]{0,254}|\(none\)", "a host's name")
_NUMBERED_LINE = regex(r"[0-9]{1,9}: \S[^\n\r\x00]*", "a numbered line")
_VARIABLE = regex("[A-Z_]{1,64}", "the name of a variable")
HOLDERS = list_of(tuple_of(PROCESS, text(MAX_LONG_TEXT)), 1000)

_ADDRESS = record(interface=INTERFACE, address=address, prefix=integer(0, 128),
                  family=choice(4, 6), scope=SHORT_TEXT, usable=boolean)  # fmt: skip
_LINK = record(name=INTERFACE, kind=SHORT_TEXT, state=SHORT_TEXT, mtu=integer(0, 1 << 31),
               speed=integer(-MAX_INTEGER), addresses=list_of(_ADDRESS, 10_000))  # fmt: skip
_DISK = record({"total": SIZE, "free": SIZE, "writable": boolean, "noexec": boolean}, path=_PATH)
_PYTHON = record(executable=optional(_PATH), version=_PYTHON_VERSION)
_TORCH = record(
    {"cuda": optional(SHORT_TEXT), "hip": optional(SHORT_TEXT)}, version=optional(_VERSION)
)
_NAME = record(hostname=_HOST_NAME, resolves_to=optional(list_of(address, 1000)),
               hosts_lines=list_of(_NUMBERED_LINE, 10_000))  # fmt: skip
_CPUS = list_of(integer(0, 1 << 20), 1 << 16)
_CPU = record(available=_CPUS, cores=list_of(_CPUS, 1 << 16),
              nodes=dict_of(_CPUS, INTEGER_TEXT, 1 << 12), quota=optional(number), model=text(),
              machine=SHORT_TEXT)  # fmt: skip
_GPU = record(
    maker=choice("nvidia", "amd", "intel"), device=SHORT_TEXT, pci=SHORT_TEXT, node=integer(-1)
)
_DEVICES = record(gpus=list_of(_GPU, 1000), nvidia_driver=optional(SHORT_TEXT), gpudirect=boolean)
_GID = record(index=integer(0, 1 << 16), address=address)
_PORT_OF_CARD = record(name=regex(r"[\w.-]{1,64}", "a card's name"), port=integer(0, 1 << 16),
                       active=boolean, speed=integer(-1), interfaces=list_of(INTERFACE, 1000),
                       fabric=SHORT_TEXT, gids=list_of(_GID, 1000))  # fmt: skip
_LIMITS = record(
    nofile=integer(-1), nofile_hard=integer(-1), memlock=integer(-1, 1 << 64), shm=SIZE
)

# facts that may be missing are optional; the node then reports an error for them
_FACTS = record(
    torch=optional(_TORCH),
    interfaces=optional(list_of(_LINK, 10_000)),
    cpu=optional(_CPU),
    memory=optional(record(total=SIZE, available=SIZE)),
    devices=optional(_DEVICES),
    rdma=optional(list_of(_PORT_OF_CARD, 1000)),
    nccl_conf=optional(dict_of(text(MAX_LONG_TEXT), SHORT_TEXT, 1000)),
    limits=optional(_LIMITS),
    environment=optional(dict_of(text(MAX_LONG_TEXT), SHORT_TEXT, 10_000)),
    disks=optional(dict_of(_DISK, SHORT_TEXT, 100)),
    kernel=optional(SHORT_TEXT),
    boot_id=optional(SHORT_TEXT),
    errors=dict_of(text(MAX_LONG_TEXT), SHORT_TEXT, 100),
    python=_PYTHON,
    name=_NAME,
    ephemeral_ports=tuple_of(integer(0, 65535), integer(0, 65535)),
    clock=record(time=number, monotonic=number),
    user=record({"shell": optional(text()), "cache": _PATH}, uid=integer(), home=_PATH),
)

# --- events -------------------------------------------------------------------------------------

EVENTS: dict[str, Schema] = {
    "hello": record(pid=PROCESS, identity=IDENTITY, chosen_python=_PATH, facts=_FACTS),
    "said": record(rank=RANK, data=unchecked),  # by a program in a rank: see events.is_valid_report
    **{name: kind.shape() for name, kind in KINDS.items() if kind.sender == "agent"},
}


# --- answers ------------------------------------------------------------------------------------

_ACTIVITY: dict[str, Schema] = {
    "pid": PROCESS, "stack": STACK, "call": SHORT_TEXT, "on": text(),
    "readers": list_of(PROCESS, 10_000),
}  # fmt: skip
_FILE = record(path=relative_path, size=SIZE)
_WRITTEN_FILE = record(path=relative_path, size=SIZE, mtime_us=integer(), age_s=number,
                       state=choice("whole", "cut off", "unknown"))  # fmt: skip
_PATH_STATE = record(path=text(), exists=boolean, file=boolean, executable=boolean)
_PROBE = record({"local_address": address, "rtt": number, "reached": regex("[0-9a-f]{0,64}", "hex"),
                 "errno": integer(0, 1 << 16), "error": text()},
                host=text(), address=address, port=PORT, ok=boolean)  # fmt: skip
_OUTPUT = text(MAX_LONG_TEXT)
RUN_ID = regex("[0-9a-f]{6,64}", "the id of a run")
_DETACHED_RUN = record(run_id=RUN_ID, about=_OUTPUT, alive=optional(boolean), result=_OUTPUT,
                       where=_OUTPUT,
               metrics=_OUTPUT)  # fmt: skip
_CHANGED = record(path=relative_path, mark=SHORT_TEXT, size=SIZE)

_EMPTY_ANSWERS = (
    "prepare", "stop_listening", "start", "add_ranks", "tell_ranks", "admit", "dump_stacks",
    "stop", "put_blob", "put_blobs", "put_file", "place", "discard_run_folder", "keep_folder",
    "read_part", "settle_data", "put_data_files", "put_data", "rest", "bye", "take_token",
    "set_outputs_aside", "put_output", "discard_uncollected", "forget_outputs",
)  # fmt: skip
ANSWERS: dict[str, Schema] = {
    **dict.fromkeys(_EMPTY_ANSWERS, record()),
    "lease": record({"quiet_s": optional(number)}, monotonic=number, time=number),
    "listen": record(ports=dict_of(PORT, address), errors=dict_of(text(), address)),
    "connect": record(results=list_of(_PROBE)),
    "reserve_port": record(port=PORT),
    "kill_ranks": record(killed=SIZE),
    "open_store": record(port=PORT),
    "seen": record(ranks=list_of(
        record(None, rank=RANK, cpu_s=number, moved=number, sent=number, switches=SIZE,
               state=SHORT_TEXT, calls=list_of(text(), 100), unfinished=text(),
               children=list_of(record(None, name=SHORT_TEXT, **_ACTIVITY), 100), **_ACTIVITY)
    )),
    "kill": record(killed=SIZE),
    "compare_tree": record(exists=boolean, missing=list_of(text()), different=list_of(text())),
    "lacking_blobs": record(hashes=list_of(SHA256)),
    "build_tree": record(root=FOLDER, damaged=list_of(SHA256)),
    "run_folder": record(shared=boolean, folder=FOLDER),
    "look": record(paths=list_of(_PATH_STATE)),
    "which": record(path=optional(text())),
    "disk": record(disks=list_of(_DISK)),
    "list_results": record(files=list_of(_FILE, MAX_RESULTS)),
    "list_outputs": record(files=list_of(_WRITTEN_FILE, MAX_RESULTS), latest_us=integer()),
    "hash_beginning": record(sha256=SHA256),
    "read_block": record({"sha256": SHA256}),
    "detached_runs": record(runs=list_of(_DETACHED_RUN, 200)),
    "run_changes": record(about=_OUTPUT, alive=optional(boolean), root=FOLDER,
                          files=list_of(_CHANGED), gone=list_of(relative_path)),
    "ask_run": record(answer=optional(_OUTPUT)),
    "signal_run": record(sent=boolean),
    "discard_run": record(gone=boolean),
    "data_folder": record(marks=list_of(SHORT_TEXT, 1001), folder=FOLDER, sign=FOLDER,
                          free=SIZE),
    "list_data": record(files=list_of(tuple_of(relative_path, SIZE, integer(-MAX_INTEGER)), 2000),
                        last=boolean),
    "hash_data": record(hashes=list_of(regex("([0-9a-f]{64})?", "a SHA-256"), 200)),
    "have_data": record(size=SIZE, sha256=SHA256),
    "job_processes": record(pids=list_of(PROCESS)),
    "stay": record(place=regex("paceline-[0-9a-f]{32}", "a place to connect to again")),
    "clock": record(time=number, monotonic=number),
    "resolve": record(names=dict_of(optional(list_of(address, 1000)))),
    "open_ports": record(opened=list_of(PORT), taken=dict_of(
        record({"holders": HOLDERS}, error=optional(text()))
    )),
    "half_open": record(peers=list_of(tuple_of(PORT, address)), rejects=list_of(address)),
    "sink": record(port=PORT),
    "transfer": record({"pmtu": integer(), "rtt": number, "retransmitted": integer(),
                        "segments": integer()}, bytes=SIZE, seconds=number),
    "counters": record(bytes=dict_of(tuple_of(SIZE, SIZE), INTERFACE)),
    "leave_token": record({"step": SHORT_TEXT, "why": optional(text()),
                           "errno": optional(integer())}, ok=boolean),
    "see_tokens": record(exists=boolean, seen=dict_of(text(MAX_LONG_TEXT)), type=SHORT_TEXT),
    "digest_tree": record({"files": SIZE, "bytes": SIZE, "digest": SHA256}, exists=boolean),
    "token_processes": record(processes=list_of(
        record({"warm": boolean}, pid=PROCESS, run=text(), owned=boolean, age=number,
               command=text())
    )),
    "execute": record(code=integer(-1000, 1000), output=_OUTPUT),
    "gpus": record({"missing": boolean, "broken": _OUTPUT, "gpus": _OUTPUT, "apps": _OUTPUT}),
    "unanswered": record(connections=list_of(tuple_of(address, SIZE, SIZE), 100)),
    "hear": record(port=PORT),
    "vitals": record(time=number, cpu=tuple_of(SIZE, SIZE), memory=tuple_of(SIZE, SIZE),
                     links=dict_of(tuple_of(SIZE, SIZE), SHORT_TEXT, 1000),
                     gpus=list_of(number, 1000)),
    "packages": record(packages=dict_of(SHORT_TEXT, text())),
    "mpi": record(mpi=record(mpiexec=text(), setvars=text(), libfabric=text(),
                             missing_folders=dict_of(text(), _VARIABLE))),
}  # fmt: skip
_REFUSAL = record({"holders": HOLDERS, "activating": boolean}, error=text(MAX_LONG_TEXT))


PERIODIC_OPS = ("lease", "clock", "vitals", "counters")  # requested again and again


def _check_memory(message: Message, path: str) -> None:
    if memory_bytes(message, MAX_EVENT_BYTES) > MAX_EVENT_BYTES:
        raise InvalidValue(f"{path} takes more than {MAX_EVENT_BYTES >> 20} MiB in memory")


def _check_subset(
    received: Sequence[str], requested: Sequence[str] | set[str], subject: str
) -> None:
    """Raises InvalidValue for a duplicate, or for anything that was not requested."""
    if len(set(received)) != len(received):
        raise InvalidValue(f"{subject} twice")
    if foreign := set(received) - set(requested):
        raise InvalidValue(f"{subject} that nobody asked for: {describe_value(min(foreign))}")


Relation = Callable[[Fields, Message], None]  # checks an answer against its request


def _subset(received: str, requested: str, subject: str) -> Relation:
    """Entries of the answer are among those of the request."""
    return lambda fields, answer: _check_subset([*answer[received]], fields[requested], subject)


def _same_length(received: str, requested: str, problem: str) -> Relation:
    """The answer has an entry for each of the request."""

    def check(fields: Fields, answer: Message) -> None:
        if len(answer[received]) != len(fields[requested]):
            raise InvalidValue(problem)

    return check


def _unique(received: str, key: str, problem: str) -> Relation:
    """The answer's entries differ in this key."""

    def check(_: Fields, answer: Message) -> None:
        if len({entry[key] for entry in answer[received]}) != len(answer[received]):
            raise InvalidValue(problem)

    return check


_unique_files = _unique("files", "path", "a file twice")


def _check_tree(fields: Fields, answer: Message) -> None:
    paths = {entry[0] for entry in fields["manifest"]}
    _check_subset([*answer["missing"], *answer["different"]], paths, "a path")


def _check_blobs(fields: Fields, answer: Message) -> None:
    hashes = {entry[1] for entry in fields["manifest"]}
    _check_subset(sorted({*answer.get("hashes", ()), *answer.get("damaged", ())}), hashes, "a hash")


def _check_built_tree(fields: Fields, answer: Message) -> None:
    _check_blobs(fields, answer)
    if not answer["root"].endswith(f"/jobs/{fields['folder']}/{fields['name']}"):
        reject("the folder of a tree", answer["root"], "one of the job's folder")


def _check_run_folder(fields: Fields, answer: Message) -> None:
    folder = answer["folder"]
    is_keyed = folder.startswith("/") and folder.endswith(f"/paceline/runs/{fields['key']}")
    if not (folder == fields["path"] if answer["shared"] else is_keyed):
        reject("the run's folder", folder, "the run directory or one under its key")


def _check_paths(fields: Fields, answer: Message) -> None:
    if [entry["path"] for entry in answer["paths"]] != fields["paths"]:
        raise InvalidValue("other paths than were asked for")


def _check_probes(fields: Fields, answer: Message) -> None:
    key = itemgetter("host", "address", "port")
    probed, requested = map(key, answer["results"]), set(map(key, fields["targets"]))
    if foreign := set(probed) - requested:
        raise InvalidValue(f"a connection that nobody asked for: {foreign.pop()}")


def _check_ports(fields: Fields, answer: Message) -> None:
    ports = {str(port) for port in fields["ports"]}
    _check_subset([*map(str, answer["opened"]), *answer["taken"]], ports, "a port")


def _check_block(fields: Fields, answer: Message) -> None:
    if fields["last"] != ("sha256" in answer):
        raise InvalidValue("the hash of a file belongs to its last block")


def _check_data(fields: Fields, answer: Message) -> None:
    place = f"/data/{fields['key']}/"
    if not answer["folder"].endswith(f"{place}files/{fields['name']}"):
        reject("the folder of data", answer["folder"], "one under its key")
    if place not in answer["sign"]:
        reject("the sign of a node", answer["sign"], "one under the key")


def _check_changes(fields: Fields, answer: Message) -> None:
    _unique_files(fields, answer)
    if {file["path"] for file in answer["files"]} & set(answer["gone"]):
        raise InvalidValue("a file that is new and gone")


BLOB_OPS = ("read_block", "read_part")  # answered with as many bytes as were requested

RELATIONS: dict[str, Relation] = {
    "compare_tree": _check_tree,
    "lacking_blobs": _check_blobs,
    "build_tree": _check_built_tree,
    "run_folder": _check_run_folder,
    "list_results": _unique_files,
    "list_outputs": _unique_files,
    "look": _check_paths,
    "connect": _check_probes,
    "listen": _subset("ports", "addresses", "an address"),
    "disk": _same_length("disks", "paths", "other disks than were asked for"),
    "resolve": _subset("names", "names", "a name"),
    "open_ports": _check_ports,
    "vitals": _subset("links", "interfaces", "an interface"),
    "see_tokens": _subset("seen", "names", "a file"),
    "read_block": _check_block,
    "run_changes": _check_changes,
    "detached_runs": _unique("runs", "run_id", "a run twice"),
    "data_folder": _check_data,
    "hash_data": _same_length("hashes", "paths", "hashes of other files than were asked for"),
}


# --- a conversation -----------------------------------------------------------------------------


class Conversation:
    """The pending requests and the ranks of one agent, which determine its valid messages."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, Fields, frozenset[int]]] = {}
        self._ranks: frozenset[int] = frozenset()
        self._greeted = False

    def add_request(self, number: int, op: str, fields: Fields) -> None:
        """Records a request before it is sent."""
        self._requests[number] = op, fields, self._ranks
        if op == "start":
            self._ranks = frozenset(rank["rank"] for rank in fields["ranks"])
        elif op == "add_ranks":
            self._ranks |= {rank["rank"] for rank in fields["ranks"]}

    def answer(self, message: Message, blob: bytes) -> int:
        """Validates an answer; returns the number of its request."""
        integer(1)(message["re"], "the number of an answer")
        if message["re"] not in self._requests:
            raise InvalidValue("an answer to what nobody asked")
        op, fields, ranks = self._requests.pop(message["re"])
        expected_bytes = fields["count"] if op in BLOB_OPS and "error" not in message else 0
        if len(blob) != expected_bytes:
            raise InvalidValue(
                f"{len(blob)} bytes with the answer to {op} instead of {expected_bytes}"
            )
        path = f"the answer to {op}"
        if "error" in message:
            _REFUSAL(message, path)
        else:
            if op in PERIODIC_OPS:
                _check_memory(message, path)
            ANSWERS.get(op, any_json)(message, path)
            if op in RELATIONS:
                RELATIONS[op](fields, message)
            for entry in message["ranks"] if op == "seen" else ():
                if entry["rank"] not in ranks:  # a later start may have assigned other ranks
                    self._check_rank(entry["rank"])
        return int(message["re"])

    def event(self, message: Message, blob: bytes) -> bool:
        """Validates an event; returns False if it is to be ignored."""
        kind = message.get("event")
        if not isinstance(kind, str) or kind not in EVENTS:
            raise InvalidValue(f"an event called {describe_value(kind)}")
        if kind not in ("hello", "said"):
            _check_memory(message, f"the event {kind}")
        EVENTS[kind](message, f"the event {kind}")
        if kind == "said" and memory_bytes(message, MAX_EVENT_BYTES) > MAX_EVENT_BYTES:
            return False
        if len(blob) > (MAX_OUTPUT if kind == "output" else 0):
            raise InvalidValue(f"{len(blob)} bytes with the event {kind}")
        if "rank" in message:
            self._check_rank(message["rank"])
        if kind == "hello":
            if self._greeted:
                raise InvalidValue("hello twice")
            self._greeted = True
        elif not self._greeted and kind not in ("leaving", "asked to end"):
            raise InvalidValue(f"the event {kind} before hello")
        elif kind == "said":
            return is_valid_report(message.get("data"))
        return True

    def _check_rank(self, rank: int) -> None:
        if rank not in self._ranks:
            raise InvalidValue(f"rank {rank}, which does not run there")


# --- before the first frame ---------------------------------------------------------------------

# first words with the number of words after each, by a new agent and for a running one
BOOT_REPLIES = {"have": 0, "need": 0, "old": 2, "system": 1}
RECONNECTION_REPLIES = {"meet": 1, "again": 2, "gone": 0, "stranger": 0}


def parse_boot_line(line: bytes, num_arguments: Mapping[str, int]) -> list[str]:
    """Splits the rest of a line after the mark ``BOOT``; its first word must be known."""
    fields = line.decode(errors="replace").split()
    if not fields or len(fields) <= num_arguments.get(fields[0], MAX_FIELDS):
        raise InvalidValue(f"its first line is {describe_value(' '.join(fields))}")
    return fields
