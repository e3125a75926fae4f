"""Hosts and clusters, as the user described them: before anything was connected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster, as described (not as found).

    Attributes:
        name: What the user calls it and what logs show; unique in a cluster.
        address: What SSH connects to (name, alias of the ssh config, IPv4 or IPv6 address).
        slots: How many processes fit; ``None`` when the description does not say.
        slots_yield: The slots are a scheduler's tasks: more processes may be asked for.
        gpus: How many GPUs a scheduler gave the job there; ``None`` when it says nothing of them.
        user: Login name; ``None`` leaves it to the ssh config.
        port: SSH port; ``None`` leaves it to the ssh config.
        identity_file: Private key; ``None`` leaves it to the ssh config.
        interface: Network interface for the job's traffic; ``None`` finds it out.
        job_address: Address for the job's traffic; ``None`` finds it out.
        python: Absolute path of the interpreter on that host; ``None`` takes the launcher's path.
        workdir: Folder on that host in which the job runs; ``None`` takes the launcher's.
        env: Variables for the ranks on that host.
        local: True when the host is this very machine and needs no SSH.
    """

    name: str
    address: str = ""
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    interface: str | None = None
    job_address: str | None = None
    python: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    local: bool = False
    slots_yield: bool = False
    gpus: int | None = None

    def __post_init__(self) -> None:
        if not self.address:
            object.__setattr__(self, "address", self.name)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a job, in rank order: rank 0 runs on the first.

    Attributes:
        hosts: In the order of the description, each name once.
        source: Where the description came from, for people ("hostfile, line form: openmpi").
        notes: Choices made where the description was ambiguous, one sentence each
            ("`a:2` was read as 2 slots").
        among: Names of all hosts that were described, where these were chosen among them.
    """

    hosts: tuple[Host, ...]
    source: str = ""
    notes: tuple[str, ...] = ()
    among: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise ValueError(f"host names repeat: {names}")

    def head(self, count: int) -> Cluster:
        """The first ``count`` hosts."""
        return replace(self, hosts=self.hosts[:count])


Inspect = Callable[[Sequence[Host], Mapping[str, Any], Mapping[str, str]], list[str]]
"""Judges hosts before a job starts: of hosts, facts by host and what the start-up files of each
printed it makes notes for the user, or raises PacelineError."""
