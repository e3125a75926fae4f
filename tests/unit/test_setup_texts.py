"""The pure parts of setup: aliases, mounts, reports, journal."""

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


def test_hosts_that_need_nothing_get_no_alias() -> None:
    assert not lines.needs_alias(Host("n1"), None)
    assert lines.needs_alias(Host("n1", port=2222), None)
    assert lines.needs_alias(Host("n1"), Path("/keys/job"))


def test_ssh_agrees_with_the_alias(tmp_path: Path) -> None:
    host = Host("gpu1", address="10.0.0.9", user="ml", port=2222)
    config = tmp_path / "config"
    config.write_text(lines.alias_blocks([host], tmp_path / "my key"))
    said = subprocess.run(
        ["ssh", "-F", str(config), "-G", "gpu1"], capture_output=True, text=True, check=True
    ).stdout
    for line in ("hostname 10.0.0.9", "user ml", "port 2222", "identitiesonly yes"):
        assert f"{line}\n" in said
    assert f"identityfile {tmp_path}/my key\n" in said


def test_the_include_stands_first_and_once() -> None:
    once = lines.with_include("Host *\n  User x\n")
    assert once.startswith(lines.INCLUDE + "\n")
    assert lines.with_include(once) == once


def test_names_that_would_change_the_meaning_are_refused() -> None:
    with pytest.raises(SettingError):
        lines.alias_blocks([Host("a b", port=1)], None)


@given(st.text(st.characters(exclude_characters="\n\0", codec="utf-8"), min_size=1))
def test_a_fstab_line_has_six_fields(path: str) -> None:
    line = lines.fstab_line(lines.Share("cifs", "nas", path, "/mnt/a b", user="u"))
    assert len([field for field in line.split(" ") if field]) >= 6
    assert "\n" not in line


def test_mount_commands_hold_no_password_and_close_the_file() -> None:
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


def test_the_install_report_is_read_through_a_banner() -> None:
    report = keys.read_report(
        "Welcome!\npaceline home drwxr-xr-x /home/ml\npaceline folder drwxrwxr-x\n"
        "paceline file -rw-rw-r-- YQ==\npaceline done YWI=\n"
    )
    assert report.changed
    assert (report.file_mode, report.folder_mode, report.home_mode) == ("664", "775", "755")
    assert keys.read_report("garbage").failed
    assert keys.read_report("paceline failed no space\n").failed == "no space"


@given(st.text(min_size=1))
def test_the_key_reaches_the_script_as_data(key: str) -> None:
    script = keys.install_script(key.replace("\0", ""))
    assert f"key={shlex.quote(key.replace(chr(0), '').strip())}" in script


def test_the_journal_restores_byte_for_byte(tmp_path: Path) -> None:
    journal = Journal.read(tmp_path / "state" / "j.json")
    old, new = tmp_path / "config", tmp_path / "made" / "file"
    old.write_bytes(b"no newline at the end")
    old.chmod(0o640)
    assert write_file(journal, old, b"first\nno newline at the end", 0o600, ("first",))
    assert not write_file(journal, old, b"first\nno newline at the end", 0o600)
    assert write_file(journal, new, b"x", 0o600)
    again = Journal.read(tmp_path / "state" / "j.json")
    for change in reversed(again.changes):
        undo(change)
    assert old.read_bytes() == b"no newline at the end"
    assert old.stat().st_mode & 0o777 == 0o640
    assert not new.parent.exists()


def test_what_others_wrote_since_is_kept(tmp_path: Path) -> None:
    journal = Journal.read(tmp_path / "j.json")
    file = tmp_path / "known_hosts"
    write_file(journal, file, b"ours\n", 0o600, ("ours",))
    file.write_bytes(b"ours\ntheirs\n")
    undo(journal.changes[-1])
    assert file.read_bytes() == b"theirs\n"
    assert remove_lines(b"a\r\nb", ("a",)) == b"b"


def test_existing_keys_are_used_and_dsa_never(tmp_path: Path) -> None:
    rsa = tmp_path / "id_rsa"
    rsa.write_text("private")
    (tmp_path / "id_rsa.pub").write_text("ssh-rsa AAAA x\n")
    found = keys.choose_identity(None, [tmp_path / "id_ed25519", rsa], [], tmp_path)
    assert (found.private, found.public, found.exists) == (rsa, "ssh-rsa AAAA x", True)
    (tmp_path / "id_rsa.pub").write_text("ssh-dss AAAA x\n")
    with pytest.raises(SettingError, match="DSA"):
        keys.choose_identity(rsa, [], [], tmp_path)
    agent = keys.choose_identity(None, [], ["ssh-dss A", "ssh-ed25519 B"], tmp_path)
    assert (agent.private, agent.public) == (None, "ssh-ed25519 B")
    assert keys.choose_identity(None, [], [], tmp_path).private == tmp_path / "id_ed25519"
    assert "dsa" not in keys.KINDS


def test_a_key_with_a_passphrase_is_left_alone(tmp_path: Path) -> None:
    """It is refused with its remedy, and ``--key`` asks for another one that is to be made."""
    mine, other = tmp_path / "id_rsa", tmp_path / "id_paceline"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", str(mine)]
    subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
    before = mine.read_bytes()
    mine.with_suffix(".pub").unlink()  # only the private half could say it
    with pytest.raises(SettingError, match="without its passphrase") as caught:
        keys.choose_identity(None, [mine], [], tmp_path)
    assert f"ssh-add {mine}" in caught.value.render()
    found = keys.choose_identity(other, [mine], [], tmp_path)
    assert (found.private, found.exists) == (other, False)
    assert mine.read_bytes() == before


def test_only_the_asking_login_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []

    async def run(argv: list[str], *_: Any) -> CompletedProcess[str]:
        commands.append(argv)
        return CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(login, "run_process", run)
    for environment in (None, {}):
        asyncio.run(login.run_on_host(Host("n1"), SshOptions(), ["true"], "", environment))
    quiet, asking = commands
    assert "BatchMode=yes" in quiet
    assert "BatchMode=no" in asking
    assert "NumberOfPasswordPrompts=1" in asking
    assert "StrictHostKeyChecking=yes" in asking


def test_a_login_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> CompletedProcess[str]:
        raise asyncio.TimeoutError

    monkeypatch.setattr(login, "run_process", run)
    answer = asyncio.run(login.run_on_host(Host("n1"), SshOptions(), ["true"]))
    assert answer.refusal is not None
    assert answer.refusal.cause == "no answer"


def test_the_worker_sshd_takes_keys_only(tmp_path: Path) -> None:
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
def test_the_hosts_file_is_changed_in_place_and_through_no_other(
    tmp_path: Path, script: str, line: str
) -> None:
    """As typed; a file that a stranger could lay in wait for is not on the way."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n127.0.1.1\tn1 n1.lan\n::1 ip6-localhost\n")
    inode = file.stat().st_ino
    command = lines.edit_command(script)
    assert "/tmp" not in command
    typed = command.removeprefix("sudo ").replace("/etc/hosts", str(file))
    subprocess.run(["sh", "-c", typed], check=True, cwd=tmp_path)
    assert file.read_text() == f"127.0.0.1 localhost\n{line}\n::1 ip6-localhost\n"
    assert file.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [file]


def test_only_names_are_taken_over_from_a_hosts_file() -> None:
    hostile = "127.0.1.1 n1 n1.lan ';rm $(id)` a/b & # n9"
    assert lines.host_names(hostile) == ["n1", "n1.lan"]


# --- what setup says that it would do


def test_nothing_to_do_is_said_only_where_it_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.verbs.setup import show_plan
    from paceline.remote.openssh import Refusal
    from paceline.setup.access import AccessStatus

    works = AccessStatus(Host("n1"), "works")
    lost = AccessStatus(
        Host("n9"), "refused", refusal=Refusal("name not found", "no n9", "spell it")
    )

    def said(looks: list[AccessStatus], todo: list[str]) -> str:
        show_plan(looks, todo)
        return capsys.readouterr().out

    assert said([works], []) == "n1: SSH login already works\nnothing to do\n"
    refused = said([works, lost], [])
    assert "nothing to do" not in refused
    assert "nothing can be done yet for n9: see above" in refused
    assert "to do, but for n9:\n  a step\n" in said([lost], ["a step"])


def test_mounts_take_an_owner_for_cifs_and_say_what_kind_is() -> None:
    words = ["--kind", "cifs", "--server", "nas", "--path", "data", "--at", "/mnt", "--user", "me"]
    done = CliRunner().invoke(mounts.command, [*words, "--uid", "1000", "--gid", "0"])
    assert ",uid=1000,gid=0," in done.output
    done = CliRunner().invoke(mounts.command, ["--kind", "nfs", *words[2:8], "--uid", "1000"])
    assert "are for cifs" in str(done.exception)
    assert "Kind of server" in CliRunner().invoke(mounts.command, ["--help"]).output
