"""Tests that hosts get all ranks' parts of one save of a checkpoint, or that a line tells of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest
import test_outputs
from test_outputs import Workspace, run, torch_zip

from paceline.agent.files import outputs as agent_outputs
from paceline.agent.files import snapshot
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.results.outputs import OutputSync
from paceline.rundir.output_rules import lacking_parts
from paceline.rundir.outputs import script_checkpoint
from paceline.transfer.output_folders import OutputFolder
from real_agents import Served

KEY = "0123456789abcdef01234567"
workspace = test_outputs.workspace


class RankFiles:
    """A script whose ranks, one on each of two hosts, save to a file of their own."""

    def __init__(self, workspace: Workspace, served: Served) -> None:
        self._workspace, self._served = workspace, served
        self.folders: list[OutputFolder] = []

    async def start(self) -> None:
        self._workspace.store = self._workspace.fresh_store()
        for name in ("n1", "n2"):
            shutil.rmtree(self._workspace.copy(name) / "out", ignore_errors=True)
        self.folders = [await self._workspace.folder(self._served, name) for name in ("n1", "n2")]
        for folder in self.folders:
            await self._workspace.store.send(folder)

    def save(self, step: int) -> None:
        for rank, name in enumerate(("n1", "n2")):
            data = torch_zip(f"step {step} of rank {rank}")
            self._workspace.write(name, f"out/rank{rank}.pt", data, age_s=100.0 - step)

    async def end(self, *, is_second_lost: bool = False) -> None:
        first, second = self.folders
        await self._workspace.store.sync(first, has_ended=True)
        await self._workspace.store.note_unfetched([first])
        if not is_second_lost:
            await self._workspace.store.fetch_parts(second)

    async def run(self, step: int) -> None:
        """Runs a start with one save."""
        await self.start()
        self.save(step)
        await self.end()

    def steps(self, name: str) -> list[str]:
        """The saves that a host has, in the order of ranks."""
        files = sorted((self._workspace.copy(name) / "out").glob("rank*"))
        return [next(str(step) for step in (1, 2, 3) for rank in (0, 1)
                     if file.read_bytes() == torch_zip(f"step {step} of rank {rank}"))
                for file in files]  # fmt: skip


def test_files_of_all_ranks_are_sent_at_next_start(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        script = RankFiles(workspace, served)
        for step in (1, 2, 3):
            await script.run(step)
            await script.start()
            assert script.steps("n1") == script.steps("n2") == [str(step)] * 2
        assert script_checkpoint(workspace.run) == "out/rank0.pt"
        assert workspace.store.outdated_parts() == []
        assert workspace.store.unsent_of_other_ranks() == []
        other = workspace.run / "files/n2/out/mine_of_n2.pt"
        other.parent.mkdir(parents=True)
        other.write_bytes(b"")
        assert workspace.store.unsent_of_other_ranks() == ["files/n2/out/mine_of_n2.pt"]

    run(work)


def test_older_file_of_lost_rank_is_not_sent(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        script = RankFiles(workspace, served)
        await script.run(1)
        await script.start()
        script.save(2)
        await script.end(is_second_lost=True)
        await script.start()
        assert script.steps("n1") == script.steps("n2") == ["2"]
        assert workspace.store.outdated_parts() == ["out/rank1.pt"]

    run(work)


def test_later_file_than_that_of_rank_0_is_set_aside(workspace: Workspace) -> None:
    """Rank 0's save was cut off, or its host was lost: the one before is complete."""

    async def work(served: Served) -> None:
        script = RankFiles(workspace, served)
        await script.run(1)
        await script.start()
        script.save(2)
        workspace.write("n1", "out/rank0.pt", torch_zip("step 2")[:-1], age_s=1)
        await script.end()
        for folder in script.folders:
            await workspace.store.send(folder)
        assert script.steps("n1") == script.steps("n2") == ["1", "1"]

    run(work)


def test_file_of_rank_without_counterpart_is_noted(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        script = RankFiles(workspace, served)
        await script.start()
        script.save(1)
        await workspace.store.sync(script.folders[0])
        workspace.store.unfetched = None  # the host of rank 0 is lost
        await workspace.store.fetch_parts(script.folders[1])
        await workspace.store.send(script.folders[1])
        assert workspace.store.missing_parts(2) == ["out/rank1.pt"]

    run(work)


@pytest.mark.parametrize("is_lost", [False, True])
def test_shard_of_save_without_index_is_not_fetched(workspace: Workspace, is_lost: bool) -> None:
    async def work(served: Served) -> None:
        first, second = [await workspace.folder(served, name) for name in ("n1", "n2")]
        workspace.write("n1", "ckpt/.metadata", b"__0_0.distcp __1_0.distcp", age_s=60)
        workspace.write("n1", "ckpt/__0_0.distcp", b"0", age_s=61)
        await workspace.store.sync(first, has_ended=True)
        workspace.write("n1", "ckpt/__0_0.distcp", b"0 of a later save", age_s=20)
        workspace.write("n2", "ckpt/__1_0.distcp", b"1 of a later save", age_s=20)
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.note_unfetched([first])
        if is_lost:
            workspace.store.unfetched = None
        assert await workspace.store.fetch_parts(second) == []
        assert workspace.store.incomplete() == {"ckpt"}

    run(work)


@pytest.mark.parametrize("is_powered_off", [False, True])
def test_shards_of_lost_host_are_fetched_at_next_start(
    workspace: Workspace, is_powered_off: bool
) -> None:
    async def work(served: Served) -> None:
        node, store = served.node, workspace.store
        first, second = [await workspace.folder(served, name) for name in ("n1", "n2")]
        node.run_folder, node.shared_run_dir = str(snapshot.make_run_folder(KEY)), False
        served.agent.run_keys[KEY] = []
        served.agent.job.ranks = [RankProcess(1, 0)]
        workspace.write("n1", "out/rank0.pt", torch_zip("0"))
        workspace.write("n1", "ckpt/.metadata", b"__0_0.distcp __1_0.distcp", age_s=30)
        workspace.write("n1", "ckpt/__0_0.distcp", b"0")
        workspace.write("n2", "out/rank1.pt", torch_zip("1"))
        workspace.write("n2", "out/other.pt", torch_zip("other"))
        workspace.write("n2", "ckpt/__1_0.distcp", b"1", age_s=31)
        await store.sync(first, has_ended=True, has_succeeded=True)
        assert script_checkpoint(workspace.run) == "out/rank0.pt"  # for the other lacks a shard
        assert store.incomplete() == {"ckpt"}
        assert store.missing_parts(2) == ["ckpt"]
        await store.list_files(second)
        if is_powered_off:
            while not (Path(node.run_folder) / snapshot.SHARD_SOURCES_FILE).exists():
                await asyncio.sleep(0.01)
            agent_outputs.keep_abandoned(Path(node.run_folder))
        else:
            agent_outputs.keep_uncollected(served.agent)
        sync = OutputSync(workspace.run, workspace.notes.append)
        sync.store.set_code(workspace.project, [["train.py", "", 0, 4]])
        await sync._fetch_uncollected_shards(node)
        assert not (workspace.project / "out/rank1.pt").exists()  # perhaps of another save
        assert (workspace.project / "ckpt/__1_0.distcp").read_bytes() == b"1"
        assert not (workspace.project / "out/other.pt").exists()
        assert script_checkpoint(workspace.run) == "ckpt"
        assert not (Path(node.run_folder) / snapshot.UNCOLLECTED_SHARDS).exists()

    run(work)


def test_incomplete_checkpoint_is_hidden_on_all_hosts(workspace: Workspace) -> None:
    """Torch would fail to load it, though an older one is complete."""

    async def work(served: Served) -> None:
        first, second = [await workspace.folder(served, name) for name in ("n1", "n2")]
        for step, shards in ((1, b"__0_0.distcp"), (2, b"__0_0.distcp __1_0.distcp")):
            workspace.write("n1", f"ckpt/step-{step}/.metadata", shards)
            workspace.write("n1", f"ckpt/step-{step}/__0_0.distcp", b"0")
        await workspace.store.sync(first, has_ended=True)
        await workspace.store.send(first, is_source=True)
        await workspace.store.send(second)
        for name in ("n1", "n2"):
            kept = {path.name for path in (workspace.copy(name) / "ckpt").iterdir()}
            assert kept - {".step-2.superseded"} == {"step-1"}
        assert script_checkpoint(workspace.run) == "ckpt/step-1"

    run(work)


def test_older_file_of_lost_rank_stays_out(workspace: Workspace) -> None:
    """Also on rank 0's own host, which keeps what it had been sent, and in the project."""

    async def work(served: Served) -> None:
        script, node = RankFiles(workspace, served), served.node
        await script.run(1)
        await script.start()
        workspace.write("n1", "out/rank0.pt", torch_zip("step 2 of rank 0"), age_s=20)
        await workspace.store.sync(script.folders[0])
        node.run_folder, node.shared_run_dir = str(snapshot.make_run_folder(KEY)), False
        served.agent.run_keys[KEY] = []
        served.agent.job.ranks = [RankProcess(0, 0)]
        served.agent.output_roots.pop(str(workspace.copy("n2")))
        agent_outputs.keep_uncollected(served.agent)
        sync = OutputSync(workspace.run, workspace.notes.append)
        sync.store.set_code(workspace.project, [["train.py", "", 0, 4]])
        await sync._fetch_uncollected(node)
        await sync._note_missing_parts(2)
        assert "out/rank1.pt" in workspace.notes[-1]
        assert "out/rank1.pt" in sync.store.paths()  # so it is not sent as code
        assert {*sync.store.sendable("")[1]} == {"out/rank0.pt"}
        assert sync.store.missing_parts(1) == []
        local = OutputFolder("n1", node.channel, str(workspace.project), is_local=True)
        await sync.store.open_folder(local)
        await sync.store.sync(local, has_ended=True)
        assert {*sync.store.sendable("")[1]} == {"out/rank0.pt"}

    run(work)


def test_ranks_of_one_host_have_files_of_one_save(workspace: Workspace) -> None:
    """Those of other ranks than 0 arrive when the ranks have ended."""

    async def work(served: Served) -> None:
        store, folder = workspace.store, await workspace.folder(served, "n1")
        for rank, age_s in ((0, 60.0), (1, 59.0)):
            workspace.write("n1", f"out/rank{rank}.pt", torch_zip("1"), age_s)
        await store.sync(folder)
        assert {*store.journal.outputs} == {"out/rank0.pt"}
        await store.sync(folder, has_ended=True)
        assert {*store.journal.outputs} == {"out/rank0.pt", "out/rank1.pt"}
        workspace.write("n1", "out/rank1.pt", torch_zip("2"), age_s=19)
        await store.sync(folder)
        assert store.journal.outputs["out/rank1.pt"].sha256 == hash_of(torch_zip("1"))
        workspace.write("n1", "out/rank0.pt", torch_zip("2"), age_s=20)
        await store.sync(folder)
        assert {*store.journal.outputs} == {"out/rank0.pt"}
        await store.sync(folder, has_ended=True)
        assert store.missing_parts(2) == []

    run(work)


def test_logs_of_ranks_belong_to_no_save(workspace: Workspace) -> None:
    async def work(served: Served) -> None:
        store, folder = workspace.store, await workspace.folder(served, "n1")
        names = [f"{parent}log_rank{rank}.txt" for parent in ("", "epochs10/") for rank in (0, 1)]
        for name in names:
            workspace.write("n1", name, b"1\n")
        await store.sync(folder, has_ended=True, has_succeeded=True)
        for name in names[::2]:
            workspace.write("n1", name, b"1\n2\n", age_s=20)
        await store.sync(folder, has_ended=True, has_succeeded=True)
        assert {*store.journal.outputs} == {*names}

    run(work)


def test_part_long_after_file_of_rank_0_is_not_fetched(workspace: Workspace) -> None:
    """Rank 0 had not begun the save when the job ended."""

    async def work(served: Served) -> None:
        store = workspace.store
        first, second = [await workspace.folder(served, name) for name in ("n1", "n2")]
        for age_s in (90.0, 60.0):
            workspace.write("n1", "out/rank0.pt", torch_zip(f"{age_s}"), age_s)
            await store.sync(first)
        workspace.write("n2", "out/rank1.pt", torch_zip("1"), age_s=30)
        await store.note_unfetched([first])
        assert await store.fetch_parts(second) == []
        assert store.missing_parts(2) == ["out/rank1.pt"]
        workspace.write("n2", "out/rank1.pt", torch_zip("1"), age_s=89)
        assert await store.fetch_parts(second) == []
        workspace.write("n2", "out/rank1.pt", torch_zip("1"), age_s=58)
        assert await store.fetch_parts(second) == ["out/rank1.pt"]
        workspace.write("n2", "out/rank1.pt", torch_zip("1"), age_s=1)
        await store.note_unfetched([first], has_succeeded=True)
        assert await store.fetch_parts(second) == ["out/rank1.pt"]

    run(work)


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("names", "num_ranks", "lacking"),
    [
        (["s_rank0_step1", "s_rank1_step1", "s_rank0_step2"], 2, ["s_rank0_step2"]),
        (["s_rank0_step1", "s_rank1_step1", "s_rank0_step2"], 1, []),
        (["s_rank0_step1", "s_rank1_step1", "s_rank0_step2", "s_rank1_step2"], 2, []),
        (["c-1/rank_0.pt", "c-1/rank_3.pt", "c-2/rank_0.pt"], 4, ["c-2/rank_0.pt"]),
        (["c-1/rng_state_0.pth", "c-1/rng_state_3.pth", "c-2/rng_state_0.pth"], 4, []),
        (["rank0.pt", "step1.pt", "step2.pt"], 2, []),
    ],
)  # fmt: skip
def test_newest_file_lacks_parts_of_earlier_ones(
    names: list[str], num_ranks: int, lacking: list[str]
) -> None:
    times = {name: number for number, name in enumerate(names)}
    assert lacking_parts(times, num_ranks) == lacking


@pytest.mark.parametrize(
    ("index", "others", "sent"),
    [
        ("", ["out/step_1.pt", "log.csv"], ["log.csv", "out/step_1.pt"]),
        ("epochs10/step-2/", ["epochs10/step-1/a.pt"], ["epochs10/step-1/a.pt"]),
        ("c/step-2/model/", ["c/step-2/optimizer.pt", "c/last.pt"], ["c/last.pt"]),
    ],
)
def test_only_incomplete_checkpoint_is_withheld(
    workspace: Workspace, index: str, others: list[str], sent: list[str]
) -> None:
    async def work(served: Served) -> None:
        first = await workspace.folder(served, "n1")
        workspace.write("n1", f"{index}.metadata", b"__0_0.distcp __1_0.distcp")
        workspace.write("n1", f"{index}__0_0.distcp", b"0")
        for path in others:
            workspace.write("n1", path, torch_zip("0") if path.endswith("pt") else b"0")
        await workspace.store.sync(first, has_ended=True)
        assert sorted(workspace.store.sendable("")[1]) == sent
        await workspace.store.send(first, is_source=True)
        visible = {str(path.relative_to(workspace.copy("n1"))) for path in
                   workspace.copy("n1").rglob("*") if path.is_file()}  # fmt: skip
        kept = {
            path for path in visible if not any(part.startswith(".") for part in path.split("/"))
        }
        assert kept - {"train.py", "table.csv"} == {*sent}

    run(work)


@pytest.mark.parametrize(("age_s", "is_fetched"), [(61.0, True), (3600.0, False), (10.0, False)])
def test_shard_of_other_save_is_not_fetched(
    workspace: Workspace, age_s: float, is_fetched: bool
) -> None:
    async def work(served: Served) -> None:
        node, first = served.node, await workspace.folder(served, "n1")
        workspace.write("n1", "ckpt/.metadata", b"__0_0.distcp __1_0.distcp")
        workspace.write("n1", "ckpt/__0_0.distcp", b"0", age_s=62.0)
        await workspace.store.sync(first, has_ended=True)
        node.run_folder, node.shared_run_dir = str(snapshot.make_run_folder(KEY)), False
        served.agent.run_keys[KEY] = []
        shard = Path(node.run_folder) / snapshot.UNCOLLECTED_SHARDS / "ckpt/__1_0.distcp"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"1")
        os.utime(shard, (time.time() - age_s,) * 2)
        sync = OutputSync(workspace.run, workspace.notes.append)
        sync.store.set_code(workspace.project, [["train.py", "", 0, 4]])
        await sync._fetch_uncollected_shards(node)
        assert (sync.store.incomplete() == set()) == is_fetched
        assert shard.exists() != is_fetched

    run(work)
