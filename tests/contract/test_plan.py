"""What ``--plan`` prints is what is executed: one value, made once, carried out as it is.

The nodes are simulated: two that have the code, and one whose code differs, so that it is sent.
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

import simulated
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
from simulated import Simulated, SimulatedTransport

CLUSTER = Cluster((Host("n1"), Host("n2"), Host("n3", slots=2)), "three", ("from a file",))


class Differing(SimulatedTransport):
    """The last host has other code."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.agents: list[Simulated] = []

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        channels = await super().open(hosts, pythons, reached)
        self.agents = [channel._link for channel in channels]
        self.agents[-1].differs = True
        return channels


def job(folder: Path, **more: Any) -> Job:
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
    return Job(**{**base, **more})


def inspect(hosts: Sequence[Host], facts: Any, noise: Any) -> list[str]:
    return [f"{len(hosts)} hosts were inspected"]


def run(the_job: Job, transport: SimulatedTransport, folder: Path, plan: Plan | None = None) -> Any:
    screen = Screen("none", io.StringIO(), io.StringIO())
    run_dir = folder / "run"
    return run_job(the_job, CLUSTER, transport, screen, run_dir=run_dir, parent=folder,
                   inspect=inspect, plan=plan)  # fmt: skip


def but_for_the_run_id(plan: dict[str, Any]) -> Any:
    return json.loads(json.dumps(plan).replace(plan["run_id"], "RUN"))


def test_a_refused_start_leaves_the_result_of_a_finished_run(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    assert run(the_job, Differing(), tmp_path).result.exit_code == 0
    result = tmp_path / "run" / "result.json"
    before = result.read_text()
    never = replace(the_job, ship=Setting("never", Source.COMMAND_LINE))
    with pytest.raises(NodeError, match="--ship never"):
        run(never, Differing(), tmp_path)
    assert result.read_text() == before
    result.write_text('{"exit_code": 1}')
    with pytest.raises(NodeError, match="--ship never"):
        run(never, Differing(), tmp_path)
    assert "--ship never" in result.read_text()


def test_the_printed_plan_is_the_one_that_runs(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    looked = Differing()
    planned = plan_job(the_job, CLUSTER, looked, inspect=inspect)
    assert not any(agent.built or agent.started for agent in looked.agents)

    ran = Differing()
    outcome = run(the_job, ran, tmp_path)
    assert outcome.result.exit_code == 0
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert but_for_the_run_id(planned.to_json()) == but_for_the_run_id(kept)
    assert [node["code"] for node in kept["nodes"]] == ["verified equal"] * 2 + ["shipped"]
    assert kept["notes"][:2] == ["from a file", "3 hosts were inspected"]

    for agent, node in zip(ran.agents, kept["nodes"], strict=True):
        (asked,) = agent.started
        ours = ("entry", "workdir")
        assert {key: asked[key] for key in ours} == {key: node[key] for key in ours}
        assert asked["ranks"] == node["ranks"]
        data = node["entry"]["args"][-1]
        code = [node["workdir"]] if node["code"] == "shipped" else []
        assert sorted(agent.built) == sorted([*code, data])


def test_what_was_prepared_is_what_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Plan] = []
    real_prepare, real_run, real_attempt = survey.prepare, ElasticDriver.run, Attempt.__init__

    async def prepared(*args: Any, **more: Any) -> Plan:
        seen.append(await real_prepare(*args, **more))
        return seen[-1]

    async def executed(self: ElasticDriver, plan: Plan, *args: Any) -> Any:
        seen.append(plan)
        return await real_run(self, plan, *args)

    def attempted(self: Attempt, plan: Plan, *args: Any) -> None:
        seen.append(plan)
        real_attempt(self, plan, *args)

    monkeypatch.setattr(survey, "prepare", prepared)
    monkeypatch.setattr(ElasticDriver, "run", executed)
    monkeypatch.setattr(Attempt, "__init__", attempted)
    run(job(tmp_path), Differing(), tmp_path)
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_a_plan_is_executed_as_it_was_made(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    planned = plan_job(the_job, CLUSTER, Differing(), inspect=inspect)
    ran = Differing()
    assert run(the_job, ran, tmp_path, planned).result.exit_code == 0
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert kept == json.loads(json.dumps(planned.to_json()))
    (asked,) = ran.agents[0].started
    assert asked["ranks"] == kept["nodes"][0]["ranks"]


def test_a_plan_that_does_not_hold_any_more_is_not_executed(tmp_path: Path) -> None:
    the_job = job(tmp_path)
    planned = plan_job(the_job, CLUSTER, Differing(), inspect=inspect)
    with pytest.raises(NodeError, match="the plan is out of date") as caught:
        run(the_job, SimulatedTransport(0, 1), tmp_path, planned)
    assert "n3: code was shipped, is verified equal" in caught.value.found


def test_a_node_that_builds_elsewhere_than_it_told_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(agent: Simulated, request: dict[str, Any]) -> dict[str, Any]:
        root = f"/elsewhere/paceline/jobs/{request['folder']}/{request['name']}"
        return {"root": root, "damaged": []}

    monkeypatch.setitem(simulated.ANSWERS, "build_tree", elsewhere)
    with pytest.raises(NodeError, match="in another folder than announced"):
        run(job(tmp_path), Differing(), tmp_path)


@pytest.mark.parametrize("start", [run, lambda *asked: plan_job(asked[0], CLUSTER, asked[1])])
def test_what_is_wrong_is_told_while_the_code_is_still_read(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other, nor gives up the other's work as if the user had said so."""
    real = survey.read_supplies

    def slowly(request: survey.Request) -> Supplies:
        time.sleep(0.5)
        return real(request)

    async def nowhere(*_: Any) -> Any:
        raise SettingError("no interface")

    monkeypatch.setattr(survey, "read_supplies", slowly)
    monkeypatch.setattr(survey, "choose_networks", nowhere)
    with pytest.raises(SettingError, match="no interface"):
        start(job(tmp_path), Differing(), tmp_path)
