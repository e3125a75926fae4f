"""Agents that a scheduler's commands start: each start is a command of its own, and replaces."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import caller
from paceline.remote import this_machine
from paceline.remote.channel import Channel
from paceline.rendezvous.scheduled import ScheduledTransport, Start, _Command, end_group
from paceline.spec.errors import ConnectError, PacelineError, PermanentConnectError
from paceline.spec.hosts import Host

TIMEOUT_S = 60.0
HOSTS = (Host("n1", local=True), Host("n2", local=True))
# As a scheduler's command: one process for each name, by which it knows its node; waits for all.
FAN = """
import os, subprocess, sys
names, command = sys.argv[1].split(","), sys.argv[2:]
every = [subprocess.Popen(command, env={**os.environ, "T_NODE": name}) for name in names]
sys.exit(max(one.wait() for one in every))
"""


class Fan:
    """Starts callers on this machine, under the hosts' names."""

    def __init__(self, *, apart: bool = False) -> None:
        self.starts_each_host = apart
        self.fails = ""  # instead of starting anything
        self.ended = False

    async def start(self, hosts: Sequence[Host]) -> Start:
        names = ",".join(host.name for host in hosts)
        argv = ("sh", "-c", f"echo {self.fails}; exit 3") if self.fails else (
            sys.executable, "-c", FAN, names)  # fmt: skip
        return Start(argv, {}, (), "T_NODE", ("T_NODE",))

    def hopeless(self, words: str) -> bool:
        return False

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        return ConnectError(f"no {', '.join(one.name for one in missing)}: {status}", found=words)

    def end(self) -> None:
        self.ended = True


async def opened(transport: ScheduledTransport, *hosts: Host) -> list[Channel]:
    return await transport.open(hosts, [sys.executable] * len(hosts))


def agent_of(transport: ScheduledTransport, number: int, place: int = 0) -> int:
    """The process of an agent: its guard's child, which is its caller's, which is the command's."""
    process = transport._commands[number]._process
    assert process is not None
    pid = process.pid
    for at in (place, 0, 0):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[at])
    return pid


async def gone(pid: int) -> None:
    for _ in range(int(TIMEOUT_S / 0.02)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(pid)


def test_a_lost_agent_is_started_again_and_the_others_stay() -> None:
    async def go() -> None:
        starter = Fan()
        transport = ScheduledTransport(starter)
        first, second = await opened(transport, *HOSTS)
        os.kill(agent_of(transport, 0, 1), signal.SIGKILL)
        await asyncio.wait_for(second.lost.wait(), TIMEOUT_S)
        (again,) = await opened(transport, HOSTS[1])
        assert again.host == HOSTS[1]
        assert again.identity != second.identity
        for channel in (first, again):  # the first command's end is none of the other's
            assert (await channel.request("clock"))["time"] > 0
        assert not first.lost.is_set()
        starter.fails = "n2 is DOWN"
        again.abandon()
        with pytest.raises(ConnectError, match="no n2: 3") as caught:
            await opened(transport, HOSTS[1])
        assert caught.value.brief == "n2 is DOWN"
        assert (await first.request("clock"))["time"] > 0
        await first.request("bye")
        await first.close(TIMEOUT_S)
        await transport.close(0)
        assert starter.ended

    asyncio.run(go())


def test_an_agent_that_was_only_cut_off_is_refused_once_it_was_replaced() -> None:
    """It ends: also when nobody is left of the command that had started it."""

    async def go() -> None:
        transport = ScheduledTransport(Fan())
        first, second = await opened(transport, *HOSTS)
        stale, agent = transport._commands[0].peers.by_place[1], agent_of(transport, 0, 1)
        second.abandon()  # as when nothing was heard of it; the agent itself lives, and calls again
        (again,) = await opened(transport, HOSTS[1])
        await gone(agent)
        agent = agent_of(transport, 1)
        again.abandon()
        (third,) = await opened(transport, HOSTS[1])
        await gone(agent)
        assert (await third.request("clock"))["time"] > 0

        async def calls(**about: Any) -> str:
            where = list(transport._listener.addresses)
            said = {"session": stale.session, "stream": "frames", "node": "n2", **about}
            with pytest.raises(caller.CallRefused) as refused:
                await asyncio.to_thread(
                    caller.dial, where, transport._listener.key, said, time.monotonic()
                )
            return str(refused.value)

        assert "given up" in await calls(start=0, again=True)
        assert "two processes" in await calls(start=0)
        assert "what has started this node was given up" in await calls(start=1, again=True)
        for odd in (None, [2], "2", 99):
            assert "was given up" in await calls(start=odd)
        for channel in (first, third):
            await channel.request("bye")
            await channel.close(TIMEOUT_S)
        await transport.close(0)

    asyncio.run(go())


def test_hosts_one_by_one_at_once() -> None:
    """As a start with fewer hosts than asked for does, each by a command of its own."""

    async def go() -> None:
        transport = ScheduledTransport(Fan())
        opening = (opened(transport, host) for host in HOSTS)
        channels = [channel for one in await asyncio.gather(*opening) for channel in one]
        assert [channel.host for channel in channels] == list(HOSTS)
        assert len({port for _, port in transport._listener.addresses}) == 1
        pids = [agent_of(transport, number) for number in (0, 1)]
        await asyncio.gather(*(channel.close() for channel in channels))
        await transport.close(0)
        for pid in pids:
            await gone(pid)

    asyncio.run(go())


def test_a_command_for_each_host_from_the_beginning() -> None:
    """The end of one, as by Slurm when a node is back, ends no other and has a reason."""

    async def go() -> None:
        reached: list[int] = []
        starter = Fan(apart=True)
        transport = ScheduledTransport(starter)
        first, second = await transport.open(HOSTS, [sys.executable] * 2, reached.append)
        assert [first.host, second.host] == list(HOSTS)
        assert max(reached) == 2
        process = transport._commands[1]._process
        assert process is not None
        os.kill(agent_of(transport, 1), signal.SIGKILL)
        await asyncio.wait_for(second.lost.wait(), TIMEOUT_S)
        await asyncio.wait_for(process.wait(), TIMEOUT_S)
        name = Path(sys.executable).name
        assert (await transport.loss_reason(HOSTS[1])).startswith(f"{name} ended with status ")
        assert not await transport.loss_reason(HOSTS[0])
        assert (await first.request("clock"))["time"] > 0
        await first.request("bye")
        await first.close(TIMEOUT_S)
        await transport.close(0)

    asyncio.run(go())


def test_of_a_command_for_each_host_all_that_are_missing_are_named() -> None:
    async def go() -> None:
        starter = Fan(apart=True)
        starter.fails = "no such node"
        transport = ScheduledTransport(starter)
        with pytest.raises(ConnectError, match="no n1, n2: 3") as caught:
            await opened(transport, *HOSTS)
        assert caught.value.brief == "no such node"
        assert not transport._commands
        await transport.close(1)

    asyncio.run(go())


def test_a_further_try_is_no_use_where_a_way_is_closed_for_good() -> None:
    assert issubclass(PermanentConnectError, ConnectError)
    assert PermanentConnectError("x", found="a\nb").brief == "a"
    assert PermanentConnectError("x", found="a\nb", brief="c").brief == "c"
    assert PermanentConnectError("x").brief == "x"


def test_with_a_command_ends_what_it_has_left_in_a_group_of_its_own() -> None:
    """As Open MPI's ssh does, whose host has no power."""
    left = "import os, subprocess, time; subprocess.Popen(['sleep', '999'], preexec_fn=os.setpgrp)"
    command = [sys.executable, "-c", f"{left}; print('up', flush=True); time.sleep(999)"]

    async def go() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"up\n"
        pids = [pid for pid, _ in this_machine.session_processes(process.pid)]
        assert len(pids) == 2
        await end_group(process)
        for pid in pids:
            await gone(pid)

    asyncio.run(go())


def test_what_a_command_leaves_that_ends_by_itself_is_ended_with_it() -> None:
    """As hydra's ssh, whose host has no power: the agents that hydra can reach have ended."""
    left = "import os, subprocess; print(subprocess.Popen(['sleep', '999']).pid, flush=True)"

    async def go() -> None:
        command = _Command(1, HOSTS, [sys.executable] * 2)
        start = Start((sys.executable, "-c", left), {}, (), "T_NODE")
        await command.start(start, [("127.0.0.1", 1)], b"k" * 32)
        while command.status is None or not command.output:
            await asyncio.sleep(0.01)
        pid = int(command.output)
        os.kill(pid, 0)
        await command.end(0.0)
        await gone(pid)

    asyncio.run(go())


def test_what_a_command_leaves_in_a_session_of_its_own_is_ended_with_it() -> None:
    """As Open MPI's ssh, whose host has no power: it also keeps the command's pipes open."""
    left = (
        "import subprocess, sys, time; "
        "print(subprocess.Popen(['sleep', '999'], start_new_session=True).pid, flush=True); "
        "time.sleep(999)"
    )

    async def nobody_else() -> list[Channel]:
        return []

    async def go() -> None:
        command = _Command(1, HOSTS, [sys.executable] * 2)
        start = Start((sys.executable, "-c", left), {}, (), "T_NODE")
        await command.start(start, [("127.0.0.1", 1)], b"k" * 32)
        while not command.output:
            await asyncio.sleep(0.01)
        command.peers.channels = nobody_else  # type: ignore[method-assign]
        await command.connect()
        assert command._process is not None
        os.kill(command._process.pid, signal.SIGKILL)
        while command.status is None:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(command.end(0.0), TIMEOUT_S)
        await gone(int(command.output))

    asyncio.run(go())
