"""Sending and fetching: nothing unfinished has its final name, on either side."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents import ENDLESS, Served, agent_in_thread
from paceline.agent import server
from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.outputs import UNCOLLECTED
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.nodes import provisioner, survey
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import send_folder
from paceline.launch.results.collector import ResultCollector
from paceline.launch.results.outputs import OutputSync
from paceline.remote import channel as channel_module
from paceline.remote.channel import AgentRefusal, Channel, HostSilent
from paceline.rundir import signatures
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

BLOCK = 512
CUTS = 200
KEY = "0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for the agent; short blocks, so that little makes many."""
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


def below(root: Path) -> dict[str, bytes]:
    """What has its final name below ``root``: not what is still arriving or on its way out."""
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
        files = {file: content(f"{step}{file}", size)
                 for file, size in (("weights", 3 * BLOCK), ("state", 40))}  # fmt: skip
        files |= frozen or {}
        files["manifest.json"] = manifest_of(step, files)
        found |= {f"{step}/{file}": data for file, data in files.items()}
    return found


def manifest_of(step: int, files: dict[str, bytes]) -> bytes:
    entries = {file: FileEntry(hashlib.sha256(data).hexdigest(), len(data))
               for file, data in files.items()}  # fmt: skip
    return Manifest(step, entries, {}).encode()


def renamed(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    """The checkpoint of another name."""
    return {f"{name}/{path.partition('/')[2]}": data for path, data in files.items()}


def pointer(name: str) -> bytes:
    return json.dumps({"checkpoint": name}).encode()


# --- whole transfers


def run(work: Callable[[Served], Coroutine[Any, Any, Any]], left: int = ENDLESS) -> Any:
    async def go() -> Any:
        async with agent_in_thread(left) as served:
            return await work(served), served.line.passed

    return asyncio.run(asyncio.wait_for(go(), 30))


def test_a_tree_is_shipped(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", FILES), ())

    async def work(served: Served) -> dict[str, bytes]:
        root = await send_folder(served.node, tree, "code", "run1")
        assert served.node.copies["code"][0] == root
        return below(Path(root))

    assert run(work)[0] == FILES


MANY = {f"{at % 7}/{at}": content("many", at % 50) + b"%d" % (at % 90) for at in range(100)}


@pytest.mark.parametrize("piece", [1, 7, 99, 100, 1000])
def test_a_tree_of_many_files_comes_in_pieces(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ENTRY_BATCH", piece)
    tree = read_parts(fill(tmp_path / "project", MANY), ())

    async def work(served: Served) -> list[dict[str, bytes]]:
        roots = [await send_folder(served.node, tree, "code", "run1") for _ in range(2)]
        return [below(Path(root)) for root in roots]

    assert run(work)[0] == [MANY, MANY]


def test_a_file_of_many_that_changed_since_it_was_hashed_is_refused(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", MANY), ())
    (tmp_path / "project" / "3" / "3").write_bytes(b"other")

    async def work(served: Served) -> None:
        with pytest.raises(NodeError, match="changed since it was read for this run") as caught:
            await send_folder(served.node, tree, "code", "run1")
        assert caught.value.found == "3/3"
        assert "MiB" not in caught.value.remedy

    run(work)


def test_nodes_get_files_as_they_were_kept_whatever_became_of_them(
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
        return below(Path(await send_folder(served.node, tree, "code", "run1")))

    assert run(work)[0] == FILES | {"log": b"12"}


def test_a_folder_that_both_see_is_used_whatever_changes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = fill(tmp_path / "project", FILES)
    job = cast(Any, SimpleNamespace(ship=SimpleNamespace(value="auto")))
    tree = read_parts(ours, ())
    (ours / "a.py").write_bytes(b"edited")
    (ours / "empty").unlink()
    other = fill(tmp_path / "other", FILES | {"a.py": b"of another day"})
    as_now, lines = Tree.current_entries, iter("123456")

    def written_to(tree: Tree, paths: Collection[str]) -> Any:
        """As a log that somebody adds to while it is looked at."""
        (ours / "b" / "odd").write_text(next(lines))
        found = as_now(tree, paths)
        (ours / "b" / "odd").write_text(next(lines))
        return found

    async def work(served: Served) -> list[bool]:
        node = SimpleNamespace(channel=served.node.channel, host=Host("n1", "n1"))
        alike = []
        for place, look in ((None, as_now), (None, written_to), (str(other), as_now)):
            node.host = replace(node.host, workdir=place)
            monkeypatch.setattr(Tree, "current_entries", look)
            found = await survey._compare(cast(Any, node), job, tree)
            assert found is not None
            alike.append(not (found["missing"] or found["different"]))
        return alike

    assert run(work)[0] == [True, True, False]


def test_an_empty_tree_is_a_folder(tmp_path: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", {}), ())

    async def work(served: Served) -> bool:
        return Path(await send_folder(served.node, tree, "code", "run1")).is_dir()

    assert run(work)[0]


def test_messages_of_small_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 10 * files.FILE_OVERHEAD_BYTES)
    sizes = {**{f"e{at}": 0 for at in range(25)}, "l": 8 * files.FILE_OVERHEAD_BYTES, "m": 50}
    groups = list(files.grouped(list(sizes), sizes.__getitem__))
    assert [name for group in groups for name in group] == list(sizes)
    assert [len(group) for group in groups] == [10, 10, 6, 1]


def test_a_damaged_cache_is_filled_again(tmp_path: Path, cache: Path) -> None:
    tree = read_parts(fill(tmp_path / "project", FILES), ())

    async def work(served: Served) -> dict[str, bytes]:
        await send_folder(served.node, tree, "code", "run1")
        blob = cache / snapshot.blob_path(str(tree.manifest[0][1]))
        blob.write_bytes(b"x" * blob.stat().st_size)
        return below(Path(await send_folder(served.node, tree, "code", "run1")))

    assert run(work)[0] == FILES


def test_fetcher_brings_what_is_new(tmp_path: Path) -> None:
    there, home = fill(tmp_path / "there", FILES), tmp_path / "run"
    (there / "out").symlink_to("/etc")
    home.mkdir()
    manifest = [["a.py", hashlib.sha256(FILES["a.py"]).hexdigest(), 0o644, 100]]

    async def work(served: Served) -> list[str]:
        fetcher = Fetcher(home)
        return await fetcher.fetch(served.node.channel, str(there), manifest, home / "files" / "n1",
                                   skip=lambda path: path == "empty")  # fmt: skip

    assert sorted(run(work)[0]) == ["b/even", "b/odd"]
    assert below(home) == {f"files/n1/{name}": FILES[name] for name in ("b/even", "b/odd")}


def test_fetcher_follows_no_link_of_the_run_directory(tmp_path: Path) -> None:
    there, home = fill(tmp_path / "there", FILES), tmp_path / "run"
    (tmp_path / "elsewhere").mkdir()
    home.mkdir()
    Arrivals(home)  # the folder is the run's own
    (home / "b").symlink_to(tmp_path / "elsewhere")

    async def work(served: Served) -> None:
        await Fetcher(home).fetch(served.node.channel, str(there), None, home)

    with pytest.raises(NodeError, match="cannot write what n1 sends") as caught:
        run(work)
    assert "b is a symbolic link" in caught.value.found
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_a_file_that_changes_while_it_is_read_does_not_come(tmp_path: Path, change: str) -> None:
    there, home = fill(tmp_path / "there", {"f": bytes(BLOCK * 3)}), tmp_path / "run"
    home.mkdir()
    size = {"shorter": BLOCK * 4, "longer": BLOCK * 2, "gone": 5}[change]

    async def work(served: Served) -> None:
        name = "none" if change == "gone" else "f"
        await Fetcher(home).fetch_files(served.node.channel, str(there), {name: size}, home)

    with pytest.raises(AgentRefusal):
        run(work)
    assert below(home) == {}
    assert not list((home / safe_paths.INCOMING).iterdir())


def test_what_is_not_what_was_read_there_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, home = fill(tmp_path / "there", {"f": bytes(BLOCK * 3)}), tmp_path / "run"
    home.mkdir()
    add = safe_paths.IncomingFile.add
    monkeypatch.setattr(
        safe_paths.IncomingFile, "add", lambda self, at, data: add(self, at, b"x" + data[1:])
    )

    async def work(served: Served) -> None:
        await Fetcher(home).fetch_files(served.node.channel, str(there), {"f": BLOCK * 3}, home)

    with pytest.raises(NodeError, match="did not arrive unchanged"):
        run(work)
    assert below(home) == {}


def test_what_is_to_be_typed_to_copy_files_by_hand() -> None:
    channel = cast(Channel, SimpleNamespace(host=Host("n1"), ssh_config=None))
    error = write_error(channel, "/x/$(touch here)", Path("/run"), OSError(5, "no", "/run/a"))
    assert error.remedy.endswith("by hand: scp -r 'n1:/x/$(touch here)' .")
    there = Host("n1", address="fd00::1", user="ada", port=2222, identity_file="/k")
    channel = cast(Channel, SimpleNamespace(host=there, ssh_config=Path("/lab/ssh")))
    assert copy_command(channel, "/x") == "scp -F /lab/ssh -i /k -P 2222 -r 'ada@[fd00::1]:/x' ."


# --- the trained model, when rank 0 is on another host by now than when it was written

MODEL = {"model/model.safetensors": content("w", 900), "model/config.json": b'{"sha256": "ab"}'}


def saved_by(node: Node, home: RunDirectory) -> tuple[ResultCollector, list[str]]:
    """What is expected after this node's rank 0 has saved a model, and what the user was told."""
    notes: list[str] = []
    results = ResultCollector(home, notes.append, OutputSync(home.path, notes.append))
    results.set_first_node(node)
    results.on_event(node, Event("model saved", node.name, 0, fields={"sha256": "ab"}))
    return results, notes


def fleet_of(*nodes: Node) -> Fleet:
    return cast(Fleet, SimpleNamespace(nodes=[*nodes]))


def hosted(served: Served, name: str, folder: Path | None) -> Node:
    """A host with a run folder of its own, or one that sees the run directory."""
    here = folder is None
    return Node(Host(name), served.node.channel, shared_run_dir=here, run_folder=str(folder or ""))


def test_files_that_were_set_aside_are_not_called_new(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path / "run")
    there = fill(tmp_path / "job/code", {"new.bin": b"x", ".a.pt.superseded": b"y",
                                         ".step_1.superseded-2/b.pt": b"z"})  # fmt: skip

    async def work(served: Served) -> None:
        node = hosted(served, "n1", None)
        node.copies["code"] = str(there), []
        notes: list[str] = []
        results = ResultCollector(home, notes.append, OutputSync(home.path, notes.append))
        await results.fetch(fleet_of(node))
        assert [note for note in notes if "1 new file of n1: " in note]
        assert [note for note in notes if "2 files of n1, set aside for rank 0's: " in note]

    run(work)


def test_files_outside_the_project_arrive_before_the_jobs_folder_is_removed(
    tmp_path: Path,
) -> None:
    """A script may write to ``../out``, which is beside the copy of the code on a host."""
    home = RunDirectory(tmp_path / "run")
    job = fill(tmp_path / "job", {"code/train.py": b"x", "paceline/a.py": b"y", ".own": b"z",
                                  "out/step_1/w.pt": b"w"})  # fmt: skip

    async def work(served: Served) -> None:
        node = hosted(served, "n1", None)
        node.copies["code"] = (
            str(job / "code"),
            [["train.py", hashlib.sha256(b"x").hexdigest(), 0o644, 1]],
        )
        notes: list[str] = []
        results = ResultCollector(home, notes.append, OutputSync(home.path, notes.append))
        await results.fetch(fleet_of(node))
        assert len(notes) == 1
        assert "1 file that the script wrote outside the project on n1: " in notes[0]

    run(work)
    arrived = [path for path in (home.path / "files").rglob("*") if path.is_file()]
    assert arrived == [home.path / "files/n1/outside-project/out/step_1/w.pt"]


@pytest.mark.parametrize("is_full", [False, True])
def test_results_that_do_not_fit_stay_on_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The launcher says goodbye as after every run, and the agent then removes its job's folder."""
    home = RunDirectory(tmp_path / "run")
    job = fill(tmp_path / "job", {"code/.hidden": b"h", "code/out/last.bin": b"w",
                                  snapshot.OWNER_FILE: snapshot._AGENT_ID.encode()})  # fmt: skip
    there = snapshot.make_run_folder(KEY)
    monkeypatch.setattr(results, "room_problem", lambda *_: "no room" if is_full else "")

    async def work(served: Served) -> None:
        served.agent.folders.append(job)
        served.agent.run_keys[KEY] = []
        served.agent.output_roots[str(job / "code")] = 0
        served.agent.job.ranks = [RankProcess(0, 0)]
        node = hosted(served, "n1", there)
        node.copies["code"] = str(job / "code"), []
        notes: list[str] = []
        collector = ResultCollector(home, notes.append, OutputSync(home.path, notes.append))
        collector.set_first_node(node)
        await collector.fetch(fleet_of(node))
        assert any("n1 keeps its files for a month" in note for note in notes) == is_full
        lacking = collector.missing_results(fleet_of(node))
        problem = "could not fetch the results of n1: the results on n1 do not fit on this disk"
        assert (lacking is not None and lacking.headline == problem) is is_full
        node.lost = is_full
        lacking = collector.missing_results(fleet_of(node))
        assert (lacking is not None and lacking.kind == "lost") is is_full
        node.lost = False
        await collector.discard_run_folders(fleet_of(node))
        await served.ask("bye")

    run(work)
    assert (job / "code/.hidden").exists() == is_full
    assert (there / UNCOLLECTED / "out/last.bin").exists() == is_full
    assert (home.path / "files/n1/out/last.bin").exists() != is_full
    home.close()


def test_a_model_comes_from_the_host_that_wrote_it(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), fill(tmp_path / "node", MODEL)

    async def work(served: Served) -> None:
        writer, first = hosted(served, "n1", there), hosted(served, "n2", None)
        results, notes = saved_by(writer, home)
        results.set_first_node(first)
        await results.fetch(fleet_of(writer, first))
        assert {name: (home.path / name).read_bytes() for name in MODEL} == MODEL
        assert results.missing_results(fleet_of(writer, first)) is None
        assert not notes

    run(work)
    home.close()


def test_only_the_node_that_saves_is_believed(tmp_path: Path) -> None:
    home, forged = RunDirectory(tmp_path / "run"), fill(tmp_path / "n2", MODEL)
    real = {**MODEL, "model/model.safetensors": content("r", 900)}
    there = fill(tmp_path / "n1", real)

    async def work(served: Served) -> None:
        first, other = hosted(served, "n1", there), hosted(served, "n2", forged)
        results, _ = saved_by(first, home)
        for kind in ("model saved", "model kept elsewhere"):
            fields = {"sha256": "cd", "folder": str(forged)}
            results.on_event(other, Event(kind, "n2", 1, fields=fields))
        await results.fetch(fleet_of(first, other))
        assert {name: (home.path / name).read_bytes() for name in MODEL} == real

    run(work)
    home.close()


@pytest.mark.parametrize("seen", [False, True])
def test_a_model_whose_host_went_away_is_lacking(tmp_path: Path, seen: bool) -> None:
    """Unless the host that has rank 0 now sees the same disk."""
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    own = fill(tmp_path / "other", {"config.json": b"{}"})
    fill(there, MODEL)

    async def work(served: Served) -> None:
        writer = hosted(served, "n1", there)
        first = hosted(served, "n2", there if seen else own)
        results, notes = saved_by(writer, home)
        results.set_first_node(first)
        writer.lost, writer.loss_reason, writer.lost_at = True, "it was silent for 3 s", 7.0
        await results.fetch(fleet_of(writer, first))
        lacking = results.missing_results(fleet_of(first))  # a spare may have its place
        if seen:
            assert lacking is None
            return
        where = f"the trained model was not fetched: it is in {there}/model"
        headline = f"it was silent for 3 s; {where} there"
        assert lacking == Failure("lost", "n1", None, 7.0, headline=headline)
        assert notes == [f"paceline: {where} on n1"]

    run(work)
    home.close()


def test_a_newer_model_of_another_host_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), fill(tmp_path / "node", MODEL)

    async def work(served: Served) -> None:
        gone, first = hosted(served, "n1", tmp_path / "gone"), hosted(served, "n2", there)
        results, _ = saved_by(gone, home)
        gone.lost = True
        results.set_first_node(first)
        results.on_event(first, Event("model saved", "n2", 1, fields={"sha256": "ab"}))
        await results.fetch(fleet_of(gone, first))
        assert results.missing_results(fleet_of(gone, first)) is None

    run(work)
    home.close()


# --- checkpoints


def checkpoints_of(served: Served, home: RunDirectory, there: Path) -> CheckpointFetcher:
    return CheckpointFetcher(served.node.channel, str(there), home.path, Fetcher(home.path))


def test_checkpoints_come_as_they_are_made(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    made, ours = there / "checkpoints", home.path / "checkpoints"
    fill(made, {**steps(10, 20), "latest.json": pointer("20"), "writer.json": b"me",
                 ".30.77.tmp/weights": b"unfinished"})  # fmt: skip

    async def work(served: Served) -> None:
        follow = checkpoints_of(served, home, there)
        await follow.sync()
        assert below(ours) == {**steps(10, 20), "latest.json": pointer("20")}
        fill(made, {**steps(30), "latest.json": pointer("30")})
        for file in (made / "10").iterdir():
            file.unlink()
        follow.schedule()
        follow.schedule()
        await follow.finish()
        assert below(ours) == {**steps(20, 30), "latest.json": pointer("30")}

    run(work)
    home.close()


def test_frozen_weights_come_once(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    made, ours = there / "checkpoints", home.path / "checkpoints"
    weights = content("frozen", 3 * BLOCK)
    frozen = {frozen_file(hashlib.sha256(weights).hexdigest()): weights}
    fill(made, steps(10, frozen=frozen))

    async def work(served: Served) -> None:
        follow = checkpoints_of(served, home, there)
        await follow.sync()
        fill(made, steps(20, frozen=frozen))
        (name,) = frozen
        (made / "20" / name).unlink()
        (made / "20" / name).hardlink_to(made / "10" / name)
        await follow.sync()
        assert below(ours) == below(made)
        assert (ours / "20" / name).samefile(ours / "10" / name)

    run(work)
    home.close()


def test_forged_frozen_weights_here_keep_no_checkpoint_away(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    weights = content("frozen", 3 * BLOCK)
    name = frozen_file(hashlib.sha256(weights).hexdigest())
    honest = {"20/weights": b"w", f"20/{name}": weights}
    honest["20/manifest.json"] = manifest_of(20, {"weights": b"w", name: weights})
    fill(home.path / "checkpoints", {**steps(10), f"10/{name}": content("forged", 3 * BLOCK)})
    fill(there / "checkpoints", honest)

    async def work(served: Served) -> None:
        await checkpoints_of(served, home, there).sync()

    run(work)
    assert honest.items() <= below(home.path / "checkpoints").items()
    home.close()


def test_a_checkpoint_that_the_node_is_removing_is_not_called_different(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(home.path / "checkpoints", steps(10, 20))
    fill(there / "checkpoints", steps(10, 20))
    (there / "checkpoints" / "10" / "manifest.json").unlink()
    noted: list[str] = []

    async def work(served: Served) -> None:
        fetcher = Fetcher(home.path)
        await CheckpointFetcher(served.node.channel, str(there), home.path, fetcher,
                                note=noted.append).sync()  # fmt: skip
        assert not fetcher.incomplete_hosts

    run(work)
    assert not noted
    assert below(home.path / "checkpoints") == steps(10, 20)
    home.close()


def test_without_a_limit_only_checkpoints_of_this_run_are_removed_here(tmp_path: Path) -> None:
    """Others stay: the best, say, which was copied to another node than rank 0's."""
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    made, ours = there / "checkpoints", home.path / "checkpoints"
    fill(ours, steps(10, 20))
    fill(made, steps(20, 30, 40))

    async def work(served: Served) -> None:
        follow = checkpoints_of(served, home, there)
        await follow.sync()
        assert below(ours) == steps(10, 20, 30, 40)
        found = {each.name: each.status for each in signatures.verify(home.path)}
        assert found == {"40": "signed", "30": "signed", "20": "unsigned", "10": "unsigned"}
        for step in ("20", "30"):
            for file in (made / step).iterdir():
                file.unlink()
        await follow.sync()
        assert below(ours) == steps(10, 20, 40)

    run(work)
    home.close()


def test_a_checkpoint_in_a_shared_run_directory_is_signed_when_it_is_made(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path / "run")
    fill(home.path / "checkpoints", steps(10, 20))

    async def work(served: Served) -> None:
        first = hosted(served, "n1", None)
        results = ResultCollector(home, [].append, OutputSync(home.path, [].append))
        results.set_first_node(first)
        results.on_event(first, Event("checkpoint", first.name, 0, fields={"step": 20}))
        await results.fetch(fleet_of())

    run(work)
    assert [each.status for each in signatures.verify(home.path)] == ["signed", "unsigned"]
    home.close()


def test_resumed_runs_keep_as_many_checkpoints_and_one_of_before(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    made, ours = there / "checkpoints", home.path / "checkpoints"

    async def work(served: Served) -> None:
        for start in range(3):
            follow = CheckpointFetcher(served.node.channel, str(there), home.path,
                                       Fetcher(home.path), keep=3)  # fmt: skip
            for step in range(10 * start, 10 * start + 6):
                fill(made, steps(step))
                for file in made.glob(f"{step - 3}/*" if step % 10 > 2 else f"{step - 7}/*"):
                    file.unlink()
                await follow.sync()
            before = steps(10 * start - 5) if start else {}
            assert below(ours) == {**before, **steps(*range(10 * start + 3, 10 * start + 6))}

    run(work)
    home.close()


def test_of_all_the_first_nodes_had_no_more_stay_here_than_the_script_keeps(tmp_path: Path) -> None:
    """Nor does any get lost: the best stays, and what has not come yet takes nobody's place."""
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    made, ours = there / "checkpoints", home.path / "checkpoints"
    fill(ours, {**steps(10, 20, 30, 40), "best.json": b'{"step": 10}'})
    fill(made, steps(50))

    async def work(served: Served) -> None:
        channel, fetcher = served.node.channel, Fetcher(home.path)
        follow = CheckpointFetcher(channel, str(there), home.path, fetcher, keep=3)
        await follow.sync()
        assert below(ours) == {**steps(10, 30, 40, 50), "best.json": b'{"step": 10}'}

    run(work)
    home.close()


def test_a_half_checkpoint_here_counts_for_none(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(there / "checkpoints", steps(10))
    fill(home.path / "checkpoints", {"10/weights": b"half"})

    async def work(served: Served) -> None:
        await checkpoints_of(served, home, there).sync()

    run(work)
    assert below(home.path / "checkpoints") == steps(10)
    home.close()


def test_the_other_checkpoints_come_when_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(there / "checkpoints", steps(10, 20))
    sizes = checkpoints._remote_sizes

    async def believed(*where: Any) -> dict[str, int]:
        listed = await sizes(*where)
        fill(there / "checkpoints", {"10/weights": bytes(4 * BLOCK)})  # it is longer by now
        return listed

    monkeypatch.setattr(checkpoints, "_remote_sizes", believed)

    async def work(served: Served) -> None:
        with pytest.raises(AgentRefusal):
            await checkpoints_of(served, home, there).sync()

    run(work)
    assert below(home.path / "checkpoints") == steps(20)
    home.close()


@pytest.mark.parametrize("claims", ["manifest", "listing"])
def test_a_checkpoint_larger_than_the_disk_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: str
) -> None:
    """Only files and sizes of the manifest are fetched, and only those for which there is room."""
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    entry = FileEntry("0" * 64, 1 << 50)
    large = Manifest(77, {"weights.safetensors": entry}, {}).encode()
    manifest = large if claims == "manifest" else steps(77)["77/manifest.json"]
    fill(there / "checkpoints", {**steps(10), "10/extra": b"x", "77/manifest.json": manifest})
    list_files, fetched, noted = Fetcher.list_files, list[str](), list[str]()

    async def listed(self: Fetcher, *where: Any) -> dict[str, int]:
        return {**await list_files(self, *where), "77/weights.safetensors": 1 << 50}

    read = server.OPERATIONS["read_block"]
    monkeypatch.setattr(Fetcher, "list_files", listed)
    monkeypatch.setitem(
        server.OPERATIONS, "read_block",
        lambda agent, request, blob: (fetched.append(request["path"]), read(agent, request, blob)),
    )  # fmt: skip

    async def work(served: Served) -> None:
        follow = CheckpointFetcher(
            served.node.channel, str(there), home.path, Fetcher(home.path), note=noted.append
        )
        for _ in range(2):
            await follow.sync()

    run(work)
    assert below(home.path / "checkpoints") == steps(10)
    assert {path for path in fetched if path.startswith("77/")} == {"77/manifest.json"}
    assert "10/extra" not in fetched
    assert fetched.count("10/manifest.json") == 1  # a file that no manifest names is no news
    reason = {"manifest": "the disk has no room: 1,125,899,906.8 MB needed",
              "listing": "it is damaged: state is not the file that its manifest describes",
              }[claims]  # fmt: skip
    (note,) = noted
    assert f"checkpoint 77 of n1 was left there: {reason}" in note
    home.close()


def test_very_many_listed_names_are_checked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    there.mkdir()
    listed = [{"path": "77/" + "a/" * 45 + str(number), "size": 0} for number in range(2000)]
    monkeypatch.setattr(snapshot, "changed_files", lambda root, manifest: listed)
    threads, noted = set[int](), list[str]()

    def check(path: str) -> str:
        threads.add(threading.get_ident())
        return "no"

    monkeypatch.setattr(safe_paths, "refusal_reason", check)
    monkeypatch.setattr(results, "refusal_reason", check)

    async def work(served: Served) -> None:
        fetcher = Fetcher(home.path, noted.append)
        await CheckpointFetcher(served.node.channel, str(there), home.path, fetcher).sync()
        await fetcher.fetch(served.node.channel, str(there), None, home.path)
        assert threads
        assert threading.get_ident() not in threads

    run(work)
    assert f"2,000 files stayed on n1 in {there}" in noted[0].replace("2000", "2,000")
    home.close()


def test_more_results_than_are_fetched_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fill(tmp_path / "there", FILES)
    monkeypatch.setattr(snapshot, "MAX_RESULTS", 2)

    async def work(served: Served) -> None:
        await Fetcher(tmp_path).fetch(served.node.channel, str(there), None, tmp_path)

    with pytest.raises(AgentRefusal) as caught:
        run(work)
    assert f"more than 2 new files in {there}" in caught.value.found


@pytest.mark.parametrize("op", ["list_results", "read_block"])
def test_a_host_that_does_not_answer_is_named_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    there, home = fill(tmp_path / "there", FILES), tmp_path / "run"
    home.mkdir()
    monkeypatch.setattr(channel_module, "NOTE_AFTER_S", 0.05)
    monkeypatch.setattr(channel_module, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setitem(server.OPERATIONS, op, lambda *_: None)
    late: list[str] = []

    async def work(served: Served) -> None:
        served.node.channel.on_late = late.append
        await Fetcher(home).fetch(served.node.channel, str(there), None, home)

    with pytest.raises(HostSilent, match=f"n1 has not answered the request {op} for"):
        run(work)
    assert late == [op]


def test_a_silent_host_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint was being fetched when the training ended; then a model is to be fetched."""
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    monkeypatch.setattr(channel_module, "NOTE_AFTER_S", 0.05)
    monkeypatch.setattr(channel_module, "ANSWER_TIMEOUT_S", 0.3)
    asked: list[str] = []
    monkeypatch.setitem(
        server.OPERATIONS, "list_results", lambda agent, request, blob: asked.append(request["op"])
    )

    async def work(served: Served) -> None:
        node = hosted(served, "n1", there)
        results, notes = saved_by(node, home)
        results.set_first_node(node)
        results.on_event(node, Event("checkpoint", "n1", 0, fields={"step": 10}))
        await asyncio.sleep(0)
        await results.fetch(fleet_of(node))
        (note,) = notes
        assert "could not fetch the results of n1: n1 has not answered the request list" in note

    run(work)
    assert asked == ["list_results"]
    home.close()


def test_a_node_without_newer_checkpoints_removes_none_here() -> None:
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
                      "900.7/weights": b"x", "900.7/state": b"x"},
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_no_checkpoint_takes_the_place_of_none(
    tmp_path: Path, planted: str, keep: int
) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(home.path / "checkpoints", steps(10, 20, 30))
    fill(there / "checkpoints", {"30/weights": b"other", ".git/config": b"x", **PLANTED[planted]})
    noted: list[str] = []

    async def work(served: Served) -> None:
        for _ in range(2):
            await CheckpointFetcher(served.node.channel, str(there), home.path, Fetcher(home.path),
                                    keep=keep, note=noted.append).sync()  # fmt: skip

    run(work)
    assert below(home.path / "checkpoints") == steps(10, 20, 30)
    assert not [*(home.path / "checkpoints").glob(".*.tmp")]
    host = "of n1 was left there"  # said by each of the two
    assert any(f"checkpoint 30 {host}" in note for note in noted)
    if name := next((path.split("/")[0] for path in PLANTED[planted] if path[0] == "9"), ""):
        is_checkpoint = parse_version(name) is not None
        assert sum(f"checkpoint {name} {host}" in note for note in noted) == 2 * is_checkpoint
    home.close()


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_intact_fakes_leave_the_newest_and_the_best_here(tmp_path: Path, keep: int) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    ours, made = home.path / "checkpoints", there / "checkpoints"
    fill(ours, {**steps(10, 20, 30), "40/weights": b"half", "best.json": pointer("10")})
    fakes = {f"90{n}.{n}": renamed(steps(900 + n), f"90{n}.{n}") for n in range(2, 6)}

    async def work(served: Served) -> None:
        follow = CheckpointFetcher(served.node.channel, str(there), home.path, Fetcher(home.path),
                                   keep=keep)  # fmt: skip
        fill(made, steps(10, 20, 30))
        await follow.sync()
        for step in (10, 20, 30):
            for file in (made / str(step)).iterdir():
                file.unlink()
        for name, fake in fakes.items():
            fill(made, {**fake, "best.json": pointer(name), "latest.json": pointer(name)})
            await follow.sync()

    run(work)
    present = below(ours)
    assert {**steps(10, 30), "best.json": pointer("905.5")}.items() <= present.items()
    assert (keep == 0) == ("20/weights" in present)
    assert fakes["905.5"].items() <= present.items()
    home.close()


def test_a_few_new_writers_are_plausible(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(home.path / "checkpoints", renamed(steps(10), "10.5"))
    new, most = renamed(steps(900), "900.6"), 5 + checkpoints.MAX_NEW_WRITERS
    last, beyond = (renamed(steps(7), f"7.{token}") for token in (most, most + 1))
    fill(there / "checkpoints", {**new, **last, **beyond})

    async def work(served: Served) -> None:
        await checkpoints_of(served, home, there).sync()

    run(work)
    assert below(home.path / "checkpoints") == {**renamed(steps(10), "10.5"), **new, **last}
    home.close()


def test_no_fewer_checkpoints_stay_here_than_the_script_keeps(tmp_path: Path) -> None:
    home, there = RunDirectory(tmp_path / "run"), tmp_path / "node"
    fill(home.path / "checkpoints", steps(10, 20, 30))
    fill(there / "checkpoints", steps(900))

    async def work(served: Served) -> None:
        await CheckpointFetcher(served.node.channel, str(there), home.path, Fetcher(home.path),
                                keep=2).sync()  # fmt: skip

    run(work)
    assert below(home.path / "checkpoints") == steps(30, 900)
    home.close()


def test_checkpoints_are_sent_as_a_whole(tmp_path: Path, cache: Path) -> None:
    home = RunDirectory(tmp_path / "run")
    fill(
        home.path / "checkpoints",
        {**steps(10, 20, 30), "latest.json": b"ours", "writer.json": b"x"},
    )
    there = cache / "runs" / home.key / "checkpoints"

    async def work(served: Served) -> None:
        folder = str(snapshot.make_run_folder(home.key))
        fill(there, {**steps(10), "20/weights": steps(20)["20/weights"], "30/weights": b"newer",
                     "latest.json": b"theirs"})  # fmt: skip
        await send_checkpoints(served.node.channel, folder, home)
        await served.ask("discard_run_folder", key=KEY)  # of another run
        assert below(there) == {**steps(10, 20), "30/weights": b"newer", "latest.json": b"theirs"}

    run(work)
    home.close()
    assert below(there)  # it was not said that it may go


# --- cut lines


async def ship(served: Served, tmp_path: Path, home: RunDirectory) -> None:
    tree = read_parts(tmp_path / "project", ())
    await send_folder(served.node, tree, "code", "run1")


async def send(served: Served, tmp_path: Path, home: RunDirectory) -> None:
    folder = str(snapshot.make_run_folder(home.key))
    await send_checkpoints(served.node.channel, folder, home)


async def fetch(served: Served, tmp_path: Path, home: RunDirectory) -> None:
    await Fetcher(home.path).fetch(
        served.node.channel, str(tmp_path / "project"), None, home.path / "files"
    )


async def follow(served: Served, tmp_path: Path, home: RunDirectory) -> None:
    await checkpoints_of(served, home, tmp_path / "node").sync()


WAYS = {"shipping": ship, "sending checkpoints": send, "fetching": fetch, "mirroring": follow}


def right(name: str, data: bytes) -> bool:
    """Whether a file with its final name is what belongs there."""
    wanted = {**FILES, **steps(10, 20, 30)}
    if name.split("/")[0] == "blobs":
        return hashlib.sha256(data).hexdigest() == name.split("/")[-1]
    return any(name.endswith(end) and data == whole for end, whole in wanted.items())


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_line_leaves_no_wrong_file(way: str, tmp_path: Path, cache: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The connection dies at 50 moments for each way: 200 in all, the same ones each time."""
    fill(tmp_path / "project", FILES)
    fill(tmp_path / "node" / "checkpoints", steps(10, 20))
    chosen = random.Random(way)

    def once(number: int, left: int) -> tuple[bool, int]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{number}"))
        home = RunDirectory(tmp_path / f"run{number}")
        fill(home.path / "checkpoints", steps(30) if way != "mirroring" else {})

        async def work(served: Served) -> bool:
            with contextlib.suppress(PacelineError, ConnectionError):
                await WAYS[way](served, tmp_path, home)
                return True
            return False

        whole, passed = run(work, left)
        home.close()
        for root in (home.path, tmp_path / f"{number}" / "paceline"):
            for name, data in below(root).items():
                assert right(name, data), (left, name)
        if way == "mirroring":  # a checkpoint is there as a whole or not at all
            kept = below(home.path / "checkpoints")
            assert kept in ({}, steps(10), steps(20), steps(10, 20)), left
        return whole, passed

    whole, passed = once(0, ENDLESS)
    assert whole
    cuts = [chosen.randrange(passed) for _ in range(CUTS // len(WAYS))]
    for number, left in enumerate(cuts, 1):
        once(number, left)
    assert once(len(cuts) + 1, ENDLESS)[0]


# --- the agent's loop


def test_a_hanging_disk_does_not_stop_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever looks at a path of a dead mount, leases are still renewed."""
    dead, free = str(tmp_path / "dead"), threading.Event()
    found, opened = os.stat, os.open

    def stat(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).startswith(dead):
            free.wait(20)
        return found(path, *rest, **more)

    def open_(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).startswith(dead):
            free.wait(20)
        return opened(path, *rest, **more)

    async def work(served: Served) -> None:
        monkeypatch.setattr(os, "stat", stat)
        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setenv("XDG_CACHE_HOME", dead)
        digest = hashlib.sha256(b"").hexdigest()
        entry = ["f", digest, 0o644, 0]
        block = {"offset": 0, "last": True, "size": 0, "sha256": digest}
        whole = {"first": True, "last": True}
        asked = [
            ("look", {"paths": [dead]}),
            ("which", {"program": f"{dead}/x", "workdir": "/"}),
            ("disk", {"paths": [dead]}),
            ("run_folder", {"path": dead, "token_file": "t", "token": "t", "key": KEY}),
            ("put_blob", block),
            ("put_file", {**block, "key": KEY, "path": "f"}),
            ("place", {"key": KEY, "path": "f", "target": "g"}),
            ("put_blobs", {"contents": [[digest, 0]]}),
            ("build_tree", {"folder": "r", "name": "code", "manifest": [entry], **whole}),
            ("lacking_blobs", {"manifest": [entry]}),
            ("compare_tree", {"root": dead, "manifest": [entry]}),
            ("list_results", {"root": dead, "manifest": None}),
            ("read_block", {"root": dead, "path": "f", "offset": 0, "count": 1, "last": True}),
            ("prepare", {"python": f"{dead}/python", "preload": [], "env": {}, "token": "t"}),
        ]
        waiting = [asyncio.ensure_future(served.ask(op, **fields)) for op, fields in asked]
        for _ in range(5):
            await asyncio.wait_for(served.ask("lease", seconds=60.0), 5)
        free.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(work)


def test_large_files_are_hashed_as_they_come(tmp_path: Path) -> None:
    """No second reading, and none on the loop: the hash is known with the last block."""
    arriving = safe_paths.IncomingFile(str(tmp_path), "big")
    data = content("big", 3000)
    for at in range(0, 3000, 1000):
        arriving.add(at, data[at : at + 1000])
    with pytest.raises(ValueError, match="where 3000 was next"):
        arriving.add(0, b"x")
    arriving.finish(3000, hashlib.sha256(data).hexdigest())
    assert (tmp_path / "big").read_bytes() == data


def test_named_parts_of_a_folder_alone_are_read(tmp_path: Path) -> None:
    folder = fill(tmp_path / "run", {"model/a": b"1", "model/b": b"2", "logs/n1/0.log": b"3"})
    named = read_parts(folder, ("model", "logs/n1/0.log", "missing"))
    assert [entry[0] for entry in named.manifest] == ["logs/n1/0.log", "model/a", "model/b"]


def test_hosts_of_one_disk_get_a_large_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts, two of which have one cache; whoever has the disk sees a sign."""

    class Disk:
        def __init__(self, name: str, identity: str) -> None:
            self.name, self.identity = name, identity

        async def request(self, op: str, paths: list[str]) -> Any:
            return {"paths": [{"exists": path.startswith(f"/{self.name}/")} for path in paths]}

    async def made(channel: Disk, manifest: list[Any], where: Any, folder: str, name: str) -> str:
        return f"/{channel.name}/{name}"

    monkeypatch.setattr(provisioner, "send_tree", made)
    nodes = [
        SimpleNamespace(name=one[1], channel=Disk(*one))
        for one in (("a", "1"), ("b", "2"), ("a", "3"))
    ]
    copies: Any = [(node, Copy("input0", "/runs/1", "/there")) for node in nodes]
    first, later = asyncio.run(provisioner._split_by_disk(copies, "run"))
    assert [node.channel.identity for node, _ in first] == ["1", "2"]
    assert [node.channel.identity for node, _ in later] == ["3"]


def test_a_file_is_received_while_another_receiver_removes_the_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder, removals = safe_paths.open_folder, []

    def open_and_lose(root: str, path: str, **more: Any) -> int:
        fd = open_folder(root, path, **more)
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
