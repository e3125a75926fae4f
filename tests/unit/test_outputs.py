"""Tests that files of a script are copied between nodes and project, and no user's file is lost."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import struct
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.agent.files import outputs as agent_outputs
from paceline.agent.files import snapshot
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.nodes.fleet import Fleet
from paceline.launch.planning.placement import Supplies
from paceline.launch.results.outputs import OutputSync
from paceline.remote.channel import AgentRefusal
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.directory import RunDirectory, short
from paceline.rundir.output_rules import WrittenFile, unit_of
from paceline.rundir.outputs import Output, OutputJournal, newest_checkpoint, script_checkpoint
from paceline.transfer import local_outputs, output_folders, outputs, results, torch_files
from paceline.transfer.output_folders import RUN_PREFIX, OutputFolder
from paceline.transfer.outputs import OutputStore
from paceline.transfer.tree import Manifest, Tree, read_tree
from real_agents import Served, agent_in_thread

HOUR_S = 3600.0


def torch_zip(text: str) -> bytes:
    """Returns a ZIP archive with the structure that ``torch.save`` writes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), "weight " + text)
    return buffer.getvalue()


class Workspace:
    """A local project with code, its copies on two nodes, and a run directory."""

    def __init__(self, base: Path) -> None:
        self.project, self.run = base / "project", base / "run"
        self.jobs = base / "cache/paceline/jobs/j"
        self.notes: list[str] = []
        for root in (self.project, self.copy("n1"), self.copy("n2")):
            root.mkdir(parents=True)
            (root / "train.py").write_text("code")
            (root / "table.csv").write_text("sent")
            for name in ("train.py", "table.csv"):
                os.utime(root / name, (time.time() - HOUR_S,) * 2)
        self.run.mkdir()
        self.store = self.fresh_store()

    def copy(self, name: str) -> Path:
        return self.jobs / name

    def fresh_store(self) -> OutputStore:
        store = OutputStore(self.run, self.notes.append)
        store.set_code(self.project, [["train.py", "", 0, 4], ["table.csv", "", 0, 4]])
        return store

    async def folder(self, served: Served, name: str) -> OutputFolder:
        served.agent.folders.append(self.jobs)
        folder = OutputFolder(name, served.node.channel, str(self.copy(name)))
        await self.store.open_folder(folder)
        return folder

    def write(self, name: str, path: str, data: bytes, age_s: float = 60.0) -> None:
        """Writes a file as a rank on a node does; it was last modified ``age_s`` seconds ago."""
        file = self.copy(name) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        os.utime(file, (time.time() - age_s,) * 2)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(output_folders, "CHECKPOINT_PAUSE_S", 0.0)
    monkeypatch.setattr(output_folders, "PAUSE_S", 0.0)
    return Workspace(tmp_path)


def run(work: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def serve() -> None:
        async with agent_in_thread() as served:
            await work(served)

    asyncio.run(serve())


def test_outputs_arrive_at_script_paths(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"))
        workspace.write(
            "n1", "out/ckpt_2.pt", torch_zip("two")[:-1], age_s=0
        )  # still being written
        workspace.write("n1", "out/evil.py", b"code")
        workspace.write("n1", "table.csv", b"changed")
        (workspace.copy("n1") / "out/ckpt_1.pt").chmod(0o777)
        await workspace.store.sync(folder)
        assert sorted(p.name for p in (workspace.project / "out").iterdir()) == ["ckpt_1.pt"]
        arrived = workspace.project / "out/ckpt_1.pt"
        assert arrived.read_bytes() == torch_zip("one")
        assert not arrived.stat().st_mode & 0o111
        assert abs(arrived.stat().st_mtime - time.time() + 60) < 10
        assert (workspace.project / "table.csv").read_text() == "sent"
        assert script_checkpoint(workspace.run) == "out/ckpt_1.pt"
        assert not (workspace.run / local_outputs.UNPLACED).exists()
        workspace.write("n1", "out/ckpt_2.pt", torch_zip("two"), age_s=0)
        await workspace.store.sync(folder)
        assert script_checkpoint(workspace.run) == "out/ckpt_2.pt"

    run(work)


def test_newest_checkpoint_is_none_that_the_user_removed(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        for step, age_s in ((1, 60), (2, 30)):
            workspace.write("n1", f"out/ckpt_{step}.pt", torch_zip("model"), age_s=age_s)
        await workspace.store.sync(folder)
        (workspace.project / "out/ckpt_2.pt").unlink()
        assert script_checkpoint(workspace.run) == "out/ckpt_1.pt"
        shutil.rmtree(workspace.project / "out")
        assert not script_checkpoint(workspace.run)
        workspace.project.rename(workspace.project.with_name("moved"))
        assert script_checkpoint(workspace.run) == "out/ckpt_2.pt"
        OutputJournal(workspace.run).set_project(None)  # its project is on another machine
        assert script_checkpoint(workspace.run) == "out/ckpt_2.pt"

    run(work)


def test_does_not_replace_user_files(workspace: Workspace) -> None:
    """Covers files that existed before, and files that the user changed after they arrived."""

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        (workspace.project / "mine.pt").write_bytes(b"mine")
        workspace.write("n1", "mine.pt", torch_zip("theirs"))
        workspace.write("n1", "out/last.pt", torch_zip("one"))
        await workspace.store.sync(folder)
        assert (workspace.project / "mine.pt").read_bytes() == b"mine"
        assert (workspace.run / "files/n1/mine.pt").read_bytes() == torch_zip("theirs")
        workspace.write("n1", "out/last.pt", torch_zip("two"), age_s=50)
        await workspace.store.sync(folder)
        assert (workspace.project / "out/last.pt").read_bytes() == torch_zip(
            "two"
        )  # it was unchanged
        (workspace.project / "out/last.pt").write_bytes(b"edited")
        workspace.write("n1", "out/last.pt", torch_zip("three"), age_s=40)
        await workspace.store.sync(folder)
        assert (workspace.project / "out/last.pt").read_bytes() == b"edited"
        assert (workspace.run / "files/n1/out/last.pt").read_bytes() == torch_zip("three")
        (workspace.project / "docs").mkdir()
        (workspace.project / "docs/own.md").write_text("mine")
        workspace.write("n1", "docs/new.md", b"new")
        await workspace.store.sync(folder, has_ended=True)
        assert set(workspace.store.kept_out) == {"mine.pt", "out/last.pt", "docs/new.md"}
        workspace.store.note_kept_out()
        replaced_note, rejected_note = workspace.notes[-2:]
        assert "2 files of the script did not replace files in the project: " in replaced_note
        assert "1 file of the script, which may not be put into the project: " in rejected_note
        assert rejected_note.endswith("files/n1/docs/new.md")

    run(work)


@pytest.mark.parametrize("is_new_start", [False, True])
def test_replaces_file_that_script_removed(workspace: Workspace, is_new_start: bool) -> None:
    """Removed files stay in the project; the script may write them anew."""

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        for path in ("out/log.csv", "out/mine.csv"):
            workspace.write("n1", path, b"first")
        await workspace.store.sync(folder, has_ended=True)
        (workspace.project / "out/mine.csv").write_text("mine")
        shutil.rmtree(workspace.copy("n1") / "out")
        await workspace.store.sync(folder)
        assert not workspace.store.journal.outputs
        if is_new_start:
            workspace.store = workspace.fresh_store()
            folder = await workspace.folder(served, "n1")
        for path in ("out/log.csv", "out/mine.csv"):
            workspace.write("n1", path, b"second", age_s=-60.0)
        await workspace.store.sync(folder, has_ended=True)
        assert (workspace.project / "out/log.csv").read_bytes() == b"second"
        assert (workspace.project / "out/mine.csv").read_bytes() == b"mine"

    run(work)


def test_received_files_respect_umask(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/deep/ckpt_1.pt", torch_zip("one"))
        await workspace.store.sync(folder)

    earlier = os.umask(0o077)
    try:
        run(work)
    finally:
        os.umask(earlier)
    modes = [(workspace.project / path).stat().st_mode & 0o777
             for path in ("out", "out/deep", "out/deep/ckpt_1.pt")]  # fmt: skip
    assert modes == [0o700, 0o700, 0o600]


def test_does_not_follow_links_in_project(workspace: Workspace, tmp_path: Path) -> None:
    link_target = tmp_path / "elsewhere"
    link_target.mkdir()
    (workspace.project / "out").symlink_to(link_target)

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"))
        await workspace.store.sync(folder)
        assert not list(link_target.iterdir())
        assert (workspace.run / "files/n1/out/ckpt_1.pt").exists()

    run(work)


def test_checkpoint_folder_is_placed_as_unit(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        (workspace.project / "out/checkpoint-5").mkdir(parents=True)
        (workspace.project / "out/checkpoint-5/model.pt").write_bytes(b"mine")
        for step in (5, 6):
            workspace.write("n1", f"out/checkpoint-{step}/model.pt", torch_zip("model"))
            workspace.write("n1", f"out/checkpoint-{step}/optimizer.pt", torch_zip("state"))
            workspace.write("n1", f"out/checkpoint-{step}/trainer_state.json", b"{}")
        await workspace.store.sync(folder, has_ended=True, has_succeeded=True)
        assert [p.name for p in (workspace.project / "out/checkpoint-5").iterdir()] == ["model.pt"]
        assert len([*(workspace.run / "files/n1/out/checkpoint-5").iterdir()]) == 3
        assert len([*(workspace.project / "out/checkpoint-6").iterdir()]) == 3

    run(work)


def test_checkpoints_of_other_ranks_stay(workspace: Workspace) -> None:
    """Each rank loads its own file. A number that is no rank's has no file of rank 0 beside it."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        workspace.write("n1", "out/state_rank00.pt", torch_zip("rank 0"), age_s=50)
        await workspace.store.sync(first, has_ended=True, has_succeeded=True)
        for name in ("state_rank01.pt", "state_rank10.pt", "lora_rank8.pt"):
            workspace.write("n2", f"out/{name}", torch_zip(name))
        await workspace.store.send(second)
        assert sorted(p.name for p in (workspace.copy("n2") / "out").iterdir()) == [
            ".lora_rank8.pt.superseded", "state_rank00.pt", "state_rank01.pt", "state_rank10.pt"
        ]  # fmt: skip

    run(work)


def test_measurement_sends_files_of_earlier_runs_with_the_code(workspace: Workspace) -> None:
    """Other runs send them after the code, with their times."""
    supplies = Supplies(read_tree(workspace.project))
    sync = OutputSync(workspace.run, workspace.notes.append, is_measured=True)
    assert sync.set_code(supplies) is supplies


def test_last_checkpoint_folder_arrives_after_interrupt(workspace: Workspace) -> None:
    """It has been written just now. The one before shows which files it has."""

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        for step, names in ((1, "ab"), (2, "ab"), (3, "a")):
            for name in names:
                workspace.write("n1", f"out/step_{step}/{name}.pt", torch_zip("0"), age_s=3 - step)
            if step == 1:
                await workspace.store.sync(folder, has_ended=True, has_succeeded=True)
        await workspace.store.sync(folder, has_ended=True)
        assert {path.name for path in (workspace.project / "out").iterdir()} == {"step_1", "step_2"}

    run(work)


def test_send_replaces_what_was_sent_before(workspace: Workspace) -> None:
    """Its earlier version is here: a hidden copy would be fetched at the end as a new file."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        for content in ("one", "two"):
            workspace.write("n1", "out/last.pt", torch_zip(content))
            await workspace.store.sync(first, has_ended=True, has_succeeded=True)
            await workspace.store.send(second)
        (file,) = (workspace.copy("n2") / "out").iterdir()
        assert file.read_bytes() == torch_zip("two")

    run(work)


def test_send_keeps_what_the_user_replaced(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/last.pt", torch_zip("of the script"))
        await workspace.store.sync(folder, has_ended=True, has_succeeded=True)
        (workspace.project / "out/last.pt").write_bytes(torch_zip("of the user"))
        await workspace.store.send(folder)
        out = workspace.copy("n1") / "out"
        assert (out / "last.pt").read_bytes() == torch_zip("of the user")
        assert (out / ".last.pt.superseded").read_bytes() == torch_zip("of the script")

    run(work)


def test_send_sets_divergent_files_aside(workspace: Workspace) -> None:
    """Sent files keep rank 0's times; other files of the node are moved aside, not deleted."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"), age_s=50)
        workspace.write("n1", "out/log.txt", b"of rank 0")
        await workspace.store.sync(first, has_ended=True, has_succeeded=True)
        workspace.write("n2", "out/ckpt_2.pt", torch_zip("other"))
        workspace.write("n2", "out/log.txt", b"of rank 1")
        await workspace.store.send(second)
        out = workspace.copy("n2") / "out"
        assert sorted(p.name for p in out.iterdir()) == [
            ".ckpt_2.pt.superseded", ".log.txt.superseded", "ckpt_1.pt", "log.txt"
        ]  # fmt: skip
        assert (out / "log.txt").read_bytes() == b"of rank 0"
        assert abs((out / "ckpt_1.pt").stat().st_mtime - time.time() + 50) < 10
        num_outputs = len(OutputJournal(workspace.run).outputs)
        await workspace.store.sync(second)  # it now has rank 0: received files are not new
        assert len(OutputJournal(workspace.run).outputs) == num_outputs
        assert {"out/ckpt_1.pt", "out/log.txt"} <= await workspace.store.known_paths(second)

    run(work)


def test_newest_checkpoint_survives_removal_by_script(workspace: Workspace) -> None:
    """If rank 0's host is lost before the next checkpoint arrives, the job starts from this one."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        for step in (10, 20):
            workspace.write(
                "n1", f"out/checkpoint-{step}/model.pt", torch_zip("model"), age_s=60 - step
            )
            workspace.write(
                "n1", f"out/checkpoint-{step}/trainer_state.json", b"{}", age_s=60 - step
            )
        workspace.write("n1", "out/best.pt", torch_zip("best"), age_s=30)
        await workspace.store.sync(first, has_ended=True)
        for step in (10, 20):  # the script keeps one, and the next one is incomplete
            shutil.rmtree(workspace.copy("n1") / f"out/checkpoint-{step}")
        workspace.write("n1", "out/checkpoint-30/model.pt", torch_zip("model")[:-1], age_s=0)
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.sync(first, has_ended=True)
        workspace.write("n2", "out/checkpoint-30/random_states_1.pkl", b"of rank 1")
        await workspace.store.send(second)
        out = workspace.copy("n2") / "out"
        assert sorted(p.name for p in out.iterdir()) == [
            ".checkpoint-30.superseded", "best.pt", "checkpoint-20"
        ]  # fmt: skip
        workspace.write("n1", "out/checkpoint-30/model.pt", torch_zip("model"), age_s=5)
        workspace.write("n1", "out/checkpoint-30/trainer_state.json", b"{}", age_s=5)
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.sync(first, has_ended=True)
        units = {unit_of(path) for path in OutputJournal(workspace.run).outputs}
        assert units == {"out/best.pt", "out/checkpoint-30"}

    run(work)


def test_restart_sends_remaining_outputs(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        first = await workspace.folder(served, "n1")
        for step in (1, 2, 3):
            workspace.write("n1", f"out/ckpt_{step}.pt", torch_zip(f"{step}"), age_s=60 - step)
            for name in ("a.pt", "b.pt"):
                workspace.write("n1", f"out/checkpoint-{step}/{name}", torch_zip(f"{step}"))
        await workspace.store.sync(first, has_ended=True, has_succeeded=True)
        (workspace.project / "out/ckpt_3.pt").unlink()
        (workspace.project / "out/checkpoint-3/b.pt").unlink()  # now it is incomplete
        workspace.write("n1", "out/other", b"")
        (workspace.copy("n1") / "out/ckpt_1.pt").unlink()  # deleted by the script, which keeps two
        await workspace.store.sync(first)
        workspace.store = workspace.fresh_store()
        second = await workspace.folder(served, "n2")
        await workspace.store.send(second)
        out = workspace.copy("n2") / "out"
        names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*.pt"))
        assert names == ["checkpoint-1/a.pt", "checkpoint-1/b.pt", "checkpoint-2/a.pt",
                         "checkpoint-2/b.pt", "ckpt_2.pt"]  # fmt: skip
        assert (workspace.project / "out/ckpt_1.pt").exists()

    run(work)


def test_growing_log_is_fetched_in_parts(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that the script rewrites, or that the user changed here, is not replaced."""
    monkeypatch.setattr(outputs, "MIN_GROWTH_S", 0.0)

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")

        async def grow(*names: str, text: str = "line\n") -> None:
            for name in names:
                with (workspace.copy("n1") / "out" / name).open("a") as file:
                    file.write(text)
            await workspace.store.sync(folder)

        def arrived(name: str) -> str:
            path = workspace.project / "out" / name
            return path.read_text() if path.exists() else ""

        (workspace.copy("n1") / "out").mkdir()
        logs = ("log.txt", "events.out.tfevents.17.n1.1.0", "part.bin")
        for index in range(3):
            (workspace.copy("n1") / "out/anew.csv").write_text(f"{index}, " * (index + 1))
            await grow(*logs)
        assert [arrived(name) for name in logs[:2]] == ["line\n", "line\n"]
        assert not arrived("anew.csv")
        assert not arrived("part.bin")
        (workspace.project / "out/log.txt").write_text("edited")
        for _ in range(3):
            await grow(*logs)
        assert arrived("log.txt") == "edited"
        await workspace.store.sync(folder, has_ended=True, has_succeeded=True)
        assert arrived(logs[1]) == "line\n" * 6
        assert (workspace.run / "files/n1/out/log.txt").read_text() == "line\n" * 6
        assert {*workspace.store.kept_out} == {"out/log.txt"}

    run(work)


def test_logs_arrive_together_with_checkpoint(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that resumes from the checkpoint elsewhere must not lose lines of its logs."""
    monkeypatch.setattr(output_folders, "PAUSE_S", HOUR_S)
    monkeypatch.setattr(output_folders, "MIN_ACCOMPANYING_BYTES", 1000)

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")

        async def end_epoch(epoch: int) -> None:
            workspace.write("n1", "out/ckpt.pt", torch_zip(str(epoch)), age_s=-epoch)
            await log_epoch(epoch)

        async def log_epoch(epoch: int) -> None:
            with (workspace.copy("n1") / "out/history.csv").open("a") as history:
                history.write(f"{epoch}\n")
            await workspace.store.sync(folder)

        def arrived(name: str) -> str:
            path = workspace.project / "out" / name
            return path.read_text() if path.exists() else ""

        workspace.write("n1", "out/large.log", b"x" * 1001, age_s=-HOUR_S)
        await end_epoch(1)
        assert arrived("history.csv") == "1\n"
        await log_epoch(2)
        assert arrived("history.csv") == "1\n"
        await end_epoch(2)
        assert arrived("history.csv") == "1\n2\n2\n"
        workspace.write("n1", "out/history.csv", b"", age_s=0)  # the script writes it anew
        await end_epoch(3)
        assert arrived("history.csv") == "1\n2\n2\n"
        assert not arrived("large.log")

    run(work)


def test_log_has_lines_of_checkpoint_saved_during_transfer(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script goes on while an earlier checkpoint, or the list of files, travels."""
    monkeypatch.setattr(output_folders, "PAUSE_S", HOUR_S)
    epochs = 0

    def end_epoch() -> None:
        nonlocal epochs
        epochs += 1
        with (workspace.copy("n1") / "history.csv").open("a") as history:
            history.write(f"{epochs}\n")
        workspace.write("n1", f"ckpt_{epochs}.pt", torch_zip("model"), age_s=-epochs)

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        receive, list_files = workspace.store.receive, workspace.store.list_files

        async def receive_slowly(*args: Any, **options: Any) -> dict[str, str]:
            if epochs < 3:
                end_epoch()
            return await receive(*args, **options)

        async def list_before_next_epoch(folder: OutputFolder) -> list[WrittenFile]:
            files = await list_files(folder)
            log = next(file for file in files if file.path == "history.csv")
            end_epoch()
            later = await list_files(folder)
            monkeypatch.setattr(workspace.store, "list_files", list_files)
            return [log if file.path == log.path else file for file in later]

        monkeypatch.setattr(workspace.store, "receive", receive_slowly)
        monkeypatch.setattr(workspace.store, "list_files", list_before_next_epoch)
        end_epoch()
        await workspace.store.sync(folder)
        newest = max(int(path.stem[5:]) for path in workspace.project.glob("ckpt_*.pt"))
        lines = (workspace.project / "history.csv").read_text().split()
        assert lines[:newest] == [str(epoch) for epoch in range(1, newest + 1)]

    run(work)


def test_transfers_checkpoints_without_suffix(workspace: Workspace) -> None:
    """Covers a checkpoint, and a text file that names the newest one and is no checkpoint."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        workspace.write("n1", "out/checkpoint", torch_zip("one"))
        workspace.write("n1", "out/last_checkpoint", b"checkpoint", age_s=0)
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.send(second)
        assert script_checkpoint(workspace.run) == "out/checkpoint"
        for root in (workspace.project, workspace.copy("n2")):
            assert (root / "out/checkpoint").read_bytes() == torch_zip("one")
            assert (root / "out/last_checkpoint").read_text() == "checkpoint"

    run(work)


def test_data_with_checkpoint_suffix_is_no_checkpoint(workspace: Workspace) -> None:
    """Weights are recognised in the pickle of ``torch.save``; this dataset contains none."""
    data = torch_zip("images and labels").replace(b"weight", b"values")

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt.pt", torch_zip("one"))
        workspace.write("n1", "data/x.pt", data, age_s=30.0)
        workspace.write("n1", "data/x.bin", b"tokens: weight, step", age_s=30.0)
        workspace.write("n1", "out/model_1", b"tokens", age_s=30.0)
        await workspace.store.sync(folder, has_ended=True, has_succeeded=True)
        assert (workspace.project / "data/x.pt").exists()
        assert (workspace.project / "out/model_1").exists()
        assert script_checkpoint(workspace.run) == "out/ckpt.pt"
        (workspace.copy("n1") / "out/ckpt.pt").unlink()

    run(work)
    record = json.loads((workspace.run / "outputs.jsonl").read_text().splitlines()[-1])
    del record["has_state"]
    assert Output.read(record) == Output.read(record | {"has_state": True}) is not None
    assert Output.read(record | {"has_state": 1}) is None


def test_full_local_disk_defers_fetch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"))
        monkeypatch.setattr(outputs, "room_problem", lambda folder, size: "the disk is full")
        await workspace.store.sync(folder)
        await workspace.store.sync(folder)
        assert [note for note in workspace.notes if "stays on n1 for now: the disk is full" in note]
        assert len(workspace.notes) == 1
        assert not (workspace.project / "out").exists()
        monkeypatch.setattr(outputs, "room_problem", results.room_problem)
        await workspace.store.sync(folder)
        assert (workspace.project / "out/ckpt_1.pt").exists()

    run(work)


def test_rejects_path_outside_job_folder(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        folder.root = str(workspace.project)
        with pytest.raises(Exception, match="not a folder of this job"):
            await served.ask(
                "set_outputs_aside", root=folder.root, paths=["train.py"], discarded=[]
            )

    run(work)


@pytest.mark.parametrize(("name", "data", "state"), [
    ("a.pt", torch_zip("x"), "whole"),
    ("a.pt", torch_zip("x")[:-5], "cut off"),
    ("a.pt", b"", "cut off"),
    ("a.txt", b"", "unknown"),
    ("a.pkl", b"\x80", "unknown"),
    ("metrics.json", b'{"loss": [1, 2]}\n', "whole"),
    ("metrics.json", b'{"loss": [1, 2', "unknown"),
    ("metrics.json", b"12", "unknown"),
    ("trainer_state.json", b"{}\n", "whole"),
    ("trainer_state.json", b'{"a": ', "cut off"),
    ("a.safetensors", b"\x02\0\0\0\0\0\0\0{}", "whole"),
    ("a.safetensors", b"\x03\0\0\0\0\0\0\0{}", "cut off"),
    ("a.safetensors", b"\xff" * 8, "cut off"),
    ("a.safetensors", b"{}", "cut off"),
    ("a.safetensors", b"\x02\0\0\0\0\0\0\0[]", "cut off"),
    ("a.safetensors", b'\x19\0\0\0\0\0\0\0{"x": {"data_offsets":[]}}', "cut off"),
])  # fmt: skip
def test_file_state(tmp_path: Path, name: str, data: bytes, state: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert agent_outputs.file_state(str(file), len(data)) == state


def test_checkpoint_link_is_transferred_as_copy(workspace: Workspace) -> None:
    """A node of rank 0 to which nothing was sent keeps its link."""

    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        workspace.write("n1", "out/step=20.pt", torch_zip("one"))
        workspace.write("n1", "out/step=40.pt", torch_zip("two"), age_s=50)
        link = workspace.copy("n1") / "out/last.pt"
        for target in ("step=20.pt", "step=40.pt"):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            await workspace.store.sync(first)
        await workspace.store.send(first)
        await workspace.store.send(second)
        assert link.readlink() == Path("step=40.pt")
        for root in (workspace.project, workspace.copy("n2")):
            copy = root / "out/last.pt"
            assert not copy.is_symlink()
            assert copy.read_bytes() == torch_zip("two")

    run(work)


@pytest.mark.parametrize("target", ["../secret.pt", "/etc/passwd", ".secret.pt", "other.pt", "sub"])
def test_does_not_read_unsafe_links(workspace: Workspace, target: str) -> None:
    """Covers links out of the folder, and links to a hidden file, a folder or another link."""

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        for path in ("secret.pt", "out/.secret.pt", "out/sub/x.pt"):
            workspace.write("n1", path, b"secret")
        out = workspace.copy("n1") / "out"
        (out / "other.pt").symlink_to("../secret.pt")
        (out / "last.pt").symlink_to(target)
        assert "out/last.pt" not in {file.path for file in await workspace.store.list_files(folder)}
        with pytest.raises(AgentRefusal):
            await folder.channel.request_with_blob(
                "read_block", root=folder.root, path="out/last.pt", offset=0, count=6, last=True
            )

    run(work)


def test_list_written_skips_links_hidden_files_and_runs(tmp_path: Path) -> None:
    for path in ("a.pt", ".hidden/b.pt", "venv/pyvenv.cfg", "venv/c.pt", "run/.paceline-key",
                 "run/d.pt", "x/.metadata", "x/.e", "__pycache__/f.pt"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    (tmp_path / "link.pt").symlink_to("x/.metadata")
    files, _ = agent_outputs.list_written(str(tmp_path), 0)
    assert sorted(file["path"] for file in files) == ["a.pt", "x/.metadata"]


def test_time_in_the_future_hides_no_file(workspace: Workspace) -> None:
    """Neither one that a file had before the start, nor one that a script sets."""

    async def work(served: Served) -> None:
        os.utime(workspace.copy("n1") / "table.csv", (1e10, 1e10))
        folder = await workspace.folder(served, "n1")
        for name in ("a.pt", "b.pt"):
            workspace.write("n1", f"out/{name}", torch_zip(name))
        os.utime(workspace.copy("n1") / "out/a.pt", (1e10, 1e10))
        await workspace.store.sync(folder, has_ended=True)
        assert {path.name for path in (workspace.project / "out").iterdir()} == {"a.pt", "b.pt"}

    run(work)


def test_list_written_reports_changed_link(tmp_path: Path) -> None:
    for path in ("a.pt", "b.pt"):
        (tmp_path / path).write_bytes(b"x")
    _, latest_us = agent_outputs.list_written(str(tmp_path), 0)
    time.sleep(0.02)
    (tmp_path / "last.pt").symlink_to("a.pt")
    files, _ = agent_outputs.list_written(str(tmp_path), latest_us + 1)
    assert [file["path"] for file in files] == ["last.pt"]


def test_ignores_invalid_journal_lines(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    (tmp_path / "outputs.jsonl").write_bytes(
        b'{"path": 3}\n[]\nx\n{"path": "../x", "size": 1, "sha256": "", "host": "", "place": "",'
        b' "mtime_us": 1, "time": 1.0, "local_mtime_us": 1}\n{"folder": "out"}\n{"pat'
    )
    journal = OutputJournal(tmp_path)
    assert not journal.outputs
    assert newest_checkpoint([]) is None
    names = ("out/ckpt_1.pt", "out/model.safetensors", "out/training_args.bin")
    written = [Output(name, 1, "", "n1", "", number, 0.0, 0) for number, name in enumerate(names)]
    assert newest_checkpoint(written) == ("out/ckpt_1.pt", written[:1])
    assert newest_checkpoint(written[1:]) == ("out/model.safetensors", written[1:2])
    names = tuple(f"own/{n}" for n in ("model.safetensors", "random_states_0.pkl", "scheduler.bin"))
    written = [Output(name, 1, "", "n1", "", number, 0.0, 0) for number, name in enumerate(names)]
    assert newest_checkpoint(written) == ("own", written)  # of Accelerator.save_state
    journal.add_folder("more")
    assert OutputJournal(tmp_path).folders == {"out", "more"}


def test_run_folder_outputs_are_fetched_and_resent(workspace: Workspace) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        folder = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = None
        (folder / "ckpt_1.pt").write_bytes(torch_zip("one"))
        (folder / "model").mkdir()
        for name in ("model/model.safetensors", "train.py", "events.jsonl", ".hidden"):
            (folder / name).write_bytes(b"x")
        node = OutputFolder("n1", served.node.channel, str(folder), prefix=RUN_PREFIX)
        await workspace.store.open_folder(node)
        await workspace.store.sync(node, has_ended=True)
        names = sorted(path.name for path in workspace.run.iterdir() if path.name[0] != ".")
        assert names == ["ckpt_1.pt", "outputs.jsonl"]
        assert script_checkpoint(workspace.run).endswith("run/ckpt_1.pt")
        (folder / "ckpt_1.pt").rename(folder / "ckpt_2.pt")  # by another rank, on another node
        second_folder = OutputFolder("n2", served.node.channel, str(folder), prefix=RUN_PREFIX)
        await workspace.store.open_folder(second_folder)
        await workspace.store.send(second_folder)
        assert (folder / "ckpt_1.pt").read_bytes() == torch_zip("one")
        assert (folder / ".ckpt_2.pt.superseded").exists()

    run(work)


def test_fetches_uncollected_files_at_restart(workspace: Workspace) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        uncollected = snapshot.make_run_folder(key) / snapshot.UNCOLLECTED
        served.agent.run_keys[key] = []
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/last.pt", torch_zip("old"), age_s=50)
        workspace.write("n1", "out/first.pt", torch_zip("first"), age_s=60)
        await workspace.store.sync(folder)
        workspace.write("n1", "out/last.pt", torch_zip("new"), age_s=10)
        workspace.write("n1", "out/cut_off.pt", torch_zip("cut")[:-1], age_s=5)
        served.agent.job.ranks = [RankProcess(1, 0)]
        agent_outputs.keep_uncollected(served.agent)
        assert not uncollected.exists()
        served.agent.job.ranks = [RankProcess(0, 0)]
        agent_outputs.keep_uncollected(served.agent)
        assert (workspace.copy("n1") / "train.py").exists()
        second_folder = OutputFolder("n1", served.node.channel, str(uncollected))
        fetched = await workspace.fresh_store().fetch_uncollected(second_folder)
        assert fetched == (["out/last.pt"], True)
        assert (workspace.project / "out/last.pt").read_bytes() == torch_zip("new")
        (workspace.project / "out/first.pt").unlink()  # the user removes it: not fetched again
        second_folder = OutputFolder("n1", served.node.channel, str(uncollected))
        assert await workspace.fresh_store().fetch_uncollected(second_folder) == ([], True)
        await served.ask("discard_uncollected", root=str(uncollected.parent), shards=False)
        assert uncollected.parent.exists()
        assert not uncollected.exists()

    run(work)


def test_fetches_files_of_powered_off_host_at_next_start(workspace: Workspace) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        uncollected = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = []
        folder = await workspace.folder(served, "n1")
        served.agent.job.ranks = [RankProcess(0, 0)]
        workspace.write("n1", "out/first.pt", torch_zip("first"))
        await workspace.store.sync(folder)
        workspace.write("n1", "out/last.pt", torch_zip("last"), age_s=10)
        # follows in the queue in which the agent has noted where the files are
        await served.ask("set_outputs_aside", root=folder.root, paths=[], discarded=[])
        sources = json.loads((uncollected / snapshot.SOURCES_FILE).read_text())
        assert [*sources] == [str(workspace.copy("n1"))]
        (workspace.jobs.parents[1] / "elsewhere").mkdir()
        sources[str(workspace.jobs.parents[1] / "elsewhere")] = 0  # forged
        (uncollected / snapshot.SOURCES_FILE).write_text(json.dumps(sources))
        served.agent.run_keys.clear()  # as in a new agent
        answer = await served.ask("run_folder", key=key, own=True)
        second_folder = OutputFolder("n1", served.node.channel, f"{answer['folder']}/.uncollected")
        assert await workspace.fresh_store().fetch_uncollected(second_folder) == (
            ["out/last.pt"],
            True,
        )
        assert not (uncollected / snapshot.SOURCES_FILE).exists()

    run(work)


@pytest.mark.parametrize("case", ["next start", "no room"])
def test_older_logs_of_lost_host_are_fetched_before_removal(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A script went on elsewhere from an old checkpoint, and replaced the one that was lost."""
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        node = served.node
        folder, second_folder = [await workspace.folder(served, name) for name in ("n1", "n2")]
        workspace.write("n1", "out/ckpt.pt", torch_zip("old"), age_s=60)
        await workspace.store.sync(folder)
        for name, data in (("history.csv", b"1\n"), ("DONE", b""), ("new.csv", b"2\n")):
            workspace.write("n1", f"out/{name}", data, age_s=50)
        workspace.write("n1", "out/cut_off.pt", torch_zip("cut")[:-1])
        workspace.write("n1", "out/ckpt.pt", torch_zip("older"), age_s=50)
        node.run_folder, node.shared_run_dir = str(snapshot.make_run_folder(key)), False
        uncollected = Path(node.run_folder) / snapshot.UNCOLLECTED
        served.agent.run_keys[key] = []
        served.agent.job.ranks = [RankProcess(0, 0)]
        agent_outputs.keep_uncollected(served.agent)
        for name, data in (("ckpt.pt", torch_zip("new")), ("history.csv", b"2\n")):
            workspace.write("n2", f"out/{name}", data, age_s=10)
        await workspace.store.sync(second_folder)
        sync = OutputSync(workspace.run, workspace.notes.append)
        sync.store.set_code(workspace.project, [["train.py", "", 0, 4]])
        if case == "no room":
            monkeypatch.setattr(results, "RESULT_LIMIT", 1)
        await sync._fetch_uncollected(node)
        place = workspace.run / "files/n1/superseded"
        assert (workspace.project / "out/history.csv").read_bytes() == b"2\n"
        assert uncollected.exists() == (case == "no room")
        if case == "no room":
            assert workspace.notes[-1].startswith("paceline: new files of n1 do not arrive: ")
            return
        assert (place / "out/history.csv").read_bytes() == b"1\n"
        assert {path.name for path in (place / "out").iterdir()} == {"DONE", "history.csv"}
        assert (workspace.project / "out/new.csv").exists()
        assert workspace.notes[-1] == (
            "paceline: 2 files of n1 had not arrived before, and stayed out of the project:"
            f" {short(place)}"
        )

    run(work)


def test_run_folder_with_uncollected_files_is_kept(workspace: Workspace) -> None:
    """A host that was lost is back when the run ends: the next start fetches its files."""
    key = "0123456789abcdef01234567"
    folder = snapshot.make_run_folder(key)
    (folder / snapshot.UNCOLLECTED).mkdir()
    assert not snapshot.discard_run_folder(key)
    (folder / snapshot.UNCOLLECTED).rmdir()
    assert snapshot.discard_run_folder(key)
    assert not folder.exists()


def test_agent_removes_record_of_sources(workspace: Workspace) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        uncollected = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = []
        folder = await workspace.folder(served, "n1")
        served.agent.job.ranks = [RankProcess(0, 0)]
        await workspace.store.sync(folder)
        while not (uncollected / snapshot.SOURCES_FILE).exists():
            await asyncio.sleep(0.01)
        await served.ask("forget_outputs")
        agent_outputs.keep_uncollected(served.agent)
        assert [path.name for path in uncollected.iterdir()] == [snapshot.MARK_FILE]

    run(work)


def test_merges_uncollected_files_of_two_nodes(workspace: Workspace) -> None:
    """Rank 0 was first on one node, then on the other. The newest files arrive without conflict."""
    keys = ("0123456789abcdef01234567", "89abcdef0123456701234567")

    async def work(served: Served) -> None:
        folders = []
        for key, text in zip(keys, ("old", "new"), strict=True):
            uncollected = snapshot.make_run_folder(key) / snapshot.UNCOLLECTED
            served.agent.run_keys[key] = []
            for name in ("a.pt", "b.pt", f"{text}.pt"):
                (uncollected / "out/step_1").mkdir(parents=True, exist_ok=True)
                (uncollected / "out/step_1" / name).write_bytes(torch_zip(text * 1000))
                age_s = 30.0 if text == "new" else 60.0
                os.utime(uncollected / "out/step_1" / name, (time.time() - age_s,) * 2)
            (uncollected / "out/step_1/trainer_state.json").write_text("{}")
            os.utime(uncollected / "out/step_1/trainer_state.json", (time.time() - 90.0,) * 2)
            folders.append(OutputFolder("n1", served.node.channel, str(uncollected)))
        store = workspace.fresh_store()
        empty = OutputFolder("n2", served.node.channel, str(workspace.copy("n2")))
        await store.open_folder(empty)
        await asyncio.gather(*map(store.fetch_uncollected, folders), store.sync(empty))
        arrived = workspace.project / "out/step_1"
        assert {path.name for path in arrived.iterdir()} == {
            "a.pt", "b.pt", "new.pt", "old.pt", "trainer_state.json"
        }  # fmt: skip
        assert (arrived / "a.pt").read_bytes() == torch_zip("new" * 1000)

    run(work)


def test_cancelled_sync_places_received_files(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    placing = threading.Event()
    place_unit = workspace.store.place_unit

    def place_slowly(*args: Any) -> None:
        placing.set()
        time.sleep(0.1)
        place_unit(*args)

    monkeypatch.setattr(workspace.store, "place_unit", place_slowly)

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"))
        watching = asyncio.ensure_future(workspace.store.sync(folder))
        await asyncio.to_thread(placing.wait)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert script_checkpoint(workspace.run) == "out/ckpt_1.pt"
        assert await workspace.store.known_paths(folder) >= {"out/ckpt_1.pt"}

    run(work)


def test_replaced_user_checkpoint_is_sent_to_all_nodes(
    workspace: Workspace,
) -> None:
    """The user's file was sent with the code and stays here; all nodes get the script's version."""
    user_file = workspace.project / "ckpt.pt"
    user_file.write_bytes(torch_zip("mine"))
    os.utime(user_file, (time.time() - HOUR_S,) * 2)
    code: Manifest = [["train.py", "", 0, 4], ["ckpt.pt", "", 0, 4]]
    workspace.store.set_code(workspace.project, code)

    async def work(served: Served) -> None:
        first = await workspace.folder(served, "n1")
        second = await workspace.folder(served, "n2")
        for name in ("n1", "n2"):
            workspace.write(name, "ckpt.pt", torch_zip("mine"), age_s=HOUR_S)
        workspace.write("n1", "ckpt.pt", torch_zip("script's"), age_s=30.0)
        await workspace.store.sync(first)
        assert user_file.read_bytes() == torch_zip("mine")
        assert script_checkpoint(workspace.run).endswith("files/n1/ckpt.pt")
        await workspace.store.send(second)
        assert (workspace.copy("n2") / "ckpt.pt").read_bytes() == torch_zip("script's")
        user_file.write_bytes(torch_zip("mine again"))  # newer than the script's
        workspace.store = workspace.fresh_store()
        workspace.store.set_code(workspace.project, code)
        await workspace.store.send(second)
        assert (workspace.copy("n2") / "ckpt.pt").read_bytes() == torch_zip("mine again")

    run(work)


def test_does_not_send_user_file_with_name_of_output(workspace: Workspace, tmp_path: Path) -> None:
    """Files that git ignores or behind links are not sent although a script wrote to the path."""
    outside = tmp_path / "private"
    outside.mkdir()
    for user_file in (workspace.project / "kaggle.json", outside / "keys.json"):
        user_file.write_text("the user's own")
    (workspace.project / "link").symlink_to(outside)

    async def work(served: Served) -> None:
        first = await workspace.folder(served, "n1")
        second = await workspace.folder(served, "n2")
        for path in ("kaggle.json", "link/keys.json"):
            workspace.write("n1", path, b"the host's", age_s=HOUR_S)
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.send(second)
        for path in ("kaggle.json", "link/keys.json"):
            assert (workspace.run / "files/n1" / path).read_text() == "the host's"
            assert (workspace.copy("n2") / path).read_text() == "the host's"

    run(work)


def test_does_not_forward_changed_code_files(workspace: Workspace) -> None:
    """Settings in a YAML or JSON file may name functions to call."""
    paths = "conf.yaml", "table.csv", "model"
    code: Manifest = [[path, "", 0, 4] for path in ("train.py", *paths)]
    workspace.store.set_code(workspace.project, code)
    for root in (workspace.project, workspace.copy("n1"), workspace.copy("n2")):
        (root / "conf.yaml").write_text("sent")
        (root / "model").write_text("sent")

    async def work(served: Served) -> None:
        first = await workspace.folder(served, "n1")
        second = await workspace.folder(served, "n2")
        for path in paths:
            workspace.write("n1", path, b"the host's", age_s=0)
        await workspace.store.sync(first, has_ended=True, has_succeeded=True)
        await workspace.store.send(second)
        for path in paths:
            assert (workspace.run / "files/n1" / path).read_text() == "the host's"
            assert (workspace.copy("n2") / path).read_text() == "sent"

    run(work)


def test_records_checkpoints_of_local_run(workspace: Workspace) -> None:
    """Later starts on other hosts get the checkpoints; files that the user edited are not sent."""
    workspace.store.set_code(workspace.project, [])

    async def work(served: Served) -> None:
        local = OutputFolder("here", served.node.channel, str(workspace.project), is_local=True,
                             only_checkpoints=True)  # fmt: skip
        await workspace.store.open_folder(local)
        await asyncio.sleep(0.02)
        (workspace.project / "out/checkpoint-5").mkdir(parents=True)
        for path in ("ckpt.pt", "checkpoint-5/model.safetensors", "checkpoint-5/state.json"):
            (workspace.project / "out" / path).write_bytes(torch_zip(path))
        (workspace.project / "table.csv").write_text("edited")
        await workspace.store.sync(local, has_ended=True, has_succeeded=True)
        recorded = {"out/ckpt.pt", *(f"out/checkpoint-5/{name}"
                                     for name in ("model.safetensors", "state.json"))}  # fmt: skip
        assert {*workspace.store.journal.outputs} == recorded

    run(work)


def test_newest_checkpoint_ignores_different_run(workspace: Workspace) -> None:
    """The other run was started between two starts of this one, only on this machine."""
    workspace.run = workspace.run.parent / "runs/first"
    workspace.run.mkdir(parents=True)

    async def start(served: Served, name: str, checkpoint: str = "") -> None:
        workspace.run = workspace.run.parent / name
        workspace.run.mkdir(exist_ok=True)
        store = OutputStore(workspace.run, workspace.notes.append)
        store.set_code(workspace.project, [])
        local = OutputFolder("here", served.node.channel, str(workspace.project), is_local=True,
                             only_checkpoints=True)  # fmt: skip
        await store.open_folder(local)
        await asyncio.sleep(0.02)
        if checkpoint:
            (workspace.project / checkpoint).write_bytes(torch_zip(checkpoint))
        await store.sync(local, has_ended=True)

    async def work(served: Served) -> None:
        await start(served, "first")
        await start(served, "second", "ckpt.pt")
        await start(served, "first")
        assert not script_checkpoint(workspace.run)
        await start(served, "first", "own.pt")
        assert script_checkpoint(workspace.run) == "own.pt"

    run(work)


def test_assembles_distributed_checkpoint_from_all_nodes(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        first, second = await workspace.folder(served, "n1"), await workspace.folder(served, "n2")
        workspace.write("n1", "ckpt/a/.metadata", b"index")
        for name in ("n1", "n2"):
            workspace.write(name, f"ckpt/a/__{name[1]}_0.distcp", b"shard")
            workspace.write(name, f"ckpt/b/__{name[1]}_0.distcp", b"shard without an index")
        await workspace.store.sync(first, has_ended=True, has_succeeded=True)
        await workspace.store.fetch_parts(second)
        arrived = {path.name for path in (workspace.project / "ckpt/a").iterdir()}
        assert arrived == {".metadata", "__1_0.distcp", "__2_0.distcp"}
        assert not (workspace.project / "ckpt/b/__2_0.distcp").exists()
        third = OutputFolder("n3", served.node.channel, str(workspace.copy("n3")))
        workspace.copy("n3").mkdir()
        await workspace.store.open_folder(third)
        await workspace.store.send(third)
        assert {path.name for path in (workspace.copy("n3") / "ckpt/a").iterdir()} == arrived

    run(work)


class ShardedScript:
    """Saves a distributed checkpoint of two ranks to one folder, in each start on two hosts.

    Attributes:
        folders: Of the two hosts in the present start.
    """

    def __init__(self, workspace: Workspace, served: Served) -> None:
        self._workspace, self._served = workspace, served
        self.folders: list[OutputFolder] = []

    async def start(self, *, is_detached: bool = False, is_local: bool = False) -> None:
        workspace = self._workspace
        workspace.store = workspace.fresh_store()
        for name in ("n1", "n2"):
            shutil.rmtree(workspace.copy(name) / "ckpt", ignore_errors=True)
        self.folders = [await workspace.folder(self._served, name) for name in ("n1", "n2")]
        if is_local:
            channel = self._served.node.channel
            self.folders[0] = OutputFolder("n1", channel, str(workspace.project), is_local=True)
            await workspace.store.open_folder(self.folders[0])
        if is_detached:
            workspace.store.project = None
        for folder in self.folders[is_local:]:
            await workspace.store.send(folder)
        await asyncio.sleep(0.02)

    def write(self, path: str, save: int) -> None:
        """Writes a file of a save as a rank does: that of ``__1_0.distcp`` is on the second."""
        root = Path(self.folders["__1_" in path].root)
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{Path(path).name} of save {save}")
        os.utime(root / path, (time.time() - 60.0,) * 2)

    def save(self, save: int) -> None:
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            self.write(f"ckpt/{name}", save)

    async def run(self, save: int) -> None:
        """Runs a start with one save."""
        await self.start()
        self.save(save)
        await self.end()

    async def end(self) -> None:
        first, second = self.folders
        await self._workspace.store.sync(first, has_ended=True, has_succeeded=True)
        await self._workspace.store.fetch_parts(second)


def saves_in(folder: Path) -> dict[str, str]:
    """The save of each file in a folder."""
    return {path.name: path.read_text().rpartition(" ")[2] for path in folder.rglob("*")
            if path.is_file()}  # fmt: skip


def complete_save(number: int) -> dict[str, str]:
    return dict.fromkeys((".metadata", "__0_0.distcp", "__1_0.distcp"), str(number))


@pytest.mark.parametrize("case", ["remote", "local", "taken", "detached"])
def test_new_distributed_checkpoint_replaces_all_shards(workspace: Workspace, case: str) -> None:
    """Torch would load old and new shards together, without an error."""
    is_home = case in ("remote", "local")
    arrived = (workspace.project if is_home else workspace.run / "files/n1") / "ckpt"

    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        if case == "taken":
            (workspace.project / "ckpt").mkdir()
            (workspace.project / "ckpt/.metadata").write_text("of the user")
        for number in (1, 2, 3):
            await script.start(is_local=case == "local", is_detached=case == "detached")
            script.save(number)
            if number > 1:
                await workspace.store.sync(script.folders[0], has_ended=True, has_succeeded=True)
                assert saves_in(arrived).get("__1_0.distcp") in (None, str(number))
            await script.end()
            assert saves_in(arrived) == complete_save(number)

    run(work)


@pytest.mark.parametrize("removes", [False, True])
def test_old_shards_do_not_return(workspace: Workspace, removes: bool) -> None:
    """Neither when other files of the checkpoint change, nor if the script removes it first."""
    arrived = workspace.project / "ckpt"

    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        await script.start()
        if removes:
            await workspace.store.sync(script.folders[0], has_ended=True)
            shutil.rmtree(workspace.copy("n1") / "ckpt")
            await workspace.store.sync(script.folders[0], has_ended=True)
        for name in (".metadata", "__0_0.distcp"):
            script.write(f"ckpt/{name}", 2)
        await workspace.store.sync(script.folders[0], has_ended=True)
        script.write("ckpt/state.json", 2)
        await workspace.store.sync(script.folders[0], has_ended=True, has_succeeded=True)
        assert saves_in(arrived) == dict.fromkeys((".metadata", "__0_0.distcp", "state.json"), "2")
        await workspace.store.send(script.folders[0])  # as at a restart
        assert "__1_0.distcp" not in saves_in(workspace.copy("n1") / "ckpt")

    run(work)


def test_shards_that_arrive_before_index_stay(workspace: Workspace) -> None:
    """Of one of two parts of a checkpoint, or of ranks that are done before another host."""

    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.start()
        for part in ("model_0", "optimizer_0"):
            script.write(f"ckpt/step_5/{part}/__0_0.distcp", 5)
            await workspace.store.sync(script.folders[0], has_ended=True, has_succeeded=True)
            script.write(f"ckpt/step_5/{part}/.metadata", 5)
            await workspace.store.sync(script.folders[0], has_ended=True)
        await workspace.store.send(script.folders[0])
        for root in (workspace.project, workspace.copy("n1")):
            for part in ("model_0", "optimizer_0"):
                files = saves_in(root / "ckpt/step_5" / part)
                assert files == {".metadata": "5", "__0_0.distcp": "5"}

    run(work)


@pytest.mark.parametrize("removed", ["ckpt", "ckpt/.metadata", "ckpt/__0_0.distcp"])
def test_user_may_remove_parts_of_checkpoint(workspace: Workspace, removed: str) -> None:
    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        path = workspace.project / removed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        await script.run(2)
        assert saves_in(workspace.project / "ckpt") == complete_save(2)

    run(work)


def test_shards_of_ranks_that_moved_are_replaced(workspace: Workspace) -> None:
    """Rank 0 moves to the second host, which has the shard of its former rank, and rank 1 to n1."""

    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        workspace.store.start_attempt()
        for folder in script.folders:
            await workspace.store.send(folder)
        script.folders.reverse()
        await asyncio.sleep(0.02)
        script.save(2)
        await script.end()
        assert saves_in(workspace.project / "ckpt") == complete_save(2)

    run(work)


def test_save_in_progress_is_not_fetched(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        script.write("ckpt/__0_0.distcp", 2)
        await workspace.store.sync(script.folders[0], has_ended=True)
        assert saves_in(workspace.project / "ckpt") == complete_save(1)

    run(work)


def test_save_of_lost_launcher_has_no_old_shards(workspace: Workspace) -> None:
    """The agent has kept all files that came after the code, also those that were sent."""
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        await script.start()
        script.save(2)
        uncollected = snapshot.make_run_folder(key) / snapshot.UNCOLLECTED
        shutil.copytree(workspace.copy("n1") / "ckpt", uncollected / "ckpt")
        served.agent.run_keys[key] = []
        workspace.store = workspace.fresh_store()
        kept = OutputFolder("n1", served.node.channel, str(uncollected))
        await workspace.store.fetch_uncollected(kept)
        assert saves_in(workspace.project / "ckpt") == {".metadata": "2", "__0_0.distcp": "2"}

    run(work)


def test_local_save_in_new_run_directory_replaces_all_shards(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        for number in (1, 2):
            workspace.run = workspace.run.parent / f"run{number}"
            workspace.run.mkdir()
            await script.start(is_local=True)
            script.save(number)
            await script.end()
            assert saves_in(workspace.project / "ckpt") == complete_save(number)

    run(work)


def test_old_shards_behind_link_of_user_stay(workspace: Workspace, tmp_path: Path) -> None:
    async def work(served: Served) -> None:
        script = ShardedScript(workspace, served)
        await script.run(1)
        (workspace.project / "ckpt").rename(tmp_path / "big")
        (workspace.project / "ckpt").symlink_to(tmp_path / "big")
        await script.run(2)
        assert saves_in(tmp_path / "big") == complete_save(1)
        assert saves_in(workspace.run / "files") == complete_save(2)

    run(work)


def test_final_sync_ends_despite_continuous_writes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/1.pt", torch_zip("one"))
        list_files, num_lists = workspace.store.list_files, 1

        async def list_more(folder: OutputFolder) -> list[WrittenFile]:
            nonlocal num_lists
            num_lists += 1
            workspace.write("n1", f"out/{num_lists}.pt", torch_zip("more"))
            return await list_files(folder)

        monkeypatch.setattr(workspace.store, "list_files", list_more)
        await workspace.store.sync(folder, has_ended=True)
        assert sorted(path.name for path in (workspace.project / "out").iterdir()) == [
            "1.pt",
            "2.pt",
        ]

    run(work)


def test_refetches_file_that_was_not_placed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef01234567"
    uncollected = snapshot.make_run_folder(key) / snapshot.UNCOLLECTED

    def raise_interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    async def work(served: Served) -> None:
        served.agent.run_keys[key] = []
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt_1.pt", torch_zip("one"))
        files = await workspace.store.list_files(folder)
        group = [file for file in files if file.path == "out/ckpt_1.pt"]
        hashes = await workspace.store.receive(folder, group, 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(local_outputs, "move_file", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                workspace.store.place_unit("n1", group, hashes)
        assert not script_checkpoint(workspace.run)
        served.agent.job.ranks = [RankProcess(0, 0)]
        agent_outputs.keep_uncollected(served.agent)
        second_folder = OutputFolder("n1", served.node.channel, str(uncollected))
        fetched = await workspace.fresh_store().fetch_uncollected(second_folder)
        assert fetched == (["out/ckpt_1.pt"], True)
        assert (workspace.project / "out/ckpt_1.pt").read_bytes() == torch_zip("one")

    run(work)


def test_file_placed_before_kill_counts_as_output(workspace: Workspace) -> None:
    (workspace.project / "out").mkdir()
    (workspace.project / "out/ckpt_1.pt").write_bytes(b"new")
    for name in ("ckpt_1.pt", "ckpt_2.pt"):
        output = Output(f"out/{name}", 3, "0" * 64, "n1", "", 5_000_000, 1.0, 5_000_000)
        workspace.store.journal.add_pending([output])
    os.utime(workspace.project / "out/ckpt_1.pt", (5, 5))
    assert {*workspace.fresh_store().journal.outputs} == {"out/ckpt_1.pt"}


def test_later_run_replaces_outputs_of_earlier_run(workspace: Workspace) -> None:
    """Both runs are in the folder of runs; the files are part of the code of the second run."""
    workspace.run = workspace.run.parent / "runs/first"
    workspace.run.mkdir(parents=True)
    workspace.store = workspace.fresh_store()

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt.pt", torch_zip("first"))
        workspace.write("n1", "out/mine.pt", torch_zip("first"))
        await workspace.store.sync(folder)
        (workspace.project / "out/mine.pt").write_bytes(b"changed here")
        workspace.run = workspace.run.parent / "second"
        workspace.run.mkdir()
        workspace.store = OutputStore(workspace.run, workspace.notes.append)
        sent = ["train.py", "out/ckpt.pt", "out/mine.pt"]
        workspace.store.set_code(workspace.project, [[path, "", 0, 4] for path in sent])
        assert not script_checkpoint(workspace.run)  # this run has no checkpoint yet
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt.pt", torch_zip("second"), age_s=-60.0)
        workspace.write("n1", "out/mine.pt", torch_zip("second"), age_s=-60.0)
        await workspace.store.sync(folder, has_ended=True)
        assert (workspace.project / "out/ckpt.pt").read_bytes() == torch_zip("second")
        assert (workspace.project / "out/mine.pt").read_bytes() == b"changed here"
        assert script_checkpoint(workspace.run)

    run(work)


@pytest.mark.parametrize("is_rank_0_in_place", [False, True])
def test_notes_unsent_checkpoint_of_different_run(
    workspace: Workspace, is_rank_0_in_place: bool
) -> None:
    workspace.run = workspace.run.parent / "runs/first"
    workspace.run.mkdir(parents=True)
    workspace.store = workspace.fresh_store()
    remote_node = SimpleNamespace(name="n2", copies={"code": ("/copy", "")})
    first = SimpleNamespace(name="n1", copies={}) if is_rank_0_in_place else remote_node
    fleet: Any = SimpleNamespace(first=first, everyone=[first, remote_node])

    def write_plan(run: Path, script: str) -> None:
        entry = {"kind": "script", "target": script}
        (run / "plan.json").write_text(json.dumps({"entry": entry}))

    def notes_of(name: str, *sent: str, script: str = "./train.py") -> list[str]:
        """Returns the notes at the start of a run whose code includes the files ``sent``."""
        run = workspace.run.parent / name
        run.mkdir(exist_ok=True)
        write_plan(run, script)
        notes: list[str] = []
        sync = OutputSync(run, notes.append)
        sync.store.set_code(workspace.project, [[path, "", 0, 4] for path in ("train.py", *sent)])
        asyncio.run(sync._note_unsent_checkpoint(fleet))
        return notes

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        workspace.write("n1", "out/ckpt.pt", torch_zip("first"))
        await workspace.store.sync(folder)

    write_plan(workspace.run, "train.py")
    assert not notes_of("second")
    run(work)
    assert not notes_of("second", script="other.py")
    (note,) = notes_of("second")
    assert "out/ckpt.pt of " in note
    assert ("warning: rank 0 finds out/ckpt.pt" in note) == is_rank_0_in_place
    assert ("n2 does not get it" in note) == is_rank_0_in_place
    assert note.endswith(f" --run-dir {short(workspace.run)}")
    assert not notes_of("first")  # this run resumes
    assert not notes_of("third", "out/ckpt.pt")
    (workspace.project / "out/ckpt.pt").write_bytes(b"of the user")
    assert not notes_of("second")


@pytest.mark.parametrize(
    ("num_own", "is_shared", "has_copy", "is_noted"),
    [(2, False, False, True), (1, False, False, False), (2, True, False, False),
     (2, False, True, False)],
)  # fmt: skip
def test_notes_hosts_with_own_projects(
    workspace: Workspace, num_own: int, is_shared: bool, has_copy: bool, is_noted: bool
) -> None:
    run = workspace.project / "runs/first"
    run.mkdir(parents=True)
    notes: list[str] = []
    sync = OutputSync(run, notes.append)
    sync.set_code(Supplies(Tree(workspace.project, [["train.py", "", 0o644, 4]])))
    copies = {"code": ("/copy", "")} if has_copy else {}
    nodes = [SimpleNamespace(name=f"n{number}", host=SimpleNamespace(local=number > num_own),
                             shared_run_dir=is_shared, copies=copies)
             for number in (1, 2)]  # fmt: skip
    sync._note_own_projects(cast(Fleet, SimpleNamespace(everyone=nodes)))
    assert [note.partition(" have")[0] for note in notes] == ["paceline: note: n1, n2"] * is_noted


@pytest.mark.parametrize(
    ("folder", "is_shared", "is_noted"),
    [("else", False, True), ("else", True, False), ("project/sub", False, False)],
)
def test_notes_hosts_whose_current_folder_is_outside_project(
    workspace: Workspace, folder: str, is_shared: bool, is_noted: bool
) -> None:
    notes: list[str] = []
    workdir = workspace.project.parent / folder
    sync = OutputSync(workspace.run, notes.append, workdir=workdir)
    sync.set_code(Supplies(Tree(workspace.project, [["train.py", "", 0o644, 4]])))
    nodes = [SimpleNamespace(name=f"n{number}", host=SimpleNamespace(local=number == 1),
                             shared_run_dir=is_shared, copies={})
             for number in (1, 2)]  # fmt: skip
    sync._note_own_projects(cast(Fleet, SimpleNamespace(everyone=nodes)))
    assert len(notes) == is_noted
    assert not is_noted or f"On n2, its relative paths lead to {workdir}" in notes[0]


def test_notes_new_paths_outside_project(workspace: Workspace) -> None:
    present = {"/data"}
    notes: list[str] = []
    inside = str(workspace.project / "out")
    arguments = ["--data", "/data", "out=/results", inside, "/etc", "--log", "/missing"]
    sync = OutputSync(workspace.run, notes.append, arguments)
    sync.set_code(Supplies(Tree(workspace.project, [["train.py", "", 0o644, 4]])))

    async def look(_: str, paths: list[str]) -> dict[str, Any]:
        assert paths == ["/data", "/results", "/missing"]
        return {"paths": [{"path": path, "exists": path in present} for path in paths]}

    node: Any = SimpleNamespace(name="n1", host=SimpleNamespace(local=False),
                                copies={"code": ("/copy", [])},
                                channel=SimpleNamespace(request=look))  # fmt: skip

    async def work() -> None:
        sync._outside = node, await sync._existing_outside(node, exists=False)
        present.add("/results")
        await sync._note_outside(node)

    asyncio.run(work())
    (note,) = notes
    assert "so it stays on n1: /results. To get it here" in note


def test_files_of_other_run_keep_modification_times(workspace: Workspace) -> None:
    """In a new run directory, a script may also choose the checkpoint with the latest time."""
    paths = ("out/ckpt_10.pt", "out/ckpt_9.pt")

    async def write_first(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        for path, age_s in zip(paths, (60.0, 120.0), strict=True):
            workspace.write("n1", path, torch_zip(path), age_s)
        await workspace.store.sync(folder)

    run(write_first)
    second = workspace.run.parent / "second"
    second.mkdir()
    sync = OutputSync(second, workspace.notes.append)
    tree = read_tree(workspace.project)
    assert {str(entry[0]) for entry in tree.manifest} >= set(paths)
    code = sync.set_code(Supplies(code=tree)).code
    assert code is not None
    assert {str(entry[0]) for entry in code.manifest} == {"train.py", "table.csv"}

    async def send_second(served: Served) -> None:
        served.agent.folders.append(workspace.jobs)
        folder = OutputFolder("n2", served.node.channel, str(workspace.copy("n2")))
        await sync.store.open_folder(folder)
        await sync.store.send(folder)
        for path in paths:
            copied, original = (
                (root / path).stat() for root in (workspace.copy("n2"), workspace.project)
            )
            assert copied.st_mtime == pytest.approx(original.st_mtime, abs=1e-3)
        await sync.store.sync(folder)
        assert not workspace.notes

    run(send_second)


def test_local_rank_0_outputs_are_recorded_and_sent(workspace: Workspace) -> None:
    """Files that rank 0 wrote are recorded and sent to other nodes; files of the user are not."""
    (workspace.project / "private.json").write_text("{}")

    async def work(served: Served) -> None:
        local = OutputFolder("here", served.node.channel, str(workspace.project), is_local=True)
        await workspace.store.open_folder(local)
        await asyncio.sleep(0.02)
        (workspace.project / "out").mkdir()
        (workspace.project / "out/ckpt_1.pt").write_bytes(torch_zip("one"))
        (workspace.project / "out/last.pt").symlink_to("ckpt_1.pt")
        await workspace.store.sync(local)
        assert set(workspace.store.journal.outputs) == {"out/ckpt_1.pt", "out/last.pt"}
        second = await workspace.folder(served, "n2")
        await workspace.store.send(second)
        for name in ("ckpt_1.pt", "last.pt"):
            assert (workspace.copy("n2") / "out" / name).read_bytes() == torch_zip("one")
        assert not (workspace.copy("n2") / "private.json").exists()

    run(work)


@pytest.mark.parametrize("is_project_a_run", [False, True])
def test_rejects_outputs_in_run_directories(workspace: Workspace, is_project_a_run: bool) -> None:
    """Another run could resume from a checkpoint that a hostile node stored there."""
    prefix = "" if is_project_a_run else "runs/old/"
    (workspace.project / prefix).mkdir(parents=True, exist_ok=True)
    (workspace.project / f"{prefix}.paceline-brought").write_text("{}\n")

    async def work(served: Served) -> None:
        folder = await workspace.folder(served, "n1")
        names = [f"{prefix}checkpoints/9/weights.pt", f"{prefix}model/w.pt", f"{prefix}batch.json"]
        for name in names:
            workspace.write("n1", name, torch_zip("planted"))
        workspace.write("n1", "out/w.pt", torch_zip("result"))
        await workspace.store.sync(folder)
        assert not [name for name in names if (workspace.project / name).exists()]
        assert (workspace.run / f"files/n1/{names[0]}").exists()
        assert (workspace.project / "out/w.pt").exists()

    run(work)


def test_does_not_send_files_of_unsealed_journal(workspace: Workspace) -> None:
    """Its lines could name any file of the project, and other files through a link."""
    (workspace.project / "secret.json").write_text("mine")
    (workspace.run.parent / "keys").mkdir()
    (workspace.run.parent / "keys/id.txt").write_text("mine")
    (workspace.run / "notes").symlink_to(workspace.run.parent / "keys")
    common = {"size": 4, "sha256": "0" * 64, "host": "n1", "mtime_us": 1, "time": 1.0,
              "local_mtime_us": 1}  # fmt: skip
    lines = [{"path": "secret.json", "place": "", **common},
             {"path": "id.txt", "place": "notes/id.txt", **common}]  # fmt: skip
    other = workspace.run.parent / "other"
    other.mkdir()
    sealed = LineSeals(other).sealed(lines[0])  # sealed for another run directory of this user
    journal = "".join(json.dumps(line) + "\n" for line in [*lines, sealed])
    (workspace.run / "outputs.jsonl").write_text(journal)
    workspace.store = workspace.fresh_store()
    assert "3 lines" in workspace.notes[-1]

    async def work(served: Served) -> None:
        await workspace.store.send(await workspace.folder(served, "n2"))
        assert sorted(p.name for p in workspace.copy("n2").iterdir()) == ["table.csv", "train.py"]

    run(work)
    assert set(OutputJournal(workspace.run).outputs) == {
        "secret.json",
        "id.txt",
    }  # only for display


def hostile_zip(num_entries: int) -> bytes:
    """Returns a file like those of ``torch.save``, whose index lists entries without content."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, *[0] * 7, 1, *[0] * 6) + b"a"
    index = entry * num_entries
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(index), 30, 0)
    return b"PK\3\4" + bytes(26) + index + end


def encrypted_zip() -> bytes:
    data = bytearray(torch_zip("one"))
    data[6] |= 1
    data[data.rfind(b"PK\1\2") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize("data", [hostile_zip(100_000), encrypted_zip()], ids=["huge", "encrypted"])
def test_hostile_torch_file_is_not_intact(workspace: Workspace, data: bytes) -> None:
    (workspace.run / local_outputs.UNPLACED).mkdir(parents=True)
    (workspace.run / local_outputs.UNPLACED / "x.pt").write_bytes(data)
    tracemalloc.start()
    try:
        assert not torch_files.is_intact(workspace.run / local_outputs.UNPLACED / "x.pt")
        assert not torch_files.has_state(workspace.run / local_outputs.UNPLACED / "x.pt")
        assert tracemalloc.get_traced_memory()[1] < 2 * torch_files.MAX_ZIP_INDEX_BYTES
    finally:
        tracemalloc.stop()
