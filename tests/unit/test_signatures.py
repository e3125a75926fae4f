"""Signed checkpoints: what ``paceline verify`` says of each, and which no start resumes from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.cli import program
from paceline.rundir import signatures
from paceline.spec.errors import SettingError
from paceline.spec.rundir import CHECKPOINTS, MANIFEST, SIGNATURES
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest, sha256


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").touch()
    for step in (10, 20, 30):
        make(folder, step)
        if step > 10:  # the first is of an earlier version
            signatures.sign_step(folder, step)
    return folder


def make(run: Path, step: int, content: bytes = b"weights", **about: Any) -> None:
    folder = run / CHECKPOINTS / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.safetensors").write_bytes(content)
    before = run / CHECKPOINTS / str(step - 10) / MANIFEST
    if before.exists():
        about["previous"] = {"checkpoint": str(step - 10), "sha256": sha256(before)}
    entry = FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    (folder / MANIFEST).write_bytes(Manifest(step, {"weights.safetensors": entry}, about).encode())


def statuses(run: Path) -> list[str]:
    return [checkpoint.status for checkpoint in signatures.verify(run)]


def typed(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(program, arguments)


def test_whole_checkpoints_are_signed_or_not(run: Path) -> None:
    assert statuses(run) == ["signed", "signed", "unsigned"]
    ended = typed(["verify", str(run)])
    assert ended.exit_code == 0
    assert [line.split()[:2] for line in ended.output.splitlines()] == [
        ["30", "signed"], ["20", "signed"], ["10", "unsigned"],
    ]  # fmt: skip
    signatures.require_unchanged(run)


def test_a_changed_file_is_found(run: Path) -> None:
    (run / CHECKPOINTS / "20" / "weights.safetensors").write_bytes(b"Weights")
    assert statuses(run) == ["signed", "changed", "unsigned"]
    ended = typed(["verify", str(run)])
    assert ended.exit_code == 1
    assert "weights.safetensors is not the file that was written" in ended.output
    signatures.require_unchanged(run)  # ranks find out by themselves, and skip it


def test_a_file_that_the_manifest_does_not_name_is_found(run: Path) -> None:
    """Readers would take it for the shard of one more rank."""
    (run / CHECKPOINTS / "20" / "weights").mkdir()
    (run / CHECKPOINTS / "20" / "weights" / "00001.safetensors").write_bytes(b"others")
    assert statuses(run) == ["signed", "changed", "unsigned"]
    ended = typed(["verify", str(run)])
    assert "'weights/00001.safetensors' is not in its manifest" in ended.output


def test_a_forged_manifest_is_found_and_no_start_uses_it(run: Path) -> None:
    """It fits the files, so that a rank would load it."""
    make(run, 20, b"other weights")
    successor, forged, _ = signatures.verify(run)
    assert (forged.status, forged.is_signed) == ("changed", False)
    assert forged.problem == "its manifest was replaced after you signed it"
    assert successor.problem == "its predecessor 20 was replaced"
    with pytest.raises(SettingError, match="checkpoint 20 was replaced") as refused:
        signatures.require_unchanged(run)
    assert "paceline verify" in str(refused.value.remedy)


def test_an_unsigned_predecessor_cannot_be_replaced_unnoticed(run: Path) -> None:
    make(run, 10, b"other weights")
    assert statuses(run) == ["signed", "changed", "unsigned"]


def test_damage_is_no_forgery(run: Path) -> None:
    with (run / CHECKPOINTS / "30" / MANIFEST).open("ab") as file:
        file.write(b" ")
    assert statuses(run) == ["changed", "signed", "unsigned"]
    signatures.require_unchanged(run)


def test_removed_checkpoints_and_new_signatures_are_no_change(run: Path) -> None:
    (run / CHECKPOINTS / "10" / MANIFEST).unlink()
    make(run, 30, best=True)  # the same state, which turned out to be the best
    signatures.sign(run, "30")
    assert statuses(run) == ["signed", "signed"]
    with (run / SIGNATURES).open("ab") as file:
        file.write(b'{"checkpoint": "30", "manifest": "' + b"0" * 64 + b'"}\n{"che')  # cut off
    assert statuses(run) == ["signed", "signed"]
    make(run, 40)
    signatures.sign_step(run, None)
    assert statuses(run) == ["signed"] * 3


def test_a_new_checkpoint_may_have_the_name_of_a_removed_one(run: Path) -> None:
    for file in (run / CHECKPOINTS / "30").iterdir():
        file.unlink()
    signatures.forget_removed(run)
    make(run, 30, b"of a later start")  # whose launcher was killed before it signed
    assert statuses(run) == ["unsigned", "signed", "unsigned"]
    signatures.require_unchanged(run)


def test_signatures_of_another_user_or_folder_do_not_count(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "moved")
    assert statuses(moved) == ["unsigned"] * 3
    moved.rename(run)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    assert statuses(run) == ["unsigned"] * 3


def test_a_run_without_checkpoints_has_nothing_to_verify(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    ended = typed(["verify", str(tmp_path)])
    assert (ended.exit_code, ended.output) == (0, f"no checkpoints in {tmp_path}\n")
