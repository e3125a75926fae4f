"""This machine alone: the agent is a child of the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.remote.channel import Channel
from paceline.remote.fanout import connect_all
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Reached, Transport, nobody
from paceline.schedulers.scheduler import LEAVE, NOW, Options, Scheduler
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host


class LocalTransport:
    """Refuses every host but this one."""

    redials = True
    dialects: tuple[str, ...] = ()

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """SettingError when a host is another machine."""
        others = [host.name for host in hosts if not host.local]
        if others:
            raise SettingError(
                "--via local runs on this machine only",
                found=f"other hosts: {', '.join(others)}",
                remedy="Leave -H out, or --via ssh",
            )
        return await connect_all(hosts, pythons, SshOptions(), reached=reached, lasts=True)

    async def close(self, exit_code: int) -> None:
        """The agent has ended with its channel."""

    async def why(self, host: Host) -> str:
        return ""


class Local(Scheduler):
    """For a job that stays at home."""

    name, title = "local", "This machine"
    starting = (NOW | LEAVE | {"check_level", "keep_warm"}) - {
        "ship", "follow_links", "fastest", "keep_results",
    }  # fmt: skip
    direct = True
    fixed = "there is one node, this machine"

    def start(self, options: Options) -> Transport:
        return LocalTransport()


SCHEDULER = Local()
