"""`paceline train image` on lab hosts: accuracy, equality at any layout, using the model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launches import on, paceline

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_hosts(new_lab: Any) -> Lab:
    lab: Lab = new_lab(hosts=2)
    return lab


def test_trains_evaluates_and_predicts(two_hosts: Lab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = paceline("train", "image", *on(two_hosts), "--run-dir", str(run), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    said = re.search(r"^accuracy (0\.\d+) \((\d+) of (\d+)", trained.stdout, re.MULTILINE)
    assert said, trained.stdout
    assert float(said[1]) >= 0.96
    assert int(said[3]) >= 300

    plan = json.loads((run / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == list(two_hosts.names)
    result = json.loads((run / "result.json").read_text())
    assert result["exit_code"] == 0
    assert f"{result['metrics']['accuracy']:.4f}" == said[1]
    for rank, name in enumerate(two_hosts.names):
        assert (run / "logs" / name / f"{rank}.log").exists()

    alone = paceline("evaluate", str(run), cwd=tmp_path)
    assert alone.stdout.startswith(f"accuracy {said[1]} ({said[2]} of {said[3]}"), alone.stderr
    spread = paceline("evaluate", str(run), *on(two_hosts), "-p", "2", cwd=tmp_path)
    assert spread.stdout.startswith(f"accuracy {said[1]} ({said[2]} of {said[3]}"), spread.stderr

    image = tmp_path / "eight.png"
    write_image(image)
    told = paceline("predict", str(run), str(image), "/no/such.png", cwd=tmp_path)
    assert told.returncode != 0
    assert re.match(rf"{re.escape(str(image))}: \d (0|1)\.\d{{4}}  ", told.stdout)
    assert "/no/such.png" in told.stderr


def write_image(path: Path) -> None:
    from PIL import Image

    Image.linear_gradient("L").resize((8, 8)).save(path)


def test_same_parameters_at_every_layout(two_hosts: Lab, tmp_path: Path) -> None:
    """float64, one global batch: one process and 2×2 differ by rounding only."""
    from safetensors.torch import load_file

    layouts = {"1": ["-p", "1"], "2x2": [*on(two_hosts), "-p", "2"]}
    weights = {}
    for name, where in layouts.items():
        run = tmp_path / name
        done = paceline(
            "train", "image", *where, "--run-dir", str(run), "--steps", "20", "--dtype", "float64",
            "--augment", "flip", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        weights[name] = load_file(run / "model" / "model.safetensors")
    for name, tensors in weights.items():
        assert tensors.keys() == weights["1"].keys()
        assert not any(key.startswith("module.") for key in tensors)
        apart = max(
            float((tensors[key].double() - weights["1"][key].double()).abs().max())
            for key in tensors
        )
        assert apart < 1e-10, f"{name}: {apart}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "cnm"], ["cnm", "cnn"]),
        (["--epohcs", "3"], ["--epohcs", "--epochs"]),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    args: list[str], words: list[str], tmp_path: Path
) -> None:
    done = paceline("train", "image", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_goes_on_without_a_shared_disk(two_hosts: Lab, tmp_path: Path) -> None:
    """Stopped in mid-epoch on two hosts, gone on with on one: no step is lost or made twice."""
    where = ["train", "image", "--run-dir", "run", "--epochs", "4", "--log-every", "5"]
    command = [sys.executable, "-m", "paceline", *where, *on(two_hosts)]
    log = tmp_path / "run" / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=200)
    assert first.returncode == 130, errors.decode()
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))

    second = paceline(*where, "--hosts", "n2", *on(two_hosts)[2:], cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed after step" in second.stdout
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record["step"] for record in records if record["split"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4 * 22
