"""Two writers of one folder of checkpoints, one of them stopped at every possible moment."""

from __future__ import annotations

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
    usable_checkpoint,
)
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest, sha256
from paceline.train import files
from paceline.train.checkpoints.format import write_chunks
from paceline.train.checkpoints.store import Fenced, Store

KEEP = 2


def make(store: Store, step: int, best: bool = False, keep: int = KEEP) -> None:
    """A checkpoint as the writer makes one, and the pruning after it."""
    made = store.temporary(step)
    content = f"{store.token} {step}".encode()
    entry = FileEntry(*write_chunks(made / "weights.safetensors", iter([content])))
    store.publish(made, Manifest(step, {"weights.safetensors": entry}, {"best": best}))
    store.prune(keep)


def names(root: Path) -> list[str]:
    """Of the intact checkpoints, newest first."""
    found, bad = Store(root).scan()
    assert not bad
    for one in found:
        one.manifest.verify(one.path)
    return [one.path.name for one in found]


def test_a_manifest_names_its_predecessor(tmp_path: Path) -> None:
    """Whatever its writer was, and the one before if the same step is written again."""
    root = tmp_path / CHECKPOINTS
    first = writer(root)
    make(first, 10)
    make(first, 20)
    second = writer(root)
    for best in (False, True):
        make(second, 30, best=best, keep=3)
    found = [one.manifest.info.get("previous") for one in Store(root).scan()[0]]
    assert found == [
        {"checkpoint": name, "sha256": sha256(root / name / MANIFEST)} for name in ("20", "10")
    ] + [None]


def writer(root: Path) -> Store:
    store = Store(root)
    store.claim_token(0, "somebody")
    return store


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def paused(number: int, act: Callable[[], object], meanwhile: Callable[[], object]) -> bool:
    """Does ``act``, and before its call ``number`` of the system ``meanwhile``; whether it came."""
    calls = 0

    def profile(_: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and function.__module__ in ("posix", "_io"):
            calls += 1
            if calls == number:
                sys.setprofile(None)
                meanwhile()

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls >= number


def test_a_late_writer_changes_nothing_at_any_moment(tmp_path: Path) -> None:
    """Before each call of the system another one takes over, makes checkpoints and goes on."""
    number, came, published, fenced = 0, True, 0, 0
    while came:
        number += 1
        root = tmp_path / str(number)
        first = writer(root)
        for step in (10, 20, 30):
            make(first, step, best=step == 20)

        def take_over(root: Path = root) -> None:
            second = writer(root)
            begun = names(root)[0]
            assert begun in ("30", "40")
            for step in (35, 40, 45):
                make(second, step, best=step == 40)

        try:
            came = paused(number, lambda w=first: make(w, 40, best=True), take_over)
            published += came
        except (Fenced, OSError):  # its half folder may have been cleared away
            fenced += 1
            with pytest.raises(Fenced):
                first.check_not_fenced()
        if not came:
            break
        left = names(root)
        assert left[:2] == ["45.2", "40.2"], (number, left)
        third = writer(root)  # whatever pointers the late one has left
        make(third, 50)
        make(third, 60)
        assert names(root) == ["60.3", "50.3", "40.2"]
        assert read_pointer(root / LATEST) == "60.3"
        assert read_pointer(root / BEST) == "40.2"
        assert not list(root.glob(".*.tmp"))
        with pytest.raises(Fenced, match="another writer"):
            make(first, 70)
        with pytest.raises(Fenced):
            make(Store(root, 2), 70)
    assert fenced > 10, number
    assert published > 10, number


def test_a_fenced_writer_removes_an_old_one_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = writer(tmp_path), writer(tmp_path)
    for step in (10, 20, 30):
        make(second, step)
    replace = files.replace

    def removed_before(source: Path, target: Path) -> None:
        if target.name.endswith(".gone.tmp"):
            replace(source, target)  # the other's
        replace(source, target)

    monkeypatch.setattr(files, "replace", removed_before)
    make(second, 40)
    assert names(tmp_path) == ["40.2", "30.2"]
    assert first.token == 1


def test_a_new_start_outranks_what_it_did_not_resume(tmp_path: Path) -> None:
    """Two damaged ones are passed over; what is made after that is not pruned for older steps."""
    first = writer(tmp_path)
    for step in (10, 20, 30):
        make(first, step)
    second = writer(tmp_path)
    make(second, 15)
    assert names(tmp_path) == ["15.2", "30"]
    make(second, 25)
    assert names(tmp_path) == ["25.2", "15.2"]


def test_two_at_once_get_different_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(Fenced) as told:
        make(other, 10)
    assert told.value.found == "one"
    make(one, 10)
    assert names(tmp_path) == ["10.2"]


def test_a_token_is_larger_than_any_that_others_know(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.claim_token(6, "")
    assert store.token == 7
    make(store, 3)
    assert names(tmp_path) == ["3.7"]
    assert Store(tmp_path).highest_token() == 7


def test_names() -> None:
    assert [checkpoint_name(one) for one in ((0, 5), (1, 5), (2, 5))] == ["5", "5", "5.2"]
    assert parse_version("120") == (1, 120)
    assert parse_version("120.3") == (3, 120)
    for name in ("", ".5", "5.", "5.0", "5.1", "5.02", "a", "5.a", "-5", "5.2.3", "٥", "9" * 20):
        assert parse_version(name) is None, name


@given(st.integers(1, MAX_TOKEN), st.integers(0, MAX_STEP))
def test_what_a_writer_names_its_readers_find(token: int, step: int) -> None:
    name = checkpoint_name((token, step))
    assert parse_version(name) == (token, step)
    assert not resembles_checkpoint(name)


@given(st.from_regex(r"[0-9]{1,25}(\.[0-9]{1,25})?", fullmatch=True))
def test_a_name_is_that_of_its_version_or_of_none(name: str) -> None:
    version = parse_version(name)
    assert resembles_checkpoint(name) if version is None else checkpoint_name(version) == name


@pytest.mark.parametrize("name", ["9999999999999999999.999999999", "5.999999999",
                                  "5.1000000000", "1000000000000000"])  # fmt: skip
def test_a_number_that_no_run_reaches_is_passed_over_and_named(tmp_path: Path, name: str) -> None:
    """In a folder from somebody else. The next writer's checkpoints are found, and pruned."""
    make(Store(tmp_path), 10)
    shutil.copytree(tmp_path / "10", tmp_path / name)
    (tmp_path / ".token-9999999999").touch()
    store = Store(tmp_path)
    store.claim_token(0, "")
    assert store.token == 2
    for step in (20, 30):
        make(store, step)
    assert [one.path.name for one in store.scan()[0]] == ["30.2", "20.2"]
    (passed_over,) = store.scan()[1]
    assert passed_over.startswith(f"{tmp_path / name}: ")


def test_after_the_last_number_of_a_writer_nobody_begins(tmp_path: Path) -> None:
    (tmp_path / f"5.{MAX_TOKEN}").mkdir()
    with pytest.raises(SettingError, match="no later one can follow"):
        Store(tmp_path).claim_token(0, "")


def test_pruning_counts_only_checkpoints_that_are_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (5, 10, 20, 30, 40):
        make(store, step, keep=0)
    for step in (5, 30, 40):
        (tmp_path / str(step) / "weights.safetensors").unlink()
    store.prune(2)
    assert {one.step for one in store.scan()[0]} == {10, 20, 30, 40}
    make(store, 50)
    assert {one.step for one in store.scan()[0]} == {20, 30, 40, 50}


def test_what_is_used_of_a_run(tmp_path: Path) -> None:
    for name in ("10", "20", "15.2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    assert [one.name for one in checkpoints(tmp_path)] == ["15.2", "20", "10"]
    found = usable_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "15.2"
    for text, meant in (
        ('{"step": 20, "checkpoint": "20"}', "20"),
        ('{"step": 10}', "10"),  # as earlier versions wrote it
        ('{"step": 15, "checkpoint": "../../etc"}', "15.2"),
        ('{"checkpoint": ["x"]}', "15.2"),
        ("[]", "15.2"),
        ("{", "15.2"),
    ):
        (tmp_path / "checkpoints" / BEST).write_text(text)
        found = usable_checkpoint(tmp_path)
        assert found is not None
        assert found.name == meant, text
