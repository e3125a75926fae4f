"""The options of a lab, and the plan that follows from them. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from paceline.spec.errors import LabError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

FIRST_INDEX = 11  # n1 is x.x.x.11 and fd77::11
DEAD_SUBNET = ipaddress.IPv4Network("10.66.0.0/24")
BRIDGE_ADDRESS = "172.17.0.1/16"  # what Docker gives docker0 on every machine
IPV6_SUBNET = "fd77::/64"

MARKER = "/run/paceline-lab"  # exists inside the hosts only; holds the lab's name
HOMES = "/run/home"  # parent of the login user's HOME inside a host

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg]?)(bit|bps)", re.IGNORECASE)
_TIME = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>us|ms|s)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
_SIZE = re.compile(r"\d+[kmg]?", re.IGNORECASE)


@dataclass(frozen=True)
class LabOptions:
    """Options of a lab; the defaults are two plain hosts. They are called n1, n2, …

    Attributes:
        name: Name of the lab; several can be up at once. Default: a unique name.
        rate: Of every link in both directions, in ``tc``'s format (``100mbit``). Default:
            unlimited.
        latency: One-way delay between any two hosts (``10ms``), half of the round-trip time.
        debian_hosts: Every ``/etc/hosts`` maps the host's own name to 127.0.1.1 first, as
            Debian's installer writes it.
        dead_interface: Every host has a second interface that is up and has an address, but is
            connected to nothing; it is the first by name and by index.
        dead_name: The host's own name resolves to the address of that dead interface.
        bridge_address: Every host has a ``docker0`` with the same address.
        interface_names: Names of the hosts' interfaces, cycled over the hosts.
        ipv6_only: The hosts have IPv6 addresses only, except for loopback.
        python: Host name → virtual environment (or interpreter) of that host.
        private: ``PATH`` or ``PATH:SIZE``: folders in which writes stay on the host. With a size
            the folder starts empty and can be filled.
        shared_home: All hosts share one HOME, as on most clusters. Default: each has its own.
        share: Folders below ``/tmp``, ``/var/tmp``, ``/run`` and others that are private to each
            host, to be shared with the machine. The running Python's environment and the working
            directory are always shared.
    """

    hosts: int = 2
    name: str = ""
    rate: str = ""
    latency: str = ""
    subnet: str = "10.77.0.0/24"
    debian_hosts: bool = False
    dead_interface: bool = False
    dead_name: bool = False
    bridge_address: bool = False
    interface_names: tuple[str, ...] = ("eth0",)
    ipv6_only: bool = False
    python: Mapping[str, str] = field(default_factory=dict)
    no_sshd: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    shared_home: bool = False
    share: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostPlan:
    """One host of the lab, complete.

    Attributes:
        name: Host name; also the name of its port on the switch.
        address: Its address, without prefix length.
        mac: Hardware address of its interface.
        dead_address: Address of its dead interface, empty for none.
    """

    name: str
    address: str
    interface: str
    mac: str
    dead_address: str
    python: str
    sshd: bool


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that is private to each host; ``size``, of a tmpfs, may be empty."""

    path: str
    size: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the plan needs to know about the machine, and who logs in.

    Attributes:
        python: The running interpreter, without resolving links.
        shared: Folders that every host must see even below its private folders.
        cpus: How many all hosts share.
    """

    python: str
    shared: tuple[str, ...]
    uid: int
    gid: int
    user: str
    shell: str
    cpus: int = 1


@dataclass(frozen=True)
class LabPlan:
    options: LabOptions
    hosts: tuple[HostPlan, ...]
    around: Surroundings
    prefix_length: int
    gateway: str
    private: tuple[PrivateFolder, ...]
    shared: tuple[str, ...]

    def host(self, name: str) -> HostPlan:
        """The host called ``name``; raises LabError if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = ", ".join(host.name for host in self.hosts)
        raise LabError(f"the lab has no host {name!r}", found=f"its hosts are {names}")


def plan_lab(options: LabOptions, around: Surroundings) -> LabPlan:
    _validate(options)
    network = _network(options)
    return LabPlan(
        options=options,
        hosts=tuple(_host(options, around, network, index) for index in range(options.hosts)),
        around=around,
        prefix_length=network.prefixlen,
        gateway=str(network[1]),
        private=tuple(_private(text) for text in options.private),
        shared=(*around.shared, *options.share),
    )


def _host(options: LabOptions, around: Surroundings, network: Network, index: int) -> HostPlan:
    name = f"n{index + 1}"
    return HostPlan(
        name=name,
        address=str(_address(network, index)),
        interface=options.interface_names[index % len(options.interface_names)],
        mac="02:4c:61:62:{:02x}:{:02x}".format(*divmod(index + 1, 256)),
        dead_address=str(_address(DEAD_SUBNET, index)) if options.dead_interface else "",
        python=_interpreter(options.python.get(name, around.python)),
        sshd=name not in options.no_sshd,
    )


def _interpreter(path: str) -> str:
    """The interpreter of a virtual environment; an interpreter is recognised by its name."""
    return path if PurePosixPath(path).name.startswith("python") else f"{path}/bin/python"


def _network(options: LabOptions) -> Network:
    text = IPV6_SUBNET if options.ipv6_only else options.subnet
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise LabError(f"--subnet {text} is not a network", found=str(error)) from None
    if network.num_addresses < FIRST_INDEX + options.hosts + 1:
        raise LabError(
            f"{options.hosts} hosts do not fit into {text}",
            remedy="give a larger network, for example --subnet 10.77.0.0/16",
        )
    return network


def _address(network: Network, index: int) -> Address:
    number = FIRST_INDEX + index
    if network.version == 6:  # so that the last group reads like the last byte in IPv4
        return network[int(str(number), 16)]
    return network[number]


def _validate(options: LabOptions) -> None:
    if options.hosts < 1:
        raise LabError(f"--hosts {options.hosts}: a lab has at least one host")
    if options.name and not _NAME.fullmatch(options.name):
        raise LabError(f"--name {options.name!r} is not a name", remedy="use letters and digits")
    if options.rate:
        rate_bits(options.rate)
    if options.latency:
        delay_seconds(options.latency)
    if options.dead_name and not options.dead_interface:
        raise LabError("--dead-name needs --dead-interface")
    _validate_interfaces(options)
    _validate_hosts_named(options)


def _validate_interfaces(options: LabOptions) -> None:
    for name in options.interface_names:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,15}", name) or name in ("lo", "dead0", "docker0"):
            raise LabError(f"--interface-names: {name!r} cannot be an interface's name")
    if not options.interface_names:
        raise LabError("--interface-names is empty")


def _validate_hosts_named(options: LabOptions) -> None:
    names = {f"n{index + 1}" for index in range(options.hosts)}
    for option, hosts in (("--python", options.python), ("--no-sshd", options.no_sshd)):
        for name in sorted(set(hosts) - names):
            raise LabError(f"{option} names {name!r}", found=f"the hosts are n1 … n{options.hosts}")


def _private(text: str) -> PrivateFolder:
    path, colon, size = text.rpartition(":")
    if colon and _SIZE.fullmatch(size):
        return PrivateFolder(path, size)
    return PrivateFolder(text)


def rate_bits(text: str) -> float:
    """Bits per second of a rate such as ``100mbit``; raises LabError."""
    match = _RATE.fullmatch(text)
    if not match or float(match["number"]) <= 0:
        raise LabError(f"{text!r} is not a rate", remedy="write for example 100mbit or 1gbit")
    scale = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match["unit"].lower()]
    octets = 8 if text.lower().endswith("bps") else 1  # tc's "bps" means bytes per second
    return float(match["number"]) * scale * octets


def delay_seconds(text: str) -> float:
    """Seconds of a delay such as ``10ms``; raises LabError."""
    match = _TIME.fullmatch(text)
    if not match:
        raise LabError(f"{text!r} is not a delay", remedy="write for example 10ms")
    return float(match["number"]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match["unit"].lower()]
