"""A short soak test: trainings that several kinds of faults hit, one after the other.

The faults are those of ``bench/faults/soak.py``, which causes hundreds of them. By default, the
test causes six simple faults. ``PACELINE_SOAK_SEED=0``, 1, 2 or 3 selects eight faults of all
kinds; the four seeds together cover all kinds. The seeds are not part of every run, because they
take minutes on a busy machine: a host is back only after a new fork server has imported torch.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.remote.openssh import agent_command

pytestmark = pytest.mark.lab

SOAK = Path(__file__).resolve().parents[2] / "bench" / "faults" / "soak.py"
JOBS, FAULTS_PER_JOB, STEPS = 2, 4, 500
STEP_MS = 50.0  # half as many steps in the same time
BASIC_FAULTS = ("kill -9 of rank 0", "kill -9 of the SSH session", "SIGSTOP of a rank",
         "kill -9 of the agent", "kill -9 of all ranks of a host",
         "power off, on after 4 s")  # fmt: skip


def soak_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lab_and_folder(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("soak")
    return new_lab(hosts=3, share=(str(folder),)), folder


def test_agent_pattern_matches_agent_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise faults that should hit agents would hit nothing."""
    assert soak_module(monkeypatch).AGENT in " ".join(agent_command("python3"))


def test_parameters_match_with_injected_faults(
    lab_and_folder: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No job is lost, no step is repeated, nothing is left, and the parameters are the same."""
    soak = soak_module(monkeypatch)
    monkeypatch.setattr(soak, "SETTLE_S", 60.0)  # a busy machine is slow
    monkeypatch.setattr(soak, "STEP_MS", STEP_MS)
    seed_setting = os.environ.get("PACELINE_SOAK_SEED")
    seed, selected_kinds = int(seed_setting or 0), [*BASIC_FAULTS]
    if seed_setting is not None:
        kinds = list(soak.KINDS)
        random.Random(0).shuffle(kinds)
        selected_kinds = [
            kinds[(JOBS * FAULTS_PER_JOB * seed + at) % len(kinds)]
            for at in range(JOBS * FAULTS_PER_JOB)
        ]
    lab, folder = lab_and_folder
    reference = soak.undisturbed(lab, folder, STEPS)
    injected, problems, rng = [], [], random.Random(seed)
    faults_per_job = len(selected_kinds) if seed_setting is None else FAULTS_PER_JOB
    for job in range(len(selected_kinds) // faults_per_job):
        faults = selected_kinds[faults_per_job * job : faults_per_job * (job + 1)]
        outcomes, errors = soak.one_job(lab, folder, job + 2, STEPS, faults, rng, reference)
        injected += outcomes
        problems += errors
    assert not problems
    assert not [fault for fault in injected if fault.lost]
    assert (
        len(injected) > len(selected_kinds) / 2
    )  # the other faults came after the end of the training
    assert max(fault.gap_s for fault in injected) < 60
