"""Folders that come from anybody: nothing in them is run, sent unasked, or makes us fall over."""

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
from paceline.spec.errors import DataError, SettingError
from paceline.transfer import tree
from paceline.transfer.checkpoints import local_sizes
from paceline.transfer.data import DataFolder
from paceline.transfer.git import run_git, work_tree_root
from paceline.transfer.links import OutwardLinks, reject_outward

DEEP = 1500  # folders: more than Python's own recursion allows


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def repository(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("pass")
    git(folder, "add", "train.py")
    return folder


def trap(tmp_path: Path) -> tuple[Path, Path]:
    """A program, and the file that is there once it ran."""
    sign, program = tmp_path / "it ran", tmp_path / "trap"
    program.write_text(f"#!/bin/sh\ntouch '{sign}'\nexit 1\n")
    program.chmod(0o755)
    return program, sign


def test_git_that_waits_for_a_pipe_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(repository(tmp_path / "project") / ".gitignore")
    monkeypatch.setattr("paceline.transfer.git._TIMEOUT_S", 0.5)
    with pytest.raises(SettingError, match=r"git did not answer .*"):
        run_git(tmp_path / "project", "ls-files", "--others", "--exclude-standard")


# --- modules in a run directory


@pytest.mark.parametrize(
    "words",
    ["paceline predict . x.png", "paceline evaluate . -p 2", "python -m paceline evaluate ."],
)
def test_no_module_of_a_run_directory_is_imported(tmp_path: Path, words: str) -> None:
    program, *arguments = words.split()
    sign = tmp_path / "it ran"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"task": "image"}))
    for name in ("torch", "numpy", "safetensors", "PIL", "click", "asyncio"):
        (tmp_path / f"{name}.py").write_text(f"open({str(sign)!r}, 'a').write({name!r})\n")
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "holds no model of the image recipe" in done.stdout + done.stderr
    assert not sign.exists()


# --- git


@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath", "core.sshCommand",
                                     "diff.external", "core.pager", "filter.x.clean",
                                     "filter.x.process", "core.alternateRefsCommand",
                                     "core.gitProxy", "credential.helper"])  # fmt: skip
def test_no_program_of_a_repository_runs(tmp_path: Path, setting: str) -> None:
    program, sign = trap(tmp_path)
    folder = repository(tmp_path / "project")
    (folder / ".gitattributes").write_text("* filter=x\n")
    git(folder, "config", setting, str(program.parent if "hooks" in setting else program))
    for hook in ("post-index-change", "pre-commit", "post-checkout"):
        (tmp_path / hook).write_text(program.read_text())
        (tmp_path / hook).chmod(0o755)
    os.utime(folder / "train.py", (1, 1))
    assert tree.folder_root(folder) == folder
    assert "train.py" in [*tree.files_of(folder)]
    assert not sign.exists()


def test_a_partial_clone_fetches_nothing(tmp_path: Path) -> None:
    """What a repository lacks would be had from where it says, by a program that it names."""
    program, sign = trap(tmp_path)
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
    assert not sign.exists()


def test_a_bare_repository_is_data(tmp_path: Path) -> None:
    program, sign = trap(tmp_path)
    git(tmp_path, "init", "-q", "--bare", "results")
    bare = tmp_path / "results"
    git(bare, "config", "core.bare", "false")
    git(bare, "config", "core.worktree", str(bare))
    git(bare, "config", "core.fsmonitor", str(program))
    (bare / "train.py").write_text("pass")
    assert work_tree_root(bare) is None
    assert "train.py" in [*tree.files_of(bare)]
    assert not sign.exists()


def test_a_repository_does_not_choose_which_folder_is_the_project(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    folder = repository(tmp_path / "home" / "project")
    (tmp_path / "home" / "secret").write_text("x")
    git(folder, "config", "core.worktree", str(tmp_path / "home"))
    assert tree.folder_root(folder) == folder


def test_a_callers_repository_is_not_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = repository(tmp_path / "project"), repository(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert tree.folder_root(folder) == folder


# --- deep folders


def deep(folder: Path, depth: int = DEEP) -> Path:
    """A file below so many folders."""
    folder.mkdir(exist_ok=True)
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("y", dir_fd=at)
        inner = os.open("y", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("f.png", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.close(at)
    return folder


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Path]:
    yield deep(tmp_path / "deep")
    safe_paths.remove_tree(str(tmp_path / "deep"))  # which pytest cannot


@pytest.mark.parametrize("tracked", [False, True])
def test_code_that_is_nested_too_deep_is_refused(nested: Path, tracked: bool) -> None:
    if tracked:
        git(nested, "init", "-q")
    with pytest.raises(SettingError, match="nested more than 128 deep"):
        tree.read_tree(nested)
    with pytest.raises(SettingError, match="nested more than 128 deep"):
        tree.read_parts(nested, ())


def test_code_in_some_folders_is_code(tmp_path: Path) -> None:
    (entry,) = tree.read_tree(deep(tmp_path / "some", 100)).manifest
    assert str(entry[0]).count("/") == 100


def test_data_that_are_nested_too_deep_are_refused(nested: Path) -> None:
    with pytest.raises(OSError, match="nested more than 128 deep"):
        DataFolder(nested, "here").items()


def test_a_node_lists_looks_at_and_removes_any_depth(nested: Path) -> None:
    (file,) = snapshot.changed_files(str(nested), None)
    assert file["path"].count("/") == DEEP
    assert snapshot._last_used(nested) > 0
    assert local_sizes(nested) == {}
    snapshot.remove_folder(nested)
    assert not [*nested.parent.iterdir()]


def test_images_that_are_nested_too_deep_are_refused(nested: Path) -> None:
    with pytest.raises(DataError, match="nested too deep"):
        image_files(nested)


def test_a_walk_is_that_of_the_standard_library(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e/f/g"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    found = {(a, *sorted(b), *sorted(c)) for a, b, c in safe_paths.walk(str(tmp_path))}
    there = {
        (os.path.relpath(a, tmp_path), *sorted(b), *sorted(c)) for a, b, c in os.walk(tmp_path)
    }
    assert found == {("" if a == "." else a, *rest) for a, *rest in there}


# --- links


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "id_ed25519"
    file.parent.mkdir()
    file.write_text("a key")
    return file


@pytest.mark.parametrize("tracked", [False, True])
def test_a_link_out_of_the_code_is_named(tmp_path: Path, key: Path, tracked: bool) -> None:
    folder = repository(tmp_path / "project")
    if not tracked:
        safe_paths.remove_tree(str(folder / ".git"))
    (folder / "label.txt").symlink_to(key)
    (folder / "main.py").symlink_to("train.py")
    read = tree.read_tree(folder)
    assert read.outward == {"label.txt": str(key)}
    with pytest.raises(SettingError, match="lead out of it") as refused:
        reject_outward(read.root, read.outward)
    assert refused.value.found == f"label.txt -> {key}"
    assert "--follow-links" in refused.value.remedy


def test_a_path_of_a_made_up_index_leads_nowhere(tmp_path: Path, key: Path) -> None:
    """Git lists what its index says, also through a link to a folder."""
    folder = repository(tmp_path / "project")
    (folder / "home").mkdir()
    (folder / "home" / key.name).write_text("")
    git(folder, "add", ".")
    safe_paths.remove_tree(str(folder / "home"))
    (folder / "home").symlink_to(key.parent)
    assert tree.read_tree(folder).outward == {f"home/{key.name}": str(key)}


def test_links_out_of_data_are_named(tmp_path: Path, key: Path) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "1.png").write_text("")
    (tmp_path / "photos" / "2.png").symlink_to("cats/1.png")
    (tmp_path / "photos" / "label.txt").symlink_to(key)
    (tmp_path / "photos" / "dogs").symlink_to(key.parent)
    folder = DataFolder(tmp_path / "photos", "here")
    assert folder.outward(folder.items()) == {
        "label.txt": str(key), f"dogs/{key.name}": str(key)
    }  # fmt: skip


def test_a_folder_reached_through_a_link_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("")
    (tmp_path / "link").symlink_to("real")
    assert OutwardLinks(tmp_path / "link").target("a") == ""


def test_a_snapshot_of_the_hub_is_whole(tmp_path: Path, key: Path) -> None:
    model = tmp_path / "models--x"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / "ab").write_text("{}")
    (model / "snapshots" / "1").mkdir(parents=True)
    (model / "snapshots" / "1" / "config.json").symlink_to("../../blobs/ab")
    (model / "snapshots" / "1" / "other").symlink_to(key)
    assert tree.read_parts(model / "snapshots" / "1", ()).outward == {"other": str(key)}
