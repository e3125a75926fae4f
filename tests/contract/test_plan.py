"""Tests that ``--plan`` prints exactly what is executed: one value, computed once.

The nodes are simulated: two that have the code, and one with other code, to which it is sent.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simulated_agents
from paceline.launch.elastic.attempt import Attempt
from paceline.launch.elastic.driver import ElasticDriver
from paceline.launch.launcher import plan_job, run_job
from paceline.launch.nodes import survey
from paceline.launch.planning.placement import Supplies
from paceline.launch.terminal.screen import Screen
from paceline.remote.channel import Channel
from paceline.remote.transport import ConnectedCallback, ignore_count
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Input, Job
from paceline.spec.plan import Plan
from paceline.spec.settings import Setting, Source
from simulated_agents import Simulated, SimulatedTransport

CLUSTER = Cluster((Host("n1"), Host("n2"), Host("n3", slots=2)), "three", ("from a file",))


class DifferingCodeTransport(SimulatedTransport):
    """A transport to simulated agents, of which the last has other code."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.agents: list[Simulated] = []

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        channels = await super().open(hosts, pythons, reached)
        self.agents = [channel._link for channel in channels]
        self.agents[-1].differs = True
        return channels


def job(folder: Path, **kwargs: Any) -> Job:
    (folder / "code").mkdir()
    (folder / "data").mkdir()
    (folder / "code" / "train.py").write_text("print()")
    (folder / "data" / "d.txt").write_text("d")
    data = str(folder / "data")
    base: dict[str, Any] = {
        "name": "t", "entry": Entry("script", "train.py", ("--data", data)),
        "workdir": str(folder / "code"), "python": "python3", "preload": (), "needs_torch": False,
        "inputs": (Input(data),), "environment": Environment({"A": "b"}, {"TOKEN": "secret-word"}),
        "lease_s": Setting(20.0, Source.COMMAND_LINE),
    }  # fmt: skip
    return Job(**{**base, **kwargs})


def inspect(hosts: Sequence[Host], facts: Any, noise: Any) -> list[str]:
    return [f"{len(hosts)} hosts were inspected"]


def run(the_job: Job, transport: SimulatedTransport, folder: Path, plan: Plan | None = None) -> Any:
    screen = Screen("none", io.StringIO(), io.StringIO())
    run_dir = folder / "run"
    return run_job(the_job, CLUSTER, transport, screen, run_dir=run_dir, parent=folder,
                   inspect=inspect, plan=plan)  # fmt: skip


def without_run_id(plan: dict[str, Any]) -> Any:
    return json.loads(json.dumps(plan).replace(plan["run_id"], "RUN"))


def test_rejected_start_preserves_successful_result(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    assert run(the_job, DifferingCodeTransport(), tmp_path).result.exit_code == 0
    result = tmp_path / "run" / "result.json"
    result_text = result.read_text()
    unshippable_job = replace(the_job, ship=Setting("never", Source.COMMAND_LINE))
    with pytest.raises(NodeError, match="--ship never"):
        run(unshippable_job, DifferingCodeTransport(), tmp_path)
    assert result.read_text() == result_text
    result.write_text('{"exit_code": 1}')
    with pytest.raises(NodeError, match="--ship never"):
        run(unshippable_job, DifferingCodeTransport(), tmp_path)
    assert "--ship never" in result.read_text()


def test_printed_plan_matches_execution(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    plan_transport = DifferingCodeTransport()
    planned = plan_job(the_job, CLUSTER, plan_transport, inspect=inspect)
    assert not any(agent.built or agent.started for agent in plan_transport.agents)

    run_transport = DifferingCodeTransport()
    outcome = run(the_job, run_transport, tmp_path)
    assert outcome.result.exit_code == 0
    recorded_plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert without_run_id(planned.to_json()) == without_run_id(recorded_plan)
    assert [node["code"] for node in recorded_plan["nodes"]] == ["verified equal"] * 2 + ["shipped"]
    assert recorded_plan["notes"][:2] == ["from a file", "3 hosts were inspected"]

    for agent, node in zip(run_transport.agents, recorded_plan["nodes"], strict=True):
        (received,) = agent.started
        compared_keys = ("entry", "workdir")
        assert {key: received[key] for key in compared_keys} == {
            key: node[key] for key in compared_keys
        }
        assert received["ranks"] == node["ranks"]
        data = node["entry"]["args"][-1]
        code = [node["workdir"]] if node["code"] == "shipped" else []
        assert sorted(agent.built) == sorted([*code, data])


def test_executes_prepared_plan_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    real_prepare, real_run, real_attempt = survey.prepare, ElasticDriver.run, Attempt.__init__

    async def record_prepare(*args: Any, **kwargs: Any) -> Plan:
        seen.append(await real_prepare(*args, **kwargs))
        return seen[-1]

    async def record_run(self: ElasticDriver, plan: Plan, *args: Any) -> Any:
        seen.append(plan)
        return await real_run(self, plan, *args)

    def record_attempt(self: Attempt, plan: Plan, *args: Any) -> None:
        seen.append(plan)
        real_attempt(self, plan, *args)

    monkeypatch.setattr(survey, "prepare", record_prepare)
    monkeypatch.setattr(ElasticDriver, "run", record_run)
    monkeypatch.setattr(Attempt, "__init__", record_attempt)
    run(job(tmp_path), DifferingCodeTransport(), tmp_path)
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_executes_precomputed_plan(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    planned = plan_job(the_job, CLUSTER, DifferingCodeTransport(), inspect=inspect)
    run_transport = DifferingCodeTransport()
    assert run(the_job, run_transport, tmp_path, planned).result.exit_code == 0
    recorded_plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert recorded_plan == json.loads(json.dumps(planned.to_json()))
    (received,) = run_transport.agents[0].started
    assert received["ranks"] == recorded_plan["nodes"][0]["ranks"]


def test_rejects_outdated_plan(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    planned = plan_job(the_job, CLUSTER, DifferingCodeTransport(), inspect=inspect)
    with pytest.raises(NodeError, match="the plan is out of date") as caught:
        run(the_job, SimulatedTransport(0, 1), tmp_path, planned)
    assert "n3: code was shipped, is verified equal" in caught.value.found


def test_rejects_tree_in_unexpected_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_in_wrong_folder(agent: Simulated, request: dict[str, Any]) -> dict[str, Any]:
        root = f"/elsewhere/paceline/jobs/{request['folder']}/{request['name']}"
        return {"root": root, "damaged": []}

    monkeypatch.setitem(simulated_agents.ANSWERS, "build_tree", build_in_wrong_folder)
    with pytest.raises(NodeError, match="in another folder than announced"):
        run(job(tmp_path), DifferingCodeTransport(), tmp_path)


@pytest.mark.parametrize(
    "start", [run, lambda *received: plan_job(received[0], CLUSTER, received[1])]
)
def test_raises_network_error_during_slow_code_read(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not wait for the code, nor is reading it reported as cancelled by the user."""
    real = survey.read_supplies

    def delayed_read(request: survey.Request) -> Supplies:
        time.sleep(0.5)
        return real(request)

    async def fail_to_choose(*_: Any) -> Any:
        raise SettingError("no interface")

    monkeypatch.setattr(survey, "read_supplies", delayed_read)
    monkeypatch.setattr(survey, "choose_networks", fail_to_choose)
    with pytest.raises(SettingError, match="no interface"):
        start(job(tmp_path), DifferingCodeTransport(), tmp_path)
