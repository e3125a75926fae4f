"""Tests recoveries with collectives that run on a device, like NCCL's: a stand-in on CPUs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_stand_in
import local_ranks
import pytest
import torch
from test_joining import SCRIPT as JOINING
from test_joining import left
from test_recovery import Trial, check, trials

from paceline.spec.errors import JobError
from paceline.train.elastic import device_group
from paceline.train.elastic.waits import WaitCancelled

LOSS_CASES: list[list[Any]] = [
    ["queued: plain", 3, [[1, "forward", 7], [0, "forward", 9]]],
    ["queued: plain", 3, [[1, "stepped", 7], [2, "evaluating 1", 12]]],
    ["queued: plain", 4, [[3, "forward", 7], [1, "given", 8]]],
    ["queued: buffers", 3, [[1, "forward", 7], [0, "given", 13]]],
    ["queued: two models", 3, [[1, "forward", 7], [0, "stepped", 9]]],
    *(
        [f"queued: {variant}", 3, [[1, "forward", 7]]]
        for variant in ("accumulated", "unused", "coded", "wide")
    ),
]
LOCAL_STEP_CASES: list[list[Any]] = [
    ["queued: local", 3, []],
    ["queued: local", 3, [[1, "forward", 3]]],
]
WORLDS = [
    "queued: killed before it joins",
    "queued: killed when it joins",
    "queued: another killed",
    "queued: grown",
    "queued rich: first killed",
]


@pytest.fixture(scope="module")
def trials_by_case(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Trial]:
    cases = [*LOSS_CASES, *LOCAL_STEP_CASES]
    outcomes = trials(tmp_path_factory.mktemp("struck"), "at", cases)
    return {json.dumps(case): trial for case, trial in zip(cases, outcomes, strict=True)}


@pytest.mark.parametrize("case", LOSS_CASES)
def test_remaining_ranks_continue_training(
    trials_by_case: Mapping[str, Trial], case: list[Any]
) -> None:
    result, reference, size = trials_by_case[json.dumps(case)]
    check(result, reference)
    assert len(result["found"]) == size - len(case[2])
    assert all(event["able"] for event in result["recoverable"])
    print(f"no step for {result['gap']:.3f} s")


def test_local_step_ranks_continue(trials_by_case: Mapping[str, Trial]) -> None:
    undisturbed_result, result = (trials_by_case[json.dumps(case)][0] for case in LOCAL_STEP_CASES)
    logs = "\n".join(result["logs"].values())
    assert sorted(result["statuses"]) == [-9, 0, 0], logs
    first, second = result["found"].values()
    assert first["end"] == second["end"]
    assert first["loss"] < 1.05 * undisturbed_result["found"]["0"]["loss"]


def test_ranks_waiting_for_frozen_rank_are_freed(tmp_path: Path) -> None:
    variants = ("queued: plain", "queued: buffers")
    for result, reference, _ in trials(
        tmp_path, "frozen", [[variant, 3, 2, 0.02] for variant in variants]
    ):
        check(result, reference)
        assert len(result["found"]) == 2


def test_survives_kills_at_random_moments(tmp_path: Path) -> None:
    seeds = [["queued: buffers", 3, seed] for seed in range(2)]
    for result, reference, _ in trials(tmp_path, "random", seeds):
        check(result, reference, at_any_moment=True)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    names = ["queued", "queued rich", *WORLDS]
    local_ranks.run_script([JOINING, str(folder), *names], folder)
    return folder


@pytest.mark.parametrize("name", WORLDS)
def test_newcomers_join(worlds: Path, name: str) -> None:
    undisturbed = left(worlds / name.partition(":")[0])
    assert float((left(worlds / name) - undisturbed).abs().max()) < 1e-10
    job = json.loads((worlds / name / "job.json").read_text())
    assert not any(job["statuses"].values())
    joined = {slot for _, slot, event in job["said"] if event["event"] == "newcomer ready"}
    assert joined == ({2, 3} if "grown" in name else {slot for _, slot in job["lost"]})


def test_wait_on_aborted_group_is_cancelled() -> None:
    """Its collectives end as if they had succeeded."""
    group = device_stand_in.StandInGroup(torch.device("cpu"))
    backend = SimpleNamespace(queued=1, done=0, error="")
    backend.abort = lambda: setattr(backend, "done", 1)
    group._backend = backend
    group.abort()
    with pytest.raises(WaitCancelled):
        group.wait()


def test_leave_fails_if_device_does_not_synchronize(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_group, "_END_S", 0.05)
    group = device_stand_in.StandInGroup(torch.device("cpu"))
    released = threading.Event()
    monkeypatch.setattr(group, "_synchronize", released.wait)
    with pytest.raises(JobError, match="does not end though it was aborted"):
        group.leave()
    released.set()

    def fail() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(group, "_synchronize", fail)
    with pytest.raises(JobError) as failed:  # a RuntimeError could pass for a lost rank
        group.leave()
    assert failed.value.found == "CUDA error"


def test_leave_does_not_wait_for_hanging_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "_ABORT_S", 0.05)
    group = device_stand_in.StandInGroup(torch.device("cpu"))
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


def test_collective_error_aborts_rank_without_recovery(tmp_path: Path) -> None:
    script = (
        "import torch, time; from paceline.train.elastic.device_group import DeviceGroup;"
        "group = DeviceGroup(torch.device('cpu')); group._error_of = lambda _: 'TIMEOUT';"
        "group._find_backend = object; group.attach(); time.sleep(30)"
    )
    (ended,) = local_ranks.run(1, ["-c", script], tmp_path)
    assert ended.status == -signal.SIGABRT
    assert "a collective of the device has failed: TIMEOUT" in ended.err


def test_user_setting_of_error_handling_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    name, device = "TORCH_NCCL_ASYNC_ERROR_HANDLING", torch.device("cpu")
    monkeypatch.setitem(device_group.GROUPS, "nccl", device_stand_in.StandInGroup)
    assert device_group.make_device_group("gloo", device, {}) is None
    assert device_group.make_device_group("nccl", device, {name: "3"}) is None
    group = device_group.make_device_group("nccl", device, {name: "1"})
    assert group is not None
    monkeypatch.setenv(name, "1")
    with group.forming():
        assert os.environ[name] == "0"
    assert os.environ[name] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
