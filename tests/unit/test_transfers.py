"""Tests that no incomplete file has its final name, on either side of a transfer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from paceline.agent import server
from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.snapshot import UNCOLLECTED
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.nodes import provisioner, survey
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import send_folder, workdir_in
from paceline.launch.results import collector as collector_module
from paceline.launch.results.collector import ResultCollector
from paceline.launch.results.outputs import OutputSync
from paceline.remote import channel as channel_module
from paceline.remote.channel import AgentRefusal, Channel, HostSilent
from paceline.rundir import signatures, signed_model
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.directory import RunDirectory
from paceline.spec.errors import NodeError, PacelineError
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.hosts import Host
from paceline.spec.plan import Copy
from paceline.spec.rundir import frozen_file, parse_version
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest
from paceline.transfer import checkpoints, files, results
from paceline.transfer.checkpoints import CheckpointFetcher, send_checkpoints
from paceline.transfer.results import Fetcher, copy_command, write_error
from paceline.transfer.tree import Tree, cache_files, read_parts
from real_agents import ENDLESS, Served, agent_in_thread

BLOCK = 512
CUTS = 200
KEY = "0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets up a private cache for the agent, with small blocks so that little data makes many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(files, "MAX_SMALL_BYTES", BLOCK // 2)
    return tmp_path / "cache" / "paceline"


def content(seed: str, size: int) -> bytes:
    return random.Random(f"{seed} {size}").randbytes(size)


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read_final_files(root: Path) -> dict[str, bytes]:
    """Returns the complete files below ``root``, not those that are arriving or being removed."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            found[name] = path.read_bytes()
    return found


FILES = {"a.py": content("a", 100), "empty": b"", "b/even": content("b", 4 * BLOCK),
         "b/odd": content("c", 3 * BLOCK + 7)}  # fmt: skip


def steps(*names: int, frozen: dict[str, bytes] | None = None) -> dict[str, bytes]:
    found = {}
    for step in names:
        sizes = {"weights.safetensors": 3 * BLOCK, "state.json": 40}
        files = {file: content(f"{step}{file}", size) for file, size in sizes.items()}
        files |= frozen or {}
        files["manifest.json"] = manifest_of(step, files)
        found |= {f"{step}/{file}": data for file, data in files.items()}
    return found


def manifest_of(step: int, files: dict[str, bytes]) -> bytes:
    entries = {file: FileEntry(hashlib.sha256(data).hexdigest(), len(data))
               for file, data in files.items()}  # fmt: skip
    return Manifest(step, entries, {}).encode()


def renamed(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """Returns the files of a checkpoint under another name."""
    return {f"{name}/{path.partition('/')[2]}": data for path, data in files.items()}


def pointer(name: str) -> bytes:
    return json.dumps({"checkpoint": name}).encode()


# --- whole transfers


def run(work: Callable[[Served], Coroutine[Any, Any, Any]], byte_limit: int = ENDLESS) -> Any:
    async def go() -> Any:
        async with agent_in_thread(byte_limit) as served:
            return await work(served), served.line.passed

    return asyncio.run(asyncio.wait_for(go(), 30))


def test_sends_tree(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", FILES), ())

    async def work(served: Served) -> dict[str, bytes]:
        root = await send_folder(served.node, tree, "code", "run1")
        assert served.node.copies["code"][0] == root
        return read_final_files(Path(root))

    assert run(work)[0] == FILES


def test_copy_has_current_folder_without_files(tmp_path: Path) -> None:
    project = fill(tmp_path / "project", FILES)

    async def work(served: Served) -> None:
        for tree, folder in ((read_parts(project, ()), "b/empty/exp1"), (Tree(project, []), "e")):
            job = cast(Any, SimpleNamespace(workdir=f"{project}/{folder}"))
            workdir = workdir_in(tree, job)
            root = await send_folder(served.node, tree, "code", "run1", workdir)
            assert (Path(root) / folder).is_dir()

    run(work)
    for workdir in (project, tmp_path, tmp_path / "project2"):
        assert workdir_in(Tree(project, []), cast(Any, SimpleNamespace(workdir=workdir))) == ""


MANY = {
    f"{position % 7}/{position}": content("many", position % 50) + b"%d" % (position % 90)
    for position in range(100)
}


@pytest.mark.parametrize("piece", [1, 7, 99, 100, 1000])
def test_sends_many_files_in_batches(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ENTRY_BATCH", piece)
    tree = read_parts(fill(tmp_path / "project", MANY), ())

    async def work(served: Served) -> list[dict[str, bytes]]:
        roots = [await send_folder(served.node, tree, "code", "run1") for _ in range(2)]
        return [read_final_files(Path(root)) for root in roots]

    assert run(work)[0] == [MANY, MANY]


def test_rejects_file_changed_since_hashing(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", MANY), ())
    (tmp_path / "project" / "3" / "3").write_bytes(b"other")

    async def work(served: Served) -> None:
        with pytest.raises(NodeError, match="changed since it was read for this run") as caught:
            await send_folder(served.node, tree, "code", "run1")
        assert caught.value.found == "3/3"
        assert "MiB" not in caught.value.remedy

    run(work)


def test_sends_cached_files_despite_local_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_parts(fill(tmp_path / "project", FILES | {"log": b"1"}), ())
    (tmp_path / "project" / "log").write_bytes(b"12")
    tree = cache_files(read)
    (tmp_path / "project" / "a.py").write_bytes(b"edited")
    (tmp_path / "project" / "log").write_bytes(b"123")
    (tmp_path / "project" / "b" / "odd").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache of another host"))

    async def work(served: Served) -> dict[str, bytes]:
        return read_final_files(Path(await send_folder(served.node, tree, "code", "run1")))

    assert run(work)[0] == FILES | {"log": b"12"}


def test_shared_folder_matches_despite_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_folder = fill(tmp_path / "project", FILES)
    entry, ship = SimpleNamespace(kind="script"), SimpleNamespace(value="auto")
    job = cast(Any, SimpleNamespace(entry=entry, ship=ship))
    tree = read_parts(local_folder, ())
    (local_folder / "a.py").write_bytes(b"edited")
    (local_folder / "empty").unlink()
    other = fill(tmp_path / "other", FILES | {"a.py": b"of another day"})
    list_current, lines = Tree.current_entries, iter("123456")

    def list_while_written(tree: Tree, paths: Collection[str]) -> Any:
        """Simulates a log that grows while it is read."""
        (local_folder / "b" / "odd").write_text(next(lines))
        found = list_current(tree, paths)
        (local_folder / "b" / "odd").write_text(next(lines))
        return found

    async def work(served: Served) -> list[bool]:
        node = SimpleNamespace(channel=served.node.channel, host=Host("n1", "n1"))
        comparisons = []
        for place, list_entries in (
            (None, list_current),
            (None, list_while_written),
            (str(other), list_current),
        ):
            node.host = replace(node.host, workdir=place)
            monkeypatch.setattr(Tree, "current_entries", list_entries)
            found = await survey._compare(cast(Any, node), job, tree)
            assert found is not None
            comparisons.append(not (found["missing"] or found["different"]))
        return comparisons

    assert run(work)[0] == [True, True, False]


def test_empty_tree_creates_folder(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", {}), ())

    async def work(served: Served) -> bool:
        return Path(await send_folder(served.node, tree, "code", "run1")).is_dir()

    assert run(work)[0]


def test_messages_of_small_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 10 * files.FILE_OVERHEAD_BYTES)
    sizes = {
        **{f"e{position}": 0 for position in range(25)},
        "l": 8 * files.FILE_OVERHEAD_BYTES,
        "m": 50,
    }
    groups = list(files.grouped(list(sizes), sizes.__getitem__))
    assert [name for group in groups for name in group] == list(sizes)
    assert [len(group) for group in groups] == [10, 10, 6, 1]


def test_damaged_cache_is_refilled(tmp_path: Path, cache: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", FILES), ())

    async def work(served: Served) -> dict[str, bytes]:
        await send_folder(served.node, tree, "code", "run1")
        blob = cache / snapshot.blob_path(str(tree.manifest[0][1]))
        blob.write_bytes(b"x" * blob.stat().st_size)
        return read_final_files(Path(await send_folder(served.node, tree, "code", "run1")))

    assert run(work)[0] == FILES


def test_fetches_only_new_files(tmp_path: Path) -> None:
    remote_end, run_dir = fill(tmp_path / "there", FILES), tmp_path / "run"
    (remote_end / "out").symlink_to("/etc")
    run_dir.mkdir()
    manifest = [["a.py", hashlib.sha256(FILES["a.py"]).hexdigest(), 0o644, 100]]

    async def work(served: Served) -> list[str]:
        fetcher = Fetcher(run_dir)
        return await fetcher.fetch(
            served.node.channel,
            str(remote_end),
            manifest,
            run_dir / "files" / "n1",
            skip=lambda path: path == "empty",
        )

    assert sorted(run(work)[0]) == ["b/even", "b/odd"]
    assert read_final_files(run_dir) == {
        f"files/n1/{name}": FILES[name] for name in ("b/even", "b/odd")
    }


def test_fetcher_follows_no_symlink_in_run_directory(tmp_path: Path) -> None:
    remote_end, run_dir = fill(tmp_path / "there", FILES), tmp_path / "run"
    (tmp_path / "elsewhere").mkdir()
    run_dir.mkdir()
    Arrivals(run_dir)  # creates the folder that belongs to the run
    (run_dir / "b").symlink_to(tmp_path / "elsewhere")

    async def work(served: Served) -> None:
        await Fetcher(run_dir).fetch(served.node.channel, str(remote_end), None, run_dir)

    with pytest.raises(NodeError, match="cannot write what n1 sends") as caught:
        run(work)
    assert "b is a symbolic link" in caught.value.found
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_file_changed_during_read_is_not_fetched(tmp_path: Path, change: str) -> None:
    remote_end, run_dir = fill(tmp_path / "there", {"f": bytes(BLOCK * 3)}), tmp_path / "run"
    run_dir.mkdir()
    size = {"shorter": BLOCK * 4, "longer": BLOCK * 2, "gone": 5}[change]

    async def work(served: Served) -> None:
        name = "none" if change == "gone" else "f"
        await Fetcher(run_dir).fetch_files(
            served.node.channel, str(remote_end), {name: size}, run_dir
        )

    with pytest.raises(AgentRefusal):
        run(work)
    assert read_final_files(run_dir) == {}
    assert not list((run_dir / safe_paths.INCOMING).iterdir())


def test_rejects_corrupted_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote_end, run_dir = fill(tmp_path / "there", {"f": bytes(BLOCK * 3)}), tmp_path / "run"
    run_dir.mkdir()
    add = safe_paths.IncomingFile.add
    monkeypatch.setattr(
        safe_paths.IncomingFile,
        "add",
        lambda self, position, data: add(self, position, b"x" + data[1:]),
    )

    async def work(served: Served) -> None:
        await Fetcher(run_dir).fetch_files(
            served.node.channel, str(remote_end), {"f": BLOCK * 3}, run_dir
        )

    with pytest.raises(NodeError, match="did not arrive unchanged"):
        run(work)
    assert read_final_files(run_dir) == {}


def test_copy_command_quotes_paths_and_ssh_options() -> None:
    channel = cast(Channel, SimpleNamespace(host=Host("n1"), ssh_config=None))
    error = write_error(channel, "/x/$(touch here)", Path("/run"), OSError(5, "no", "/run/a"))
    assert error.remedy.endswith("by hand: scp -r 'n1:/x/$(touch here)' .")
    remote_end = Host("n1", address="fd00::1", user="ada", port=2222, identity_file="/k")
    channel = cast(Channel, SimpleNamespace(host=remote_end, ssh_config=Path("/lab/ssh")))
    assert copy_command(channel, "/x") == "scp -F /lab/ssh -i /k -P 2222 -r 'ada@[fd00::1]:/x' ."


# --- the trained model, if rank 0 has moved to another host since it was written

MODEL = {"model/model.safetensors": content("w", 900), "model/config.json": b'{"sha256": "ab"}'}


def collector_of_saved_model(
    node: Node, run_dir: RunDirectory
) -> tuple[ResultCollector, list[str]]:
    """Returns expected results after rank 0 on this node has saved a model, and the messages."""
    notes: list[str] = []
    results = ResultCollector(run_dir, notes.append, OutputSync(run_dir.path, notes.append))
    results.set_first_node(node)
    results.on_event(node, Event("model saved", node.name, 0, fields={"sha256": "ab"}))
    return results, notes


def make_fleet(*nodes: Node) -> Fleet:
    return cast(Fleet, SimpleNamespace(nodes=[*nodes], spares=[]))


def make_node(served: Served, name: str, folder: Path | None) -> Node:
    """Returns a node with its own run folder, or one that shares the run directory."""
    is_shared = folder is None
    return Node(
        Host(name), served.node.channel, shared_run_dir=is_shared, run_folder=str(folder or "")
    )


@pytest.mark.parametrize("is_call", [False, True])
def test_return_values_are_fetched_for_calls_only(tmp_path: Path, is_call: bool) -> None:
    """A hostile rank of another run may report a value that fits on no disk."""
    run_dir = RunDirectory(tmp_path / "run")
    outputs = OutputSync(run_dir.path, [].append)
    results = ResultCollector(run_dir, [].append, outputs, is_call=is_call)
    node: Any = SimpleNamespace()
    results.on_event(node, Event("returned", "n1", 0, fields={"bytes": 1 << 53, "sha256": "ab"}))
    assert bool(results._return_files) == is_call
    run_dir.close()


def test_superseded_files_are_reported_separately(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    remote_end = fill(tmp_path / "job/code", {"new.bin": b"x", ".a.pt.superseded": b"y",
                                         ".step_1.superseded-2/b.pt": b"z"})  # fmt: skip

    async def work(served: Served) -> None:
        node = make_node(served, "n1", None)
        node.copies["code"] = str(remote_end), []
        notes: list[str] = []
        results = ResultCollector(run_dir, notes.append, OutputSync(run_dir.path, notes.append))
        await results.fetch(make_fleet(node))
        assert [note for note in notes if "1 new file of n1: " in note]
        assert [note for note in notes if "2 files of n1 gave way to rank 0's: " in note]

    run(work)


def test_names_files_of_rank_0_that_may_not_be_in_project(tmp_path: Path) -> None:
    """Such as a pickle outside of a checkpoint folder: the user must copy it."""
    run_dir = RunDirectory(tmp_path / "run")
    remote_end = fill(tmp_path / "job/code", {"out/meta.pkl": b"x", "out/.a/b": b"y",
                                         "out/.d": b"z", "out/late.bin": b"w"})  # fmt: skip

    async def work(served: Served) -> None:
        nodes = [make_node(served, name, None) for name in ("n1", "n2")]
        for node in nodes:
            node.copies["code"] = str(remote_end), []
        notes: list[str] = []
        results = ResultCollector(run_dir, notes.append, OutputSync(run_dir.path, notes.append))
        results.first = nodes[0]
        await results.fetch(make_fleet(*nodes))
        of_first, of_second, refused = notes
        assert "1 new file of n1: " in of_first
        assert "4 new files of n2: " in of_second
        assert "3 files of the script, which may not be put into the project: " in refused
        assert [Path(path).name for path in refused.split(", ")[1:]][-2:] == ["b", ".d"]
        assert "files/n1/out/meta.pkl, " in refused

    run(work)


def test_fetches_files_written_outside_project(
    tmp_path: Path,
) -> None:
    """A script may write to ``../out``, next to the copy of the code on a host."""
    run_dir = RunDirectory(tmp_path / "run")
    job = fill(tmp_path / "job", {"code/train.py": b"x", "paceline/a.py": b"y", ".own": b"z",
                                  "out/step_1/w.pt": b"w"})  # fmt: skip

    async def work(served: Served) -> None:
        node = make_node(served, "n1", None)
        node.copies["code"] = (
            str(job / "code"),
            [["train.py", hashlib.sha256(b"x").hexdigest(), 0o644, 1]],
        )
        notes: list[str] = []
        results = ResultCollector(run_dir, notes.append, OutputSync(run_dir.path, notes.append))
        await results.fetch(make_fleet(node))
        assert len(notes) == 1
        assert "1 file that the script wrote outside the project on n1: " in notes[0]

    run(work)
    arrived = [path for path in (run_dir.path / "files").rglob("*") if path.is_file()]
    assert arrived == [run_dir.path / "files/n1/outside-project/out/step_1/w.pt"]


def test_names_files_to_copy_after_run_dir_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run directory at the same path does not know the files of this run."""
    home = RunDirectory(tmp_path / "run")
    shutil.rmtree(home.path, ignore_errors=True)
    keep_folder = AsyncMock(return_value={})
    monkeypatch.setattr(collector_module, "try_request", keep_folder)
    node = Mock(copies={"code": ("/copy", [])})
    node.name = "n1"
    notes: list[str] = []
    results = ResultCollector(home, notes.append, OutputSync(home.path, notes.append))
    results.first = node
    asyncio.run(results._keep_on_node(node))
    assert notes == [
        "paceline: n1 keeps its files for a month in /copy;"
        " the run directory was removed, so copy from there what you need"
    ]


@pytest.mark.parametrize("is_full", [False, True])
def test_results_beyond_disk_space_stay_on_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The launcher says goodbye as usual, and the agent then removes the job's folder."""
    run_dir = RunDirectory(tmp_path / "run")
    job = fill(tmp_path / "job", {"code/.hidden": b"h", "code/out/last.bin": b"w",
                                  snapshot.OWNER_FILE: snapshot._AGENT_ID.encode()})  # fmt: skip
    remote_end = snapshot.make_run_folder(KEY)
    monkeypatch.setattr(results, "room_problem", lambda *_: "no room" if is_full else "")

    async def work(served: Served) -> None:
        served.agent.folders.append(job)
        served.agent.run_keys[KEY] = []
        served.agent.output_roots[str(job / "code")] = 0
        served.agent.job.ranks = [RankProcess(0, 0)]
        node = make_node(served, "n1", remote_end)
        node.copies["code"] = str(job / "code"), []
        notes: list[str] = []
        collector = ResultCollector(run_dir, notes.append, OutputSync(run_dir.path, notes.append))
        collector.set_first_node(node)
        await collector.fetch(make_fleet(node))
        assert any("n1 keeps its files for a month" in note for note in notes) == is_full
        assert any("the next start in this run directory" in note for note in notes) == is_full
        lacking = collector.missing_results(make_fleet(node))
        problem = "could not fetch the results of n1: the results on n1 do not fit on this disk"
        assert (lacking is not None and lacking.headline == problem) is is_full
        node.lost = is_full
        lacking = collector.missing_results(make_fleet(node))
        assert (lacking is not None and lacking.kind == "lost") is is_full
        node.lost = False
        await collector.discard_run_folders(make_fleet(node))
        await served.ask("bye")

    run(work)
    assert (job / "code/.hidden").exists() == is_full
    assert (remote_end / UNCOLLECTED / "out/last.bin").exists() == is_full
    assert (run_dir.path / "files/n1/out/last.bin").exists() != is_full
    run_dir.close()


def test_fetches_model_from_host_that_saved_it(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), fill(tmp_path / "node", MODEL)

    async def work(served: Served) -> None:
        writer, first = make_node(served, "n1", remote_end), make_node(served, "n2", None)
        results, notes = collector_of_saved_model(writer, run_dir)
        results.set_first_node(first)
        await results.fetch(make_fleet(writer, first))
        assert {name: (run_dir.path / name).read_bytes() for name in MODEL} == MODEL
        assert results.missing_results(make_fleet(writer, first)) is None
        assert not notes

    run(work)
    run_dir.close()


def test_ignores_model_events_of_unrelated_node(tmp_path: Path) -> None:
    run_dir, forged = RunDirectory(tmp_path / "run"), fill(tmp_path / "n2", MODEL)
    genuine_model = {**MODEL, "model/model.safetensors": content("r", 900)}
    remote_end = fill(tmp_path / "n1", genuine_model)

    async def work(served: Served) -> None:
        first, other = make_node(served, "n1", remote_end), make_node(served, "n2", forged)
        results, _ = collector_of_saved_model(first, run_dir)
        for kind in ("model saved", "model kept elsewhere"):
            fields = {"sha256": "cd", "folder": str(forged)}
            results.on_event(other, Event(kind, "n2", 1, fields=fields))
        await results.fetch(make_fleet(first, other))
        assert {name: (run_dir.path / name).read_bytes() for name in MODEL} == genuine_model

    run(work)
    run_dir.close()


@pytest.mark.parametrize("is_visible", [False, True])
def test_model_of_lost_host_is_missing(tmp_path: Path, is_visible: bool) -> None:
    """The model is found if the host that now has rank 0 uses the same disk."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    unrelated = fill(tmp_path / "other", {"config.json": b"{}"})
    fill(remote_end, MODEL)

    async def work(served: Served) -> None:
        writer = make_node(served, "n1", remote_end)
        first = make_node(served, "n2", remote_end if is_visible else unrelated)
        results, notes = collector_of_saved_model(writer, run_dir)
        results.set_first_node(first)
        writer.lost, writer.loss_reason, writer.lost_at = True, "it was silent for 3 s", 7.0
        await results.fetch(make_fleet(writer, first))
        lacking = results.missing_results(make_fleet(first))  # its place may be taken by a spare
        if is_visible:
            assert lacking is None
            return
        where = f"the trained model was not fetched: it is in {remote_end}/model"
        headline = f"it was silent for 3 s; {where} there"
        assert lacking == Failure("lost", "n1", None, 7.0, headline=headline)
        assert notes == [f"paceline: {where} on n1"]

    run(work)
    run_dir.close()


def test_model_of_next_host_replaces_lost_model(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), fill(tmp_path / "node", MODEL)

    async def work(served: Served) -> None:
        lost_node, first = (
            make_node(served, "n1", tmp_path / "gone"),
            make_node(served, "n2", remote_end),
        )
        results, _ = collector_of_saved_model(lost_node, run_dir)
        lost_node.lost = True
        results.set_first_node(first)
        results.on_event(first, Event("model saved", "n2", 1, fields={"sha256": "ab"}))
        await results.fetch(make_fleet(lost_node, first))
        assert results.missing_results(make_fleet(lost_node, first)) is None

    run(work)
    run_dir.close()


# --- checkpoints


def make_checkpoint_fetcher(
    served: Served, run_dir: RunDirectory, remote_end: Path
) -> CheckpointFetcher:
    return CheckpointFetcher(
        served.node.channel, str(remote_end), run_dir.path, Fetcher(run_dir.path)
    )


def test_mirrors_checkpoints_as_they_are_published(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_folder, local_folder = remote_end / "checkpoints", run_dir.path / "checkpoints"
    fill(remote_folder, {**steps(10, 20), "latest.json": pointer("20"), "writer.json": b"me",
                 ".30.77.tmp/weights": b"unfinished"})  # fmt: skip

    async def work(served: Served) -> None:
        follow = make_checkpoint_fetcher(served, run_dir, remote_end)
        await follow.sync()
        assert read_final_files(local_folder) == {**steps(10, 20), "latest.json": pointer("20")}
        fill(remote_folder, {**steps(30), "latest.json": pointer("30")})
        for file in (remote_folder / "10").iterdir():
            file.unlink()
        follow.schedule()
        follow.schedule()
        await follow.finish()
        assert read_final_files(local_folder) == {**steps(20, 30), "latest.json": pointer("30")}

    run(work)
    run_dir.close()


def test_frozen_weights_are_fetched_once(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_folder, local_folder = remote_end / "checkpoints", run_dir.path / "checkpoints"
    weights = content("frozen", 3 * BLOCK)
    frozen = {frozen_file(hashlib.sha256(weights).hexdigest()): weights}
    fill(remote_folder, steps(10, frozen=frozen))

    async def work(served: Served) -> None:
        follow = make_checkpoint_fetcher(served, run_dir, remote_end)
        await follow.sync()
        fill(remote_folder, steps(20, frozen=frozen))
        (name,) = frozen
        (remote_folder / "20" / name).unlink()
        (remote_folder / "20" / name).hardlink_to(remote_folder / "10" / name)
        await follow.sync()
        assert read_final_files(local_folder) == read_final_files(remote_folder)
        assert (local_folder / "20" / name).samefile(local_folder / "10" / name)

    run(work)
    run_dir.close()


def test_forged_local_frozen_weights_do_not_block_fetch(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    weights = content("frozen", 3 * BLOCK)
    name = frozen_file(hashlib.sha256(weights).hexdigest())
    genuine = {"20/weights.safetensors": b"w", f"20/{name}": weights}
    genuine["20/manifest.json"] = manifest_of(20, {"weights.safetensors": b"w", name: weights})
    fill(run_dir.path / "checkpoints", {**steps(10), f"10/{name}": content("forged", 3 * BLOCK)})
    fill(remote_end / "checkpoints", genuine)

    async def work(served: Served) -> None:
        await make_checkpoint_fetcher(served, run_dir, remote_end).sync()

    run(work)
    assert genuine.items() <= read_final_files(run_dir.path / "checkpoints").items()
    run_dir.close()


def test_checkpoint_being_removed_is_not_reported(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(run_dir.path / "checkpoints", steps(10, 20))
    fill(remote_end / "checkpoints", steps(10, 20))
    (remote_end / "checkpoints" / "10" / "manifest.json").unlink()
    messages: list[str] = []

    async def work(served: Served) -> None:
        fetcher = Fetcher(run_dir.path)
        await CheckpointFetcher(served.node.channel, str(remote_end), run_dir.path, fetcher,
                                note=messages.append).sync()  # fmt: skip
        assert not fetcher.incomplete_hosts

    run(work)
    assert not messages
    assert read_final_files(run_dir.path / "checkpoints") == steps(10, 20)
    run_dir.close()


def test_mirror_removes_only_checkpoints_of_this_run(tmp_path: Path) -> None:
    """Others stay, such as the best one, which was copied to a node other than rank 0's."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_folder, local_folder = remote_end / "checkpoints", run_dir.path / "checkpoints"
    fill(local_folder, steps(10, 20))
    fill(remote_folder, steps(20, 30, 40))

    async def work(served: Served) -> None:
        follow = make_checkpoint_fetcher(served, run_dir, remote_end)
        await follow.sync()
        assert read_final_files(local_folder) == steps(10, 20, 30, 40)
        found = {
            checkpoint.name: checkpoint.status for checkpoint in signatures.verify(run_dir.path)
        }
        assert found == {"40": "signed", "30": "signed", "20": "unsigned", "10": "unsigned"}
        for step in ("20", "30"):
            for file in (remote_folder / step).iterdir():
                file.unlink()
        await follow.sync()
        assert read_final_files(local_folder) == steps(10, 20, 40)

    run(work)
    run_dir.close()


def test_checkpoints_of_earlier_training_are_set_aside(tmp_path: Path) -> None:
    """After ``--resume never``, which the ranks have done on their disk."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(run_dir.path / "checkpoints", steps(10, 20))
    new = {path.replace("15/", "15.2/"): content for path, content in steps(15).items()}
    fill(remote_end / "checkpoints", new)

    async def work(served: Served) -> None:
        for _ in range(2):
            follow = make_checkpoint_fetcher(served, run_dir, remote_end)
            follow.resumes = False
            await follow.sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == new
    (backup,) = run_dir.path.glob("checkpoints-before-*")
    assert read_final_files(backup) == steps(10, 20)
    run_dir.close()


def test_signs_checkpoint_in_shared_run_directory(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    fill(run_dir.path / "checkpoints", steps(10, 20))

    async def work(served: Served) -> None:
        first = make_node(served, "n1", None)
        results = ResultCollector(run_dir, [].append, OutputSync(run_dir.path, [].append))
        results.set_first_node(first)
        results.on_event(first, Event("checkpoint", first.name, 0, fields={"step": 20}))
        await results.fetch(make_fleet())

    run(work)
    assert [checkpoint.status for checkpoint in signatures.verify(run_dir.path)] == [
        "signed",
        "unsigned",
    ]
    run_dir.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_signs_model_when_it_has_arrived(tmp_path: Path, is_shared: bool) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    weights = content("w", 900)
    digest = hashlib.sha256(weights).hexdigest()
    fill(
        run_dir.path if is_shared else remote_end,
        {
            "model/model.safetensors": weights,
            "model/config.json": json.dumps({"sha256": digest}).encode(),
        },
    )

    async def work(served: Served) -> None:
        first = make_node(served, "n1", None if is_shared else remote_end)
        results = ResultCollector(run_dir, [].append, OutputSync(run_dir.path, [].append))
        results.set_first_node(first)
        results.on_event(first, Event("model saved", "n1", 0, fields={"sha256": digest}))
        await results.fetch(make_fleet(first))

    run(work)
    model = signed_model.verify_model(run_dir.path)
    assert model is not None
    assert model.status == "signed"
    (run_dir.path / "model/model.safetensors").write_bytes(content("x", 900))
    changed = signed_model.verify_model(run_dir.path)
    assert changed is not None
    assert changed.status == "changed"
    run_dir.close()


def test_resume_keeps_limit_plus_previous_checkpoint(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_folder, local_folder = remote_end / "checkpoints", run_dir.path / "checkpoints"

    async def work(served: Served) -> None:
        for start in range(3):
            follow = CheckpointFetcher(served.node.channel, str(remote_end), run_dir.path,
                                       Fetcher(run_dir.path), keep=3)  # fmt: skip
            for step in range(10 * start, 10 * start + 6):
                fill(remote_folder, steps(step))
                for file in remote_folder.glob(
                    f"{step - 3}/*" if step % 10 > 2 else f"{step - 7}/*"
                ):
                    file.unlink()
                await follow.sync()
            previous = steps(10 * start - 5) if start else {}
            assert read_final_files(local_folder) == {
                **previous,
                **steps(*range(10 * start + 3, 10 * start + 6)),
            }

    run(work)
    run_dir.close()


def test_mirror_keeps_limit_and_best_checkpoint(tmp_path: Path) -> None:
    """None is lost: the best is kept, and a checkpoint that is still to come displaces none."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_folder, local_folder = remote_end / "checkpoints", run_dir.path / "checkpoints"
    fill(local_folder, {**steps(10, 20, 30, 40), "best.json": b'{"step": 10}'})
    fill(remote_folder, steps(50))

    async def work(served: Served) -> None:
        channel, fetcher = served.node.channel, Fetcher(run_dir.path)
        follow = CheckpointFetcher(channel, str(remote_end), run_dir.path, fetcher, keep=3)
        await follow.sync()
        assert read_final_files(local_folder) == {
            **steps(10, 30, 40, 50),
            "best.json": b'{"step": 10}',
        }

    run(work)
    run_dir.close()


def test_replaces_incomplete_local_checkpoint(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(remote_end / "checkpoints", steps(10))
    fill(run_dir.path / "checkpoints", {"10/weights.safetensors": b"half"})

    async def work(served: Served) -> None:
        await make_checkpoint_fetcher(served, run_dir, remote_end).sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == steps(10)
    run_dir.close()


def test_fetches_remaining_checkpoints_after_read_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(remote_end / "checkpoints", steps(10, 20))
    sizes = checkpoints._remote_sizes

    async def list_outdated_sizes(*where: Any) -> dict[str, int]:
        listing = await sizes(*where)
        grown = {"10/weights.safetensors": bytes(4 * BLOCK)}
        fill(remote_end / "checkpoints", grown)
        return listing

    monkeypatch.setattr(checkpoints, "_remote_sizes", list_outdated_sizes)

    async def work(served: Served) -> None:
        with pytest.raises(AgentRefusal):
            await make_checkpoint_fetcher(served, run_dir, remote_end).sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == steps(20)
    run_dir.close()


@pytest.mark.parametrize("claims", ["manifest", "listing"])
def test_does_not_fetch_oversized_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: str
) -> None:
    """Only files of the manifest with their sizes are fetched, and only if there is space."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    entry = FileEntry("0" * 64, 1 << 50)
    large = Manifest(77, {"weights.safetensors": entry}, {}).encode()
    manifest = large if claims == "manifest" else steps(77)["77/manifest.json"]
    fill(remote_end / "checkpoints", {**steps(10), "10/extra": b"x", "77/manifest.json": manifest})
    list_files, fetched, messages = Fetcher.list_files, list[str](), list[str]()

    async def listing(self: Fetcher, *where: Any) -> dict[str, int]:
        return {**await list_files(self, *where), "77/weights.safetensors": 1 << 50}

    read = server.OPERATIONS["read_block"]
    monkeypatch.setattr(Fetcher, "list_files", listing)
    monkeypatch.setitem(
        server.OPERATIONS, "read_block",
        lambda agent, request, blob: (fetched.append(request["path"]), read(agent, request, blob)),
    )  # fmt: skip

    async def work(served: Served) -> None:
        follow = CheckpointFetcher(
            served.node.channel,
            str(remote_end),
            run_dir.path,
            Fetcher(run_dir.path),
            note=messages.append,
        )
        for _ in range(2):
            await follow.sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == steps(10)
    assert {path for path in fetched if path.startswith("77/")} == {"77/manifest.json"}
    assert "10/extra" not in fetched
    assert fetched.count("10/manifest.json") == 1  # an unlisted file is not refetched
    reason = {"manifest": "the disk has no room: 1,125,899,906.8 MB needed",
              "listing": "it is damaged: state.json is not the file that its manifest describes",
              }[claims]  # fmt: skip
    (note,) = messages
    assert f"checkpoint 77 of n1 was left there: {reason}" in note
    run_dir.close()


def test_checks_long_listings_off_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    remote_end.mkdir()
    listing = [{"path": "77/" + "a/" * 45 + str(number), "size": 0} for number in range(2000)]
    monkeypatch.setattr(snapshot, "changed_files", lambda root, manifest: listing)
    threads, messages = set[int](), list[str]()

    def check(path: str) -> str:
        threads.add(threading.get_ident())
        return "no"

    monkeypatch.setattr(safe_paths, "refusal_reason", check)
    monkeypatch.setattr(results, "refusal_reason", check)

    async def work(served: Served) -> None:
        fetcher = Fetcher(run_dir.path, messages.append)
        await CheckpointFetcher(served.node.channel, str(remote_end), run_dir.path, fetcher).sync()
        await fetcher.fetch(served.node.channel, str(remote_end), None, run_dir.path)
        assert threads
        assert threading.get_ident() not in threads

    run(work)
    assert f"2,000 files stayed on n1 in {remote_end}" in messages[0].replace("2000", "2,000")
    run_dir.close()


def test_rejects_too_many_result_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote_end = fill(tmp_path / "there", FILES)
    monkeypatch.setattr(snapshot, "MAX_RESULTS", 2)

    async def work(served: Served) -> None:
        await Fetcher(tmp_path).fetch(served.node.channel, str(remote_end), None, tmp_path)

    with pytest.raises(AgentRefusal) as caught:
        run(work)
    assert f"more than 2 new files in {remote_end}" in caught.value.found


@pytest.mark.parametrize("op", ["list_results", "read_block"])
def test_silent_host_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    remote_end, run_dir = fill(tmp_path / "there", FILES), tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setattr(channel_module, "NOTE_AFTER_S", 0.05)
    monkeypatch.setattr(channel_module, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setitem(server.OPERATIONS, op, lambda *_: None)
    late_requests: list[str] = []

    async def work(served: Served) -> None:
        served.node.channel.on_late = late_requests.append
        await Fetcher(run_dir).fetch(served.node.channel, str(remote_end), None, run_dir)

    with pytest.raises(HostSilent, match=f"n1 has not answered the request {op} for"):
        run(work)
    assert late_requests == [op]


def test_silent_host_times_out_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is being fetched when the training ends; then a model is to be fetched."""
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    monkeypatch.setattr(channel_module, "NOTE_AFTER_S", 0.05)
    monkeypatch.setattr(channel_module, "ANSWER_TIMEOUT_S", 0.3)
    requests: list[str] = []
    monkeypatch.setitem(
        server.OPERATIONS,
        "list_results",
        lambda agent, request, blob: requests.append(request["op"]),
    )

    async def work(served: Served) -> None:
        node = make_node(served, "n1", remote_end)
        results, notes = collector_of_saved_model(node, run_dir)
        results.set_first_node(node)
        results.on_event(node, Event("checkpoint", "n1", 0, fields={"step": 10}))
        await asyncio.sleep(0)
        await results.fetch(make_fleet(node))
        (note,) = notes
        assert "could not fetch the results of n1: n1 has not answered the request list" in note

    run(work)
    assert requests == ["list_results"]
    run_dir.close()


def test_outdated_checkpoints_require_replacement() -> None:
    assert checkpoints.outdated(["10", "20", "9"], ["20", "30"], ["30"]) == ["10", "9"]
    assert checkpoints.outdated(["10", "20", "9"], ["20", "30"], []) == []
    assert checkpoints.outdated(["10", "20"], [], []) == []
    assert checkpoints.outdated(["40"], ["20"], ["20"]) == []


PLANTED = {
    "a name that no run writes": {"9999999999999999999.999999999/manifest.json": b"{}"},
    "no manifest": {"900.7/manifest.json": b"{}"},
    "a manifest of another": {"900.7/manifest.json": steps(10)["10/manifest.json"]},
    "a manifest of nothing": {"900.7/manifest.json": manifest_of(900, {})},
    "a manifest without its hash": {"900.7/manifest.json": json.dumps({"step": 900, "files": {
        "x": {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}}}).encode(),
        "900.7/x": b"{}"},
    "a manifest with another size": {"900.7/manifest.json": Manifest(
        900, {"x": FileEntry(hashlib.sha256(b"{}").hexdigest(), 3)}, {}).encode(),
        "900.7/x": b"{}"},
    "the token of a writer far ahead": renamed(steps(900), "900.999999"),
    "the last step and token of all": renamed(steps(999999999999999), "999999999999999.999998"),
    "a step far ahead": steps(999999999999999),
    "an intact one of a local name": renamed(steps(900), "30"),
    "pointers to a writer far ahead": {"latest.json": pointer("9.999999"),
                                       "best.json": pointer("9.999999")},
    "other content": {"900.7/manifest.json": steps(900)["900/manifest.json"],
                      "900.7/weights.safetensors": b"x", "900.7/state.json": b"x"},
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("planted", PLANTED)
def test_invalid_checkpoints_replace_nothing(tmp_path: Path, planted: str, keep: int) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(run_dir.path / "checkpoints", steps(10, 20, 30))
    fill(
        remote_end / "checkpoints",
        {"30/weights.safetensors": b"other", ".git/config": b"x", **PLANTED[planted]},
    )
    messages: list[str] = []

    async def work(served: Served) -> None:
        for _ in range(2):
            await CheckpointFetcher(
                served.node.channel,
                str(remote_end),
                run_dir.path,
                Fetcher(run_dir.path),
                keep=keep,
                note=messages.append,
            ).sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == steps(10, 20, 30)
    assert not [*(run_dir.path / "checkpoints").glob(".*.tmp")]
    host = "of n1 was left there"  # in both messages
    assert any(f"checkpoint 30 {host}" in note for note in messages)
    if name := next((path.split("/")[0] for path in PLANTED[planted] if path[0] == "9"), ""):
        is_checkpoint = parse_version(name) is not None
        assert sum(f"checkpoint {name} {host}" in note for note in messages) == 2 * is_checkpoint
    run_dir.close()


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_fake_checkpoints_do_not_displace_newest_and_best(tmp_path: Path, keep: int) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    local_folder, remote_folder = run_dir.path / "checkpoints", remote_end / "checkpoints"
    fill(
        local_folder,
        {**steps(10, 20, 30), "40/weights.safetensors": b"half", "best.json": pointer("10")},
    )
    fakes = {f"90{n}.{n}": renamed(steps(900 + n), f"90{n}.{n}") for n in range(2, 6)}

    async def work(served: Served) -> None:
        follow = CheckpointFetcher(
            served.node.channel, str(remote_end), run_dir.path, Fetcher(run_dir.path), keep=keep
        )
        fill(remote_folder, steps(10, 20, 30))
        await follow.sync()
        for step in (10, 20, 30):
            for file in (remote_folder / str(step)).iterdir():
                file.unlink()
        for name, fake in fakes.items():
            fill(remote_folder, {**fake, "best.json": pointer(name), "latest.json": pointer(name)})
            await follow.sync()

    run(work)
    present = read_final_files(local_folder)
    assert {**steps(10, 30), "best.json": pointer("905.5")}.items() <= present.items()
    assert (keep == 0) == ("20/weights.safetensors" in present)
    assert fakes["905.5"].items() <= present.items()
    run_dir.close()


def fetch_rewritten(tmp_path: Path, step: int) -> tuple[dict[str, bytes], list[str]]:
    """Fetches two checkpoints, of which a host then writes one again, which is fetched again.

    Returns:
        The files of the second version, and the notes for the user.
    """
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    files = {"weights.safetensors": b"other weights", "state.json": b"longer" * 20}
    files["manifest.json"] = manifest_of(step, files)
    rewritten = {f"{step}/{file}": data for file, data in files.items()}
    messages: list[str] = []

    async def work(served: Served) -> None:
        follow = CheckpointFetcher(
            served.node.channel, str(remote_end), run_dir.path, Fetcher(run_dir.path),
            note=messages.append,
        )  # fmt: skip
        for files in (steps(10, 20), rewritten):
            fill(remote_end / "checkpoints", files)
            await follow.sync()
        assert follow.has_refused == bool(messages)

    run(work)
    assert [entry.status for entry in signatures.verify(run_dir.path)] == ["signed"] * 2
    run_dir.close()
    return rewritten, messages


def test_fetched_checkpoint_cannot_be_replaced(tmp_path: Path) -> None:
    _, messages = fetch_rewritten(tmp_path, 10)
    assert read_final_files(tmp_path / "run/checkpoints") == steps(10, 20)
    assert messages == [
        "paceline: checkpoint 10 of n1 was left there: it differs from the checkpoint of that name"
        " here"
    ]


def test_newest_fetched_checkpoint_is_replaced(tmp_path: Path) -> None:
    """It is written again if an evaluation shows that it is the best."""
    rewritten, messages = fetch_rewritten(tmp_path, 20)
    assert read_final_files(tmp_path / "run/checkpoints") == steps(10) | rewritten
    assert not messages


def test_accepts_few_additional_writer_tokens(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(run_dir.path / "checkpoints", renamed(steps(10), "10.5"))
    plausible, highest_token = renamed(steps(900), "900.6"), 5 + checkpoints.MAX_NEW_WRITERS
    highest, implausible = (
        renamed(steps(7), f"7.{token}") for token in (highest_token, highest_token + 1)
    )
    fill(remote_end / "checkpoints", {**plausible, **highest, **implausible})

    async def work(served: Served) -> None:
        await make_checkpoint_fetcher(served, run_dir, remote_end).sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == {
        **renamed(steps(10), "10.5"),
        **plausible,
        **highest,
    }
    run_dir.close()


def test_mirror_keeps_requested_number_of_checkpoints(tmp_path: Path) -> None:
    run_dir, remote_end = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(run_dir.path / "checkpoints", steps(10, 20, 30))
    fill(remote_end / "checkpoints", steps(900))

    async def work(served: Served) -> None:
        await CheckpointFetcher(
            served.node.channel, str(remote_end), run_dir.path, Fetcher(run_dir.path), keep=2
        ).sync()

    run(work)
    assert read_final_files(run_dir.path / "checkpoints") == steps(30, 900)
    run_dir.close()


def test_sends_only_complete_checkpoints(tmp_path: Path, cache: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    fill(
        run_dir.path / "checkpoints",
        {**steps(10, 20, 30), "latest.json": b"ours", "writer.json": b"x"},
    )
    remote_end = cache / "runs" / run_dir.key / "checkpoints"

    async def work(served: Served) -> None:
        folder = str(snapshot.make_run_folder(run_dir.key))
        fill(
            remote_end,
            {
                **steps(10),
                "20/weights.safetensors": steps(20)["20/weights.safetensors"],
                "30/weights.safetensors": b"newer",
                "latest.json": b"theirs",
            },
        )
        await send_checkpoints(served.node.channel, folder, run_dir)
        await served.ask("discard_run_folder", key=KEY)  # requested by another run
        assert read_final_files(remote_end) == {
            **steps(10, 20),
            "30/weights.safetensors": b"newer",
            "latest.json": b"theirs",
        }

    run(work)
    run_dir.close()
    assert read_final_files(remote_end)  # it was not released


# --- interrupted connections


async def ship(served: Served, tmp_path: Path, run_dir: RunDirectory) -> None:
    tree = read_parts(tmp_path / "project", ())
    await send_folder(served.node, tree, "code", "run1")


async def send(served: Served, tmp_path: Path, run_dir: RunDirectory) -> None:
    folder = str(snapshot.make_run_folder(run_dir.key))
    await send_checkpoints(served.node.channel, folder, run_dir)


async def fetch(served: Served, tmp_path: Path, run_dir: RunDirectory) -> None:
    await Fetcher(run_dir.path).fetch(
        served.node.channel, str(tmp_path / "project"), None, run_dir.path / "files"
    )


async def follow(served: Served, tmp_path: Path, run_dir: RunDirectory) -> None:
    await make_checkpoint_fetcher(served, run_dir, tmp_path / "node").sync()


TRANSFER_KINDS = {
    "shipping": ship,
    "sending checkpoints": send,
    "fetching": fetch,
    "mirroring": follow,
}


def is_expected_content(name: str, data: bytes) -> bool:
    """Returns whether a file with its final name has the right content."""
    expected_files = {**FILES, **steps(10, 20, 30)}
    if name.split("/")[0] == "blobs":
        return hashlib.sha256(data).hexdigest() == name.split("/")[-1]
    name = name.removesuffix(".from-n1")  # of code
    return any(name.endswith(end) and data == whole for end, whole in expected_files.items())


@pytest.mark.parametrize("transfer_kind", TRANSFER_KINDS)
def test_connection_loss_leaves_no_wrong_file(transfer_kind: str, tmp_path: Path, cache: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The connection ends at 50 moments for each kind of transfer: always the same 200."""
    fill(tmp_path / "project", FILES)
    fill(tmp_path / "node" / "checkpoints", steps(10, 20))
    generator = random.Random(transfer_kind)

    def transfer_and_check(number: int, byte_limit: int) -> tuple[bool, int]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{number}"))
        run_dir = RunDirectory(tmp_path / f"run{number}")
        fill(run_dir.path / "checkpoints", steps(30) if transfer_kind != "mirroring" else {})

        async def work(served: Served) -> bool:
            with contextlib.suppress(PacelineError, ConnectionError):
                await TRANSFER_KINDS[transfer_kind](served, tmp_path, run_dir)
                return True
            return False

        whole, passed = run(work, byte_limit)
        run_dir.close()
        for root in (run_dir.path, tmp_path / f"{number}" / "paceline"):
            for name, data in read_final_files(root).items():
                assert is_expected_content(name, data), (byte_limit, name)
        if transfer_kind == "mirroring":  # a checkpoint is either complete or absent
            mirrored = read_final_files(run_dir.path / "checkpoints")
            assert mirrored in ({}, steps(10), steps(20), steps(10, 20)), byte_limit
        return whole, passed

    whole, passed = transfer_and_check(0, ENDLESS)
    assert whole
    cuts = [generator.randrange(passed) for _ in range(CUTS // len(TRANSFER_KINDS))]
    for number, byte_limit in enumerate(cuts, 1):
        transfer_and_check(number, byte_limit)
    assert transfer_and_check(len(cuts) + 1, ENDLESS)[0]


# --- the agent's loop


def test_hanging_disk_does_not_block_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an operation waits for a dead mount, leases are still renewed."""
    dead_mount, released = str(tmp_path / "dead"), threading.Event()
    found, original_open = os.stat, os.open

    def stat(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(dead_mount):
            released.wait(20)
        return found(path, *args, **options)

    def open_(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(dead_mount):
            released.wait(20)
        return original_open(path, *args, **options)

    async def work(served: Served) -> None:
        monkeypatch.setattr(os, "stat", stat)
        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setenv("XDG_CACHE_HOME", dead_mount)
        digest = hashlib.sha256(b"").hexdigest()
        entry = ["f", digest, 0o644, 0]
        block = {"offset": 0, "last": True, "size": 0, "sha256": digest}
        whole = {"first": True, "last": True}
        requests = [
            ("look", {"paths": [dead_mount]}),
            ("which", {"program": f"{dead_mount}/x", "workdir": "/"}),
            ("disk", {"paths": [dead_mount]}),
            ("run_folder", {"path": dead_mount, "token_file": "t", "token": "t", "key": KEY}),
            ("put_blob", block),
            ("put_file", {**block, "key": KEY, "path": "f"}),
            ("place", {"key": KEY, "path": "f", "target": "g"}),
            ("put_blobs", {"contents": [[digest, 0]]}),
            ("build_tree", {"folder": "r", "name": "code", "manifest": [entry], **whole}),
            ("lacking_blobs", {"manifest": [entry]}),
            ("compare_tree", {"root": dead_mount, "manifest": [entry]}),
            ("list_results", {"root": dead_mount, "manifest": None}),
            (
                "read_block",
                {"root": dead_mount, "path": "f", "offset": 0, "count": 1, "last": True},
            ),
            ("prepare", {"python": f"{dead_mount}/python", "preload": [], "env": {}, "token": "t"}),
        ]
        waiting = [asyncio.ensure_future(served.ask(op, **fields)) for op, fields in requests]
        for _ in range(5):
            await asyncio.wait_for(served.ask("lease", seconds=60.0), 5)
        released.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(work)


def test_run_folder_requested_at_end_is_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_made = snapshot.make_run_folder, threading.Event()

    def make_slowly(*args: str) -> Path:
        time.sleep(0.5)
        folder = make(*args)
        is_made.set()
        return folder

    monkeypatch.setattr(snapshot, "make_run_folder", make_slowly)

    async def work(served: Served) -> None:
        fields = {"path": "/nowhere", "token_file": "t", "token": "t", "key": KEY}
        request = asyncio.ensure_future(served.ask("run_folder", **fields))
        await asyncio.sleep(0.1)
        request.cancel()

    run(work)
    assert is_made.wait(60)
    assert not snapshot.run_folder(KEY).exists()


def test_large_files_are_hashed_while_received(tmp_path: Path) -> None:
    """The hash is complete with the last block, without another read, and not on the event loop."""
    incoming = safe_paths.IncomingFile(str(tmp_path), "big")
    data = content("big", 3000)
    for position in range(0, 3000, 1000):
        incoming.add(position, data[position : position + 1000])
    with pytest.raises(ValueError, match="where 3000 was next"):
        incoming.add(0, b"x")
    incoming.finish(3000, hashlib.sha256(data).hexdigest())
    assert (tmp_path / "big").read_bytes() == data


def test_reads_only_selected_parts(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run", {"model/a": b"1", "model/b": b"2", "logs/n1/0.log": b"3"})
    named = read_parts(folder, ("model", "logs/n1/0.log", "missing"))
    assert [entry[0] for entry in named.manifest] == ["logs/n1/0.log", "model/a", "model/b"]


def test_sends_input_once_per_shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hosts share a cache; a host with the same disk sees a marker file."""

    class Disk:
        def __init__(self, name: str, identity: str) -> None:
            self.name, self.identity = name, identity

        async def request(self, op: str, paths: list[str]) -> Any:
            return {"paths": [{"exists": path.startswith(f"/{self.name}/")} for path in paths]}

    async def remote_folder(
        channel: Disk, manifest: list[Any], where: Any, folder: str, name: str
    ) -> str:
        return f"/{channel.name}/{name}"

    monkeypatch.setattr(provisioner, "send_tree", remote_folder)
    nodes = [
        SimpleNamespace(name=disk_spec[1], channel=Disk(*disk_spec))
        for disk_spec in (("a", "1"), ("b", "2"), ("a", "3"))
    ]
    copies: Any = [(node, Copy("input0", "/runs/1", "/there")) for node in nodes]
    first, deferred = asyncio.run(provisioner._split_by_disk(copies, "run"))
    assert [node.channel.identity for node, _ in first] == ["1", "2"]
    assert [node.channel.identity for node, _ in deferred] == ["3"]


def test_receives_file_despite_removed_incoming_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder, removals = safe_paths.open_folder, []

    def open_and_lose(root: str, path: str, **options: Any) -> int:
        fd = open_folder(root, path, **options)
        if path == safe_paths.INCOMING and len(removals) < 2:
            (tmp_path / path).rmdir()
            removals.append(path)
        return fd

    monkeypatch.setattr(safe_paths, "open_folder", open_and_lose)
    file = safe_paths.IncomingFile(str(tmp_path), "small", durable=False)
    file.add(0, b"content")
    file.finish()
    assert (tmp_path / "small").read_bytes() == b"content"
    assert len(removals) == 2
