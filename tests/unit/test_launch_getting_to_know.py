"""Nodes that come late are tried with the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.launch import prepare


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

    async def look(_nodes: object, _job: object, supplies: Any) -> None:
        await supplies

    monkeypatch.setattr(prepare.decide, "check_agreement", lambda *_: None)
    monkeypatch.setattr(
        prepare.network, "candidates", lambda hosts, *_: ({h: [] for h in hosts}, [])
    )
    monkeypatch.setattr(prepare.network, "decide", lambda hosts, *_: (dict.fromkeys(hosts), []))
    monkeypatch.setattr(prepare.connectivity, "try_addresses", tries)
    monkeypatch.setattr(prepare, "_look", look)
    monkeypatch.setattr(prepare, "_address", lambda _: "")
    monkeypatch.setattr(prepare, "replace", lambda found, **_: found)
    nodes = [
        SimpleNamespace(host=name, name=name, facts={}, found=object(), lost=False,
                        channel=SimpleNamespace(chosen_python=""))
        for name in ("n1", "n2", "n3")
    ]  # fmt: skip
    job = SimpleNamespace(interface=SimpleNamespace(value=None))
    request = cast(Any, SimpleNamespace(job=job))

    async def go() -> None:
        fleet = cast(Any, SimpleNamespace(everyone=nodes, trying=asyncio.Lock()))
        await asyncio.gather(*(
            prepare.get_to_know(cast(Any, node), fleet, request, cast(Any, None))
            for node in nodes[1:]
        ))  # fmt: skip

    asyncio.run(go())
    assert tried == ["begins", "is over"] * 2
