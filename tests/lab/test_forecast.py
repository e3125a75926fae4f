"""Tests ``paceline forecast`` over a lab's slow links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launches import on, paceline

from paceline.lab import Lab

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab(new_lab: Any) -> Lab:
    made: Lab = new_lab(hosts=2, rate="40mbit")
    return made


def test_forecast_is_link_limited_and_compared_with_run(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    host_options = on(lab)

    def run_paceline(*words: str) -> tuple[str, str]:
        result = paceline(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    output, _ = run_paceline(
        *("forecast", *host_options, "--up-to", "4", "--seconds", "0", "--price", "2", "--json"),
        "job.py",
    )
    report = json.loads(output)
    one_host, two_hosts, three_hosts, four_hosts = report["forecasts"]
    assert (one_host["hosts"], one_host["batch"], one_host["link"]) == (1, 64, 0)
    assert {two_hosts["limit"], three_hosts["limit"], four_hosts["limit"]} == {"link"}
    assert two_hosts["seconds"] > 0.18  # 1 MB each way at 40 Mbit/s takes 0.21 s
    assert three_hosts["seconds"] > 0.2
    assert four_hosts["communication"]
    assert four_hosts["price"] > one_host["price"]
    (folder,) = tmp_path.glob("runs/*")  # the probe's runs are deleted
    assert folder.name.startswith("forecast-")
    assert not (tmp_path / "begun.json").exists()  # nor do the script's own files replace others
    assert (folder / "forecast.svg").read_text().startswith("<svg")
    _, ended = run_paceline("run", *host_options, "--run-dir", "runs/real", "job.py")
    assert "a step was forecast to take" in ended
    assert (tmp_path / "begun.json").exists()
    comparison, _ = run_paceline("forecast", "--compare", "runs/real")
    assert comparison.split() == ended[ended.index("a step was forecast") :].split()
    saved = json.loads((tmp_path / "runs/real/forecast.json").read_text())
    assert saved["came"]["seconds"] > 0.18


def test_layouts_of_bench_scaling_start_from_the_same_files(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(ONCE)
    result = paceline("bench", "scaling", *on(lab), "-p", "1", "once.py",
                      cwd=tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len([*tmp_path.glob("runs/scaling-*/*x1-1")]) == 2
    assert not (tmp_path / "state").exists()


ONCE = """
from pathlib import Path

with open("state", "x") as state:  # fails if an earlier layout has written it
    state.write("1")
"""
JOB = """
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from paceline import train

Path("begun.json").write_text("{}")
with train.join(log_every=2) as session:
    network = session.place(torch.nn.Linear(512, 512))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    loader = session.loader(TensorDataset(torch.ones(384, 512)), 64)
    for epoch in session.epochs(loader, 1):
        for (x,) in loader:
            session.step(model(x).square().mean(1))
"""
