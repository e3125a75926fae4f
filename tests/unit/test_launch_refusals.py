"""Tests what a start that the ranks refuse leaves of the earlier run in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.launch import launcher
from paceline.launch.results.run_outcome import RunOutcome
from paceline.spec.failure import Failure, Result
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job

REFUSED = Failure("exception", "n1", 0, code=2, headline="SettingError: of another training")
CRASHED = Failure("exception", "n1", 0, code=1, headline="ValueError: boom")
PLAN, METRICS = {"run_id": "earlier"}, {"loss": 0.5}


def start(
    monkeypatch: pytest.MonkeyPatch, run: Path, failure: Failure, has_begun: bool = False
) -> RunOutcome:
    """Runs a job that writes its plan and then fails."""

    async def fail() -> Result:
        (run / "plan.json").write_text(json.dumps({"run_id": "now"}))
        return Result(failure.status, failure)

    recorder = SimpleNamespace(metrics={}, events=(), has_begun=has_begun)
    fake = SimpleNamespace(run=fail, recorder=recorder, driver=Mock(plan=None))
    monkeypatch.setattr(launcher, "Launcher", lambda *_: fake)
    screen = Mock(shipped_copies=[])
    return launcher.run_job(
        Job("a", Entry("script", "a.py"), "/", "python3"), Cluster((Host("n1"),)), Mock(), screen,
        run_dir=run, parent=run.parent,
    )  # fmt: skip


def read(run: Path) -> tuple[Any, Any]:
    plan, result = (json.loads((run / name).read_text()) for name in ("plan.json", "result.json"))
    return plan["run_id"], result["exit_code"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped after some training."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "result.json").write_text(json.dumps({"exit_code": 143, "metrics": METRICS}))
    (folder / "events.jsonl").write_text("")
    return folder


def test_refused_start_keeps_plan_and_result(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    outcome = start(monkeypatch, run, REFUSED)
    assert (outcome.is_refused, outcome.result.exit_code) == (True, 2)
    assert read(run) == ("earlier", 143)


@pytest.mark.parametrize(("failure", "has_begun"), [(CRASHED, False), (REFUSED, True)])
def test_failed_start_replaces_plan_and_result(
    monkeypatch: pytest.MonkeyPatch, run: Path, failure: Failure, has_begun: bool
) -> None:
    assert not start(monkeypatch, run, failure, has_begun).is_refused
    assert read(run) == ("now", failure.code)


def test_refusal_is_recorded_where_nothing_was_trained(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    (run / "result.json").write_text(json.dumps({"exit_code": 2, "metrics": {}}))
    assert not start(monkeypatch, run, REFUSED).is_refused
    assert read(run) == ("now", 2)
