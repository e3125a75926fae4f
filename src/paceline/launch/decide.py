"""Job + cluster + facts → plan. Pure: the same input gives the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.remote import agreement
from paceline.remote.network import NodeNetwork
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job
from paceline.spec.plan import NodePlan, Plan, RankPlan
from paceline.spec.settings import Setting, Source

Facts = Mapping[str, Any]
# gloo and TensorPipe, then what MPI libraries and oneCCL talk by (libfabric over TCP)
INTERFACE_NAMES = (
    "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "FI_TCP_IFACE", "FI_SOCKETS_IFACE",
    "I_MPI_HYDRA_IFACE",
)  # fmt: skip
PIPES_A_RANK = 3  # that the agent of its node holds open
SPARE_DESCRIPTORS = 128  # for what else the agent opens


@dataclass(frozen=True, slots=True)
class Code:
    """Where the job's code is on one node.

    Attributes:
        how: ``in place``, ``verified equal`` or ``shipped``.
        workdir: Folder in which the ranks run there.
        entry: The entry with that node's paths.
    """

    how: str
    workdir: str
    entry: Entry


def choose_hosts(job: Job, cluster: Cluster) -> tuple[Host, ...]:
    """The hosts the job runs on: never fewer than were asked for."""
    wanted = job.nnodes.value
    if wanted is None:
        return cluster.hosts
    if wanted < 1:
        raise SettingError(f"--nnodes {wanted}: at least 1", remedy="--nnodes 1")
    if wanted > len(cluster.hosts):
        raise SettingError(
            f"{wanted} nodes were asked for ({job.nnodes.source.label})",
            found=f"{len(cluster.hosts)} in {cluster.source or 'the host list'}: "
            + ", ".join(host.name for host in cluster.hosts),
            remedy=f"Add hosts, or --nnodes {len(cluster.hosts)}",
        )
    return cluster.hosts[:wanted]


def processes_on(job: Job, host: Host, facts: Facts) -> Setting[int]:
    """How many ranks a host gets: as asked, else its slots, else its accelerators, else one.

    SettingError when the host cannot hold so many.
    """
    count = _wanted_processes(job, host, facts)
    most = most_processes(facts)
    if most is not None and count.value > most:
        hard = facts["limits"]["nofile_hard"]
        raise SettingError(
            f"{count.value} processes were asked for on {host.name} ({count.source.label})",
            found=f"at most {hard} files may be open there (ulimit -Hn): enough for {most}",
            remedy=f"--nproc-per-node {most}, or on {host.name} add `* hard nofile 1048576` to "
            "/etc/security/limits.conf and log in again",
        )
    return count


def most_processes(facts: Facts) -> int | None:
    """How many ranks a host's limit of open files allows; ``None`` when there is no limit."""
    hard = (facts.get("limits") or {}).get("nofile_hard", -1)
    return None if hard < 0 else max(1, (hard - SPARE_DESCRIPTORS) // PIPES_A_RANK)


def _wanted_processes(job: Job, host: Host, facts: Facts) -> Setting[int]:
    asked = job.nproc_per_node
    if asked.value is not None:
        count = asked.value
        number = count if isinstance(count, int) else _counted(count, job, host, facts)
        return _asked_processes(number, asked, host)
    if host.slots is not None:
        return Setting(host.slots, Source.FILE, "slots")
    if gpus := usable_gpus(job, facts):
        return Setting(gpus, Source.FOUND, "one a GPU")
    return Setting(1, Source.DEFAULT)


def usable_gpus(job: Job, facts: Facts) -> int:
    """How many GPUs of a host the ranks may see."""
    present = len((facts.get("devices") or {}).get("nvidia", ()))
    chosen = job.environment.all().get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([one for one in chosen.split(",") if one.strip()]))


def _counted(word: str, job: Job, host: Host, facts: Facts) -> int:
    """One process a GPU or CPU of this host, as torchrun counts them. SettingError without a GPU.

    The CPUs are those that the agent may use, which may be fewer than the machine has.
    """
    gpus = usable_gpus(job, facts)
    if word == "gpu" and not gpus:
        raise SettingError(
            f"--nproc-per-node gpu: {host.name} has no GPU",
            found="no /dev/nvidia* there, or CUDA_VISIBLE_DEVICES hides them",
            remedy="--nproc-per-node auto takes the CPUs where there is no GPU",
        )
    return gpus if word != "cpu" and gpus else max(1, len(available_cpus(facts)))


def _asked_processes(count: int, asked: Setting[Any], host: Host) -> Setting[int]:
    if count < 1:
        raise SettingError(f"--nproc-per-node {count}: at least 1", remedy="--nproc-per-node 1")
    if host.slots is not None and count > host.slots and not host.slots_yield:
        raise SettingError(
            f"{count} processes a node were asked for ({asked.source.label})",
            found=f"{host.name} has {host.slots} slot{'s' * (host.slots != 1)}",
            remedy=f"--nproc-per-node {host.slots}, or raise the slots of {host.name}",
        )
    return Setting(count, asked.source, asked.detail)


def slot_notes(job: Job, hosts: Sequence[Host]) -> list[str]:
    """Where more processes were asked for than the scheduler has tasks."""
    count = job.nproc_per_node.value
    over = [h for h in hosts if h.slots_yield and h.slots and isinstance(count, int)
            and count > h.slots]  # fmt: skip
    if not over:
        return []
    tasks = ", ".join(f"{host.name} {host.slots}" for host in over)
    return [f"{count} processes a node as asked for; the allocation's tasks are fewer: {tasks}"]


def available_cpus(facts: Facts) -> list[int]:
    return list((facts.get("cpu") or {}).get("available", ()))


def bind_cpus(cpus: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Equal, neighbouring shares of the CPUs, one a rank; no binding when there are too few."""
    share = len(cpus) // processes
    if processes == 1 or share == 0:
        return [()] * processes
    return [tuple(cpus[at * share : (at + 1) * share]) for at in range(processes)]


def node_env(
    job: Job, facts: Facts, processes: int, network: NodeNetwork | None
) -> dict[str, Setting[str]]:
    """The variables that we set for a node's ranks; the user's own go before them.

    Args:
        job: For the user's variables.
        facts: Of that node.
        processes: Ranks on it.
        network: Its address and interface; ``None`` leaves those variables out (they are not
            needed yet when the fork server starts).
    """
    threads = max(1, len(available_cpus(facts)) // processes)
    env = {
        "OMP_NUM_THREADS": Setting(str(threads), Source.FOUND, "CPUs a rank"),
        # torch's own launcher sets it: a failed NCCL collective ends the process
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": Setting("1", Source.DEFAULT),
    }
    if network is not None:
        by_route = Setting(network.interface, Source.FOUND, network.reason)
        env |= dict.fromkeys(INTERFACE_NAMES, by_route)
        # "=" asks NCCL for exactly this name; alone it would be a prefix
        exact = Setting("=" + network.interface, Source.FOUND, network.reason)
        env["NCCL_SOCKET_IFNAME"] = exact
    given = job.environment.all()
    return {name: setting for name, setting in env.items() if name not in given}


def make_plan(
    job: Job,
    run_id: str,
    attempt: int,
    hosts: Sequence[Host],
    facts: Mapping[str, Facts],
    networks: Mapping[str, NodeNetwork],
    code: Mapping[str, Code],
    master_port: Setting[int],
    notes: Sequence[str] = (),
) -> Plan:
    """Puts together what runs where.

    Args:
        job: What was asked for.
        run_id: Names the run.
        attempt: 0 for the first start.
        hosts: The chosen hosts; rank 0 runs on the first.
        facts, networks, code: By host name.
        master_port: The port held on the first host.
        notes: What was decided on the way.
    """
    nodes: list[NodePlan] = []
    first_rank = 0
    for node_rank, host in enumerate(hosts):
        processes = processes_on(job, host, facts[host.name]).value
        nodes.append(
            _node(
                job,
                node_rank,
                host,
                processes,
                first_rank,
                facts[host.name],
                networks[host.name],
                code[host.name],
            )
        )
        first_rank += processes
    return Plan(
        run_id=run_id,
        attempt=attempt,
        entry=job.entry,
        world_size=first_rank,
        master_addr=networks[hosts[0].name].address,
        master_port=master_port.value,
        agent_store=agent_holds_store(job, facts[hosts[0].name]),
        nodes=tuple(nodes),
        environment=job.environment.shown(),
        settings=_settings(job, hosts, facts, master_port),
        notes=(*notes, *slot_notes(job, hosts)),
    )


def agent_holds_store(job: Job, facts: Facts) -> bool:
    """The store needs torch on the first node; without it rank 0 is left to hold its own.

    A script that is given an address (``tcp://HOST:PORT``) opens the store itself. Told that
    somebody else holds it, it would wait for ever: torch looks at that variable for every address.
    """
    if job.own_store or any("tcp://" in word for word in job.entry.args):
        return False
    return job.needs_torch or facts.get("torch") is not None


def _node(
    job: Job, node_rank: int, host: Host, processes: int, first_rank: int,
    facts: Facts, network: NodeNetwork, code: Code,
) -> NodePlan:  # fmt: skip
    binding: list[tuple[int, ...]] = [()] * processes
    if job.bind.value == "auto" and not (facts.get("devices") or {}).get("nvidia"):
        binding = bind_cpus(available_cpus(facts), processes)
    return NodePlan(
        host=host.name,
        node_rank=node_rank,
        login="this machine" if host.local else host.address,
        address=network.address,
        interface=network.interface,
        python=python_of(job, host),
        workdir=code.workdir,
        code=code.how,
        entry=code.entry,
        env=node_env(job, facts, processes, network),
        ranks=tuple(
            RankPlan(first_rank + local, local, binding[local]) for local in range(processes)
        ),
        devices=_devices(job, facts),
    )


def _devices(job: Job, facts: Facts) -> str:
    """What a host's ranks compute on: its GPUs where they see some, else its CPUs."""
    gpus = usable_gpus(job, facts)
    number, noun = (gpus, "GPU") if gpus else (len(available_cpus(facts)), "CPU")
    return f"{number} {noun}{'s' * (number != 1)}"


def python_of(job: Job, host: Host) -> str:
    """The interpreter for a host: its own setting, else the job's."""
    return host.python or job.python


def _settings(
    job: Job, hosts: Sequence[Host], facts: Mapping[str, Facts], master_port: Setting[int]
) -> dict[str, Setting[Any]]:
    first = processes_on(job, hosts[0], facts[hosts[0].name])
    names = ", ".join(host.name for host in hosts)
    return {
        "hosts": Setting(names, job.hosts.source, job.hosts.detail or job.hosts.source.label),
        "nnodes": Setting(len(hosts), job.nnodes.source, job.nnodes.detail),
        "nproc_per_node": first,
        "iface": job.interface,
        "master_port": master_port,
        "ship": job.ship,
        "bind": job.bind,
        "lease_s": job.lease_s,
        "grace_s": job.grace_s,
        "hang_timeout_s": job.hang_timeout_s,
        "max_restarts": job.max_restarts,
    }


def check_agreement(hosts: Sequence[Host], job: Job, facts: Mapping[str, Facts],
                    chosen: Mapping[str, str]) -> list[str]:  # fmt: skip
    """Refuses nodes that cannot train together; returns what merely differs.

    Args:
        hosts: In rank order.
        job: What was asked for.
        facts: By host.
        chosen: By host, the interpreter that the agent really runs on.

    Raises:
        NodeError: An interpreter is missing, torch is missing, or torch differs.
    """
    for host in hosts:
        problem = agreement.interpreter_problem(
            host, python_of(job, host), chosen[host.name], facts[host.name]
        )
        if problem is not None:
            raise problem
    if job.needs_torch and (problem := agreement.torch_problem(hosts, facts)) is not None:
        raise problem
    pythons = {host.name: facts[host.name]["python"]["version"] for host in hosts}
    return agreement.differences("Python", pythons)
