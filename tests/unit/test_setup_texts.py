"""Tests the functions of setup without side effects: aliases, mounts, reports, journal."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.verbs.setup import mounts
from paceline.remote.openssh import SshOptions
from paceline.setup import keys, lines, login
from paceline.setup.journal import Journal, remove_lines, undo, write_file
from paceline.setup.worker_sshd import config_text
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host


def test_needs_alias() -> None:
    assert not lines.needs_alias(Host("n1"), None)
    assert lines.needs_alias(Host("n1", port=2222), None)
    assert lines.needs_alias(Host("n1"), Path("/keys/job"))


def test_ssh_parses_alias_blocks(tmp_path: Path) -> None:
    host = Host("gpu1", address="10.0.0.9", user="ml", port=2222)
    config = tmp_path / "config"
    config.write_text(lines.alias_blocks([host], tmp_path / "my key"))
    printed = subprocess.run(
        ["ssh", "-F", str(config), "-G", "gpu1"], capture_output=True, text=True, check=True
    ).stdout
    for line in ("hostname 10.0.0.9", "user ml", "port 2222", "identitiesonly yes"):
        assert f"{line}\n" in printed
    assert f"identityfile {tmp_path}/my key\n" in printed


def test_include_is_first_and_unique() -> None:
    included = lines.with_include("Host *\n  User x\n")
    assert included.startswith(lines.INCLUDE + "\n")
    assert lines.with_include(included) == included


def test_rejects_unsafe_alias_name() -> None:
    with pytest.raises(SettingError):
        lines.alias_blocks([Host("a b", port=1)], None)


@given(st.text(st.characters(exclude_characters="\n\0", codec="utf-8"), min_size=1))
def test_fstab_line_has_six_fields(path: str) -> None:
    line = lines.fstab_line(lines.Share("cifs", "nas", path, "/mnt/a b", user="u"))
    assert len([field for field in line.split(" ") if field]) >= 6
    assert "\n" not in line


def test_mount_commands_protect_password() -> None:
    share = lines.Share("cifs", "nas", "data", "/mnt/data", user="ml")
    text = "\n".join(lines.mount_commands(share))
    assert "install -m 600 -o root" in text
    assert "password=%s" in text
    nfs = lines.Share("nfs", "fd00::1", "/export", "/mnt/data")
    assert lines.mount_source(nfs) == "[fd00::1]:/export"
    for command in [*lines.mount_commands(share), *lines.mount_commands(nfs)]:
        assert shlex.split(command)
    with pytest.raises(SettingError):
        lines.Share("nfs", "nas", "/x", "relative")


def test_read_report_skips_banner() -> None:
    report = keys.read_report(
        "Welcome!\npaceline home drwxr-xr-x /home/ml\npaceline folder drwxrwxr-x\n"
        "paceline file -rw-rw-r-- YQ==\npaceline done YWI=\n"
    )
    assert report.changed
    assert (report.file_mode, report.folder_mode, report.home_mode) == ("664", "775", "755")
    assert keys.read_report("garbage").failed
    assert keys.read_report("paceline failed no space\n").failed == "no space"


@given(st.text(min_size=1))
def test_install_script_quotes_key(key: str) -> None:
    script = keys.install_script(key.replace("\0", ""))
    assert f"key={shlex.quote(key.replace(chr(0), '').strip())}" in script


def test_undo_restores_exact_content(tmp_path: Path) -> None:
    journal = Journal.read(tmp_path / "state" / "j.json")
    existing_file, created_file = tmp_path / "config", tmp_path / "made" / "file"
    existing_file.write_bytes(b"no newline at the end")
    existing_file.chmod(0o640)
    assert write_file(journal, existing_file, b"first\nno newline at the end", 0o600, ("first",))
    assert not write_file(journal, existing_file, b"first\nno newline at the end", 0o600)
    assert write_file(journal, created_file, b"x", 0o600)
    reread_journal = Journal.read(tmp_path / "state" / "j.json")
    for change in reversed(reread_journal.changes):
        undo(change)
    assert existing_file.read_bytes() == b"no newline at the end"
    assert existing_file.stat().st_mode & 0o777 == 0o640
    assert not created_file.parent.exists()


def test_undo_keeps_foreign_lines(tmp_path: Path) -> None:
    journal = Journal.read(tmp_path / "j.json")
    file = tmp_path / "known_hosts"
    write_file(journal, file, b"ours\n", 0o600, ("ours",))
    file.write_bytes(b"ours\ntheirs\n")
    undo(journal.changes[-1])
    assert file.read_bytes() == b"theirs\n"
    assert remove_lines(b"a\r\nb", ("a",)) == b"b"


def test_uses_existing_key_but_not_dsa(tmp_path: Path) -> None:
    rsa = tmp_path / "id_rsa"
    rsa.write_text("private")
    (tmp_path / "id_rsa.pub").write_text("ssh-rsa AAAA x\n")
    identity = keys.choose_identity(None, [tmp_path / "id_ed25519", rsa], [], tmp_path)
    assert (identity.private, identity.public, identity.exists) == (rsa, "ssh-rsa AAAA x", True)
    (tmp_path / "id_rsa.pub").write_text("ssh-dss AAAA x\n")
    with pytest.raises(SettingError, match="DSA"):
        keys.choose_identity(rsa, [], [], tmp_path)
    agent = keys.choose_identity(None, [], ["ssh-dss A", "ssh-ed25519 B"], tmp_path)
    assert (agent.private, agent.public) == (None, "ssh-ed25519 B")
    assert keys.choose_identity(None, [], [], tmp_path).private == tmp_path / "id_ed25519"
    assert "dsa" not in keys.KINDS


def test_does_not_use_key_with_passphrase(tmp_path: Path) -> None:
    """The error says what to do; ``--key`` with another path creates a new key."""
    protected_key, requested_key = tmp_path / "id_rsa", tmp_path / "id_paceline"
    keygen_argv = [
        "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "a passphrase",
        "-f",
        str(protected_key),
    ]
    subprocess.run(keygen_argv, check=True, stdin=subprocess.DEVNULL)
    before = protected_key.read_bytes()
    protected_key.with_suffix(".pub").unlink()  # now only the private key can have the answer
    with pytest.raises(SettingError, match="without its passphrase") as caught:
        keys.choose_identity(None, [protected_key], [], tmp_path)
    assert f"ssh-add {protected_key}" in caught.value.render()
    identity = keys.choose_identity(requested_key, [protected_key], [], tmp_path)
    assert (identity.private, identity.exists) == (requested_key, False)
    assert protected_key.read_bytes() == before


def test_only_interactive_login_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []

    async def run(argv: list[str], *_: Any) -> CompletedProcess[str]:
        commands.append(argv)
        return CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(login, "run_process", run)
    for environment in (None, {}):
        asyncio.run(login.run_on_host(Host("n1"), SshOptions(), ["true"], "", environment))
    batch_argv, interactive_argv = commands
    assert "BatchMode=yes" in batch_argv
    assert "BatchMode=no" in interactive_argv
    assert "NumberOfPasswordPrompts=1" in interactive_argv
    assert "StrictHostKeyChecking=yes" in interactive_argv


def test_login_timeout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> CompletedProcess[str]:
        raise asyncio.TimeoutError

    monkeypatch.setattr(login, "run_process", run)
    answer = asyncio.run(login.run_on_host(Host("n1"), SshOptions(), ["true"]))
    assert answer.refusal is not None
    assert answer.refusal.cause == "no answer"


def test_worker_sshd_accepts_only_keys(tmp_path: Path) -> None:
    text = config_text(tmp_path, 12345, "0.0.0.0")
    assert "PasswordAuthentication no" in text
    assert "Port 12345" in text
    assert "DEBUG" not in text


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("2s/.*/10.77.0.11 n1/", "10.77.0.11 n1"),
        (r"/[[:space:]]n1\b/s/^[^[:space:]]*/10.77.0.11/", "10.77.0.11\tn1 n1.lan"),
    ],
)
def test_hosts_file_is_edited_in_place(tmp_path: Path, script: str, line: str) -> None:
    """The command edits the file itself, without a temporary file that others could prepare."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n127.0.1.1\tn1 n1.lan\n::1 ip6-localhost\n")
    inode = file.stat().st_ino
    command = lines.edit_command(script)
    assert "/tmp" not in command
    executed = command.removeprefix("sudo ").replace("/etc/hosts", str(file))
    subprocess.run(["sh", "-c", executed], check=True, cwd=tmp_path)
    assert file.read_text() == f"127.0.0.1 localhost\n{line}\n::1 ip6-localhost\n"
    assert file.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [file]


def test_host_names_skips_unsafe_text() -> None:
    hostile = "127.0.1.1 n1 n1.lan ';rm $(id)` a/b & # n9"
    assert lines.host_names(hostile) == ["n1", "n1.lan"]


# --- the preview of what setup would do


def test_show_plan(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.verbs.setup import show_plan
    from paceline.remote.openssh import Refusal
    from paceline.setup.access import AccessStatus

    reachable = AccessStatus(Host("n1"), "works")
    unresolved = AccessStatus(
        Host("n9"), "refused", refusal=Refusal("name not found", "no n9", "spell it")
    )

    def printed(statuses: list[AccessStatus], todo: list[str]) -> str:
        show_plan(statuses, todo)
        return capsys.readouterr().out

    assert printed([reachable], []) == "n1: SSH login already works\nnothing to do\n"
    plan_text = printed([reachable, unresolved], [])
    assert "nothing to do" not in plan_text
    assert "nothing can be done yet for n9: see above" in plan_text
    assert "to do, but for n9:\n  a step\n" in printed([unresolved], ["a step"])


def test_mounts_owner_options_and_help() -> None:
    cifs_options = [
        "--kind",
        "cifs",
        "--server",
        "nas",
        "--path",
        "data",
        "--at",
        "/mnt",
        "--user",
        "me",
    ]
    completed = CliRunner().invoke(mounts.command, [*cifs_options, "--uid", "1000", "--gid", "0"])
    assert ",uid=1000,gid=0," in completed.output
    completed = CliRunner().invoke(
        mounts.command, ["--kind", "nfs", *cifs_options[2:8], "--uid", "1000"]
    )
    assert "are for cifs" in str(completed.exception)
    assert "Kind of server" in CliRunner().invoke(mounts.command, ["--help"]).output
