"""A job as the user requests it, before anything is detected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from paceline.spec.settings import Setting, Source

_RANGE = re.compile(r"(?P<minimum>\d{1,9})(?P<colon>:(?P<maximum>\d{1,9})?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeRange:
    """``MIN:MAX``, as torchrun writes it, or ``MIN:``. Hosts beyond the maximum are spares.

    Attributes:
        minimum: Nodes without which the job does not run.
        maximum: Nodes that get ranks at most; ``None`` for all hosts.
    """

    minimum: int
    maximum: int | None = None

    def __str__(self) -> str:
        return f"{self.minimum}:{'' if self.maximum is None else self.maximum}"


NodeCount = int | NodeRange


def parse_node_count(text: str) -> NodeCount:
    """Parses ``2``, ``1:3`` or ``2:``; raises ValueError, with the reason, for anything else."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is neither a number nor MIN:MAX")
    minimum = int(match["minimum"])
    if minimum < 1:
        raise ValueError(f"{text}: at least 1 node")
    if not match["colon"]:
        return minimum
    maximum = None if match["maximum"] is None else int(match["maximum"])
    if maximum is not None and maximum < minimum:
        raise ValueError(f"{text}: the most is less than the least")
    return NodeRange(minimum, maximum)


def bounds(nodes: NodeCount | None, hosts: int) -> tuple[int, int]:
    """Smallest and largest number of nodes with ranks; ``None`` means all ``hosts``."""
    if isinstance(nodes, NodeRange):
        return nodes.minimum, hosts if nodes.maximum is None else min(nodes.maximum, hosts)
    return (hosts, hosts) if nodes is None else (nodes, nodes)


EntryKind = Literal["script", "module", "function", "binary"]
Ship = Literal["auto", "always", "never"]
Bind = Literal["auto", "none"]
Rejoin = Literal["after-save", "now", "never"]
Processes = int | Literal["auto", "gpu", "cpu"]
Show = Literal["all", "rank0", "none"]
DisplayMode = Literal["live", "lines"]

# Short words count only between underscores: PATH and PATIENCE are not secrets. PWD is a folder.
_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH"
    r"|(?!\APWD\Z)(?<![A-Z0-9])(?:PWD|PW|PAT|COOKIES?|CREDS?|JWT|PSK|BEARER)\d*(?![A-Z0-9])",
    re.IGNORECASE,
)
# The login in a URL: the password reaches to the last @ before a slash, or the name is a key.
_URL_LOGIN = re.compile(
    r"(?<=://)(?P<user>[^/\s:@]{0,500})(?::(?P<password>[^/?#\s]{1,5000}))?(?=@)"
)
MASK = "[secret]"
MIN_SECRET_LENGTH = 6  # characters; what is shorter stands in many a word, too
_SECRET_SHAPE = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[A-Za-z0-9+_.=-]{16,}")


def parse_processes(value: object) -> Processes:
    """A positive number of processes a node, or ``auto``, ``gpu`` or ``cpu``; else ValueError."""
    if value == "auto" or value == "gpu" or value == "cpu":
        return value
    try:
        number = int(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is neither a number nor one of auto, gpu, cpu") from None
    if number < 1:
        raise ValueError(f"{number} is less than 1")
    return number


def count_processes(requested: Processes, gpus: int, cpus: int) -> int:
    """How many processes that is on a node, as torchrun counts them."""
    if isinstance(requested, int):
        return requested
    return gpus if requested != "cpu" and gpus else max(1, cpus)


def redact(name: str, value: str) -> str:
    """The value of a variable as files and screens show it."""
    return "(not recorded)" if _SECRET_NAME.search(name) else _URL_LOGIN.sub(_mask_login, value)


def _mask_login(login: re.Match[str]) -> str:
    """The login of a URL without its password, or without a user that is a key."""
    if login["password"] is not None:
        return f"{login['user']}:{MASK}"
    return MASK if _SECRET_SHAPE.fullmatch(login["user"]) else login["user"]


def secret_values(variables: Mapping[str, str]) -> list[str]:
    """Secret values, by their variable's name, and logins in URLs; short ones stand everywhere."""
    secrets = [value for name, value in variables.items() if _SECRET_NAME.search(name)]
    for value in variables.values():
        for login in _URL_LOGIN.finditer(value):
            user, password = login["user"], login["password"]
            if password is not None:
                secrets.append(f"//{user}:{password}@")
            if password not in (None, user):  # programs print it alone, too, and decoded
                secrets += [password, unquote(password)]
            elif _SECRET_SHAPE.fullmatch(user):
                secrets.append(user)
    return [*dict.fromkeys(text for text in secrets if len(text) >= MIN_SECRET_LENGTH)]


def mask_assignments(argv: Sequence[str]) -> list[str]:
    """A command line without the secrets in ``--env NAME=VALUE``.

    Unlike a search for the values, this also masks short ones.
    """
    masked: list[str] = []
    for word in argv:
        is_value = bool(masked) and masked[-1] == "--env"
        option = "" if is_value or not word.startswith("--env=") else "--env="
        if is_value or option:
            name, equals, value = word.removeprefix(option).partition("=")
            shown = MASK if _SECRET_NAME.search(name) else redact(name, value)
            word = f"{option}{name}={shown}" if equals else word
        masked.append(word)
    return masked


@dataclass(frozen=True, slots=True)
class Entry:
    """What every rank runs.

    Attributes:
        kind: A Python script, a Python module (``-m``), a function of the launching process, or any
            program.
        target: Path, module name, name of the function, or program name.
        args: Its arguments, as typed; of a function, folders from which modules are imported.
        sha256: Of a function: hash of the file that it travels in, in hexadecimal.
        local_rank_flag: Option by which each rank is also given its local rank, before the other
            arguments; empty for none.
    """

    kind: EntryKind
    target: str
    args: tuple[str, ...] = ()
    sha256: str = ""
    local_rank_flag: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables for every rank.

    Attributes:
        public: Given with their value; recorded in the plan.
        forwarded: Given by name and taken from the launcher's environment; their values are
            recorded nowhere.
        unset: Names that the ranks must not have.
        source: Where the first two were given.
    """

    public: Mapping[str, str] = field(default_factory=dict)
    forwarded: Mapping[str, str] = field(default_factory=dict, repr=False)
    unset: tuple[str, ...] = ()
    source: Source = Source.COMMAND_LINE

    def variables(self) -> dict[str, str]:
        """Every variable with its value: for the wire only."""
        return {**self.public, **self.forwarded}

    def secrets(self) -> tuple[str, ...]:
        """Values that no file of the run may show.

        Those whose name says so, and those that were forwarded and look like a key: a path or a
        language would be missed in the logs.
        """
        by_name = secret_values(self.variables())
        shaped = [value for value in self.forwarded.values() if _SECRET_SHAPE.fullmatch(value)]
        return tuple(dict.fromkeys([*by_name, *shaped]))

    def forwarded_secrets(self) -> tuple[str, ...]:
        """Names of forwarded variables that seem to be secrets; a path is none."""
        return tuple(
            name
            for name, value in self.forwarded.items()
            if not value.startswith("/")
            and (redact(name, value) != value or _SECRET_SHAPE.fullmatch(value))
        )

    def redacted(self) -> dict[str, str]:
        """Every variable as the plan records it."""
        public = {name: redact(name, value) for name, value in self.public.items()}
        return {**public, **dict.fromkeys(self.forwarded, "(forwarded, not recorded)")}


@dataclass(frozen=True, slots=True)
class Input:
    """A folder of the launching machine that the job reads.

    Attributes:
        path: The folder; arguments that are equal to it become its path on the node.
        parts: Files and folders inside it that are needed, by relative path; empty for all.
        named: Its files are those that the user named: links among them may lead anywhere.
    """

    path: str
    parts: tuple[str, ...] = ()
    named: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """A folder of data on the launching machine, which every node must have.

    Attributes:
        path: Its absolute path.
        words: Arguments that mean it, or what is in it, with their place below it: ``/train``, or
            nothing for the folder itself.
    """

    path: str
    words: Mapping[str, str] = field(default_factory=dict)

    def on_node(self, arg: str, folder: str) -> str:
        """An argument as a node gets it: a path, or a name with a path behind ``=``."""
        name, equals, value = arg.partition("=")
        if arg in self.words:
            return folder + self.words[arg]
        return f"{name}={folder}{self.words[value]}" if equals and value in self.words else arg


@dataclass(frozen=True, slots=True)
class Job:
    """A job as asked for.

    Attributes:
        name: Part of the run directory's name.
        entry: What every rank runs.
        workdir: Folder in which it runs, on the launching machine.
        python: Interpreter on the launching machine, and on the others unless they name their own.
        nproc_per_node: Processes a node, or one an accelerator or CPU of it; ``None`` finds it out
            (slots, accelerators, else 1).
        nnodes: How many of the hosts, or a range; ``None`` takes all.
        wait_for_nodes_s: How long to wait for hosts, at the start and after a loss, while there
            are too few, in seconds.
        hosts: Where they were described; ``None`` for this machine, or what the way decides.
        interface: Network interface for the job's traffic, ``None`` finds it out.
        master_port: Port of the rendezvous store; 0 takes a free one.
        activate: Scripts that a shell sources on each node before the interpreter starts.
        preload: Modules that a node imports once, before its ranks are forked; one whose name
            ends in ``?`` may be missing.
        opens_store: The script may open the rendezvous store itself, so none is held for it.
        needs_torch: Refuse nodes without torch.
        backend: Communication backend that must be there, ``None`` for none in particular.
        ship: Whether the code is copied to the nodes.
        inputs: Further folders that are shipped to nodes other than this machine.
        data: A folder of data that nodes get where they do not have it.
        follow_links: Files are sent that only links in the folders to be sent lead to.
        bind: Whether ranks get CPUs of their own.
        debug: The libraries under the job shall tell what they do.
        encrypt: Encrypt all connections between nodes.
        any_world: Accept a world other than the planned one.
        verify: Compare the parameters of a script's replicas now and then.
        measure: Report where the time of a script's steps goes.
        communication: How the gradients of the script's DistributedDataParallel are averaged.
        lease_s: Heartbeat timeout: seconds without the launcher within which a node ends the job.
        grace_s: Seconds between the polite signal and SIGKILL when a job is stopped.
        hang_timeout_s: Seconds after which a hang is ended; 0 only tells of it, ``auto`` measures
            them where ranks tell their steps.
        max_restarts: How many times the whole job may be started again after a failure.
        restart_window_s: Seconds within which they count; 0 counts them in all.
        rejoin: When a node that comes interrupts ranks that cannot take it in while they train.
        notify: Commands and addresses that are told of the run's end.
        report: A page is written of the run when it is over.
        is_measured: It is a measurement: files that the script writes on hosts are not fetched.
        typed: The command that started it, without secrets; empty from Python.
    """

    name: str
    entry: Entry
    workdir: str
    python: str
    environment: Environment = Environment()
    nproc_per_node: Setting[Processes | None] = Setting(None)
    nnodes: Setting[NodeCount | None] = Setting(None)
    wait_for_nodes_s: Setting[float] = Setting(600.0)
    hosts: Setting[str | None] = Setting(None)
    interface: Setting[str | None] = Setting(None)
    master_port: Setting[int] = Setting(0)
    activate: Setting[tuple[str, ...]] = Setting(())
    preload: tuple[str, ...] = ("torch",)
    opens_store: bool = False
    needs_torch: bool = True
    backend: str | None = None
    ship: Setting[Ship] = Setting("auto")
    inputs: tuple[Input, ...] = ()
    data: Data | None = None
    follow_links: bool = False
    bind: Setting[Bind] = Setting("auto")
    debug: Setting[bool] = Setting(False)
    encrypt: Setting[bool] = Setting(False)
    any_world: bool = False
    communication: Setting[str] = Setting("exact")
    verify: bool = True
    measure: bool = True
    lease_s: Setting[float] = Setting(10.0)
    grace_s: Setting[float] = Setting(8.0)
    hang_timeout_s: Setting[float | str] = Setting("auto")
    max_restarts: Setting[int] = Setting(0)
    restart_window_s: Setting[float] = Setting(3600.0)
    rejoin: Setting[Rejoin] = Setting("after-save")
    notify: tuple[str, ...] = ()
    report: bool = False
    is_measured: bool = False
    typed: str = ""

    @property
    def trains(self) -> bool:
        """Whether the script appears to use ``paceline.train``, before any rank reports it."""
        return any(module.rstrip("?") == "paceline.train" for module in self.preload)
