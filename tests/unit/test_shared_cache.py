"""Tests several agents with one cache: hosts or containers that share a home directory."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.files import data, snapshot

SOURCE = Path(snapshot.__file__).resolve().parents[2]
AGENTS = 4
KEY = "0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline"


def run_concurrently(program: str) -> list[str]:
    """Runs a program in several processes at once, as agents on one disk; returns their output."""
    preamble = "import sys\nfrom paceline.agent.files import snapshot\nprint(flush=True)\ninput()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    agents = [
        subprocess.Popen([sys.executable, "-c", preamble + program], env=env, text=True, **pipes)  # type: ignore[call-overload]
        for _ in range(AGENTS)
    ]
    for agent in agents:
        agent.stdout.readline()
    for agent in agents:
        agent.stdin.write("\n")
        agent.stdin.flush()
    return [agent.communicate()[0] for agent in agents]


def test_concurrent_agents_build_same_tree(cache: Path) -> None:
    """Each agent has a complete tree when it is done, and no incomplete one remains."""
    contents = [str(number).encode() * 100 for number in range(30)]
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    snapshot.store(zip(hashes, contents, strict=True))
    manifest = [[f"{index % 3}/{index}", digest, 0o644, len(contents[index])]
                for index, digest in enumerate(hashes)]  # fmt: skip
    root = str(snapshot.job_folder("run1") / "code")
    build = f"""
for _ in range(20):
    damaged = snapshot.build_tree({root!r}, {manifest[:20]!r}, is_last=False)
    damaged += snapshot.build_tree({root!r}, {manifest[20:]!r}, is_first=False)
    assert not damaged
print("built")
"""
    assert run_concurrently(build) == ["built\n"] * AGENTS
    assert snapshot.compare(root, manifest) == {"exists": True, "missing": [], "different": []}
    assert [path.name for path in Path(root).parent.iterdir()] == ["code"]


def test_concurrent_agents_create_run_folders(cache: Path) -> None:
    make = """
for number in range(200):
    snapshot.make_run_folder("%024x" % number)
print("made")
"""
    assert run_concurrently(make) == ["made\n"] * AGENTS
    assert sorted(path.name for path in (cache / "runs").iterdir()) == [
        f"{number:024x}" for number in range(200)
    ]
    assert all(snapshot.discard_run_folder(f"{number:024x}") for number in range(200))


def test_rejects_tree_without_first_part(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"the beginning of .*/code did not come"):
        snapshot.build_tree(str(snapshot.job_folder("run1") / "code"), [], is_first=False)


def test_ending_agent_keeps_folder_of_successor(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was lost and has returned may have two agents for a while."""
    folder = snapshot.job_folder("run1")
    snapshot.claim_job_folder(folder)
    (folder / "code").mkdir()
    original_id = snapshot._AGENT_ID
    monkeypatch.setattr(snapshot, "_AGENT_ID", "f" * 16)
    snapshot.claim_job_folder(folder)
    monkeypatch.setattr(snapshot, "_AGENT_ID", original_id)
    snapshot.discard_job_folder(folder)
    assert (folder / "code").is_dir()
    monkeypatch.setattr(snapshot, "_AGENT_ID", "f" * 16)
    snapshot.discard_job_folder(folder)
    assert not folder.exists()


# --- copies of data

CONTENT = b"0123456789" * 100
LAST_BLOCK = {
    "last": True,
    "sha256": hashlib.sha256(CONTENT).hexdigest(),
    "mtime": 1_700_000_000_000_000,
}


@pytest.fixture(params=["locks", "no locks", "locks for one host only"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects what the disk supports: locks, no locks, or locks without effect."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if request.param != "locks":
        flock = none if request.param == "no locks" else lambda *_: None
        monkeypatch.setattr(data.fcntl, "flock", flock)
    return str(request.param)


@pytest.fixture
def agents(cache: Path) -> Iterator[list[data.DataCopies]]:
    """Creates three agents that share one disk and a copy of data on it."""
    all_copies = [data.DataCopies(str(number) * 32) for number in range(3)]
    for copies in all_copies:
        copies.open_copy(KEY, "photos")
    yield all_copies
    for copies in all_copies:
        copies.close()


def read_big_file(cache: Path) -> bytes:
    return (cache / "data" / KEY / "files/photos/big").read_bytes()


def test_two_launchers_send_large_file_to_shared_disk(
    cache: Path, locks: str, agents: list[data.DataCopies]
) -> None:
    """Each agent fills its own temporary file; both complete independently."""
    for copies in agents[:2]:
        assert copies.resume(KEY, "photos", "big")[0] == 0
        copies.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, CONTENT[:600])
    for copies in agents[:2]:
        copies.write_block(KEY, "photos", "big", {"offset": 600, **LAST_BLOCK}, CONTENT[600:])
        assert read_big_file(cache) == CONTENT
    assert list((cache / "data" / KEY / data.ARRIVING).iterdir()) == []


def test_exactly_one_agent_resumes_partial_file(
    cache: Path, locks: str, agents: list[data.DataCopies]
) -> None:
    first, *remaining = agents
    first.resume(KEY, "photos", "big")
    first.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, CONTENT[:600])
    first.close()
    assert [copies.resume(KEY, "photos", "big")[0] for copies in remaining] == [600, 0]
    for offset, copies in zip((600, 0), remaining, strict=True):
        copies.write_block(KEY, "photos", "big", {"offset": offset, **LAST_BLOCK}, CONTENT[offset:])
        assert read_big_file(cache) == CONTENT


def test_resumes_partial_file_of_killed_agent(cache: Path, agents: list[data.DataCopies]) -> None:
    """A temporary file is reused only if it is old and not locked, so that its agent has ended."""
    first, second, third = agents
    first.resume(KEY, "photos", "big")
    first.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, CONTENT[:600])
    partial_dir = cache / "data" / KEY / data.ARRIVING
    (part,) = partial_dir.iterdir()
    (partial_dir / f"{part.name[:-1]}x").write_bytes(part.read_bytes())  # without a process
    for path in partial_dir.iterdir():
        os.utime(path, (0, 0))
    assert [copies.resume(KEY, "photos", "big")[0] for copies in (second, third)] == [600, 0]


# --- folders that others use


def test_run_folder_survives_while_second_agent_uses_it(cache: Path) -> None:
    folder = snapshot.make_run_folder(KEY, "a" * 32)
    assert snapshot.make_run_folder(KEY, "b" * 32) == folder
    assert snapshot.changed_files(str(folder), None) == []
    assert not snapshot.discard_run_folder(KEY, only=[], user="a" * 32)
    assert snapshot.discard_run_folder(KEY, only=[], user="b" * 32)
    snapshot.make_run_folder(KEY, "a" * 32)
    snapshot.make_run_folder(KEY, "b" * 32)
    assert snapshot.discard_run_folder(KEY, user="a" * 32)  # the run is over, all is fetched
    assert list((cache / "runs").iterdir()) == []


def test_keeps_folders_made_in_another_container(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be dead in this container and alive in the other: its folder stays."""
    (cache / "runs").mkdir(parents=True)
    created = snapshot._private_folder(snapshot.run_folder(KEY))
    unused_pid = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    stale_folder = created.rename(
        created.with_name(created.name.replace(f"-{os.getpid()}-", f"-{unused_pid}-"))
    )
    readlink = os.readlink
    with monkeypatch.context() as patched:
        patched.setattr(os, "readlink", lambda path: f"{readlink(path)} of another container")
        snapshot.remove_old(keep="")
        assert stale_folder.exists()
    snapshot.remove_old(keep="")
    assert not stale_folder.exists()
