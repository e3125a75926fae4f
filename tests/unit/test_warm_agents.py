"""The files by which waiting agents are found, and when a fork server can serve once more."""

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


def nest(host: Host = HOST, python: str = PYTHON, ssh: SshOptions = SSH) -> warm.WarmSlot:
    return warm.WarmSlot(host, python, ssh)


def left(seconds: float = 60.0) -> warm.WarmAgent:
    """An agent that waits for the next command."""
    one = nest()
    waiting = one.offer(seconds, "boot", "torch 2", restart_timer=True)
    assert waiting is not None
    one.release()
    return waiting


def test_what_was_left_is_taken_once() -> None:
    waiting = left()
    first, second = nest(), nest()
    assert first.claim() == waiting
    assert second.claim() is None
    assert (
        second.offer(60.0, "boot", "", restart_timer=True) is None
    )  # the other's place is not lost
    first.release()
    third = nest()
    assert third.claim() == waiting
    third.forget()
    assert not third.path.exists()


def test_nobody_else_can_read_it_and_its_key_is_not_shown() -> None:
    waiting, path = left(), nest().path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert waiting.key not in repr(waiting)
    assert waiting.key not in repr(waiting.agent_address())


OTHERS = {
    "another host": lambda: nest(Host("n2", "10.0.0.2")),
    "another login": lambda: nest(Host("n1", "10.0.0.1", user="me")),
    "another port": lambda: nest(Host("n1", "10.0.0.1", port=2222)),
    "another interpreter": lambda: nest(python="/opt/python"),
    "another ssh config": lambda: nest(ssh=SshOptions(Path("config"))),
    "this machine": lambda: nest(Host("n1", "10.0.0.1", local=True)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_who_would_start_another_agent_does_not_find_it(other: str) -> None:
    left()
    assert OTHERS[other]().claim() is None
    own = nest()
    assert own.claim() is not None
    own.forget()


def test_another_version_does_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left()
    code = warm.agent_code()
    other = type(code)("0" * 64, code.first_line, code.files)
    monkeypatch.setattr(warm, "agent_code", lambda: other)
    assert nest().claim() is None


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
def test_what_is_not_as_it_was_written_is_nothing(damage: str) -> None:
    left()
    DAMAGE[damage](nest().path)
    assert nest().claim() is None


PLACES: dict[str, Any] = {
    "others can write above it": lambda folder: folder.parent.chmod(0o777),
    "a group can write above that": lambda folder: folder.parent.parent.chmod(0o775),
    "others can look into it": lambda folder: folder.chmod(0o755),
    "it is a file": lambda folder: folder.rename(folder.with_name("old")) and folder.write_text(""),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_others_could_have_filled_is_not_looked_into(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "is_private_group", lambda number: False)
    left()
    PLACES[place](nest().path.parent)
    assert nest().claim() is None
    assert nest().offer(60.0, "boot", "", restart_timer=True) is None
    assert list(warm.warm_slots()) == []
    assert warm.control_path() is None


def test_the_folder_is_the_users_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one" / "two"))
    before = os.umask(0)
    try:
        left()
    finally:
        os.umask(before)
    made = [tmp_path / name for name in ("one", "one/two", "one/two/paceline")]
    assert [one.stat().st_mode & 0o777 for one in made] == [0o700] * 3


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up() -> None:
    path = nest().path
    left()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert nest().claim() is None
    assert list(warm.warm_slots()) == []


def test_without_room_nobody_is_left_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    one = nest()
    assert one.offer(60.0, "boot", "", restart_timer=True) is None
    assert not one.path.exists()


def test_a_look_at_it_does_not_begin_its_time_anew() -> None:
    before = left(60.0)
    one = nest()
    one.claim()
    again_there = one.offer(60.0, "boot", "", restart_timer=False)
    assert again_there is not None
    assert again_there.until == before.until
    assert (again_there.imported, again_there.key == before.key) == ("torch 2", False)
    one.forget()


def test_a_kept_connection_is_one_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "ControlPath=none" in ssh_command(HOST, SSH, ["true"])
    argv = ssh_command(HOST, SSH, ["true"], "/c/%C")
    assert "ControlPath=/c/%C" in argv
    assert "ControlMaster=no" in argv
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 80)
    assert warm.control_path() is None


# --- a fork server that has imported


def asked(**other: Any) -> agents.ServerSpec:
    request = {"python": PYTHON, "preload": ["torch"], **other.pop("request", {})}
    env = {"A": "1", "PATH": "/bin", "SSH_CONNECTION": "x", "PACELINE_JOB_TOKEN": "t"}
    return agents.make_spec(request, {**env, **other.pop("env", {})}, other.pop("libraries", []))


def test_what_every_login_has_of_its_own_makes_no_difference() -> None:
    other = {"SSH_CONNECTION": "y", "SHLVL": "3", "PACELINE_JOB_TOKEN": "u"}
    assert asked() == asked(env=other)


@pytest.mark.parametrize("other", [
    {"env": {"A": "2"}}, {"env": {"B": ""}}, {"request": {"preload": ["torch", "numpy"]}},
    {"request": {"python": "/opt/python"}}, {"libraries": ["/usr"]}, {"env": {"PYTHONPATH": "."}},
])  # fmt: skip
def test_another_setting_is_another_fork_server(other: Any) -> None:
    assert asked() != asked(**other)


def test_a_package_that_was_installed_since_is_another_fork_server(tmp_path: Path) -> None:
    before = asked(libraries=[str(tmp_path)])
    assert asked(libraries=[str(tmp_path)]) == before
    os.utime(tmp_path, ns=(1, 1))
    assert asked(libraries=[str(tmp_path)]) != before


# --- an agent that waits


def lasting() -> agents.Resumable:
    return agents.Resumable(os.pipe(), os.pipe(), None, [])


def closed(one: agents.Resumable) -> None:
    for fd in (*one.wake, *one.stderr_pipe):
        os.close(fd)


def test_an_agent_that_waits_ends_when_its_time_is_over_or_it_is_told_to() -> None:
    one = lasting()
    try:
        rest = agents.WarmWait(agents_half.ReconnectListener(b"k" * 32), 0.3)
        assert rest.wait(one, lambda: False) is None
        rest = agents.WarmWait(agents_half.ReconnectListener(b"k" * 32), 600.0)
        assert rest.wait(one, lambda: True) is None
        name = rest.place.name
        with socket.socket(socket.AF_UNIX) as there, pytest.raises(ConnectionRefusedError):
            there.connect("\0" + name)
    finally:
        closed(one)


def test_a_login_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", "a\nb\udce9")
    told = agents.parse_login(reattach.describe_login())
    assert told.env["ODD"] == "a\nb\udce9"
    assert told.cwd == str(Path.cwd())
    assert told.umask == agents.current_umask()
    for odd in (b"", b"[]", b'{"env": 3}', b'{"env": {}}', b'{"env": {}, "cwd": "/", "umask": []}'):
        with pytest.raises(ValueError, match=r"login|Expecting|JSON"):
            agents.parse_login(odd)
