"""Tests ``paceline setup`` on hosts that accept only a password, and its removal."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import SOURCE, TEST_LIMIT_S, eventually

from paceline.lab import Lab, LabOptions

pytestmark = pytest.mark.lab

PASSWORD = "correct horse 'battery\" $taple"

SSHD = """
Port 22
HostKey "{key}"
PidFile none
UsePAM no
PasswordAuthentication yes
PermitRootLogin yes
AuthorizedKeysFile .ssh/authorized_keys
Subsystem sftp internal-sftp
"""


@pytest.fixture
def new_hosts() -> Iterator[Lab]:
    """Three hosts that accept one password and have no keys; their homes are empty."""
    if reason := Lab.available():
        pytest.skip(reason)
    if os.geteuid() != 0:
        pytest.skip("sshd checks passwords as root only")
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, capture_output=True, text=True
    ).stdout.strip()
    daemons = []
    with Lab(LabOptions(hosts=3)) as lab:
        for name in lab.names:
            (lab.layout.etc(name) / "shadow").write_text(f"root:{hashed}:19000:0:99999:7:::\n")
            for file in (lab.home(name) / ".ssh").iterdir():
                file.unlink()
            (lab.home(name) / ".ssh").rmdir()
            lab.fault("kill", name, "sshd.*listener")
            config = lab.layout.host(name) / "sshd_password"
            config.write_text(SSHD.format(key=lab.layout.host_key(name)))
            daemons.append(lab.popen(name, ["/usr/sbin/sshd", "-D", "-f", str(config)]))
        assert eventually(lambda: all("0.0.0.0:22" in listening_sockets(lab, n) for n in lab.names))
        yield lab
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def listening_sockets(lab: Lab, name: str) -> str:
    return lab.exec(name, ["ss", "-ltn"]).stdout


def setup(lab: Lab, *args: str, password: str | None = PASSWORD,
          hosts: str = "n2,n3") -> tuple[int, str]:  # fmt: skip
    """Runs ``paceline setup`` on n1; returns its status and its output."""
    text = None if password is None else password + "\n"
    result = paceline(lab, "n1", "setup", "-H", hosts, *args, text=text)
    return result.returncode, result.stdout + result.stderr


def paceline(lab: Lab, host: str, *args: str,
             text: str | None = None) -> subprocess.CompletedProcess[str]:  # fmt: skip
    argv = [sys.executable, "-m", "paceline", *args]
    env = {"PYTHONPATH": str(SOURCE)}
    return lab.exec(host, argv, env=env, timeout=TEST_LIMIT_S, cwd="/tmp", input=text)


def snapshot(lab: Lab) -> dict[str, str]:
    """Returns mode and content of every file in every home."""
    entries = {}
    for name in lab.names:
        home = lab.home(name)
        for path in sorted([home, *home.rglob("*")]):
            if ".cache" in path.parts:
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            entries[f"{name}:{path.relative_to(home)}"] = f"{path.stat().st_mode:o} {content}"
    return entries


def test_setup_and_revoke_restore_hosts(new_hosts: Lab) -> None:
    foreign = new_hosts.home("n3") / ".ssh"
    foreign.mkdir(mode=0o775)
    (foreign / "authorized_keys").write_text("ssh-ed25519 AAAAC3 somebody@else")  # no newline
    (foreign / "authorized_keys").chmod(0o664)
    initial_snapshot = snapshot(new_hosts)

    code, output = setup(new_hosts, "--dry-run")
    assert code == 0
    assert "make an ed25519 key" in output
    assert "pin the host key of n2: ssh-ed25519 SHA256:" in output
    assert snapshot(new_hosts) == initial_snapshot

    code, output = setup(new_hosts)  # without consent
    assert code == 2
    assert "-y" in output

    code, output = setup(new_hosts, "-y", "--password-stdin")
    assert code == 0, output
    assert "SSH login works on 2 hosts" in output
    keys = (new_hosts.home("n2") / ".ssh" / "authorized_keys").read_text()
    assert keys.count("ssh-ed25519") == 1
    assert (new_hosts.home("n3") / ".ssh" / "authorized_keys").read_text().count("\n") == 2
    assert f"{(new_hosts.home('n3') / '.ssh').stat().st_mode & 0o777:o}" == "700"
    assert not list(new_hosts.home("n2").rglob("id_*"))  # the private key stays on n1
    login = new_hosts.exec(
        "n1", ["ssh", "-o", "BatchMode=yes", "n3", "hostname"], timeout=TEST_LIMIT_S
    )
    assert login.stdout == "n3\n", login.stderr

    # a key that its owner has restricted is sufficient
    restricted_keys = new_hosts.home("n2") / ".ssh" / "authorized_keys"
    restricted_keys.write_text(f"restrict {keys}")
    result = paceline(new_hosts, "n1", "run", "-H", "n1,n2", "--no-python", "hostname")
    assert sorted(result.stdout.split()) == ["[n1/0]", "[n2/1]", "n1", "n2"], result.stderr
    restricted_keys.write_text(keys)

    setup_snapshot = snapshot(new_hosts)
    code, output = setup(new_hosts, "-y", password=None)
    assert (code, "nothing to do" in output) == (0, True), output
    assert snapshot(new_hosts) == setup_snapshot

    code, output = setup(new_hosts, "--revoke", password=None)
    assert code == 0, output
    assert snapshot(new_hosts) == initial_snapshot


def test_setup_then_train_on_fresh_hosts(new_hosts: Lab) -> None:
    initial_snapshot = snapshot(new_hosts)
    code, output = setup(new_hosts, "-y", "--password-stdin", hosts="n1,n2,n3")
    assert code == 0, output
    assert "SSH login works on 3 hosts" in output
    args = ["train", "image", "-H", "n1,n2,n3", "--steps", "3", "--run-dir", "/tmp/first"]
    result = paceline(new_hosts, "n1", *args)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^accuracy 0\.\d+ \(\d+ of \d+", result.stdout, re.MULTILINE), result.stdout
    weights = "/tmp/first/model/model.safetensors"
    assert new_hosts.exec("n1", ["test", "-s", weights]).returncode == 0

    setup_snapshot = snapshot(new_hosts)
    code, output = setup(new_hosts, "-y", password=None, hosts="n1,n2,n3")
    assert (code, "nothing to do" in output) == (0, True), output
    assert snapshot(new_hosts) == setup_snapshot
    code, output = setup(new_hosts, "--revoke", password=None, hosts="n1,n2,n3")
    assert code == 0, output
    remaining = {path: entry for path, entry in snapshot(new_hosts).items()
                 if not f"{path}/".startswith("n1:.config/paceline/")}  # fmt: skip
    remaining.pop("n1:.config", None)  # the training signed its checkpoints
    assert remaining == initial_snapshot


def test_wrong_password_changes_no_file(new_hosts: Lab) -> None:
    code, output = setup(new_hosts, "-y", "--password-stdin", password="wrong")
    assert code == 1
    assert "n2: the password was refused" in output
    assert not (new_hosts.home("n2") / ".ssh").exists()


def test_password_is_not_in_process_lists_or_files(new_hosts: Lab) -> None:
    argv = [sys.executable, "-m", "paceline", "setup", "-H", "n2,n3", "-y", "--password-stdin"]
    seen = set()
    with new_hosts.popen(
        "n1", argv, env={"PYTHONPATH": str(SOURCE)}, cwd="/tmp", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        child.stdin.write(PASSWORD + "\n")
        child.stdin.close()
        while child.poll() is None:
            for pid, line in new_hosts.processes("n1"):
                seen.add(line)
                try:
                    seen.add(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
                except OSError:
                    continue
        assert child.returncode == 0, child.stdout.read()
    assert any("askpass" in args for args in seen)
    assert not [args for args in seen if "battery" in args]
    for name in new_hosts.names:
        files = [path for path in new_hosts.home(name).rglob("*") if path.is_file()]
        assert not [path for path in files if b"battery" in path.read_bytes()]


def test_starts_and_stops_worker_sshd(new_hosts: Lab) -> None:
    assert setup(new_hosts, "-y", "--password-stdin")[0] == 0
    for args, expected in (
        (["start", "--port", "12345"], "sshd listens on port 12345"),
        (["start", "--port", "12345"], "sshd runs already"),
        (["status"], "sshd runs"),
    ):
        code, output = setup(new_hosts, "sshd", *args, password=None)
        assert (code, output.count(expected)) == (0, 2), output
    assert ":12345" in listening_sockets(new_hosts, "n2")
    code, output = setup(new_hosts, "sshd", "stop", password=None)
    assert (code, output.count("sshd stopped")) == (0, 2), output
    assert ":12345" not in listening_sockets(new_hosts, "n2")
    assert setup(new_hosts, "sshd", "status", password=None)[0] == 3


def make_wheel(folder: Path) -> None:
    """Builds a wheel of one line that no package index has."""
    dist_info = "tiny_part-1.0.dist-info"
    files = {
        "tiny_part.py": "WORD = 'shipped'\n",
        f"{dist_info}/METADATA": "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{dist_info}/RECORD"))
    with zipfile.ZipFile(folder / "tiny_part-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{dist_info}/RECORD": record}.items():
            wheel.writestr(name, text)


@pytest.mark.parametrize("shared_home", [False, True])
def test_makes_environment_from_shipped_wheels(tmp_path: Path, shared_home: bool) -> None:
    """The hosts cannot reach an index and do not see the launcher's wheels."""
    num_environments = 1 if shared_home else 2
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels)
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("tiny-part==1.0\n")
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PIP_FIND_LINKS": str(wheels)}
    with Lab(LabOptions(hosts=2, shared_home=shared_home)) as lab:
        argv = [sys.executable, "-m", "paceline", "setup", "env", "-H", str(lab.hostfile)]
        argv += ["--ssh-config", str(lab.ssh_config), "--requirements", str(requirements)]
        argv += ["--python", sys.executable, "--folder", "~/env"]
        for name in lab.names:  # otherwise pip retries for 15 s
            (lab.home(name) / ".config" / "pip").mkdir(parents=True, exist_ok=True)
            (lab.home(name) / ".config" / "pip" / "pip.conf").write_text("[global]\nretries = 0\n")

        def make_environments(*args: str) -> tuple[int, str]:
            result = subprocess.run([*argv, *args], capture_output=True, text=True, env=env,
                                  cwd=tmp_path, timeout=TEST_LIMIT_S)  # fmt: skip
            return result.returncode, result.stdout + result.stderr

        if not shared_home:
            code, output = make_environments()
            assert (code, "add --offline, which ships the wheels" in output) == (1, True), output
        code, output = make_environments("--offline", "--activate", "export HOOK=ran")
        assert (code, output.count("made from shipped wheels")) == (0, num_environments), output
        assert ("n2: ~/env is on the same disk as that of n1" in output) == shared_home
        script = "import os, sys, tiny_part; print(tiny_part.WORD, os.environ['HOOK'], sys.prefix)"
        for name in lab.names:
            home = lab.home_inside()
            printed = lab.exec(
                name, [f"{home}/env/bin/python-activated", "-c", script], timeout=TEST_LIMIT_S
            )
            assert printed.stdout.split() == ["shipped", "ran", f"{home}/env"], printed.stderr
        use = re.search(r"use it: paceline run (--python \S+) …", output)
        assert use, output
        (tmp_path / "part.py").write_text("import tiny_part; print(tiny_part.WORD)\n")
        run = [*argv[:3], "run", *argv[5:9], *use[1].split(), "--no-torch", "part.py"]
        result = subprocess.run(run, capture_output=True, text=True, env=env, cwd=tmp_path,
                                timeout=TEST_LIMIT_S)  # fmt: skip
        assert (result.returncode, result.stdout.count("shipped")) == (0, 2), result.stderr
        code, output = make_environments("--offline", "--activate", "export HOOK=ran")
        assert (code, output.count("is up to date")) == (0, num_environments), output
