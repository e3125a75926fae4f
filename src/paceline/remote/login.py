"""Logs in to a host: starts an agent there, or resumes one that waits for the next command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from paceline.remote import reconnection, this_machine, warm
from paceline.remote.channel import Channel, LoginError
from paceline.remote.link import Link, ProcessLink, run_process, spawn
from paceline.remote.openssh import (
    SILENT,
    SshOptions,
    agent_command,
    classify,
    login_flags,
    server_fingerprint,
    ssh_command,
)
from paceline.spec.hosts import Host
from paceline.spec.schema import InvalidValue

MAX_ATTEMPTS = 4
HOST_KEY_TIMEOUT_S = 15.0
CONFIG_TIMEOUT_S = 60.0  # ssh resolves names for it
MAX_PARALLEL_LOGINS = 16
RECONNECT_TIMEOUT_S = 5.0  # to reach an agent that waits for the next command

Wrap = Callable[[Host, list[str]], list[str]]


def not_wrapped(host: Host, agent: list[str]) -> list[str]:
    """The agent runs on the host itself, not in a container there."""
    return agent


def connect_command(host: Host, python: str, options: SshOptions, wrap: Wrap = not_wrapped,
                control: str | None = None) -> list[str]:  # fmt: skip
    """The command that connects to ``host``'s agent, over ssh's ``control`` socket if there is."""
    agent = wrap(host, agent_command(python))
    return agent if host.local else ssh_command(host, options, agent, control)


async def connect(host: Host, python: str, options: SshOptions, wrap: Wrap = not_wrapped,
                  reuse: bool = False) -> Channel:  # fmt: skip
    """Opens a connection, retrying transient failures; raises LoginError when that fails.

    Args:
        host, options: The host, and how to log in.
        python: Interpreter for the agent there.
        wrap: Wraps the agent's command, for example in a container engine's.
        reuse: Use an agent that waits since an earlier command, and let this one wait later.
    """
    if host.local and wrap is not_wrapped and not this_machine.LINUX:
        stderr = f"paceline-boot: not Linux: this is {sys.platform}"
        raise LoginError(host, classify(stderr, 1, host))

    async def dial(is_agent: bool = False) -> Link:
        return await _start(connect_command(host, python, options, wrap), is_agent)

    is_final = host.local or wrap is not not_wrapped  # pipes do not break; containers are new ones
    redial = None if is_final else dial
    slot = warm.WarmSlot(host, python, options) if reuse and wrap is not_wrapped else None
    if slot is not None:
        channel = await connect_to_warm_agent(host, python, options, slot)
        if channel is not None:
            return channel
    for attempt in itertools.count(1):
        channel = Channel(host, await dial(is_agent=host.local), redial)
        channel.warm_slot, channel.ssh_config = slot, options.config
        try:
            await channel.open()
        except LoginError as error:
            if error.refusal.cause == SILENT and wrap is not_wrapped and not host.local:
                raise await _name_proxy(error, options) from None
            if not error.refusal.is_transient or attempt == MAX_ATTEMPTS:
                raise
            await asyncio.sleep(random.uniform(0.2, 0.6) * 2**attempt)  # noqa: S311 - jitter
        except asyncio.CancelledError:
            await channel.close()
            raise
        else:
            return channel
    raise AssertionError("unreachable")


async def _name_proxy(error: LoginError, options: SshOptions) -> LoginError:
    """Adds the ProxyCommand or jump host to the remedy if the connection goes through one."""
    with contextlib.suppress(asyncio.TimeoutError, OSError):
        config = await effective_config(error.host, options)
        for name in ("ProxyCommand", "ProxyJump"):
            if values := config.get(name.lower()):
                remedy = f"{error.refusal.remedy}. It goes through this {name}: {values[0]}"
                return LoginError(error.host, replace(error.refusal, remedy=remedy))
    return error


async def effective_config(host: Host, options: SshOptions) -> dict[str, list[str]]:
    """Returns ssh's effective configuration for a host (``ssh -G``), by lower-case key."""
    argv = ["ssh", *(["-F", str(options.config)] if options.config else []), "-G"]
    argv += [*login_flags(host), "--", host.address]
    output = (await run_process(argv, CONFIG_TIMEOUT_S)).stdout
    values: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return values


async def _start(command: list[str], is_agent: bool = False) -> Link:
    return ProcessLink(await spawn(command, limit=1 << 20), is_agent)


async def connect_to_warm_agent(
    host: Host, python: str, options: SshOptions, slot: warm.WarmSlot
) -> Channel | None:
    """Connects to an agent that waits for this command in ``slot``; ``None`` without one."""
    agent = slot.claim()
    if agent is None:
        return None
    address = agent.agent_address()

    async def dial(control: str | None = None) -> Link:
        return await _start(connect_command(host, python, options, control=control))

    async def handshake() -> tuple[reconnection.PendingLink, bytes]:
        pending = await reconnection.dial_agent(lambda: dial(warm.control_path()), address)
        try:
            return pending, (await reconnection.authenticate(pending, address, 0))[1]
        except BaseException:
            await pending.link.drop()
            raise

    try:
        pending, data = await asyncio.wait_for(handshake(), RECONNECT_TIMEOUT_S)
        channel = Channel(host, pending.link, None if host.local else dial)
        channel.warm_slot = slot
        await channel.open(data)
    except (reconnection.AgentNotFound, OSError, EOFError, InvalidValue, asyncio.TimeoutError,
            LoginError):  # fmt: skip
        slot.forget()
        return None
    except BaseException:
        slot.release()
        raise
    return channel


async def fetch_host_key(host: Host, options: SshOptions) -> str | None:
    """The fingerprint of a host's key, without trusting it; ``None`` if it sends none."""
    argv = ssh_command(host, options, ["true"], flags=["-v"])
    try:
        return server_fingerprint((await run_process(argv, HOST_KEY_TIMEOUT_S)).stderr)
    except asyncio.TimeoutError:
        return None
