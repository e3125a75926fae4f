"""Data and weights leave this machine only if this user's command named them."""

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
    """Runs a command up to the first connection; returns the job, or raises its error."""
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
    """A run directory as a hostile host or somebody else leaves it."""
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


def test_what_a_run_names_is_not_sent(command: Command, tmp_path: Path, secret: Path) -> None:
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
        assert command("evaluate", str(run), "-p", "2")  # nothing leaves this machine
        assert command("evaluate", str(run), "-H", "n1,n2", "--data", str(path))
        assert command("train", recipe, "--like", str(run), "-H", "n1,n2", flag, str(path))


def test_weights_that_a_run_names_are_not_sent(
    command: Command, tmp_path: Path, secret: Path
) -> None:
    run = make_run(tmp_path / "run", weights=str(secret))
    with pytest.raises(SettingError, match="is not sent"):
        command("train", "image", f"--like={run}", "-H", "n1,n2")
    with pytest.raises(SettingError, match="is not sent"):
        command("train", "image", "--like", str(run / "config.json"), "-H", "n1,n2")
    with pytest.raises(SettingError, match="is not sent"):
        command("forecast", "image", "--like", str(run), "-H", "n1,n2")


def test_what_a_command_named_is_sent_again(command: Command, tmp_path: Path, secret: Path) -> None:
    photos, weights = tmp_path / "photos", tmp_path / "old.safetensors"
    photos.mkdir()
    weights.touch()
    options = ("--data", "photos", "--weights", "old.safetensors")
    first = command("train", "image", "-H", "n1,n2", "--run-dir", "first", *options)
    run = make_run(tmp_path / "first", data=str(photos), weights=str(weights))
    assert command("evaluate", "first", "-H", "n1,n2").data == first.data
    again = ("train", "image", "--like", "first", "-H", "n1,n2", "--run-dir", "second")
    assert command(*again).inputs == first.inputs
    assert named_paths.read(tmp_path / "second") == {str(photos), str(weights)}
    make_run(run, data=str(secret.parent), weights=str(weights))  # by a host, at the run's end
    for argv in (("evaluate", "first", "-H", "n1,n2"), again):
        with pytest.raises(SettingError, match="is not sent"):
            command(*argv)


def test_a_training_here_does_not_name_what_its_model_named(
    command: Command, tmp_path: Path, secret: Path
) -> None:
    make_run(tmp_path / "foreign", data=str(secret.parent))
    command("train", "image", "--like", "foreign", "--run-dir", "mine")
    make_run(tmp_path / "mine", data=str(secret.parent))
    with pytest.raises(SettingError, match="is not sent"):
        command("evaluate", "mine", "-H", "n1,n2")


def test_a_record_counts_in_its_folder_only(
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


def test_another_sealed_record_names_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    record = {"scheduler": "slurm", "job": "1", "output": "o", "typed": ""}
    sealed = {**record, detached_file.SEAL: detached_file.make_seal(record, tmp_path)}
    (tmp_path / NAMED_PATHS).write_text(json.dumps(sealed))
    assert named_paths.read(tmp_path) == frozenset()
    named_paths.record(tmp_path, {"/a"})
    assert json.loads((tmp_path / NAMED_PATHS).read_text())["kind"] == "named"


def test_no_record_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "settings").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    named_paths.record(tmp_path / "run", {"/a"})
    assert named_paths.read(tmp_path / "run") == frozenset()
