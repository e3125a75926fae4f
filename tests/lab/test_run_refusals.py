"""What cannot be is refused: the host, the cause and the remedy are named, and nothing runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import SOURCE, TIMEOUT_S, Ended, Site, healed, project_at, trust_settings

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("refusals")
    project = project_at(folder / "project")
    small = folder / "small"
    small.mkdir()
    lab = new_lab(hosts=2, share=(str(folder),), private=(f"{small}:4m", "/usr/bin"))
    return Site(lab, project)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Nothing may be left running, whatever was refused."""
    yield from healed(shared)


def refused(ended: Ended, *words: str, code: int = 1) -> None:
    """The error is ours, says these words and has this status."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert "remedy:" in ended.err, ended.err


# --- what can be seen from here


def test_too_few_hosts(site: Site) -> None:
    refused(site.run("--nnodes", "3", "tell.py"), "3 nodes", "n1, n2", "--nnodes 2", code=2)


def test_too_few_slots(site: Site, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=2\nn2 slots=1\n")
    ended = site.run("--no-torch", "-p", "2", "tell.py", hosts=str(hostfile))
    refused(ended, "n2 has 1 slot", "--nproc-per-node 1", code=2)


def test_a_host_file_that_is_not_there(site: Site) -> None:
    ended = site.run("tell.py", hosts="./no-such-file")
    assert ended.code == 2
    assert "no-such-file" in ended.err


def test_a_run_directory_in_use(site: Site) -> None:
    with site.start("--no-torch", "end.py", "echo") as one:
        one.wait_for("waiting", times=2)
        argv = site.argv("--run-dir", str(one.directory), "--no-torch", "tell.py")
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        two = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
        one.signal(15)
        one.end()
    assert two.returncode == 2, two.stderr
    assert "in use" in two.stderr
    assert str(one.process.pid) in two.stderr


def test_a_run_directory_that_cannot_be(site: Site) -> None:
    argv = site.argv("--run-dir", "/proc/runs/1", "--no-torch", "tell.py")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "run directory /proc/runs/1" in done.stderr
    assert "--run-dir" in done.stderr


# --- logging in


def changed(site: Site, tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the lab's ssh configuration with some words replaced."""
    text = site.lab.ssh_config.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "ssh_config"
    file.write_text(text)
    return file


def run_with(site: Site, config: Path, *words: str, hosts: str = "n1,n2") -> Ended:
    # the last --ssh-config counts
    return site.run("--ssh-config", str(config), *words, "--no-torch", "tell.py", hosts=hosts)


def test_no_such_host(site: Site) -> None:
    ended = site.run("--no-torch", "tell.py", hosts="n1,nowhere.invalid")
    refused(ended, "1 of 2 hosts", "nowhere.invalid", "name not found")


def test_a_host_that_is_off(site: Site) -> None:
    site.lab.fault("power-off", "n2")
    ended = site.run("--no-torch", "tell.py")
    refused(ended, "1 of 2 hosts", "n2")
    assert "n1:" not in ended.err


def test_the_wrong_key(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = changed(site, tmp_path, (str(site.lab.layout.identity), str(key)))
    refused(run_with(site, config), "2 of 2 hosts", "login refused", "n1", "n2", "ssh-copy-id")


def test_a_key_that_others_can_read(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "open"
    shutil.copy(site.lab.layout.identity, key)
    key.chmod(0o644)
    config = changed(site, tmp_path, (str(site.lab.layout.identity), str(key)))
    refused(run_with(site, config), "open to others", "chmod 600")


def fingerprint(public: Path) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True)
    return done.stdout.split()[1]


def test_a_changed_host_key(site: Site, tmp_path: Path) -> None:
    keys = {name: site.lab.layout.host_key(name).with_suffix(".pub") for name in ("n1", "n2")}
    lines = site.lab.layout.known_hosts.read_text().splitlines()
    wrong = lines[1].split()[:2] + lines[0].split()[2:]  # n2 under n1's key
    known = tmp_path / "known_hosts"
    known.write_text(f"{lines[0]}\n{' '.join(wrong)}\n")
    config = changed(site, tmp_path, (str(site.lab.layout.known_hosts), str(known)))
    before = known.read_text()
    for more in ((), ("--accept-new-host-keys",)):
        ended = run_with(site, config, *more)
        refused(ended, "1 of 2 hosts", "host key changed", "n2", "ssh-keygen -R")
        assert fingerprint(keys["n2"]) in ended.err  # what it shows
        assert fingerprint(keys["n1"]) in ended.err  # what was pinned
        assert known.read_text() == before


def test_an_unknown_host_key(site: Site, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    config = changed(
        site, tmp_path, (str(site.lab.layout.known_hosts), str(known)),
        ("StrictHostKeyChecking yes", "StrictHostKeyChecking no"),  # it is not for the file to say
    )  # fmt: skip
    ended = run_with(site, config)
    refused(ended, "2 of 2 hosts", "host key not known", "--accept-new-host-keys")
    key = fingerprint(site.lab.layout.host_key("n2").with_suffix(".pub"))
    assert key in ended.err
    assert known.read_text() == ""

    ended = run_with(site, config, "--accept-new-host-keys")
    assert ended.code == 0, ended.err
    assert key in ended.err
    assert site.lab.address("n2") in known.read_text()
    assert run_with(site, config).code == 0


HOLD = """
import socket, sys, time
held = [socket.create_connection((sys.argv[1], 22)) for _ in range(2)]
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def strict(site: Site) -> Iterator[Site]:
    """n2's sshd takes one login at a time and drops the rest."""
    file = site.lab.layout.sshd_config("n2")
    text = file.read_text()
    file.write_text(text + "MaxStartups 1:100:1\n")
    site.lab.fault("power-off", "n2")
    site.lab.heal()
    yield site
    file.write_text(text)
    site.lab.fault("power-off", "n2")
    site.lab.heal()


def test_dropped_logins_are_tried_again(strict: Site) -> None:
    hold = [sys.executable, "-c", HOLD, strict.lab.address("n2"), "1.0"]
    with strict.lab.popen("n1", hold, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        ended = strict.run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_logins_that_are_always_dropped(strict: Site) -> None:
    hold = [sys.executable, "-c", HOLD, strict.lab.address("n2"), "60"]
    with strict.lab.popen("n1", hold, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        ended = strict.run("--no-torch", "tell.py")
        holder.kill()
    refused(ended, "n2", "MaxStartups")


# --- the hosts' Python


def with_python(site: Site, python: str, *words: str) -> Ended:
    settings = site.project / "paceline.toml"
    settings.write_text(f'[hosts.n2]\npython = "{python}"\n')
    trust_settings(site.project)
    try:
        return site.run(*words)
    finally:
        settings.unlink()


def test_an_interpreter_that_is_not_there(site: Site) -> None:
    ended = with_python(site, "/opt/none/bin/python", "train.py")
    refused(ended, "n2", "/opt/none/bin/python", "paceline.toml")


def test_no_python_at_all(site: Site) -> None:
    away = "cd /usr/bin; mkdir away; find . -maxdepth 1 -name 'python*' -exec mv -t away {} +"
    back = "cd /usr/bin; find away -mindepth 1 -exec mv -t . {} +; rmdir away"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text("PATH=/usr/bin:/bin\n")
    try:
        site.lab.exec("n2", ["sh", "-c", away], check=True)
        ended = with_python(site, "/opt/none/bin/python", "train.py")
    finally:
        site.lab.exec("n2", ["sh", "-c", back], check=True)
        start_up.unlink()
    refused(ended, "n2", "no Python", "Python 3.9")


@pytest.fixture(scope="module")
def environments(shared: Site) -> Path:
    """Virtual environments: ``none`` without torch, ``old`` with another version's number."""
    folder = shared.project.parent / "environments"
    for name in ("none", "old"):
        venv.create(folder / name, with_pip=False, symlinks=True)
    (packages,) = (folder / "old").glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch/version.py").write_text("__version__ = '2.10.1+cpu'\ncuda = None\n")
    return folder


def test_no_torch_on_a_host(site: Site, environments: Path) -> None:
    ended = with_python(site, f"{environments}/none/bin/python", "train.py")
    refused(ended, "no torch on n2", "pip install torch", "--no-torch")


def test_different_torch_versions(site: Site, environments: Path) -> None:
    ended = with_python(site, f"{environments}/old/bin/python", "train.py")
    refused(ended, "different torch versions", "n1: torch", "n2: torch 2.10.1", "pip install")


def test_a_torch_that_cannot_be_imported(site: Site, environments: Path) -> None:
    import torch

    (packages,) = (environments / "old").glob("lib/python*/site-packages")
    version = packages / "torch/version.py"
    text = version.read_text()
    version.write_text(f"__version__ = '{torch.__version__}'\n")
    (packages / "torch/__init__.py").write_text("raise OSError('libfoo.so: cannot open')\n")
    try:
        ended = with_python(site, f"{environments}/old/bin/python", "train.py")
    finally:
        version.write_text(text)
    refused(ended, "n2 cannot import torch", "libfoo.so")


def test_a_backend_that_torch_lacks(site: Site) -> None:
    ended = site.run("--backend", "nccl", "train.py")
    refused(ended, "nccl", "gloo", "--backend gloo")


def test_a_program_that_is_not_there(site: Site) -> None:
    ended = site.run("--no-python", "no-such-program-anywhere")
    assert ended.code == 127
    assert "no-such-program-anywhere" in ended.err
    assert "Traceback" not in ended.err


# --- disks


def test_the_disk_of_the_run_directory_is_full(site: Site) -> None:
    small = site.project.parent / "small"
    words = ["--run-dir", f"{small}/run", "--no-torch", "--show", "none", "end.py", "flood"]
    argv = site.argv(*words, inside="n1")
    done = site.lab.exec("n1", argv, cwd=site.project, timeout=TIMEOUT_S,
                         env={"PYTHONPATH": str(SOURCE)})  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "No space left" in done.stderr
    assert "--run-dir" in done.stderr
    assert "Traceback" not in done.stderr
    site.lab.exec("n1", ["sh", "-c", f"rm -rf {small}/*"], check=True)


def test_results_that_do_not_fit_here(site: Site) -> None:
    small = site.project.parent / "small"
    words = ["--run-dir", f"{small}/run", "--no-torch", "--ship", "always", "end.py", "large"]
    argv = site.argv(*words, inside="n1")
    done = site.lab.exec("n1", argv, cwd=site.project, timeout=TIMEOUT_S,
                         env={"PYTHONPATH": str(SOURCE)})  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "the results on n2 do not fit on this disk" in done.stderr
    assert re.search(r"scp .*-r \S*n2:", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    found = site.lab.exec("n1", ["find", f"{small}/run", "-name", "large*"])
    assert found.stdout == ""  # no half of it
    site.lab.exec("n1", ["sh", "-c", f"rm -rf {small}/*"], check=True)
    (site.project / "large.bin").unlink(missing_ok=True)  # rank 0 ran in place


def test_the_disk_of_a_host_is_full(site: Site) -> None:
    small = site.project.parent / "small"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text(f"export XDG_CACHE_HOME={small} TMPDIR={small}\n")
    site.lab.fault("fill-disk", "n2", str(small))
    try:
        checked = site.run("--no-torch", "--ship", "always", "tell.py")
        ended = site.run("--check", "none", "--no-torch", "--ship", "always", "tell.py")
    finally:
        start_up.unlink()
    refused(checked, "n2", str(small), "full")
    # what cannot be kept in the cache is kept in a folder of the job's own, on another disk
    assert ended.code == 0, ended.err
    assert str(small) not in ended.said(1)["cwd"]


def test_the_code_does_not_fit_on_a_host(site: Site) -> None:
    small = site.project.parent / "small"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text(f"export XDG_CACHE_HOME={small}\n")
    (site.project / "large.bin").write_bytes(os.urandom(6_000_000))
    try:
        ended = site.run("--check", "none", "--no-torch", "--ship", "always", "tell.py")
    finally:
        start_up.unlink()
        (site.project / "large.bin").unlink()
    refused(ended, "n2", "No space left")
