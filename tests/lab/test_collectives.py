"""``paceline bench collectives`` over a lab's rate-limited links."""

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
def two(new_lab: Any) -> Lab:
    lab: Lab = new_lab(hosts=2, rate="100mbit")
    return lab


def bench(lab: Lab, folder: Path, *words: str, **env: str) -> tuple[int, dict[str, Any]]:
    options = (*on(lab), "--json", "--run-dir", str(folder / "run"))
    done = paceline("bench", "collectives", *options, *words, cwd=folder, **env)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_all_reduce_is_as_fast_as_the_link(two: Lab, tmp_path: Path) -> None:
    code, said = bench(two, tmp_path, "--collective", "all_reduce", "-b", "4M", "-n", "3",
                       "--picture", "m.svg")  # fmt: skip
    (row,) = said["rows"]
    assert (code, row["wrong"]) == (0, 0)
    for speed in (row["busbw"], row["in_place"][2]):  # two busy cores may not fill the link
        assert 60e6 < speed * 8e9 < 112e6
    assert row["in_place"][3] == 0
    assert {link["from"] for link in said["links"]} == {"n1", "n2"}
    ways = {(one, other): rate for one, other, rate in said["ways"]["rates"]}
    assert ways.keys() == {("n1", "n2"), ("n2", "n1")}
    for rate in ways.values():
        assert 60e6 < rate * 8 < 120e6
    assert [one["host"] for one in said["devices"]] == ["n1", "n2"]
    if shutil.which("iperf3"):
        assert row["busbw"] * 8e9 == pytest.approx(said["iperf3"]["bits_per_s"], rel=0.4)
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_every_collective_is_right_and_a_wrong_value_is_found(two: Lab, tmp_path: Path) -> None:
    words = ("-b", "1K", "-e", "1K", "-n", "2", "-w", "0", "--no-links", "--env",
             "PACELINE_BENCH_INJECT=1")  # fmt: skip
    code, said = bench(two, tmp_path, *words)
    assert code == 1
    assert len(said["rows"]) == 7
    wrong = {row["collective"]: row["wrong"] for row in said["rows"] if not row["error"]}
    assert wrong.pop("reduce") == 0  # the spoilt rank gets no result of it
    assert set(wrong.values()) == {1}
    assert "wrong values" in said["conclusion"]


def test_a_missed_threshold_is_an_exit_status(two: Lab, tmp_path: Path) -> None:
    words = ("--collective", "all_reduce", "-b", "64K", "-e", "64K", "-n", "2", "--no-links")
    code, said = bench(two, tmp_path, *words, "--min-busbw", "5", "--debug")
    assert code == 1
    assert "5 were asked for" in said["problems"][0]
    for host, rank in (("n1", 0), ("n2", 1)):
        told = (tmp_path / "run" / "debug" / host / f"{rank}.log").read_text()
        assert "The client socket has connected to" in told
        assert "[c10d]" not in (tmp_path / "run" / "logs" / host / f"{rank}.log").read_text()


def test_ddp_runs_while_the_libraries_tell(tmp_path: Path) -> None:
    """Asked for more detail than this, torch 2.13 crashes as it builds a DDP."""
    script = Path(__file__).with_name("coming") / "train.py"
    options = ("--debug", "-p", "2", "--run-dir", "run")
    done = paceline("run", *options, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained as") == 2
    assert "world_size" not in done.stdout + done.stderr
    (told,) = (tmp_path / "run" / "debug").glob("*/1.log")
    assert "DDP Initialized with" in told.read_text()
