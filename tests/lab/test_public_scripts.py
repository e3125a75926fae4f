"""Tests a third-party script, unmodified, over two hosts: one of Accelerate's own tests.

Also tests Accelerate's own launcher with the files that ``paceline setup accelerate`` writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launches import SOURCE
from safetensors.torch import load_file
from transports import PARTS, missing

from paceline.lab import Lab, LabOptions

pytestmark = [pytest.mark.lab, pytest.mark.slow]


SCRIPT = str(Path(__file__).with_name("coming") / "with_accelerate.py")
MODULE = "accelerate.test_utils.scripts.test_sync"


def test_runs_accelerate_test_script_on_two_hosts(tmp_path: Path) -> None:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    with Lab(LabOptions(hosts=2, debian_hosts=True, share=(str(tmp_path),))) as lab:
        host_options = ["--hosts", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]
        result = subprocess.run(
            [sys.executable, "-m", "paceline", "run", *host_options, "--run-dir", "run",
             "--env", "ACCELERATE_USE_CPU=true", "-m", MODULE],
            cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        launched = launch_by_files(lab, tmp_path, host_options)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "[n1/0] **Test Distributed `no_sync` context manager**" in result.stdout
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"event": "world joined", "world_size": 2, "backend": "gloo"') == 2
    assert launched == ["accelerate 0 of 2 saw 32", "accelerate 1 of 2 saw 32"]


def launch_by_files(lab: Lab, folder: Path, host_options: list[str]) -> list[str]:
    """Runs on each host the command that was written for it; returns what they print.

    The first host has its file in the folder. The second host's file is installed over SSH at
    Accelerate's default path, beside the file that was there.
    """
    user_config = lab.home("n2") / ".cache/huggingface/accelerate/default_config.yaml"
    user_config.parent.mkdir(parents=True)
    user_config.write_text("mine: true\n")
    by_file, installed = (
        subprocess.run(
            [sys.executable, "-m", "paceline", "setup", "accelerate", *host_options, *words],
            cwd=folder, capture_output=True, text=True, timeout=200, check=True,
        ).stdout
        for words in (("--mixed-precision", "bf16"), ("--mixed-precision", "bf16", "--install"))
    )  # fmt: skip
    assert f"n2: {lab.home_inside()}/.cache/huggingface/accelerate/default_config" in installed
    assert user_config.read_text() == (folder / "accelerate-config" / "n2.yaml").read_text()
    assert (
        user_config.with_name(user_config.name + ".before-paceline").read_text() == "mine: true\n"
    )
    launch_lines = [re.findall(r"^(.*)accelerate launch (.*)SCRIPT$", text, re.MULTILINE)[number]
             for number, text in enumerate((by_file, installed))]  # fmt: skip
    assert [options for _, options in launch_lines] == ["--config_file n1.yaml ", ""]
    children = [
        lab.popen(
            host,
            [sys.executable, "-m", "accelerate.commands.launch", *options.split(), SCRIPT],
            env=dict(var.split("=", 1) for var in before.split()), cwd=folder / "accelerate-config",
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for host, (before, options) in zip(("n1", "n2"), launch_lines, strict=True)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=200)[0] for child in children]
    seen_lines = sorted(line for text in outputs for line in text.splitlines() if " saw " in line)
    assert seen_lines, outputs
    return seen_lines


# Runs in its own process, because torchvision is not in the tests' environment.
TORCHVISION = """
import json, sys
from pathlib import Path
import torch
from torchvision import models
from paceline.recipes import image
from paceline.recipes.pretrained_list import torch_file
from paceline.recipes.use import evaluate

name = "mobilenet_v3_small"
file = torch_file(models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])
file.parent.mkdir(parents=True)
torch.save(models.get_model(name).state_dict(), file)
flags = ["--run-dir=run", "--image-size=32", "--steps=2", "--offline", "--device=cpu", "--no-fast"]
assert image.main([*flags, f"--model=torchvision/{name}", "--add-layers", "8"]) == 0
assert evaluate.main(["--run=run", "--device=cpu"]) == 0
"""


def test_finetunes_torchvision_model(tmp_path: Path) -> None:
    """The published file gets new weights; training leaves the backbone unchanged, bit for bit."""
    if not (PARTS / "torchvision").is_dir():
        missing("torchvision is not installed")
    test_dir = Path(__file__).parent
    libraries = [test_dir / "cpu_torchvision", PARTS / "torchvision", SOURCE]
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, libraries)), "XDG_CACHE_HOME": "cache"}
    result = subprocess.run([sys.executable, "-c", TORCHVISION], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (
        "weights of torchvision/mobilenet_v3_small with a new head; the backbone" in result.stdout
    )
    (file,) = (tmp_path / "cache").rglob("mobilenet*.pth")
    before = torch.load(file, weights_only=True)
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    backbone = {name: tensor for name, tensor in before.items() if f"model.{name}" in after}
    assert len(backbone) == len(before) - 2  # without the last layer's weight and bias
    assert all(torch.equal(after[f"model.{name}"], backbone[name]) for name in backbone)
