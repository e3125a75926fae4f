"""Makes a plan from a job and a survey of its hosts. Pure: equal inputs give equal plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.launch.planning import affinity, encryption, placement
from paceline.launch.planning.placement import HostSurvey, Supplies
from paceline.remote import agreement, interfaces, rdma
from paceline.remote.network import NodeNetwork
from paceline.remote.rdma import EXPLICIT, RdmaChoice
from paceline.spec import jobenv, launchers
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job, NodeRange, bounds, count_processes
from paceline.spec.libraries import DEBUG, DEBUG_OF_RANKS
from paceline.spec.plan import NodePlan, Plan, RankPlan
from paceline.spec.settings import TOML_NAME, Setting, Source
from paceline.spec.version import __version__

Facts = Mapping[str, Any]
PIPES_A_RANK = 4  # that the agent of its node holds open
ONECCL_BACKENDS = ("ccl", "xccl")
SPARE_DESCRIPTORS = 128  # for what else the agent opens


def choose_hosts(job: Job, cluster: Cluster) -> tuple[Host, ...]:
    """Returns the hosts that the job may run on, spares included; SettingError for too few."""
    nnodes = job.nnodes.value
    if nnodes is None:
        return cluster.hosts
    min_hosts, _ = bounds(nnodes, len(cluster.hosts))
    if min_hosts < 1:
        raise SettingError(f"--nnodes {nnodes}: at least 1", remedy="--nnodes 1")
    if min_hosts > len(cluster.hosts):
        raise SettingError(
            f"{nnodes} nodes were asked for ({job.nnodes.source.label})",
            found=f"{len(cluster.hosts)} in {cluster.source or 'the host list'}: "
            + ", ".join(host.name for host in cluster.hosts),
            remedy=f"Add hosts, or --nnodes {len(cluster.hosts)}",
        )
    return cluster.hosts if isinstance(nnodes, NodeRange) else cluster.hosts[:min_hosts]


def min_nodes(job: Job) -> int:
    """Returns how many nodes a recovering training needs: the requested minimum, else 1."""
    return 1 if job.nnodes.value is None else bounds(job.nnodes.value, 1)[0]


def processes_on(job: Job, host: Host, facts: Facts) -> Setting[int]:
    """Returns how many ranks a host gets: as requested, else its slots, its accelerators, or one.

    Only accelerators that an allocation gave the job count. SettingError if the host cannot hold
    so many.
    """
    gpus = len(usable_gpus(job, host, facts))
    if job.nproc_per_node.value is not None:
        count = _requested_processes(job.nproc_per_node, host, gpus, len(available_cpus(facts)))
    elif host.slots is not None:
        count = Setting(host.slots, Source.FILE, "slots")
    elif host.gpus:
        count = Setting(host.gpus, Source.FOUND, "one a GPU of the allocation")
    elif gpus:
        count = Setting(gpus, Source.FOUND, "one a GPU")
    else:
        count = Setting(1, Source.DEFAULT)
    limit = max_processes(facts)
    if limit is not None and count.value > limit:
        hard = facts["limits"]["nofile_hard"]
        raise SettingError(
            f"{count.value} processes were asked for on {host.name} ({count.source.label})",
            found=f"at most {hard} files may be open there (ulimit -Hn): enough for {limit}",
            remedy=f"--nproc-per-node {limit}, or on {host.name} add `* hard nofile 1048576` to "
            "/etc/security/limits.conf and log in again",
        )
    return count


def _requested_processes(setting: Setting[Any], host: Host, gpus: int, cpus: int) -> Setting[int]:
    """Resolves a number, ``gpu``, ``cpu`` or ``auto`` as torchrun does.

    Only CPUs that the agent may use count. SettingError if this host cannot do it.
    """
    count = setting.value
    if count == "gpu" and not gpus:
        raise SettingError(
            f"--nproc-per-node gpu: {host.name} has no GPU",
            found="no GPU there that its torch computes on, or CUDA_VISIBLE_DEVICES or the like "
            "hides them",
            remedy="--nproc-per-node auto takes the CPUs where there is no GPU",
        )
    count = count_processes(count, gpus, cpus)
    if host.slots is not None and count > host.slots and not host.slots_yield:
        raise SettingError(
            f"{count} processes a node were asked for ({setting.source.label})",
            found=f"{host.name} has {pluralize(host.slots, 'slot')}",
            remedy=f"--nproc-per-node {host.slots}, or raise the slots of {host.name}",
        )
    return Setting(count, setting.source, setting.detail)


def max_processes(facts: Facts) -> int | None:
    """Returns how many ranks a host's limit of open files allows; ``None`` without a limit."""
    hard = (facts.get("limits") or {}).get("nofile_hard", -1)
    return None if hard < 0 else max(1, (hard - SPARE_DESCRIPTORS) // PIPES_A_RANK)


def user_env(job: Job, host: Host) -> dict[str, str]:
    """Returns the variables that a host's ranks get from the user.

    The command line and the launcher's environment override the host's table in paceline.toml,
    which overrides the file's variables for all hosts.
    """
    everywhere = job.environment.variables()
    if job.environment.source <= Source.FILE:
        return {**everywhere, **host.env}
    return {**host.env, **everywhere}


def usable_gpus(job: Job, host: Host, facts: Facts) -> list[Mapping[str, Any]]:
    """Returns the GPUs of a host that its ranks see, within the job's allocation."""
    login = facts.get("environment") or {}
    inherited = {name: value for name, value in login.items() if name not in job.environment.unset}
    return affinity.gpus_seen(facts, {**inherited, **user_env(job, host)})[: host.gpus]


def slot_notes(job: Job, hosts: Sequence[Host]) -> list[str]:
    """Returns a note if more processes were requested than the scheduler has tasks."""
    count = job.nproc_per_node.value
    tasks = ", ".join(f"{h.name} {h.slots}" for h in hosts if h.slots_yield and h.slots
                      and isinstance(count, int) and count > h.slots)  # fmt: skip
    note = f"{count} processes a node as asked for; the allocation's tasks are fewer: {tasks}"
    return [note] if tasks else []


def gpu_notes(hosts: Sequence[Host], facts: Sequence[Facts]) -> list[str]:
    """Returns notes on hosts whose allocation has GPUs that torch cannot see."""
    blind: dict[str, list[str]] = {}
    for host, host_facts in zip(hosts, facts, strict=True):
        devices, torch = host_facts.get("devices"), host_facts.get("torch") or {}
        if not host.gpus or devices is None:
            continue
        if not devices.get("gpus"):
            reason = "no /dev/nvidia*, /dev/kfd or /dev/dri of one there"
            blind.setdefault(reason, []).append(host.name)
        elif torch and not any(torch.get(kind) for kind in ("cuda", "hip", "xpu")):
            built = f"torch {torch['version']} is built without GPUs"
            blind.setdefault(built, []).append(host.name)
    return [
        f"torch sees no GPU on {', '.join(names)}, though the allocation has GPUs there ({reason}):"
        " the ranks compute on CPUs"
        for reason, names in blind.items()
    ]


def available_cpus(facts: Facts) -> list[int]:
    return list((facts.get("cpu") or {}).get("available", ()))


def bind(job: Job, host: Host, facts: Facts, processes: int) -> affinity.Binding:
    """Returns the CPUs of each rank of a host."""
    if job.bind.value == "none":
        return [()] * processes
    return affinity.bind(facts, processes, usable_gpus(job, host, facts))


def node_env(job: Job, host: Host, facts: Facts, processes: int,
             network: NodeNetwork | None,
             cards: RdmaChoice | None = None) -> dict[str, Setting[str]]:  # fmt: skip
    """Returns the variables for a node's ranks that the user has not set.

    ``network`` may be ``None``: the fork server needs no variables for the interface.
    """
    env = {
        "OMP_NUM_THREADS": threads_of(job, host, facts, processes),
        # torch's own launcher sets it: a failed NCCL collective ends the process
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": Setting("1", Source.DEFAULT),
    }
    if not usable_gpus(job, host, facts):
        # without it accelerate, and the Trainer on it, form no group of ranks on CPUs
        env["ACCELERATE_USE_CPU"] = Setting("true", Source.FOUND, "no GPU")
    if job.communication.value != "exact":
        env[jobenv.COMMUNICATION] = replace(job.communication, detail="--communication")
    if job.debug.value:
        env |= {name: Setting(value, job.debug.source, "--debug") for name, value in DEBUG.items()}
    if network is not None:
        if job.debug.value:
            env |= {name: Setting(value, job.debug.source, "--debug")
                    for name, value in DEBUG_OF_RANKS.items()}  # fmt: skip
        interface = encryption.INTERFACE if job.encrypt.value else network.interface
        variables = interfaces.variables(interface, facts)
        env |= {name: Setting(value, Source.FOUND, network.reason)
                for name, value in variables.items()}  # fmt: skip
    if job.backend in ONECCL_BACKENDS:
        variables = oneccl(bind(job, host, facts, processes), network)
        env |= {name: Setting(value, Source.FOUND, f"--backend {job.backend}")
                for name, value in variables.items()}  # fmt: skip
    if cards is not None:
        env |= {name: Setting(value, Source.FOUND, cards.reason)
                for name, value in cards.on(host.name).items()}  # fmt: skip
    overrides, job_env = user_env(job, host), job.environment.variables()
    yields = job.environment.source <= Source.FILE
    table = f"[hosts.{host.name}.env] of {TOML_NAME}"
    host_env = {name: Setting(value, Source.FILE, table) for name, value in host.env.items()
                if yields or name not in job_env}  # fmt: skip
    return {name: setting for name, setting in env.items() if name not in overrides} | host_env


def threads_of(job: Job, host: Host, facts: Facts, processes: int) -> Setting[str]:
    """Returns one thread per core of a rank, limited by the node's own environment."""
    threads = affinity.threads(facts, processes, bind(job, host, facts, processes))
    inherited = (facts.get("environment") or {}).get("OMP_NUM_THREADS", "")
    is_number = inherited.isascii() and inherited.isdigit()
    if "OMP_NUM_THREADS" in job.environment.unset or not is_number:
        return Setting(str(threads), Source.FOUND, "cores a rank")
    if not 0 < int(inherited) < threads:
        return Setting(str(threads), Source.FOUND, "cores a rank")
    return Setting(inherited, Source.FOUND, "the host's own environment")


def oneccl(bound: affinity.Binding, network: NodeNetwork | None) -> dict[str, str]:
    """Returns the variables for oneCCL ranks that neither Hydra nor PMIx has started.

    Each rank has one worker thread on its last CPU; by default, oneCCL puts those of all ranks on
    the last CPUs of the node.
    """
    variables = {
        "CCL_PROCESS_LAUNCHER": "none",  # see launchers.ONECCL for what it asks for then
        "CCL_ATL_TRANSPORT": "ofi",  # its other one is MPI, which would know one rank alone
        "CCL_WORKER_COUNT": "1",
    }
    if all(bound):
        variables["CCL_WORKER_AFFINITY"] = ",".join(str(cpus[-1]) for cpus in bound)
    if network is not None:
        variables["CCL_KVS_IFACE"] = network.interface
    return variables


def early_env(job: Job, host: Host, facts: Facts) -> tuple[dict[str, str], list[str]]:
    """Returns the variables for libraries' loading, and those that activation may override."""
    processes = processes_on(job, host, facts).value
    settings = node_env(job, host, facts, processes, None)
    ranks_settings = node_env(job, host, facts, processes, NodeNetwork("", "", ""))
    defaults = [name for name, setting in ranks_settings.items() if setting.source <= Source.FOUND]
    return {name: setting.value for name, setting in settings.items()}, [*defaults, *rdma.CHOSEN]


def make_plan(job: Job, run_id: str, surveys: Sequence[HostSurvey], supplies: Supplies,
              master_port: Setting[int], notes: Sequence[str],
              spares: Sequence[HostSurvey] = ()) -> Plan:  # fmt: skip
    """Makes the plan of the first start.

    Args:
        job, run_id, supplies: What runs, and what can be sent to hosts.
        surveys: What is known about each host; rank 0 runs on the first.
        master_port: The port held on the first host.
        notes: What was decided on the way.
        spares: What is known about hosts that get no ranks yet.

    Raises:
        SettingError: A host cannot hold so many ranks.
        NodeError: The code on a host differs and may not be sent, or its folder is missing.
    """
    _check_encryption(job, (*surveys, *spares), surveys[0].facts)
    nodes: list[NodePlan] = []
    cards = cards_of(job, (*surveys, *spares))
    first_rank = 0
    for node_rank, survey in enumerate(surveys):
        nodes.append(_node(job, survey, supplies, run_id, node_rank, first_rank, cards))
        first_rank += len(nodes[-1].ranks)
    waiting = tuple(replace(_node(job, survey, supplies, run_id, node_rank, 0, cards), ranks=())
                    for node_rank, survey in enumerate(spares, len(nodes)))  # fmt: skip
    copies = [copy for node in (*nodes, *waiting) for copy in node.copies]
    hosts_of_nodes = [survey.host for survey in (*surveys, *spares)]
    places = [*zip(hosts_of_nodes, [node.code for node in (*nodes, *waiting)], strict=True)]
    hosts, facts = [survey.host for survey in surveys], surveys[0].facts
    in_home = {
        survey.host.name: node.workdir
        for survey, node in zip((*surveys, *spares), (*nodes, *waiting), strict=True)
        if not survey.has_workdir and node.workdir == str(survey.facts["user"]["home"])
    }
    return Plan(
        run_id=run_id,
        attempt=0,
        entry=job.entry,
        world_size=first_rank,
        master_addr=surveys[0].network.address,
        master_port=master_port.value,
        agent_store=uses_agent_store(job, facts),
        closed_store=closes_store(job, facts),
        nodes=tuple(nodes),
        environment=job.environment.redacted(),
        settings=_settings(job, hosts, facts, master_port),
        dialects=(launchers.ONECCL,) if job.backend in ONECCL_BACKENDS else (),
        spares=waiting,
        typed={"command": job.typed, "folder": job.workdir, "paceline": __version__},
        notes=(
            *notes,
            *placement.link_notes(job, supplies, surveys),
            *placement.code_notes(job, supplies),
            *placement.workdir_notes(places),
            *placement.linked_folder_notes(supplies, copies),
            *placement.env_notes(supplies, copies),
            *placement.unfetched_folder_notes(job, in_home),
            *slot_notes(job, hosts),
            *gpu_notes(hosts, [survey.facts for survey in surveys]),
            *([cards.reason] if any("NCCL_NET" in node.env for node in nodes) else ()),
        ),
    )


def confirmed(planned: Plan, current: Plan) -> Plan:
    """Returns the earlier plan if the current one is equal; else raises NodeError."""
    if replace(current, notes=planned.notes, spares=planned.spares, typed=planned.typed) == planned:
        return planned
    changed = []
    for former, node in zip(planned.nodes, current.nodes, strict=False):
        for name in ("host", "address", "interface", "python", "workdir", "code", "devices"):
            value, new_value = getattr(former, name), getattr(node, name)
            if value != new_value:
                changed.append(f"{former.host}: {name} was {value}, is {new_value}")
    if len(planned.nodes) != len(current.nodes):
        changed.insert(0, f"there were {len(planned.nodes)} nodes, there are {len(current.nodes)}")
    raise NodeError(
        "the plan is out of date: the hosts have changed since it was made",
        found="\n".join(changed) or "ranks, CPUs or variables differ",
        remedy="Prepare it again",
    )


def next_attempt(plan: Plan, attempt: int, master_port: Setting[int], restarts: int) -> Plan:
    """Returns the plan of a further attempt, with a new port for a new store."""
    settings = {**plan.settings, "master_port": master_port}
    return replace(plan, attempt=attempt, restarts=restarts, master_port=master_port.value,
                   settings=settings)  # fmt: skip


def cards_of(job: Job, surveys: Sequence[HostSurvey]) -> RdmaChoice:
    """Chooses the RDMA ports of all hosts, unless the user has chosen NCCL's network on one."""
    if given := _given_network(job, surveys):
        return RdmaChoice(f"{', '.join(given)} was given")
    return rdma.choose({survey.host.name: survey.facts for survey in surveys})


def _given_network(job: Job, surveys: Sequence[HostSurvey]) -> list[str]:
    """Returns the variables by which the user has chosen NCCL's network on a host."""
    variables = [user_env(job, survey.host) for survey in surveys]
    return sorted({name for env in variables for name in EXPLICIT if name in env})


def uses_agent_store(job: Job, facts: Facts) -> bool:
    """Returns whether an agent holds the store: it needs torch on the first node, else rank 0 does.

    A script that is given an address (``tcp://HOST:PORT``) opens the store itself. Told that
    somebody else holds it, it would wait for ever: torch looks at that variable for every address.
    """
    if job.opens_store or any("tcp://" in arg for arg in job.entry.args):
        return False
    return job.needs_torch or facts.get("torch") is not None


def closes_store(job: Job, facts: Facts) -> bool:
    """Returns whether the store is on loopback, and agents carry all connections to it.

    Raises:
        SettingError: ``PACELINE_STORE`` has an unknown value.
    """
    setting = job.environment.variables().get(jobenv.STORE)
    if setting not in (None, "", "open"):
        raise SettingError(f"{jobenv.STORE} is {setting!r}", remedy="open, or leave it out")
    return uses_agent_store(job, facts) and not setting


def _check_encryption(job: Job, surveys: Sequence[HostSurvey], first: Facts) -> None:
    """SettingError if ``--encrypt`` cannot encrypt all; ``first``: facts of the store's host."""
    gpus = {survey.host.name: usable_gpus(job, survey.host, survey.facts) for survey in surveys}
    encryption.check(job, closes_store(job, first), gpus)


def _node(job: Job, survey: HostSurvey, supplies: Supplies, run_id: str, node_rank: int,
          first_rank: int, cards: RdmaChoice) -> NodePlan:  # fmt: skip
    facts, place = survey.facts, placement.place_on(job, survey, supplies, run_id)
    processes = processes_on(job, survey.host, facts).value
    bound = bind(job, survey.host, facts, processes)
    return NodePlan(
        host=survey.host.name,
        node_rank=node_rank,
        login="this machine" if survey.host.local else survey.host.address,
        address=survey.network.address,
        interface=survey.network.interface,
        python=python_of(job, survey.host),
        workdir=place.workdir,
        code=place.code,
        entry=place.entry,
        env=node_env(job, survey.host, facts, processes, survey.network, cards)
        | placement.data_env(job, place)
        | placement.inputs_env(place),
        ranks=tuple(RankPlan(first_rank + at, at, bound[at]) for at in range(processes)),
        devices=_devices(job, survey.host, facts),
        copies=place.copies,
    )


def newcomer_part(job: Job, survey: HostSurvey, supplies: Supplies, run_id: str, node_rank: int,
                  ranks: Sequence[int],
                  running: Sequence[tuple[HostSurvey, NodePlan]]) -> NodePlan:  # fmt: skip
    """Returns the plan of a host that joins a running job.

    Its ranks get the numbers ``ranks``, of which those that it cannot hold are not used.
    ``running`` are the hosts whose ranks it joins.

    Raises:
        NodeError: NCCL cannot connect it with them, or its code or folder does not fit.
    """
    _check_encryption(job, [survey], survey.facts)
    cards = _newcomer_cards(job, survey, running)
    part = _node(job, survey, supplies, run_id, node_rank, 0, cards)
    numbered = zip(part.ranks, ranks, strict=False)
    return replace(part, ranks=tuple(replace(rank, rank=number) for rank, number in numbered))


def _newcomer_cards(job: Job, survey: HostSurvey,
                    running: Sequence[tuple[HostSurvey, NodePlan]]) -> RdmaChoice:  # fmt: skip
    """Chooses RDMA ports as :func:`cards_of`, by what the ranks of running hosts were given."""
    if _given_network(job, known := [survey, *(member for member, _ in running)]) or not running:
        return cards_of(job, known)
    if job.backend == "gloo":
        return RdmaChoice("not needed over gloo")
    facts = {member.host.name: member.facts for member in known}
    variables = {part.host: {name: setting.value for name, setting in part.env.items()
                             if name in rdma.CHOSEN} for _, part in running}  # fmt: skip
    return rdma.choose_for_newcomer(survey.host.name, facts, variables)


def _devices(job: Job, host: Host, facts: Facts) -> str:
    """Describes what a host's ranks compute on: the GPUs that they see, else its CPUs."""
    gpus = len(usable_gpus(job, host, facts))
    return pluralize(gpus, "GPU") if gpus else pluralize(len(available_cpus(facts)), "CPU")


def python_of(job: Job, host: Host) -> str:
    """Returns the interpreter for a host: its own setting, else the job's."""
    return host.python or job.python


def _settings(
    job: Job, hosts: Sequence[Host], facts: Facts, master_port: Setting[int]
) -> dict[str, Setting[Any]]:
    first = processes_on(job, hosts[0], facts)
    names = ", ".join(host.name for host in hosts)
    return {
        "hosts": Setting(names, job.hosts.source, job.hosts.detail or job.hosts.source.label),
        "nnodes": _nodes_setting(job, len(hosts)),
        "nproc_per_node": first,
        **({"activate": job.activate} if job.activate.value else {}),
        "iface": job.interface,
        "master_port": master_port,
        "ship": job.ship,
        "bind": job.bind,
        "debug": job.debug,
        "encrypt": job.encrypt,
        "lease_s": job.lease_s,
        "grace_s": job.grace_s,
        "hang_timeout_s": job.hang_timeout_s,
        "max_restarts": job.max_restarts,
        "restart_window_s": job.restart_window_s,
        "wait_for_nodes_s": job.wait_for_nodes_s,
    }


def _nodes_setting(job: Job, nodes: int) -> Setting[Any]:
    """Returns the requested range, or the number of nodes."""
    setting = job.nnodes
    value = str(setting.value) if isinstance(setting.value, NodeRange) else nodes
    return Setting(value, setting.source, setting.detail)


def check_agreement(hosts: Sequence[Host], job: Job, facts: Mapping[str, Facts],
                    interpreters: Mapping[str, str]) -> list[str]:  # fmt: skip
    """Returns notes on harmless differences; NodeError if hosts cannot train together."""
    for host in hosts:
        requested, actual = python_of(job, host), interpreters[host.name]
        problem = agreement.interpreter_problem(host, requested, actual, facts[host.name])
        if problem is not None:
            raise problem
    if job.needs_torch and (problem := agreement.torch_problem(hosts, facts)) is not None:
        raise problem
    pythons = {host.name: facts[host.name]["python"]["version"] for host in hosts}
    return agreement.differences("Python", pythons)
