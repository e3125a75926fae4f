"""Tests the survey of nodes that connect late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.launch.nodes import survey
from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host


@pytest.fixture
def stub_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces all other parts of the survey by stubs that find no problem."""

    async def await_supplies(_nodes: object, _job: object, supplies: Any) -> None:
        await supplies

    monkeypatch.setattr(survey.planner, "check_agreement", lambda *_: None)
    monkeypatch.setattr(
        survey.network, "candidates", lambda hosts, *_: ({h: [] for h in hosts}, [])
    )
    monkeypatch.setattr(survey.network, "decide", lambda hosts, *_: (dict.fromkeys(hosts), []))
    monkeypatch.setattr(survey, "_survey_files", await_supplies)
    monkeypatch.setattr(survey, "_address", lambda _: "")
    monkeypatch.setattr(survey, "replace", lambda survey_result, **_: survey_result)


def make_nodes(*names: str) -> list[Any]:
    return [
        SimpleNamespace(host=name, name=name, facts={}, survey=object(), lost=False,
                        channel=SimpleNamespace(agent_python="", host=Host(name)))
        for name in names
    ]  # fmt: skip


def survey_newcomer(nodes: list[Any], *newcomers: Any) -> None:
    """Surveys all late nodes concurrently."""
    job = SimpleNamespace(interface=SimpleNamespace(value=None))
    request = cast(Any, SimpleNamespace(job=job))

    async def main() -> None:
        fleet = cast(
            Any,
            SimpleNamespace(
                everyone=nodes, probe_lock=asyncio.Lock(), silences_resolved=resolve_silences
            ),
        )
        await asyncio.gather(*(
            survey.survey_newcomer(node, fleet, request, cast(Any, None)) for node in newcomers
        ))  # fmt: skip

    async def resolve_silences() -> None:
        pass

    asyncio.run(main())


@pytest.mark.usefixtures("stub_survey")
def test_newcomers_are_probed_sequentially(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a probe closes all listeners on its hosts."""
    probes: list[str] = []

    async def probe(channels: Any, *_: object) -> dict[str, Any]:
        probes.append("begins")
        for _ in range(3):
            await asyncio.sleep(0)
        probes.append("is over")
        return {}

    monkeypatch.setattr(survey.connectivity, "probe_addresses", probe)
    nodes = make_nodes("n1", "n2", "n3")
    survey_newcomer(nodes, *nodes[1:])
    assert probes == ["begins", "is over"] * 2


@pytest.mark.usefixtures("stub_survey")
@pytest.mark.parametrize(
    "error", [ConnectionError("n2 is gone"), NodeError("n3 does not reach n2")]
)
def test_newcomer_probe_retries_if_peer_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The late node is already importing, and only its own errors may end that."""
    probes: list[list[str]] = []
    nodes = make_nodes("n1", "n2", "n3")

    async def probe(channels: Any, *_: object) -> dict[str, Any]:
        probes.append([channel.host.name for channel in channels])
        if len(probes) == 1:
            nodes[1].lost = True
            raise error
        return {}

    monkeypatch.setattr(survey.connectivity, "probe_addresses", probe)
    survey_newcomer(nodes, nodes[2])
    assert probes == [["n1", "n2", "n3"], ["n1", "n3"]]
    nodes[1].lost, probes[:] = False, [[]]

    async def fail(*_: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(survey.connectivity, "probe_addresses", fail)
    with pytest.raises(type(error)):
        survey_newcomer(nodes, nodes[2])
