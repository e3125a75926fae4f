"""Agents over OpenSSH, one login a host; on this very machine without it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.remote.channel import Channel
from paceline.remote.fanout import connect_all
from paceline.remote.transport import Reached, Transport, nobody
from paceline.schedulers.scheduler import LEAVE, LOGIN, NOW, Options, Scheduler
from paceline.spec.hosts import Host


class SshTransport:
    """The agent talks on the standard streams of its ssh."""

    redials = True
    dialects: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self._ssh = options.ssh

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Logs in everywhere. ConnectError names all who refuse."""
        return await connect_all(hosts, pythons, self._ssh, reached=reached, lasts=True)

    async def close(self, exit_code: int) -> None:
        """Every channel has ended its own ssh."""

    async def why(self, host: Host) -> str:
        return ""


class Ssh(Scheduler):
    """For hosts that this machine can log in to."""

    name, title = "ssh", "OpenSSH"
    typed = "--via ssh (the default)"
    starting = NOW | LOGIN | LEAVE | {"check_level", "wait_for_nodes", "keep_warm"}
    direct = True

    def start(self, options: Options) -> Transport:
        return SshTransport(options)


SCHEDULER = Ssh()
