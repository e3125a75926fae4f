"""Runs on this machine alone; the agent is a child of the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.remote.channel import Channel
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.schedulers.scheduler import DETACH_OPTIONS, START_OPTIONS, Options, Scheduler
from paceline.schedulers.ssh import SshTransport
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host


class LocalTransport(SshTransport):
    """Refuses every host but this machine, so that it never uses SSH."""

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Starts the agent. Raises SettingError if a host is another machine."""
        if remote_hosts := [host.name for host in hosts if not host.local]:
            raise SettingError(
                "--via local runs on this machine only",
                found=f"other hosts: {', '.join(remote_hosts)}",
                remedy="Leave -H out, or --via ssh",
            )
        return await super().open(hosts, pythons, on_connected)


class Local(Scheduler):
    """For jobs on this machine."""

    name, title = "local", "This machine"
    start_options = (START_OPTIONS | DETACH_OPTIONS | {"check_level", "keep_warm"}) - {
        "ship", "follow_links", "fastest", "keep_results",
    }  # fmt: skip
    is_direct = True
    fixed_size_reason = "there is one node, this machine"

    def start(self, options: Options) -> Transport:
        return LocalTransport(options)


SCHEDULER = Local()
