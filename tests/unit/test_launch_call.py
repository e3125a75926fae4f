"""A function as a job: how it is packed, what is refused, and what is made of its end."""

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
from paceline.launch.results.summary import RunOutcome
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


def test_launch_is_the_function_although_a_folder_has_its_name() -> None:
    assert paceline.launch is sys.modules["paceline.api"].launch  # type: ignore[comparison-overlap]
    assert isinstance(sys.modules["paceline.launch"], ModuleType)


# --- packing


def test_a_function_imports_from_the_main_script_first(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch,
                                                       ) -> None:  # fmt: skip
    entry = call.entry_of_function(train)
    assert entry.kind == "function"
    assert entry.target == "train()"
    assert entry.args[0] == str(Path.cwd())  # pytest's own script is installed
    assert str(Path(__file__).parent) in entry.args
    assert not [folder for folder in entry.args if "site-packages" in folder]
    (tmp_path / "main.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "main.py"),
                        raising=False)  # fmt: skip
    assert call.entry_of_function(train).args[0] == str(tmp_path)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(SettingError, match="without calling it"):
        call.entry_of_function(train(3))  # type: ignore[arg-type]


def test_names_of_functions() -> None:
    assert call.function_name(train) == "train"
    assert call.function_name(lambda: 1) == "lambda"
    assert call.function_name(functools.partial(train, 1)) == "train"
    assert call.function_name(Host("n1").__repr__) == "__repr__"


def test_folders_of_the_code_move_with_it() -> None:
    folders = ("/home/u/proj/src", "/home/u/proj", "/opt/other")
    entry = Entry("function", "f()", folders, sha256="ab")
    moved = entry_at(entry, "/home/u/proj", Path("/home/u/proj"), "/cache/code")
    assert moved.args == ("/cache/code/src", "/cache/code")
    assert moved.sha256 == with_inputs(moved, ()).sha256 == "ab"


def test_the_argument_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as refused:
        call.write_call(tmp_path / "call", train, (1, threading.Lock()), {}, ())
    assert "train(): args[1] is a _thread.lock" in str(refused.value)
    with pytest.raises(SettingError, match=r"train\(\): kwargs\['at'\] is a _thread.lock"):
        call.write_call(tmp_path / "call", train, (), {"at": threading.Lock()}, ())


def test_a_rank_calls_only_what_the_launching_machine_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file lies in the run directory, whose place others may be able to take."""
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    sha256, _ = call.write_call(tmp_path / "call", train, (1,), {}, ())
    entry = entry_json(Entry("function", "train()", (), sha256))
    assert b"def train" in FunctionCall(entry, print).source
    (tmp_path / "call").rename(tmp_path / "old")
    call.write_call(tmp_path / "call", print, ("planted",), {}, ())
    with pytest.raises(pickles.DamagedError, match="hash that its writer told"):
        FunctionCall(entry, print)


def test_modules_elsewhere_travel_and_those_of_the_project_do_not() -> None:
    here = sys.modules[__name__]
    assert here in call.unshipped_modules(None)
    assert here not in call.unshipped_modules(Path(__file__).parent)
    assert not {"torch", "numpy", "paceline", "pytest", "json"}.intersection(
        module.__name__.split(".")[0] for module in call.unshipped_modules(None)
    )


def test_torch_is_imported_for_those_who_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {name: one for name, one in sys.modules.items() if name.split(".")[0] != "torch"}
    monkeypatch.setattr(call.sys, "modules", loaded)  # type: ignore[attr-defined]
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec("def plain(): return 1\ndef deep():\n import torch\n return torch.optim", typed)
    for name in ("plain", "deep"):
        pickled = cloudpickle.dumps(typed[name])
        found = call.preload_of_call(typed[name], pickled)
        assert found == {"plain": (), "deep": ("torch", "torch._dynamo?")}[name]


def test_another_minor_version_of_python_is_refused() -> None:
    facts = {"n1": {"python": {"version": "3.9.2"}}}
    judge = call.require_same_python(lambda hosts, facts, noise: ["kept"])
    with pytest.raises(NodeError) as refused:
        judge([Host("n1")], facts, {})
    assert "n1 3.9.2" in str(refused.value)
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert judge([Host("n1")], {"n1": {"python": {"version": f"{ours}.99"}}}, {}) == ["kept"]


def test_an_unsuitable_call_leaves_no_folder(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError):
        paceline.launch(lambda lock: None, (threading.Lock(),))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("asked", "said"), [
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
def test_what_means_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       asked: dict[str, Any], said: str) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError) as refused:
        paceline.launch(len, **asked)
    assert said in str(refused.value)


def test_hosts_and_paths_as_people_pass_them(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Lists of hosts as other launchers take them, and texts for paths."""
    monkeypatch.chdir(tmp_path)
    where: list[Any] = []

    def run_job(job: Job, cluster: Cluster, transport: object, screen: object, *,
                run_dir: Path, **_: object) -> None:  # fmt: skip
        where[:] = job.hosts.value, [host.name for host in cluster.hosts], run_dir
        raise SettingError("far enough")

    monkeypatch.setattr(api, "run_job", run_job)
    with pytest.raises(SettingError, match="far enough"):
        paceline.launch(len, hosts=["n1", "n2"], ssh_config="ssh config", run_dir="a b")
    assert where == ["n1,n2", ["n1", "n2"], tmp_path / "a b"]


def test_lengths_of_time_as_people_type_them() -> None:
    typed = {"90": 90, 90: 90, 0.5: 0.5, "10m": 600, "1h30m": 5400, "1.5s": 1.5, "2d": 172800}
    assert {said: parse_duration(said) for said in typed} == typed
    for said in ("", "m", "10x", "1h 30m", "-1", -1, "inf", "nan", float("nan")):
        with pytest.raises(ValueError):
            parse_duration(said)


def test_a_function_may_name_the_package_that_launches_it() -> None:
    """A module of a type of its own travels by its name, too."""
    packed = cloudpickle.dumps(lambda: paceline.__version__)
    assert pickle.loads(packed)() == paceline.__version__
    assert pickle.loads(pickle.dumps(paceline)) is paceline


# --- what comes back


def outcome(folder: Path, *events: Event, failure: Failure | None = None,
            ranks: int = 2) -> RunOutcome:  # fmt: skip
    result = Result(0 if failure is None else failure.status, failure)
    return RunOutcome(folder, result, events, {}, 1.0, ranks=ranks)


def left(folder: Path, rank: int, value: Any, kind: str = "returned") -> Event:
    (folder / "returned").mkdir(exist_ok=True)
    path = folder / "returned" / str(rank)
    written = pickles.write(str(path), [("it", value)], cloudpickle)
    about = {"bytes": written.size, "sha256": written.sha256}
    return Event(kind, f"n{rank}", rank, fields=about)


def test_only_what_a_call_has_left_is_removed(tmp_path: Path) -> None:
    returned = tmp_path / "returned"
    with temporary_call_folder(tmp_path, "train"):
        (tmp_path / "call").touch()
        returned.mkdir()
        for name in ("0", "-1", "notes.txt"):
            (returned / name).touch()
    assert [path.name for path in returned.iterdir()] == ["notes.txt"]
    assert not (tmp_path / "call").exists()


def test_a_link_is_not_emptied(tmp_path: Path) -> None:
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


def test_results_come_by_rank_and_by_host(tmp_path: Path) -> None:
    events = [left(tmp_path, 1, "b"), left(tmp_path, 0, "a"), Event("started"), Event("ended")]
    found = call.collect_results(outcome(tmp_path, *events))
    assert list(found) == ["a", "b"]
    assert found.by_host == {"n0": ("a",), "n1": ("b",)}
    assert (len(found), found[-1], found[:1]) == (2, "b", ("a",))


def test_values_of_a_start_that_failed_do_not_count(tmp_path: Path) -> None:
    first = [Event("started"), left(tmp_path, 0, "old"), Event("ended")]
    with pytest.raises(RankError, match="rank 0 ended without returning"):
        call.collect_results(outcome(tmp_path, *first, Event("started"), left(tmp_path, 1, "new")))


def test_a_rank_that_was_lost_for_good_is_not_said_to_have_ended(tmp_path: Path) -> None:
    lost = Event("rank ended", "n1", 1, fields={"code": None, "signal": 9})
    again = [Event("rank started", "n1", 1),
             Event("newcomer lost", "n1", 1, fields={"why": "boom"}),
             Event("rank ended", "n1", 1, fields={"code": 1, "signal": None})]  # fmt: skip
    with pytest.raises(RankError, match="rank 1 on n1 was lost and had not come back") as raised:
        call.collect_results(outcome(tmp_path, lost, *again, left(tmp_path, 0, "a")))
    assert "its restart failed: boom" in str(raised.value)
    assert raised.value.returned == {0: "a"}
    assert (raised.value.host, raised.value.rank) == ("n1", 1)


def test_what_is_not_what_the_rank_told_is_not_loaded(tmp_path: Path) -> None:
    events = [left(tmp_path, 0, "told"), left(tmp_path, 1, "b")]
    left(tmp_path, 0, "else")
    with pytest.raises(RankError, match="hash that its writer told") as refused:
        call.collect_results(outcome(tmp_path, *events))
    assert (refused.value.host, refused.value.rank) == ("n0", 0)


class PickyError(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


def failed(traceback: str = "Traceback: line 3") -> Failure:
    return Failure("exception", "n1", 1, headline="PickyError: 1 and 2", traceback=traceback)


def test_the_first_failing_ranks_own_exception_is_raised(tmp_path: Path) -> None:
    parts = (PickyError, ("1 and 2",), {"one": 1})  # as a rank leaves what cannot be made by a call
    with pytest.raises(PickyError) as raised:
        call.collect_results(
            outcome(tmp_path, left(tmp_path, 1, parts, "raised"), failure=failed())
        )
    assert raised.value.one == 1
    assert raised.value.args == ("1 and 2",)
    cause = raised.value.__cause__
    assert isinstance(cause, RankError)
    assert (cause.host, cause.rank, cause.traceback) == ("n1", 1, "Traceback: line 3")
    assert "rank 1 on n1: PickyError: 1 and 2" in str(cause)
    assert "line 3" in str(cause)


def test_an_exception_that_did_not_come_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="line 3"):
        call.collect_results(outcome(tmp_path, failure=failed()))
    damaged = left(tmp_path, 1, PickyError, "raised")
    (tmp_path / "returned" / "1").write_bytes(b"")
    with pytest.raises(RankError, match="cannot be raised here"):
        call.collect_results(outcome(tmp_path, damaged, failure=failed()))


def test_a_killed_rank_is_no_exception_of_the_function(tmp_path: Path) -> None:
    killed = Failure("signal", "n0", 0, signal=9, headline="killed by SIGKILL")
    with pytest.raises(RankError, match="killed by SIGKILL") as raised:
        call.collect_results(outcome(tmp_path, failure=killed))
    assert raised.value.exit_code == 137


# --- anywhere


async def answer() -> tuple[int, bool]:
    await asyncio.sleep(0)
    return 42, threading.current_thread() is threading.main_thread()


def test_a_run_needs_no_thread_where_no_loop_runs() -> None:
    assert interrupts.run(answer()) == (42, True)


def test_a_run_has_a_thread_of_its_own_beside_a_running_loop() -> None:
    async def outside() -> tuple[int, bool]:
        return interrupts.run(answer())

    assert asyncio.run(outside()) == (42, False)


def test_a_run_in_a_thread_takes_no_signals() -> None:
    found: list[Any] = []

    async def listening() -> list[int]:
        with interrupts.Interrupts(lambda: None) as heard:
            return heard.received

    thread = threading.Thread(target=lambda: found.append(interrupts.run(listening())))
    thread.start()
    thread.join()
    assert found == [[]]


@pytest.mark.parametrize(
    ("later_s", "signum", "count"),
    [(0.0, signal.SIGINT, 1), (0.0, signal.SIGTERM, 1), (1.0, signal.SIGINT, 2),
     (1.0, signal.SIGHUP, 1)],
)  # fmt: skip
def test_an_echo_of_a_signal_is_no_second_wish(
    monkeypatch: pytest.MonkeyPatch, later_s: float, signum: signal.Signals, count: int
) -> None:
    """`timeout` and `uv run` pass Ctrl-C on to whoever had it; a terminal's end is told twice."""
    clock = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def listening() -> int:
        with interrupts.Interrupts(lambda: None) as heard:
            signal.raise_signal(signal.SIGINT)
            await heard.wait()
            clock[0] += later_s
            signal.raise_signal(signum)
            await asyncio.sleep(0.05)  # handlers are called by the loop
            return len(heard.received)

    assert asyncio.run(listening()) == count


def test_signals_beside_a_running_loop_reach_the_run() -> None:
    async def listening() -> list[int]:
        with interrupts.Interrupts(lambda: None) as heard:
            signal.raise_signal(signal.SIGINT)
            await heard.wait()
            return heard.received

    async def outside() -> list[int]:
        return interrupts.run(listening())

    before = signal.getsignal(signal.SIGTERM)
    assert asyncio.run(outside()) == [signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_the_run_listens_ends_it() -> None:
    async def waiting() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    async def outside() -> None:
        interrupts.run(waiting())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(outside())


def test_handlers_of_the_caller_are_put_back() -> None:
    async def listening() -> None:
        with interrupts.Interrupts(lambda: None):
            pass

    mine = lambda signum, frame: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, mine)
    try:
        interrupts.run(listening())
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
