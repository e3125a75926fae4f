"""Several agents with one cache: hosts, or containers, that share their home directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.agent import snapshot

SOURCE = Path(snapshot.__file__).resolve().parents[2]
AGENTS = 4
KEY = "0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline"


def at_once(program: str) -> list[str]:
    """What processes print that run the program at the same time, as agents of one disk do."""
    begin = "import sys\nfrom paceline.agent import snapshot\nprint(flush=True)\ninput()\n"
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
    damaged = snapshot.materialise({root!r}, {manifest[:20]!r}, last=False)
    damaged += snapshot.materialise({root!r}, {manifest[20:]!r}, first=False)
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
        snapshot.materialise(str(snapshot.job_folder("run1") / "code"), [], first=False)


def test_an_ending_agent_leaves_the_folder_of_its_successor(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was lost and has come back may have two agents for a while."""
    folder = snapshot.job_folder("run1")
    snapshot.own_job_folder(folder)
    (folder / "code").mkdir()
    earlier = snapshot._AGENT
    monkeypatch.setattr(snapshot, "_AGENT", "f" * 16)
    snapshot.own_job_folder(folder)
    monkeypatch.setattr(snapshot, "_AGENT", earlier)
    snapshot.discard_job_folder(folder)
    assert (folder / "code").is_dir()
    monkeypatch.setattr(snapshot, "_AGENT", "f" * 16)
    snapshot.discard_job_folder(folder)
    assert not folder.exists()
