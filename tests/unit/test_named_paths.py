"""Tests that data and weights are sent only if a command of this user named them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from paceline.cli import program
from paceline.launch import launcher
from paceline.rundir import detached_file, named_paths
from paceline.spec.errors import SettingError
from paceline.spec.job import Job
from paceline.spec.rundir import NAMED_PATHS

Command = Callable[..., Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Returns a function that runs a command up to its first connection and returns the job."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.chdir(tmp_path)
    started: list[Job] = []

    def run_job(job: Job, *_: object, **__: object) -> NoReturn:
        started.append(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "run_job", run_job)

    def run(*argv: str) -> Job:
        started.clear()
        result = CliRunner().invoke(program, argv)
        if isinstance(result.exception, SettingError):
            raise result.exception
        (job,) = started
        return job

    return run


def make_run(folder: Path, recipe: str = "image", **options: str) -> Path:
    """Writes a run directory as a hostile host could leave it."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    names = {"source": options.get("data", ""), "test": options.get("test_data", "")}
    (folder / "model" / "config.json").write_text(json.dumps({"task": recipe, "data": names}))
    (folder / "config.json").write_text(json.dumps({"recipe": recipe, "options": options}))
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "ssh").mkdir()
    key = tmp_path / "ssh" / "id_ed25519"
    key.write_text("a key")
    return key


def test_does_not_send_data_named_by_run(command: Command, tmp_path: Path, secret: Path) -> None:
    for recipe, field, path in (
        ("image", "data", secret.parent),
        ("text", "data", secret),
        ("text", "test_data", secret),
    ):
        run = make_run(tmp_path / f"{recipe}-{field}-{path.name}", recipe, **{field: str(path)})
        with pytest.raises(SettingError, match=f"names {path}, which is not sent") as error:
            command("evaluate", str(run), "-H", "n1,n2")
        text, _, remedy = error.value.remedy.partition(": paceline ")
        assert text == "To evaluate on this machine"
        assert command(*shlex.split(remedy))
        assert "(or the run is older, or was moved)" in error.value.found
        flag = f"--{field.replace('_', '-')}"
        with pytest.raises(SettingError, match=f"names {path}, which is not sent") as error:
            command("train", recipe, "--like", str(run), "-H", "n1,n2")
        assert f"{flag} {path}" in error.value.remedy
        assert command("evaluate", str(run), "-p", "2")  # nothing is sent
        assert command("evaluate", str(run), "-H", "n1,n2", "--data", str(path))
        assert command("train", recipe, "--like", str(run), "-H", "n1,n2", flag, str(path))


def test_does_not_send_weights_named_by_run(command: Command, tmp_path: Path, secret: Path) -> None:
    run = make_run(tmp_path / "run", weights=str(secret))
    with pytest.raises(SettingError, match="is not sent"):
        command("train", "image", f"--like={run}", "-H", "n1,n2")
    with pytest.raises(SettingError, match="is not sent"):
        command("train", "image", "--like", str(run / "config.json"), "-H", "n1,n2")
    with pytest.raises(SettingError, match="is not sent"):
        command("forecast", "image", "--like", str(run), "-H", "n1,n2")


def test_sends_paths_named_by_earlier_command(
    command: Command, tmp_path: Path, secret: Path
) -> None:
    photos, weights = tmp_path / "photos", tmp_path / "old.safetensors"
    photos.mkdir()
    weights.touch()
    options = ("--data", "photos", "--weights", "old.safetensors")
    first = command("train", "image", "-H", "n1,n2", "--run-dir", "first", *options)
    run = make_run(tmp_path / "first", data=str(photos), weights=str(weights))
    assert command("evaluate", "first", "-H", "n1,n2").data == first.data
    second_argv = ("train", "image", "--like", "first", "-H", "n1,n2", "--run-dir", "second")
    assert command(*second_argv).inputs == first.inputs
    assert named_paths.read(tmp_path / "second") == {str(photos), str(weights)}
    make_run(run, data=str(secret.parent), weights=str(weights))  # a host's change
    for argv in (("evaluate", "first", "-H", "n1,n2"), second_argv):
        with pytest.raises(SettingError, match="is not sent"):
            command(*argv)


def test_local_training_does_not_record_named_paths(
    command: Command, tmp_path: Path, secret: Path
) -> None:
    make_run(tmp_path / "foreign", data=str(secret.parent))
    command("train", "image", "--like", "foreign", "--run-dir", "mine")
    make_run(tmp_path / "mine", data=str(secret.parent))
    with pytest.raises(SettingError, match="is not sent"):
        command("evaluate", "mine", "-H", "n1,n2")


def test_record_is_valid_only_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    run, copy = tmp_path / "runs" / "a", tmp_path / "copy"
    named_paths.record(run, {"/a"})
    named_paths.record(run, {"/b"})
    assert named_paths.read(run) == {"/a", "/b"}
    shutil.copytree(run, copy)
    assert named_paths.read(copy) == frozenset()
    (run / NAMED_PATHS).write_text((run / NAMED_PATHS).read_text().replace("/b", "/c"))
    assert named_paths.read(run) == frozenset()


def test_ignores_sealed_record_of_different_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    record = {"scheduler": "slurm", "job": "1", "output": "o", "typed": ""}
    sealed = {**record, detached_file.SEAL: detached_file.make_seal(record, tmp_path)}
    (tmp_path / NAMED_PATHS).write_text(json.dumps(sealed))
    assert named_paths.read(tmp_path) == frozenset()
    named_paths.record(tmp_path, {"/a"})
    assert json.loads((tmp_path / NAMED_PATHS).read_text())["kind"] == "named"


def test_unwritable_record_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    named_paths.record(tmp_path / "run", {"/a"})
    assert named_paths.read(tmp_path / "run") == frozenset()
