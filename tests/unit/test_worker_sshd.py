"""Tests that other users of a host cannot touch the files of ``paceline setup sshd``."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.setup import worker_sshd

# Accepts each configuration, notes its umask, and "listens" until it is stopped.
FAKE_SSHD = """#!/bin/sh
[ "$1" = -t ] && exit 0
umask > "$4"
tail -f "$2" >/dev/null 2>&1 &
echo $! > "${2%_config}.pid"
"""


class Machine:
    """A home folder, and a login with a umask whose Python has no Paceline."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.home.mkdir(mode=0o755)
        self.bin = root / "bin"
        self.bin.mkdir()
        (self.bin / "sshd").write_text(FAKE_SSHD)
        (self.bin / "sshd").chmod(0o755)
        self.folder = self.home / ".local" / "state" / "paceline" / "sshd" / os.uname().nodename

    def run(self, *words: str, umask: int = 0) -> tuple[int, str]:
        env = {"HOME": str(self.home), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        completed = subprocess.run(
            [sys.executable, "-I", "-S", "-", *words], input=worker_sshd.script_text(), text=True,
            capture_output=True, check=False, env=env, umask=umask, cwd=self.home,
        )  # fmt: skip
        return completed.returncode, completed.stdout + completed.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.run("stop")


def test_files_are_private_whatever_the_umask(machine: Machine) -> None:
    status, output = machine.run("start")
    assert (status, output.count("sshd listens")) == (0, 1), output
    names = {"sshd_config", "ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"}
    assert names <= {path.name for path in machine.folder.iterdir()}
    for path in machine.home.rglob("*"):
        if path.name not in (worker_sshd.PID, worker_sshd.LOG):  # sshd's own
            assert not path.lstat().st_mode & 0o033, path
    for folder in (machine.folder, *machine.folder.parents[:4]):
        assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert machine.run("start")[1].startswith("sshd runs already")
    assert machine.run("stop") == (0, "sshd stopped\n")


def test_sessions_have_umask_of_login(machine: Machine) -> None:
    """sshd passes its own on, and closes it for others by itself."""
    assert machine.run("start", umask=0o027)[0] == 0
    assert (machine.folder / worker_sshd.LOG).read_text() == "0027\n"


def test_refuses_folders_that_others_can_write(machine: Machine) -> None:
    machine.folder.mkdir(parents=True)
    open_folders = [machine.home / ".local", machine.home / ".local" / "state", machine.folder]
    for path in open_folders:
        path.chmod(0o777)
    status, output = machine.run("start")
    assert (status, output.count("can be written by others (mode 777)")) == (1, 3), output
    assert [*machine.folder.iterdir()] == []
    (remedy,) = re.findall("^remedy: (chmod .*)$", output, re.MULTILINE)
    assert shlex.split(remedy)[2:] == [str(path) for path in open_folders]
    subprocess.run(["sh", "-c", remedy], check=True)
    assert machine.run("start")[0] == 0


def test_refuses_folder_in_place_of_ours(machine: Machine) -> None:
    foreign = machine.home / "foreign"
    foreign.mkdir()
    machine.folder.parent.mkdir(parents=True)
    machine.folder.symlink_to(foreign)
    status, output = machine.run("start")
    assert status == 1
    assert f"{machine.folder} is a link to {foreign}" in output
    assert [*foreign.iterdir()] == []
    machine.folder.parent.chmod(0o777)
    remedy = machine.run("start")[1].strip().splitlines()[-1].removeprefix("remedy: ")
    subprocess.run(["sh", "-c", remedy], check=True)
    assert machine.run("start")[0] == 0
    assert [*foreign.iterdir()] == []


@pytest.mark.parametrize("name", ["sshd_config", "sshd.log", "sshd.pid", "ssh_host_ed25519_key"])
def test_writes_through_no_link(machine: Machine, name: str) -> None:
    machine.folder.mkdir(parents=True, mode=0o700)
    victim = machine.home / "victim"
    for content in ("mine", None):
        victim.unlink(missing_ok=True)
        if content:
            victim.write_text(content)
        (machine.folder / name).unlink(missing_ok=True)
        (machine.folder / name).symlink_to(victim)
        status, output = machine.run("start")
        assert (status, f"{name} is a link to {victim}" in output) == (1, True), output
        assert (victim.read_text() if victim.exists() else None) == content
    remedy = shlex.split(output.strip().splitlines()[-1].partition("then: ")[2])
    subprocess.run(remedy, check=True)
    assert machine.run("start")[0] == 0


def test_replaces_configuration(machine: Machine) -> None:
    """A program that has the earlier file open does not see it change."""
    assert machine.run("start", "--port", "2201")[0] == 0
    config = machine.folder / "sshd_config"
    with config.open() as earlier:
        machine.run("stop")
        assert machine.run("start", "--port", "2202")[0] == 0
        assert "Port 2201" in earlier.read()
    assert "Port 2202" in config.read_text()


@pytest.mark.parametrize("check", [worker_sshd.folder_faults, worker_sshd.file_faults])
def test_names_owner_of_foreign_files(
    tmp_path: Path, check: Callable[[Path], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    (tmp_path / "sshd_config").write_text("")
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    faults = check(tmp_path)
    assert set(faults.values()) >= {f"belongs to the user with the id {owner}"}
    assert f"{tmp_path} belongs to the user" in worker_sshd.refusal(tmp_path)


def test_way_may_lead_through_own_links_and_sticky_folders(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    (tmp_path / "link").symlink_to("disk")
    assert worker_sshd.folder_faults(tmp_path / "link" / "state" / "n1") == {}
    (tmp_path / "disk").chmod(0o777)
    assert [*worker_sshd.folder_faults(tmp_path / "link" / "state")] == [str(tmp_path / "disk")]
