"""A request: what to run, where, and how a command asked for it. Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from paceline.launch.planning import planner
from paceline.launch.planning.placement import Supplies
from paceline.remote.transport import Transport
from paceline.spec.hosts import Host, Inspect
from paceline.spec.job import Job, NodeRange, bounds
from paceline.spec.plan import Plan
from paceline.spec.settings import Source

# whether a job needs this installation's package: all of it, or these parts of it
Package = bool | tuple[str, ...]
RETURN_TIMEOUT_S = 30.0  # for a host that is needed and was lost before the first step


@dataclass(frozen=True, slots=True)
class Request:
    """What is to run, and where.

    Attributes:
        hosts: Where; rank 0 on the first.
        transport: How the agents are started and spoken to.
        package: Send this installation's ``paceline`` to the nodes (recipes need it), or parts.
        notes: What was decided before and the user should know.
        inspect: Looks at the nodes' facts; returns further notes or raises PacelineError.
        planned: Was made before and is to be executed, if the nodes are still what it says.
        keep_warm_s: How long the hosts stay ready for the next command after this one, at least,
            in seconds.
        supplies: What may have to be sent to the nodes, where that was read before.
        among: Names of all hosts that were described, where ``hosts`` were chosen among them.
    """

    job: Job
    hosts: tuple[Host, ...]
    transport: Transport
    package: Package = False
    notes: tuple[str, ...] = ()
    inspect: Inspect | None = None
    planned: Plan | None = None
    keep_warm_s: float = 0.0
    supplies: Supplies | None = None
    run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    among: tuple[str, ...] = ()

    @property
    def min_hosts(self) -> int:
        """How many nodes the job needs."""
        return bounds(self.job.nnodes.value, len(self.hosts))[0]

    @property
    def max_hosts(self) -> int:
        """How many nodes get ranks at most."""
        return bounds(self.job.nnodes.value, len(self.hosts))[1]

    @property
    def needs_package(self) -> bool:
        """Whether nodes need this installation's ``paceline``, or parts of it."""
        return bool(self.package) or self.job.trains or self.job.communication.value != "exact"

    @property
    def elastic(self) -> bool:
        """Whether nodes may go and come while the job runs."""
        return isinstance(self.job.nnodes.value, NodeRange) and self.transport.redials

    @property
    def awaits_hosts(self) -> bool:
        """Whether the start waits for hosts that do not answer."""
        is_requested = self.job.wait_for_nodes_s.source is not Source.DEFAULT
        return self.elastic or (is_requested and self.transport.redials)

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for needed hosts before the first step."""
        requested_s = self.job.wait_for_nodes_s.value
        return requested_s if self.awaits_hosts else min(requested_s, RETURN_TIMEOUT_S)

    def min_restart_hosts(self, session: bool) -> int:
        """Returns how many nodes a restart needs."""
        return min(self.min_hosts, planner.min_nodes(self.job)) if session else self.min_hosts

    @property
    def retries_start(self) -> bool:
        """Whether another start follows a loss before the first step; not if set to 0."""
        max_restarts = self.job.max_restarts
        return max_restarts.value > 0 or max_restarts.source is Source.DEFAULT
