"""Tests the files through which warm agents are found, and when a fork server can be reused."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import bootstrap, reattach
from paceline.agent import reconnection as agents_half
from paceline.agent import warm as agents
from paceline.remote import warm
from paceline.remote.openssh import SshOptions, ssh_command
from paceline.spec.hosts import Host

HOST, PYTHON, SSH = Host("n1", "10.0.0.1"), "/usr/bin/python3", SshOptions()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_slot(host: Host = HOST, python: str = PYTHON, ssh: SshOptions = SSH) -> warm.WarmSlot:
    return warm.WarmSlot(host, python, ssh)


def offer_agent(seconds: float = 60.0) -> warm.WarmAgent:
    """Returns a warm agent that waits for the next command."""
    one = make_slot()
    warm_agent = one.offer(seconds, "boot", "torch 2", restart_timer=True)
    assert warm_agent is not None
    one.release()
    return warm_agent


def test_warm_agent_is_claimed_once() -> None:
    warm_agent = offer_agent()
    first, second = make_slot(), make_slot()
    assert first.claim() == warm_agent
    assert second.claim() is None
    assert (
        second.offer(60.0, "boot", "", restart_timer=True) is None
    )  # the other agent keeps its place
    first.release()
    third = make_slot()
    assert third.claim() == warm_agent
    third.forget()
    assert not third.path.exists()


def test_slot_file_is_private_and_key_is_hidden() -> None:
    warm_agent, path = offer_agent(), make_slot().path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert warm_agent.key not in repr(warm_agent)
    assert warm_agent.key not in repr(warm_agent.agent_address())


MISMATCHES = {
    "another host": lambda: make_slot(Host("n2", "10.0.0.2")),
    "another login": lambda: make_slot(Host("n1", "10.0.0.1", user="me")),
    "another port": lambda: make_slot(Host("n1", "10.0.0.1", port=2222)),
    "another interpreter": lambda: make_slot(python="/opt/python"),
    "another ssh config": lambda: make_slot(ssh=SshOptions(Path("config"))),
    "this machine": lambda: make_slot(Host("n1", "10.0.0.1", local=True)),
}


@pytest.mark.parametrize("other", MISMATCHES)
def test_slot_requires_matching_host_and_settings(other: str) -> None:
    offer_agent()
    assert MISMATCHES[other]().claim() is None
    matching_slot = make_slot()
    assert matching_slot.claim() is not None
    matching_slot.forget()


def test_slot_requires_matching_version(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_agent()
    code = warm.agent_code()
    other = type(code)("0" * 64, code.first_line, code.files)
    monkeypatch.setattr(warm, "agent_code", lambda: other)
    assert make_slot().claim() is None


DAMAGE: dict[str, Any] = {
    "empty": lambda path: path.write_text(""),
    "cut off": lambda path: path.write_text(path.read_text()[:50]),
    "no object": lambda path: path.write_text("[1, 2]"),
    "another shape": lambda path: path.write_text('{"place": 3}'),
    "no key": lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "key": 7})),
    "huge": lambda path: path.write_text("x" * (1 << 20)),
    "open to others": lambda path: path.chmod(0o644),
    "a link": lambda path: path.rename(path.with_suffix(".real")) and path.symlink_to(
        path.with_suffix(".real")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "gone": lambda path: path.unlink(),
    "over": lambda path: path.write_text(
        json.dumps({**json.loads(path.read_text()), "until": time.time()})),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_ignores_damaged_slot_file(damage: str) -> None:
    offer_agent()
    DAMAGE[damage](make_slot().path)
    assert make_slot().claim() is None


INSECURE_FOLDERS: dict[str, Any] = {
    "others can write above it": lambda folder: folder.parent.chmod(0o777),
    "a group can write above that": lambda folder: folder.parent.parent.chmod(0o775),
    "others can look into it": lambda folder: folder.chmod(0o755),
    "it is a file": lambda folder: folder.rename(folder.with_name("old")) and folder.write_text(""),
}  # fmt: skip


@pytest.mark.parametrize("place", INSECURE_FOLDERS)
def test_ignores_insecure_slot_folder(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "is_private_group", lambda number: False)
    offer_agent()
    INSECURE_FOLDERS[place](make_slot().path.parent)
    assert make_slot().claim() is None
    assert make_slot().offer(60.0, "boot", "", restart_timer=True) is None
    assert list(warm.warm_slots()) == []
    assert warm.control_path() is None


def test_slot_folder_is_private_despite_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one" / "two"))
    before = os.umask(0)
    try:
        offer_agent()
    finally:
        os.umask(before)
    folders = [tmp_path / name for name in ("one", "one/two", "one/two/paceline")]
    assert [one.stat().st_mode & 0o777 for one in folders] == [0o700] * 3


def test_does_not_block_on_pipe_as_slot_file() -> None:
    path = make_slot().path
    offer_agent()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert make_slot().claim() is None
    assert list(warm.warm_slots()) == []


def test_full_disk_prevents_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    one = make_slot()
    assert one.offer(60.0, "boot", "", restart_timer=True) is None
    assert not one.path.exists()


def test_claim_does_not_restart_timer() -> None:
    before = offer_agent(60.0)
    one = make_slot()
    one.claim()
    renewed = one.offer(60.0, "boot", "", restart_timer=False)
    assert renewed is not None
    assert renewed.until == before.until
    assert (renewed.imported, renewed.key == before.key) == ("torch 2", False)
    one.forget()


def test_ssh_shares_connection_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "ControlPath=none" in ssh_command(HOST, SSH, ["true"])
    argv = ssh_command(HOST, SSH, ["true"], "/c/%C")
    assert "ControlPath=/c/%C" in argv
    assert "ControlMaster=no" in argv
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 80)
    assert warm.control_path() is None


# --- a fork server that has imported modules


def server_spec(**other: Any) -> agents.ServerSpec:
    request = {"python": PYTHON, "preload": ["torch"], **other.pop("request", {})}
    env = {"A": "1", "PATH": "/bin", "SSH_CONNECTION": "x", "PACELINE_JOB_TOKEN": "t"}
    return agents.make_spec(request, {**env, **other.pop("env", {})}, other.pop("libraries", []))


def test_spec_ignores_login_specific_variables() -> None:
    other = {"SSH_CONNECTION": "y", "SHLVL": "3", "PACELINE_JOB_TOKEN": "u"}
    assert server_spec() == server_spec(env=other)


@pytest.mark.parametrize("other", [
    {"env": {"A": "2"}}, {"env": {"B": ""}}, {"request": {"preload": ["torch", "numpy"]}},
    {"request": {"python": "/opt/python"}}, {"libraries": ["/usr"]}, {"env": {"PYTHONPATH": "."}},
])  # fmt: skip
def test_spec_differs_by_setting(other: Any) -> None:
    assert server_spec() != server_spec(**other)


def test_spec_differs_after_package_install(tmp_path: Path) -> None:
    before = server_spec(libraries=[str(tmp_path)])
    assert server_spec(libraries=[str(tmp_path)]) == before
    os.utime(tmp_path, ns=(1, 1))
    assert server_spec(libraries=[str(tmp_path)]) != before


# --- a waiting agent


def make_resumable() -> agents.Resumable:
    return agents.Resumable(os.pipe(), os.pipe(), None, [])


def close_pipes(one: agents.Resumable) -> None:
    for fd in (*one.wake, *one.stderr_pipe):
        os.close(fd)


def test_warm_agent_ends_on_timeout_or_request() -> None:
    one = make_resumable()
    try:
        warm_wait = agents.WarmWait(agents_half.ReconnectListener(b"k" * 32), 0.3)
        assert warm_wait.wait(one, lambda: False) is None
        warm_wait = agents.WarmWait(agents_half.ReconnectListener(b"k" * 32), 600.0)
        assert warm_wait.wait(one, lambda: True) is None
        name = warm_wait.place.name
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect("\0" + name)
    finally:
        close_pipes(one)


def test_login_round_trips_and_malformed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "a\nb\udce9")
    login = agents.parse_login(reattach.describe_login())
    assert login.env["ODD"] == "a\nb\udce9"
    assert login.cwd == str(Path.cwd())
    assert login.umask == agents.current_umask()
    for malformed in (
        b"",
        b"[]",
        b'{"env": 3}',
        b'{"env": {}}',
        b'{"env": {}, "cwd": "/", "umask": []}',
    ):
        with pytest.raises(ValueError, match=r"login|Expecting|JSON"):
            agents.parse_login(malformed)
