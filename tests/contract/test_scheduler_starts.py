"""Tests agents that a scheduler's commands start; a new start is a new command and agent."""

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
from paceline.rendezvous.listener import Listener
from paceline.rendezvous.scheduled import ScheduledTransport, Start, _Command, end_group
from paceline.spec.errors import ConnectError, PacelineError, PermanentConnectError
from paceline.spec.hosts import Host

TIMEOUT_S = 60.0
HOSTS = (Host("n1", local=True), Host("n2", local=True))
# Like a scheduler's command: starts a process for each node name, and waits for all.
FAN_OUT = """
import os, subprocess, sys
names, command = sys.argv[1].split(","), sys.argv[2:]
every = [subprocess.Popen(command, env={**os.environ, "T_NODE": name}) for name in names]
sys.exit(max(one.wait() for one in every))
"""


class FakeStarter:
    """Starts callers on this machine under the names of hosts."""

    def __init__(self, *, per_host: bool = False) -> None:
        self.starts_each_host = per_host
        self.fails = ""  # output of a command that fails instead
        self.ended = False

    async def start(self, hosts: Sequence[Host]) -> Start:
        names = ",".join(host.name for host in hosts)
        argv = ("sh", "-c", f"echo {self.fails}; exit 3") if self.fails else (
            sys.executable, "-c", FAN_OUT, names)  # fmt: skip
        return Start(argv, {}, (), "T_NODE", ("T_NODE",))

    def hopeless(self, words: str) -> bool:
        return False

    async def explain(self, hosts: Sequence[Host], missing: Sequence[Host], status: int | None,
                      words: str) -> PacelineError:  # fmt: skip
        return ConnectError(
            f"no {', '.join(entry.name for entry in missing)}: {status}", found=words
        )

    def end(self) -> None:
        self.ended = True


async def open_channels(transport: ScheduledTransport, *hosts: Host) -> list[Channel]:
    return await transport.open(hosts, [sys.executable] * len(hosts))


def agent_of(transport: ScheduledTransport, number: int, place: int = 0) -> int:
    """Returns the process id of an agent: command → caller → guard → agent."""
    process = transport._commands[number]._process
    assert process is not None
    pid = process.pid
    for child_index in (place, 0, 0):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[child_index])
    return pid


async def wait_for_exit(pid: int) -> None:
    for _ in range(int(TIMEOUT_S / 0.02)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(pid)


def test_restarts_only_lost_agent() -> None:
    async def scenario() -> None:
        starter = FakeStarter()
        transport = ScheduledTransport(starter)
        first, second = await open_channels(transport, *HOSTS)
        os.kill(agent_of(transport, 0, 1), signal.SIGKILL)
        await asyncio.wait_for(second.lost.wait(), TIMEOUT_S)
        (again,) = await open_channels(transport, HOSTS[1])
        assert again.host == HOSTS[1]
        assert again.identity != second.identity
        for channel in (first, again):  # the first command's end affects no other
            assert (await channel.request("clock"))["time"] > 0
        assert not first.lost.is_set()
        starter.fails = "n2 is DOWN"
        again.abandon()
        with pytest.raises(ConnectError, match="no n2: 3") as caught:
            await open_channels(transport, HOSTS[1])
        assert caught.value.brief == "n2 is DOWN"
        assert (await first.request("clock"))["time"] > 0
        await first.request("bye")
        await first.close(TIMEOUT_S)
        await transport.close(0)
        assert starter.ended

    asyncio.run(scenario())


def test_rejects_replaced_agent() -> None:
    """It ends, even if no other process of the command that started it remains."""

    async def scenario() -> None:
        transport = ScheduledTransport(FakeStarter())
        first, second = await open_channels(transport, *HOSTS)
        stale, agent = transport._commands[0].peers.by_place[1], agent_of(transport, 0, 1)
        second.abandon()  # as if it were silent; the agent lives and calls again
        (again,) = await open_channels(transport, HOSTS[1])
        await wait_for_exit(agent)
        agent = agent_of(transport, 1)
        again.abandon()
        (third,) = await open_channels(transport, HOSTS[1])
        await wait_for_exit(agent)
        assert (await third.request("clock"))["time"] > 0

        async def calls(**fields: Any) -> str:
            destination = list(transport._listener.addresses)
            message = {"session": stale.session, "stream": "frames", "node": "n2", **fields}
            with pytest.raises(caller.CallRefused) as rejected:
                await asyncio.to_thread(
                    caller.dial, destination, transport._listener.key, message, time.monotonic()
                )
            return str(rejected.value)

        assert "given up" in await calls(start=0, again=True)
        assert "two processes" in await calls(start=0)
        assert "what has started this node was given up" in await calls(start=1, again=True)
        for invalid in (None, [2], "2", 99):
            assert "was given up" in await calls(start=invalid)
        for channel in (first, third):
            await channel.request("bye")
            await channel.close(TIMEOUT_S)
        await transport.close(0)

    asyncio.run(scenario())


def test_opens_hosts_concurrently() -> None:
    """Example: a start with fewer hosts than requested, each by its own command."""

    async def scenario() -> None:
        transport = ScheduledTransport(FakeStarter())
        opening = (open_channels(transport, host) for host in HOSTS)
        channels = [channel for entry in await asyncio.gather(*opening) for channel in entry]
        assert [channel.host for channel in channels] == list(HOSTS)
        assert len({port for _, port in transport._listener.addresses}) == 1
        pids = [agent_of(transport, number) for number in (0, 1)]
        await asyncio.gather(*(channel.close() for channel in channels))
        await transport.close(0)
        for pid in pids:
            await wait_for_exit(pid)

    asyncio.run(scenario())


def test_starts_command_per_host() -> None:
    """The end of one command, as in Slurm when a node returns, affects no other, with a reason."""

    async def scenario() -> None:
        progress: list[int] = []
        starter = FakeStarter(per_host=True)
        transport = ScheduledTransport(starter)
        first, second = await transport.open(HOSTS, [sys.executable] * 2, progress.append)
        assert [first.host, second.host] == list(HOSTS)
        assert max(progress) == 2
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

    asyncio.run(scenario())


def test_error_names_missing_hosts() -> None:
    async def scenario() -> None:
        starter = FakeStarter(per_host=True)
        starter.fails = "no such node"
        transport = ScheduledTransport(starter)
        with pytest.raises(ConnectError, match="no n1, n2: 3") as caught:
            await open_channels(transport, *HOSTS)
        assert caught.value.brief == "no such node"
        assert not transport._commands
        await transport.close(1)

    asyncio.run(scenario())


def test_brief_of_permanent_connect_error() -> None:
    assert issubclass(PermanentConnectError, ConnectError)
    assert PermanentConnectError("x", found="a\nb").brief == "a"
    assert PermanentConnectError("x", found="a\nb", brief="c").brief == "c"
    assert PermanentConnectError("x").brief == "x"


def test_ends_child_in_separate_process_group() -> None:
    """Example: Open MPI's ssh to a host without power."""
    script = (
        "import os, subprocess, time; subprocess.Popen(['sleep', '999'], preexec_fn=os.setpgrp)"
    )
    command = [sys.executable, "-c", f"{script}; print('up', flush=True); time.sleep(999)"]

    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"up\n"
        pids = [pid for pid, _ in this_machine.session_processes(process.pid)]
        assert len(pids) == 2
        await end_group(process)
        for pid in pids:
            await wait_for_exit(pid)

    asyncio.run(scenario())


def test_ends_child_of_finished_command() -> None:
    """Example: Hydra's ssh to a host without power, after the agents in its reach have ended."""
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '999']).pid, flush=True)"

    async def scenario() -> None:
        command = _Command(1, HOSTS, [sys.executable] * 2)
        start = Start((sys.executable, "-c", script), {}, (), "T_NODE")
        await command.start(start, [("127.0.0.1", 1)], Listener(b"k" * 32, print))
        while command.status is None or not command.output:
            await asyncio.sleep(0.01)
        pid = int(command.output)
        os.kill(pid, 0)
        await command.end(0.0)
        await wait_for_exit(pid)

    asyncio.run(scenario())


def test_ends_child_in_separate_session() -> None:
    """Example: Open MPI's ssh to a host without power, which also keeps the pipes open."""
    script = (
        "import subprocess, sys, time; "
        "print(subprocess.Popen(['sleep', '999'], start_new_session=True).pid, flush=True); "
        "time.sleep(999)"
    )

    async def no_channels() -> list[Channel]:
        return []

    async def scenario() -> None:
        command = _Command(1, HOSTS, [sys.executable] * 2)
        start = Start((sys.executable, "-c", script), {}, (), "T_NODE")
        await command.start(start, [("127.0.0.1", 1)], Listener(b"k" * 32, print))
        while not command.output:
            await asyncio.sleep(0.01)
        command.peers.channels = no_channels  # type: ignore[method-assign]
        await command.connect()
        assert command._process is not None
        os.kill(command._process.pid, signal.SIGKILL)
        while command.status is None:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(command.end(0.0), TIMEOUT_S)
        await wait_for_exit(int(command.output))

    asyncio.run(scenario())
