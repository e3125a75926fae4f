"""Lets the nodes try each other and hold a port; ``remote.network`` decides what follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.fleet import Fleet, together
from paceline.remote import connectivity, network
from paceline.remote.channel import AgentRefusal
from paceline.spec.errors import SettingError
from paceline.spec.job import Job
from paceline.spec.settings import Setting, Source

Found = Mapping[str, Sequence[network.Candidate]]
Networks = dict[str, network.NodeNetwork]

LEAVING_S = 5.0  # an agent without launcher and its ranks are gone by then


async def find_networks(fleet: Fleet, job: Job) -> tuple[Networks, list[str]]:
    """Address and interface of every node, and what the user should know about the choice."""
    only, interface = fleet.first, job.interface.value
    fixed = interface or only.host.interface or only.host.job_address
    if len(fleet.nodes) == 1 and not fixed:
        return {only.name: network.LOOPBACK}, []
    found, notes = network.candidates(fleet.hosts, fleet.facts(), interface)
    if len(fleet.nodes) == 1:
        return {only.name: network.only_choice(found[only.name])}, notes
    networks, more = network.decide(fleet.hosts, found, await try_connections(fleet, found))
    return networks, notes + more


async def try_connections(fleet: Fleet, found: Found) -> dict[str, list[dict[str, Any]]]:
    """By connecting host, the results of trying the other hosts' addresses."""
    return await connectivity.try_addresses([node.channel for node in fleet.nodes], found, together)


async def hold_port(fleet: Fleet, networks: Networks, asked: Setting[int]) -> Setting[int]:
    """A port for the store on the first node, held by its agent until the store takes it."""
    first = fleet.first
    address = networks[first.name].address
    deadline = time.monotonic() + LEAVING_S
    while True:
        try:
            answer = await first.channel.request("reserve_port", address=address, port=asked.value)
        except AgentRefusal as refusal:
            if time.monotonic() > deadline or not _held_by_us(refusal):
                raise _port_taken(first.name, address, asked, refusal) from None
            await asyncio.sleep(0.2)
        else:
            break
    if asked.value:
        return asked
    return Setting(int(answer["port"]), Source.FOUND, f"free on {first.name}, held")


def _held_by_us(refusal: AgentRefusal) -> bool:
    """A job of ours has the port: perhaps one whose launcher was killed, and which is leaving."""
    commands = [command for _, command in refusal.answer.get("holders") or []]
    return any("/paceline/agent/" in command for command in commands)


def _port_taken(
    name: str, address: str, asked: Setting[int], refusal: AgentRefusal
) -> SettingError:
    holders = refusal.answer.get("holders") or []
    who = ", ".join(f"process {pid} ({command})" for pid, command in holders)
    return SettingError(
        f"port {asked.value} on {name} ({address}) was asked for ({asked.source.label})",
        found=refusal.found + (f": held by {who}" if who else ""),
        remedy="Leave --master-port out to get a free one, or end that process",
        exit_code=1,
    )
