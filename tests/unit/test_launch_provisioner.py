"""Tests preparing nodes: fork servers start without waiting for the code to be read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning.placement import Supplies


@pytest.mark.parametrize("package", [False, True])
def test_fork_servers_start_before_code_is_read(package: bool) -> None:
    """If the package itself is sent, fork servers must wait, because they import it."""
    fleet: Any = SimpleNamespace(everyone=[], first=None)
    request: Any = SimpleNamespace(needs_package=package)
    parts: list[Any] = [None, None, None, None]

    async def starts_early() -> bool:
        reading: asyncio.Future[Supplies] = asyncio.get_running_loop().create_future()
        start_task = asyncio.ensure_future(
            Provisioner(request, *parts).start_fork_servers(fleet, reading)
        )
        completed, _ = await asyncio.wait([start_task], timeout=5.0 if not package else 0.1)
        reading.set_result(Supplies())
        await start_task
        return bool(completed)

    assert asyncio.run(starts_early()) is not package
