"""Fault cases: how each is injected in the lab, what the check must report, and the remedy."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.lab import Lab

THREE_HOSTS: dict[str, Any] = {
    "hosts": 3,
    "interface_names": ("eth0", "ens3"),
    "private": ("/srv:64m",),
}
Injection = Callable[[Lab], AbstractContextManager[Any]]
ManualRemedy = Callable[[Lab], None]


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        problem: Number in the catalogue of problems; may be empty.
        name: Name in the table.
        expected_texts: Texts that the conclusion must contain.
        inject: Injects the fault. What it starts besides the lab ends with the context.
        arguments: Arguments of ``paceline check``.
        options: Options of the lab.
        manual_remedy: Remedy that a person applies if no command is printed; its docstring is
            shown in the table.
        arguments_after: Arguments after the remedy, if the remedy changes them.
        settings: Content of ``paceline.toml`` in the folder of the check.
    """

    problem: str
    name: str
    expected_texts: tuple[str, ...]
    inject: Injection
    arguments: tuple[str, ...] = ("--quick",)
    options: dict[str, Any] = field(default_factory=lambda: dict(THREE_HOSTS))
    manual_remedy: ManualRemedy | None = None
    arguments_after: tuple[str, ...] | None = None
    settings: str = ""


def fault(*arguments: str) -> Injection:
    """A fault of the lab."""

    @contextlib.contextmanager
    def inject(lab: Lab) -> Iterator[None]:
        lab.fault(*arguments)
        yield

    return inject


def run_commands(host: str, *commands: str) -> Injection:
    """Run shell commands on a host."""

    @contextlib.contextmanager
    def inject(lab: Lab) -> Iterator[None]:
        for command in commands:
            shell(lab, host, command)
        yield

    return inject


def shell(lab: Lab, host: str, command: str) -> None:
    lab.exec(host, ["sh", "-c", command], check=True, timeout=30)


def run_process(host: str, *argv: str, ready: bool = True) -> Injection:
    """A process on a host that prints a line when it is ready."""

    @contextlib.contextmanager
    def inject(lab: Lab) -> Iterator[None]:
        with lab.popen(host, argv, stdout=subprocess.PIPE) as child:
            if ready:
                child.stdout.readline()
            yield
            child.kill()

    return inject


@contextlib.contextmanager
def no_injection(lab: Lab) -> Iterator[None]:
    """Inject nothing; the fault is in the arguments or options."""
    yield


# --- remedies that a person applies (the docstrings are printed)


def restore_hosts(lab: Lab) -> None:
    """all hosts powered on, connected and resumed"""
    lab.heal()


def replace_cable(lab: Lab) -> None:
    """the cable replaced"""
    for active in lab.status()["faults"]:
        lab.undo(active["kind"], active["host"], *active["arguments"])


def free_disk(lab: Lab) -> None:
    """disk space freed"""
    lab.undo("fill-disk", "n2", "/srv")


def restore_key(lab: Lab) -> None:
    """the public key restored"""
    shell(lab, "n2", "mv ~/.ssh/aside ~/.ssh/authorized_keys")


def tighten_permissions(lab: Lab) -> None:
    """chmod as printed"""
    shell(lab, "n2", "chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys")


def delete_rule(lab: Lab) -> None:
    """the firewall's rule deleted"""
    shell(lab, "n2", "iptables -F INPUT")


def silence_startup_files(lab: Lab) -> None:
    """the output moved below the test for an interactive shell"""
    text = "case $- in *i*) ;; *) return ;; esac\necho welcome\n"
    (lab.home("n2") / ".bashrc").write_text(text)


HOLD_PORT = "import socket, time; s = socket.create_server(('', 29511)); print(1, flush=True); "
OTHER_TORCH = "/srv/other"


@contextlib.contextmanager
def install_other_torch(lab: Lab) -> Iterator[None]:
    """Create an environment on n2 whose files show another torch version."""
    create = f"{sys.executable} -m venv --without-pip {OTHER_TORCH} && cd {OTHER_TORCH}/lib/py*"
    write_version = (
        "echo > torch/__init__.py; echo \"__version__ = '2.12.1+cpu'\" > torch/version.py"
    )
    shell(lab, "n2", f"{create}/site-packages && mkdir torch && {write_version}")
    yield


@contextlib.contextmanager
def replace_host_key(lab: Lab) -> Iterator[None]:
    """Restart the sshd of n2 with another host key."""
    config = Path(f"{lab.layout.sshd_config('n2')}")
    key = config.with_name("another_key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    lines = config.read_text().splitlines()
    text = "\n".join(f'HostKey "{key}"' if line.startswith("HostKey") else line for line in lines)
    new_config = config.with_name("sshd_again")
    new_config.write_text(text + "\n")
    lab.fault("kill", "n2", "sshd.*listener")
    with lab.popen("n2", ["/usr/sbin/sshd", "-D", "-f", str(new_config)]) as daemon:
        shell(lab, "n2", "while ! ss -ltn | grep -q ':22 '; do sleep 0.1; done")
        yield
        daemon.kill()


@contextlib.contextmanager
def limit_logins(lab: Lab) -> Iterator[None]:
    """Limit the sshd of n2 to one pending login, and hold it."""
    config = Path(f"{lab.layout.sshd_config('n2')}")
    new_config = config.with_name("sshd_few")
    new_config.write_text("MaxStartups 1:100:1\n" + config.read_text())
    lab.fault("kill", "n2", "sshd.*listener")
    connect = "import socket, time; s = socket.create_connection(('10.77.0.12', 22)); "
    with lab.popen("n2", ["/usr/sbin/sshd", "-D", "-f", str(new_config)]) as daemon:
        shell(lab, "n2", "while ! ss -ltn | grep -q ':22 '; do sleep 0.1; done")
        argv = [sys.executable, "-c", connect + "print(s.recv(9), flush=True); time.sleep(99)"]
        with lab.popen("n1", argv, stdout=subprocess.PIPE) as open_login:
            open_login.stdout.readline()
            yield
            open_login.kill()
        daemon.kill()


def name_same_environment(lab: Lab) -> None:
    """the environment of the other hosts named in paceline.toml"""


def start_sshd(lab: Lab) -> None:
    """sshd started"""
    lab.fault("power-off", "n2")
    lab.heal()


def raise_login_limit(lab: Lab) -> None:
    """MaxStartups raised, sshd restarted"""
    lab.exec("n2", ["pkill", "-f", "sshd_few"], timeout=10)
    lab.fault("power-off", "n2")
    lab.heal()


MACVLAN = (
    "ip link add link eth0 name eth9 type macvlan mode bridge",
    "ip addr add 10.77.0.111/24 dev eth9",
    "ip link set eth9 up",
)

SINGLE: Sequence[Case] = (
    Case("P1", "own name is 127.0.1.1", ("loopback", "n1 and n2", "127.0.1.1"), no_injection,
         options={"hosts": 2, "debian_hosts": True}),
    Case("P1", "own name is a dead interface", ("host name n1", "dead0"), no_injection,
         options={"hosts": 2, "dead_interface": True, "dead_name": True}),
    Case("P2", "a name that others cannot resolve", ("n1 cannot resolve n2",),
         run_commands("n1", "grep -v n2 /etc/hosts > /tmp/h; cp /tmp/h /etc/hosts")),
    Case("P2", "a name that means another host", ("on n1, n2 means 10.77.0.13 (that is n3)",),
         run_commands("n1", "sed s/10.77.0.12/10.77.0.13/ /etc/hosts > /tmp/h; "
                      "cp /tmp/h /etc/hosts")),
    Case("P3", "one interface name for all", ("interface eth0", "n2 has: ens3"), no_injection,
         ("--quick", "--iface", "eth0"), settings='[hosts.n2]\ninterface = "ens3"\n'),
    Case("P4", "two interfaces in one subnet",
         ("n1 sends to n2 and n3 through eth0, not through eth9", "two interfaces in one subnet"),
         run_commands("n1", *MACVLAN), ("--no-trial",),
         settings='[hosts.n1]\ninterface = "eth9"\n'),
    Case("P6", "firewall drops new TCP", ("n2 drops TCP",), fault("drop", "n2", "all-ephemeral")),
    Case("P6", "firewall drops a range", ("n2 drops TCP", "of the ports"),
         fault("drop", "n2", "33000-46000")),
    Case("P6", "firewall drops 29500", ("n3 drops TCP", "port 29500"),
         fault("drop", "n3", "29500")),
    Case("P6", "firewall rejects", ("n3 refuses TCP",), fault("reject", "n3", "all-ephemeral")),
    Case("P6", "one host deaf to another", ("n3 drops TCP from n1",), fault("deaf", "n3", "n1")),
    Case("", "no route (errno 113)", ("n1 has no route to n2", "113"),
         fault("unreachable", "n1", "n2")),
    Case("P7", "port taken", ("port 29511 on n1 is taken by process",),
         run_process("n1", sys.executable, "-c", HOLD_PORT + "time.sleep(99)"),
         ("--quick", "--master-port", "29511")),
    Case("P8", "key not installed", ("cannot log in to n2: login refused",),
         run_commands("n2", "mv ~/.ssh/authorized_keys ~/.ssh/aside"), manual_remedy=restore_key),
    Case("P8", "home open to others", ("cannot log in to n2: login refused",),
         run_commands("n2", "chmod 777 ~ ~/.ssh"), manual_remedy=tighten_permissions),
    Case("P8", "host key changed", ("cannot log in to n2: host key changed",), replace_host_key,
         arguments_after=("--quick", "--accept-new-host-keys")),
    Case("P8", "sshd killed", ("cannot log in to n2", "refused"),
         fault("kill", "n2", "sshd.*listener"), manual_remedy=start_sshd),
    Case("P8", "SSH port dropped", ("cannot log in to n2: no answer", "port 22"),
         run_commands("n2", "iptables -I INPUT -p tcp --dport 22 -j DROP"),
         manual_remedy=delete_rule),
    Case("P9", "sshd drops logins", ("cannot log in to n2: too many logins at once",), limit_logins,
         manual_remedy=raise_login_limit),
    Case("P10", "interpreter missing", ("n2 has no Python at /no/python",), no_injection,
         settings='[hosts.n2]\npython = "/no/python"\n', arguments_after=("--quick",)),
    Case("P10", "work folder missing", ("n2 has no folder /srv/job",), no_injection,
         settings='[hosts.n2]\nworkdir = "/srv/job"\n'),
    Case("P12", "start-up files print", ("the shell start-up files of n2 print 'welcome'",),
         run_commands("n2", "echo echo welcome > ~/.bashrc"), manual_remedy=silence_startup_files),
    Case("P13", "powered off", ("cannot log in to n3",), fault("power-off", "n3"),
         manual_remedy=restore_hosts),
    Case("P13", "unplugged", ("cannot log in to n2",), fault("unplug", "n2"),
         manual_remedy=restore_hosts),
    Case("P13", "frozen", ("cannot log in to n1", "sshd does not speak"), fault("freeze", "n1"),
         manual_remedy=restore_hosts),
    Case("P17", "another torch", ("torch", "2.12.1+cpu", "n2"), install_other_torch,
         settings=f'[hosts.n2]\npython = "{OTHER_TORCH}/bin/python"\n',
         arguments_after=("--quick",), manual_remedy=name_same_environment),
    Case("", "MTU differs", ("the MTU differs", "n2 ens3 1400"),
         run_commands("n2", "ip link set ens3 mtu 1400")),
    Case("", "small /dev/shm", ("/dev/shm on n2 has 64.0 MiB",),
         run_commands("n2", "mount -o remount,size=64m /dev/shm")),
    Case("P26", "left-over processes", ("left-over processes of an earlier job on n2",),
         run_process("n2", "env", "PACELINE_JOB_TOKEN=ab12", "sh", "-c", "echo; sleep 99"),
         ("--no-trial",)),
    Case("", "disk full", ("/srv on n2 is full",), fault("fill-disk", "n2", "/srv"),
         ("--quick", "--data", "/srv"), manual_remedy=free_disk),
    Case("", "data missing", ("n2 has no /srv/set",),
         lambda lab: run_on_hosts(lab, ("n1", "n3"), "mkdir /srv/set; echo a > /srv/set/a"),
         ("--no-trial", "--data", "/srv/set")),
    Case("", "data differs", ("/srv/set on n2 is not what the others have",),
         lambda lab: run_on_hosts(lab, ("n1", "n2", "n3"), "mkdir /srv/set; "
                          "/srv/set/a"), ("--no-trial", "--data", "/srv/set")),
    Case("P21", "a folder that is not shared", ("/srv on", "is not the folder that the others"),
         no_injection, ("--no-trial", "--shared", "/srv"), arguments_after=("--no-trial",)),
    Case("", "slow link", ("link of n2", "slow"), fault("slow", "n2", "100mbit"), ("--no-trial",),
         manual_remedy=replace_cable),
    Case("", "lossy link", ("link of n3", "loses packets"), fault("loss", "n3", "3"),
         ("--no-trial",), manual_remedy=replace_cable),
)  # fmt: skip

HEALTHY = {
    "1 host": {"hosts": 1},
    "2 hosts": {"hosts": 2},
    "3 hosts, two interface names (P3)": dict(THREE_HOSTS),
    "8 hosts": {"hosts": 8},
    "3 hosts, second interface and bridges with one address (P5)": {
        "hosts": 3, "dead_interface": True, "bridge_address": True,
    },
    "2 hosts, IPv6 only": {"hosts": 2, "ipv6_only": True},
    "2 hosts, 100 Mbit/s": {"hosts": 2, "rate": "100mbit"},
}  # fmt: skip

# fault, its arguments, expected message; {} is the host
PAIRABLE = [
    (("drop", "{}", "all-ephemeral"), "{} drops TCP"),
    (("reject", "{}", "all-ephemeral"), "{} refuses TCP"),
    (("fill-disk", "{}", "/srv"), "/srv on {} is full"),
    (("unplug", "{}"), "cannot log in to {}"),
    (("kill", "{}", "sshd.*listener"), "cannot log in to {}"),
]


@contextlib.contextmanager
def run_on_hosts(lab: Lab, hosts: Sequence[str], command: str) -> Iterator[None]:
    """Run a shell command on several hosts."""
    for host in hosts:
        shell(lab, host, command)
    yield
