"""A plan as text, and as commands to type. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.planning.entry import entry_argv
from paceline.spec import jobenv
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.job import redact
from paceline.spec.plan import NodePlan, Plan, RankPlan
from paceline.spec.settings import Setting, Source
from paceline.transfer.tree import relocate

# Without our agent nobody holds a store; typed by hand, rank 0 holds its own.
_NOT_BY_HAND = {"TORCHELASTIC_USE_AGENT_STORE", "PACELINE_RUN_ID", "PACELINE_ATTEMPT"}


def rank_command(plan: Plan, node: NodePlan, rank: RankPlan) -> list[str]:
    """Returns the command that starts this rank by hand on its node."""
    env = {name: redact(name, setting.value) for name, setting in node.env.items()}
    env = {**plan.environment, **env}
    # Values that were not recorded are left to the reader.
    env = {k: v for k, v in env.items() if not v.startswith("(")}
    env |= {k: v for k, v in plan.rank_env(node, rank).items() if k not in _NOT_BY_HAND}
    env[jobenv.MASTER_ADDR] = plan.master_addr
    binding = ["taskset", "-c", ",".join(map(str, rank.cpus))] if rank.cpus else []
    assignments = [f"{name}={value}" for name, value in env.items()]
    command = entry_argv(node.entry, node.python, rank.local_rank)
    return ["env", "-C", node.workdir, *assignments, *binding, *command]


def describe(plan: Plan) -> str:
    """Returns a summary of the plan: hosts, chosen settings with their sources, one command."""
    ranks, hosts = plan.world_size, len(plan.nodes)
    lines = [
        f"{pluralize(ranks, 'rank')} on {pluralize(hosts, 'host')}, rank 0 on {plan.nodes[0].host}",
        f"store: {plan.master_addr} port {plan.master_port}, {_store_exposure(plan)}",
        f"connections between ranks: {_secrecy(plan)}",
        f"hosts: {_sourced(plan.settings['hosts'])}",
        *(f"{name}: {_sourced(setting)}" for name, setting in plan.settings.items()
          if name != "hosts" and setting.source >= Source.FILE),
        "",
        *_table(plan),
        *([f"spares: {_abbreviate([node.host for node in plan.spares])}"] if plan.spares else []),
        "",
        *_commands(plan),
        *(f"  {name}={value}" for name, value in plan.environment.items()),
        *_per_host(plan),
        "",
        *(f"note: {note}" for note in plan.notes),
    ]  # fmt: skip
    return "\n".join(lines)


def _store_exposure(plan: Plan) -> str:
    """Returns who can connect to the store."""
    if plan.closed_store:
        return "for this job's agents only: ranks reach it on loopback"
    holder = "the agent" if plan.agent_store else "rank 0"
    if plan.agent_store and (plan.master_addr.startswith("127.") or plan.master_addr == "::1"):
        return f"held by {holder}, on loopback"
    return f"held by {holder}, open to all programs on the job's hosts"


def _secrecy(plan: Plan) -> str:
    """Returns who can read what ranks send to each other."""
    if len(plan.nodes) + len(plan.spares) == 1:
        return "on one host"
    encrypt = plan.settings.get("encrypt")
    if encrypt and encrypt.value:
        return "TLS 1.3"
    return "not encrypted; gloo accepts all users of the job's hosts, NCCL everybody"


def _sourced(setting: Setting[Any]) -> str:
    """Returns a value with its source, unless they are equal."""
    source = setting.detail or setting.source.label
    return str(setting.value) if source == str(setting.value) else f"{setting.value} ({source})"


def _table(plan: Plan) -> list[str]:
    """Returns one line per host."""
    titles = ("host", "address", "ranks", "interface", "devices", "code")
    rows = [
        (node.host, node.address, _span([rank.rank for rank in node.ranks]), node.interface,
         _devices(node), node.code)
        for node in plan.nodes
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def _devices(node: NodePlan) -> str:
    shares = {len(rank.cpus) for rank in node.ranks}
    per_rank = f", {shares.pop()} a rank" if len(shares) == 1 and node.ranks[0].cpus else ""
    return f"{node.devices}{per_rank}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _commands(plan: Plan) -> list[str]:
    """Returns the command and folder of a rank, once for hosts that have the same."""
    by_command: dict[tuple[str, str], list[str]] = {}
    for node in plan.nodes:
        command = shell_text(entry_argv(plan.entry, node.python))
        by_command.setdefault((command, _folder(node)), []).append(node.host)
    lines = []
    for (command, folder), hosts in by_command.items():
        subject = "each rank" if len(by_command) == 1 else f"each rank on {_abbreviate(hosts)}"
        lines += [f"{subject} runs, in {folder}:", f"  {command}"]
    return lines


def _per_host(plan: Plan) -> list[str]:
    """Returns the variables that paceline.toml has for one host."""
    return [
        f"  {name}={_sourced(_variable(name, setting))}, on {node.host}"
        for node in plan.nodes
        for name, setting in node.env.items()
        if setting.source is Source.FILE
    ]


def _folder(node: NodePlan) -> str:
    """Returns where a node's ranks run; in a copy, the folder's original."""
    code = next((copy for copy in node.copies if copy.name == "code"), None)
    if code is None:
        return node.workdir
    return f"a copy of {relocate(node.workdir, Path(code.target), code.source)}"


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:4], "…", names[-1]])


def describe_full(plan: Plan) -> str:
    """Returns the whole plan: world, settings with sources, and a command for every rank."""
    lines = [
        f"world size {plan.world_size}: {pluralize(len(plan.nodes), 'host')}, rank 0 on "
        f"{plan.nodes[0].host}, store at {plan.master_addr} port {plan.master_port}"
        f" ({_store_exposure(plan)})",
        "",
        "settings",
        *(f"  {name:<16} {'found on each host' if setting.value is None else setting.describe()}"
          for name, setting in plan.settings.items()),
    ]  # fmt: skip
    if plan.environment:
        lines += ["", "environment", *(f"  {k}={v}" for k, v in plan.environment.items())]
    for note in plan.notes:
        lines += ["", f"note: {note}"]
    for node in plan.nodes:
        lines += ["", *_describe_node(plan, node)]
    return "\n".join(lines)


def _variable(name: str, setting: Setting[str]) -> Setting[str]:
    return replace(setting, value=redact(name, setting.value))


def _describe_node(plan: Plan, node: NodePlan) -> list[str]:
    login = "" if node.login == node.host else f" ({node.login})"
    return [
        f"{node.host}{login}: {pluralize(len(node.ranks), 'rank')}, {node.interface} "
        f"{node.address}, {node.devices}, code {node.code}",
        *(f"  {name:<32} {_variable(name, setting).describe()}"
          for name, setting in node.env.items()),
        *(f"  rank {rank.rank}: {shell_text(rank_command(plan, node, rank))}"
          for rank in node.ranks),
    ]  # fmt: skip
