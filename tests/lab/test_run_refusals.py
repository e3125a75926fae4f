"""Tests that impossible launches are refused with host, cause and remedy, and leave nothing."""

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
    """Checks that a refused launch leaves nothing running."""
    yield from healed(shared)


def assert_error(ended: Ended, *words: str, code: int = 1) -> None:
    """Checks that a launch failed with this status, these words, a remedy and no traceback."""
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert "remedy:" in ended.err, ended.err


# --- errors that the launcher finds


def test_rejects_nnodes_above_number_of_hosts(site: Site) -> None:
    assert_error(site.run("--nnodes", "3", "tell.py"), "3 nodes", "n1, n2", "--nnodes 2", code=2)


def test_rejects_nproc_above_slots(site: Site, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=2\nn2 slots=1\n")
    ended = site.run("--no-torch", "-p", "2", "tell.py", hosts=str(hostfile))
    assert_error(ended, "n2 has 1 slot", "--nproc-per-node 1", code=2)


def test_reports_missing_host_file(site: Site) -> None:
    ended = site.run("tell.py", hosts="./no-such-file")
    assert ended.code == 2
    assert "no-such-file" in ended.err


def test_rejects_run_directory_in_use(site: Site) -> None:
    with site.start("--no-torch", "end.py", "echo") as first:
        first.wait_for("waiting", times=2)
        argv = site.argv("--run-dir", str(first.directory), "--no-torch", "tell.py")
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        second = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
        first.signal(15)
        first.end()
    assert second.returncode == 2, second.stderr
    assert "in use" in second.stderr
    assert str(first.process.pid) in second.stderr


def test_reports_invalid_run_directory(site: Site) -> None:
    argv = site.argv("--run-dir", "/proc/runs/1", "--no-torch", "tell.py")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(argv, cwd=site.project, env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert "run directory /proc/runs/1" in result.stderr
    assert "--run-dir" in result.stderr


# --- logging in


def modified_ssh_config(site: Site, tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the lab's ssh configuration with some words replaced."""
    text = site.lab.ssh_config.read_text()
    for original, replacement in changes:
        assert original in text
        text = text.replace(original, replacement)
    file = tmp_path / "ssh_config"
    file.write_text(text)
    return file


def run_with(site: Site, config: Path, *words: str, hosts: str = "n1,n2") -> Ended:
    # the last --ssh-config wins
    return site.run("--ssh-config", str(config), *words, "--no-torch", "tell.py", hosts=hosts)


def test_reports_unknown_host_name(site: Site) -> None:
    ended = site.run("--no-torch", "tell.py", hosts="n1,nowhere.invalid")
    assert_error(ended, "1 of 2 hosts", "nowhere.invalid", "name not found")


def test_reports_powered_off_host(site: Site) -> None:
    site.lab.fault("power-off", "n2")
    ended = site.run("--no-torch", "tell.py")
    assert_error(ended, "1 of 2 hosts", "n2")
    assert "n1:" not in ended.err


def test_reports_rejected_ssh_key(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = modified_ssh_config(site, tmp_path, (str(site.lab.layout.identity), str(key)))
    assert_error(run_with(site, config), "2 of 2 hosts", "login refused", "n1", "n2", "ssh-copy-id")


def test_reports_world_readable_key(site: Site, tmp_path: Path) -> None:
    key = tmp_path / "open"
    shutil.copy(site.lab.layout.identity, key)
    key.chmod(0o644)
    config = modified_ssh_config(site, tmp_path, (str(site.lab.layout.identity), str(key)))
    assert_error(run_with(site, config), "open to others", "chmod 600")


def fingerprint(public: Path) -> str:
    result = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True)
    return result.stdout.split()[1]


def test_reports_changed_host_key(site: Site, tmp_path: Path) -> None:
    keys = {name: site.lab.layout.host_key(name).with_suffix(".pub") for name in ("n1", "n2")}
    lines = site.lab.layout.known_hosts.read_text().splitlines()
    swapped = lines[1].split()[:2] + lines[0].split()[2:]  # n1's key under the name n2
    known = tmp_path / "known_hosts"
    known.write_text(f"{lines[0]}\n{' '.join(swapped)}\n")
    config = modified_ssh_config(site, tmp_path, (str(site.lab.layout.known_hosts), str(known)))
    initial_text = known.read_text()
    for extra_args in ((), ("--accept-new-host-keys",)):
        ended = run_with(site, config, *extra_args)
        assert_error(ended, "1 of 2 hosts", "host key changed", "n2", "ssh-keygen -R")
        assert fingerprint(keys["n2"]) in ended.err  # the key that n2 presents
        assert fingerprint(keys["n1"]) in ended.err  # the key that was pinned
        assert known.read_text() == initial_text


def test_accepts_unknown_host_key_only_on_request(site: Site, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    config = modified_ssh_config(
        site, tmp_path, (str(site.lab.layout.known_hosts), str(known)),
        ("StrictHostKeyChecking yes", "StrictHostKeyChecking no"),  # the file must not disable it
    )  # fmt: skip
    ended = run_with(site, config)
    assert_error(ended, "2 of 2 hosts", "host key not known", "--accept-new-host-keys")
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
def strict_site(site: Site) -> Iterator[Site]:
    """n2's sshd accepts one login at a time and drops the others."""
    file = site.lab.layout.sshd_config("n2")
    text = file.read_text()
    file.write_text(text + "MaxStartups 1:100:1\n")
    site.lab.fault("power-off", "n2")
    site.lab.heal()
    yield site
    file.write_text(text)
    site.lab.fault("power-off", "n2")
    site.lab.heal()


def test_retries_dropped_logins(strict_site: Site) -> None:
    hold = [sys.executable, "-c", HOLD, strict_site.lab.address("n2"), "1.0"]
    with strict_site.lab.popen("n1", hold, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        ended = strict_site.run("--no-torch", "tell.py")
    assert ended.code == 0, ended.err


def test_reports_persistently_dropped_logins(strict_site: Site) -> None:
    hold = [sys.executable, "-c", HOLD, strict_site.lab.address("n2"), "60"]
    with strict_site.lab.popen("n1", hold, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        ended = strict_site.run("--no-torch", "tell.py")
        holder.kill()
    assert_error(ended, "n2", "MaxStartups")


# --- the hosts' Python


def run_with_python(site: Site, python: str, *words: str) -> Ended:
    settings = site.project / "paceline.toml"
    settings.write_text(f'[hosts.n2]\npython = "{python}"\n')
    trust_settings(site.project)
    try:
        return site.run(*words)
    finally:
        settings.unlink()


def test_reports_missing_interpreter(site: Site) -> None:
    ended = run_with_python(site, "/opt/none/bin/python", "train.py")
    assert_error(ended, "n2", "/opt/none/bin/python", "paceline.toml")


def test_reports_host_without_python(site: Site) -> None:
    hide_python = (
        "cd /usr/bin; mkdir away; find . -maxdepth 1 -name 'python*' -exec mv -t away {} +"
    )
    restore_python = "cd /usr/bin; find away -mindepth 1 -exec mv -t . {} +; rmdir away"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text("PATH=/usr/bin:/bin\n")
    try:
        site.lab.exec("n2", ["sh", "-c", hide_python], check=True)
        ended = run_with_python(site, "/opt/none/bin/python", "train.py")
    finally:
        site.lab.exec("n2", ["sh", "-c", restore_python], check=True)
        start_up.unlink()
    assert_error(ended, "n2", "no Python", "Python 3.9")


@pytest.fixture(scope="module")
def environments(shared: Site) -> Path:
    """Makes virtual environments: ``none`` without torch, ``old`` with another torch version."""
    folder = shared.project.parent / "environments"
    for name in ("none", "old"):
        venv.create(folder / name, with_pip=False, symlinks=True)
    (packages,) = (folder / "old").glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch/version.py").write_text("__version__ = '2.10.1+cpu'\ncuda = None\n")
    return folder


def test_reports_host_without_torch(site: Site, environments: Path) -> None:
    ended = run_with_python(site, f"{environments}/none/bin/python", "train.py")
    assert_error(ended, "no torch on n2", "pip install torch", "--no-torch")


def test_reports_different_torch_versions(site: Site, environments: Path) -> None:
    ended = run_with_python(site, f"{environments}/old/bin/python", "train.py")
    assert_error(ended, "different torch versions", "n1: torch", "n2: torch 2.10.1", "pip install")


def test_reports_torch_import_error(site: Site, environments: Path) -> None:
    import torch

    (packages,) = (environments / "old").glob("lib/python*/site-packages")
    version = packages / "torch/version.py"
    text = version.read_text()
    version.write_text(f"__version__ = '{torch.__version__}'\n")
    (packages / "torch/__init__.py").write_text("raise OSError('libfoo.so: cannot open')\n")
    try:
        ended = run_with_python(site, f"{environments}/old/bin/python", "train.py")
    finally:
        version.write_text(text)
    assert_error(ended, "n2 cannot import torch", "libfoo.so")


def test_reports_unavailable_backend(site: Site) -> None:
    ended = site.run("--backend", "nccl", "train.py")
    assert_error(ended, "nccl", "gloo", "--backend gloo")


def test_reports_missing_program(site: Site) -> None:
    ended = site.run("--no-python", "no-such-program-anywhere")
    assert ended.code == 127
    assert "no-such-program-anywhere" in ended.err
    assert "Traceback" not in ended.err


# --- disks


def test_reports_full_disk_of_run_directory(site: Site) -> None:
    small = site.project.parent / "small"
    words = ["--run-dir", f"{small}/run", "--no-torch", "--show", "none", "end.py", "flood"]
    argv = site.argv(*words, inside="n1")
    result = site.lab.exec("n1", argv, cwd=site.project, timeout=TIMEOUT_S,
                         env={"PYTHONPATH": str(SOURCE)})  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "No space left" in result.stderr
    assert "--run-dir" in result.stderr
    assert "Traceback" not in result.stderr
    site.lab.exec("n1", ["sh", "-c", f"rm -rf {small}/*"], check=True)


def test_reports_disk_too_small_for_results(site: Site) -> None:
    small = site.project.parent / "small"
    words = ["--run-dir", f"{small}/run", "--no-torch", "--ship", "always", "end.py", "large"]
    argv = site.argv(*words, inside="n1")
    result = site.lab.exec("n1", argv, cwd=site.project, timeout=TIMEOUT_S,
                         env={"PYTHONPATH": str(SOURCE)})  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "the results on n2 do not fit on this disk" in result.stderr
    assert re.search(r"scp .*-r \S*n2:", result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    matching_files = site.lab.exec("n1", ["find", f"{small}/run", "-name", "large*"])
    assert matching_files.stdout == ""  # no partial file
    site.lab.exec("n1", ["sh", "-c", f"rm -rf {small}/*"], check=True)
    (site.project / "large.bin").unlink(missing_ok=True)  # rank 0 ran in the project


def test_full_host_disk_fails_check_but_not_run(site: Site) -> None:
    small = site.project.parent / "small"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text(f"export XDG_CACHE_HOME={small} TMPDIR={small}\n")
    site.lab.fault("fill-disk", "n2", str(small))
    try:
        checked = site.run("--no-torch", "--ship", "always", "tell.py")
        ended = site.run("--check", "none", "--no-torch", "--ship", "always", "tell.py")
    finally:
        start_up.unlink()
    assert_error(checked, "n2", str(small), "full")
    # code that does not fit into the cache is stored in a folder of the job, on another disk
    assert ended.code == 0, ended.err
    assert str(small) not in ended.said(1)["cwd"]


def test_reports_host_disk_too_small_for_code(site: Site) -> None:
    small = site.project.parent / "small"
    start_up = site.lab.home("n2") / ".bashrc"
    start_up.write_text(f"export XDG_CACHE_HOME={small}\n")
    (site.project / "large.bin").write_bytes(os.urandom(6_000_000))
    try:
        ended = site.run("--check", "none", "--no-torch", "--ship", "always", "tell.py")
    finally:
        start_up.unlink()
        (site.project / "large.bin").unlink()
    assert_error(ended, "n2", "No space left")
