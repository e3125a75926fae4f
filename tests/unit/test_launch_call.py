"""Tests launching a function as a job: packing, rejected calls, results and exceptions."""

from __future__ import annotations

import asyncio
import functools
import pickle
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import paceline
from paceline import api
from paceline.agent.ranks import pickles
from paceline.agent.ranks.function_call import FunctionCall
from paceline.launch import call, interrupts
from paceline.launch.call import RankError, temporary_call_folder
from paceline.launch.planning.placement import with_inputs
from paceline.launch.results.run_outcome import RunOutcome
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.events import Event
from paceline.spec.failure import Failure, Result
from paceline.spec.formatting import parse_duration
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job
from paceline.spec.plan import entry_json
from paceline.transfer.tree import entry_at


def train(scale: int) -> int:
    return scale


def test_launch_attribute_is_function_not_package() -> None:
    assert paceline.launch is sys.modules["paceline.api"].launch  # type: ignore[comparison-overlap]
    assert isinstance(sys.modules["paceline.launch"], ModuleType)


# --- packing


def test_function_entry_searches_main_script_first(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch,
                                                       ) -> None:  # fmt: skip
    entry = call.entry_of_function(train)
    assert entry.kind == "function"
    assert entry.target == "train()"
    assert entry.args[0] == str(Path.cwd())  # pytest itself is installed
    assert str(Path(__file__).parent) in entry.args
    assert not [folder for folder in entry.args if "site-packages" in folder]
    (tmp_path / "main.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "main.py"),
                        raising=False)  # fmt: skip
    assert call.entry_of_function(train).args[0] == str(tmp_path)


def test_rejects_call_result_as_function() -> None:
    with pytest.raises(SettingError, match="without calling it"):
        call.entry_of_function(train(3))  # type: ignore[arg-type]


def test_function_names() -> None:
    assert call.function_name(train) == "train"
    assert call.function_name(lambda: 1) == "lambda"
    assert call.function_name(functools.partial(train, 1)) == "train"
    assert call.function_name(Host("n1").__repr__) == "__repr__"


def test_import_paths_move_with_code() -> None:
    folders = ("/home/u/proj/src", "/home/u/proj", "/opt/other")
    entry = Entry("function", "f()", folders, sha256="ab")
    moved = entry_at(entry, "/home/u/proj", Path("/home/u/proj"), "/cache/code")
    assert moved.args == ("/cache/code/src", "/cache/code")
    assert moved.sha256 == with_inputs(moved, ()).sha256 == "ab"


def test_unpicklable_argument_is_named_in_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as exc_info:
        call.write_call(tmp_path / "call", train, (1, threading.Lock()), {}, ())
    assert "train(): args[1] is a _thread.lock" in str(exc_info.value)
    with pytest.raises(SettingError, match=r"train\(\): kwargs\['at'\] is a _thread.lock"):
        call.write_call(tmp_path / "call", train, (), {"at": threading.Lock()}, ())


def test_rank_rejects_replaced_call_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users may be able to replace the run directory that contains the file."""
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    sha256, _ = call.write_call(tmp_path / "call", train, (1,), {}, ())
    entry = entry_json(Entry("function", "train()", (), sha256))
    assert b"def train" in FunctionCall(entry, print).source
    (tmp_path / "call").rename(tmp_path / "old")
    call.write_call(tmp_path / "call", print, ("planted",), {}, ())
    with pytest.raises(pickles.DamagedError, match="hash that its writer told"):
        FunctionCall(entry, print)


def test_only_modules_outside_project_are_pickled() -> None:
    this_module = sys.modules[__name__]
    assert this_module in call.unshipped_modules(None)
    assert this_module not in call.unshipped_modules(Path(__file__).parent)
    assert not {"torch", "numpy", "paceline", "pytest", "json"}.intersection(
        module.__name__.split(".")[0] for module in call.unshipped_modules(None)
    )


def test_preloads_torch_only_if_function_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {name: one for name, one in sys.modules.items() if name.split(".")[0] != "torch"}
    monkeypatch.setattr(call.sys, "modules", loaded)  # type: ignore[attr-defined]
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec("def plain(): return 1\ndef deep():\n import torch\n return torch.optim", typed)
    for name in ("plain", "deep"):
        pickled = cloudpickle.dumps(typed[name])
        actual = call.preload_of_call(typed[name], pickled)
        assert actual == {"plain": (), "deep": ("torch", "torch._dynamo?")}[name]


def test_rejects_different_python_minor_version() -> None:
    facts = {"n1": {"python": {"version": "3.9.2"}}}
    check_hosts = call.require_same_python(lambda hosts, facts, noise: ["kept"])
    with pytest.raises(NodeError) as exc_info:
        check_hosts([Host("n1")], facts, {})
    assert "n1 3.9.2" in str(exc_info.value)
    this_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert check_hosts([Host("n1")], {"n1": {"python": {"version": f"{this_version}.99"}}}, {}) == [
        "kept"
    ]


def test_rejected_call_creates_no_run_dir(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError):
        paceline.launch(lambda lock: None, (threading.Lock(),))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("options", "text"), [
    ({"args": "abc"}, "args of launch is a str"),
    ({"args": 7}, "args of launch is a int"),
    ({"args": {"epochs": 3}}, "args of launch is a dict"),
    ({"kwargs": [1]}, "kwargs of launch is a list"),
    ({"nproc_per_node": "many"}, "nproc_per_node: 'many'"),
    ({"show": "quiet"}, "show: 'quiet'"),
    ({"keep_warm": "soon"}, "keep_warm: 'soon' is not a length of time"),
    ({"keep_warm": "-1"}, "keep_warm: '-1' is not a length of time"),
    ({"wait_for_nodes": "ten"}, "wait_for_nodes: 'ten' is not a length of time"),
])  # fmt: skip
def test_rejects_invalid_launch_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       options: dict[str, Any], text: str) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError) as exc_info:
        paceline.launch(len, **options)
    assert text in str(exc_info.value)


def test_accepts_host_lists_and_string_paths(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Hosts may be a list, and paths may be strings."""
    monkeypatch.chdir(tmp_path)
    run_args: list[Any] = []

    def run_job(job: Job, cluster: Cluster, transport: object, screen: object, *,
                run_dir: Path, **_: object) -> None:  # fmt: skip
        run_args[:] = job.hosts.value, [host.name for host in cluster.hosts], run_dir
        raise SettingError("far enough")

    monkeypatch.setattr(api, "run_job", run_job)
    with pytest.raises(SettingError, match="far enough"):
        paceline.launch(len, hosts=["n1", "n2"], ssh_config="ssh config", run_dir="a b")
    assert run_args == ["n1,n2", ["n1", "n2"], tmp_path / "a b"]


def test_parses_durations() -> None:
    typed = {"90": 90, 90: 90, 0.5: 0.5, "10m": 600, "1h30m": 5400, "1.5s": 1.5, "2d": 172800}
    assert {text: parse_duration(text) for text in typed} == typed
    for text in ("", "m", "10x", "1h 30m", "-1", -1, "inf", "nan", float("nan")):
        with pytest.raises(ValueError):
            parse_duration(text)


def test_function_may_reference_paceline() -> None:
    """The package's module has a type of its own, and is still pickled by its name."""
    packed = cloudpickle.dumps(lambda: paceline.__version__)
    assert pickle.loads(packed)() == paceline.__version__
    assert pickle.loads(pickle.dumps(paceline)) is paceline


# --- results


def outcome(folder: Path, *events: Event, failure: Failure | None = None,
            ranks: int = 2) -> RunOutcome:  # fmt: skip
    result = Result(0 if failure is None else failure.status, failure)
    return RunOutcome(folder, result, events, {}, 1.0, ranks=ranks)


def write_result(folder: Path, rank: int, value: Any, kind: str = "returned") -> Event:
    (folder / "returned").mkdir(exist_ok=True)
    path = folder / "returned" / str(rank)
    written = pickles.write(str(path), [("it", value)], cloudpickle)
    file_info = {"bytes": written.size, "sha256": written.sha256}
    return Event(kind, f"n{rank}", rank, fields=file_info)


def test_call_folder_cleanup_keeps_foreign_files(tmp_path: Path) -> None:
    returned = tmp_path / "returned"
    with temporary_call_folder(tmp_path, "train"):
        (tmp_path / "call").touch()
        returned.mkdir()
        for name in ("0", "-1", "notes.txt"):
            (returned / name).touch()
    assert [path.name for path in returned.iterdir()] == ["notes.txt"]
    assert not (tmp_path / "call").exists()


def test_call_folder_cleanup_does_not_follow_symlinks(tmp_path: Path) -> None:
    run, documents = tmp_path / "run", tmp_path / "documents"
    for folder in (run, documents):
        folder.mkdir()
    (documents / "0").touch()
    with temporary_call_folder(run, "train"):
        (run / "returned").symlink_to(documents)
    assert [path.name for path in documents.iterdir()] == ["0"]
    with pytest.raises(SettingError, match="links under names"), temporary_call_folder(run, "x"):
        pass
    assert (documents / "0").exists()


def test_results_are_indexed_by_rank_and_host(tmp_path: Path) -> None:
    events = [
        write_result(tmp_path, 1, "b"),
        write_result(tmp_path, 0, "a"),
        Event("started"),
        Event("ended"),
    ]
    actual = call.collect_results(outcome(tmp_path, *events))
    assert list(actual) == ["a", "b"]
    assert actual.by_host == {"n0": ("a",), "n1": ("b",)}
    assert (len(actual), actual[-1], actual[:1]) == (2, "b", ("a",))


def test_ignores_results_of_failed_attempt(tmp_path: Path) -> None:
    first = [Event("started"), write_result(tmp_path, 0, "old"), Event("ended")]
    with pytest.raises(RankError, match="rank 0 ended without returning"):
        call.collect_results(
            outcome(tmp_path, *first, Event("started"), write_result(tmp_path, 1, "new"))
        )


def test_error_names_lost_rank_and_failed_restart(tmp_path: Path) -> None:
    lost = Event("rank ended", "n1", 1, fields={"code": None, "signal": 9})
    rejoin_events = [Event("rank started", "n1", 1),
             Event("newcomer lost", "n1", 1, fields={"why": "boom"}),
             Event("rank ended", "n1", 1, fields={"code": 1, "signal": None})]  # fmt: skip
    with pytest.raises(RankError, match="rank 1 on n1 was lost and had not come back") as raised:
        call.collect_results(
            outcome(tmp_path, lost, *rejoin_events, write_result(tmp_path, 0, "a"))
        )
    assert "its restart failed: boom" in str(raised.value)
    assert raised.value.returned == {0: "a"}
    assert (raised.value.host, raised.value.rank) == ("n1", 1)


def test_rejects_result_with_wrong_hash(tmp_path: Path) -> None:
    events = [write_result(tmp_path, 0, "told"), write_result(tmp_path, 1, "b")]
    write_result(tmp_path, 0, "else")
    with pytest.raises(RankError, match="hash that its writer told") as exc_info:
        call.collect_results(outcome(tmp_path, *events))
    assert (exc_info.value.host, exc_info.value.rank) == ("n0", 0)


class PickyError(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


def script_failure(traceback: str = "Traceback: line 3") -> Failure:
    return Failure("exception", "n1", 1, headline="PickyError: 1 and 2", traceback=traceback)


def test_raises_exception_of_first_failed_rank(tmp_path: Path) -> None:
    parts = (PickyError, ("1 and 2",), {"one": 1})  # an exception in parts, as a rank stores it
    with pytest.raises(PickyError) as raised:
        call.collect_results(
            outcome(tmp_path, write_result(tmp_path, 1, parts, "raised"), failure=script_failure())
        )
    assert raised.value.one == 1
    assert raised.value.args == ("1 and 2",)
    cause = raised.value.__cause__
    assert isinstance(cause, RankError)
    assert (cause.host, cause.rank, cause.traceback) == ("n1", 1, "Traceback: line 3")
    assert "rank 1 on n1: PickyError: 1 and 2" in str(cause)
    assert "line 3" in str(cause)


def test_missing_exception_is_reported_as_text(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="line 3"):
        call.collect_results(outcome(tmp_path, failure=script_failure()))
    damaged = write_result(tmp_path, 1, PickyError, "raised")
    (tmp_path / "returned" / "1").write_bytes(b"")
    with pytest.raises(RankError, match="cannot be raised here"):
        call.collect_results(outcome(tmp_path, damaged, failure=script_failure()))


def test_killed_rank_raises_rank_error(tmp_path: Path) -> None:
    killed = Failure("signal", "n0", 0, signal=9, headline="killed by SIGKILL")
    with pytest.raises(RankError, match="killed by SIGKILL") as raised:
        call.collect_results(outcome(tmp_path, failure=killed))
    assert raised.value.exit_code == 137


# --- running inside any program


async def compute() -> tuple[int, bool]:
    await asyncio.sleep(0)
    return 42, threading.current_thread() is threading.main_thread()


def test_run_uses_main_thread_outside_event_loop() -> None:
    assert interrupts.run(compute()) == (42, True)


def test_run_uses_separate_thread_inside_event_loop() -> None:
    async def outer() -> tuple[int, bool]:
        return interrupts.run(compute())

    assert asyncio.run(outer()) == (42, False)


def test_run_in_thread_receives_no_signals() -> None:
    actual: list[Any] = []

    async def listening() -> list[int]:
        with interrupts.Interrupts(lambda: None) as caught:
            return caught.received

    thread = threading.Thread(target=lambda: actual.append(interrupts.run(listening())))
    thread.start()
    thread.join()
    assert actual == [[]]


@pytest.mark.parametrize(
    ("delay_s", "signum", "count"),
    [(0.0, signal.SIGINT, 1), (0.0, signal.SIGTERM, 1), (1.0, signal.SIGINT, 2),
     (1.0, signal.SIGHUP, 1)],
)  # fmt: skip
def test_echoed_signals_count_once(
    monkeypatch: pytest.MonkeyPatch, delay_s: float, signum: signal.Signals, count: int
) -> None:
    """`timeout` and `uv run` repeat Ctrl-C, and a closing terminal sends two signals."""
    clock = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def listening() -> int:
        with interrupts.Interrupts(lambda: None) as caught:
            signal.raise_signal(signal.SIGINT)
            await caught.wait()
            clock[0] += delay_s
            signal.raise_signal(signum)
            await asyncio.sleep(0.05)  # the loop calls the handlers
            return len(caught.received)

    assert asyncio.run(listening()) == count


def test_signals_reach_run_inside_event_loop() -> None:
    async def listening() -> list[int]:
        with interrupts.Interrupts(lambda: None) as caught:
            signal.raise_signal(signal.SIGINT)
            await caught.wait()
            return caught.received

    async def outer() -> list[int]:
        return interrupts.run(listening())

    previous_handler = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(outer()) == [signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is previous_handler


def test_signal_before_handlers_interrupts_run() -> None:
    async def waiting() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    async def outer() -> None:
        interrupts.run(waiting())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(outer())


def test_restores_signal_handlers_of_caller() -> None:
    async def listening() -> None:
        with interrupts.Interrupts(lambda: None):
            pass

    custom_handler = lambda signum, frame: None  # noqa: E731
    previous_handler = signal.signal(signal.SIGTERM, custom_handler)
    try:
        interrupts.run(listening())
        assert signal.getsignal(signal.SIGTERM) is custom_handler
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
