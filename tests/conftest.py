"""Fixtures and hooks of all tests: detection of leaks, order of files, and labs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from paceline.lab import Lab, LabOptions

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = REPOSITORY / "tests/train"
MARK = "PACELINE_TEST_SESSION"  # inherited by every process that a test starts
LONGEST = (  # files of tests with labs, the slowest first
    "test_slurm", "test_matrix", "test_documents_run", "test_hangs", "test_elastic",
    "test_reference_runs", "test_coming_from", "test_attribution", "test_detach", "test_mpi",
    "test_lost_ranks", "test_check", "test_explain", "test_by_hand", "test_docker", "test_recovery",
    "test_interrupts", "test_reattach", "test_minimal_recipes", "test_soak", "test_joining",
    "test_resume", "test_device_recovery", "test_run_arguments", "test_run_places",
    "test_run_endings", "test_recovery_in_place", "test_run_refusals", "test_warm", "test_attach",
    "test_launch_function",
    "test_connections", "test_run_network", "test_setup", "test_checkpoint_copies",
    "test_run_own_rendezvous", "test_recipes_on_hosts", "test_train_image", "test_forecast",
    "test_tutorial", "test_lab", "test_full_disk", "test_collectives", "test_communication",
    "test_scale", "test_trackers_read_back", "test_trackers_online", "test_wheel",
    "test_recipes", "test_run_broken_links", "test_live",
)  # fmt: skip
TIMEOUT_S = 120.0  # an ssh client notices after 15 s that its host is gone

_OWN_FILES = {"__pycache__", "build", "dist", ".git"}
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h

# slow examples on a busy machine are not failures; other settings are Hypothesis's, also in CI
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Gives each parallel worker private mounts and a private network, if allowed.

    Two labs at once then share neither ports nor names of namespaces, and leaks of one test are not
    attributed to another.
    """
    # ssh uses this shell for a lab's ProxyCommand. As its input is a socket, bash would read the
    # user's start-up files, and pyenv's leave a lock behind when a test kills it.
    os.environ["SHELL"] = "/bin/sh"
    # nohup ignores SIGHUP, and background jobs of scripts ignore SIGINT and SIGQUIT. Children
    # inherit this, and tests that send these signals would wait.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PACELINE_OPT_REPORT", "no")  # only tests of the report need it
    if not hasattr(config, "workerinput"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads on busy CPUs wait for each other
    if Lab.available() is not None:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS | _CLONE_NEWNET) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection during collection, as modules and tests stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the slowest files to the front, then those with the most tests.

    Parallel workers take whole files in this order; a slow file at the end would run alone.
    """
    tests = Counter(item.path for item in items)
    places = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -tests[item.path]))


@pytest.fixture(scope="session", autouse=True)
def _marked_session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Marks the processes that tests start, and sets a private folder for user settings."""
    mine = {MARK: f"{os.getpid()}", "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("config"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mine.items():
            patch.setenv(name, value)
        if (local_ranks := sys.modules.get("local_ranks")) and any(
            item.path.parent == TRAIN for item in request.session.items
        ):
            local_ranks.start_fork_server()  # or the first test seems to leak it
        yield


@dataclass(frozen=True)
class Belongings:
    """State of this process that a test must leave unchanged."""

    environment: frozenset[tuple[str, str]]
    folder: str
    threads: frozenset[str]
    processes: frozenset[str]  # of all users; new ones are checked for our mark
    descriptors: frozenset[str]
    files: frozenset[str]
    mounts: frozenset[str]
    interfaces: frozenset[str]
    namespaces: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            environment=frozenset(_variables()),
            folder=str(Path.cwd()),
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
            processes=frozenset(filter(str.isdigit, _names("/proc"))),
            descriptors=frozenset(_descriptors()),
            files=frozenset(_files()),
            mounts=frozenset(_lines("/proc/self/mountinfo")),
            interfaces=frozenset(name for _, name in socket.if_nameindex()),
            namespaces=frozenset(_names("/run/netns")),
        )

    def leaked_since(self, before: Belongings) -> list[str]:
        """Returns a description of each change since ``before``."""
        found = []
        for field in fields(self):
            was, now = getattr(before, field.name), getattr(self, field.name)
            if isinstance(now, frozenset):
                more = _ours(now - was) if field.name == "processes" else map(str, now - was)
                found += [f"{field.name}: {item}" for item in sorted(more)]
            elif was != now:
                found.append(f"{field.name}: {was} became {now}")
        return found


def _variables() -> Iterator[tuple[str, str]]:
    # set by pytest, or permanently by the first import of a library
    ignored = (
        "PYTEST_",
        "KMP_",
        "COLUMNS",
        "LINES",
        "PYTHONHASHSEED",
        "TORCHINDUCTOR_CACHE_DIR",  # set by torch's compiler
    )
    return ((k, v) for k, v in os.environ.items() if not k.startswith(ignored))


def _ours(processes: Iterable[str]) -> Iterator[str]:
    """Yields the processes with our mark, including orphans of tests."""
    entry = f"{MARK}={os.getpid()}".encode()
    for name in processes:
        with contextlib.suppress(OSError):
            folder = Path("/proc") / name
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                if words:  # empty for a zombie
                    yield f"{name} {words.decode(errors='replace').strip()}"


def _descriptors() -> Iterator[str]:
    for name in _names("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/self/fd/{name}").readlink())
            if not target.startswith(("/proc/", "/dev/", "anon_inode:")):
                yield f"{name} → {target}"


def _files() -> Iterator[str]:
    """Yields files and folders at the top of the repository and of the working directory."""
    for folder in {REPOSITORY, Path.cwd()}:
        for entry in os.scandir(folder):
            if entry.name not in _OWN_FILES and not entry.name.startswith("."):
                yield entry.path


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _names(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a variable, thread, process, descriptor, file, mount or network."""
    before = Belongings.now()
    yield
    deadline = time.monotonic() + TIMEOUT_S
    if Belongings.now().leaked_since(before):
        gc.collect()  # descriptors in reference cycles would stay open until the next collection
    while leaked := Belongings.now().leaked_since(before):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind:\n  " + "\n  ".join(leaked), pytrace=False)
        time.sleep(0.05)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists tests that were skipped because something is missing."""
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple) and "not run: " in report.longrepr[2]:
            reason = report.longrepr[2].partition("not run: ")[2]
            terminalreporter.write_line(f"not run: {report.nodeid}: {reason}")


class LabFactory(Protocol):
    """Starts a lab that lasts for the tests of a module."""

    def __call__(self, **options: Any) -> Lab: ...


def require_lab(reason: str | None) -> None:
    """Skips a test without a lab; in CI, a missing lab is a failure."""
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"no lab here: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def new_lab() -> Iterator[LabFactory]:
    """Returns ``new_lab(hosts=2, …)``, which takes the fields of ``LabOptions``."""
    require_lab(Lab.available())
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Lab(LabOptions(**options)))
