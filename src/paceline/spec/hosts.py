"""Hosts and clusters, as the user described them, before any connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster, as described.

    Attributes:
        name: What the user calls it and what logs show; unique in a cluster.
        address: What SSH connects to (name, alias of the ssh config, IPv4 or IPv6 address).
        slots: How many processes fit; ``None`` when the description does not say.
        slots_yield: The slots are a scheduler's tasks: more processes may be requested.
        gpus: GPUs that a scheduler gave the job there; ``None`` if it does not say.
        user: Login name; ``None`` leaves it to the ssh config.
        port: SSH port; ``None`` leaves it to the ssh config.
        identity_file: Private key; ``None`` leaves it to the ssh config.
        interface: Network interface for the job's traffic; ``None`` detects it.
        job_address: Address for the job's traffic; ``None`` detects it.
        python: Absolute path of the interpreter on that host; ``None`` takes the launcher's path.
        workdir: Folder on that host in which the job runs; ``None`` takes the launcher's.
        env: Variables for the ranks on that host.
        local: The host is this machine and needs no SSH.
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
        among: Names of all described hosts, if these were selected from them.
        file: The file that describes them; empty for pipes and other descriptions.
        includes: Files that it includes.
    """

    hosts: tuple[Host, ...]
    source: str = ""
    notes: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    file: str = ""
    includes: tuple[str, ...] = ()

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
