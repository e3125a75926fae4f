"""The faults: how each is made in the lab, what must be said of it, what its remedy asks for."""

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

THREE: dict[str, Any] = {"hosts": 3, "interface_names": ("eth0", "ens3"), "private": ("/srv:64m",)}
Strike = Callable[[Lab], AbstractContextManager[Any]]
Hand = Callable[[Lab], None]


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        pains: Rows of the catalogue of pains that it stands for; may be empty.
        name: For the table.
        culprit: Words that the conclusion must hold.
        strike: Makes it; what it made beside the lab ends with the context.
        words: Of the command line.
        options: Of the lab.
        hand: What the remedy asks a person to do, where it cannot be typed; its name is shown.
        again: Words of the command line after the remedy, when the remedy changes them.
        settings: The ``paceline.toml`` of the folder that the check is typed in.
    """

    pains: str
    name: str
    culprit: tuple[str, ...]
    strike: Strike
    words: tuple[str, ...] = ("--quick",)
    options: dict[str, Any] = field(default_factory=lambda: dict(THREE))
    hand: Hand | None = None
    again: tuple[str, ...] | None = None
    settings: str = ""


def fault(*words: str) -> Strike:
    """One of the lab's own faults."""

    @contextlib.contextmanager
    def strike(lab: Lab) -> Iterator[None]:
        lab.fault(*words)
        yield

    return strike


def typed(host: str, *commands: str) -> Strike:
    """Shell lines on a host."""

    @contextlib.contextmanager
    def strike(lab: Lab) -> Iterator[None]:
        for command in commands:
            shell(lab, host, command)
        yield

    return strike


def shell(lab: Lab, host: str, command: str) -> None:
    lab.exec(host, ["sh", "-c", command], check=True, timeout=30)


def process(host: str, *argv: str, ready: bool = True) -> Strike:
    """A process that runs on a host, and says a word when it is ready."""

    @contextlib.contextmanager
    def strike(lab: Lab) -> Iterator[None]:
        with lab.popen(host, argv, stdout=subprocess.PIPE) as child:
            if ready:
                child.stdout.readline()
            yield
            child.kill()

    return strike


@contextlib.contextmanager
def nothing(lab: Lab) -> Iterator[None]:
    """The fault is in what is typed."""
    yield


# --- what a person does


def bring_back(lab: Lab) -> None:
    """every host switched on, plugged in, thawed"""
    lab.heal()


def new_cable(lab: Lab) -> None:
    """the cable changed"""
    for one in lab.status()["faults"]:
        lab.undo(one["kind"], one["host"], *one["arguments"])


def make_room(lab: Lab) -> None:
    """what filled the disk deleted"""
    lab.undo("fill-disk", "n2", "/srv")


def key_put_back(lab: Lab) -> None:
    """the public key put back"""
    shell(lab, "n2", "mv ~/.ssh/aside ~/.ssh/authorized_keys")


def key_closed(lab: Lab) -> None:
    """chmod as printed"""
    shell(lab, "n2", "chmod go-w ~ ~/.ssh ~/.ssh/authorized_keys")


def rule_deleted(lab: Lab) -> None:
    """the firewall's rule deleted"""
    shell(lab, "n2", "iptables -F INPUT")


def quiet_start(lab: Lab) -> None:
    """the printing moved below the line"""
    text = "case $- in *i*) ;; *) return ;; esac\necho welcome\n"
    (lab.home("n2") / ".bashrc").write_text(text)


HOLD = "import socket, time; s = socket.create_server(('', 29511)); print(1, flush=True); "
ANOTHER_TORCH = "/srv/other"


@contextlib.contextmanager
def older_torch(lab: Lab) -> Iterator[None]:
    """n2's environment has another torch, as far as its files tell."""
    make = f"{sys.executable} -m venv --without-pip {ANOTHER_TORCH} && cd {ANOTHER_TORCH}/lib/py*"
    texts = "echo > torch/__init__.py; echo \"__version__ = '2.12.1+cpu'\" > torch/version.py"
    shell(lab, "n2", f"{make}/site-packages && mkdir torch && {texts}")
    yield


@contextlib.contextmanager
def new_host_key(lab: Lab) -> Iterator[None]:
    """n2 was installed again: its sshd shows another key."""
    config = Path(f"{lab.layout.sshd_config('n2')}")
    key = config.with_name("another_key")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    lines = config.read_text().splitlines()
    text = "\n".join(f'HostKey "{key}"' if line.startswith("HostKey") else line for line in lines)
    other = config.with_name("sshd_again")
    other.write_text(text + "\n")
    lab.fault("kill", "n2", "sshd.*listener")
    with lab.popen("n2", ["/usr/sbin/sshd", "-D", "-f", str(other)]) as daemon:
        shell(lab, "n2", "while ! ss -ltn | grep -q ':22 '; do sleep 0.1; done")
        yield
        daemon.kill()


@contextlib.contextmanager
def few_logins(lab: Lab) -> Iterator[None]:
    """n2's sshd takes one login at a time, and somebody has it."""
    config = Path(f"{lab.layout.sshd_config('n2')}")
    other = config.with_name("sshd_few")
    other.write_text("MaxStartups 1:100:1\n" + config.read_text())
    lab.fault("kill", "n2", "sshd.*listener")
    hog = "import socket, time; s = socket.create_connection(('10.77.0.12', 22)); "
    with lab.popen("n2", ["/usr/sbin/sshd", "-D", "-f", str(other)]) as daemon:
        shell(lab, "n2", "while ! ss -ltn | grep -q ':22 '; do sleep 0.1; done")
        argv = [sys.executable, "-c", hog + "print(s.recv(9), flush=True); time.sleep(99)"]
        with lab.popen("n1", argv, stdout=subprocess.PIPE) as other_login:
            other_login.stdout.readline()
            yield
            other_login.kill()
        daemon.kill()


def same_environment(lab: Lab) -> None:
    """the environment of the others named in paceline.toml"""


def sshd_started(lab: Lab) -> None:
    """sshd started"""
    lab.fault("power-off", "n2")
    lab.heal()


def more_logins(lab: Lab) -> None:
    """MaxStartups raised, sshd started again"""
    lab.exec("n2", ["pkill", "-f", "sshd_few"], timeout=10)
    lab.fault("power-off", "n2")
    lab.heal()


MACVLAN = (
    "ip link add link eth0 name eth9 type macvlan mode bridge",
    "ip addr add 10.77.0.111/24 dev eth9",
    "ip link set eth9 up",
)

SINGLE: Sequence[Case] = (
    Case("P1", "own name is 127.0.1.1", ("loopback", "n1 and n2", "127.0.1.1"), nothing,
         options={"hosts": 2, "debian_hosts": True}),
    Case("P1", "own name is a dead interface", ("host name n1", "dead0"), nothing,
         options={"hosts": 2, "dead_interface": True, "dead_name": True}),
    Case("P2", "a name that others cannot resolve", ("n1 cannot resolve n2",),
         typed("n1", "grep -v n2 /etc/hosts > /tmp/h; cp /tmp/h /etc/hosts")),
    Case("P2", "a name that means another host", ("on n1, n2 means 10.77.0.13 (that is n3)",),
         typed("n1", "sed s/10.77.0.12/10.77.0.13/ /etc/hosts > /tmp/h; cp /tmp/h /etc/hosts")),
    Case("P3", "one interface name for all", ("interface eth0", "n2 has: ens3"), nothing,
         ("--quick", "--iface", "eth0"), settings='[hosts.n2]\ninterface = "ens3"\n'),
    Case("P4", "two interfaces in one subnet",
         ("n1 sends to n2 and n3 through eth0, not through eth9", "two interfaces in one subnet"),
         typed("n1", *MACVLAN), ("--no-trial",), settings='[hosts.n1]\ninterface = "eth9"\n'),
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
         process("n1", sys.executable, "-c", HOLD + "time.sleep(99)"),
         ("--quick", "--master-port", "29511")),
    Case("P8", "key not installed", ("cannot log in to n2: login refused",),
         typed("n2", "mv ~/.ssh/authorized_keys ~/.ssh/aside"), hand=key_put_back),
    Case("P8", "home open to others", ("cannot log in to n2: login refused",),
         typed("n2", "chmod 777 ~ ~/.ssh"), hand=key_closed),
    Case("P8", "host key changed", ("cannot log in to n2: host key changed",), new_host_key,
         again=("--quick", "--accept-new-host-keys")),
    Case("P8", "sshd killed", ("cannot log in to n2", "refused"),
         fault("kill", "n2", "sshd.*listener"), hand=sshd_started),
    Case("P8", "SSH port dropped", ("cannot log in to n2: no answer", "port 22"),
         typed("n2", "iptables -I INPUT -p tcp --dport 22 -j DROP"),
         hand=rule_deleted),
    Case("P9", "sshd drops logins", ("cannot log in to n2: too many logins at once",), few_logins,
         hand=more_logins),
    Case("P10", "interpreter missing", ("n2 has no Python at /no/python",), nothing,
         settings='[hosts.n2]\npython = "/no/python"\n', again=("--quick",)),
    Case("P10", "work folder missing", ("n2 has no folder /srv/job",), nothing,
         settings='[hosts.n2]\nworkdir = "/srv/job"\n'),
    Case("P12", "start-up files print", ("the shell start-up files of n2 print 'welcome'",),
         typed("n2", "echo echo welcome > ~/.bashrc"), hand=quiet_start),
    Case("P13", "powered off", ("cannot log in to n3",), fault("power-off", "n3"),
         hand=bring_back),
    Case("P13", "unplugged", ("cannot log in to n2",), fault("unplug", "n2"), hand=bring_back),
    Case("P13", "frozen", ("cannot log in to n1", "sshd does not speak"), fault("freeze", "n1"),
         hand=bring_back),
    Case("P17", "another torch", ("torch", "2.12.1+cpu", "n2"), older_torch,
         settings=f'[hosts.n2]\npython = "{ANOTHER_TORCH}/bin/python"\n', again=("--quick",),
         hand=same_environment),
    Case("", "MTU differs", ("the MTU differs", "n2 ens3 1400"),
         typed("n2", "ip link set ens3 mtu 1400")),
    Case("", "small /dev/shm", ("/dev/shm on n2 has 64.0 MiB",),
         typed("n2", "mount -o remount,size=64m /dev/shm")),
    Case("P26", "left-over processes", ("left-over processes of an earlier job on n2",),
         process("n2", "env", "PACELINE_JOB_TOKEN=ab12", "sh", "-c", "echo; sleep 99"),
         ("--no-trial",)),
    Case("", "disk full", ("/srv on n2 is full",), fault("fill-disk", "n2", "/srv"),
         ("--quick", "--data", "/srv"), hand=make_room),
    Case("", "data missing", ("n2 has no /srv/set",),
         lambda lab: both(lab, ("n1", "n3"), "mkdir /srv/set; echo a > /srv/set/a"),
         ("--no-trial", "--data", "/srv/set")),
    Case("", "data differs", ("/srv/set on n2 is not what the others have",),
         lambda lab: both(lab, ("n1", "n2", "n3"), "mkdir /srv/set; hostname | sed s/n[13]/n/ > "
                          "/srv/set/a"), ("--no-trial", "--data", "/srv/set")),
    Case("P21", "a folder that is not shared", ("/srv on", "is not the folder that the others"),
         nothing, ("--no-trial", "--shared", "/srv"), again=("--no-trial",)),
    Case("", "slow link", ("link of n2", "slow"), fault("slow", "n2", "100mbit"), ("--no-trial",),
         hand=new_cable),
    Case("", "lossy link", ("link of n3", "loses packets"), fault("loss", "n3", "3"),
         ("--no-trial",), hand=new_cable),
)  # fmt: skip

HEALTHY = {
    "1 host": {"hosts": 1},
    "2 hosts": {"hosts": 2},
    "3 hosts, two interface names (P3)": dict(THREE),
    "8 hosts": {"hosts": 8},
    "3 hosts, second interface and bridges with one address (P5)": {
        "hosts": 3, "dead_interface": True, "bridge_address": True,
    },
    "2 hosts, IPv6 only": {"hosts": 2, "ipv6_only": True},
    "2 hosts, 100 Mbit/s": {"hosts": 2, "rate": "100mbit"},
}  # fmt: skip

# fault, its words, what must be said; {} is the host
PAIRABLE = [
    (("drop", "{}", "all-ephemeral"), "{} drops TCP"),
    (("reject", "{}", "all-ephemeral"), "{} refuses TCP"),
    (("fill-disk", "{}", "/srv"), "/srv on {} is full"),
    (("unplug", "{}"), "cannot log in to {}"),
    (("kill", "{}", "sshd.*listener"), "cannot log in to {}"),
]


@contextlib.contextmanager
def both(lab: Lab, hosts: Sequence[str], command: str) -> Iterator[None]:
    for host in hosts:
        shell(lab, host, command)
    yield
