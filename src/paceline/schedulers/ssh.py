"""Starts agents over OpenSSH, one login for each host; on this machine without it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.remote.channel import Channel
from paceline.remote.fanout import connect_hosts
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.schedulers.scheduler import (
    DETACH_OPTIONS,
    SSH_OPTIONS,
    START_OPTIONS,
    Options,
    Scheduler,
)
from paceline.spec.hosts import Host


class SshTransport(Transport):
    """Talks to each agent over the standard streams of its ssh."""

    redials = True
    dialects: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self._ssh = options.ssh

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Logs in everywhere. Raises ConnectError with all hosts that refuse."""
        return await connect_hosts(hosts, pythons, self._ssh, on_connected=on_connected, reuse=True)

    async def close(self, exit_code: int) -> None:
        """Does nothing: every channel has ended its own ssh."""


class Ssh(Scheduler):
    """For hosts that this machine can log in to."""

    name, title = "ssh", "OpenSSH"
    option = "--via ssh (the default)"
    start_options = START_OPTIONS | SSH_OPTIONS | DETACH_OPTIONS | {
        "check_level", "wait_for_nodes", "keep_warm",
    }  # fmt: skip
    is_direct = True

    def start(self, options: Options) -> Transport:
        return SshTransport(options)


SCHEDULER = Ssh()
