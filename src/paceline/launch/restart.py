"""Before all nodes start again: are lost hosts back, and is there room on their disks?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paceline.launch import decide
from paceline.launch.fleet import Fleet
from paceline.launch.outcome import about_full_disk, size_words
from paceline.remote.transport import Transport
from paceline.spec.errors import PacelineError
from paceline.spec.failure import Failure
from paceline.spec.job import Job

LEASES = 6  # how long lost hosts are dialled: a reboot may take longer, and can be waited for
BETWEEN_S = 1.0
ROOM = 16 << 20  # bytes without which no checkpoint and no log can be written


async def dial_lost(fleet: Fleet, job: Job, transport: Transport,
                    note: Callable[[str], None]) -> list[str]:  # fmt: skip
    """Connects to the lost hosts again, each to a fresh agent; all of them or none.

    Args:
        fleet: Gets the new nodes in the places of the lost ones.
        job: For the interpreters and the lease.
        transport: How agents are started.
        note: Tells the user.

    Returns:
        The names of the hosts that are back; empty when there was no way, which ``note`` was told.
    """
    lost = [node.host for node in fleet.nodes if node.lost]
    names = ", ".join(host.name for host in lost)
    if not transport.redials:
        note(f"paceline: {names} cannot be joined again in this way of starting nodes: run again")
        return []
    patience_s = LEASES * job.lease_s.value
    note(f"paceline: dialling {names} again, for up to {patience_s:.0f} s")
    pythons = [decide.python_of(job, host) for host in lost]
    deadline, found = time.monotonic() + patience_s, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            channels = await asyncio.wait_for(transport.open(lost, pythons), left)
        except asyncio.TimeoutError:
            break
        except PacelineError as error:
            found = error.found or error.message
            await asyncio.sleep(min(BETWEEN_S, max(0.0, deadline - time.monotonic())))
        else:
            fleet.take_back(channels)
            return [host.name for host in lost]
    note(f"paceline: {names} did not come back within {patience_s:.0f} s: {found.splitlines()[0]}")
    return []


async def full_disk(fleet: Fleet, failure: Failure) -> str:
    """Why it is no use to start again on a disk that was full and still is; else empty."""
    node = next((node for node in fleet.nodes if node.name == failure.host), None)
    if node is None or node.lost or not about_full_disk(failure):
        return ""
    try:
        answer = await node.channel.request("disk", paths=[node.run_folder])
    except (PacelineError, ConnectionError):
        return ""
    (disk,) = answer["disks"]
    free = disk.get("free")
    if not isinstance(free, int) or free >= ROOM:
        return ""
    return f"the disk of {disk['path']} on {node.name} is still full ({size_words(free)} free)"
