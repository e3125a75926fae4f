"""Several agents with one cache: hosts, or containers, that share their home directory."""

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


def at_once(program: str) -> list[str]:
    """What processes print that run the program at the same time, as agents of one disk do."""
    begin = "import sys\nfrom paceline.agent.files import snapshot\nprint(flush=True)\ninput()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    agents = [
        subprocess.Popen([sys.executable, "-c", begin + program], env=env, text=True, **pipes)  # type: ignore[call-overload]
        for _ in range(AGENTS)
    ]
    for agent in agents:
        agent.stdout.readline()
    for agent in agents:
        agent.stdin.write("\n")
        agent.stdin.flush()
    return [agent.communicate()[0] for agent in agents]


def test_agents_build_one_tree_at_once(cache: Path) -> None:
    """Each of them has a whole tree whenever it is done, and nothing half built is left."""
    contents = [str(number).encode() * 100 for number in range(30)]
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    snapshot.store(zip(hashes, contents, strict=True))
    manifest = [[f"{at % 3}/{at}", digest, 0o644, len(contents[at])]
                for at, digest in enumerate(hashes)]  # fmt: skip
    root = str(snapshot.job_folder("run1") / "code")
    build = f"""
for _ in range(20):
    damaged = snapshot.build_tree({root!r}, {manifest[:20]!r}, is_last=False)
    damaged += snapshot.build_tree({root!r}, {manifest[20:]!r}, is_first=False)
    assert not damaged
print("built")
"""
    assert at_once(build) == ["built\n"] * AGENTS
    assert snapshot.compare(root, manifest) == {"exists": True, "missing": [], "different": []}
    assert [path.name for path in Path(root).parent.iterdir()] == ["code"]


def test_agents_make_one_run_folder_at_once(cache: Path) -> None:
    make = """
for number in range(200):
    snapshot.make_run_folder("%024x" % number)
print("made")
"""
    assert at_once(make) == ["made\n"] * AGENTS
    assert sorted(path.name for path in (cache / "runs").iterdir()) == [
        f"{number:024x}" for number in range(200)
    ]
    assert all(snapshot.discard_run_folder(f"{number:024x}") for number in range(200))


def test_a_tree_that_begins_in_the_middle_is_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match=r"the beginning of .*/code did not come"):
        snapshot.build_tree(str(snapshot.job_folder("run1") / "code"), [], is_first=False)


def test_an_ending_agent_leaves_the_folder_of_its_successor(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was lost and has come back may have two agents for a while."""
    folder = snapshot.job_folder("run1")
    snapshot.claim_job_folder(folder)
    (folder / "code").mkdir()
    earlier = snapshot._AGENT_ID
    monkeypatch.setattr(snapshot, "_AGENT_ID", "f" * 16)
    snapshot.claim_job_folder(folder)
    monkeypatch.setattr(snapshot, "_AGENT_ID", earlier)
    snapshot.discard_job_folder(folder)
    assert (folder / "code").is_dir()
    monkeypatch.setattr(snapshot, "_AGENT_ID", "f" * 16)
    snapshot.discard_job_folder(folder)
    assert not folder.exists()


# --- copies of data

WHOLE = b"0123456789" * 100
LAST = {"last": True, "sha256": hashlib.sha256(WHOLE).hexdigest(), "mtime": 1_700_000_000_000_000}


@pytest.fixture(params=["locks", "no locks", "locks for one host only"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the disk knows of locks."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if request.param != "locks":
        flock = none if request.param == "no locks" else lambda *_: None
        monkeypatch.setattr(data.fcntl, "flock", flock)
    return str(request.param)


@pytest.fixture
def agents(cache: Path) -> Iterator[list[data.DataCopies]]:
    """Three that have one disk, and a copy of data on it."""
    found = [data.DataCopies(str(number) * 32) for number in range(3)]
    for copies in found:
        copies.open_copy(KEY, "photos")
    yield found
    for copies in found:
        copies.close()


def big(cache: Path) -> bytes:
    return (cache / "data" / KEY / "files/photos/big").read_bytes()


def test_two_launchers_send_a_large_file_to_one_disk(
    cache: Path, locks: str, agents: list[data.DataCopies]
) -> None:
    """Each agent fills a file of its own; both end as if the other were not there."""
    for copies in agents[:2]:
        assert copies.resume(KEY, "photos", "big")[0] == 0
        copies.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, WHOLE[:600])
    for copies in agents[:2]:
        copies.write_block(KEY, "photos", "big", {"offset": 600, **LAST}, WHOLE[600:])
        assert big(cache) == WHOLE
    assert list((cache / "data" / KEY / data.ARRIVING).iterdir()) == []


def test_one_of_two_agents_goes_on_with_what_was_left(
    cache: Path, locks: str, agents: list[data.DataCopies]
) -> None:
    first, *others = agents
    first.resume(KEY, "photos", "big")
    first.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, WHOLE[:600])
    first.close()
    assert [copies.resume(KEY, "photos", "big")[0] for copies in others] == [600, 0]
    for offset, copies in zip((600, 0), others, strict=True):
        copies.write_block(KEY, "photos", "big", {"offset": offset, **LAST}, WHOLE[offset:])
        assert big(cache) == WHOLE


def test_what_a_killed_agent_has_left_is_used(cache: Path, agents: list[data.DataCopies]) -> None:
    """Not while it may live: its file has not changed for a while, and is not locked."""
    first, second, third = agents
    first.resume(KEY, "photos", "big")
    first.write_block(KEY, "photos", "big", {"offset": 0, "last": False}, WHOLE[:600])
    arriving = cache / "data" / KEY / data.ARRIVING
    (part,) = arriving.iterdir()
    (arriving / f"{part.name[:-1]}x").write_bytes(part.read_bytes())  # of one without a process
    for path in arriving.iterdir():
        os.utime(path, (0, 0))
    assert [copies.resume(KEY, "photos", "big")[0] for copies in (second, third)] == [600, 0]


# --- folders that others use


def test_a_run_folder_stays_while_another_agent_uses_it(cache: Path) -> None:
    folder = snapshot.make_run_folder(KEY, "a" * 32)
    assert snapshot.make_run_folder(KEY, "b" * 32) == folder
    assert snapshot.changed_files(str(folder), None) == []
    assert not snapshot.discard_run_folder(KEY, only=[], user="a" * 32)
    assert snapshot.discard_run_folder(KEY, only=[], user="b" * 32)
    snapshot.make_run_folder(KEY, "a" * 32)
    snapshot.make_run_folder(KEY, "b" * 32)
    assert snapshot.discard_run_folder(KEY, user="a" * 32)  # the run is over, all is at home
    assert list((cache / "runs").iterdir()) == []


def test_a_process_number_of_another_container_tells_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be dead here and alive there: what is being made there is left alone."""
    (cache / "runs").mkdir(parents=True)
    new = snapshot._private_folder(snapshot.run_folder(KEY))
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    dead = new.rename(new.with_name(new.name.replace(f"-{os.getpid()}-", f"-{nobody}-")))
    readlink = os.readlink
    with monkeypatch.context() as there:
        there.setattr(os, "readlink", lambda path: f"{readlink(path)} of another container")
        snapshot.remove_old(keep="")
        assert dead.exists()
    snapshot.remove_old(keep="")
    assert not dead.exists()
