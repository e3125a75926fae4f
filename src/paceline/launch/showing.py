"""A plan as people read it, and as they could type it. Pure."""

from __future__ import annotations

from paceline.spec.command import shell_text
from paceline.spec.job import Entry
from paceline.spec.plan import NodePlan, Plan, RankPlan

# Without our agent nobody holds a store; typed by hand, rank 0 holds its own.
_NOT_BY_HAND = {"TORCHELASTIC_USE_AGENT_STORE", "PACELINE_RUN_ID", "PACELINE_ATTEMPT"}


def entry_argv(entry: Entry, python: str) -> list[str]:
    """The command that a rank amounts to."""
    if entry.kind == "binary":
        return [entry.target, *entry.args]
    flag = ["-m"] if entry.kind == "module" else []
    return [python, *flag, entry.target, *entry.args]


def rank_command(plan: Plan, node: NodePlan, rank: RankPlan) -> list[str]:
    """What to type on the node to start this rank by hand."""
    env = {name: setting.value for name, setting in node.env.items()}
    env |= {k: v for k, v in plan.rank_env(node, rank).items() if k not in _NOT_BY_HAND}
    # a value that was not recorded cannot be shown: it is left for the reader to set
    env |= {k: v for k, v in plan.environment.items() if not v.startswith("(")}
    binding = ["taskset", "-c", ",".join(map(str, rank.cpus))] if rank.cpus else []
    assignments = [f"{name}={value}" for name, value in env.items()]
    return ["env", "-C", node.workdir, *assignments, *binding, *entry_argv(node.entry, node.python)]


def describe(plan: Plan) -> str:
    """The whole plan: world, settings with their sources, and a command for every rank."""
    hosts = len(plan.nodes)
    lines = [
        f"world size {plan.world_size}: {hosts} host{'s' * (hosts > 1)}, rank 0 on "
        f"{plan.nodes[0].host}, store at {plan.master_addr} port {plan.master_port}"
        f" (held by {'the agent' if plan.agent_store else 'rank 0'})",
        "",
        "settings",
        *(f"  {name:<16} {setting.describe()}" for name, setting in plan.settings.items()),
    ]
    if plan.environment:
        lines += ["", "environment", *(f"  {k}={v}" for k, v in plan.environment.items())]
    for note in plan.notes:
        lines += ["", f"note: {note}"]
    for node in plan.nodes:
        lines += ["", *_describe_node(plan, node)]
    return "\n".join(lines)


def _describe_node(plan: Plan, node: NodePlan) -> list[str]:
    lines = [
        f"{node.host} ({node.login}): {len(node.ranks)} "
        f"rank{'s' * (len(node.ranks) > 1)}, {node.interface} {node.address}, code {node.code}",
        *(f"  {name:<32} {setting.describe()}" for name, setting in node.env.items()),
    ]
    for rank in node.ranks:
        lines.append(f"  rank {rank.rank}: {shell_text(rank_command(plan, node, rank))}")
    return lines
