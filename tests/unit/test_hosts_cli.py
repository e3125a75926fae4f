"""Tests the command ``paceline hosts``."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.cli import main
from paceline.cli.verbs.hosts import command
from paceline.hosts import DIALECTS
from paceline.spec.errors import HostsError, SettingError
from paceline.spec.hosts import Host

TEXT = "# ours\r\nn1:2\r\nme@n2:50022 slots=4\r\n"


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostfile"
    path.write_bytes(TEXT.encode())
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_prints_host_table(hostfile: Path) -> None:
    assert run("hostfile").stdout.splitlines() == [
        "name  slots  user  port",
        "n1    2      -     -",
        "n2    4      me    50022",
        "",
        "2 hosts, 6 slots, from hostfile (host file of Open MPI or DeepSpeed)",
        "note: `n1:2` was read as 2 slots; `--colon port` reads an SSH port",
    ]


def test_applies_paceline_toml_of_folder(hostfile: Path) -> None:
    (hostfile.parent / "paceline.toml").write_text('[hosts.n1]\naddress = "10.0.0.1"\n')
    assert run("hostfile").stdout.splitlines()[:2] == [
        "name  address   slots  user  port",
        "n1    10.0.0.1  2      -     -",
    ]


def test_json_contains_host_fields(hostfile: Path) -> None:
    document = json.loads(run("hostfile", "--json").stdout)
    assert list(document) == ["source", "hosts", "notes"]
    assert [list(host) for host in document["hosts"]] == [[f.name for f in fields(Host)]] * 2
    assert document["hosts"][1]["port"] == 50022


def test_write_reports_lost_fields(hostfile: Path) -> None:
    result = run("hostfile", "--write", "mpich")
    assert result.stdout == "n1:2\nn2:4\n"
    assert result.stderr.splitlines() == [
        "paceline: mpich cannot say: user of n2",
        "paceline: mpich cannot say: port of n2",
    ]
    assert run("hostfile", "--write", "port").stderr == ""
    assert run("n1,n2", "--write", "accelerate").stderr.endswith("the hosts after the first\n")


def test_rejects_unknown_and_unwritable_dialects(hostfile: Path) -> None:
    with pytest.raises(SettingError, match="did you mean `slurm`"):
        run("hostfile", "--write", "slrum")
    with pytest.raises(SettingError, match="variables"):
        run("hostfile", "--write", "torchrun")


def test_host_file_errors_propagate(hostfile: Path) -> None:
    hostfile.write_text("n1 slots=x\n")
    with pytest.raises(HostsError, match="hostfile, line 1") as caught:
        run("hostfile")
    assert caught.value.exit_code == 2


def test_write_option_leaves_disk_unchanged(hostfile: Path) -> None:
    initial = hashlib.sha256(hostfile.read_bytes()).hexdigest()
    for target in ("toml", "plain", "tlt"):
        run("hostfile", "--write", target)
    assert hashlib.sha256(hostfile.read_bytes()).hexdigest() == initial
    assert [path.name for path in hostfile.parent.iterdir()] == ["hostfile"]


def test_documentation_lists_dialects() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "describe-hosts.md").read_text()
    documented = set(re.findall(r"^\| `([a-z-]+)` \|[^|]+\|[^|]+\|$", page, re.M))
    assert documented == set(DIALECTS)
    for name in DIALECTS:
        assert name in (command.help or "")


@pytest.fixture
def restore_sigint() -> Iterator[None]:
    """Restores the handler of SIGINT, which the program removes at its end."""
    initial = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, initial)


@pytest.mark.usefixtures("restore_sigint")
@pytest.mark.parametrize(
    "line",
    ["run train.py", "hosts n1,n2", "explain x.log", "check", "train minimal", "runs", "lab up"],
)
def test_removed_working_directory_is_reported(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as exc_info:
        main(line.split())
    assert exc_info.value.code == 2
    assert "the current folder was removed" in capsys.readouterr().err


@pytest.mark.usefixtures("restore_sigint")
def test_missing_ssh_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["check", "-H", "n1.invalid,n2.invalid", "--quick", "--plain"])
    assert "ssh is not installed on this machine" in capsys.readouterr().err
