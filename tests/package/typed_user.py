"""A user's module: what ``import paceline`` offers without torch, with its types."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import paceline
from paceline import Cluster, Host, HostsError, PacelineError, read_hosts


def names(source: str) -> list[str]:
    cluster: Cluster = read_hosts(source, environ=os.environ, cwd=Path.cwd())
    hosts: tuple[Host, ...] = cluster.hosts
    return [host.name for host in hosts]


assert names("n1,n2:4") == ["n1", "n2"]
try:
    names("n[3-")
except HostsError as error:
    handled: PacelineError = error
    said: str = handled.render()
    status: int = handled.exit_code
else:
    raise AssertionError("that is no list of hosts")
for name in paceline.__all__:
    getattr(paceline, name)
assert set(paceline.__all__) <= set(dir(paceline))
assert "torch" not in sys.modules
