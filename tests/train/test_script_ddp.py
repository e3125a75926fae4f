"""Gradients of a script's own DistributedDataParallel in fewer bytes."""

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
import ranks

from paceline.launch.health import replicas, script_timings
from paceline.spec.events import Event
from paceline.train.ddp import scripts

SCRIPT = str(Path(__file__).with_name("hooking.py"))
# how far parameters may be from those of exact averages, as a part of their size
MAX_OFF = {"fp16": 0.01, "bf16": 0.03, "int8": 0.05, "int4": 0.1, "auto": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooking")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder, timeout=300)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / f"{request.param}.json").read_text()))


@pytest.fixture(scope="module")
def installed(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "installed.json").read_text()))


def test_every_method_with_every_option_of_ddp(found: dict[str, Any]) -> None:
    assert len(found["methods"]) == 20
    for name, one in found["methods"].items():
        assert one["alike"], name
        assert one["off"] < MAX_OFF[name.split()[0]], name


def test_what_is_not_sent_is_kept_by_parameter(found: dict[str, Any]) -> None:
    """Over laid out buckets, accumulated batches and parameters that a step does not use."""
    for name, lost in found["accumulated"].items():
        assert lost < 0.05, name  # bfloat16 keeps it to a five-hundredth, in each step


def test_small_models_are_averaged_as_ddp_does(found: dict[str, Any]) -> None:
    assert found["small"]


def test_scripts_of_every_kind(found: dict[str, Any]) -> None:
    assert found["two models"]
    assert found["uneven"]
    assert found["relaid"]
    assert found["freed"]


def test_all_ranks_skip_a_step_that_overflows(found: dict[str, Any]) -> None:
    is_good, scales = found["overflowed"]
    assert is_good
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]


def test_a_group_of_some_ranks(folder: Path) -> None:
    part = json.loads((folder / "3.json").read_text())["part"]
    assert part["off"] < MAX_OFF["int8"]
    assert "has only some of them" in part["auto"]


def test_refusals(found: dict[str, Any]) -> None:
    assert "there is no such method" in found["refused"]["unknown"]
    assert "dense tensors only" in found["refused"]["sparse"]
    assert "a communication hook of its own" in found["refused"]["hooked"]


def test_the_constructor_installs_the_hook(installed: dict[str, Any]) -> None:
    assert 0 < installed["off"] < MAX_OFF["int8"]
    assert set(installed["hooks"]) == {"average_bucket"}


def test_replicas_are_compared_by_their_checksums(folder: Path) -> None:
    messages = json.loads((folder / "watched.json").read_text())["reports"]
    reports = [[one for one in rank if one["event"] == replicas.REPORT] for rank in messages]
    assert [[one["step"] for one in rank] for rank in reports] == [[0, 8, 16, 24]] * 3
    comparison, texts = replicas.ReplicaComparison(), []
    for rank, messages in enumerate(reports):
        for one in messages:
            texts.append(comparison.add(Event(one["event"], f"n{rank}", rank, 0.0, one)))
    assert [text for text in texts if text] == [
        "rank 1 on n1 trains a different model from the others: middle.bias differs after step 24"
    ]


def test_replicas_report_timings(folder: Path) -> None:
    messages = json.loads((folder / "watched.json").read_text())["reports"]
    for rank in messages:
        (one,) = [one for one in rank if one["event"] == script_timings.REPORT]
        assert one["step"] == 6
        # not the time for which ranks wait in the first step, divided by the number of steps
        assert 0 <= one["stall_s"] <= one["moving_s"] < 0.3
        assert one["seconds"] > 0
        assert one["bytes"] == 4 * 38_538


@pytest.mark.parametrize("name", ["hook of its own", "builtin hook", "fsdp", "fsdp2"])
def test_what_exchanges_by_itself_is_refused(installed: dict[str, Any], name: str) -> None:
    assert installed[name].startswith("--communication int8: ")
    reason = "a communication hook of its own" if "hook" in name else "gradients by itself"
    assert reason in installed[name]


def test_a_spawned_process_compresses_too_though_the_package_was_sent() -> None:
    """It unpickles what installs the hook before it has the parent's ``sys.path``."""
    pickled = pickle.dumps(scripts._InSpawned("int8")).hex()
    packages = Path(torch.__file__).parents[1]
    text = f"""import pickle, sys; sys.path.append({str(packages)!r})
pickle.loads(bytes.fromhex({pickled!r}))
from torch.nn.parallel import DistributedDataParallel
print(DistributedDataParallel.__init__.__wrapped__.__name__)"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.stdout == "__init__\n", done.stderr
