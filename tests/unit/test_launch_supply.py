"""What nodes get before ranks start, and what nobody waits for on the way there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.nodes.provisioner import Provisioner
from paceline.launch.planning.placement import Supplies


@pytest.mark.parametrize("package", [False, True])
def test_imports_begin_before_the_code_is_read(package: bool) -> None:
    """Unless the package itself is sent: it is imported from there."""
    fleet: Any = SimpleNamespace(everyone=[], first=None)
    request: Any = SimpleNamespace(needs_package=package)
    parts: list[Any] = [None, None, None, None]

    async def begins() -> bool:
        reading: asyncio.Future[Supplies] = asyncio.get_running_loop().create_future()
        begun = asyncio.ensure_future(
            Provisioner(request, *parts).start_fork_servers(fleet, reading)
        )
        done, _ = await asyncio.wait([begun], timeout=5.0 if not package else 0.1)
        reading.set_result(Supplies())
        await begun
        return bool(done)

    assert asyncio.run(begins()) is not package
