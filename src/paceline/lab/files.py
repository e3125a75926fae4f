"""The files of a lab: their texts, and the folder that holds them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.hosts.lab import Layout, is_running, parent_folder
from paceline.lab.plan import (
    HOMES,
    MARKER,
    HostPlan,
    LabOptions,
    LabPlan,
    Surroundings,
    plan_lab,
)
from paceline.remote.this_machine import start_time
from paceline.spec.errors import LabError

# --- texts


USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def home_inside(plan: LabPlan) -> str:
    """HOME as a process on a host sees it."""
    return f"{HOMES}/{plan.around.user}"


def home_outside(plan: LabPlan, layout: Layout, name: str) -> Path:
    """The folder of this machine that is HOME on the host called ``name``."""
    return layout.home(plan.hosts[0].name if plan.options.shared_home else name)


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
        "OMP_NUM_THREADS": threads(plan),
    }


def threads(plan: LabPlan) -> str:
    return str(max(1, plan.around.cpus // len(plan.hosts)))


def hostfile(plan: LabPlan) -> str:
    return "".join(f"{host.name}\n" for host in plan.hosts)


def settings(plan: LabPlan) -> str:
    """Per-host settings for paceline.toml; empty if no host differs."""
    lines = []
    for name in plan.options.python:
        lines += [f"[hosts.{name}]", f"python = {json.dumps(plan.host(name).python)}", ""]
    return "\n".join(lines)


def etc_files(
    plan: LabPlan, host: HostPlan, machine_passwd: str, machine_group: str
) -> dict[str, str]:
    return {
        "hosts": hosts_file(plan, host),
        "hostname": f"{host.name}\n",
        "machine-id": _identity(plan, host)[:32] + "\n",
        "passwd": passwd(plan, machine_passwd),
        "group": group(plan, machine_group),
        # "*": no password matches. With "!" sshd would consider the account locked.
        "shadow": f"{plan.around.user}:*:19000:0:99999:7:::\n",
        "resolv.conf": "# nothing outside the lab can be reached\n",
    }


def passwd(plan: LabPlan, machine: str) -> str:
    """/etc/passwd: the machine's, with the host's own HOME for the login user.

    sshd and ssh take ``~`` from here. The user's real home, which often holds Python environments
    and data, stays visible under its own path.
    """
    around = plan.around
    user_entry = f"{around.user}:x:{around.uid}:{around.gid}::{home_inside(plan)}:{around.shell}"
    others = [line for line in machine.splitlines() if line.split(":")[0] != around.user]
    if not any(line.startswith("sshd:") for line in others):
        others.append("sshd:x:105:65534::/run/sshd:/usr/sbin/nologin")
    return "\n".join([user_entry, *others]) + "\n"


def group(plan: LabPlan, machine: str) -> str:
    """/etc/group: the machine's; without root, it omits the group ``tty``.

    Its number is not mapped in the user namespace, and sshd would fail to use it for terminals.
    """
    if plan.around.uid == 0:
        return machine
    return "".join(f"{line}\n" for line in machine.splitlines() if not line.startswith("tty:"))


def boot_id(plan: LabPlan, host: HostPlan) -> str:
    """The host's own boot id, by which programs distinguish machines."""
    raw = _identity(plan, host)
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:32])) + "\n"


def _identity(plan: LabPlan, host: HostPlan) -> str:
    return hashlib.sha256(f"{plan.options.name}/{host.name}".encode()).hexdigest()


def hosts_file(plan: LabPlan, host: HostPlan) -> str:
    """/etc/hosts of ``host``, with its own name first."""
    lines = ["127.0.0.1 localhost"]
    if plan.options.debian_hosts:
        lines.append(f"127.0.1.1 {host.name}")
    if plan.options.dead_name:
        lines.append(f"{host.dead_address} {host.name}")
    lines.append("::1 localhost ip6-localhost ip6-loopback")
    lines += [f"{other.address} {other.name}" for other in plan.hosts]
    return "\n".join(lines) + "\n"


def ssh_config(plan: LabPlan, layout: Layout, dialer: str) -> str:
    """The client's configuration, for use on the hosts and outside.

    ``dialer`` is the command line that connects from outside, without host and port.
    """
    names = [name for host in plan.hosts for name in (host.name, host.address)]
    common = [
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
    lines += [f"Host {' '.join(names)}", *(f"  {line}" for line in common)]
    return "\n".join(lines) + "\n"


def known_hosts(plan: LabPlan, public_keys: dict[str, str]) -> str:
    """One key for each host. ``public_keys``: line of the ``.pub`` file by host name."""
    text = ""
    for host in plan.hosts:
        kind, key = public_keys[host.name].split()[:2]
        text += f"{host.name},{host.address} {kind} {key}\n"
    return text


def sshd_config(plan: LabPlan, layout: Layout, host: HostPlan) -> str:
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
    variables = [f"OMP_NUM_THREADS={threads(plan)}"]
    if host.name in plan.options.python:
        variables.append(f"PATH={search_path(host)}")
    lines.append(" ".join(["SetEnv", *(f'"{variable}"' for variable in variables)]))
    return "\n".join(lines) + "\n"


# --- the lab's folder


START = Path(__file__).with_name("start.py")


def program(name: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(START), name]


def surroundings() -> Surroundings:
    """What the plan needs to know about this machine, process and user."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise LabError(
            "a lab needs a user that has an account",
            found=f"user id {os.geteuid()} is not in /etc/passwd, and OpenSSH requires that",
        ) from None
    can_log_in = (
        not user.pw_shell.endswith(("/nologin", "/false")) and Path(user.pw_shell).is_file()
    )
    package = str(Path(__file__).resolve().parents[2])
    paths = (sys.prefix, sys.base_prefix, str(Path.cwd()), package)
    return Surroundings(
        python=sys.executable,
        shared=tuple(dict.fromkeys(path for path in paths if Path(path).exists())),
        uid=user.pw_uid,
        gid=user.pw_gid,
        user=user.pw_name,
        shell=user.pw_shell if can_log_in else "/bin/sh",
        cpus=len(os.sched_getaffinity(0)),
    )


def write_owner(layout: Layout, pid: int) -> None:
    _write(layout.owner, json.dumps({"pid": pid, "started": start_time(pid)}))


def claim(name: str) -> Layout:
    """Makes an empty folder for a lab and removes those of dead labs; LabError if it is up."""
    parent = parent_folder()
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for dead in [Layout(entry) for entry in parent.iterdir() if entry.is_dir()]:
            if not is_running(dead):
                remove(dead)
        layout = Layout(parent / name)
        try:
            layout.root.mkdir(mode=0o700)
        except FileExistsError:
            raise LabError(
                f"a lab called {name!r} is up already",
                remedy=f"paceline lab down --name {name}, or give another --name",
            ) from None
        write_owner(layout, os.getpid())  # until the lab's owner writes its own
    return layout


def remove(layout: Layout) -> None:
    """Removes a lab's folder, with work folders of overlays, which may be unreadable."""
    for folder in layout.root.glob("hosts/*/private/*/work/work"):
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
    shutil.rmtree(layout.root, ignore_errors=True)


def write_files(plan: LabPlan, layout: Layout) -> None:
    if len(str(layout.control)) > 100:
        raise LabError(f"the path {layout.root} is too long for a socket", remedy="shorter --name")
    write_plan(plan, layout)
    _make_keys(plan, layout)
    _write(layout.hostfile, hostfile(plan))
    _write(layout.settings, settings(plan))
    dialer = shlex.join([*program("dial"), str(layout.root)]).replace("%", "%%")  # for ssh
    _write(layout.ssh_config, ssh_config(plan, layout, dialer))
    passwd, group = (Path(file).read_text() for file in ("/etc/passwd", "/etc/group"))
    for host in plan.hosts:
        _write_host(plan, layout, host, etc_files(plan, host, passwd, group))


def _write_host(plan: LabPlan, layout: Layout, host: HostPlan, etc: dict[str, str]) -> None:
    for name, text in {**etc, "boot_id": boot_id(plan, host)}.items():
        _write(layout.etc(host.name) / name, text)
    (layout.etc(host.name) / "shadow").chmod(0o600)
    _write(layout.sshd_config(host.name), sshd_config(plan, layout, host))
    ssh = home_outside(plan, layout, host.name) / ".ssh"
    _write(ssh / "authorized_keys", layout.identity.with_suffix(".pub").read_text())
    _write(ssh / "config", f'Include "{layout.ssh_config}"\n')
    ssh.chmod(0o700)
    for file in ssh.iterdir():
        file.chmod(0o600)


def _make_keys(plan: LabPlan, layout: Layout) -> None:
    """Makes the client's key and one key for each host, in parallel."""
    files = {host.name: layout.host_key(host.name) for host in plan.hosts}
    key_files = [layout.identity, *files.values()]
    for file in key_files:
        file.parent.mkdir(parents=True, exist_ok=True)
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "paceline-lab", "-f"]
    makers = [subprocess.Popen([*keygen, str(file)], stdin=subprocess.DEVNULL)
              for file in key_files]  # fmt: skip
    statuses = [maker.wait() for maker in makers]  # of all, so that none is left behind
    if any(statuses):
        raise LabError("ssh-keygen could not make the lab's keys")
    public = {name: file.with_suffix(".pub").read_text() for name, file in files.items()}
    _write(layout.known_hosts, known_hosts(plan, public))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write_plan(plan: LabPlan, layout: Layout) -> None:
    """Writes what the plan follows from."""
    _write(
        layout.plan, json.dumps({"options": asdict(plan.options), "around": asdict(plan.around)})
    )


def read_plan(layout: Layout) -> LabPlan:
    """Makes the plan again from what :func:`write_plan` wrote."""

    def fields(name: str) -> dict[str, Any]:
        items = raw[name].items()
        return {key: tuple(value) if isinstance(value, list) else value for key, value in items}

    raw = json.loads(layout.plan.read_text())
    return plan_lab(LabOptions(**fields("options")), Surroundings(**fields("around")))
