"""``paceline forecast`` as it is typed, over a lab's slow links."""

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


def test_a_script_over_slow_links_beside_the_run_that_follows(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    where = on(lab)

    def typed(*words: str) -> tuple[str, str]:
        done = paceline(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    said, _ = typed(
        *("forecast", *where, "--up-to", "4", "--seconds", "0", "--price", "2", "--json"),
        "job.py",
    )
    found = json.loads(said)
    one, two, three, four = found["forecasts"]
    assert (one["hosts"], one["batch"], one["link"]) == (1, 64, 0)
    assert {two["limit"], three["limit"], four["limit"]} == {"link"}
    assert two["seconds"] > 0.18  # a megabyte each way at 40 Mbit/s: 0.21 s
    assert three["seconds"] > 0.2
    assert four["communication"]
    assert four["price"] > one["price"]
    (folder,) = tmp_path.glob("runs/*")  # what was tried is gone
    assert folder.name.startswith("forecast-")
    assert (folder / "forecast.svg").read_text().startswith("<svg")
    _, ended = typed("run", *where, "--run-dir", "runs/real", "job.py")
    assert "a step was forecast to take" in ended
    again, _ = typed("forecast", "--compare", "runs/real")
    assert again.split() == ended[ended.index("a step was forecast") :].split()
    kept = json.loads((tmp_path / "runs/real/forecast.json").read_text())
    assert kept["came"]["seconds"] > 0.18


JOB = """
import torch
from torch.utils.data import TensorDataset
from paceline import train

with train.join(log_every=2) as session:
    network = session.place(torch.nn.Linear(512, 512))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
    loader = session.loader(TensorDataset(torch.ones(384, 512)), 64)
    for epoch in session.epochs(loader, 1):
        for (x,) in loader:
            session.step(model(x).square().mean(1))
"""
