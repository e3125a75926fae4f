"""Tests that a run replaces files of earlier runs in the project, and no others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from test_outputs import Workspace, torch_zip

from paceline.remote import this_machine
from paceline.remote.channel import Channel
from paceline.rundir.arrivals import Arrivals
from paceline.spec.detached import DETACHED
from paceline.transfer import output_folders, tree
from paceline.transfer.detached_outputs import DetachedOutputs
from paceline.transfer.output_folders import OutputFolder
from paceline.transfer.outputs import OutputStore
from real_agents import Served, agent_in_thread


class Runs(Workspace):
    """Runs in a project, whose hosts get only the code: git ignores what the script writes."""

    def __init__(self, base: Path, served: Served) -> None:
        self._served = served
        super().__init__(base)
        self.run = self.project / "runs/first"
        self.run.mkdir(parents=True)
        self.store = self.fresh_store()

    def begin(self, name: str) -> None:
        """Begins a run of another run directory; the copies of the code are new."""
        self.run = self.run.parent / name
        self.run.mkdir(parents=True)
        self.store = self.fresh_store()
        for copy in (self.copy("n1"), self.copy("n2")):
            shutil.rmtree(copy / "out", ignore_errors=True)

    async def write_and_fetch(self, files: dict[str, str], *, age_s: float = 60.0) -> None:
        """Writes files on the first host, and fetches them when its ranks have ended."""
        folder = await self.folder(self._served, "n1")
        for path, text in files.items():
            data = torch_zip(text) if path.endswith(".pt") else text.encode()
            self.write("n1", path, data, age_s)
        await self.store.sync(folder, has_ended=True, has_succeeded=True)

    def read(self, path: str) -> str:
        """The text in a file of the project that :meth:`write_and_fetch` has written."""
        data = (self.project / path).read_bytes()
        return next((text for text in ("first", "second") if torch_zip(text) == data),
                    data.decode(errors="replace"))  # fmt: skip

    def pretend_to_run(self) -> None:
        """Lets the present run seem to be running when others begin."""
        pid = os.getpid()
        owner = {"host": os.uname().nodename, "pid": pid, "start": this_machine.start_time(pid)}
        (self.run / "owner.json").write_text(json.dumps(owner))


@pytest.fixture
def in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
            ) -> Callable[[Callable[[Runs], Coroutine[Any, Any, None]]], None]:  # fmt: skip
    """Awaits a test that gets a project with a first run, which has not written anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(output_folders, "CHECKPOINT_PAUSE_S", 0.0)
    monkeypatch.setattr(output_folders, "PAUSE_S", 0.0)

    def run(work: Callable[[Runs], Coroutine[Any, Any, None]]) -> None:
        async def serve() -> None:
            async with agent_in_thread() as served:
                await work(Runs(tmp_path, served))

        asyncio.run(serve())

    return run


Run = Callable[[Callable[[Runs], Coroutine[Any, Any, None]]], None]


def test_replaces_ignored_files_of_earlier_runs(in_runs: Run) -> None:
    """Of one that failed, too. A file that the user has changed since stays."""

    async def work(runs: Runs) -> None:
        written = {"out/config.json": '"first"', "out/best.pt": "first", "out/mine.csv": "first"}
        await runs.write_and_fetch(written)
        (runs.project / "out/mine.csv").write_text("mine")
        runs.begin("second")
        await runs.write_and_fetch({path: text.replace("first", "second")
                                    for path, text in written.items()}, age_s=30.0)  # fmt: skip
        assert runs.read("out/config.json") == '"second"'
        assert runs.read("out/best.pt") == "second"
        assert runs.read("out/mine.csv") == "mine"
        assert {*runs.store.kept_out} == {"out/mine.csv"}

    in_runs(work)


def test_code_that_is_too_large_names_results_of_earlier_runs(
    in_runs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as code unless git ignores them. What the user has changed since is not named."""
    monkeypatch.setattr(tree, "MAX_FILES", 2)

    async def work(runs: Runs) -> None:
        monkeypatch.chdir(runs.project)
        (runs.project / ".gitignore").unlink(missing_ok=True)
        paths = [f"results/{number}.bin" for number in range(3)]
        await runs.write_and_fetch(dict.fromkeys(paths, "first"))
        with pytest.raises(tree.CodeTooLarge) as caught:
            tree.read_tree(runs.project)
        assert f"results: 3 files, 0 MiB, results of the run {runs.run}" in caught.value.found
        for path in paths[:2]:
            (runs.project / path).write_text("changed by the user")
        with pytest.raises(tree.CodeTooLarge) as caught:
            tree.read_tree(runs.project)
        assert "of the run" not in caught.value.found

    in_runs(work)


def test_replaced_files_return_to_their_run(in_runs: Run) -> None:
    """Their run resumes from its own checkpoint, and may then replace that of the later run."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/last.pt": "first", "out/log.csv": "first"})
        first = runs.run
        runs.begin("second")
        await runs.write_and_fetch({"out/last.pt": "second", "out/log.csv": "second"}, age_s=30.0)
        kept = first / "files/n1/out"
        assert (kept / "last.pt").read_bytes() == torch_zip("first")
        assert (kept / "log.csv").read_text() == "first"
        runs.store.note_kept_out()
        assert "2 files of earlier runs gave way" in runs.notes[-1]
        second, runs.run = runs.run, first
        runs.store = runs.fresh_store()
        _, files = runs.store.sendable("")
        assert {path: file for path, (file, _) in files.items()} == {
            "out/last.pt": kept / "last.pt", "out/log.csv": kept / "log.csv"
        }  # fmt: skip
        runs.store.restore()
        assert runs.read("out/last.pt") == runs.read("out/log.csv") == "first"
        assert (second / "files/n1/out/last.pt").read_bytes() == torch_zip("second")
        assert not (kept / "last.pt").exists()
        await runs.write_and_fetch({"out/last.pt": "third"}, age_s=10.0)
        assert (runs.project / "out/last.pt").read_bytes() == torch_zip("third")

    in_runs(work)


def test_resumed_run_does_not_get_files_of_later_run(in_runs: Run) -> None:
    """Also if the directory of the later run was removed, or it still runs."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/last.pt": "first", "out/log.csv": "first"})
        first, store = runs.run, runs.store
        kept = first / "files/n1/out/last.pt"
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"of another rank")
        (first / ".paceline-brought").write_text(
            '{"own": true, "start": "1"}\n"files/n1/out/last.pt"\n'
        )
        runs.begin("second")
        await runs.write_and_fetch({"out/last.pt": "second"}, age_s=30.0)
        assert kept.read_bytes() == torch_zip("first")
        (before,) = first.glob("files-before-*/files/n1/out/last.pt")
        assert before.read_bytes() == b"of another rank"
        runs.run = first
        for is_removed in (False, True):
            if is_removed:
                shutil.rmtree(first.parent / "second")
            store = runs.fresh_store()
            assert store.sendable("")[1]["out/last.pt"][0] == kept

    in_runs(work)


def test_checkpoint_of_other_run_is_noted_at_resume(in_runs: Run) -> None:
    """Git does not ignore it, so hosts get it as code."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/a.pt": "first"})
        runs.begin("second")
        runs.store.set_code(runs.project, [["train.py", "", 0, 4], ["out/a.pt", "", 0, 4]])
        assert runs.store.foreign_checkpoints() == []  # it may be what the new run begins with
        await runs.write_and_fetch({"out/b.pt": "second"})
        assert runs.store.foreign_checkpoints() == ["out/a.pt"]

    in_runs(work)


def test_keeps_files_of_run_that_was_resumed_meanwhile(in_runs: Run) -> None:
    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/last.pt": "first"})
        first = runs.run
        runs.begin("second")
        second, runs.run = runs.run, first
        runs.pretend_to_run()
        runs.run = second
        await runs.write_and_fetch({"out/last.pt": "second"}, age_s=30.0)
        assert runs.read("out/last.pt") == "first"

    in_runs(work)


def test_file_on_its_way_to_its_run_is_found(in_runs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the later run is killed after it has moved the file."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/last.pt": "first"})
        first = runs.run
        runs.begin("second")
        monkeypatch.setattr(Arrivals, "record", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            await runs.write_and_fetch({"out/last.pt": "second"}, age_s=30.0)
        runs.run = first
        _, files = runs.fresh_store().sendable("")
        assert files["out/last.pt"][0] == first / "files/n1/out/last.pt"

    in_runs(work)


@pytest.mark.parametrize("is_changed_later", [False, True])
def test_checkpoint_that_user_put_back_is_sent(in_runs: Run, is_changed_later: bool) -> None:
    async def work(runs: Runs) -> None:
        last = runs.project / "out/last.pt"
        await runs.write_and_fetch({"out/last.pt": "first", "out/log.csv": ""})
        last.write_bytes(b"of the user")
        os.utime(last, (time.time() - 45.0,) * 2)
        await runs.write_and_fetch({"out/last.pt": "second"}, age_s=30.0)
        assert last.read_bytes() == b"of the user"
        if is_changed_later:
            last.write_bytes(b"of the user")
        runs.store = runs.fresh_store()
        _, files = runs.store.sendable("")
        expected = last if is_changed_later else runs.run / "files/n1/out/last.pt"
        assert files["out/last.pt"][0] == expected

    in_runs(work)


def test_skips_folders_of_others_and_looping_links(
    in_runs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def refuse(path: Path, **options: Any) -> bool:
        if path.parent.name == "colleague":
            raise PermissionError(13, "Permission denied")
        return exists(path, **options)

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first"})
        (runs.project / "runs/colleague").mkdir()
        (runs.project / "runs/loop").symlink_to("loop")
        monkeypatch.setattr(Path, "exists", refuse)
        runs.begin("second")
        await runs.write_and_fetch({"out/best.pt": "second"}, age_s=30.0)
        assert runs.read("out/best.pt") == "second"

    in_runs(work)


def test_file_found_in_project_counts_only_in_folder_that_run_made(in_runs: Run) -> None:
    """The user may have written it while a run had its first rank here."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first"})
        journal, version = runs.store.journal, 5_000_000
        for path in ("labels.csv", "out/log.csv"):
            (runs.project / path).write_text("mine")
            os.utime(runs.project / path, ns=(version * 1000, version * 1000))
            journal.add([replace(journal.outputs["out/best.pt"], path=path, size=4, is_local=True,
                                 local_mtime_us=version)])  # fmt: skip
        runs.begin("second")
        await runs.write_and_fetch({"labels.csv": "second", "out/log.csv": "second"}, age_s=30.0)
        assert {*runs.store.kept_out} == {"labels.csv"}

    in_runs(work)


def test_finds_earlier_runs_in_other_folders(in_runs: Run) -> None:
    """Beside a run directory outside of the project, and in a folder of runs."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first"})
        runs.begin("sweep/second")
        await runs.write_and_fetch({"out/best.pt": "second", "out/new.pt": "first"}, age_s=50.0)
        assert runs.read("out/best.pt") == "second"
        runs.begin("../../../elsewhere/third")
        await runs.write_and_fetch({"out/best.pt": "first", "out/new.pt": "second"}, age_s=40.0)
        assert (runs.read("out/best.pt"), runs.read("out/new.pt")) == ("first", "second")

    in_runs(work)


def test_keeps_files_of_run_that_still_runs(in_runs: Run) -> None:
    """Also if hosts got the file as part of the code, and if the run has ended meanwhile."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first", "out/sent.pt": "first"})
        runs.pretend_to_run()
        first = runs.run
        runs.begin("second")
        sent = "train.py", "table.csv", "out/sent.pt"
        runs.store.set_code(runs.project, [[path, "", 0, 4] for path in sent])
        (first / "owner.json").unlink()
        await runs.write_and_fetch({"out/best.pt": "second", "out/sent.pt": "second"}, age_s=0.0)
        assert runs.read("out/best.pt") == runs.read("out/sent.pt") == "first"
        assert {*runs.store.kept_out} == {"out/best.pt", "out/sent.pt"}
        runs.begin("third")
        await runs.write_and_fetch({"out/best.pt": "second"}, age_s=0.0)
        assert runs.read("out/best.pt") == "second"

    in_runs(work)


def test_keeps_files_of_run_that_started_later(in_runs: Run) -> None:
    """The files of a detached run may arrive when the later run has ended."""

    async def work(runs: Runs) -> None:
        since = time.time()
        first, first_store = runs.run, runs.store
        runs.begin("second")
        await runs.write_and_fetch({"out/best.pt": "second"})
        second_store, runs.store = runs.store, first_store
        await runs.write_and_fetch({"out/best.pt": "first"}, age_s=0.0)
        assert runs.read("out/best.pt") == "second"
        location = {"run_id": "abcdef", "host": "n1", "folder": "/f", "since": since}
        (first / DETACHED).write_text(json.dumps(location))
        detached = DetachedOutputs(cast(Channel, None), "abcdef", first, runs.project)
        detached._set_project(store := OutputStore(first, runs.notes.append))
        assert not store._state("out/best.pt").is_own_output
        assert second_store._state("out/best.pt").is_own_output

    in_runs(work)


@pytest.mark.parametrize("is_newer", [False, True])
def test_uncollected_file_replaces_only_older_files(in_runs: Run, is_newer: bool) -> None:
    """Another run may have written the file after the run that left its own on the host."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first"})
        runs.begin("second")
        runs.write("n1", "out/best.pt", torch_zip("second"), age_s=-60.0 if is_newer else 30.0)
        folder = OutputFolder("n1", runs._served.node.channel, str(runs.copy("n1")))
        await runs.store.fetch_uncollected(folder)
        assert runs.read("out/best.pt") == ("second" if is_newer else "first")

    in_runs(work)


@pytest.mark.parametrize("case", ["copied", "forged"])
def test_keeps_files_of_lines_without_valid_seal(in_runs: Run, case: str) -> None:
    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/best.pt": "first"})
        first, journal = runs.run, runs.run / "outputs.jsonl"
        if case == "copied":
            first.rename(first.with_name("moved"))
        else:
            (runs.project / "out/best.pt").write_text("mine")
            status = (runs.project / "out/best.pt").stat()
            line = json.loads(journal.read_text().splitlines()[-1])
            line |= {"size": status.st_size, "local_mtime_us": status.st_mtime_ns // 1000}
            journal.write_text(json.dumps(line) + "\n")
        before = runs.read("out/best.pt")
        runs.begin("second")
        await runs.write_and_fetch({"out/best.pt": "second"}, age_s=0.0)
        assert runs.read("out/best.pt") == before

    in_runs(work)


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_folder_of_earlier_run_takes_same_files(in_runs: Run, is_made_anew: bool) -> None:
    """Such as a file without a suffix; not if the user has made the folder anew."""

    async def work(runs: Runs) -> None:
        await runs.write_and_fetch({"out/latest": "first", "out/best.pt": "first"})
        if is_made_anew:
            shutil.rmtree(runs.project / "out")
            (runs.project / "out").mkdir()
            (runs.project / "out/mine.txt").write_text("mine")
        for name in ("second", "third"):
            runs.begin(name)
            await runs.write_and_fetch({"out/latest": name, f"out/{name}.yaml": "a: 1"}, age_s=9.0)
            assert (runs.project / f"out/{name}.yaml").exists() != is_made_anew
            assert is_made_anew or runs.read("out/latest") == name

    in_runs(work)


def test_removes_ignored_shards_of_earlier_run(in_runs: Run) -> None:
    """Torch would load them together with the new ones. Those that the user changed stay."""

    async def work(runs: Runs) -> None:
        names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(3))]
        await runs.write_and_fetch({f"out/ckpt/{name}": "first" for name in names})
        (runs.project / "out/ckpt/__2_0.distcp").write_text("mine")
        runs.begin("second")
        await runs.write_and_fetch({f"out/ckpt/{name}": "second" for name in names[:2]}, age_s=9.0)
        found = {path.name: path.read_text() for path in (runs.project / "out/ckpt").iterdir()}
        assert found == {".metadata": "second", names[1]: "second", names[3]: "mine"}

    in_runs(work)
