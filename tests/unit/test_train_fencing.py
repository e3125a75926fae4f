"""Tests two writers of one folder of checkpoints, one of them stopped at every possible moment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.spec.errors import SettingError
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    MAX_STEP,
    MAX_TOKEN,
    checkpoint_name,
    checkpoints,
    parse_version,
    read_pointer,
    resembles_checkpoint,
)
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest, sha256
from paceline.spec.training.used_weights import usable_checkpoint
from paceline.train import files
from paceline.train.checkpoints.format import write_chunks
from paceline.train.checkpoints.store import Fenced, Store

KEEP = 2


def publish_checkpoint(store: Store, step: int, best: bool = False, keep: int = KEEP) -> None:
    """Writes and publishes a checkpoint like the real writer, then prunes."""
    folder = store.temporary(step)
    content = f"{store.token} {step}".encode()
    entry = FileEntry(*write_chunks(folder / "weights.safetensors", iter([content])))
    store.publish(folder, Manifest(step, {"weights.safetensors": entry}, {"best": best}))
    store.prune(keep)


def intact_names(root: Path) -> list[str]:
    """Returns the names of the intact checkpoints, newest first."""
    found, problems = Store(root).scan()
    assert not problems
    for one in found:
        one.manifest.verify(one.path)
    return [one.path.name for one in found]


def test_manifest_records_predecessor(tmp_path: Path) -> None:
    """Covers a new writer, and a step that is written twice, whose predecessor stays the same."""
    root = tmp_path / CHECKPOINTS
    first = claim_writer(root)
    publish_checkpoint(first, 10)
    publish_checkpoint(first, 20)
    second = claim_writer(root)
    for best in (False, True):
        publish_checkpoint(second, 30, best=best, keep=3)
    found = [one.manifest.info.get("previous") for one in Store(root).scan()[0]]
    assert found == [
        {"checkpoint": name, "sha256": sha256(root / name / MANIFEST)} for name in ("20", "10")
    ] + [None]


def claim_writer(root: Path) -> Store:
    store = Store(root)
    store.claim_token(0, "somebody")
    return store


@pytest.fixture(autouse=True)
def skip_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run_interrupted(
    number: int, act: Callable[[], object], interrupt: Callable[[], object]
) -> bool:
    """Runs an action, interrupted before one of its system calls; returns whether that came."""
    calls = 0

    def profile(_: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and function.__module__ in ("posix", "_io"):
            calls += 1
            if calls == number:
                sys.setprofile(None)
                interrupt()

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls >= number


def test_fenced_writer_changes_nothing_at_any_syscall(tmp_path: Path) -> None:
    """Before each system call, another writer takes over, makes checkpoints and continues."""
    number, was_interrupted, published, fenced = 0, True, 0, 0
    while was_interrupted:
        number += 1
        root = tmp_path / str(number)
        first = claim_writer(root)
        for step in (10, 20, 30):
            publish_checkpoint(first, step, best=step == 20)

        def take_over(root: Path = root) -> None:
            second = claim_writer(root)
            resumed_name = intact_names(root)[0]
            assert resumed_name in ("30", "40")
            for step in (35, 40, 45):
                publish_checkpoint(second, step, best=step == 40)

        try:
            was_interrupted = run_interrupted(
                number, lambda w=first: publish_checkpoint(w, 40, best=True), take_over
            )
            published += was_interrupted
        except (Fenced, OSError):  # its temporary folder may have been removed
            fenced += 1
            with pytest.raises(Fenced):
                first.check_not_fenced()
        if not was_interrupted:
            break
        remaining = intact_names(root)
        assert remaining[:2] == ["45.2", "40.2"], (number, remaining)
        third = claim_writer(root)  # whatever pointers the late writer has left
        publish_checkpoint(third, 50)
        publish_checkpoint(third, 60)
        assert intact_names(root) == ["60.3", "50.3", "40.2"]
        assert read_pointer(root / LATEST) == "60.3"
        assert read_pointer(root / BEST) == "40.2"
        assert not list(root.glob(".*.tmp"))
        with pytest.raises(Fenced, match="another writer"):
            publish_checkpoint(first, 70)
        with pytest.raises(Fenced):
            publish_checkpoint(Store(root, 2), 70)
    assert fenced > 10, number
    assert published > 10, number


def test_prune_tolerates_concurrent_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim_writer(tmp_path), claim_writer(tmp_path)
    for step in (10, 20, 30):
        publish_checkpoint(second, step)
    replace = files.replace

    def removed_before(source: Path, target: Path) -> None:
        if target.name.endswith(".gone.tmp"):
            replace(source, target)  # by the other writer
        replace(source, target)

    monkeypatch.setattr(files, "replace", removed_before)
    publish_checkpoint(second, 40)
    assert intact_names(tmp_path) == ["40.2", "30.2"]
    assert first.token == 1


def test_new_writer_outranks_skipped_checkpoints(tmp_path: Path) -> None:
    """Two damaged checkpoints are skipped; later ones are not pruned in favour of higher steps."""
    first = claim_writer(tmp_path)
    for step in (10, 20, 30):
        publish_checkpoint(first, step)
    second = claim_writer(tmp_path)
    publish_checkpoint(second, 15)
    assert intact_names(tmp_path) == ["15.2", "30"]
    publish_checkpoint(second, 25)
    assert intact_names(tmp_path) == ["25.2", "15.2"]


def test_concurrent_claims_get_different_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    highest = Store.highest_token

    def just_before(store: Store) -> int:
        found = highest(store)
        monkeypatch.setattr(Store, "highest_token", highest)
        other.claim_token(0, "the other")
        return found

    monkeypatch.setattr(Store, "highest_token", just_before)
    one.claim_token(0, "one")
    assert (other.token, one.token) == (1, 2)
    with pytest.raises(Fenced) as caught:
        publish_checkpoint(other, 10)
    assert caught.value.found == "one"
    publish_checkpoint(one, 10)
    assert intact_names(tmp_path) == ["10.2"]


def test_claimed_token_exceeds_known_tokens(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.claim_token(6, "")
    assert store.token == 7
    publish_checkpoint(store, 3)
    assert intact_names(tmp_path) == ["3.7"]
    assert Store(tmp_path).highest_token() == 7


def test_names() -> None:
    assert [checkpoint_name(one) for one in ((0, 5), (1, 5), (2, 5))] == ["5", "5", "5.2"]
    assert parse_version("120") == (1, 120)
    assert parse_version("120.3") == (3, 120)
    for name in ("", ".5", "5.", "5.0", "5.1", "5.02", "a", "5.a", "-5", "5.2.3", "٥", "9" * 20):
        assert parse_version(name) is None, name


@given(st.integers(1, MAX_TOKEN), st.integers(0, MAX_STEP))
def test_checkpoint_names_round_trip(token: int, step: int) -> None:
    name = checkpoint_name((token, step))
    assert parse_version(name) == (token, step)
    assert not resembles_checkpoint(name)


@given(st.from_regex(r"[0-9]{1,25}(\.[0-9]{1,25})?", fullmatch=True))
def test_only_canonical_names_have_version(name: str) -> None:
    version = parse_version(name)
    assert resembles_checkpoint(name) if version is None else checkpoint_name(version) == name


@pytest.mark.parametrize("name", ["9999999999999999999.999999999", "5.999999999",
                                  "5.1000000000", "1000000000000000"])  # fmt: skip
def test_skips_and_reports_impossible_version_numbers(tmp_path: Path, name: str) -> None:
    """The folder may be another user's. Checkpoints of the next writer are found and pruned."""
    publish_checkpoint(Store(tmp_path), 10)
    shutil.copytree(tmp_path / "10", tmp_path / name)
    (tmp_path / ".token-9999999999").touch()
    store = Store(tmp_path)
    store.claim_token(0, "")
    assert store.token == 2
    for step in (20, 30):
        publish_checkpoint(store, step)
    assert [one.path.name for one in store.scan()[0]] == ["30.2", "20.2"]
    (passed_over,) = store.scan()[1]
    assert passed_over.startswith(f"{tmp_path / name}: ")


def test_skips_checkpoint_with_manifest_of_another_step(tmp_path: Path) -> None:
    publish_checkpoint(Store(tmp_path), 10)
    shutil.copytree(tmp_path / "10", tmp_path / "70")
    (checkpoint,), (problem,) = Store(tmp_path).scan()
    assert checkpoint.path.name == "10"
    assert problem == f"{tmp_path / '70'}: manifest.json is damaged: it belongs to step 10"


def test_rejects_claim_after_highest_token(tmp_path: Path) -> None:
    (tmp_path / f"5.{MAX_TOKEN}").mkdir()
    with pytest.raises(SettingError, match="no later one can follow"):
        Store(tmp_path).claim_token(0, "")


def test_pruning_counts_only_intact_checkpoints(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (5, 10, 20, 30, 40):
        publish_checkpoint(store, step, keep=0)
    for step in (5, 30, 40):
        (tmp_path / str(step) / "weights.safetensors").unlink()
    store.prune(2)
    assert {one.step for one in store.scan()[0]} == {10, 20, 30, 40}
    publish_checkpoint(store, 50)
    assert {one.step for one in store.scan()[0]} == {20, 30, 40, 50}


def test_usable_checkpoint_of_run(tmp_path: Path) -> None:
    for name in ("10", "20", "15.2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    assert [one.name for one in checkpoints(tmp_path)] == ["15.2", "20", "10"]
    found = usable_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "15.2"
    for text, expected_name in (
        ('{"step": 20, "checkpoint": "20"}', "20"),
        ('{"step": 10}', "10"),  # from earlier versions
        ('{"step": 15, "checkpoint": "../../etc"}', "15.2"),
        ('{"checkpoint": ["x"]}', "15.2"),
        ("[]", "15.2"),
        ("{", "15.2"),
    ):
        (tmp_path / "checkpoints" / BEST).write_text(text)
        found = usable_checkpoint(tmp_path)
        assert found is not None
        assert found.name == expected_name, text


def test_manifests_count_more_than_best_pointer(tmp_path: Path) -> None:
    """They are signed, and the pointer is not."""
    store = Store(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        publish_checkpoint(store, step, best=step < 30, keep=0)
    for name in ("10", "30", "999"):
        (store.root / BEST).write_text(json.dumps({"checkpoint": name}))
        assert usable_checkpoint(tmp_path) == store.root / "20"
    (store.root / BEST).unlink()
    assert usable_checkpoint(tmp_path) == store.root / "20"
