"""Tests fetching results from nodes: their names, and which files they replace."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_transfers import cache, fill, run

from each_case import each_case
from paceline.agent.files import safe_paths
from paceline.rundir import arrivals
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.directory import RunDirectory
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.transfer.follow import is_mirrored
from paceline.transfer.results import Fetcher

__all__ = ["cache"]  # a fixture


PROJECT = {"train.py": b"mine", "torch.py": b"mine too", "config.json": b"mine",
           "model/net.py": b"mine", "files/n1/old.txt": b"mine", "out/a.png": b"mine"}  # fmt: skip


def fetch_files(
    run_dir: Path, planted: dict[str, bytes], node_dir: Path, backs_up: bool = True
) -> list[str]:
    """Fetches planted files from a node; returns the notes for the user."""
    notes: list[str] = []
    fill(node_dir, planted)

    async def work(served: Any) -> None:
        fetcher = Fetcher(run_dir, notes.append)
        fetcher.keeps_earlier = backs_up
        await fetcher.fetch(
            served.node.channel, str(node_dir), None, run_dir, skip=names.is_reserved
        )

    run(work)
    return notes


def content(folder: Path) -> dict[str, bytes]:
    contents = {}
    for parent, _, files in safe_paths.walk(str(folder)):
        for name in files:
            path = f"{parent}/{name}" if parent else name
            if not path.startswith(".paceline"):
                contents[path] = (folder / path).read_bytes()
    return contents


def test_fetch_into_project_keeps_its_files(tmp_path: Path) -> None:
    """No code is fetched into it, nor any file that programs load by themselves."""
    run_dir, node_dir = fill(tmp_path / "project", PROJECT), tmp_path / "node"
    RunDirectory(run_dir).close()
    planted = {**dict.fromkeys(PROJECT, b"evil"), "sitecustomize.py": b"evil", "x/__init__.py": b"",
               "conftest.py": b"evil", "out.txt": b"a result", ".envrc": b"evil",
               "model/model.safetensors": b"weights", "model/x.py": b"evil"}  # fmt: skip
    notes = fetch_files(run_dir, planted, node_dir)
    contents = content(run_dir)
    assert {name: contents[name] for name in PROJECT} == PROJECT
    assert {name for name in contents if not name.startswith("files/")} == {
        *(name for name in PROJECT if not name.startswith("files/")), "model/model.safetensors"
    }  # fmt: skip
    assert contents["files/n1/out.txt"] == b"a result"
    assert contents["files/n1/train.py.from-n1"] == b"evil"
    (note,) = notes
    assert "came to another place" in note
    fetch_files(run_dir, {"out.txt": b"a newer result", "old.txt": b"evil"}, node_dir)
    assert content(run_dir)["files/n1/out.txt"] == b"a newer result"
    assert content(run_dir)["files/n1/old.txt"] == b"mine"
    assert content(run_dir)["files/n1-2/old.txt"] == b"evil"


@pytest.mark.parametrize(
    ("path", "host", "place"),
    [
        ("files/n1/gen.py", "n1", "files/n1/gen.py.from-n1"),
        ("files/n1/sub/Makefile", "n1", "files/n1/sub/Makefile.from-n1"),
        ("files/n1/sub/a.pt", "n1", "files/n1/sub/a.pt"),
        ("n1/gen.py", "n1", "files/n1/n1/gen.py.from-n1"),
        ("conftest.py", "gpu1.una.py", "files/gpu1.una.py/conftest.py.from-gpu1_una_py"),
        (f"{'a' * 251}.py", "n1", f"files/n1/{'a' * 247}.from-n1"),
    ],
)
def test_code_gets_name_that_no_program_looks_for(
    tmp_path: Path, path: str, host: str, place: str
) -> None:
    assert Arrivals(tmp_path).place(path, host) == place


def test_backs_up_differing_files_of_previous_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal files are not backed up. After a resume, new files replace old ones."""
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(strftime=lambda _: "20260101-000000"))
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    first = {"model.pt": b"first", "same.txt": b"same", "model/model.safetensors": b"1"}
    RunDirectory(run_dir).close()
    assert fetch_files(run_dir, {**first, "model.pt": b"zero"}, node_dir) == []
    assert fetch_files(run_dir, first, node_dir) == []
    RunDirectory(run_dir).close()
    (note,) = fetch_files(run_dir, {**first, "model.pt": b"second", "more.txt": b""}, node_dir)
    assert "files of an earlier start that differ moved to " in note
    (backup,) = run_dir.glob("files-before-*")
    assert content(backup) == {"model.pt": b"first"}
    assert content(run_dir)["model.pt"] == b"second"
    fetch_files(run_dir, {"model.pt": b"third"}, node_dir)
    RunDirectory(run_dir).close()
    assert fetch_files(run_dir, {"model.pt": b"fourth"}, node_dir, backs_up=False) == []
    assert content(backup) == {"model.pt": b"first"}
    assert content(run_dir)["model.pt"] == b"fourth"
    RunDirectory(run_dir).close()
    assert fetch_files(run_dir, {"model.pt": b"fourth"}, node_dir) == []
    assert [*run_dir.glob("files-before-*")] == [backup]


def test_large_files_are_compared_outside_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop must keep sending heartbeats to agents meanwhile."""
    run_dir, node_dir, threads = tmp_path / "run", tmp_path / "node", list[threading.Thread]()
    compare = arrivals.filecmp.cmp

    def spy(*args: Any, **options: Any) -> bool:
        threads.append(threading.current_thread())
        return compare(*args, **options)

    monkeypatch.setattr(arrivals.filecmp, "cmp", spy)
    for data in (b"1", b"2"):
        RunDirectory(run_dir).close()
        fetch_files(run_dir, {"model.pt": data}, node_dir)
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("problem", ["host lost", "damaged"])
def test_failed_fetch_keeps_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    fetch_files(run_dir, {"model.pt": b"first"}, node_dir)
    RunDirectory(run_dir).close()
    add = safe_paths.IncomingFile.add

    def fail(self: safe_paths.IncomingFile, offset: int, data: bytes) -> None:
        if problem == "host lost":
            raise ConnectionError
        add(self, offset, b"x" + data[1:])

    monkeypatch.setattr(safe_paths.IncomingFile, "add", fail)
    with pytest.raises(ConnectionError if problem == "host lost" else NodeError):
        fetch_files(run_dir, {"model.pt": b"second"}, node_dir)
    assert content(run_dir) == {"model.pt": b"first"}


def test_threads_back_up_all_differing_files(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    paths = [f"out/{number}" for number in range(200)]

    def write(path: str, data: bytes) -> None:
        set_aside = partial(start.set_aside, path)
        file = safe_paths.IncomingFile(str(tmp_path), path, False, set_aside)
        file.add(0, data)
        file.finish()
        start.record(path)

    for first in (True, False):
        RunDirectory(tmp_path).close()
        start = Arrivals(tmp_path)
        with ThreadPoolExecutor(8) as pool:
            data = [b"same" if first or at % 3 else b"new" for at in range(len(paths))]
            list(pool.map(write, paths, data))
    (backup,) = tmp_path.glob("files-before-*")
    assert content(backup) == {path: b"same" for at, path in enumerate(paths) if at % 3 == 0}


def test_second_follower_keeps_backup_of_first(tmp_path: Path) -> None:
    RunDirectory(tmp_path).close()
    Arrivals(tmp_path).record("a")
    fill(tmp_path, {"a": b"first"})
    RunDirectory(tmp_path).close()
    for follower, data in [(Arrivals(tmp_path), b"second"), (Arrivals(tmp_path), b"third")]:
        fill(tmp_path, {"new": data})
        follower.set_aside("a", str(tmp_path / "new"))
        (tmp_path / "new").rename(tmp_path / "a")
    (backup,) = tmp_path.glob("files-before-*")
    assert content(backup) == {"a": b"first"}


def test_results_preserve_user_files_and_back_up_previous(tmp_path: Path) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    (run_dir / "notes.txt").write_text("mine")  # added by the user
    results = {"out0.txt": b"1", "plots/a.png": b"2", "model/config.json": b"{}", "notes.txt": b""}
    fetch_files(run_dir, results, node_dir)
    RunDirectory(run_dir).close()
    fetch_files(run_dir, {"out0.txt": b"3", "model/config.json": b"[]"}, node_dir)
    (backup,) = run_dir.glob("files-before-*")
    assert content(run_dir) == {
        f"{backup.name}/out0.txt": b"1",
        "out0.txt": b"3", "plots/a.png": b"2", "model/config.json": b"[]", "notes.txt": b"mine",
        "files/n1/notes.txt": b"",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["torch.py", "Torch.PY", "torch/__init__.py", "typing.cpython-311-x86_64-linux-gnu.so",
     "model/cfg.py", "model/cfg.pyc", "model/__init__.py", "model/torch/__init__.py",
     "torch_xla/core/xla.py", "wandb/run-1/files/conftest.py", "wandb/run-1/test_a.py",
     "x.dist-info/entry_points.txt", "model/a.egg-info/x.json"],
)  # fmt: skip
def test_code_that_programs_find_goes_to_host_folder(tmp_path: Path, name: str) -> None:
    """There it has a name by which no program takes it for code."""
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    others = {"wandb/run-1/code/train.py": b"1", "out/plot.html": b"2", "out/run.yaml": b"3",
              "egg/1.png": b"4", "test_losses.txt": b"5"}  # fmt: skip
    (note,) = fetch_files(run_dir, {name: b"evil", **others}, node_dir)
    assert content(run_dir) == {f"files/n1/{name}.from-n1": b"evil", **others}
    assert f"{name} as files/n1/{name}.from-n1" in note


REPOSITORIES = [".git/config", "a/.git/hooks/pre-commit", ".GIT/config", "a/.g\u200cit/config",
                "HEAD", "a/b/HEAD", "a/head", ".git"]  # fmt: skip
NAMES = ["a\nb", "a\x1b[2Jb", "a/\x7f", "x" * 256, "/".join("x" * 65), "a\u2028b", "\ud800"]


@each_case("name", [*REPOSITORIES, *NAMES])
def test_rejects_unsafe_file_names(name: str) -> None:
    assert safe_paths.refusal_reason(name)


@pytest.mark.parametrize(
    "name",
    [
        "a/b.txt",
        "é",
        "/".join("x" * 64),
        "head/w.pt",
        "x" * 255,
        "HEAD.txt",
        "objects/a",
        "refs/a",
        "config",
        "a git",
    ],
)
def test_accepts_safe_file_names(name: str) -> None:
    assert not safe_paths.refusal_reason(name)


@given(st.text(max_size=300))
def test_accepted_names_resolve_within_folder(name: str) -> None:
    if not safe_paths.refusal_reason(name):
        path = os.path.normpath(os.path.join("/run", name))  # noqa: PTH118
        assert path.startswith("/run/")
        assert "\0" not in path


def test_result_named_head_stays_on_node(tmp_path: Path) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    (note,) = fetch_files(run_dir, {"a/HEAD": b"x", "a/refs/x": b"y", "head.txt": b"z"}, node_dir)
    assert "1 file stayed on n1" in note
    assert "'a/HEAD' (named HEAD, as in a git repository)" in note
    assert content(run_dir) == {"a/refs/x": b"y", "head.txt": b"z"}


def test_files_that_wait_for_next_start_are_not_named(tmp_path: Path) -> None:
    """Another host with the same home may have left them in the common cache."""
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    assert fetch_files(run_dir, {".uncollected/out/a.pt": b"x", "b.txt": b"y"}, node_dir) == []
    assert content(run_dir) == {"b.txt": b"y"}


def test_planted_git_repository_executes_no_code(tmp_path: Path) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    marker, program = tmp_path / "it ran", tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    program.chmod(0o755)
    RunDirectory(run_dir).close()
    config = f'[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = "{program}"\n'.encode()
    bare = {"HEAD": b"ref: refs/heads/main\n", "config": config, "objects/x": b"", "refs/x": b""}
    inner = {f"out/{name}": data for name, data in bare.items()}
    notes = fetch_files(
        run_dir, {**bare, **inner, **{f"a/.git/{k}": v for k, v in bare.items()}}, node_dir
    )
    assert "stayed on n1" in notes[0]
    for folder in (run_dir, run_dir / "out", run_dir / "a"):
        subprocess.run(["git", "-C", str(folder), "status"], check=False, capture_output=True)
    assert not marker.exists()


def test_deep_path_stays_on_node(tmp_path: Path) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    notes = fetch_files(run_dir, {"/".join("y" * 70): b"", "a": b""}, node_dir)
    assert content(run_dir) == {"a": b""}
    assert "more than 64 folders deep" in notes[0]


PLANTED = ["detached.json", "forecast.json", "index.html", "result.json", "plan.json",
           "batch.json", "screen.txt", "owner.json", "report.html", "Detached.JSON", ".envrc",
           ".paceline-brought", "events-before-x.jsonl", "files/n2/x",
           "files-before-x/y"]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_node_cannot_write_run_records(tmp_path: Path, name: str) -> None:
    run_dir, node_dir = tmp_path / "run", tmp_path / "node"
    RunDirectory(run_dir).close()
    initial = content(run_dir)
    fetch_files(run_dir, {name: b"{}"}, node_dir)
    assert content(run_dir) == initial


@pytest.mark.parametrize(
    "name",
    [
        "detached.json",
        "owner.json",
        "forecast.json",
        "index.html",
        "batch.json",
        ".envrc",
        "Detached.json",
    ],
)
def test_records_of_supervisor_are_not_mirrored(name: str) -> None:
    assert not is_mirrored(name)


@pytest.mark.parametrize("line", ["[", "7", '"a"', '{"own": 3}', "\\xff"])
def test_damaged_fetched_list_protects_existing_files(tmp_path: Path, line: str) -> None:
    (tmp_path / names.FETCHED_LIST).write_text(f"{line}\n" * 3)
    (tmp_path / "mine").touch()
    assert Arrivals(tmp_path).place("mine", "n1") == "files/n1/mine"


def test_unfetched_files_survive_job_cleanup(tmp_path: Path, cache: Path) -> None:
    """The note names the folder, also for hidden files and reserved names."""
    run_dir, notes = tmp_path / "run", list[str]()
    RunDirectory(run_dir).close()

    async def work(served: Any) -> None:
        channel, fetcher = served.node.channel, Fetcher(run_dir, notes.append)
        answer = await channel.request("build_tree", folder="job", name="code", manifest=[],
                                       first=True, last=True)  # fmt: skip
        node_dir = Path(answer["root"])
        fill(node_dir, {"a/.git/x": b"x", ".hydra/config.yaml": b"x", "plan.json": b"x", "b": b"x",
                     ".paceline-run": b""})  # fmt: skip
        await fetcher.fetch(channel, str(node_dir), None, run_dir, skip=names.is_fetched_separately,
                            rejection_reason=names.reserved_reason)  # fmt: skip
        assert fetcher.incomplete_hosts == {"n1"}
        assert content(run_dir) == {"b": b"x"}
        assert f"3 files stayed on n1 in {node_dir}" in notes[0]

    run(work)
    assert (cache / "jobs/job/code/a/.git/x").exists()


def test_replaces_model_of_run_without_fetched_list(tmp_path: Path) -> None:
    """An earlier version left no list of fetched files; files of a tracker are kept."""
    planted = {"events.jsonl": b"", "result.json": b"{}", "tensorboard/events.out": b"theirs",
               "model/config.json": b'{"sha256": "a"}', "model/model.safetensors": b"old",
               "model/net.py": b"mine"}  # fmt: skip
    run_dir, node_dir = fill(tmp_path / "run", planted), tmp_path / "node"
    RunDirectory(run_dir).close()
    RunDirectory(run_dir).close()
    results = {"model/config.json": b'{"sha256": "b"}', "model/model.safetensors": b"new",
               "model/net.py": b"evil", "tensorboard/events.out": b"newer"}  # fmt: skip
    fetch_files(run_dir, results, node_dir)
    contents = content(run_dir)
    assert contents["model/model.safetensors"] == b"new"
    assert contents["model/config.json"] == b'{"sha256": "b"}'
    assert contents["model/net.py"] == b"mine"
    assert contents["tensorboard/events.out"] == b"theirs"
    assert contents["files/n1/tensorboard/events.out"] == b"newer"
