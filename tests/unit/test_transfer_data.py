"""Tests that only differences of data folders are sent, and interrupted transfers are resumed."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.files import data as agent_data
from paceline.agent.files import snapshot
from paceline.spec.errors import NodeError, PacelineError
from paceline.transfer import data
from paceline.transfer.data import Comparison, DataFolder
from real_agents import ENDLESS, Served, agent_in_thread

BLOCK = 512


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets up a private cache for the agent, with small blocks so that little data makes many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(data, "MAX_SMALL_BYTES", BLOCK // 2)
    monkeypatch.setattr(data, "MIN_RESUMED_BYTES", 4 * BLOCK)
    return tmp_path / "cache" / "paceline"


def content(seed: object, size: int) -> bytes:
    return random.Random(f"{seed} {size}").randbytes(size)


FILES = {
    "cats/1.png": content("a", 100),
    "cats/2.png": content("b", 100),
    "dogs/1.png": content("c", 200),
    "dogs/old/2.png": b"",
    "big.tar": content("d", 20 * BLOCK + 7),
    "even.tar": content("e", 8 * BLOCK),
    "labels.csv": content("f", BLOCK),
}


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, body in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return root


def read_files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return fill(tmp_path / "here" / "photos", FILES)


def run(work: Callable[[Served], Coroutine[Any, Any, Any]], left: int = ENDLESS) -> Any:
    async def go() -> tuple[Any, int]:
        async with agent_in_thread(left) as served:
            return await work(served), served.line.passed

    return asyncio.run(asyncio.wait_for(go(), 30))


def sync(root: Path, left: int = ENDLESS, always: bool = True) -> tuple[data.DataPlace, int, int]:
    """Returns the node's missing data, the bytes reported as sent, and those on the connection."""
    told: list[int] = []
    folder = DataFolder(root, "me")

    async def work(served: Served) -> data.DataPlace:
        place = await data.locate(served.node.channel, folder, always)
        if not place.in_place:
            await data.send(served.node.channel, folder, place, told.append)
        return place

    place, passed = run(work, left)
    return place, sum(told), passed


# --- differences


def compare_listings(local: list[list[Any]], remote: list[list[Any]], page: int = 2) -> Comparison:
    ordered = [
        sorted(items, key=lambda item: agent_data.sort_key(item[0])) for items in (local, remote)
    ]
    comparison = Comparison(ordered[0])
    for start in range(0, len(ordered[1]), page):
        comparison.feed(ordered[1][start : start + page])
    comparison.finish()
    return comparison


def test_comparison_differences() -> None:
    local = [["a", 1, 5], ["b/c", 2, 5], ["b/d", 3, 5], ["e/f", 4, 5], ["z", 1, 1]]
    remote = [["a", 1, 5], ["a.b", 1, 1], ["b/c", 2, 6], ["b/d", 9, 5], ["g/h", 1, 1]]
    found = compare_listings(local, remote).differences
    assert [item[0] for item in found.missing] == ["z", "b/d", "e/f"]
    assert [item[0] for item in found.doubtful] == ["b/c"]
    assert found.extra == ["a.b", "g/h"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["b", "a"], "not sorted"), (["b", "b"], "not sorted"), (["b" * 60, "c" * 60], "without end")],
)
def test_comparison_rejects_unsorted_and_endless_lists(
    names: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_EXTRA_BYTES", 150)
    comparison = Comparison([])
    with pytest.raises(ValueError, match=problem):
        comparison.feed([[name, 1, 5] for name in names])


def test_comparison_of_random_folders() -> None:
    draw = random.Random(3)
    for _ in range(200):
        names = ["/".join(draw.choices("ab.-", k=draw.randint(1, 3))) for _ in range(8)]
        local = {n: [n, draw.randint(0, 1), draw.randint(0, 1)] for n in draw.sample(names, 5)}
        remote = {n: [n, draw.randint(0, 1), draw.randint(0, 1)] for n in draw.sample(names, 5)}
        found = compare_listings(
            [*local.values()], [*remote.values()], draw.randint(1, 4)
        ).differences
        assert {i[0] for i in found.missing} == {
            n for n in local if n not in remote or remote[n][1] != local[n][1]
        }
        assert {i[0] for i in found.doubtful} == {
            n
            for n in local
            if n in remote and remote[n][1] == local[n][1] and remote[n] != local[n]
        }
        assert set(found.extra) == set(remote) - set(local)


def test_walk_is_sorted(photos: Path) -> None:
    paths = [item[0] for item in agent_data.walk(str(photos))]
    assert paths == sorted(paths, key=agent_data.sort_key)
    assert set(paths) == set(FILES)


def test_walk_follows_links_and_breaks_loops(photos: Path, tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", {"x": b"1"})
    (photos / "linked").symlink_to(tmp_path / "elsewhere")
    (photos / "cats" / "again").symlink_to(photos)
    (photos / "nowhere").symlink_to(tmp_path / "nowhere")
    assert {item[0] for item in agent_data.walk(str(photos))} == {*FILES, "linked/x"}


# --- transfers to a node


def test_rejects_exponential_link_chains(tmp_path: Path) -> None:
    """Ten nested folders of links stand for a thousand million files."""
    for number in range(10):
        (tmp_path / f"d{number}").mkdir()
        for name in "abcdefghij" if number < 9 else "":
            (tmp_path / f"d{number}" / name).symlink_to(f"../d{number + 1}")
    with pytest.raises(OSError, match="more than 1000 ways through links lead to one folder"):
        list(agent_data.walk(str(tmp_path)))


def test_unchanged_folder_is_sent_only_once(photos: Path) -> None:
    place, told, _ = sync(photos)
    assert read_files(Path(place.folder)) == FILES
    assert Path(place.folder).name == "photos"
    assert told == sum(map(len, FILES.values()))
    second_place, told, passed = sync(photos)
    assert (second_place.missing, second_place.extra, told) == ([], [], 0)
    assert passed < 20_000


def test_sends_only_changes(photos: Path) -> None:
    sync(photos)
    (photos / "cats/1.png").write_bytes(b"new")
    (photos / "dogs/old/2.png").unlink()
    os.utime(photos / "big.tar", (5, 5))
    (photos / "even.tar").write_bytes(content("other", 8 * BLOCK))  # of equal size
    place, told, _ = sync(photos)
    assert [item[0] for item in place.missing] == ["cats/1.png", "even.tar"]
    assert [item[0] for item in place.unchanged] == ["big.tar"]
    assert place.extra == ["dogs/old/2.png"]
    assert told == 3 + 8 * BLOCK
    assert read_files(Path(place.folder)) == read_files(photos)
    assert not (Path(place.folder) / "dogs/old").exists()  # an empty folder would be a class
    assert sync(photos)[0].unchanged == []


def test_file_replaces_folder(photos: Path) -> None:
    sync(photos)
    (photos / "cats/1.png").unlink()
    (photos / "cats/2.png").unlink()
    (photos / "cats").rmdir()
    (photos / "cats").write_bytes(b"a file")
    place, _, _ = sync(photos)
    assert read_files(Path(place.folder)) == read_files(photos)


def test_shared_folder_is_used_in_place(photos: Path) -> None:
    place, _, _ = sync(photos, always=False)
    assert place.in_place
    assert place.folder == str(photos)


@pytest.mark.parametrize("change", ["none", "time", "content", "more"])
def test_equal_folder_at_same_path_is_used_in_place(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The local folder has other marks, as on another disk."""
    folder = DataFolder(photos, "me")
    folder.items()
    monkeypatch.setattr(DataFolder, "marks", lambda self: ["another disk"])
    if change == "time":
        os.utime(photos / "big.tar", (5, 5))
    if change == "content":
        folder._items = [[*item[:2], item[2] - 1] for item in folder.items()]
        folder._hashes = {"big.tar": "another"}
    if change == "more":
        (photos / "cats/3.png").write_bytes(b"")

    async def work(served: Served) -> data.DataPlace:
        return await data.locate(served.node.channel, folder)

    assert run(work)[0].in_place == (change in ("none", "time"))


def test_interrupted_transfer_resumes(photos: Path, cache: Path) -> None:
    """After repeated interruptions, every try makes progress; no partial file has its name."""
    full_bytes = sync(photos)[2]
    snapshot.remove_folder(cache / "data")
    attempts = 0
    while True:
        attempts += 1
        try:
            place = sync(photos, left=full_bytes // 2)[0]
            break
        except (ConnectionError, PacelineError):
            copies = [*cache.glob("data/*/files/photos")]
            found = read_files(copies[0]) if copies else {}
            assert all(FILES[name] == body for name, body in found.items())
            assert attempts < 12
    assert attempts > 1
    assert read_files(Path(place.folder)) == FILES
    assert [*cache.glob("data/*/arriving/*")] == []


def test_large_file_resumes_at_block(photos: Path, cache: Path) -> None:
    (photos / "big.tar").write_bytes(big := content("big", 300 * BLOCK))
    with pytest.raises((ConnectionError, PacelineError)):
        sync(photos, left=100 * BLOCK)
    (left,) = cache.glob("data/*/arriving/*")
    assert left.stat().st_size > 10 * BLOCK
    passed = sync(photos)[2]
    assert passed < 350 * BLOCK  # without resuming: 480, half of them requests
    (copy,) = cache.glob("data/*/files/photos/big.tar")
    assert copy.read_bytes() == big


def test_does_not_resume_from_different_file(photos: Path, cache: Path) -> None:
    (photos / "big.tar").write_bytes(content("big", 300 * BLOCK))
    with pytest.raises((ConnectionError, PacelineError)):
        sync(photos, left=100 * BLOCK)
    (photos / "big.tar").write_bytes(content("other", 299 * BLOCK))
    place, _, _ = sync(photos)
    assert read_files(Path(place.folder)) == read_files(photos)


def test_rejects_transfer_without_disk_space(photos: Path) -> None:
    folder = DataFolder(photos, "me")

    async def work(served: Served) -> None:
        place = await data.locate(served.node.channel, folder, needs_copy=True)
        place.free = 1000
        with pytest.raises(NodeError, match="n1 has no room for the data") as told:
            await data.send(served.node.channel, folder, place, lambda _: None)
        assert "7 files" in told.value.found
        assert not Path(place.folder).exists()

    run(work)


@pytest.mark.parametrize(
    ("name", "size"), [("cats/1.png", 3), ("cats/1.png", 30 * BLOCK), ("big.tar", 3)]
)
def test_rejects_file_changed_during_transfer(photos: Path, name: str, size: int) -> None:
    folder = DataFolder(photos, "me")

    async def work(served: Served) -> None:
        place = await data.locate(served.node.channel, folder, needs_copy=True)
        (photos / name).write_bytes(content("z", size))
        with pytest.raises(NodeError, match="changed while they were sent"):
            await data.send(served.node.channel, folder, place, lambda _: None)

    run(work)


def test_sends_non_utf8_names(photos: Path) -> None:
    (photos / os.fsdecode(b"caf\xe9 \n.png")).write_bytes(b"1")
    (photos / "ü 'x'.png").write_bytes(b"2")
    place, _, _ = sync(photos)
    assert read_files(Path(place.folder)) == read_files(photos)


def test_unused_copies_expire_after_a_month(photos: Path, cache: Path) -> None:
    place, _, _ = sync(photos)
    (used_marker,) = cache.glob("data/*/used")
    agent_data.remove_old()
    assert Path(place.folder).exists()
    expired_time = time.time() - snapshot.MAX_AGE_S - 60
    os.utime(used_marker, (expired_time, expired_time))
    copies = agent_data.DataCopies("ab")
    copies.open_copy(used_marker.parent.name, "photos")  # it is used again
    os.utime(used_marker, (expired_time, expired_time))
    agent_data.remove_old()
    assert Path(place.folder).exists()
    copies.close()
    agent_data.remove_old()
    assert not used_marker.parent.exists()
