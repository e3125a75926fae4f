"""Nodes that come late are tried with the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.launch.nodes import survey
from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found out, and everything is fine."""

    async def look(_nodes: object, _job: object, supplies: Any) -> None:
        await supplies

    monkeypatch.setattr(survey.planner, "check_agreement", lambda *_: None)
    monkeypatch.setattr(
        survey.network, "candidates", lambda hosts, *_: ({h: [] for h in hosts}, [])
    )
    monkeypatch.setattr(survey.network, "decide", lambda hosts, *_: (dict.fromkeys(hosts), []))
    monkeypatch.setattr(survey, "_survey_files", look)
    monkeypatch.setattr(survey, "_address", lambda _: "")
    monkeypatch.setattr(survey, "replace", lambda found, **_: found)


def known(*names: str) -> list[Any]:
    return [
        SimpleNamespace(host=name, name=name, facts={}, survey=object(), lost=False,
                        channel=SimpleNamespace(agent_python="", host=Host(name)))
        for name in names
    ]  # fmt: skip


def survey_newcomer(nodes: list[Any], *late: Any) -> None:
    """Each of those that came late with all others, at once."""
    job = SimpleNamespace(interface=SimpleNamespace(value=None))
    request = cast(Any, SimpleNamespace(job=job))

    async def go() -> None:
        fleet = cast(
            Any,
            SimpleNamespace(everyone=nodes, probe_lock=asyncio.Lock(), silences_resolved=settled),
        )
        await asyncio.gather(*(
            survey.survey_newcomer(node, fleet, request, cast(Any, None)) for node in late
        ))  # fmt: skip

    async def settled() -> None:
        pass

    asyncio.run(go())


@pytest.mark.usefixtures("alone")
def test_two_that_come_at_once_are_tried_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A try ends with all listeners of its hosts."""
    tried: list[str] = []

    async def tries(channels: Any, *_: object) -> dict[str, Any]:
        tried.append("begins")
        for _ in range(3):
            await asyncio.sleep(0)
        tried.append("is over")
        return {}

    monkeypatch.setattr(survey.connectivity, "probe_addresses", tries)
    nodes = known("n1", "n2", "n3")
    survey_newcomer(nodes, *nodes[1:])
    assert tried == ["begins", "is over"] * 2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "error", [ConnectionError("n2 is gone"), NodeError("n3 does not reach n2")]
)
def test_who_comes_is_not_turned_away_because_another_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It has begun to import; only what stands in its own way ends that."""
    tried: list[list[str]] = []
    nodes = known("n1", "n2", "n3")

    async def tries(channels: Any, *_: object) -> dict[str, Any]:
        tried.append([channel.host.name for channel in channels])
        if len(tried) == 1:
            nodes[1].lost = True
            raise error
        return {}

    monkeypatch.setattr(survey.connectivity, "probe_addresses", tries)
    survey_newcomer(nodes, nodes[2])
    assert tried == [["n1", "n2", "n3"], ["n1", "n3"]]
    nodes[1].lost, tried[:] = False, [[]]

    async def refuses(*_: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(survey.connectivity, "probe_addresses", refuses)
    with pytest.raises(type(error)):
        survey_newcomer(nodes, nodes[2])
