"""``paceline setup`` on hosts that take nothing but a password, and back again."""

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
def fresh() -> Iterator[Lab]:
    """Three hosts that accept one password and know no key; the homes are empty."""
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
        assert eventually(lambda: all("0.0.0.0:22" in all_listeners(lab, n) for n in lab.names))
        yield lab
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def all_listeners(lab: Lab, name: str) -> str:
    return lab.exec(name, ["ss", "-ltn"]).stdout


def setup(lab: Lab, *words: str, password: str | None = PASSWORD,
          hosts: str = "n2,n3") -> tuple[int, str]:  # fmt: skip
    """Types ``paceline setup`` on n1."""
    text = None if password is None else password + "\n"
    done = paceline(lab, "n1", "setup", "-H", hosts, *words, text=text)
    return done.returncode, done.stdout + done.stderr


def paceline(lab: Lab, host: str, *words: str,
             text: str | None = None) -> subprocess.CompletedProcess[str]:  # fmt: skip
    argv = [sys.executable, "-m", "paceline", *words]
    env = {"PYTHONPATH": str(SOURCE)}
    return lab.exec(host, argv, env=env, timeout=TEST_LIMIT_S, cwd="/tmp", input=text)


def snapshot(lab: Lab) -> dict[str, str]:
    """Every file of every home: mode and content."""
    found = {}
    for name in lab.names:
        home = lab.home(name)
        for path in sorted([home, *home.rglob("*")]):
            if ".cache" in path.parts:
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[f"{name}:{path.relative_to(home)}"] = f"{path.stat().st_mode:o} {content}"
    return found


def test_from_nothing_to_nothing_again(fresh: Lab) -> None:
    foreign = fresh.home("n3") / ".ssh"
    foreign.mkdir(mode=0o775)
    (foreign / "authorized_keys").write_text("ssh-ed25519 AAAAC3 somebody@else")  # no newline
    (foreign / "authorized_keys").chmod(0o664)
    before = snapshot(fresh)

    code, said = setup(fresh, "--dry-run")
    assert code == 0
    assert "make an ed25519 key" in said
    assert "pin the host key of n2: ssh-ed25519 SHA256:" in said
    assert snapshot(fresh) == before

    code, said = setup(fresh)  # nobody says yes
    assert code == 2
    assert "-y" in said

    code, said = setup(fresh, "-y", "--password-stdin")
    assert code == 0, said
    assert "SSH login works on 2 hosts" in said
    keys = (fresh.home("n2") / ".ssh" / "authorized_keys").read_text()
    assert keys.count("ssh-ed25519") == 1
    assert (fresh.home("n3") / ".ssh" / "authorized_keys").read_text().count("\n") == 2
    assert f"{(fresh.home('n3') / '.ssh').stat().st_mode & 0o777:o}" == "700"
    assert not list(fresh.home("n2").rglob("id_*"))  # the private half stays here
    login = fresh.exec("n1", ["ssh", "-o", "BatchMode=yes", "n3", "hostname"], timeout=TEST_LIMIT_S)
    assert login.stdout == "n3\n", login.stderr

    # a key that its owner has restricted to commands is enough
    narrowed = fresh.home("n2") / ".ssh" / "authorized_keys"
    narrowed.write_text(f"restrict {keys}")
    done = paceline(fresh, "n1", "run", "-H", "n1,n2", "--no-python", "hostname")
    assert sorted(done.stdout.split()) == ["[n1/0]", "[n2/1]", "n1", "n2"], done.stderr
    narrowed.write_text(keys)

    after = snapshot(fresh)
    code, said = setup(fresh, "-y", password=None)
    assert (code, "nothing to do" in said) == (0, True), said
    assert snapshot(fresh) == after

    code, said = setup(fresh, "--revoke", password=None)
    assert code == 0, said
    assert snapshot(fresh) == before


def test_two_commands_from_nothing_to_a_trained_model(fresh: Lab) -> None:
    before = snapshot(fresh)
    code, said = setup(fresh, "-y", "--password-stdin", hosts="n1,n2,n3")
    assert code == 0, said
    assert "SSH login works on 3 hosts" in said
    words = ["train", "image", "-H", "n1,n2,n3", "--steps", "3", "--run-dir", "/tmp/first"]
    done = paceline(fresh, "n1", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^accuracy 0\.\d+ \(\d+ of \d+", done.stdout, re.MULTILINE), done.stdout
    weights = "/tmp/first/model/model.safetensors"
    assert fresh.exec("n1", ["test", "-s", weights]).returncode == 0

    after = snapshot(fresh)
    code, said = setup(fresh, "-y", password=None, hosts="n1,n2,n3")
    assert (code, "nothing to do" in said) == (0, True), said
    assert snapshot(fresh) == after
    code, said = setup(fresh, "--revoke", password=None, hosts="n1,n2,n3")
    assert code == 0, said
    own = {"n1:.config", "n1:.config/paceline", "n1:.config/paceline/seal"}  # of the training
    assert {path: entry for path, entry in snapshot(fresh).items() if path not in own} == before


def test_a_wrong_password_changes_nothing_there(fresh: Lab) -> None:
    code, said = setup(fresh, "-y", "--password-stdin", password="wrong")
    assert code == 1
    assert "n2: the password was refused" in said
    assert not (fresh.home("n2") / ".ssh").exists()


def test_the_password_is_in_no_process_list_and_no_file(fresh: Lab) -> None:
    argv = [sys.executable, "-m", "paceline", "setup", "-H", "n2,n3", "-y", "--password-stdin"]
    seen = set()
    with fresh.popen(
        "n1", argv, env={"PYTHONPATH": str(SOURCE)}, cwd="/tmp", text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        child.stdin.write(PASSWORD + "\n")
        child.stdin.close()
        while child.poll() is None:
            for pid, line in fresh.processes("n1"):
                seen.add(line)
                try:
                    seen.add(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
                except OSError:
                    continue
        assert child.returncode == 0, child.stdout.read()
    assert any("askpass" in words for words in seen)
    assert not [words for words in seen if "battery" in words]
    for name in fresh.names:
        files = [path for path in fresh.home(name).rglob("*") if path.is_file()]
        assert not [path for path in files if b"battery" in path.read_bytes()]


def test_a_worker_sshd_of_its_own(fresh: Lab) -> None:
    assert setup(fresh, "-y", "--password-stdin")[0] == 0
    for words, expected in (
        (["start", "--port", "12345"], "sshd listens on port 12345"),
        (["start", "--port", "12345"], "sshd runs already"),
        (["status"], "sshd runs"),
    ):
        code, said = setup(fresh, "sshd", *words, password=None)
        assert (code, said.count(expected)) == (0, 2), said
    assert ":12345" in all_listeners(fresh, "n2")
    code, said = setup(fresh, "sshd", "stop", password=None)
    assert (code, said.count("sshd stopped")) == (0, 2), said
    assert ":12345" not in all_listeners(fresh, "n2")
    assert setup(fresh, "sshd", "status", password=None)[0] == 3


def make_wheel(folder: Path) -> None:
    """A package that nobody else has, of one line."""
    about = "tiny_part-1.0.dist-info"
    files = {
        "tiny_part.py": "WORD = 'shipped'\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / "tiny_part-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{about}/RECORD": record}.items():
            wheel.writestr(name, text)


@pytest.mark.parametrize("shared_home", [False, True])
def test_an_environment_from_wheels_shipped_to_hosts_without_an_index(
    tmp_path: Path, shared_home: bool
) -> None:
    """The hosts have no way out and do not see the launcher's wheels."""
    made = 1 if shared_home else 2
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels)
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("tiny-part==1.0\n")
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PIP_FIND_LINKS": str(wheels)}
    with Lab(LabOptions(hosts=2, shared_home=shared_home)) as lab:
        argv = [sys.executable, "-m", "paceline", "setup", "env", "-H", str(lab.hostfile)]
        argv += ["--ssh-config", str(lab.ssh_config), "--requirements", str(wanted)]
        argv += ["--python", sys.executable, "--folder", "~/env"]
        for name in lab.names:  # pip would try for a quarter of a minute
            (lab.home(name) / ".config" / "pip").mkdir(parents=True, exist_ok=True)
            (lab.home(name) / ".config" / "pip" / "pip.conf").write_text("[global]\nretries = 0\n")

        def make(*words: str) -> tuple[int, str]:
            done = subprocess.run([*argv, *words], capture_output=True, text=True, env=env,
                                  cwd=tmp_path, timeout=TEST_LIMIT_S)  # fmt: skip
            return done.returncode, done.stdout + done.stderr

        if not shared_home:
            code, said = make()
            assert (code, "add --offline, which ships the wheels" in said) == (1, True), said
        code, said = make("--offline", "--activate", "export HOOK=ran")
        assert (code, said.count("made from shipped wheels")) == (0, made), said
        assert ("n2: ~/env is on the same disk as that of n1" in said) == shared_home
        script = "import os, sys, tiny_part; print(tiny_part.WORD, os.environ['HOOK'], sys.prefix)"
        for name in lab.names:
            home = lab.home_inside()
            told = lab.exec(
                name, [f"{home}/env/bin/python-activated", "-c", script], timeout=TEST_LIMIT_S
            )
            assert told.stdout.split() == ["shipped", "ran", f"{home}/env"], told.stderr
        code, said = make("--offline", "--activate", "export HOOK=ran")
        assert (code, said.count("is up to date")) == (0, made), said
