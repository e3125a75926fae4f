"""Functions as jobs: packs a call for the ranks, and loads what they returned or raised."""

from __future__ import annotations

import functools
import inspect
import linecache
import logging
import marshal
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, overload

from paceline.agent.files import safe_paths
from paceline.agent.ranks import pickles
from paceline.launch.planning.entry import COMPILER, preload_of
from paceline.launch.results.run_outcome import RunOutcome
from paceline.rundir.directory import claim, require_usable, short
from paceline.spec import rundir as names
from paceline.spec.errors import JobError, NodeError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import format_location
from paceline.spec.hosts import Host, Inspect
from paceline.spec.job import Entry

T = TypeVar("T")
_PICKLE_LOCK = threading.Lock()  # cloudpickle's registry of modules by value is global
MAX_SCANNED_BYTES = 8 << 20  # of a pickle, for the names that it uses


# --- the call -------------------------------------------------------------------------------------


def entry_of_function(function: Callable[..., Any]) -> Entry:
    """Returns the entry that calls a function with this process's import path.

    Raises SettingError if it is not callable.
    """
    if not callable(function):
        raise SettingError(
            f"launch takes a function, and this is a {type(function).__name__}",
            remedy="launch(train, args=(…,)): the function itself, without calling it",
        )
    paths = dict.fromkeys(str(Path(folder).absolute()) for folder in sys.path)
    folders = [path for path in paths if Path(path).exists() and not _is_library(path)]
    script: Any = getattr(sys.modules.get("__main__"), "__file__", None)
    is_interactive = not script or _is_library(script) or not Path(script).is_file()
    first = str(Path.cwd() if is_interactive else Path(script).absolute().parent)
    import_path = tuple(dict.fromkeys([first, *folders]))
    return Entry("function", f"{function_name(function)}()", import_path)


def function_name(function: Callable[..., Any]) -> str:
    """Returns the short name of a function: ``train``, ``lambda``."""
    inner = getattr(function, "func", function)  # of functools.partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return str(name).rpartition(".")[2].strip("<>")


def _user_file(function: Callable[..., Any]) -> Path | None:
    """Returns the file of a user's function; ``None`` if it was typed or is installed."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if not file or _is_library(file) or not Path(file).is_file():
        return None
    return Path(file).absolute()


def _is_library(path: str) -> bool:
    """Whether a path belongs to Python or an installed package."""
    installed = "/site-packages" in path or "/dist-packages" in path or path.endswith(".zip")
    return installed or f"{path}/".startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "scripts")]
    return tuple(f"{folder}/" for folder in [*folders, str(Path(sys.executable).parent)])


def write_call(path: Path, function: Callable[..., Any], args: Sequence[Any],
               kwargs: Mapping[str, Any],
               by_value: Sequence[ModuleType]) -> tuple[str, bytes]:  # fmt: skip
    """Writes the file that every rank reads; SettingError names a part that cannot be pickled.

    ``by_value`` are modules whose functions and classes are pickled by value. Returns the file's
    hash, and the beginning of the pickled call.
    """
    import cloudpickle  # imported late: only functions as jobs need it

    header = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "argv": list(sys.argv),
        "file": getattr(sys.modules.get("__main__"), "__file__", None),
        "source": _function_source(function),
        "sources": _file_source(function),
        "logging": _logging_config(),
        "cloudpickle": _compiled_modules(cloudpickle),
    }
    called = f"{function_name(function)}()"
    call = [("what the rank is like", header), (called, (function, tuple(args), dict(kwargs)))]
    try:
        with _by_value(cloudpickle, by_value):
            written = pickles.write(str(path), call, cloudpickle)
    except pickles.NotPicklableError as error:
        raise SettingError(
            f"{called} cannot be sent to the hosts",
            found=_name_parts(str(error), called),
            remedy="Make it inside the function, or pass what it is made of",
        ) from None
    with path.open("rb") as file:
        file.seek(written.starts[-1])
        return written.sha256, file.read(MAX_SCANNED_BYTES)


def _name_parts(text: str, called: str) -> str:
    """Replaces indices of the pickled call by the names of its parts."""
    for part, name in (("[0]", ""), ("[1]", ": args"), ("[2]", ": kwargs")):
        text = text.replace(f"{called}{part}", f"{called}{name}", 1)
    return text


def _function_source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(getattr(function, "func", function)))
    except (OSError, TypeError, ValueError):
        return ""


def _file_source(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the text of the file or cell that defines a function, by file name."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    if code is None:
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if text else {}


def _logging_config() -> dict[str, Any] | None:
    """Returns this process's logging configuration for the ranks; ``None`` if it has none."""
    root = logging.getLogger()
    if not root.handlers:
        return None
    formatter = root.handlers[0].formatter
    basic: dict[str, Any] = {"level": root.level}
    if formatter is not None and (text := formatter._fmt):
        style = "%" if "%(" in text else "{" if "{" in text else "$"
        basic |= {"format": text, "datefmt": formatter.datefmt, "style": style}
    loggers = root.manager.loggerDict.items()
    levels = {name: logger.level for name, logger in loggers
              if isinstance(logger, logging.Logger) and logger.level}  # fmt: skip
    return {"basic": basic, "levels": levels}


@functools.cache
def _compiled_modules(package: ModuleType) -> dict[str, bytes]:
    """Returns the package's two modules, compiled: hosts need not have it installed."""
    return {
        name: marshal.dumps(compile(inspect.getsource(sys.modules[name]), f"<{name}>", "exec",
                                    dont_inherit=True))
        for name in (package.__name__, f"{package.__name__}.cloudpickle")
    }  # fmt: skip


def unshipped_modules(root: Path | None) -> list[ModuleType]:
    """Returns the user's modules outside ``root``, the folder that is shipped: no host has them."""
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
    with _PICKLE_LOCK:
        registered = cloudpickle.list_registry_pickle_by_value()
        added = [module for module in modules if module.__name__ not in registered]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def preload_of_call(function: Callable[..., Any], pickled: bytes) -> tuple[str, ...]:
    """Returns what a node imports before it forks the ranks; empty if the function needs no torch.

    The names come from the pickle and from the text of the function's own file.
    """
    source = _user_file(function)
    by_file = preload_of(Entry("script", str(source))) if source is not None else ()
    text = source.read_bytes() if source is not None else b""
    if "torch" not in sys.modules and b"torch" not in pickled and b"torch" not in text:
        return ()
    uses_train = b"paceline.train" in pickled or "paceline.train?" in by_file
    compiled = (b"compile", b"fully_shard") if uses_train else (b"optim",)
    uses_compiler = COMPILER in by_file or any(name in pickled for name in compiled)
    modules = {"torch": True, "paceline.train?": uses_train, COMPILER: uses_compiler}
    return tuple(module for module, is_used in modules.items() if is_used)


def require_same_python(inspected: Inspect) -> Inspect:
    """Wraps ``inspected`` to refuse hosts of another Python version: bytecode must match."""

    def inspect_all(hosts: Sequence[Host], facts: Mapping[str, Any],
                    noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        notes = inspected(hosts, facts, noise)
        local = f"{sys.version_info.major}.{sys.version_info.minor}"
        pythons = {host.name: facts[host.name]["python"]["version"] for host in hosts}
        mismatched = [f"{host} {version}" for host, version in pythons.items()
                  if version.split(".")[:2] != local.split(".")]  # fmt: skip
        if mismatched:
            raise NodeError(
                f"a function of Python {local} runs on Python {local} only",
                found=", ".join(mismatched),
                remedy=f"Name an interpreter of Python {local} there:"
                f' python="/path/to/python{local}", or python under [hosts.NAME] in paceline.toml',
            )
        return notes

    return inspect_all


# --- the results ---------------------------------------------------------------------------------


class RankError(JobError):
    """A rank did not return.

    Raised unless the function's own exception can be raised; then it is the ``__cause__`` of that.

    Attributes:
        host, rank: Where; the rank is ``None`` if a whole host failed.
        traceback: Traceback of the rank's exception; empty when there was none.
        outcome: How the run ended, and its run directory.
        returned: By rank, what the others returned if the run ended well without this one.
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
    """Return values of all ranks, in rank order.

    Attributes:
        by_host: Return values by host, in rank order.
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


def collect_results(outcome: RunOutcome) -> Results[Any]:
    """Collects the return values of a finished run.

    Raises:
        RankError: A rank did not return.
        Exception: The exception that the function raised on the first rank that failed.
    """
    if outcome.result.failure is not None or outcome.result.exit_code != 0:
        raise _failure_error(outcome)
    reports = _result_events(outcome, "returned")
    missing = next((rank for rank in range(outcome.ranks) if rank not in reports), None)
    ranks = [rank for rank in sorted(reports) if rank < outcome.ranks]
    values = {rank: _load_result(outcome, reports[rank]) for rank in ranks}
    if missing is not None:
        raise _missing_result(outcome, missing, values)
    hosts = [reports[rank].host for rank in values]
    return Results([*values.values()], hosts, outcome)


def _missing_result(outcome: RunOutcome, rank: int, values: Mapping[int, Any]) -> RankError:
    """Describes a rank that returned nothing in a run that ended well."""
    last_event = next((event for event in reversed(outcome.events) if event.rank == rank
                 and event.kind in ("rank started", "rank ended")), None)  # fmt: skip
    if last_event is None or (last_event.kind == "rank ended" and last_event["code"] == 0):
        return RankError(f"rank {rank} ended without returning", outcome, rank=rank,
                         found="the function ended the process: sys.exit() or os._exit()",
                         remedy="Return from the function instead", returned=values)  # fmt: skip
    location = format_location(last_event.host, rank)
    reasons = [f"its restart failed: {event['why']}" for event in outcome.events
            if event.kind == "newcomer lost" and event.rank == rank]  # fmt: skip
    reasons = [
        *(recovery.reason for recovery in outcome.result.recoveries if location in recovery.ranks),
        *reasons[-1:],
    ]
    return RankError(f"{location} was lost and had not come back when the others returned", outcome,
                     last_event.host, rank, found="\n".join(reasons), returned=values,
                     remedy="What the others returned is in this error's .returned")  # fmt: skip


def _result_events(outcome: RunOutcome, kind: str) -> dict[int, Event]:
    """Returns the last attempt's events of a kind (``returned`` or ``raised``), by rank.

    A rank may finish before all hosts have begun, so its event may precede ``started``.
    """
    reports: dict[int, Event] = {}
    is_over = False
    for event in outcome.events:
        if is_over and event.kind in ("started", "returned", "raised"):
            reports, is_over = {}, False
        if event.kind == "ended":
            is_over = True
        elif event.kind == kind and event.rank is not None:
            reports[event.rank] = event
    return reports


def _load_result(outcome: RunOutcome, event: Event) -> Any:
    """Loads the object that a rank wrote, once its hash matches; raises RankError if it cannot."""
    path = outcome.path / names.RETURN_VALUES / str(event.rank)
    location = format_location(event.host, event.rank)
    try:
        return pickles.open_objects(str(path), str(event["sha256"])).load()
    except (pickles.DamagedError, OSError) as error:
        message = f"what {location} {event.kind} did not arrive"
        raise RankError(message, outcome, event.host, event.rank,
                        found=str(error)) from None  # fmt: skip
    except Exception as error:  # loading runs code of the user's classes
        raise RankError(
            f"what {location} {event.kind} cannot be loaded here", outcome, event.host, event.rank,
            found=f"{type(error).__name__}: {error}",
            remedy="Return plain values, tensors or arrays, or install here what it is made of",
        ) from error  # fmt: skip


def _failure_error(outcome: RunOutcome) -> Exception:
    """Returns the exception to raise for a failed run: the function's own if possible."""
    failure = outcome.result.failure
    if failure is None:
        return RankError("the job ended without a result", outcome, found=outcome.result.error)
    details = failure.traceback.rstrip()
    logs = f"logs: {short(outcome.path / names.LOGS)}"
    if not details and failure.rank is not None:
        details = outcome.log_tail(failure.host, failure.rank)
    cause = RankError(failure.describe(), outcome, failure.host, failure.rank, failure.traceback,
                      found=f"{details}\n{logs}".lstrip())  # fmt: skip
    report = _result_events(outcome, "raised").get(-1 if failure.rank is None else failure.rank)
    if failure.kind != "exception" or report is None:
        return cause
    try:
        error = _load_result(outcome, report)
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
def temporary_call_folder(run_dir: Path | None, name: str) -> Iterator[Path]:
    """Yields the run directory of a call: ``run_dir``, or a fresh one claimed for it.

    Afterwards removes the pickled call and return values: they may be large.
    """
    path = (run_dir or claim(Path(names.DEFAULT_PARENT), name)).absolute()
    safe_paths.make_folder(str(path.parent), 0o775)
    path.mkdir(mode=0o700, exist_ok=True)
    require_usable(path)
    try:
        yield path
    finally:
        _remove_pickles(path)
        with suppress(OSError):  # there is more in it
            path.rmdir()


def _remove_pickles(run_dir: Path) -> None:
    """Removes the call and what ranks returned; follows no links."""
    with suppress(OSError), safe_paths.FolderCache(str(run_dir)) as folders:
        folders.remove(names.CALL)
        for name in os.listdir(folders.descriptor(names.RETURN_VALUES)):  # noqa: PTH208
            if name.lstrip("-").isdecimal():  # a rank; -1 is a whole host
                folders.remove(f"{names.RETURN_VALUES}/{name}")
        (run_dir / names.RETURN_VALUES).rmdir()
