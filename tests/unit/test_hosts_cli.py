"""``paceline hosts``."""

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


def test_the_table(hostfile: Path) -> None:
    assert run("hostfile").stdout.splitlines() == [
        "name  slots  user  port",
        "n1    2      -     -",
        "n2    4      me    50022",
        "",
        "2 hosts, 6 slots, from hostfile (host file of Open MPI or DeepSpeed)",
        "note: `n1:2` was read as 2 slots; `--colon port` reads an SSH port",
    ]


def test_paceline_toml_of_the_folder_is_applied(hostfile: Path) -> None:
    (hostfile.parent / "paceline.toml").write_text('[hosts.n1]\naddress = "10.0.0.1"\n')
    assert run("hostfile").stdout.splitlines()[:2] == [
        "name  address   slots  user  port",
        "n1    10.0.0.1  2      -     -",
    ]


def test_json_has_every_field(hostfile: Path) -> None:
    found = json.loads(run("hostfile", "--json").stdout)
    assert list(found) == ["source", "hosts", "notes"]
    assert [list(host) for host in found["hosts"]] == [[f.name for f in fields(Host)]] * 2
    assert found["hosts"][1]["port"] == 50022


def test_writing_says_what_is_lost(hostfile: Path) -> None:
    result = run("hostfile", "--write", "mpich")
    assert result.stdout == "n1:2\nn2:4\n"
    assert result.stderr.splitlines() == [
        "paceline: mpich cannot say: user of n2",
        "paceline: mpich cannot say: port of n2",
    ]
    assert run("hostfile", "--write", "port").stderr == ""
    assert run("n1,n2", "--write", "accelerate").stderr.endswith("the hosts after the first\n")


def test_unknown_or_unwritable_dialects(hostfile: Path) -> None:
    with pytest.raises(SettingError, match="did you mean `slurm`"):
        run("hostfile", "--write", "slrum")
    with pytest.raises(SettingError, match="variables"):
        run("hostfile", "--write", "torchrun")


def test_errors_reach_the_program(hostfile: Path) -> None:
    hostfile.write_text("n1 slots=x\n")
    with pytest.raises(HostsError, match="hostfile, line 1") as caught:
        run("hostfile")
    assert caught.value.exit_code == 2


def test_nothing_on_disk_changes(hostfile: Path) -> None:
    before = hashlib.sha256(hostfile.read_bytes()).hexdigest()
    for target in ("toml", "plain", "tlt"):
        run("hostfile", "--write", target)
    assert hashlib.sha256(hostfile.read_bytes()).hexdigest() == before
    assert [path.name for path in hostfile.parent.iterdir()] == ["hostfile"]


def test_the_documentation_names_every_dialect() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "describe-hosts.md").read_text()
    documented = set(re.findall(r"^\| `([a-z-]+)` \|[^|]+\|[^|]+\|$", page, re.M))
    assert documented == set(DIALECTS)
    for name in DIALECTS:
        assert name in (command.help or "")


@pytest.fixture
def interrupt() -> Iterator[None]:
    """The handler of SIGINT, which the program takes away at its end."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt")
@pytest.mark.parametrize(
    "line",
    ["run train.py", "hosts n1,n2", "explain x.log", "check", "train minimal", "runs", "lab up"],
)
def test_a_removed_current_folder_is_an_error_of_its_own(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "the current folder was removed" in capsys.readouterr().err


@pytest.mark.usefixtures("interrupt")
def test_a_machine_without_ssh_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["check", "-H", "n1.invalid,n2.invalid", "--quick", "--plain"])
    assert "ssh is not installed on this machine" in capsys.readouterr().err
