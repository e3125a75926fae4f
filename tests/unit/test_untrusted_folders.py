"""Tests that nothing in an untrusted folder is executed, sent unasked, or causes a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.files import safe_paths, snapshot
from paceline.recipes.data.decoding import image_files
from paceline.schedulers import load
from paceline.schedulers.script import BatchRequest
from paceline.spec.errors import DataError, SettingError
from paceline.transfer import tree
from paceline.transfer.checkpoints import local_sizes
from paceline.transfer.data import DataFolder
from paceline.transfer.git import run_git, work_tree_root
from paceline.transfer.links import OutwardLinks, reject_outward

DEPTH = 1500  # nested folders: more than Python's recursion limit


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def repository(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("pass")
    git(folder, "add", "train.py")
    return folder


def make_trap(tmp_path: Path) -> tuple[Path, Path]:
    """Creates a program; returns it and the file that it creates when it runs."""
    ran_marker, program = tmp_path / "it ran", tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch '{ran_marker}'\nexit 1\n")
    program.chmod(0o755)
    return program, ran_marker


def test_git_blocked_by_pipe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(repository(tmp_path / "project") / ".gitignore")
    monkeypatch.setattr("paceline.transfer.git._TIMEOUT_S", 0.5)
    with pytest.raises(SettingError, match=r"git did not answer .*"):
        run_git(tmp_path / "project", "ls-files", "--others", "--exclude-standard")


# --- modules in a run directory


@pytest.mark.parametrize(
    "words",
    ["paceline predict . x.png", "paceline evaluate . -p 2", "python -m paceline evaluate ."],
)
def test_imports_no_module_from_run_directory(tmp_path: Path, words: str) -> None:
    program, *arguments = words.split()
    ran_marker = tmp_path / "it ran"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"task": "image"}))
    for name in ("torch", "numpy", "safetensors", "PIL", "click", "asyncio"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran_marker)!r}, 'a').write({name!r})\n")
    command = [str(Path(sys.executable).parent / program), *arguments]
    completed = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "holds no model of the image recipe" in completed.stdout + completed.stderr
    assert not ran_marker.exists()


@pytest.mark.parametrize(
    ("scheduler", "refusal"),
    [("slurm", "a batch needs the number of nodes"), ("pbs", "PBS_NODEFILE"), ("lsf", "lsf-hosts")],
)
def test_batch_script_imports_nothing_from_current_folder(
    tmp_path: Path, scheduler: str, refusal: str
) -> None:
    """Outside a batch system, the job ends with an error of Paceline."""
    project, ran_marker = tmp_path / "project", tmp_path / "it ran"
    (project / "paceline").mkdir(parents=True)
    for name in ("paceline/__init__", "torch", "click", "asyncio", "runpy"):
        (project / f"{name}.py").write_text(f"open({str(ran_marker)!r}, 'a').write({name!r})\n")
    paceline = str(Path(sys.executable).parent / "paceline")
    command = [paceline, "train", "image", "--via", scheduler, "--nnodes", "2", "--plan"]
    script = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout
    completed = subprocess.run(
        ["bash"], input=script, cwd=project, check=False, capture_output=True, text=True
    )
    assert refusal in completed.stdout + completed.stderr
    assert not ran_marker.exists()


def test_batch_script_finds_paceline_by_pythonpath(tmp_path: Path) -> None:
    request = BatchRequest("x", "/usr/bin/python3", ("--version",), (), str(tmp_path), "/r", 1)
    (tmp_path / "packages" / "paceline").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "__main__": "def main():\n    print('from PYTHONPATH')",
    }.items():
        (tmp_path / "packages" / "paceline" / f"{name}.py").write_text(text)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "packages")}
    completed = subprocess.run(
        ["bash"], input=load("slurm").render(request), check=True, capture_output=True, text=True,
        env=environ,
    )  # fmt: skip
    assert completed.stdout == "from PYTHONPATH\n"


# --- git


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath", "core.sshCommand",
                                     "diff.external", "core.pager", "filter.x.clean",
                                     "filter.x.process", "core.alternateRefsCommand",
                                     "core.gitProxy", "credential.helper"])  # fmt: skip
def test_runs_no_program_from_repository(tmp_path: Path, setting: str) -> None:
    program, ran_marker = make_trap(tmp_path)
    folder = repository(tmp_path / "project")
    (folder / ".gitattributes").write_text("* filter=x\n")
    git(folder, "config", setting, str(program.parent if "hooks" in setting else program))
    for hook in ("post-index-change", "pre-commit", "post-checkout"):
        (tmp_path / hook).write_text(program.read_text())
        (tmp_path / hook).chmod(0o755)
    os.utime(folder / "train.py", (1, 1))
    assert tree.folder_root(folder) == folder
    assert "train.py" in [*tree.files_of(folder)]
    assert not ran_marker.exists()


def test_partial_clone_fetches_nothing(tmp_path: Path) -> None:
    """Git would fetch missing objects from the configured URL, with a program that it names."""
    program, ran_marker = make_trap(tmp_path)
    folder = repository(tmp_path / "project")
    for name, value in {"core.repositoryformatversion": "1", "extensions.partialClone": "origin",
                        "remote.origin.url": f"ext::{program}", "protocol.ext.allow": "always",
                        "remote.origin.promisor": "true"}.items():  # fmt: skip
        git(folder, "config", name, value)
    for blob in (folder / ".git" / "objects").glob("??/*"):
        blob.unlink()
    (blob_of,) = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-s"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    run_git(folder, "cat-file", "-p", blob_of.split()[1])
    assert not ran_marker.exists()


def test_bare_repository_is_treated_as_data(tmp_path: Path) -> None:
    program, ran_marker = make_trap(tmp_path)
    git(tmp_path, "init", "-q", "--bare", "results")
    bare = tmp_path / "results"
    git(bare, "config", "core.bare", "false")
    git(bare, "config", "core.worktree", str(bare))
    git(bare, "config", "core.fsmonitor", str(program))
    (bare / "train.py").write_text("pass")
    assert work_tree_root(bare) is None
    assert "train.py" in [*tree.files_of(bare)]
    assert not ran_marker.exists()


def test_git_config_cannot_change_project_root(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    folder = repository(tmp_path / "home" / "project")
    (tmp_path / "home" / "secret").write_text("x")
    git(folder, "config", "core.worktree", str(tmp_path / "home"))
    assert tree.folder_root(folder) == folder


def test_ignores_git_environment_of_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, caller_repository = repository(tmp_path / "project"), repository(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(caller_repository / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(caller_repository))
    assert tree.folder_root(folder) == folder


# --- deep folders


def make_deep_folder(folder: Path, depth: int = DEPTH) -> Path:
    """Creates a file in folders that are nested this deep."""
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("y", dir_fd=fd)
        inner = os.open("y", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("f.png", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    return folder


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Path]:
    yield make_deep_folder(tmp_path / "deep")
    safe_paths.remove_tree(str(tmp_path / "deep"))  # pytest cannot remove it


@pytest.mark.parametrize("tracked", [False, True])
def test_rejects_deeply_nested_code(nested: Path, tracked: bool) -> None:
    if tracked:
        git(nested, "init", "-q")
    with pytest.raises(SettingError, match="nested more than 128 deep"):
        tree.read_tree(nested)
    with pytest.raises(SettingError, match="nested more than 128 deep"):
        tree.read_parts(nested, ())


def test_accepts_moderately_nested_code(tmp_path: Path) -> None:
    (entry,) = tree.read_tree(make_deep_folder(tmp_path / "some", 100)).manifest
    assert str(entry[0]).count("/") == 100


def test_rejects_deeply_nested_data(nested: Path) -> None:
    with pytest.raises(OSError, match="nested more than 128 deep"):
        DataFolder(nested, "here").items()


def test_lists_and_removes_folders_of_any_depth(nested: Path) -> None:
    (file,) = snapshot.changed_files(str(nested), None)
    assert file["path"].count("/") == DEPTH
    assert snapshot._last_used(nested) > 0
    assert local_sizes(nested) == {}
    snapshot.remove_folder(nested)
    assert not [*nested.parent.iterdir()]


def test_rejects_deeply_nested_images(nested: Path) -> None:
    with pytest.raises(DataError, match="nested too deep"):
        image_files(nested)


def test_walk_matches_os_walk(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e/f/g"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    actual = {(a, *sorted(b), *sorted(c)) for a, b, c in safe_paths.walk(str(tmp_path))}
    expected = {
        (os.path.relpath(a, tmp_path), *sorted(b), *sorted(c)) for a, b, c in os.walk(tmp_path)
    }
    assert actual == {("" if a == "." else a, *rest) for a, *rest in expected}


# --- links


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "id_ed25519"
    file.parent.mkdir()
    file.write_text("a key")
    return file


@pytest.mark.parametrize("tracked", [False, True])
def test_reports_links_out_of_code(tmp_path: Path, key: Path, tracked: bool) -> None:
    folder = repository(tmp_path / "project")
    if not tracked:
        safe_paths.remove_tree(str(folder / ".git"))
    (folder / "label.txt").symlink_to(key)
    (folder / "main.py").symlink_to("train.py")
    read = tree.read_tree(folder)
    assert read.outward == {"label.txt": str(key)}
    with pytest.raises(SettingError, match="lead out of it") as caught:
        reject_outward(read.root, read.outward)
    assert caught.value.found == f"label.txt -> {key}"
    assert "--follow-links" in caught.value.remedy


def test_reports_index_path_through_folder_link(tmp_path: Path, key: Path) -> None:
    """Git lists the entries of its index, even behind a link to a folder."""
    folder = repository(tmp_path / "project")
    (folder / "home").mkdir()
    (folder / "home" / key.name).write_text("")
    git(folder, "add", ".")
    safe_paths.remove_tree(str(folder / "home"))
    (folder / "home").symlink_to(key.parent)
    assert tree.read_tree(folder).outward == {f"home/{key.name}": str(key)}


def test_reports_links_out_of_data(tmp_path: Path, key: Path) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "1.png").write_text("")
    (tmp_path / "photos" / "2.png").symlink_to("cats/1.png")
    (tmp_path / "photos" / "label.txt").symlink_to(key)
    (tmp_path / "photos" / "dogs").symlink_to(key.parent)
    folder = DataFolder(tmp_path / "photos", "here")
    assert folder.outward(folder.items()) == {
        "label.txt": str(key), f"dogs/{key.name}": str(key)
    }  # fmt: skip


def test_root_behind_link_is_not_outward(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("")
    (tmp_path / "link").symlink_to("real")
    assert OutwardLinks(tmp_path / "link").target("a") == ""


def test_hub_snapshot_may_link_to_its_blobs(tmp_path: Path, key: Path) -> None:
    model = tmp_path / "models--x"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / "ab").write_text("{}")
    (model / "snapshots" / "1").mkdir(parents=True)
    (model / "snapshots" / "1" / "config.json").symlink_to("../../blobs/ab")
    (model / "snapshots" / "1" / "other").symlink_to(key)
    assert tree.read_parts(model / "snapshots" / "1", ()).outward == {"other": str(key)}
