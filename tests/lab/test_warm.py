"""Hosts that stay ready: what the next command gets of them, who else does, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, Ended, Site, paceline, project_at

pytestmark = pytest.mark.lab

TELL = """
import json, os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
seen = {name: os.environ.get(name) for name in ("WORD", "SSH_CONNECTION", "RANK")}
fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
       if os.path.exists(f"/proc/self/fd/{fd}")]
print(json.dumps({**seen, "argv": sys.argv[1:], "cwd": os.getcwd(), "server": os.getppid(),
                  "files": sum(1 for fd in fds if fd.startswith("/") and "/dev/" not in fd),
                  "pipes": sum(1 for fd in fds if fd.startswith("pipe:"))}), flush=True)
os.environ["WORD"] = "left behind"
os.chdir("/")
kept = open(__file__)
os.set_inheritable(kept.fileno(), True)
if "wait" in sys.argv:
    import time
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def lab_site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("warm")
    site = Site(new_lab(hosts=2), project_at(folder / "project"))
    (site.project / "tell.py").write_text(TELL)
    return site


@pytest.fixture
def site(lab_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """With a cache of its own on this machine, and nothing left at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    yield lab_site
    warm("down")
    assert lab_site.leftovers() == ""


def warm(*words: str) -> subprocess.CompletedProcess[str]:
    return paceline("warm", *words)


def records() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("paceline/warm/*.json"))


def tell(site: Site, *words: str, options: tuple[str, ...] = ("--keep-warm", "5m"),
         **how: Any) -> Ended:  # fmt: skip
    ended = site.run(*options, "tell.py", *words, **how)
    assert ended.code == 0, ended.err
    return ended


def servers(ended: Ended) -> list[int]:
    """The fork servers of all ranks' hosts."""
    return [ended.said(rank)["server"] for rank in range(2)]


def test_the_next_command_begins_with_what_is_there_and_sees_nothing_of_the_last(
    site: Site,
) -> None:
    first = tell(site, "one", options=("--keep-warm", "5m", "--env", "WORD=a"))
    assert [path.stat().st_mode & 0o777 for path in records()] == [0o600, 0o600]
    assert not any(site.lab.listeners(name) for name in site.lab.names)
    second = tell(site, "two", "words", options=("--env", "WORD=a"))
    assert servers(second) == servers(first)
    assert [event["seconds"] for event in second.events("imported")] == [0.0, 0.0]
    before, now = first.said(1), second.said(1)
    assert now["argv"] == ["two", "words"]
    assert (now["WORD"], now["cwd"]) == ("a", str(second.json("plan.json")["nodes"][1]["workdir"]))
    assert now["SSH_CONNECTION"]
    assert now["SSH_CONNECTION"] != before["SSH_CONNECTION"]
    assert (now["files"], now["pipes"]) == (before["files"], before["pipes"])
    other = tell(site, options=("--env", "WORD=b"))
    assert set(servers(other)).isdisjoint(servers(first))
    assert other.said(0)["WORD"] == "b"


def test_what_is_ready_is_named_and_ends_when_it_is_told_to(site: Site) -> None:
    up = warm("up", "-H", str(site.lab.hostfile), "--ssh-config", str(site.lab.ssh_config),
              "--for", "5m")  # fmt: skip
    assert up.returncode == 0, up.stderr
    assert "2 hosts ready for 5 minutes" in up.stderr
    told = json.loads(warm("status", "--json").stdout)
    assert [(one["host"], one["state"]) for one in told] == [("n1", "waits"), ("n2", "waits")]
    assert all(200 < one["left_s"] <= 300 and "torch" in one["imported"] for one in told)
    assert not any("key" in one or "place" in one for one in told)
    found = subprocess.run(
        site.argv("--no-trial", "--json", verb="check"), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, cwd=site.project, check=False,
    )  # fmt: skip
    assert "kept ready: n1 and n2" in found.stdout, found.stdout + found.stderr
    first = tell(site, options=())
    assert [event["seconds"] for event in first.events("imported")] == [0.0, 0.0]
    assert warm("down").stdout.split() == ["n1", "ended", "n2", "ended"]
    assert site.leftovers() == ""
    assert records() == []


def test_a_second_command_at_once_does_without(site: Site) -> None:
    first = tell(site)
    with site.start("tell.py", "wait") as waiting:
        waiting.wait_for('"server"', 2)
        beside = tell(site, options=())
        assert set(servers(beside)).isdisjoint(servers(first))
        assert {one["state"] for one in json.loads(warm("status", "--json").stdout)} == {"in use"}
        waiting.signal(signal.SIGINT)
        assert waiting.end().code == 130
    assert servers(tell(site, options=())) == servers(first)


def test_a_launcher_that_is_killed_leaves_nothing(site: Site) -> None:
    tell(site)
    with site.start("tell.py", "wait") as waiting:
        waiting.wait_for('"server"', 2)
        waiting.signal(signal.SIGKILL)
        assert site.leftovers() == ""
    tell(site, options=())


def test_what_is_not_as_it_was_is_started_as_ever(site: Site) -> None:
    """An agent that was killed, a file that was damaged and one that was removed."""
    first = tell(site)
    site.lab.fault("kill", "n2", "sys.stdin.buffer")
    second = tell(site)
    assert servers(second)[0] == servers(first)[0]
    assert servers(second)[1] != servers(first)[1]
    one, other = records()
    one.write_text("{")
    other.chmod(0o644)
    third = tell(site, options=())
    assert set(servers(third)).isdisjoint(servers(second))
    for name in site.lab.names:  # nobody can find them any more
        site.lab.fault("kill", name, "sys.stdin.buffer")


def test_they_end_by_themselves(site: Site) -> None:
    tell(site, options=("--keep-warm", "3"))
    assert site.leftovers() == ""
    tell(site, options=())
