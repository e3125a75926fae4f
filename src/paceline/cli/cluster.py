"""The hosts of a command: read from its settings, named, and traced to their source."""

from __future__ import annotations

import os
from pathlib import Path

import click

from paceline.cli import trust
from paceline.cli.settings import TABLES_ARE_HOSTS, setting, toml_of
from paceline.cli.verb import say
from paceline.schedulers import current_scheduler
from paceline.spec.hosts import Cluster, Host
from paceline.spec.settings import TOML_NAME, Setting, Source

_STRONGER_KEYS = {"python": ("python",), "iface": ("interface", "job_address")}
"""Keys of one host that override an option for all, by option."""


def read_cluster(ctx: click.Context, source: str | None) -> Cluster:
    """Reads the hosts and their tables in paceline.toml, and marks this machine."""
    from paceline.hosts import apply_overrides, check_keys, read_hosts
    from paceline.hosts.lab import lab_name
    from paceline.hosts.source import load_toml
    from paceline.remote.this_machine import mark_local

    cwd, toml = Path.cwd(), toml_of(ctx)
    described = read_hosts(source, environ=os.environ, cwd=cwd)
    cluster = mark_local(apply_overrides(described, toml))
    origin = setting(ctx, "hosts").source
    from_file, is_typed = origin is Source.FILE, origin > Source.FILE
    if from_file:
        if effect := _foreign_source_effect(source or "", described, cwd):
            trust.require_trust_of_source(cwd / TOML_NAME, toml, effect)
    elif is_typed and any(map(_is_redirected, mark_local(described).hosts, cluster.hosts)):
        trust.require_trust_of_logins(cwd / TOML_NAME, toml)
    if any(host.python or host.env for host in cluster.hosts):
        trust.require_trust_of_hosts(cwd / TOML_NAME, toml, described=from_file)
    names_programs = any(host.python or host.env for host in described.hosts)
    file, own_file = Path(described.file), (cwd / TOML_NAME).resolve()
    is_lab = lab_name(source or "") is not None  # made by this user, on this machine
    if names_programs and described.file and not from_file and file != own_file and not is_lab:
        trust.require_trust_of_hosts(file, load_toml(file), described=False)
    check_keys(cluster.hosts)
    return cluster


def _foreign_source_effect(source: str, described: Cluster, folder: Path) -> str:
    """Returns how a source of paceline.toml chooses among the user's hosts; empty if it does not.

    Variables name hosts of the job in which the command runs, and need no trust.
    """
    from paceline.hosts.dialects import ENVIRONMENTS, canonical_name
    from paceline.hosts.lab import lab_name

    if lab_name(source) is not None:
        return "names a lab of yours"
    files = [Path(file) for file in (described.file, *described.includes) if file]
    is_inside = all(file.is_relative_to(folder.resolve()) for file in files)
    is_variable = canonical_name(source.strip()) in (*ENVIRONMENTS, "auto")
    is_own_tables = source == TABLES_ARE_HOSTS
    if is_inside or is_variable or is_own_tables:
        return ""
    return "names hosts by a file outside of this folder"


def _is_redirected(described: Host, host: Host) -> bool:
    """Whether a table changes where, or as whom, Paceline logs in."""
    logins = [(h.address, h.user, h.port, h.identity_file, h.local) for h in (described, host)]
    return logins[0] != logins[1] and not (described.local and host.local)


def read_chosen_cluster(ctx: click.Context) -> Cluster:
    """Reads the hosts that the settings name; prints on standard error where they were named."""
    cluster = read_cluster(ctx, ctx.params["hosts"])
    print_hosts(ctx, cluster)
    return cluster


def print_hosts(ctx: click.Context, cluster: Cluster) -> None:
    """Names hosts that were not typed, and addresses of typed ones that paceline.toml gives.

    A typed word that could be a host's name may be the name of a file instead. Typed options that
    some hosts do not use are named, too.
    """
    from paceline.hosts.source import must_be_file

    if setting(ctx, "hosts").source is Source.COMMAND_LINE:
        typed = ctx.params["hosts"]
        if cluster.file and Path(typed).is_file() and not must_be_file(typed, ()):
            say(f"paceline: hosts: {abbreviated_names(cluster)} (the file {typed})", err=True)
    elif not all(host.local for host in cluster.hosts):
        say(
            f"paceline: hosts: {abbreviated_names(cluster)} ({hosts_origin(ctx, cluster)})",
            err=True,
        )
    tables = toml_of(ctx).get("hosts", {})
    moved = [f"{host.name} is {host.address}" for host in cluster.hosts
             if "address" in tables.get(host.name, {})]  # fmt: skip
    if moved and ctx.params["hosts"] != TABLES_ARE_HOSTS:
        say(f"paceline: {', '.join(moved)} ({TOML_NAME})", err=True)
    for line in unused_options(ctx, cluster):
        say(f"paceline: {line}", err=True)


def unused_options(ctx: click.Context, cluster: Cluster) -> list[str]:
    """Says on which hosts an option is not used, because what is said about one host is stronger.

    Values of ``[run]`` are not named: the file shows both.
    """
    tables, lines = toml_of(ctx).get("hosts", {}), []
    for option, keys in _STRONGER_KEYS.items():
        if option not in ctx.params or (typed := setting(ctx, option)).source <= Source.FILE:
            continue
        for key in keys:
            own = {host.name: value for host in cluster.hosts
                   if (value := getattr(host, key)) not in (None, typed.value)}  # fmt: skip
            if own:
                is_in_toml = any(key in tables.get(name, {}) for name in own)
                place = f"[hosts.NAME] in {TOML_NAME}" if is_in_toml else cluster.source
                listed = ", ".join(f"{name} ({value})" for name, value in own.items())
                lines.append(
                    f"--{option} {typed.value} is not used on hosts with their own {key}: {listed};"
                    f" see {place}"
                )
    return lines


def hosts_setting(ctx: click.Context) -> Setting[str | None]:
    """Returns the setting that names the hosts, as a plan shows it."""
    hosts = setting(ctx, "hosts")
    if hosts.value is None:
        origin = "--rdzv" if ctx.params["rdzv"] else ""
        source = origin or ("the allocation" if current_scheduler(os.environ) else "this machine")
        return Setting(None, Source.FOUND, source)
    origin = {Source.COMMAND_LINE: f"-H {hosts.value}"}.get(hosts.source, hosts.detail)
    tables = hosts.value == TABLES_ARE_HOSTS
    return Setting(hosts.value, hosts.source, f"[hosts] of {origin}" if tables else origin)


def abbreviated_names(cluster: Cluster, max_names: int = 6) -> str:
    """Returns the hosts' names, with the middle of a long list left out."""
    names = [host.name for host in cluster.hosts]
    if len(names) <= max_names:
        return ", ".join(names)
    return f"{', '.join(names[: max_names - 2])}, … {names[-1]}: {len(names)} hosts"


def hosts_origin(ctx: click.Context, cluster: Cluster) -> str:
    """Returns which setting names the hosts, and its value unless that lists them."""
    hosts = setting(ctx, "hosts")
    if hosts.value is None or hosts.source is Source.DEFAULT:
        return cluster.source
    origin = hosts.detail or hosts.source.label
    if hosts.value == TABLES_ARE_HOSTS:
        return f"[hosts] of {origin}"
    is_explicit = "," in hosts.value or len(cluster.hosts) == 1
    return origin if is_explicit else f"{origin}: {hosts.value}"


def unknown_nodes(nodes: int) -> Cluster:
    """Places for nodes that are not known before they come."""
    return Cluster(tuple(Host(f"node{place}") for place in range(nodes)), "--rdzv")
