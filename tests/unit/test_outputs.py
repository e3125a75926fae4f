"""Files of a script travel between a node and the project, and nothing of the user is replaced."""

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
from typing import Any

import pytest

from agents import Served, agent_in_thread
from paceline.agent.files import outputs as agent_outputs
from paceline.agent.files import safe_paths, snapshot
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.planning.placement import Supplies
from paceline.launch.results.outputs import OutputSync
from paceline.remote.channel import AgentRefusal
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.directory import RunDirectory, short
from paceline.rundir.output_rules import WrittenFile, unit_of
from paceline.rundir.outputs import Output, OutputJournal, newest_checkpoint, script_checkpoint
from paceline.transfer import output_folders, outputs, results, torch_files
from paceline.transfer.output_folders import RUN_PREFIX, OutputFolder
from paceline.transfer.outputs import OutputStore
from paceline.transfer.tree import Manifest, read_tree

HOUR_S = 3600.0


def zipped(text: str) -> bytes:
    """What torch.save writes, in its outer form."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), "weight " + text)
    return buffer.getvalue()


class Place:
    """A project here, with code, and its copies on two nodes; a run directory."""

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
        """Writes a file as a rank on a node does, some time ago."""
        file = self.copy(name) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        os.utime(file, (time.time() - age_s,) * 2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(output_folders, "CHECKPOINT_PAUSE_S", 0.0)
    monkeypatch.setattr(output_folders, "PAUSE_S", 0.0)
    return Place(tmp_path)


def run(work: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def serve() -> None:
        async with agent_in_thread() as served:
            await work(served)

    asyncio.run(serve())


def test_results_arrive_where_the_script_wrote_them(place: Place) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt_1.pt", zipped("one"))
        place.write("n1", "out/ckpt_2.pt", zipped("two")[:-1], age_s=0)  # still being written
        place.write("n1", "out/evil.py", b"code")
        place.write("n1", "table.csv", b"changed")
        (place.copy("n1") / "out/ckpt_1.pt").chmod(0o777)
        await place.store.sync(folder)
        assert sorted(p.name for p in (place.project / "out").iterdir()) == ["ckpt_1.pt"]
        arrived = place.project / "out/ckpt_1.pt"
        assert arrived.read_bytes() == zipped("one")
        assert not arrived.stat().st_mode & 0o111
        assert abs(arrived.stat().st_mtime - time.time() + 60) < 10
        assert (place.project / "table.csv").read_text() == "sent"
        assert script_checkpoint(place.run) == "out/ckpt_1.pt"
        assert not (place.run / outputs.UNPLACED).exists()
        place.write("n1", "out/ckpt_2.pt", zipped("two"), age_s=0)
        await place.store.sync(folder)
        assert script_checkpoint(place.run) == "out/ckpt_2.pt"

    run(work)


def test_files_of_the_user_are_never_replaced(place: Place) -> None:
    """Neither one that was there, nor one that arrived and was changed here since."""

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        (place.project / "mine.pt").write_bytes(b"mine")
        place.write("n1", "mine.pt", zipped("theirs"))
        place.write("n1", "out/last.pt", zipped("one"))
        await place.store.sync(folder)
        assert (place.project / "mine.pt").read_bytes() == b"mine"
        assert (place.run / "files/n1/mine.pt").read_bytes() == zipped("theirs")
        place.write("n1", "out/last.pt", zipped("two"), age_s=50)
        await place.store.sync(folder)
        assert (place.project / "out/last.pt").read_bytes() == zipped("two")  # it was not changed
        (place.project / "out/last.pt").write_bytes(b"edited")
        place.write("n1", "out/last.pt", zipped("three"), age_s=40)
        await place.store.sync(folder)
        assert (place.project / "out/last.pt").read_bytes() == b"edited"
        assert (place.run / "files/n1/out/last.pt").read_bytes() == zipped("three")
        (place.project / "docs").mkdir()
        (place.project / "docs/own.md").write_text("mine")
        place.write("n1", "docs/new.md", b"new")
        await place.store.sync(folder, has_ended=True)
        assert set(place.store.kept_out) == {"mine.pt", "out/last.pt", "docs/new.md"}
        place.store.note_kept_out()
        taken, others = place.notes[-2:]
        assert "2 files of the script did not replace files in the project: " in taken
        assert "1 file of the script, which may not be put into the project: " in others
        assert others.endswith("files/n1/docs/new.md")

    run(work)


def test_a_strict_umask_holds_for_what_arrives(place: Place) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/deep/ckpt_1.pt", zipped("one"))
        await place.store.sync(folder)

    earlier = os.umask(0o077)
    try:
        run(work)
    finally:
        os.umask(earlier)
    modes = [(place.project / path).stat().st_mode & 0o777
             for path in ("out", "out/deep", "out/deep/ckpt_1.pt")]  # fmt: skip
    assert modes == [0o700, 0o700, 0o600]


def test_links_in_the_project_are_not_followed(place: Place, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (place.project / "out").symlink_to(elsewhere)

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt_1.pt", zipped("one"))
        await place.store.sync(folder)
        assert not list(elsewhere.iterdir())
        assert (place.run / "files/n1/out/ckpt_1.pt").exists()

    run(work)


def test_a_checkpoint_folder_arrives_as_a_whole(place: Place) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        (place.project / "out/checkpoint-5").mkdir(parents=True)
        (place.project / "out/checkpoint-5/model.pt").write_bytes(b"mine")
        for step in (5, 6):
            place.write("n1", f"out/checkpoint-{step}/model.pt", zipped("model"))
            place.write("n1", f"out/checkpoint-{step}/optimizer.pt", zipped("state"))
            place.write("n1", f"out/checkpoint-{step}/trainer_state.json", b"{}")
        await place.store.sync(folder, has_ended=True, has_succeeded=True)
        assert [p.name for p in (place.project / "out/checkpoint-5").iterdir()] == ["model.pt"]
        assert len([*(place.run / "files/n1/out/checkpoint-5").iterdir()]) == 3
        assert len([*(place.project / "out/checkpoint-6").iterdir()]) == 3

    run(work)


def test_other_nodes_get_what_is_here_and_nothing_newer(place: Place) -> None:
    """With the times of rank 0's files; what only they have is set aside, not removed."""

    async def work(served: Served) -> None:
        first, second = await place.folder(served, "n1"), await place.folder(served, "n2")
        place.write("n1", "out/ckpt_1.pt", zipped("one"), age_s=50)
        place.write("n1", "out/log.txt", b"of rank 0")
        await place.store.sync(first, has_ended=True, has_succeeded=True)
        place.write("n2", "out/ckpt_2.pt", zipped("other"))
        place.write("n2", "out/log.txt", b"of rank 1")
        await place.store.send(second)
        out = place.copy("n2") / "out"
        assert sorted(p.name for p in out.iterdir()) == [
            ".ckpt_2.pt.superseded", ".log.txt.superseded", "ckpt_1.pt", "log.txt"
        ]  # fmt: skip
        assert (out / "log.txt").read_bytes() == b"of rank 0"
        assert abs((out / "ckpt_1.pt").stat().st_mtime - time.time() + 50) < 10
        before = len(OutputJournal(place.run).outputs)
        await place.store.sync(second)  # it has rank 0 now: what it got is not new
        assert len(OutputJournal(place.run).outputs) == before
        assert {"out/ckpt_1.pt", "out/log.txt"} <= await place.store.known_paths(second)

    run(work)


def test_the_newest_checkpoint_here_outlives_its_removal_by_the_script(place: Place) -> None:
    """Until the next has arrived: if rank 0's host is lost before, the job begins with it."""

    async def work(served: Served) -> None:
        first, second = await place.folder(served, "n1"), await place.folder(served, "n2")
        for step in (10, 20):
            place.write("n1", f"out/checkpoint-{step}/model.pt", zipped("model"), age_s=60 - step)
            place.write("n1", f"out/checkpoint-{step}/trainer_state.json", b"{}", age_s=60 - step)
        place.write("n1", "out/best.pt", zipped("best"), age_s=30)
        await place.store.sync(first, has_ended=True)
        for step in (10, 20):  # the script keeps one, and another is not complete
            shutil.rmtree(place.copy("n1") / f"out/checkpoint-{step}")
        place.write("n1", "out/checkpoint-30/model.pt", zipped("model")[:-1], age_s=0)
        await place.store.sync(first, has_ended=True)
        await place.store.sync(first, has_ended=True)
        place.write("n2", "out/checkpoint-30/random_states_1.pkl", b"of rank 1")
        await place.store.send(second)
        out = place.copy("n2") / "out"
        assert sorted(p.name for p in out.iterdir()) == [
            ".checkpoint-30.superseded", "best.pt", "checkpoint-20"
        ]  # fmt: skip
        place.write("n1", "out/checkpoint-30/model.pt", zipped("model"), age_s=5)
        place.write("n1", "out/checkpoint-30/trainer_state.json", b"{}", age_s=5)
        await place.store.sync(first, has_ended=True)
        await place.store.sync(first, has_ended=True)
        units = {unit_of(path) for path in OutputJournal(place.run).outputs}
        assert units == {"out/best.pt", "out/checkpoint-30"}

    run(work)


def test_a_later_start_sends_what_is_left_here(place: Place) -> None:
    async def work(served: Served) -> None:
        first = await place.folder(served, "n1")
        for step in (1, 2, 3):
            place.write("n1", f"out/ckpt_{step}.pt", zipped(f"{step}"), age_s=60 - step)
            for name in ("a.pt", "b.pt"):
                place.write("n1", f"out/checkpoint-{step}/{name}", zipped(f"{step}"))
        await place.store.sync(first, has_ended=True, has_succeeded=True)
        (place.project / "out/ckpt_3.pt").unlink()
        (place.project / "out/checkpoint-3/b.pt").unlink()  # it is not complete any more
        place.write("n1", "out/other", b"")
        (place.copy("n1") / "out/ckpt_1.pt").unlink()  # by the script, which keeps two
        await place.store.sync(first)
        place.store = place.fresh_store()
        second = await place.folder(served, "n2")
        await place.store.send(second)
        out = place.copy("n2") / "out"
        names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*.pt"))
        assert names == ["checkpoint-1/a.pt", "checkpoint-1/b.pt", "checkpoint-2/a.pt",
                         "checkpoint-2/b.pt", "ckpt_2.pt"]  # fmt: skip
        assert (place.project / "out/ckpt_1.pt").exists()

    run(work)


def test_a_log_that_grows_all_the_time_arrives_in_parts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the script writes it anew; and not over what the user has changed here."""
    monkeypatch.setattr(outputs, "MIN_GROWTH_S", 0.0)

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")

        async def grow(*names: str, text: str = "line\n") -> None:
            for name in names:
                with (place.copy("n1") / "out" / name).open("a") as file:
                    file.write(text)
            await place.store.sync(folder)

        def arrived(name: str) -> str:
            path = place.project / "out" / name
            return path.read_text() if path.exists() else ""

        (place.copy("n1") / "out").mkdir()
        logs = ("log.txt", "events.out.tfevents.17.n1.1.0", "part.bin")
        for index in range(3):
            (place.copy("n1") / "out/anew.csv").write_text(f"{index}, " * (index + 1))
            await grow(*logs)
        assert [arrived(name) for name in logs[:2]] == ["line\n", "line\n"]
        assert not arrived("anew.csv")
        assert not arrived("part.bin")
        (place.project / "out/log.txt").write_text("edited")
        for _ in range(3):
            await grow(*logs)
        assert arrived("log.txt") == "edited"
        await place.store.sync(folder, has_ended=True, has_succeeded=True)
        assert arrived(logs[1]) == "line\n" * 6
        assert (place.run / "files/n1/out/log.txt").read_text() == "line\n" * 6
        assert {*place.store.kept_out} == {"out/log.txt"}

    run(work)


def test_files_without_a_suffix_that_scripts_resume_from_travel(place: Place) -> None:
    """The checkpoint itself, and a text that names the newest one, which is none."""

    async def work(served: Served) -> None:
        first, second = await place.folder(served, "n1"), await place.folder(served, "n2")
        place.write("n1", "out/checkpoint", zipped("one"))
        place.write("n1", "out/last_checkpoint", b"checkpoint", age_s=0)
        await place.store.sync(first, has_ended=True)
        await place.store.send(second)
        assert script_checkpoint(place.run) == "out/checkpoint"
        for root in (place.project, place.copy("n2")):
            assert (root / "out/checkpoint").read_bytes() == zipped("one")
            assert (root / "out/last_checkpoint").read_text() == "checkpoint"

    run(work)


def test_data_with_the_suffix_of_a_checkpoint_is_none(place: Place) -> None:
    """Weights come in the pickle of torch.save; a dataset does not say that it has any."""
    data = zipped("images and labels").replace(b"weight", b"values")

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt.pt", zipped("one"))
        place.write("n1", "data/x.pt", data, age_s=30.0)
        place.write("n1", "data/x.bin", b"tokens: weight, step", age_s=30.0)
        place.write("n1", "out/model_1", b"tokens", age_s=30.0)
        await place.store.sync(folder, has_ended=True, has_succeeded=True)
        assert (place.project / "data/x.pt").exists()
        assert (place.project / "out/model_1").exists()
        assert script_checkpoint(place.run) == "out/ckpt.pt"
        (place.copy("n1") / "out/ckpt.pt").unlink()

    run(work)
    old = json.loads((place.run / "outputs.jsonl").read_text().splitlines()[-1])
    del old["has_state"]
    assert Output.read(old) == Output.read(old | {"has_state": True}) is not None
    assert Output.read(old | {"has_state": 1}) is None


def test_a_full_disk_here_leaves_files_on_the_node(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt_1.pt", zipped("one"))
        monkeypatch.setattr(outputs, "room_problem", lambda folder, size: "the disk is full")
        await place.store.sync(folder)
        await place.store.sync(folder)
        assert [note for note in place.notes if "stays on n1 for now: the disk is full" in note]
        assert len(place.notes) == 1
        assert not (place.project / "out").exists()
        monkeypatch.setattr(outputs, "room_problem", results.room_problem)
        await place.store.sync(folder)
        assert (place.project / "out/ckpt_1.pt").exists()

    run(work)


def test_a_node_cannot_write_outside_its_job(place: Place) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        folder.root = str(place.project)
        with pytest.raises(Exception, match="not a folder of this job"):
            await served.ask("set_outputs_aside", root=folder.root, paths=["train.py"])

    run(work)


@pytest.mark.parametrize(("name", "data", "state"), [
    ("a.pt", zipped("x"), "whole"),
    ("a.pt", zipped("x")[:-5], "cut off"),
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
def test_formats_that_show_their_end(tmp_path: Path, name: str, data: bytes, state: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert agent_outputs.file_state(str(file), len(data)) == state


def test_a_link_to_a_checkpoint_beside_it_travels_as_a_copy(place: Place) -> None:
    """A node of rank 0 that got nothing keeps its link."""

    async def work(served: Served) -> None:
        first, second = await place.folder(served, "n1"), await place.folder(served, "n2")
        place.write("n1", "out/step=20.pt", zipped("one"))
        place.write("n1", "out/step=40.pt", zipped("two"), age_s=50)
        link = place.copy("n1") / "out/last.pt"
        for target in ("step=20.pt", "step=40.pt"):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            await place.store.sync(first)
        await place.store.send(first)
        await place.store.send(second)
        assert link.readlink() == Path("step=40.pt")
        for root in (place.project, place.copy("n2")):
            copy = root / "out/last.pt"
            assert not copy.is_symlink()
            assert copy.read_bytes() == zipped("two")

    run(work)


@pytest.mark.parametrize("target", ["../secret.pt", "/etc/passwd", ".secret.pt", "other.pt", "sub"])
def test_other_links_of_a_host_are_not_read(place: Place, target: str) -> None:
    """Those that lead out of their folder, to a hidden file, a folder or another link."""

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        for path in ("secret.pt", "out/.secret.pt", "out/sub/x.pt"):
            place.write("n1", path, b"secret")
        out = place.copy("n1") / "out"
        (out / "other.pt").symlink_to("../secret.pt")
        (out / "last.pt").symlink_to(target)
        assert "out/last.pt" not in {file.path for file in await place.store.list_files(folder)}
        with pytest.raises(AgentRefusal):
            await folder.channel.request_with_blob(
                "read_block", root=folder.root, path="out/last.pt", offset=0, count=6, last=True
            )

    run(work)


def test_lists_of_a_folder_leave_out_links_hidden_files_and_runs(tmp_path: Path) -> None:
    for path in ("a.pt", ".hidden/b.pt", "venv/pyvenv.cfg", "venv/c.pt", "run/.paceline-key",
                 "run/d.pt", "x/.metadata", "x/.e", "__pycache__/f.pt"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    (tmp_path / "link.pt").symlink_to("x/.metadata")
    files, _ = agent_outputs.list_written(str(tmp_path), 0)
    assert sorted(file["path"] for file in files) == ["a.pt", "x/.metadata"]


def test_a_link_changes_when_it_leads_to_another_file(tmp_path: Path) -> None:
    for path in ("a.pt", "b.pt"):
        (tmp_path / path).write_bytes(b"x")
    _, latest_us = agent_outputs.list_written(str(tmp_path), 0)
    time.sleep(0.02)
    (tmp_path / "last.pt").symlink_to("a.pt")
    files, _ = agent_outputs.list_written(str(tmp_path), latest_us + 1)
    assert [file["path"] for file in files] == ["last.pt"]


def test_a_damaged_or_hostile_journal_is_no_error(tmp_path: Path) -> None:
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
    journal.add_folder("more")
    assert OutputJournal(tmp_path).folders == {"out", "more"}


def test_files_in_the_runs_folder_come_to_the_run_directory_and_go_back(place: Place) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        folder = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = None
        (folder / "ckpt_1.pt").write_bytes(zipped("one"))
        (folder / "model").mkdir()
        for name in ("model/model.safetensors", "train.py", "events.jsonl", ".hidden"):
            (folder / name).write_bytes(b"x")
        node = OutputFolder("n1", served.node.channel, str(folder), prefix=RUN_PREFIX)
        await place.store.open_folder(node)
        await place.store.sync(node, has_ended=True)
        names = sorted(path.name for path in place.run.iterdir() if path.name[0] != ".")
        assert names == ["ckpt_1.pt", "outputs.jsonl"]
        assert script_checkpoint(place.run).endswith("run/ckpt_1.pt")
        (folder / "ckpt_1.pt").rename(folder / "ckpt_2.pt")  # of another rank, on another node
        again = OutputFolder("n2", served.node.channel, str(folder), prefix=RUN_PREFIX)
        await place.store.open_folder(again)
        await place.store.send(again)
        assert (folder / "ckpt_1.pt").read_bytes() == zipped("one")
        assert (folder / ".ckpt_2.pt.superseded").exists()

    run(work)


def test_what_a_lost_launcher_had_not_fetched_comes_at_the_next_start(place: Place) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        kept = snapshot.make_run_folder(key) / agent_outputs.UNCOLLECTED
        served.agent.run_keys[key] = []
        folder = await place.folder(served, "n1")
        place.write("n1", "out/last.pt", zipped("old"), age_s=50)
        place.write("n1", "out/first.pt", zipped("first"), age_s=60)
        await place.store.sync(folder)
        place.write("n1", "out/last.pt", zipped("new"), age_s=10)
        place.write("n1", "out/cut_off.pt", zipped("cut")[:-1], age_s=5)
        served.agent.job.ranks = [RankProcess(1, 0)]
        agent_outputs.keep_uncollected(served.agent)
        assert not kept.exists()
        served.agent.job.ranks = [RankProcess(0, 0)]
        agent_outputs.keep_uncollected(served.agent)
        assert (place.copy("n1") / "train.py").exists()
        again = OutputFolder("n1", served.node.channel, str(kept))
        fetched = await place.fresh_store().fetch_uncollected(again)
        assert fetched == (["out/last.pt"], True)
        assert (place.project / "out/last.pt").read_bytes() == zipped("new")
        (place.project / "out/first.pt").unlink()  # to go back; it does not come again
        again = OutputFolder("n1", served.node.channel, str(kept))
        assert await place.fresh_store().fetch_uncollected(again) == ([], True)
        await served.ask("discard_uncollected", root=str(kept.parent))
        assert kept.parent.exists()
        assert not kept.exists()

    run(work)


def test_what_a_host_without_power_had_not_sent_comes_at_the_next_start(place: Place) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        kept = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = []
        folder = await place.folder(served, "n1")
        served.agent.job.ranks = [RankProcess(0, 0)]
        place.write("n1", "out/first.pt", zipped("first"))
        await place.store.sync(folder)
        place.write("n1", "out/last.pt", zipped("last"), age_s=10)
        sources = json.loads((kept / snapshot.SOURCES_FILE).read_text())
        assert [*sources] == [str(place.copy("n1"))]
        (place.jobs.parents[1] / "elsewhere").mkdir()
        sources[str(place.jobs.parents[1] / "elsewhere")] = 0  # forged
        (kept / snapshot.SOURCES_FILE).write_text(json.dumps(sources))
        served.agent.run_keys.clear()  # as in a new agent
        answer = await served.ask("run_folder", key=key, own=True)
        again = OutputFolder("n1", served.node.channel, f"{answer['folder']}/.uncollected")
        assert await place.fresh_store().fetch_uncollected(again) == (["out/last.pt"], True)
        assert not (kept / snapshot.SOURCES_FILE).exists()

    run(work)


def test_an_agent_that_ends_itself_leaves_no_record_of_sources(place: Place) -> None:
    key = "0123456789abcdef01234567"

    async def work(served: Served) -> None:
        kept = snapshot.make_run_folder(key)
        served.agent.run_keys[key] = []
        folder = await place.folder(served, "n1")
        served.agent.job.ranks = [RankProcess(0, 0)]
        await place.store.sync(folder)
        assert (kept / snapshot.SOURCES_FILE).exists()
        await served.ask("forget_outputs")
        agent_outputs.keep_uncollected(served.agent)
        assert [path.name for path in kept.iterdir() if path.name != safe_paths.INCOMING] == [
            snapshot.MARK_FILE
        ]

    run(work)


def test_two_nodes_have_files_that_a_lost_launcher_had_not_fetched(place: Place) -> None:
    """Rank 0 was on one, then on the other. The newest arrive, and none gets in another's way."""
    keys = ("0123456789abcdef01234567", "89abcdef0123456701234567")

    async def work(served: Served) -> None:
        folders = []
        for key, text in zip(keys, ("old", "new"), strict=True):
            kept = snapshot.make_run_folder(key) / agent_outputs.UNCOLLECTED
            served.agent.run_keys[key] = []
            for name in ("a.pt", "b.pt", f"{text}.pt"):
                (kept / "out/step_1").mkdir(parents=True, exist_ok=True)
                (kept / "out/step_1" / name).write_bytes(zipped(text * 1000))
                age_s = 30.0 if text == "new" else 60.0
                os.utime(kept / "out/step_1" / name, (time.time() - age_s,) * 2)
            (kept / "out/step_1/trainer_state.json").write_text("{}")
            os.utime(kept / "out/step_1/trainer_state.json", (time.time() - 90.0,) * 2)
            folders.append(OutputFolder("n1", served.node.channel, str(kept)))
        store = place.fresh_store()
        empty = OutputFolder("n2", served.node.channel, str(place.copy("n2")))
        await store.open_folder(empty)
        await asyncio.gather(*map(store.fetch_uncollected, folders), store.sync(empty))
        arrived = place.project / "out/step_1"
        assert {path.name for path in arrived.iterdir()} == {
            "a.pt", "b.pt", "new.pt", "old.pt", "trainer_state.json"
        }  # fmt: skip
        assert (arrived / "a.pt").read_bytes() == zipped("new" * 1000)

    run(work)


def test_a_cancelled_copy_puts_received_files_into_their_places_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    placing = threading.Event()
    place_unit = place.store.place_unit

    def place_slowly(*args: Any) -> None:
        placing.set()
        time.sleep(0.1)
        place_unit(*args)

    monkeypatch.setattr(place.store, "place_unit", place_slowly)

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt_1.pt", zipped("one"))
        watching = asyncio.ensure_future(place.store.sync(folder))
        await asyncio.to_thread(placing.wait)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert script_checkpoint(place.run) == "out/ckpt_1.pt"
        assert await place.store.known_paths(folder) >= {"out/ckpt_1.pt"}

    run(work)


def test_a_checkpoint_of_the_user_that_the_script_replaces_is_the_same_on_all_nodes(
    place: Place,
) -> None:
    """It was sent with the code. The user's stays; the script's goes to all nodes."""
    own = place.project / "ckpt.pt"
    own.write_bytes(zipped("mine"))
    os.utime(own, (time.time() - HOUR_S,) * 2)
    code: Manifest = [["train.py", "", 0, 4], ["ckpt.pt", "", 0, 4]]
    place.store.set_code(place.project, code)

    async def work(served: Served) -> None:
        first = await place.folder(served, "n1")
        second = await place.folder(served, "n2")
        for name in ("n1", "n2"):
            place.write(name, "ckpt.pt", zipped("mine"), age_s=HOUR_S)
        place.write("n1", "ckpt.pt", zipped("script's"), age_s=30.0)
        await place.store.sync(first)
        assert own.read_bytes() == zipped("mine")
        assert script_checkpoint(place.run).endswith("files/n1/ckpt.pt")
        await place.store.send(second)
        assert (place.copy("n2") / "ckpt.pt").read_bytes() == zipped("script's")
        own.write_bytes(zipped("mine again"))  # newer than the script's
        place.store = place.fresh_store()
        place.store.set_code(place.project, code)
        await place.store.send(second)
        assert (place.copy("n2") / "ckpt.pt").read_bytes() == zipped("mine again")

    run(work)


def test_a_host_does_not_get_a_file_of_the_user_by_its_name(place: Place, tmp_path: Path) -> None:
    """A file that git ignores, or one behind a link, stays here though a script wrote its name."""
    outside = tmp_path / "private"
    outside.mkdir()
    for own in (place.project / "kaggle.json", outside / "keys.json"):
        own.write_text("the user's own")
    (place.project / "link").symlink_to(outside)

    async def work(served: Served) -> None:
        first = await place.folder(served, "n1")
        second = await place.folder(served, "n2")
        for path in ("kaggle.json", "link/keys.json"):
            place.write("n1", path, b"the host's", age_s=HOUR_S)
        await place.store.sync(first, has_ended=True)
        await place.store.send(second)
        for path in ("kaggle.json", "link/keys.json"):
            assert (place.run / "files/n1" / path).read_text() == "the host's"
            assert (place.copy("n2") / path).read_text() == "the host's"

    run(work)


def test_a_host_does_not_change_what_was_sent_to_the_others(place: Place) -> None:
    """Settings in a yaml or json file may name functions to call."""
    paths = "conf.yaml", "table.csv", "model"
    code: Manifest = [[path, "", 0, 4] for path in ("train.py", *paths)]
    place.store.set_code(place.project, code)
    for root in (place.project, place.copy("n1"), place.copy("n2")):
        (root / "conf.yaml").write_text("sent")
        (root / "model").write_text("sent")

    async def work(served: Served) -> None:
        first = await place.folder(served, "n1")
        second = await place.folder(served, "n2")
        for path in paths:
            place.write("n1", path, b"the host's", age_s=0)
        await place.store.sync(first, has_ended=True, has_succeeded=True)
        await place.store.send(second)
        for path in paths:
            assert (place.run / "files/n1" / path).read_text() == "the host's"
            assert (place.copy("n2") / path).read_text() == "sent"

    run(work)


def test_of_a_start_on_this_machine_alone_checkpoints_are_recorded(place: Place) -> None:
    """A later start on other hosts gets them; edited files are not mistaken for results."""
    place.store.set_code(place.project, [])

    async def work(served: Served) -> None:
        local = OutputFolder("here", served.node.channel, str(place.project), is_local=True,
                             only_checkpoints=True)  # fmt: skip
        await place.store.open_folder(local)
        await asyncio.sleep(0.02)
        (place.project / "out/checkpoint-5").mkdir(parents=True)
        for path in ("ckpt.pt", "checkpoint-5/model.safetensors", "checkpoint-5/state.json"):
            (place.project / "out" / path).write_bytes(zipped(path))
        (place.project / "table.csv").write_text("edited")
        await place.store.sync(local, has_ended=True, has_succeeded=True)
        recorded = {"out/ckpt.pt", *(f"out/checkpoint-5/{name}"
                                     for name in ("model.safetensors", "state.json"))}  # fmt: skip
        assert {*place.store.journal.outputs} == recorded

    run(work)


def test_a_checkpoint_of_another_run_is_not_this_ones_newest(place: Place) -> None:
    """The other run was started between two starts of this one, on this machine alone."""
    place.run = place.run.parent / "runs/first"
    place.run.mkdir(parents=True)

    async def start(served: Served, name: str, checkpoint: str = "") -> None:
        place.run = place.run.parent / name
        place.run.mkdir(exist_ok=True)
        store = OutputStore(place.run, place.notes.append)
        store.set_code(place.project, [])
        local = OutputFolder("here", served.node.channel, str(place.project), is_local=True,
                             only_checkpoints=True)  # fmt: skip
        await store.open_folder(local)
        await asyncio.sleep(0.02)
        if checkpoint:
            (place.project / checkpoint).write_bytes(zipped(checkpoint))
        await store.sync(local, has_ended=True)

    async def work(served: Served) -> None:
        await start(served, "first")
        await start(served, "second", "ckpt.pt")
        await start(served, "first")
        assert not script_checkpoint(place.run)
        await start(served, "first", "own.pt")
        assert script_checkpoint(place.run) == "own.pt"

    run(work)


def test_shards_of_all_nodes_make_a_distributed_checkpoint_whole(place: Place) -> None:
    async def work(served: Served) -> None:
        first, second = await place.folder(served, "n1"), await place.folder(served, "n2")
        place.write("n1", "ckpt/a/.metadata", b"index")
        for name in ("n1", "n2"):
            place.write(name, f"ckpt/a/__{name[1]}_0.distcp", b"shard")
            place.write(name, f"ckpt/b/__{name[1]}_0.distcp", b"shard without an index")
        await place.store.sync(first, has_ended=True, has_succeeded=True)
        await place.store.fetch_shards(second)
        arrived = {path.name for path in (place.project / "ckpt/a").iterdir()}
        assert arrived == {".metadata", "__1_0.distcp", "__2_0.distcp"}
        assert not (place.project / "ckpt/b/__2_0.distcp").exists()
        third = OutputFolder("n3", served.node.channel, str(place.copy("n3")))
        place.copy("n3").mkdir()
        await place.store.open_folder(third)
        await place.store.send(third)
        assert {path.name for path in (place.copy("n3") / "ckpt/a").iterdir()} == arrived

    run(work)


def test_a_node_that_always_has_a_new_file_is_left_at_last(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/1.pt", zipped("one"))
        list_files, num_lists = place.store.list_files, 1

        async def list_more(folder: OutputFolder) -> list[WrittenFile]:
            nonlocal num_lists
            num_lists += 1
            place.write("n1", f"out/{num_lists}.pt", zipped("more"))
            return await list_files(folder)

        monkeypatch.setattr(place.store, "list_files", list_more)
        await place.store.sync(folder, has_ended=True)
        assert sorted(path.name for path in (place.project / "out").iterdir()) == ["1.pt", "2.pt"]

    run(work)


def test_a_file_that_did_not_reach_its_place_is_fetched_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef01234567"
    kept = snapshot.make_run_folder(key) / agent_outputs.UNCOLLECTED

    def killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    async def work(served: Served) -> None:
        served.agent.run_keys[key] = []
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt_1.pt", zipped("one"))
        files = await place.store.list_files(folder)
        group = [file for file in files if file.path == "out/ckpt_1.pt"]
        hashes = await place.store.receive(folder, group, 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(outputs, "move_file", killed)
            with pytest.raises(KeyboardInterrupt):
                place.store.place_unit("n1", group, hashes)
        assert not script_checkpoint(place.run)
        served.agent.job.ranks = [RankProcess(0, 0)]
        agent_outputs.keep_uncollected(served.agent)
        again = OutputFolder("n1", served.node.channel, str(kept))
        fetched = await place.fresh_store().fetch_uncollected(again)
        assert fetched == (["out/ckpt_1.pt"], True)
        assert (place.project / "out/ckpt_1.pt").read_bytes() == zipped("one")

    run(work)


def test_a_file_that_reached_its_place_before_a_kill_is_the_runs_own(place: Place) -> None:
    (place.project / "out").mkdir()
    (place.project / "out/ckpt_1.pt").write_bytes(b"new")
    for name in ("ckpt_1.pt", "ckpt_2.pt"):
        output = Output(f"out/{name}", 3, "0" * 64, "n1", "", 5_000_000, 1.0, 5_000_000)
        place.store.journal.add_pending([output])
    os.utime(place.project / "out/ckpt_1.pt", (5, 5))
    assert {*place.fresh_store().journal.outputs} == {"out/ckpt_1.pt"}


def test_a_later_run_replaces_what_an_earlier_one_wrote(place: Place) -> None:
    """Both lie in the folder of runs; the files are part of the code that the second one sends."""
    place.run = place.run.parent / "runs/first"
    place.run.mkdir(parents=True)
    place.store = place.fresh_store()

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt.pt", zipped("first"))
        place.write("n1", "out/mine.pt", zipped("first"))
        await place.store.sync(folder)
        (place.project / "out/mine.pt").write_bytes(b"changed here")
        place.run = place.run.parent / "second"
        place.run.mkdir()
        place.store = OutputStore(place.run, place.notes.append)
        sent = ["train.py", "out/ckpt.pt", "out/mine.pt"]
        place.store.set_code(place.project, [[path, "", 0, 4] for path in sent])
        assert not script_checkpoint(place.run)  # this run has none yet
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt.pt", zipped("second"), age_s=-60.0)
        place.write("n1", "out/mine.pt", zipped("second"), age_s=-60.0)
        await place.store.sync(folder, has_ended=True)
        assert (place.project / "out/ckpt.pt").read_bytes() == zipped("second")
        assert (place.project / "out/mine.pt").read_bytes() == b"changed here"
        assert script_checkpoint(place.run)

    run(work)


@pytest.mark.parametrize("is_rank_0_in_place", [False, True])
def test_a_checkpoint_of_another_run_that_hosts_do_not_get_is_named(
    place: Place, is_rank_0_in_place: bool
) -> None:
    place.run = place.run.parent / "runs/first"
    place.run.mkdir(parents=True)
    place.store = place.fresh_store()
    apart = SimpleNamespace(name="n2", copies={"code": ("/copy", "")})
    first = SimpleNamespace(name="n1", copies={}) if is_rank_0_in_place else apart
    fleet: Any = SimpleNamespace(first=first, everyone=[first, apart])

    def notes_of(name: str, *sent: str) -> list[str]:
        """Notes at the start of a run whose code includes the files ``sent``."""
        run = place.run.parent / name
        run.mkdir(exist_ok=True)
        notes: list[str] = []
        sync = OutputSync(run, notes.append)
        sync.store.set_code(place.project, [[path, "", 0, 4] for path in ("train.py", *sent)])
        asyncio.run(sync._note_unsent_checkpoint(fleet))
        return notes

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        place.write("n1", "out/ckpt.pt", zipped("first"))
        await place.store.sync(folder)

    assert not notes_of("second")
    run(work)
    (note,) = notes_of("second")
    assert "out/ckpt.pt of " in note
    assert ("warning: rank 0 finds out/ckpt.pt" in note) == is_rank_0_in_place
    assert ("n2 does not get it" in note) == is_rank_0_in_place
    assert note.endswith(f" --run-dir {short(place.run)}")
    assert not notes_of("first")  # it resumes
    assert not notes_of("third", "out/ckpt.pt")
    (place.project / "out/ckpt.pt").write_bytes(b"of the user")
    assert not notes_of("second")


def test_files_of_another_run_keep_their_times(place: Place) -> None:
    """A script may take the latest of its checkpoints, also in a new run directory."""
    paths = ("out/ckpt_10.pt", "out/ckpt_9.pt")

    async def write_first(served: Served) -> None:
        folder = await place.folder(served, "n1")
        for path, age_s in zip(paths, (60.0, 120.0), strict=True):
            place.write("n1", path, zipped(path), age_s)
        await place.store.sync(folder)

    run(write_first)
    second = place.run.parent / "second"
    second.mkdir()
    sync = OutputSync(second, place.notes.append)
    tree = read_tree(place.project)
    assert {str(entry[0]) for entry in tree.manifest} >= set(paths)
    code = sync.set_code(Supplies(code=tree)).code
    assert code is not None
    assert {str(entry[0]) for entry in code.manifest} == {"train.py", "table.csv"}

    async def send_second(served: Served) -> None:
        served.agent.folders.append(place.jobs)
        folder = OutputFolder("n2", served.node.channel, str(place.copy("n2")))
        await sync.store.open_folder(folder)
        await sync.store.send(folder)
        for path in paths:
            copied, original = ((root / path).stat() for root in (place.copy("n2"), place.project))
            assert copied.st_mtime == pytest.approx(original.st_mtime, abs=1e-3)
        await sync.store.sync(folder)
        assert not place.notes

    run(send_second)


def test_rank_0_on_this_machine_writes_in_place(place: Place) -> None:
    """What it wrote is recorded, and goes to the others; other files of the user do not."""
    (place.project / "private.json").write_text("{}")

    async def work(served: Served) -> None:
        local = OutputFolder("here", served.node.channel, str(place.project), is_local=True)
        await place.store.open_folder(local)
        await asyncio.sleep(0.02)
        (place.project / "out").mkdir()
        (place.project / "out/ckpt_1.pt").write_bytes(zipped("one"))
        (place.project / "out/last.pt").symlink_to("ckpt_1.pt")
        await place.store.sync(local)
        assert set(place.store.journal.outputs) == {"out/ckpt_1.pt", "out/last.pt"}
        second = await place.folder(served, "n2")
        await place.store.send(second)
        for name in ("ckpt_1.pt", "last.pt"):
            assert (place.copy("n2") / "out" / name).read_bytes() == zipped("one")
        assert not (place.copy("n2") / "private.json").exists()

    run(work)


@pytest.mark.parametrize("is_project_a_run", [False, True])
def test_nothing_arrives_among_the_files_of_a_run(place: Place, is_project_a_run: bool) -> None:
    """Another run would resume from a checkpoint that a node has planted there."""
    prefix = "" if is_project_a_run else "runs/old/"
    (place.project / prefix).mkdir(parents=True, exist_ok=True)
    (place.project / f"{prefix}.paceline-brought").write_text("{}\n")

    async def work(served: Served) -> None:
        folder = await place.folder(served, "n1")
        names = [f"{prefix}checkpoints/9/weights.pt", f"{prefix}model/w.pt", f"{prefix}batch.json"]
        for name in names:
            place.write("n1", name, zipped("planted"))
        place.write("n1", "out/w.pt", zipped("result"))
        await place.store.sync(folder)
        assert not [name for name in names if (place.project / name).exists()]
        assert (place.run / f"files/n1/{names[0]}").exists()
        assert (place.project / "out/w.pt").exists()

    run(work)


def test_a_journal_of_somebody_else_sends_no_files(place: Place) -> None:
    """Its lines could name any file of the project, and others by a link in the run directory."""
    (place.project / "secret.json").write_text("mine")
    (place.run.parent / "keys").mkdir()
    (place.run.parent / "keys/id.txt").write_text("mine")
    (place.run / "notes").symlink_to(place.run.parent / "keys")
    common = {"size": 4, "sha256": "0" * 64, "host": "n1", "mtime_us": 1, "time": 1.0,
              "local_mtime_us": 1}  # fmt: skip
    lines = [{"path": "secret.json", "place": "", **common},
             {"path": "id.txt", "place": "notes/id.txt", **common}]  # fmt: skip
    other = place.run.parent / "other"
    other.mkdir()
    sealed = LineSeals(other).sealed(lines[0])  # of another run directory of this user
    journal = "".join(json.dumps(line) + "\n" for line in [*lines, sealed])
    (place.run / "outputs.jsonl").write_text(journal)
    place.store = place.fresh_store()
    assert "3 lines" in place.notes[-1]

    async def work(served: Served) -> None:
        await place.store.send(await place.folder(served, "n2"))
        assert sorted(p.name for p in place.copy("n2").iterdir()) == ["table.csv", "train.py"]

    run(work)
    assert set(OutputJournal(place.run).outputs) == {"secret.json", "id.txt"}  # for display


def hostile_zip(num_entries: int) -> bytes:
    """A file of torch.save with an index of so many entries and without content."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, *[0] * 7, 1, *[0] * 6) + b"a"
    index = entry * num_entries
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(index), 30, 0)
    return b"PK\3\4" + bytes(26) + index + end


def encrypted_zip() -> bytes:
    data = bytearray(zipped("one"))
    data[6] |= 1
    data[data.rfind(b"PK\1\2") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize("data", [hostile_zip(100_000), encrypted_zip()], ids=["huge", "encrypted"])
def test_a_hostile_file_of_torch_is_not_intact(place: Place, data: bytes) -> None:
    (place.run / outputs.UNPLACED).mkdir(parents=True)
    (place.run / outputs.UNPLACED / "x.pt").write_bytes(data)
    tracemalloc.start()
    try:
        assert not torch_files.is_intact(place.run / outputs.UNPLACED / "x.pt")
        assert not torch_files.has_state(place.run / outputs.UNPLACED / "x.pt")
        assert tracemalloc.get_traced_memory()[1] < 2 * torch_files.MAX_ZIP_INDEX_BYTES
    finally:
        tracemalloc.stop()
