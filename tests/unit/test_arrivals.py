"""What comes home from a node: under which names, and what it replaces."""

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

__all__ = ["cache"]  # for all tests here


PROJECT = {"train.py": b"mine", "torch.py": b"mine too", "config.json": b"mine",
           "model/net.py": b"mine", "files/n1/old.txt": b"mine", "out/a.png": b"mine"}  # fmt: skip


def bring(
    home: Path, planted: dict[str, bytes], there: Path, keeps_earlier: bool = True
) -> list[str]:
    """Has a node list files of its run folder; what the user is told."""
    noted: list[str] = []
    fill(there, planted)

    async def work(served: Any) -> None:
        fetcher = Fetcher(home, noted.append)
        fetcher.keeps_earlier = keeps_earlier
        await fetcher.fetch(served.node.channel, str(there), None, home, skip=names.is_reserved)

    run(work)
    return noted


def content(folder: Path) -> dict[str, bytes]:
    found = {}
    for above, _, files in safe_paths.walk(str(folder)):
        for name in files:
            path = f"{above}/{name}" if above else name
            if not path.startswith(".paceline"):
                found[path] = (folder / path).read_bytes()
    return found


def test_a_project_that_is_the_folder_stays_as_it_is(tmp_path: Path) -> None:
    """And gets no code, nor anything else that a program finds by itself."""
    home, there = fill(tmp_path / "project", PROJECT), tmp_path / "node"
    RunDirectory(home).close()
    planted = {**dict.fromkeys(PROJECT, b"evil"), "sitecustomize.py": b"evil", "x/__init__.py": b"",
               "conftest.py": b"evil", "out.txt": b"a result", ".envrc": b"evil",
               "model/model.safetensors": b"weights", "model/x.py": b"evil"}  # fmt: skip
    noted = bring(home, planted, there)
    found = content(home)
    assert {name: found[name] for name in PROJECT} == PROJECT
    assert {name for name in found if not name.startswith("files/")} == {
        *(name for name in PROJECT if not name.startswith("files/")), "model/model.safetensors"
    }  # fmt: skip
    assert found["files/n1/out.txt"] == b"a result"
    assert found["files/n1/train.py"] == b"evil"
    (note,) = noted
    assert "came to another place" in note
    bring(home, {"out.txt": b"a newer result", "old.txt": b"evil"}, there)
    assert content(home)["files/n1/out.txt"] == b"a newer result"
    assert content(home)["files/n1/old.txt"] == b"mine"
    assert content(home)["files/n1-2/old.txt"] == b"evil"


def test_files_of_an_earlier_start_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except those that are equal. Within a start, and after a resume, new files replace old."""
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(strftime=lambda _: "20260101-000000"))
    home, there = tmp_path / "run", tmp_path / "node"
    first = {"model.pt": b"first", "same.txt": b"same", "model/model.safetensors": b"1"}
    RunDirectory(home).close()
    assert bring(home, {**first, "model.pt": b"zero"}, there) == []
    assert bring(home, first, there) == []
    RunDirectory(home).close()
    (note,) = bring(home, {**first, "model.pt": b"second", "more.txt": b""}, there)
    assert "files of an earlier start that differ moved to " in note
    (backup,) = home.glob("files-before-*")
    assert content(backup) == {"model.pt": b"first"}
    assert content(home)["model.pt"] == b"second"
    bring(home, {"model.pt": b"third"}, there)
    RunDirectory(home).close()
    assert bring(home, {"model.pt": b"fourth"}, there, keeps_earlier=False) == []
    assert content(backup) == {"model.pt": b"first"}
    assert content(home)["model.pt"] == b"fourth"
    RunDirectory(home).close()
    assert bring(home, {"model.pt": b"fourth"}, there) == []
    assert [*home.glob("files-before-*")] == [backup]


def test_large_files_are_compared_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents must hear from the loop meanwhile."""
    home, there, threads = tmp_path / "run", tmp_path / "node", list[threading.Thread]()
    compare = arrivals.filecmp.cmp

    def spy(*args: Any, **options: Any) -> bool:
        threads.append(threading.current_thread())
        return compare(*args, **options)

    monkeypatch.setattr(arrivals.filecmp, "cmp", spy)
    for data in (b"1", b"2"):
        RunDirectory(home).close()
        bring(home, {"model.pt": data}, there)
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("problem", ["host lost", "damaged"])
def test_an_earlier_file_stays_if_the_new_one_does_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    bring(home, {"model.pt": b"first"}, there)
    RunDirectory(home).close()
    add = safe_paths.IncomingFile.add

    def fail(self: safe_paths.IncomingFile, offset: int, data: bytes) -> None:
        if problem == "host lost":
            raise ConnectionError
        add(self, offset, b"x" + data[1:])

    monkeypatch.setattr(safe_paths.IncomingFile, "add", fail)
    with pytest.raises(ConnectionError if problem == "host lost" else NodeError):
        bring(home, {"model.pt": b"second"}, there)
    assert content(home) == {"model.pt": b"first"}


def test_threads_keep_all_earlier_files_that_differ(tmp_path: Path) -> None:
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


def test_a_second_follower_does_not_replace_what_the_first_moved(tmp_path: Path) -> None:
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


def test_a_folder_of_runs_gets_what_ranks_wrote(tmp_path: Path) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    (home / "notes.txt").write_text("mine")  # by hand, later
    results = {"out0.txt": b"1", "plots/a.png": b"2", "model/config.json": b"{}", "notes.txt": b""}
    bring(home, results, there)
    RunDirectory(home).close()
    bring(home, {"out0.txt": b"3", "model/config.json": b"[]"}, there)
    (backup,) = home.glob("files-before-*")
    assert content(home) == {
        f"{backup.name}/out0.txt": b"1",
        "out0.txt": b"3", "plots/a.png": b"2", "model/config.json": b"[]", "notes.txt": b"mine",
        "files/n1/notes.txt": b"",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["torch.py", "Torch.PY", "torch/__init__.py", "typing.cpython-311-x86_64-linux-gnu.so",
     "model/cfg.py", "model/cfg.pyc", "model/__init__.py", "model/torch/__init__.py"],
)  # fmt: skip
def test_code_that_would_shadow_a_library_goes_to_a_folder_of_its_host(
    tmp_path: Path, name: str
) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    (note,) = bring(
        home, {name: b"evil", "wandb/code/train.py": b"1", "model/code/x.py": b"2"}, there
    )
    assert content(home) == {
        f"files/n1/{name}": b"evil", "wandb/code/train.py": b"1", "model/code/x.py": b"2"
    }  # fmt: skip
    assert f"{name} as files/n1/{name}" in note


REPOSITORIES = [".git/config", "a/.git/hooks/pre-commit", ".GIT/config", "a/.g\u200cit/config",
                "HEAD", "a/b/HEAD", "a/head", ".git"]  # fmt: skip
NAMES = ["a\nb", "a\x1b[2Jb", "a/\x7f", "x" * 256, "/".join("x" * 65), "a\u2028b", "\ud800"]


@each_case("name", [*REPOSITORIES, *NAMES])
def test_such_a_file_is_not_made(name: str) -> None:
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
def test_such_a_file_is_made(name: str) -> None:
    assert not safe_paths.refusal_reason(name)


@given(st.text(max_size=300))
def test_a_name_that_is_not_refused_stays_below_its_folder(name: str) -> None:
    if not safe_paths.refusal_reason(name):
        path = os.path.normpath(os.path.join("/run", name))  # noqa: PTH118
        assert path.startswith("/run/")
        assert "\0" not in path


def test_a_result_named_head_stays_on_its_node(tmp_path: Path) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    (note,) = bring(home, {"a/HEAD": b"x", "a/refs/x": b"y", "head.txt": b"z"}, there)
    assert "1 file stayed on n1" in note
    assert "'a/HEAD' (named HEAD, as in a git repository)" in note
    assert content(home) == {"a/refs/x": b"y", "head.txt": b"z"}


def test_a_planted_repository_runs_nothing(tmp_path: Path) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    sign, program = tmp_path / "it ran", tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch '{sign}'\n")
    program.chmod(0o755)
    RunDirectory(home).close()
    config = f'[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = "{program}"\n'.encode()
    bare = {"HEAD": b"ref: refs/heads/main\n", "config": config, "objects/x": b"", "refs/x": b""}
    inner = {f"out/{name}": data for name, data in bare.items()}
    noted = bring(home, {**bare, **inner, **{f"a/.git/{k}": v for k, v in bare.items()}}, there)
    assert "stayed on n1" in noted[0]
    for folder in (home, home / "out", home / "a"):
        subprocess.run(["git", "-C", str(folder), "status"], check=False, capture_output=True)
    assert not sign.exists()


def test_a_deep_path_stays_on_its_node(tmp_path: Path) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    noted = bring(home, {"/".join("y" * 70): b"", "a": b""}, there)
    assert content(home) == {"a": b""}
    assert "more than 64 folders deep" in noted[0]


PLANTED = ["detached.json", "forecast.json", "index.html", "result.json", "plan.json",
           "batch.json", "screen.txt", "owner.json", "report.html", "Detached.JSON", ".envrc",
           ".paceline-brought", "events-before-x.jsonl", "files/n2/x",
           "files-before-x/y"]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_node_writes_no_record_of_a_run(tmp_path: Path, name: str) -> None:
    home, there = tmp_path / "run", tmp_path / "node"
    RunDirectory(home).close()
    before = content(home)
    bring(home, {name: b"{}"}, there)
    assert content(home) == before


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
def test_a_supervisor_writes_its_own_records_alone(name: str) -> None:
    assert not is_mirrored(name)


@pytest.mark.parametrize("line", ["[", "7", '"a"', '{"own": 3}', "\\xff"])
def test_a_damaged_record_makes_a_folder_nobodys(tmp_path: Path, line: str) -> None:
    (tmp_path / names.FETCHED_LIST).write_text(f"{line}\n" * 3)
    (tmp_path / "mine").touch()
    assert Arrivals(tmp_path).place("mine", "n1") == "files/n1/mine"


def test_what_stays_on_a_node_is_not_removed_with_the_job(tmp_path: Path, cache: Path) -> None:
    """Told with its folder, also what is hidden or has a name of the run's own records."""
    home, noted = tmp_path / "run", list[str]()
    RunDirectory(home).close()

    async def work(served: Any) -> None:
        channel, fetcher = served.node.channel, Fetcher(home, noted.append)
        answer = await channel.request("build_tree", folder="job", name="code", manifest=[],
                                       first=True, last=True)  # fmt: skip
        there = Path(answer["root"])
        fill(there, {"a/.git/x": b"x", ".hydra/config.yaml": b"x", "plan.json": b"x", "b": b"x",
                     ".paceline-run": b""})  # fmt: skip
        await fetcher.fetch(channel, str(there), None, home, skip=names.is_fetched_separately,
                            rejection_reason=names.reserved_reason)  # fmt: skip
        assert fetcher.incomplete_hosts == {"n1"}
        assert content(home) == {"b": b"x"}
        assert f"3 files stayed on n1 in {there}" in noted[0]

    run(work)
    assert (cache / "jobs/job/code/a/.git/x").exists()


def test_the_model_of_a_run_of_an_earlier_version_is_replaced(tmp_path: Path) -> None:
    """Which kept no record of what was brought, beside the files of a tracker."""
    planted = {"events.jsonl": b"", "result.json": b"{}", "tensorboard/events.out": b"theirs",
               "model/config.json": b'{"sha256": "a"}', "model/model.safetensors": b"old",
               "model/net.py": b"mine"}  # fmt: skip
    home, there = fill(tmp_path / "run", planted), tmp_path / "node"
    RunDirectory(home).close()
    RunDirectory(home).close()
    results = {"model/config.json": b'{"sha256": "b"}', "model/model.safetensors": b"new",
               "model/net.py": b"evil", "tensorboard/events.out": b"newer"}  # fmt: skip
    bring(home, results, there)
    found = content(home)
    assert found["model/model.safetensors"] == b"new"
    assert found["model/config.json"] == b'{"sha256": "b"}'
    assert found["model/net.py"] == b"mine"
    assert found["tensorboard/events.out"] == b"theirs"
    assert found["files/n1/tensorboard/events.out"] == b"newer"
