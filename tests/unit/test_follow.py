"""A detached run's folder is kept like the one on the supervisor's host, and whole at the end."""

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

from agents import Served, agent_in_thread
from paceline.agent import detached_runs
from paceline.agent.supervision import processes
from paceline.remote.channel import AgentRefusal
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

RUN_ID = "ab" * 6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for the agent; short files count as long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(follow, "MAX_SMALL_BYTES", 1000)
    monkeypatch.setattr(follow, "BLOCK_BYTES", 64)
    return tmp_path / "cache" / "paceline"


def there(cache: Path, **more: Any) -> Path:
    """A detached run on the supervisor's host, whose supervisor is this process; its directory."""
    folder = cache / "detached" / RUN_ID
    (folder / "run").mkdir(parents=True, exist_ok=True)
    me = processes.identify(os.getpid())
    assert me is not None
    about = {"run_id": RUN_ID, "name": "job", "command": ["paceline", "run"], "hosts": ["n1"],
             "started": 5.0, "launched_by": "me@here", "launched_in": "/x/runs/job",
             "supervisor_host": socket.gethostname(), "pid": me.pid, "pid_start": me.start,
             "run": str(folder / "run"), "ended": None, "exit_code": None, **more}  # fmt: skip
    (folder / "about.json").write_text(json.dumps(about))
    return folder / "run"


def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(exist_ok=True)
    left = SupervisorLocation(RUN_ID, "n1", "n1", "/somewhere", 4.0)
    (path / DETACHED).write_text(json.dumps(left.to_json()))
    return path


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def run(path: Path, work: Callable[[Follower, Served], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        async with agent_in_thread() as served:
            await work(Follower(served.node.channel, RUN_ID, path), served)

    asyncio.run(go())


def test_what_is_added_comes_and_no_more(cache: Path, tmp_path: Path) -> None:
    remote, path = there(cache), home(tmp_path)
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
        assert not (path / "model").exists()  # at the end
        before = served.line.passed
        assert (await follower.refresh()).has_changed is False
        with (remote / "logs/n1/0.log").open("a") as file:
            file.write("more\n")
        fill(remote, {"plan.json": '{"a": 2}'})
        assert (await follower.refresh()).has_changed
        assert served.line.passed - before < 3000  # not the 1000 bytes of the log again
        assert (path / "logs/n1/0.log").read_text() == log + "more\n"
        assert (path / "plan.json").read_text() == '{"a": 2}'

    run(path, work)


def test_a_folder_that_is_behind_goes_on_and_a_foreign_one_begins_anew(
    cache: Path, tmp_path: Path
) -> None:
    remote, path = there(cache), home(tmp_path)
    log = "".join(f"line {number}\n" for number in range(100))
    fill(remote, {"logs/n1/0.log": log, "logs/n1/1.log": log, "events.jsonl": "short\n"})
    fill(
        path,
        {
            "logs/n1/0.log": log[:500],
            "logs/n1/1.log": "other\n" * 20,
            "events.jsonl": "much longer than there\n",
            "result.json": "{}",
            "ranks.json": "{}",
        },
    )

    async def work(follower: Follower, _: Served) -> None:
        assert (await follower.refresh()).state == "running"
        for name in ("0", "1"):
            assert (path / f"logs/n1/{name}.log").read_text() == log
        assert (path / "events.jsonl").read_text() == "short\n"
        (before,) = path.glob("events-before-*.jsonl")
        assert before.read_text() == "much longer than there\n"
        assert not (path / "result.json").exists()  # of an earlier start
        fill(remote, {"ranks.json": "[]"})
        await follower.refresh()
        (remote / "ranks.json").unlink()
        await follower.refresh()
        assert not (path / "ranks.json").exists()

    run(path, work)


def test_several_followers_of_one_folder_do_no_harm(cache: Path, tmp_path: Path) -> None:
    remote, path = there(cache), home(tmp_path)
    fill(remote, {"metrics.jsonl": "1\n" * 300})

    async def work(follower: Follower, served: Served) -> None:
        other = Follower(served.node.channel, RUN_ID, path)
        for number in range(5):
            with (remote / "metrics.jsonl").open("a") as file:
                file.write(f"{number}\n" * 50)
            served.agent.listed_files.clear()  # each has an agent of its own
            await asyncio.gather(follower.refresh(), other.refresh())
        assert (path / "metrics.jsonl").read_bytes() == (remote / "metrics.jsonl").read_bytes()

    run(path, work)


def test_requests_at_the_same_time_lock_a_folder_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there(cache)
    opened, open_lock = threading.Barrier(2), detached_runs._open_lock

    def open_together(folder: Path) -> int:
        opened.wait(20)
        return open_lock(folder)

    async def work(follower: Follower, served: Served) -> None:
        other = Follower(served.node.channel, RUN_ID, follower._path)
        with monkeypatch.context() as patch:
            patch.setattr(detached_runs, "_open_lock", open_together)
            await asyncio.gather(follower.refresh(), other.refresh())
        assert len(served.agent.run_locks) == 1  # and no other descriptor is left

    run(home(tmp_path), work)


def test_everything_is_here_after_the_end_and_can_go_there(cache: Path, tmp_path: Path) -> None:
    remote, path = there(cache, pid=1 << 22, ended=9.0, exit_code=0), home(tmp_path)
    weights = FileEntry(hashlib.sha256(b"c" * 300).hexdigest(), 300)
    manifest = Manifest(10, {"weights": weights}, {}).encode().decode()
    fill(remote, {"result.json": '{"exit_code": 0}', "model/config.json": "{}", "big": "b" * 5000,
          "model/model.safetensors": "w" * 5000, "files/n1/out.txt": "o",
          "checkpoints/10/weights": "c" * 300, "checkpoints/10/manifest.json": manifest,
          "checkpoints/latest.json": '{"step": 10}', "checkpoints/writer.json": "{}"})  # fmt: skip

    async def work(follower: Follower, _: Served) -> None:
        standing = await follower.refresh()
        assert not await follower.discard(fetched=False)  # nobody has it all
        assert (standing.state, standing.is_over) == ("ended", True)
        assert detached_of(path) is not None
        await follower.finish()
        assert detached_of(path) is None  # from now on a run as any other
        for name in ("model/model.safetensors", "big", "files/n1/out.txt", "checkpoints/10/weights",
                     "checkpoints/latest.json", "result.json"):  # fmt: skip
            assert (path / name).read_bytes() == (remote / name).read_bytes(), name
        assert not (path / "checkpoints/writer.json").exists()
        assert not (path / ".paceline-incoming").exists()
        async with agent_in_thread() as another:  # of somebody who looks on from elsewhere
            (path.parent / "copy").mkdir()
            other = Follower(another.node.channel, RUN_ID, path.parent / "copy")
            await other.refresh()
            assert not await follower.discard(fetched=True)
            await other.finish()
            async with agent_in_thread() as third:  # of somebody who looks no further
                (path.parent / "part").mkdir()
                await Follower(third.node.channel, RUN_ID, path.parent / "part").refresh()
                assert not await other.discard(fetched=False)
                assert remote.exists()
        assert not remote.parent.exists()
        with pytest.raises(NodeError, match="has no run"):
            await follower.refresh()

    run(path, work)


@pytest.mark.parametrize("resumed", [False, True])
def test_files_of_an_earlier_start_are_left_to_the_end(
    cache: Path, tmp_path: Path, resumed: bool
) -> None:
    """They are kept with a line, or replaced if the run continues that start."""
    remote, path = there(cache, pid=1 << 22, ended=9.0, exit_code=0), home(tmp_path)
    start = Arrivals(path)
    start.record("out.txt")
    fill(path, {"out.txt": "first"})
    start.mark_start()
    events = '{"event": "resumed", "host": "n1", "rank": 0}\n' if resumed else ""
    new = {"config.json": "{}", "new.txt": "1"}
    fill(remote, {"result.json": "{}", "events.jsonl": events, "out.txt": "second", **new})

    async def work(follower: Follower, _: Served) -> None:
        notes: list[str] = []
        await follower.refresh()
        assert (path / "out.txt").read_text() == "first"
        fill(remote, dict.fromkeys(new, "changed"))
        await follower.refresh()
        assert {(path / name).read_text() for name in new} == {"changed"}
        assert not list(path.glob("files-before-*"))
        await follower.finish(note=notes.append)
        assert (path / "out.txt").read_text() == "second"
        backups = [file.read_text() for file in path.glob("files-before-*/out.txt")]
        assert backups == ([] if resumed else ["first"])
        assert ["differ moved to" in note for note in notes] == [True] * len(backups)

    run(path, work)


def test_a_supervisor_that_died_is_told_and_a_living_one_is_not_discarded(
    cache: Path, tmp_path: Path
) -> None:
    path = home(tmp_path)
    there(cache, pid=1 << 22)

    async def work(follower: Follower, _: Served) -> None:
        assert await follower.refresh() == RunState("lost", (await follower.refresh()).record)
        assert await follower.ask({"do": "state"}) is None
        assert not await follower.signal(1)
        there(cache)
        follower._afresh = True
        assert (await follower.refresh()).state == "running"
        assert not await follower.discard(fetched=True)
        there(cache, supervisor_host="another", pid=1 << 22)  # which shares the folder
        assert (await follower.refresh()).state == "running"

    run(path, work)


def test_a_supervisor_in_another_pid_namespace_lives_while_it_holds_its_lock(
    cache: Path, tmp_path: Path
) -> None:
    """A container may have the name of its host, whose processes it does not see."""
    remote, path = there(cache, pid=1 << 22), home(tmp_path)
    fill(remote, {rundir.PROBE: "x"})

    async def work(follower: Follower, _: Served) -> None:
        with (remote / rundir.PROBE).open() as probe:
            fcntl.flock(probe, fcntl.LOCK_SH)
            assert (await follower.refresh()).state == "running"
            assert not await follower.discard(fetched=True)
        assert (await follower.refresh()).state == "lost"
        assert await follower.discard(fetched=True)

    run(path, work)


def test_a_supervisor_that_is_about_to_go_is_waited_for(cache: Path, tmp_path: Path) -> None:
    """It says how the run ended, and then it ends; meanwhile everything may have come home."""
    with subprocess.Popen(["sleep", "600"]) as process:
        me = processes.identify(process.pid)
        assert me is not None
        about = {"pid": process.pid, "pid_start": me.start}
        remote, path = there(cache, **about, ended=9.0, exit_code=0), home(tmp_path)

        async def work(follower: Follower, _: Served) -> None:
            await follower.refresh()
            discarding = asyncio.create_task(follower.discard(fetched=True))
            await follower.channel.request("clock")  # asked later, and answered before
            assert remote.exists()
            process.kill()
            process.wait()
            assert await discarding
            assert not remote.parent.exists()

        run(path, work)


@pytest.mark.parametrize("limit", ["size", "number", "room"])
def test_files_that_do_not_fit_are_not_begun(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A hostile host announces files of any size and number."""
    remote, path = there(cache), home(tmp_path)
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
    assert len(notes) == 2  # once, and once more at the end


def test_a_disk_that_fills_up_keeps_some_room(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, path = there(cache), home(tmp_path)
    fill(remote, {"logs/n1/0.log": "x" * 1000})
    room = [""] * 6 + ["full"] * 100
    monkeypatch.setattr(follow, "room_problem", lambda _, size: room.pop(0))

    async def work(follower: Follower, _: Served) -> None:
        with pytest.raises(NodeError, match="cannot write what n1 sends"):
            await follower.refresh()

    run(path, work)
    assert (path / "logs/n1/0.log").stat().st_size == 5 * 64


def test_links_here_are_not_followed(cache: Path, tmp_path: Path) -> None:
    remote, path = there(cache), home(tmp_path)
    fill(remote, {"logs/n1/0.log": "text\n"})
    (tmp_path / "elsewhere").mkdir()
    (path / "logs").symlink_to(tmp_path / "elsewhere")

    async def work(follower: Follower, _: Served) -> None:
        with pytest.raises(NodeError, match="symbolic link"):
            await follower.refresh()

    run(path, work)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_only_files_of_the_run_can_be_read(cache: Path, tmp_path: Path) -> None:
    remote, path = there(cache), home(tmp_path)
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
    ("path", "added", "comes"),
    [("events.jsonl", True, True), ("logs/n1/0.log", True, True), ("screen.txt", True, True),
     ("plan.json", False, True), ("detached.json", False, False), ("owner.json", False, False),
     (".paceline-key", False, False), ("model/config.json", False, True),
     ("checkpoints/10/manifest.json", False, False), ("Checkpoints/10/x", False, False),
     ("report.html", False, False), ("stacks/now.txt", False, True),
     ("debug/__init__.py", True, False), ("stacks/x.SO", False, False),
     ("returned/0", False, False), ("files-before-1/model/config.json", False, False)],
)  # fmt: skip
def test_which_files_come_and_how(path: str, added: bool, comes: bool) -> None:
    assert (is_growing(path), is_mirrored(path)) == (added, comes)


def written(remote: Path, path: str, text: str, place: str, **more: Any) -> None:
    """A file of the script, and the line about it in the supervisor's journal."""
    fill(remote, {place: text})
    line = {"path": path, "size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "host": "n1", "place": place, "mtime_us": 5_000_000, "time": 1.0,
            "local_mtime_us": 5_000_000, **more}  # fmt: skip
    with (remote / "outputs.jsonl").open("a") as journal:
        journal.write(json.dumps(line) + "\n")


def test_files_of_the_script_come_to_the_project_and_what_may_not_be_there_does_not(
    cache: Path, tmp_path: Path
) -> None:
    """Each version once, no code, none that the journal announces too early or wrongly."""
    remote, path, project = there(cache), home(tmp_path), tmp_path / "project"
    fill(project, {"train.py": "mine", "data.csv": "mine"})
    written(remote, "out/1.pt", "one", "files/n1/out/1.pt")
    written(remote, "out/2.pt", "two", "files/n1/out/2.pt", sha256="0" * 64)
    written(remote, "train.py", "theirs", "files/n1/train.py")
    written(remote, "data.csv", "theirs", "files/n1/data.csv")
    written(remote, "$PACELINE_RUN_DIR/3.pt", "three", "3.pt")

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
        written(remote, "out/2.pt", "new", "files/n1/out/2.pt")
        await follower.refresh()
        await asyncio.gather(follower.sync_outputs(), other(served).sync_outputs())
        await follower.sync_outputs()
        assert (project / "out/2.pt").read_text() == "new"
        there(cache, pid=1 << 22, ended=9.0, exit_code=0)
        notes: list[str] = []
        await follower.finish(note=notes.append)
        (note,) = notes
        assert "1 file of the script did not replace files in the project" in note
        assert sorted(str(file.relative_to(path)) for file in path.rglob("files/n1/**/*.*")) == [
            "files/n1/data.csv", "files/n1/train.py",
        ]  # fmt: skip

    def other(served: Served) -> Follower:
        return Follower(served.node.channel, RUN_ID, path, project)

    run(path, work)


def test_files_of_earlier_starts_go_to_the_next_supervisor(cache: Path, tmp_path: Path) -> None:
    remote, path, project = there(cache), home(tmp_path), tmp_path / "project"
    project.mkdir()
    written(remote, "out/1.pt", "one", "files/n1/out/1.pt")
    written(remote, "$PACELINE_RUN_DIR/2.pt", "two", "2.pt")
    written(remote, "out/gone.pt", "gone", "files/n1/out/gone.pt")

    async def work(_: Follower, served: Served) -> None:
        follower = Follower(served.node.channel, RUN_ID, path, project)
        await follower.refresh()
        await follower.sync_outputs()
        (project / "out/gone.pt").unlink()

    run(path, work)
    tree, outputs = with_outputs(Tree(path, []), Tree(project, []))
    following = tmp_path / "following"
    for entry in tree.manifest:
        fill(following, {str(entry[0]): tree.file(str(entry[0])).read_text()})
    adopt_outputs(following, [asdict(output) for output in outputs])
    store = OutputStore(following, print)
    for prefix, names in (("", {"out/1.pt"}), (RUN_PREFIX, {RUN_PREFIX + "2.pt"})):
        _, paths = store.sendable(prefix)
        assert paths.keys() == names
        assert {time_us for _, time_us in paths.values()} == {5_000_000}
