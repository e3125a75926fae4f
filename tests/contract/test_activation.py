"""Tests scripts that are sourced before the ranks start: their variables, and their failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.agent.supervision import activation, job

BASE = {"PATH": os.defpath, "HOME": "/root", "KEPT": "1", "PWD": "/before"}


def script(folder: Path, text: str, name: str = "set vars.sh") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_applies_script_exports(tmp_path: Path) -> None:
    text = """
    echo "this is for nobody"
    here=$(dirname "${BASH_SOURCE[0]}")
    export ROOT="$here" PATH="$here/bin:$PATH" LINES_OF="a
b" ARGUMENTS=$#
    unset KEPT
    cd /
    """
    environment = activation.activate([script(tmp_path, text)], BASE)
    assert environment == {
        "PATH": f"{tmp_path}/bin:{os.defpath}", "HOME": "/root", "ROOT": str(tmp_path),
        "LINES_OF": "a\nb", "ARGUMENTS": "0", "PWD": "/before",
    }  # fmt: skip
    assert activation.changed_names(BASE, environment) == ["ARGUMENTS", "LINES_OF", "PATH", "ROOT"]


def test_runs_scripts_in_order(tmp_path: Path) -> None:
    first = script(tmp_path, "set -e -u; export A=1", "first")
    second = script(tmp_path, 'export B="$A$NOWHERE"2', "second")  # the first's options are off
    assert activation.activate([first, second], BASE)["B"] == "12"
    assert activation.activate([], BASE) == BASE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo first >&2; echo no such card; return 3", ["status 3", "first", "no such card"]),
        ("exit 0", ["ended before"]),
        ("exit 7", ["status 7"]),
        ("if", ["status", "syntax error"]),
        ("kill -9 $$", ["signal 9"]),
    ],
)
def test_reports_failing_script(text: str, expected: list[str], tmp_path: Path) -> None:
    path = script(tmp_path, text)
    with pytest.raises(activation.ActivationError) as caught:
        activation.activate([path], BASE)
    for part in (path, *expected):
        assert part in str(caught.value)


def test_rejects_missing_file() -> None:
    with pytest.raises(activation.ActivationError, match="there is no file /no/such"):
        activation.activate(["/no/such"], BASE)


def test_script_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "SCRIPT_TIMEOUT_S", 0.3)
    with pytest.raises(activation.ActivationError, match=r"did not end within 0.3 s"):
        activation.activate([script(tmp_path, "sleep 60")], BASE)


def test_does_not_wait_for_background_processes(tmp_path: Path) -> None:
    environment = activation.activate([script(tmp_path, "sleep 5 & export A=1 LEFT=$!")], BASE)
    assert environment["A"] == "1"
    os.kill(int(environment["LEFT"]), 9)


def test_script_overrides_defaults_but_not_user_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    node = job.NodeJob(lambda *_: None, "")
    path = script(tmp_path, "export OMP_NUM_THREADS=3 FI_PROVIDER=psm3")
    node.activate({"activate": [path]})
    node._yielded_names = node._activated_names & {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    sent = {"OMP_NUM_THREADS": "8", "GLOO_SOCKET_IFNAME": "eth0", "FI_PROVIDER": "typed"}
    assert node._apply_defaults(sent) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "FI_PROVIDER": "typed",
    }
