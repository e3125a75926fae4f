"""A user's module for mypy: what ``import paceline`` offers without torch, with its types.

A script ``tell.py`` lies beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import paceline
from paceline import (
    Cluster,
    Failure,
    Host,
    HostsError,
    PacelineError,
    Plan,
    Prepared,
    Result,
    RunOutcome,
    read_hosts,
)


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
prepared: Prepared = paceline.prepare("tell.py", ["a b"], torch=False, nproc_per_node=2)
plan: Plan = prepared.plan
assert plan.world_size == 2
assert "2 ranks on 1 host" in str(prepared)
outcome: RunOutcome = paceline.execute(prepared, run_dir=Path("told"), show="none")
result: Result = outcome.result
failure: Failure | None = result.failure
assert failure is None
assert result.exit_code == 0
assert json.loads(Path("told/plan.json").read_text()) == plan.to_json()

failing = paceline.prepare("tell.py", ["fail"], torch=False)
failed = paceline.execute(failing, run_dir=Path("failed"), show="none").result
assert failed.exit_code == 1
assert failed.failure is not None
assert failed.failure.headline == "ValueError: fail"
assert failed.failure.rank == 0

for name in paceline.__all__:
    getattr(paceline, name)
assert set(paceline.__all__) <= set(dir(paceline))
assert "torch" not in sys.modules
