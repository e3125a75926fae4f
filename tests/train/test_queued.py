"""Ranks are lost whose collectives a device runs, as NCCL does: here a stand-in on CPUs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import standin
import torch
from test_joining import SCRIPT as JOINING
from test_joining import left
from test_recovery import Trial, check, trials

from paceline.spec.errors import JobError
from paceline.train.elastic import device_group
from paceline.train.elastic.waits import WaitCancelled

LOST: list[list[Any]] = [
    ["queued: plain", 3, [[1, "forward", 7], [0, "forward", 9]]],
    ["queued: plain", 3, [[1, "stepped", 7], [2, "evaluating 1", 12]]],
    ["queued: plain", 4, [[3, "forward", 7], [1, "given", 8]]],
    ["queued: buffers", 3, [[1, "forward", 7], [0, "given", 13]]],
    ["queued: two models", 3, [[1, "forward", 7], [0, "stepped", 9]]],
    *(
        [f"queued: {way}", 3, [[1, "forward", 7]]]
        for way in ("accumulated", "unused", "coded", "wide")
    ),
]
APART: list[list[Any]] = [["queued: local", 3, []], ["queued: local", 3, [[1, "forward", 3]]]]
WORLDS = [
    "queued: killed before it joins",
    "queued: killed when it joins",
    "queued: another killed",
    "queued: grown",
    "queued rich: first killed",
]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trial]:
    every = [*LOST, *APART]
    found = trials(tmp_path_factory.mktemp("struck"), "at", every)
    return {json.dumps(one): trial for one, trial in zip(every, found, strict=True)}


@pytest.mark.parametrize("one", LOST)
def test_the_others_train_on(struck: Mapping[str, Trial], one: list[Any]) -> None:
    result, alone, size = struck[json.dumps(one)]
    check(result, alone)
    assert len(result["found"]) == size - len(one[2])
    assert all(said["able"] for said in result["recoverable"])
    print(f"no step for {result['gap']:.3f} s")


def test_ranks_that_step_apart_go_on(struck: Mapping[str, Trial]) -> None:
    calm, result = (struck[json.dumps(one)][0] for one in APART)
    logs = "\n".join(result["logs"].values())
    assert sorted(result["statuses"]) == [-9, 0, 0], logs
    first, other = result["found"].values()
    assert first["end"] == other["end"]
    assert first["loss"] < 1.05 * calm["found"]["0"]["loss"]


def test_who_waits_for_a_frozen_rank_is_freed(tmp_path: Path) -> None:
    ways = ("queued: plain", "queued: buffers")
    for result, alone, _ in trials(tmp_path, "frozen", [[way, 3, 2, 0.02] for way in ways]):
        check(result, alone)
        assert len(result["found"]) == 2


def test_at_random_moments(tmp_path: Path) -> None:
    seeds = [["queued: buffers", 3, seed] for seed in range(2)]
    for result, alone, _ in trials(tmp_path, "random", seeds):
        check(result, alone, at_any_moment=True)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    names = ["queued", "queued rich", *WORLDS]
    ranks.run_script([JOINING, str(folder), *names], folder)
    return folder


@pytest.mark.parametrize("name", WORLDS)
def test_newcomers_join(worlds: Path, name: str) -> None:
    undisturbed = left(worlds / name.partition(":")[0])
    assert float((left(worlds / name) - undisturbed).abs().max()) < 1e-10
    job = json.loads((worlds / name / "job.json").read_text())
    assert not any(job["statuses"].values())
    joined = {slot for _, slot, said in job["said"] if said["event"] == "newcomer ready"}
    assert joined == ({2, 3} if "grown" in name else {slot for _, slot in job["lost"]})


def test_nothing_that_an_aborted_group_leaves_counts() -> None:
    """Its collectives end as if they had worked."""
    group = standin.StandInGroup(torch.device("cpu"))
    backend = SimpleNamespace(queued=1, done=0, error="")
    backend.abort = lambda: setattr(backend, "done", 1)
    group._backend = backend
    group.abort()
    with pytest.raises(WaitCancelled):
        group.wait()


def test_a_device_that_does_not_come_to_rest_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_group, "_END_S", 0.05)
    group = standin.StandInGroup(torch.device("cpu"))
    released = threading.Event()
    monkeypatch.setattr(group, "_synchronize", released.wait)
    with pytest.raises(JobError, match="does not end though it was aborted"):
        group.leave()
    released.set()

    def fail() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(group, "_synchronize", fail)
    with pytest.raises(JobError) as failed:  # a RuntimeError might pass for another rank's loss
        group.leave()
    assert failed.value.found == "CUDA error"


def test_an_abort_that_does_not_return_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "_ABORT_S", 0.05)
    group = standin.StandInGroup(torch.device("cpu"))
    returns = threading.Event()
    backend = SimpleNamespace(queued=1, done=0, error="")

    def abort() -> None:
        backend.done = 1
        returns.wait()

    backend.abort = abort
    group._backend = backend
    group.leave()
    assert group._backend is None
    returns.set()


def test_torch_handles_errors_where_nothing_can_be_replaced(tmp_path: Path) -> None:
    script = (
        "import torch, time; from paceline.train.elastic.device_group import DeviceGroup;"
        "group = DeviceGroup(torch.device('cpu')); group._error_of = lambda _: 'TIMEOUT';"
        "group._find_backend = object; group.attach(); time.sleep(30)"
    )
    (ended,) = ranks.run(1, ["-c", script], tmp_path)
    assert ended.status == -signal.SIGABRT
    assert "a collective of the device has failed: TIMEOUT" in ended.err


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name, device = "TORCH_NCCL_ASYNC_ERROR_HANDLING", torch.device("cpu")
    monkeypatch.setitem(device_group.GROUPS, "nccl", standin.StandInGroup)
    assert device_group.make_device_group("gloo", device, {}) is None
    assert device_group.make_device_group("nccl", device, {name: "3"}) is None
    group = device_group.make_device_group("nccl", device, {name: "1"})
    assert group is not None
    monkeypatch.setenv(name, "1")
    with group.forming():
        assert os.environ[name] == "0"
    assert os.environ[name] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
