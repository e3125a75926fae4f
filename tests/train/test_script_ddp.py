"""Tests compressed gradients of a script's own DistributedDataParallel model."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

from paceline.launch.health import replicas, script_timings
from paceline.spec.events import Event
from paceline.train.ddp import scripts

SCRIPT = str(Path(__file__).with_name("ddp_worlds.py"))
# maximum relative distance of the parameters from those of exact averages
MAX_RELATIVE_ERROR = {"fp16": 0.01, "bf16": 0.03, "int8": 0.05, "int4": 0.1, "auto": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooking")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder, timeout=300)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / f"{request.param}.json").read_text()))


@pytest.fixture(scope="module")
def installed(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "installed.json").read_text()))


def test_compression_methods_with_ddp_options(results: dict[str, Any]) -> None:
    assert len(results["methods"]) == 20
    for name, entry in results["methods"].items():
        assert entry["alike"], name
        assert not entry["draws"], f"{name} draws random numbers that the script would have drawn"
        assert entry["off"] < MAX_RELATIVE_ERROR[name.split()[0]], name


def test_residuals_are_kept_per_parameter(results: dict[str, Any]) -> None:
    """With rebuilt buckets, accumulated batches and parameters that a step does not use."""
    for name, lost in results["accumulated"].items():
        assert lost < 0.05, name  # bfloat16 rounds it to 1/500 in each step


def test_small_models_match_ddp(results: dict[str, Any]) -> None:
    assert results["small"]


def test_two_models_uneven_inputs_and_bucket_changes(results: dict[str, Any]) -> None:
    assert results["two models"]
    assert results["uneven"]
    assert results["relaid"]
    assert results["relaid, static graph"]
    assert results["freed"]


def test_ranks_skip_overflowed_step_together(results: dict[str, Any]) -> None:
    is_good, scales = results["overflowed"]
    assert is_good
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]


def test_process_subgroup(folder: Path) -> None:
    part = json.loads((folder / "3.json").read_text())["part"]
    assert part["off"] < MAX_RELATIVE_ERROR["int8"]
    assert "has only some of them" in part["auto"]


def test_rejects_unsupported_cases(results: dict[str, Any]) -> None:
    assert "there is no such method" in results["refused"]["unknown"]
    assert "dense tensors only" in results["refused"]["sparse"]
    assert "a communication hook of its own" in results["refused"]["hooked"]


def test_constructor_installs_hook(installed: dict[str, Any]) -> None:
    assert 0 < installed["off"] < MAX_RELATIVE_ERROR["int8"]
    assert set(installed["hooks"]) == {"average_bucket"}


def test_replicas_are_compared_by_checksum(folder: Path) -> None:
    messages = json.loads((folder / "watched.json").read_text())["reports"]
    reports = [[entry for entry in rank if entry["event"] == replicas.REPORT] for rank in messages]
    assert [[entry["step"] for entry in rank] for rank in reports] == [[0, 8, 16, 24]] * 3
    comparison, differences = replicas.ReplicaComparison(), []
    for rank, messages in enumerate(reports):
        for entry in messages:
            differences.append(comparison.add(Event(entry["event"], f"n{rank}", rank, 0.0, entry)))
    assert [difference.text for difference in differences if difference] == [
        "rank 1 on n1 trains a different model from the others: middle.bias differs after step 24"
    ]


def test_replicas_in_join_are_compared_only_before_the_first_step(folder: Path) -> None:
    """In ``Join``, ranks count different steps."""
    joined = json.loads((folder / "joined.json").read_text())
    assert joined["alike"]
    sums = [[(entry["step"], entry["sums"]) for entry in rank if entry["event"] == replicas.REPORT]
            for rank in joined["reports"]]  # fmt: skip
    assert [step for step, _ in sums[0]] == [0]
    assert sums == [sums[0]] * 3


def test_replicas_report_timings(folder: Path) -> None:
    messages = json.loads((folder / "watched.json").read_text())["reports"]
    for rank in messages:
        (entry,) = [entry for entry in rank if entry["event"] == script_timings.REPORT]
        assert entry["step"] == 6
        # without the ranks' wait in the first step, divided by the number of steps
        assert 0 <= entry["stall_s"] <= entry["moving_s"] < 0.3
        assert entry["seconds"] > 0
        assert entry["bytes"] == 4 * 38_538


@pytest.mark.parametrize("name", ["hook of its own", "builtin hook", "fsdp", "fsdp2"])
def test_rejects_custom_hooks_and_fsdp(installed: dict[str, Any], name: str) -> None:
    assert installed[name].startswith("--communication int8: ")
    reason = "a communication hook of its own" if "hook" in name else "gradients by itself"
    assert reason in installed[name]


def test_spawned_process_compresses_with_sent_package() -> None:
    """The hook's installer is unpickled before the process has the parent's ``sys.path``."""
    pickled = pickle.dumps(scripts._InSpawned("int8")).hex()
    packages = Path(torch.__file__).parents[1]
    text = f"""import pickle, sys; sys.path.append({str(packages)!r})
pickle.loads(bytes.fromhex({pickled!r}))
from torch.nn.parallel import DistributedDataParallel
print(DistributedDataParallel.__init__.__wrapped__.__name__)"""
    proc = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert proc.stdout == "__init__\n", proc.stderr
