"""Tests warm hosts: what the next command reuses, what concurrent commands do, and their end."""

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
    passwd = site.lab.layout.etc("n2") / "passwd"
    account, *others = passwd.read_text().splitlines()
    account = account.rpartition(":")[0] + ":/bin/sh"  # which stays beside a command that it runs
    passwd.write_text("\n".join([account, *others]) + "\n")
    return site


@pytest.fixture
def site(lab_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Uses a separate cache on this machine; checks that nothing is left at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    yield lab_site
    warm("down")
    assert lab_site.leftovers() == ""


def warm(*words: str) -> subprocess.CompletedProcess[str]:
    return paceline("warm", *words)


def records() -> list[Path]:
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("paceline/warm/*.json"))


def run_script(site: Site, *words: str, options: tuple[str, ...] = ("--keep-warm", "5m"),
         **kwargs: Any) -> Ended:  # fmt: skip
    ended = site.run(*options, "tell.py", *words, **kwargs)
    assert ended.code == 0, ended.err
    return ended


def servers(ended: Ended) -> list[int]:
    """Returns the process ids of both hosts' fork servers."""
    return [ended.said(rank)["server"] for rank in range(2)]


def test_next_command_reuses_fork_server_in_clean_state(
    site: Site,
) -> None:
    first = run_script(site, "one", options=("--keep-warm", "5m", "--env", "WORD=a"))
    assert [path.stat().st_mode & 0o777 for path in records()] == [0o600, 0o600]
    assert not any(site.lab.listeners(name) for name in site.lab.names)
    second = run_script(site, "two", "words", options=("--env", "WORD=a"))
    assert servers(second) == servers(first)
    assert [event["seconds"] for event in second.events("imported")] == [0.0, 0.0]
    first_report, second_report = first.said(1), second.said(1)
    assert second_report["argv"] == ["two", "words"]
    assert (second_report["WORD"], second_report["cwd"]) == (
        "a",
        str(second.json("plan.json")["nodes"][1]["workdir"]),
    )
    assert second_report["SSH_CONNECTION"]
    assert second_report["SSH_CONNECTION"] != first_report["SSH_CONNECTION"]
    assert (second_report["files"], second_report["pipes"]) == (
        first_report["files"],
        first_report["pipes"],
    )
    other = run_script(site, options=("--env", "WORD=b"))
    assert set(servers(other)).isdisjoint(servers(first))
    assert other.said(0)["WORD"] == "b"


def test_warm_up_status_and_down(site: Site) -> None:
    up = warm("up", "-H", str(site.lab.hostfile), "--ssh-config", str(site.lab.ssh_config),
              "--for", "5m")  # fmt: skip
    assert up.returncode == 0, up.stderr
    assert "2 hosts ready for 5 minutes" in up.stderr
    statuses = json.loads(warm("status", "--json").stdout)
    assert [(entry["host"], entry["state"]) for entry in statuses] == [
        ("n1", "waits"),
        ("n2", "waits"),
    ]
    assert all(200 < entry["left_s"] <= 300 and "torch" in entry["imported"] for entry in statuses)
    assert not any("key" in entry or "place" in entry for entry in statuses)
    check_result = subprocess.run(
        site.argv("--no-trial", "--json", verb="check"), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, cwd=site.project, check=False,
    )  # fmt: skip
    assert "kept ready: n1 and n2" in check_result.stdout, check_result.stdout + check_result.stderr
    first = run_script(site, options=())
    assert [event["seconds"] for event in first.events("imported")] == [0.0, 0.0]
    assert warm("down").stdout.split() == ["n1", "ended", "n2", "ended"]
    assert site.leftovers() == ""
    assert records() == []


def test_concurrent_command_does_not_share_fork_server(site: Site) -> None:
    first = run_script(site)
    with site.start("tell.py", "wait") as waiting:
        waiting.wait_for('"server"', 2)
        concurrent_run = run_script(site, options=())
        assert set(servers(concurrent_run)).isdisjoint(servers(first))
        assert {entry["state"] for entry in json.loads(warm("status", "--json").stdout)} == {
            "in use"
        }
        waiting.signal(signal.SIGINT)
        assert waiting.end().code == 130
    assert servers(run_script(site, options=())) == servers(first)


def test_killed_launcher_ends_warm_agents(site: Site) -> None:
    run_script(site)
    with site.start("tell.py", "wait") as waiting:
        waiting.wait_for('"server"', 2)
        waiting.signal(signal.SIGKILL)
        assert site.leftovers() == ""
    run_script(site, options=())


def test_damaged_warm_agents_are_replaced(site: Site) -> None:
    """An agent was killed; a record is damaged, and another one can be read by others."""
    first = run_script(site)
    site.lab.fault("kill", "n2", "sys.stdin.buffer")
    second = run_script(site)
    assert servers(second)[0] == servers(first)[0]
    assert servers(second)[1] != servers(first)[1]
    entry, other = records()
    entry.write_text("{")
    other.chmod(0o644)
    third = run_script(site, options=())
    assert set(servers(third)).isdisjoint(servers(second))
    for name in site.lab.names:  # no command can find these agents any more
        site.lab.fault("kill", name, "sys.stdin.buffer")


def test_keep_warm_expires(site: Site) -> None:
    run_script(site, options=("--keep-warm", "3"))
    assert site.leftovers() == ""
    run_script(site, options=())
