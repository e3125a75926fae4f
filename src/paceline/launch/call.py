"""A function as a job: packed for the ranks; and what they returned or raised."""

from __future__ import annotations

import functools
import inspect
import linecache
import logging
import marshal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, overload

from paceline.agent.ranks import pickles
from paceline.launch.planning.entry import COMPILER, preload_of
from paceline.launch.results.summary import RunOutcome, last_lines
from paceline.rundir.directory import claim, short
from paceline.spec import rundir as names
from paceline.spec.errors import JobError, NodeError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import format_location
from paceline.spec.hosts import Host, Inspect
from paceline.spec.job import Entry

T = TypeVar("T")
_PACKING = threading.Lock()  # which modules go by value is a state of cloudpickle's
MOST_TEXT = 8 << 20  # bytes of a pickle that are looked at for what it uses


# --- there ----------------------------------------------------------------------------------------


def entry_of_function(function: Callable[..., Any]) -> Entry:
    """The entry that calls a function; it imports from the folders that this process imports from.

    SettingError for what cannot be called.
    """
    if not callable(function):
        raise SettingError(
            f"launch takes a function, and this is a {type(function).__name__}",
            remedy="launch(train, args=(…,)): the function itself, without calling it",
        )
    folders = dict.fromkeys(str(Path(folder).absolute()) for folder in sys.path)
    own = [folder for folder in folders if Path(folder).exists() and not _is_library(folder)]
    script: Any = getattr(sys.modules.get("__main__"), "__file__", None)
    typed = not script or _is_library(script) or not Path(script).is_file()
    first = str(Path.cwd() if typed else Path(script).absolute().parent)
    return Entry("function", f"{name_of(function)}()", (first, *(f for f in own if f != first)))


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called: ``train``, ``lambda``."""
    inner = getattr(function, "func", function)  # of functools.partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return str(name).rpartition(".")[2].strip("<>")


def _home_of(function: Callable[..., Any]) -> Path | None:
    """The file of a function of the user's own; ``None`` of one that was typed, or is installed."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not file or _is_library(file) or not Path(file).is_file():
        return None
    return Path(file).absolute()


def _is_library(path: str) -> bool:
    """Whether a path belongs to Python or to what is installed for it."""
    installed = "/site-packages" in path or "/dist-packages" in path or path.endswith(".zip")
    return installed or f"{path}/".startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    known = [paths[name] for name in ("stdlib", "platstdlib", "scripts")]
    return tuple(f"{folder}/" for folder in [*known, str(Path(sys.executable).parent)])


def write_call(path: Path, function: Callable[..., Any], args: Sequence[Any],
               kwargs: Mapping[str, Any],
               by_value: Sequence[ModuleType]) -> tuple[str, bytes]:  # fmt: skip
    """Writes the file that every rank reads; its hash, and what it says of the function, or begins.

    Args:
        path: The file.
        function, args, kwargs: What is called.
        by_value: Modules whose functions and classes travel with it.

    Raises:
        SettingError: Names the part that cannot be pickled.
    """
    import cloudpickle  # here: only who calls functions needs it

    header = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "argv": list(sys.argv),
        "file": getattr(sys.modules.get("__main__"), "__file__", None),
        "source": _source_of(function),
        "sources": _sources_of(function),
        "logging": _logging(),
        "cloudpickle": _modules_of(cloudpickle),
    }
    called = f"{name_of(function)}()"
    call = [("what the rank is like", header), (called, (function, tuple(args), dict(kwargs)))]
    try:
        with _by_value(cloudpickle, by_value):
            written = pickles.write(str(path), call, cloudpickle)
    except pickles.NotPicklableError as error:
        raise SettingError(
            f"{called} cannot be sent to the hosts",
            found=_from_here(str(error), called),
            remedy="Make it inside the function, or pass what it is made of",
        ) from None
    with path.open("rb") as file:
        file.seek(written.starts[-1])
        return written.sha256, file.read(MOST_TEXT)


def _from_here(text: str, called: str) -> str:
    """The parts of a call by the names that the caller knows."""
    for part, name in (("[0]", ""), ("[1]", ": args"), ("[2]", ": kwargs")):
        text = text.replace(f"{called}{part}", f"{called}{name}", 1)
    return text


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(getattr(function, "func", function)))
    except (OSError, TypeError, ValueError):
        return ""


def _sources_of(function: Callable[..., Any]) -> dict[str, str]:
    """The text of the file, or of the cell, in which a function stands."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None:
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if text else {}


def _logging() -> dict[str, Any] | None:
    """How this process logs, for the ranks to do likewise; ``None`` where it does not."""
    root = logging.getLogger()
    if not root.handlers:
        return None
    form = root.handlers[0].formatter
    basic: dict[str, Any] = {"level": root.level}
    if form is not None and form._fmt:
        basic |= {"format": form._fmt, "datefmt": form.datefmt, "style": _style(form._fmt)}
    known = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    return {"basic": basic, "levels": {one.name: one.level for one in known if one.level}}


def _style(form: str) -> str:
    return "%" if "%(" in form else "{" if "{" in form else "$"


@functools.cache
def _modules_of(package: ModuleType) -> dict[str, bytes]:
    """The package's two modules, compiled: hosts need not have it installed."""
    return {
        name: marshal.dumps(compile(inspect.getsource(sys.modules[name]), f"<{name}>", "exec",
                                    dont_inherit=True))
        for name in (package.__name__, f"{package.__name__}.cloudpickle")
    }  # fmt: skip


def modules_elsewhere(root: Path | None) -> list[ModuleType]:
    """Modules of the user's own that no host can import: their folder is not sent.

    Args:
        root: The folder that is sent; ``None`` for none.
    """
    modules = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not isinstance(module, ModuleType):
            continue
        if name.split(".")[0] in ("__main__", "__mp_main__", "paceline", "cloudpickle"):
            continue
        if module.__name__ != name or _is_library(file):
            continue
        if root is not None and Path(file).absolute().is_relative_to(root):
            continue
        if Path(file).is_file():  # torch has modules that only claim one
            modules.append(module)
    return modules


@contextmanager
def _by_value(cloudpickle: Any, modules: Sequence[ModuleType]) -> Iterator[None]:
    with _PACKING:
        known = cloudpickle.list_registry_pickle_by_value()
        ours = [module for module in modules if module.__name__ not in known]
        for module in ours:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in ours:
                cloudpickle.unregister_pickle_by_value(module)


def preload_of_call(function: Callable[..., Any], pickled: bytes) -> tuple[str, ...]:
    """What a node imports before it forks the ranks; empty for a function that needs no torch.

    A pickled function holds the names that it uses; one that is imported there has its module's
    text.
    """
    home = _home_of(function)
    by_file = preload_of(Entry("script", str(home))) if home is not None else ()
    text = home.read_bytes() if home is not None else b""
    if "torch" not in sys.modules and b"torch" not in pickled and b"torch" not in text:
        return ()
    trains = b"paceline.train" in pickled or "paceline.train?" in by_file
    compiles = b"compile" in pickled or b"fully_shard" in pickled if trains else b"optim" in pickled
    compiles = compiles or COMPILER in by_file
    return ("torch", *(["paceline.train?"] if trains else []), *([COMPILER] if compiles else []))


def same_python(inspected: Inspect) -> Inspect:
    """Refuses hosts whose Python cannot run what this one has compiled."""

    def inspect_all(hosts: Sequence[Host], facts: Mapping[str, Any],
                    noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        notes = inspected(hosts, facts, noise)
        ours = f"{sys.version_info.major}.{sys.version_info.minor}"
        pythons = {host.name: facts[host.name]["python"]["version"] for host in hosts}
        versions = [f"{host} {version}" for host, version in pythons.items()
                  if version.split(".")[:2] != ours.split(".")]  # fmt: skip
        if versions:
            raise NodeError(
                f"a function of Python {ours} runs on Python {ours} only",
                found=", ".join(versions),
                remedy=f'Name an interpreter of Python {ours} there: python="/path/to/python{ours}"'
                ", or python under [hosts.NAME] in paceline.toml",
            )
        return notes

    return inspect_all


# --- and back -------------------------------------------------------------------------------------


class RankError(JobError):
    """A rank did not return: what is known of it.

    It is raised where there is no exception of the function's own, and is the ``__cause__`` of one.

    Attributes:
        host, rank: Where; ``None`` for a rank where a whole host is meant.
        traceback: Of the exception there; empty when there was none.
        outcome: How the run ended, and its run directory.
        returned: By rank, what the others returned of a run that ended well without this one.
    """

    def __init__(self, message: str, outcome: RunOutcome, host: str = "", rank: int | None = None,
                 traceback: str = "", found: str = "", remedy: str = "",
                 returned: Mapping[int, Any] | None = None) -> None:  # fmt: skip
        failure = outcome.result.failure
        status = failure.status if failure is not None else outcome.result.exit_code or 1
        super().__init__(message, found=found, remedy=remedy, exit_code=status)
        self.host = host
        self.rank = rank
        self.traceback = traceback
        self.outcome = outcome
        self.returned = dict(returned or {})


class Results(Sequence[T], Generic[T]):
    """What the ranks returned, in the order of their ranks.

    Attributes:
        by_host: The same by host, in the order of the ranks there.
        outcome: How the run ended, and its run directory.
    """

    def __init__(self, values: Sequence[T], hosts: Sequence[str], outcome: RunOutcome) -> None:
        self._values = tuple(values)
        self.outcome = outcome
        self.by_host: dict[str, tuple[T, ...]] = {
            host: tuple(value for value, on in zip(values, hosts, strict=True) if on == host)
            for host in dict.fromkeys(hosts)
        }

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        return self._values[place]

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Results({list(self._values)!r})"


def results_of(outcome: RunOutcome) -> Results[Any]:
    """What the ranks of a finished run returned.

    Raises:
        RankError: A rank did not return.
        Exception: What the function raised on the first rank that failed.
    """
    if outcome.result.failure is not None or outcome.result.exit_code != 0:
        raise _raised(outcome)
    reports = _told(outcome, "returned")
    missing = next((rank for rank in range(outcome.ranks) if rank not in reports), None)
    values = {
        rank: _load(outcome, reports[rank]) for rank in sorted(reports) if rank < outcome.ranks
    }
    if missing is not None:
        raise _without(outcome, missing, values)
    hosts = [reports[rank].host for rank in values]
    return Results([*values.values()], hosts, outcome)


def _without(outcome: RunOutcome, rank: int, values: Mapping[int, Any]) -> RankError:
    """What to say of a rank that returned nothing in a run that ended well."""
    last = next((event for event in reversed(outcome.events) if event.rank == rank
                 and event.kind in ("rank started", "rank ended")), None)  # fmt: skip
    lost = last is not None and (last.kind == "rank started" or last["code"] != 0)
    if last is None or not lost:
        return RankError(f"rank {rank} ended without returning", outcome, rank=rank,
                         found="the function ended the process: sys.exit() or os._exit()",
                         remedy="Return from the function instead", returned=values)  # fmt: skip
    who = format_location(last.host, rank)
    whys = [f"it came again in vain: {event['why']}" for event in outcome.events
            if event.kind == "newcomer lost" and event.rank == rank]  # fmt: skip
    whys = [
        *(recovery.reason for recovery in outcome.result.recoveries if who in recovery.ranks),
        *whys[-1:],
    ]
    return RankError(f"{who} was lost and had not come back when the others returned", outcome,
                     last.host, rank, found="\n".join(whys), returned=values,
                     remedy="What the others returned is in this error's .returned")  # fmt: skip


def _told(outcome: RunOutcome, kind: str) -> dict[int, Event]:
    """By rank, what the ranks of the last start told of their files.

    A rank may be through before all hosts have begun, and so before the start is told of.
    """
    found: dict[int, Event] = {}
    over = False
    for event in outcome.events:
        if over and event.kind in ("started", "returned", "raised"):
            found, over = {}, False
        if event.kind == "ended":
            over = True
        elif event.kind == kind and event.rank is not None:
            found[event.rank] = event
    return found


def _load(outcome: RunOutcome, event: Event) -> Any:
    """The object of a rank's file, after a look at its hash. RankError when it cannot be had."""
    path = outcome.path / names.RETURN_VALUES / str(event.rank)
    where = format_location(event.host, event.rank)
    try:
        return pickles.open_objects(str(path), str(event["sha256"])).load()
    except (pickles.DamagedError, OSError) as error:
        message = f"what {where} {event.kind} did not arrive"
        raise RankError(message, outcome, event.host, event.rank,
                        found=str(error)) from None  # fmt: skip
    except Exception as error:  # loading runs code of the user's classes
        raise RankError(
            f"what {where} {event.kind} cannot be loaded here", outcome, event.host, event.rank,
            found=f"{type(error).__name__}: {error}",
            remedy="Return plain values, tensors or arrays, or install here what it is made of",
        ) from error  # fmt: skip


def _raised(outcome: RunOutcome) -> Exception:
    """The exception to raise for a run that failed: the function's own where there is one."""
    failure = outcome.result.failure
    if failure is None:
        return RankError("the job ended without a result", outcome, found=outcome.result.error)
    text = failure.traceback.rstrip()
    logs = f"logs: {short(outcome.path / names.LOGS)}"
    if not text and failure.rank is not None:
        log = names.log_file(failure.host, failure.rank)
        text = last_lines(outcome.path / log, outcome.begins.get(log, 0))
    cause = RankError(failure.describe(), outcome, failure.host, failure.rank, failure.traceback,
                      found=f"{text}\n{logs}".lstrip())  # fmt: skip
    told = _told(outcome, "raised").get(-1 if failure.rank is None else failure.rank)
    if failure.kind != "exception" or told is None:
        return cause
    try:
        error = _load(outcome, told)
        if isinstance(error, tuple):
            kind, args, attributes = error
            error = kind.__new__(kind, *args)
            error.args = args
            vars(error).update(attributes)
    except Exception as problem:
        cause.remedy = f"Its exception cannot be raised here: {type(problem).__name__}: {problem}"
        return cause
    if not isinstance(error, Exception):
        return cause
    error.__cause__ = cause
    return error


@contextmanager
def folder_for(run_dir: Path | None, name: str) -> Iterator[Path]:
    """The run directory of a call: this one, or a fresh one, which others at once do not get.

    At the end what only served the call is gone: it may be large, and is in memory by then.
    """
    path = (run_dir or claim(Path(names.DEFAULT_PARENT), name)).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield path
    finally:
        for pickled in [path / names.CALL, *(path / names.RETURN_VALUES).glob("*")]:
            pickled.unlink(missing_ok=True)
        for folder in (path / names.RETURN_VALUES, path):
            with suppress(OSError):  # there is more in it
                folder.rmdir()
