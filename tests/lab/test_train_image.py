"""Tests ``paceline train image`` on hosts: accuracy, same result at any layout, use of a model."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import on, paceline

from paceline.lab import Lab
from warm_agents import warm_agents

pytestmark = [pytest.mark.lab, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_hosts(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab: Lab = new_lab(hosts=2)
    with warm_agents(tmp_path_factory.mktemp("cache"), *on(lab), "--no-torch"):
        yield lab


def test_trains_evaluates_and_predicts(two_hosts: Lab, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = paceline("train", "image", *on(two_hosts), "--run-dir", str(run), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    accuracy = re.search(r"^accuracy (0\.\d+) \((\d+) of (\d+)", trained.stdout, re.MULTILINE)
    assert accuracy, trained.stdout
    assert float(accuracy[1]) >= 0.96
    assert int(accuracy[3]) >= 300

    plan = json.loads((run / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == list(two_hosts.names)
    result = json.loads((run / "result.json").read_text())
    assert result["exit_code"] == 0
    assert f"{result['metrics']['accuracy']:.4f}" == accuracy[1]
    for rank, name in enumerate(two_hosts.names):
        assert (run / "logs" / name / f"{rank}.log").exists()

    local_eval = paceline("evaluate", str(run), cwd=tmp_path)
    assert local_eval.stdout.startswith(
        f"accuracy {accuracy[1]} ({accuracy[2]} of {accuracy[3]}"
    ), local_eval.stderr
    distributed_eval = paceline("evaluate", str(run), *on(two_hosts), "-p", "2", cwd=tmp_path)
    assert distributed_eval.stdout.startswith(
        f"accuracy {accuracy[1]} ({accuracy[2]} of {accuracy[3]}"
    ), distributed_eval.stderr

    image = tmp_path / "eight.png"
    write_image(image)
    prediction = paceline("predict", str(run), str(image), "/no/such.png", cwd=tmp_path)
    assert prediction.returncode != 0
    assert re.match(rf"{re.escape(str(image))}: \d (0|1)\.\d{{4}}  ", prediction.stdout)
    assert "/no/such.png" in prediction.stderr

    verified = paceline("verify", str(run), cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout
    assert re.match(r"model +signed ", verified.stdout)
    negate_model(run / "model")
    assert paceline("evaluate", str(run), cwd=tmp_path).returncode == 0
    verified = paceline("verify", str(run), cwd=tmp_path)
    assert verified.returncode == 1
    assert re.match(r"model +changed ", verified.stdout)


def negate_model(folder: Path) -> None:
    """Negates all weights, and writes their new hash into the unsigned description."""
    from safetensors.torch import load_file, save_file

    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = {name: -tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    described = json.loads(config.read_text())
    described["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    config.write_text(json.dumps(described))


def write_image(path: Path) -> None:
    from PIL import Image

    Image.linear_gradient("L").resize((8, 8)).save(path)


def test_parameters_do_not_depend_on_layout(two_hosts: Lab, tmp_path: Path) -> None:
    """In float64 with the same global batch, one process and 2×2 ranks differ only by rounding."""
    from safetensors.torch import load_file

    layouts = {"1": ["-p", "1"], "2x2": [*on(two_hosts), "-p", "2"]}
    weights = {}
    for name, opts in layouts.items():
        run = tmp_path / name
        completed = paceline(
            "train", "image", *opts, "--run-dir", str(run), "--steps", "20", "--dtype", "float64",
            "--augment", "flip", cwd=tmp_path,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stderr
        weights[name] = load_file(run / "model" / "model.safetensors")
    for name, tensors in weights.items():
        assert tensors.keys() == weights["1"].keys()
        assert not any(key.startswith("module.") for key in tensors)
        difference = max(
            float((tensors[key].double() - weights["1"][key].double()).abs().max())
            for key in tensors
        )
        assert difference < 1e-10, f"{name}: {difference}"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", "cnm"], ["cnm", "cnn"]),
        (["--epohcs", "3"], ["--epohcs", "--epochs"]),
    ],
)
def test_rejects_invalid_options(args: list[str], expected: list[str], tmp_path: Path) -> None:
    completed = paceline("train", "image", *args, cwd=tmp_path)
    assert completed.returncode == 2
    assert all(word in completed.stderr for word in expected), completed.stderr
    assert "Traceback" not in completed.stderr
    assert not (tmp_path / "runs").exists()


def test_resumes_without_shared_disk(two_hosts: Lab, tmp_path: Path) -> None:
    """Stopped in mid-epoch on two hosts, resumed on one: no step is lost or repeated."""
    opts = ["train", "image", "--run-dir", "run", "--epochs", "4", "--log-every", "5"]
    command = [sys.executable, "-m", "paceline", *opts, *on(two_hosts)]
    log = tmp_path / "run" / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=200)
    assert first.returncode == 130, errors.decode()
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))

    second = paceline(*opts, "--hosts", "n2", *on(two_hosts)[2:], cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed after step" in second.stdout
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record["step"] for record in records if record["split"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4 * 22
