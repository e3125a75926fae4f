"""The nouns."""

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


def test_a_checkpoint_is_verified_under_python_3_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hashlib, "file_digest", raising=False)  # came with Python 3.11
    (tmp_path / "state.json").write_bytes(b"{}")
    entry = FileEntry(hashlib.sha256(b"{}").hexdigest(), 2)
    Manifest(1, {"state.json": entry}, {}).verify(tmp_path)


@given(st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1))
def test_a_command_as_text_is_read_back_word_for_word(argv: list[str]) -> None:
    assert shlex.split(shell_text(argv)) == argv


def test_an_error_in_three_parts() -> None:
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
def test_exit_statuses(kind: type[errors.PacelineError], code: int) -> None:
    assert kind("x").exit_code == code
    assert kind("x", exit_code=7).exit_code == 7
    assert kind.exit_code == code


def test_a_setting_says_where_it_comes_from() -> None:
    file = Setting(2, Source.FILE, "paceline.toml")
    typed = Setting(3, Source.COMMAND_LINE)
    assert file.describe() == "2 (file: paceline.toml)"
    assert typed.describe() == "3 (command line)"


def test_hosts_have_an_address_and_clusters_no_name_twice() -> None:
    assert Host("n1").address == "n1"
    assert Host("n1", "10.0.0.1").address == "10.0.0.1"
    assert Cluster((Host("a"), Host("b"))).head(1).hosts == (Host("a"),)
    with pytest.raises(ValueError, match="repeat"):
        Cluster((Host("a"), Host("a")))


def test_a_finding_that_fails_has_a_remedy() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("ports", "fail", ("n1",), "closed")
    found = Finding("ports", "fail", ("n1",), "closed", "open it")
    assert found.to_json()["outcome"] == "fail"


def test_which_forwarded_variables_seem_to_be_secrets() -> None:
    forwarded = {"WANDB_API_KEY": "abc", "MINE": "sk0123456789abcdefgh", "LANG": "C.UTF-8",
                 "SSH_AUTH_SOCK": "/tmp/agent.1"}  # fmt: skip
    environment = Environment({"A_KEY": "public"}, forwarded)
    assert environment.forwarded_secrets() == ("WANDB_API_KEY", "MINE")
