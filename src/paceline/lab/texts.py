"""The text of every file that a lab writes. Pure."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from paceline.lab.layout import HOMES, MARKER, Layout
from paceline.lab.options import HostPlan, LabPlan

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def home_inside(plan: LabPlan) -> str:
    """HOME as a process on a host sees it."""
    return f"{HOMES}/{plan.around.user}"


def search_path(host: HostPlan) -> str:
    """PATH on a host: its Python environment first."""
    return f"{Path(host.python).parent}:{USUAL_PATH}"


def environment(plan: LabPlan, host: HostPlan) -> dict[str, str]:
    """The environment of a fresh login on ``host``."""
    user = plan.around.user
    return {
        "HOME": home_inside(plan),
        "USER": user,
        "LOGNAME": user,
        "SHELL": plan.around.shell,
        "PATH": search_path(host),
        "PACELINE_LAB": plan.options.name,
    }


def hostfile(plan: LabPlan) -> str:
    return "".join(f"{host.name}\n" for host in plan.hosts)


def settings(plan: LabPlan) -> str:
    """Per-host settings for paceline.toml; empty when no host differs."""
    lines = []
    for name in plan.options.python:
        lines += [f"[hosts.{name}]", f"python = {json.dumps(plan.host(name).python)}", ""]
    return "\n".join(lines)


def etc_files(
    plan: LabPlan, host: HostPlan, machine_passwd: str, machine_group: str
) -> dict[str, str]:
    """Path below /etc → content, as ``host`` sees them."""
    return {
        "hosts": hosts_file(plan, host),
        "hostname": f"{host.name}\n",
        "machine-id": _identity(plan, host)[:32] + "\n",
        "passwd": passwd(plan, machine_passwd),
        "group": group(plan, machine_group),
        # "*": no password fits. With "!" sshd would call the account locked and refuse keys too.
        "shadow": f"{plan.around.user}:*:19000:0:99999:7:::\n",
        "resolv.conf": "# nothing outside the lab can be reached\n",
    }


def passwd(plan: LabPlan, machine: str) -> str:
    """/etc/passwd: the machine's, but the login user has another HOME.

    The user's real home stays visible under its own path (Python environments and data often
    lie there), while ``~`` is the host's own: sshd and ssh take it from here.
    """
    around = plan.around
    own = f"{around.user}:x:{around.uid}:{around.gid}::{home_inside(plan)}:{around.shell}"
    others = [line for line in machine.splitlines() if line.split(":")[0] != around.user]
    if not any(line.startswith("sshd:") for line in others):
        others.append("sshd:x:105:65534::/run/sshd:/usr/sbin/nologin")
    return "\n".join([own, *others]) + "\n"


def group(plan: LabPlan, machine: str) -> str:
    """/etc/group: the machine's; without root there is no group ``tty`` to own terminals.

    Its number has no meaning in the user namespace, and sshd gives up when it cannot use it.
    """
    if plan.around.uid == 0:
        return machine
    return "".join(f"{line}\n" for line in machine.splitlines() if not line.startswith("tty:"))


def boot_id(plan: LabPlan, host: HostPlan) -> str:
    """A boot id of the host's own; programs tell machines apart by it."""
    raw = _identity(plan, host)
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:32])) + "\n"


def _identity(plan: LabPlan, host: HostPlan) -> str:
    return hashlib.sha256(f"{plan.options.name}/{host.name}".encode()).hexdigest()


def hosts_file(plan: LabPlan, host: HostPlan) -> str:
    """/etc/hosts of ``host``: what its own name means comes first."""
    lines = ["127.0.0.1 localhost"]
    if plan.options.debian_hosts:
        lines.append(f"127.0.1.1 {host.name}")
    if plan.options.dead_name:
        lines.append(f"{host.dead_address} {host.name}")
    lines.append("::1 localhost ip6-localhost ip6-loopback")
    lines += [f"{other.address} {other.name}" for other in plan.hosts]
    return "\n".join(lines) + "\n"


def ssh_config(plan: LabPlan, layout: Layout, dialer: str) -> str:
    """The client's configuration; it serves inside the hosts and outside.

    Args:
        dialer: Command line that connects from outside (without host and port).
    """
    names = [name for host in plan.hosts for name in (host.name, host.address)]
    everyone = [
        f"User {plan.around.user}",
        f'IdentityFile "{layout.identity}"',
        "IdentitiesOnly yes",
        "IdentityAgent none",
        f'UserKnownHostsFile "{layout.known_hosts}"',
        "GlobalKnownHostsFile none",
        "StrictHostKeyChecking yes",
        "UpdateHostKeys no",
        "BatchMode yes",
        "ForwardAgent no",
    ]
    lines = [
        f"# Hosts of the virtual cluster {plan.options.name!r}; removed with it.",
        "# From outside, a connection is made in the lab's network and handed to ssh.",
        f'Match originalhost {",".join(names)} exec "test ! -e {MARKER}"',
        f"  ProxyCommand {dialer} %h %p",
        "  ProxyUseFdpass yes",
    ]
    for host in plan.hosts:
        lines += [f"Host {host.name} {host.address}", f"  HostName {host.address}"]
    lines += [f"Host {' '.join(names)}", *(f"  {line}" for line in everyone)]
    return "\n".join(lines) + "\n"


def known_hosts(plan: LabPlan, public_keys: dict[str, str]) -> str:
    """One pinned key a host. ``public_keys``: host name → line of its ``.pub`` file."""
    lines = []
    for host in plan.hosts:
        kind, key = public_keys[host.name].split()[:2]
        lines.append(f"{host.name},{host.address} {kind} {key}\n")
    return "".join(lines)


def sshd_config(plan: LabPlan, layout: Layout, host: HostPlan) -> str:
    """sshd of ``host``: OpenSSH's defaults but for what the lab needs."""
    lines = [
        "Port 22",
        f'HostKey "{layout.host_key(host.name)}"',
        "PidFile none",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "PrintMotd no",
        "PrintLastLog no",
        "AcceptEnv LANG LC_*",
        "Subsystem sftp internal-sftp",
        "LogLevel INFO",
    ]
    if host.name in plan.options.python:
        lines.append(f'SetEnv "PATH={search_path(host)}"')
    return "\n".join(lines) + "\n"
