"""Tests following a detached run: its local folder is updated, and complete at the end."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import detached_runs
from paceline.agent.supervision import processes
from paceline.remote.channel import AgentRefusal
from paceline.rundir import signed_model
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.ownership import detached_of
from paceline.spec import rundir
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import NodeError
from paceline.spec.rundir import is_growing
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest
from paceline.transfer import follow
from paceline.transfer.detached_outputs import adopt_outputs, with_outputs
from paceline.transfer.follow import Follower, RunState, is_mirrored
from paceline.transfer.output_folders import RUN_PREFIX
from paceline.transfer.outputs import OutputStore
from paceline.transfer.tree import Tree
from real_agents import Served, agent_in_thread

RUN_ID = "ab" * 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the agent a private cache, and treats short files as large."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(follow, "MAX_SMALL_BYTES", 1000)
    monkeypatch.setattr(follow, "BLOCK_BYTES", 64)
    return tmp_path / "cache" / "paceline"


def make_remote_run(cache: Path, **changes: Any) -> Path:
    """Writes a detached run whose supervisor is this process; returns its run directory."""
    folder = cache / "detached" / RUN_ID
    (folder / "run").mkdir(parents=True, exist_ok=True)
    proc = processes.identify(os.getpid())
    assert proc is not None
    run_record = {"run_id": RUN_ID, "name": "job", "command": ["paceline", "run"], "hosts": ["n1"],
             "started": 5.0, "launched_by": "me@here", "launched_in": "/x/runs/job",
             "supervisor_host": socket.gethostname(), "pid": proc.pid, "pid_start": proc.start,
             "run": str(folder / "run"), "ended": None, "exit_code": None, **changes}  # fmt: skip
    (folder / "about.json").write_text(json.dumps(run_record))
    return folder / "run"


def make_local_run(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(exist_ok=True)
    location = SupervisorLocation(RUN_ID, "n1", "n1", "/somewhere", 4.0)
    (path / DETACHED).write_text(json.dumps(location.to_json()))
    return path


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def run(path: Path, work: Callable[[Follower, Served], Coroutine[Any, Any, None]]) -> None:
    async def serve() -> None:
        async with agent_in_thread() as served:
            await work(Follower(served.node.channel, RUN_ID, path), served)

    asyncio.run(serve())


def test_refresh_transfers_only_additions(cache: Path, tmp_path: Path) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    log = "line\n" * 200
    fill(remote, {"events.jsonl": "{}\n", "logs/n1/0.log": log, "plan.json": '{"a": 1}',
          "model/weights": "w" * 50, ".hidden": "x", "owner.json": "{}"})  # fmt: skip

    async def work(follower: Follower, served: Served) -> None:
        first = await follower.refresh()
        assert (first.state, first.has_changed, first.is_over) == ("running", True, False)
        assert (path / "logs/n1/0.log").read_text() == log
        assert (path / "plan.json").read_text() == '{"a": 1}'
        assert not (path / ".hidden").exists()
        assert not (path / "owner.json").exists()
        assert not (path / "model").exists()  # fetched at the end
        previous = served.line.passed
        assert (await follower.refresh()).has_changed is False
        with (remote / "logs/n1/0.log").open("a") as file:
            file.write("more\n")
        fill(remote, {"plan.json": '{"a": 2}'})
        assert (await follower.refresh()).has_changed
        assert served.line.passed - previous < 3000  # not the log's 1000 old bytes again
        assert (path / "logs/n1/0.log").read_text() == log + "more\n"
        assert (path / "plan.json").read_text() == '{"a": 2}'

    run(path, work)


def test_refresh_extends_partial_and_replaces_foreign_files(cache: Path, tmp_path: Path) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    log = "".join(f"line {number}\n" for number in range(100))
    logs = dict.fromkeys(("logs/n1/0.log", "logs/n1/1.log", "logs/n1/2.log"), log)
    fill(remote, {**logs, "events.jsonl": "short\n"})
    fill(
        path,
        {
            "logs/n1/0.log": log[:500],
            "logs/n1/1.log": "other\n" * 20,
            "logs/n1/2.log": log.replace("line 0\n", "line X\n"),  # of the same script
            "events.jsonl": "much longer than there\n",
            "result.json": "{}",
            "ranks.json": "{}",
        },
    )

    async def work(follower: Follower, _: Served) -> None:
        assert (await follower.refresh()).state == "running"
        for name in logs:
            assert (path / name).read_text() == log
        assert (path / "events.jsonl").read_text() == "short\n"
        (previous,) = path.glob("events-before-*.jsonl")
        assert previous.read_text() == "much longer than there\n"
        assert not (path / "result.json").exists()  # from an earlier start
        fill(remote, {"ranks.json": "[]"})
        await follower.refresh()
        (remote / "ranks.json").unlink()
        await follower.refresh()
        assert not (path / "ranks.json").exists()

    run(path, work)


def test_concurrent_followers_keep_files_intact(cache: Path, tmp_path: Path) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    fill(remote, {"metrics.jsonl": "1\n" * 300})

    async def work(follower: Follower, served: Served) -> None:
        second_follower = Follower(served.node.channel, RUN_ID, path)
        for number in range(5):
            with (remote / "metrics.jsonl").open("a") as file:
                file.write(f"{number}\n" * 50)
            served.agent.listed_files.clear()  # as if each client had its own agent
            await asyncio.gather(follower.refresh(), second_follower.refresh())
        assert (path / "metrics.jsonl").read_bytes() == (remote / "metrics.jsonl").read_bytes()

    run(path, work)


def test_concurrent_requests_share_run_lock(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote_run(cache)
    opened, open_lock = threading.Barrier(2), detached_runs._open_lock

    def open_together(folder: Path) -> int:
        opened.wait(20)
        return open_lock(folder)

    async def work(follower: Follower, served: Served) -> None:
        second_follower = Follower(served.node.channel, RUN_ID, follower._path)
        with monkeypatch.context() as patch:
            patch.setattr(detached_runs, "_open_lock", open_together)
            await asyncio.gather(follower.refresh(), second_follower.refresh())
        assert len(served.agent.run_locks) == 1  # no other descriptor is left open

    run(make_local_run(tmp_path), work)


def test_finish_fetches_files_and_discard_removes_run(cache: Path, tmp_path: Path) -> None:
    remote, path = (
        make_remote_run(cache, pid=1 << 22, ended=9.0, exit_code=0),
        make_local_run(tmp_path),
    )
    weights = FileEntry(hashlib.sha256(b"c" * 300).hexdigest(), 300)
    manifest = Manifest(10, {"weights.safetensors": weights}, {}).encode().decode()
    fill(remote, {"result.json": '{"exit_code": 0}', "model/config.json": "{}", "big": "b" * 5000,
          "model/model.safetensors": "w" * 5000, "files/n1/out.txt": "o",
          "checkpoints/10/weights.safetensors": "c" * 300, "checkpoints/10/manifest.json": manifest,
          "checkpoints/latest.json": '{"step": 10}', "checkpoints/writer.json": "{}"})  # fmt: skip

    async def work(follower: Follower, _: Served) -> None:
        run_state = await follower.refresh()
        assert not await follower.discard(fetched=False)  # not completely fetched yet
        assert (run_state.state, run_state.is_over) == ("ended", True)
        assert detached_of(path) is not None
        await follower.finish()
        assert detached_of(path) is None  # now an ordinary run
        for name in ("model/model.safetensors", "big", "files/n1/out.txt",
                     "checkpoints/10/weights.safetensors", "checkpoints/latest.json",
                     "result.json"):  # fmt: skip
            assert (path / name).read_bytes() == (remote / name).read_bytes(), name
        assert not (path / "checkpoints/writer.json").exists()
        assert not (path / ".paceline-incoming").exists()
        async with agent_in_thread() as second_agent:  # another client
            (path.parent / "copy").mkdir()
            second_follower = Follower(second_agent.node.channel, RUN_ID, path.parent / "copy")
            await second_follower.refresh()
            assert not await follower.discard(fetched=True)
            await second_follower.finish()
            async with agent_in_thread() as third_agent:  # a client that stops following
                (path.parent / "part").mkdir()
                await Follower(third_agent.node.channel, RUN_ID, path.parent / "part").refresh()
                assert not await second_follower.discard(fetched=False)
                assert remote.exists()
        assert not remote.parent.exists()
        with pytest.raises(NodeError, match="has no run"):
            await follower.refresh()

    run(path, work)


def test_finish_signs_model(cache: Path, tmp_path: Path) -> None:
    remote = make_remote_run(cache, pid=1 << 22, ended=9.0, exit_code=0)
    path, digest = make_local_run(tmp_path), hashlib.sha256(b"trained").hexdigest()
    event = {"event": "model saved", "host": "n1", "rank": 0, "sha256": digest}
    fill(remote, {"result.json": "{}", "events.jsonl": json.dumps(event) + "\n",
                  "model/config.json": json.dumps({"sha256": digest}),
                  "model/model.safetensors": "trained"})  # fmt: skip

    async def work(follower: Follower, _: Served) -> None:
        await follower.finish()

    run(path, work)
    model = signed_model.verify_model(path)
    assert model is not None
    assert model.status == "signed"


@pytest.mark.parametrize("resumed", [False, True])
def test_previous_files_are_replaced_only_at_finish(
    cache: Path, tmp_path: Path, resumed: bool
) -> None:
    """They are backed up with a note, or replaced if the run resumes the earlier start."""
    remote, path = (
        make_remote_run(cache, pid=1 << 22, ended=9.0, exit_code=0),
        make_local_run(tmp_path),
    )
    start = Arrivals(path)
    start.record("out.txt")
    fill(path, {"out.txt": "first"})
    start.mark_start()
    events = '{"event": "resumed", "host": "n1", "rank": 0}\n' if resumed else ""
    small_files = {"config.json": "{}", "new.txt": "1"}
    fill(remote, {"result.json": "{}", "events.jsonl": events, "out.txt": "second", **small_files})

    async def work(follower: Follower, _: Served) -> None:
        notes: list[str] = []
        await follower.refresh()
        assert (path / "out.txt").read_text() == "first"
        fill(remote, dict.fromkeys(small_files, "changed"))
        await follower.refresh()
        assert {(path / name).read_text() for name in small_files} == {"changed"}
        assert not list(path.glob("files-before-*"))
        await follower.finish(note=notes.append)
        assert (path / "out.txt").read_text() == "second"
        backups = [file.read_text() for file in path.glob("files-before-*/out.txt")]
        assert backups == ([] if resumed else ["first"])
        assert ["differ moved to" in note for note in notes] == [True] * len(backups)

    run(path, work)


def test_detects_lost_supervisor_and_keeps_live_run(cache: Path, tmp_path: Path) -> None:
    path = make_local_run(tmp_path)
    make_remote_run(cache, pid=1 << 22)

    async def work(follower: Follower, _: Served) -> None:
        assert await follower.refresh() == RunState("lost", (await follower.refresh()).record)
        assert await follower.ask({"do": "state"}) is None
        assert not await follower.signal(1)
        make_remote_run(cache)
        follower._afresh = True
        assert (await follower.refresh()).state == "running"
        assert not await follower.discard(fetched=True)
        make_remote_run(cache, supervisor_host="another", pid=1 << 22)  # shares the folder
        assert (await follower.refresh()).state == "running"

    run(path, work)


def test_lock_shows_supervisor_in_foreign_pid_namespace(cache: Path, tmp_path: Path) -> None:
    """A container may share its host's name without seeing the host's processes."""
    remote, path = make_remote_run(cache, pid=1 << 22), make_local_run(tmp_path)
    fill(remote, {rundir.PROBE: "x"})

    async def work(follower: Follower, _: Served) -> None:
        with (remote / rundir.PROBE).open() as probe:
            fcntl.flock(probe, fcntl.LOCK_SH)
            assert (await follower.refresh()).state == "running"
            assert not await follower.discard(fetched=True)
        assert (await follower.refresh()).state == "lost"
        assert await follower.discard(fetched=True)

    run(path, work)


def test_discard_awaits_supervisor_exit(cache: Path, tmp_path: Path) -> None:
    """Everything may have been fetched between the supervisor's last report and its exit."""
    with subprocess.Popen(["sleep", "600"]) as process:
        proc = processes.identify(process.pid)
        assert proc is not None
        run_record = {"pid": process.pid, "pid_start": proc.start}
        remote, path = (
            make_remote_run(cache, **run_record, ended=9.0, exit_code=0),
            make_local_run(tmp_path),
        )

        async def work(follower: Follower, _: Served) -> None:
            await follower.refresh()
            discarding = asyncio.create_task(follower.discard(fetched=True))
            await follower.channel.request("clock")  # answered while discard still waits
            assert remote.exists()
            process.kill()
            process.wait()
            assert await discarding
            assert not remote.parent.exists()

        run(path, work)


@pytest.mark.parametrize("limit", ["size", "number", "room"])
def test_files_beyond_limits_are_not_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A hostile host may announce files of any size and number."""
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    fill(remote, {"events.jsonl": "{}\n", "logs/n1/0.log": "x"})
    os.truncate(remote / "logs/n1/0.log", 1 << (40 if limit == "size" else 12))
    if limit == "number":
        monkeypatch.setattr(follow, "MAX_RESULTS", 0)
    if limit == "room":
        monkeypatch.setattr(follow, "room_problem", lambda _, size: "full" if size > 2000 else "")
    notes: list[str] = []

    async def work(follower: Follower, _: Served) -> None:
        follower.note = notes.append
        for _ in range(2):
            assert (await follower.refresh()).state == "running"
        assert not (path / "logs").exists()
        assert (path / "events.jsonl").read_text() == "{}\n"
        with pytest.raises(NodeError, match="not all results on n1 are fetched") as caught:
            await follower.finish()
        assert "logs/n1/0.log: " in caught.value.found

    run(path, work)
    assert notes[0].startswith("paceline: not all files of n1 are fetched: logs/n1/0.log: ")
    assert len(notes) == 2  # once now, once at the end


def test_fetch_stops_before_disk_is_full(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    fill(remote, {"logs/n1/0.log": "x" * 1000})
    disk_problems = [""] * 6 + ["full"] * 100
    monkeypatch.setattr(follow, "room_problem", lambda _, size: disk_problems.pop(0))

    async def work(follower: Follower, _: Served) -> None:
        with pytest.raises(NodeError, match="cannot write what n1 sends"):
            await follower.refresh()

    run(path, work)
    assert (path / "logs/n1/0.log").stat().st_size == 5 * 64


def test_local_symlinks_are_not_followed(cache: Path, tmp_path: Path) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    fill(remote, {"logs/n1/0.log": "text\n"})
    (tmp_path / "elsewhere").mkdir()
    (path / "logs").symlink_to(tmp_path / "elsewhere")

    async def work(follower: Follower, _: Served) -> None:
        with pytest.raises(NodeError, match="symbolic link"):
            await follower.refresh()

    run(path, work)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_agent_serves_only_run_files(cache: Path, tmp_path: Path) -> None:
    remote, path = make_remote_run(cache), make_local_run(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (remote / "link.txt").symlink_to(tmp_path / "secret")

    async def work(follower: Follower, served: Served) -> None:
        await follower.refresh()
        assert not (path / "link.txt").exists()
        for name in ("../about.json", "link.txt", "/etc/passwd"):
            with pytest.raises(AgentRefusal):
                await served.ask("read_part", run_id=RUN_ID, path=name, offset=0, count=1,
                                 whole=False)  # fmt: skip
        for run_id in ("../x", "", "ABC"):
            with pytest.raises(AgentRefusal):
                await served.ask("run_changes", run_id=run_id, afresh=True)

    run(path, work)


@pytest.mark.parametrize(
    ("path", "growing", "mirrored"),
    [("events.jsonl", True, True), ("logs/n1/0.log", True, True), ("screen.txt", True, True),
     ("plan.json", False, True), ("detached.json", False, False), ("owner.json", False, False),
     (".paceline-key", False, False), ("model/config.json", False, True),
     ("checkpoints/10/manifest.json", False, False), ("Checkpoints/10/x", False, False),
     ("report.html", False, False), ("stacks/now.txt", False, True),
     ("debug/__init__.py", True, False), ("stacks/x.SO", False, False),
     ("logs/n1/conftest.py", True, False),
     ("returned/0", False, False), ("files-before-1/model/config.json", False, False)],
)  # fmt: skip
def test_classifies_growing_and_mirrored_files(path: str, growing: bool, mirrored: bool) -> None:
    assert (is_growing(path), is_mirrored(path)) == (growing, mirrored)


def write_output(remote: Path, path: str, text: str, place: str, **changes: Any) -> None:
    """Writes an output file of the script, and its line in the supervisor's journal."""
    fill(remote, {place: text})
    line = {"path": path, "size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "host": "n1", "place": place, "mtime_us": 5_000_000, "time": 1.0,
            "local_mtime_us": 5_000_000, **changes}  # fmt: skip
    with (remote / "outputs.jsonl").open("a") as journal:
        journal.write(json.dumps(line) + "\n")


def test_script_outputs_reach_project_without_overwriting(cache: Path, tmp_path: Path) -> None:
    """Each version is fetched once; code, and files that differ from the journal, are not."""
    remote, path, project = make_remote_run(cache), make_local_run(tmp_path), tmp_path / "project"
    fill(project, {"train.py": "mine", "data.csv": "mine"})
    write_output(remote, "out/1.pt", "one", "files/n1/out/1.pt")
    write_output(remote, "out/2.pt", "two", "files/n1/out/2.pt", sha256="0" * 64)
    write_output(remote, "train.py", "theirs", "files/n1/train.py.from-n1")
    write_output(remote, "data.csv", "theirs", "files/n1/data.csv")
    write_output(remote, "$PACELINE_RUN_DIR/3.pt", "three", "3.pt")

    async def work(follower: Follower, served: Served) -> None:
        follower = Follower(served.node.channel, RUN_ID, path, project)
        await follower.refresh()
        await follower.sync_outputs()
        assert (project / "out/1.pt").read_text() == "one"
        assert (project / "out/1.pt").stat().st_mtime == 5.0
        assert not (project / "out/2.pt").exists()
        assert {(project / name).read_text() for name in ("train.py", "data.csv")} == {"mine"}
        assert (path / "files/n1/data.csv").read_text() == "theirs"
        assert (path / "3.pt").read_text() == "three"
        write_output(remote, "out/2.pt", "new", "files/n1/out/2.pt")
        await follower.refresh()
        await asyncio.gather(follower.sync_outputs(), second_follower(served).sync_outputs())
        await follower.sync_outputs()
        assert (project / "out/2.pt").read_text() == "new"
        make_remote_run(cache, pid=1 << 22, ended=9.0, exit_code=0)
        notes: list[str] = []
        await follower.finish(note=notes.append)
        (note,) = notes
        assert "1 file of the script did not replace files in the project" in note
        assert sorted(str(file.relative_to(path)) for file in path.rglob("files/n1/**/*.*")) == [
            "files/n1/data.csv", "files/n1/train.py.from-n1",
        ]  # fmt: skip

    def second_follower(served: Served) -> Follower:
        return Follower(served.node.channel, RUN_ID, path, project)

    run(path, work)


def test_previous_outputs_go_to_next_supervisor(cache: Path, tmp_path: Path) -> None:
    remote, path, project = make_remote_run(cache), make_local_run(tmp_path), tmp_path / "project"
    project.mkdir()
    write_output(remote, "out/1.pt", "one", "files/n1/out/1.pt")
    write_output(remote, "$PACELINE_RUN_DIR/2.pt", "two", "2.pt")
    write_output(remote, "out/gone.pt", "gone", "files/n1/out/gone.pt")

    async def work(_: Follower, served: Served) -> None:
        follower = Follower(served.node.channel, RUN_ID, path, project)
        await follower.refresh()
        await follower.sync_outputs()
        (project / "out/gone.pt").unlink()

    run(path, work)
    tree, outputs = with_outputs(Tree(path, []), Tree(project, []))
    next_run = tmp_path / "following"
    for entry in tree.manifest:
        fill(next_run, {str(entry[0]): tree.file(str(entry[0])).read_text()})
    adopt_outputs(next_run, [asdict(output) for output in outputs])
    store = OutputStore(next_run, print)
    for prefix, names in (("", {"out/1.pt"}), (RUN_PREFIX, {RUN_PREFIX + "2.pt"})):
        _, paths = store.sendable(prefix)
        assert paths.keys() == names
        assert {time_us for _, time_us in paths.values()} == {5_000_000}
