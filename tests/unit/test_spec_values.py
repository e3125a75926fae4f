"""Tests the basic classes of ``paceline.spec``."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.spec import errors
from paceline.spec.finding import Finding
from paceline.spec.formatting import shell_text
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Environment
from paceline.spec.settings import Setting, Source
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest


def test_manifest_verifies_on_python_3_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hashlib, "file_digest", raising=False)  # came with Python 3.11
    (tmp_path / "state.json").write_bytes(b"{}")
    entry = FileEntry(hashlib.sha256(b"{}").hexdigest(), 2)
    Manifest(1, {"state.json": entry}, {}).verify(tmp_path)


@given(st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1))
def test_shell_text_round_trips_through_shlex(argv: list[str]) -> None:
    assert shlex.split(shell_text(argv)) == argv


def test_error_renders_message_found_and_remedy() -> None:
    error = errors.NodeError("cannot", found="one\ntwo", remedy="do this")
    assert error.render().splitlines() == [
        "paceline: cannot",
        "  found:  one",
        "          two",
        "  remedy: do this",
    ]
    assert str(error).startswith("cannot")
    assert errors.PacelineError("only").render() == "paceline: only"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(errors.SettingError, 2), (errors.HostsError, 2), (errors.ConnectError, 1),
     (errors.NodeError, 1), (errors.JobError, 1)],
)  # fmt: skip
def test_error_exit_codes(kind: type[errors.PacelineError], code: int) -> None:
    assert kind("x").exit_code == code
    assert kind("x", exit_code=7).exit_code == 7
    assert kind.exit_code == code


def test_setting_describes_its_source() -> None:
    from_file = Setting(2, Source.FILE, "paceline.toml")
    from_command_line = Setting(3, Source.COMMAND_LINE)
    assert from_file.describe() == "2 (file: paceline.toml)"
    assert from_command_line.describe() == "3 (command line)"


def test_host_address_defaults_to_name_and_names_are_unique() -> None:
    assert Host("n1").address == "n1"
    assert Host("n1", "10.0.0.1").address == "10.0.0.1"
    assert Cluster((Host("a"), Host("b"))).head(1).hosts == (Host("a"),)
    with pytest.raises(ValueError, match="repeat"):
        Cluster((Host("a"), Host("a")))


def test_failed_finding_needs_remedy() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("ports", "fail", ("n1",), "closed")
    failed_check = Finding("ports", "fail", ("n1",), "closed", "open it")
    assert failed_check.to_json()["outcome"] == "fail"


def test_detects_forwarded_secrets() -> None:
    forwarded = {"WANDB_API_KEY": "abc", "MINE": "sk0123456789abcdefgh", "LANG": "C.UTF-8",
                 "SSH_AUTH_SOCK": "/tmp/agent.1"}  # fmt: skip
    environment = Environment({"A_KEY": "public"}, forwarded)
    assert environment.forwarded_secrets() == ("WANDB_API_KEY", "MINE")
