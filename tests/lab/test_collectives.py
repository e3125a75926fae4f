"""Tests ``paceline bench collectives`` over a lab's rate-limited links."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from launches import on, paceline

from paceline.lab import Lab

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def two_hosts(new_lab: Any) -> Lab:
    lab: Lab = new_lab(hosts=2, rate="100mbit")
    return lab


def bench(lab: Lab, folder: Path, *arguments: str, **env: str) -> tuple[int, dict[str, Any]]:
    options = (*on(lab), "--json", "--run-dir", str(folder / "run"))
    process = paceline("bench", "collectives", *options, *arguments, cwd=folder, **env)
    assert process.stdout.startswith("{"), process.stderr
    return process.returncode, json.loads(process.stdout)


def test_all_reduce_reaches_link_speed(two_hosts: Lab, tmp_path: Path) -> None:
    code, report = bench(two_hosts, tmp_path, "--collective", "all_reduce", "-b", "4M", "-n", "3",
                       "--picture", "m.svg")  # fmt: skip
    (row,) = report["rows"]
    assert (code, row["wrong"]) == (0, 0)
    for speed in (row["busbw"], row["in_place"][2]):  # two busy cores may not fill the link
        assert 60e6 < speed * 8e9 < 112e6
    assert row["in_place"][3] == 0
    assert {link["from"] for link in report["links"]} == {"n1", "n2"}
    rates = {(one, other): rate for one, other, rate in report["ways"]["rates"]}
    assert rates.keys() == {("n1", "n2"), ("n2", "n1")}
    for rate in rates.values():
        assert 60e6 < rate * 8 < 120e6
    assert [one["host"] for one in report["devices"]] == ["n1", "n2"]
    if shutil.which("iperf3"):
        assert row["busbw"] * 8e9 == pytest.approx(report["iperf3"]["bits_per_s"], rel=0.4)
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_detects_wrong_values_in_collectives(two_hosts: Lab, tmp_path: Path) -> None:
    arguments = ("-b", "1K", "-e", "1K", "-n", "2", "-w", "0", "--no-links", "--env",
             "PACELINE_BENCH_INJECT=1")  # fmt: skip
    code, report = bench(two_hosts, tmp_path, *arguments)
    assert code == 1
    assert len(report["rows"]) == 7
    wrong = {row["collective"]: row["wrong"] for row in report["rows"] if not row["error"]}
    assert wrong.pop("reduce") == 0  # reduce gives the rank with the injected error no result
    assert set(wrong.values()) == {1}
    assert "wrong values" in report["conclusion"]


def test_missed_threshold_fails(two_hosts: Lab, tmp_path: Path) -> None:
    arguments = ("--collective", "all_reduce", "-b", "64K", "-e", "64K", "-n", "2", "--no-links")
    code, report = bench(two_hosts, tmp_path, *arguments, "--min-busbw", "5", "--debug")
    assert code == 1
    assert "5 were asked for" in report["problems"][0]
    for host, rank in (("n1", 0), ("n2", 1)):
        debug_log = (tmp_path / "run" / "debug" / host / f"{rank}.log").read_text()
        assert "The client socket has connected to" in debug_log
        assert "[c10d]" not in (tmp_path / "run" / "logs" / host / f"{rank}.log").read_text()


def test_ddp_runs_with_debug_logging(tmp_path: Path) -> None:
    """With more logging than ``--debug`` requests, torch 2.13 crashes when it builds a DDP."""
    script = Path(__file__).with_name("coming") / "train.py"
    options = ("--debug", "-p", "2", "--run-dir", "run")
    process = paceline("run", *options, str(script), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("trained as") == 2
    assert "world_size" not in process.stdout + process.stderr
    (debug_log,) = (tmp_path / "run" / "debug").glob("*/1.log")
    assert "DDP Initialized with" in debug_log.read_text()
