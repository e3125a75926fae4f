"""Gathers facts about this machine from files and the kernel, without starting programs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import resource
import shutil
import site
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set

from ..files import snapshot
from ..supervision.processes import read_text
from . import accelerators, host_load, netlink

Facts = Dict[str, Any]
RESOLVE_TIMEOUT_S = 1.0


def python_facts() -> Facts:
    """Returns facts of this interpreter, which is the job's unless the hello says otherwise."""
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "prefix": sys.prefix,
        "externally_managed": is_externally_managed(),
    }


def is_externally_managed() -> bool:
    """Whether pip refuses to install into this interpreter (PEP 668); not so in environments."""
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return sys.prefix == sys.base_prefix and os.path.exists(marker)


def library_folders() -> List[str]:
    """Returns the folders of this interpreter's packages, most important first."""
    folders = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    with contextlib.suppress(Exception):
        folders += site.getsitepackages()
    with contextlib.suppress(Exception):
        folders.append(site.getusersitepackages())
    folders += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return [folder for at, folder in enumerate(folders) if folder not in folders[:at]]


def searched_folders() -> List[str]:
    """Returns the folders that this interpreter searches, including those of ``.pth`` files."""
    return list(dict.fromkeys([*library_folders(), *filter(os.path.isabs, sys.path)]))


def parse_torch_version(text: str) -> Facts:
    """Reads ``torch/version.py``: version, CUDA, HIP and XPU it was built for."""
    versions: Facts = {}
    for key in ("__version__", "cuda", "hip", "xpu", "git_version"):
        match = re.search(r"^%s\b[^=]*=\s*['\"]([^'\"]*)['\"]" % key, text, re.MULTILINE)
        versions[key.strip("_")] = match.group(1) if match else None
    return versions


def torch_facts() -> Optional[Facts]:
    """Returns facts of the torch that would be imported, from its files; ``None`` if missing."""
    for folder in searched_folders():
        path = Path(folder) / "torch" / "version.py"
        with contextlib.suppress(OSError):
            return dict(parse_torch_version(path.read_text()), path=str(path.parent))
    return None


def interface_facts() -> List[Facts]:
    """Lists interfaces: name, kind, state, MTU, speed in Mbit/s (-1: unknown), addresses."""
    addresses = netlink.addresses()
    return [
        dict(_link(name), addresses=[a for a in addresses if a["interface"] == name])
        for _, name in socket.if_nameindex()
    ]


def _link(name: str) -> Facts:
    folder = Path("/sys/class/net") / name
    return {
        "name": name,
        "kind": _link_kind(name, folder),
        "state": read_text(folder / "operstate") or "unknown",
        "mtu": int(read_text(folder / "mtu") or 0),
        "speed": int(read_text(folder / "speed") or -1),
    }


def _link_kind(name: str, folder: Path) -> str:
    if name == "lo" or read_text(folder / "type") == "772":
        return "loopback"
    if (folder / "bridge").exists():
        return "bridge"
    if (folder / "tun_flags").exists():
        return "tun"
    if (folder / "wireless").exists():
        return "wireless"
    if (folder / "device").exists():
        return "hardware"
    return "virtual"


def name_facts() -> Facts:
    """Returns the host name and its addresses here, with the lines of /etc/hosts for it."""
    name = socket.gethostname()
    lines = hosts_lines(read_text("/etc/hosts"), name)
    return {"hostname": name, "resolves_to": resolve_name(name), "hosts_lines": lines}


def resolve_name(name: str) -> Optional[List[str]]:
    """Resolves a name to addresses; ``None`` if the name server does not answer in time."""
    addresses: List[str] = []

    def query() -> None:
        with contextlib.suppress(OSError):
            entries = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
            addresses.extend(sorted({str(entry[4][0]) for entry in entries}))

    thread = threading.Thread(target=query, daemon=True)  # a dead name server blocks for long
    thread.start()
    thread.join(RESOLVE_TIMEOUT_S)
    return None if thread.is_alive() else addresses


def hosts_lines(text: str, name: str) -> List[str]:
    """Returns the lines of a hosts file that contain ``name``: ``"2: 127.0.1.1 n1"``."""
    short_name = name.split(".")[0]
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("#")[0].split()
        if name in fields[1:] or short_name in fields[1:]:
            lines.append("%d: %s" % (number, line.strip()))
    return lines


def cpu_facts(root: Path = accelerators.ROOT) -> Facts:
    """CPUs this process may use, in order, their cores and NUMA nodes; the model's name.

    ``cores``: the allowed CPUs of each core, several where it runs several threads; ``nodes``: the
    allowed CPUs of each NUMA node that has some; ``quota``: CPUs' worth of time that a container
    gets, null for all.
    """
    allowed = os.sched_getaffinity(0)
    model = re.search(r"^model name\s*:\s*(.*)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return {
        "available": sorted(allowed),
        "cores": cpu_cores(allowed, root),
        "nodes": numa_nodes(allowed, root),
        "quota": cpu_quota(root),
        "model": model.group(1) if model else platform.machine(),
        "machine": platform.machine(),
    }


def cpu_cores(allowed: Set[int], root: Path = accelerators.ROOT) -> List[List[int]]:
    """Groups the allowed CPUs by core; a CPU whose core is unknown gets a group of its own."""
    groups = set()
    for cpu in allowed:
        folder = root / ("sys/devices/system/cpu/cpu%d/topology" % cpu)
        text = read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list")
        groups.add(tuple(sorted((parse_cpu_list(text) | {cpu}) & allowed)))
    return [list(core) for core in sorted(groups)]


def numa_nodes(allowed: Set[int], root: Path = accelerators.ROOT) -> Dict[str, List[int]]:
    """Groups the allowed CPUs by NUMA node; empty if the kernel reports none."""
    nodes = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        cpus = sorted(parse_cpu_list(read_text(folder / "cpulist")) & allowed)
        if cpus:
            nodes[folder.name[len("node") :]] = cpus
    return nodes


def parse_cpu_list(text: str) -> Set[int]:
    """Parses a list in the kernel's format: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    cpus: Set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            cpus.update(range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1))
    return cpus


def cpu_quota(root: Path = accelerators.ROOT) -> Optional[float]:
    """Returns how many CPUs' worth of time the control groups allow; ``None`` for no limit."""
    limits = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2, is_v1 = not controllers, "cpu" in controllers.split(",")
        base = root / ("sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/cpu")
        folder = base / path.lstrip("/")
        while (is_v2 or is_v1) and ".." not in folder.parts:
            v1_files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
            fields = read_text(folder / "cpu.max").split() or [*map(read_text, v1_files)]
            if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]):
                limits.append(int(fields[0]) / int(fields[1]))
            if folder == base:
                break
            folder = folder.parent
    return min(limits, default=None)


def memory_facts() -> Facts:
    """Returns total and available memory in bytes."""
    total, available = host_load.memory_bytes(read_text("/proc/meminfo"))
    return {"total": total, "available": available}


def device_facts() -> Facts:
    """Returns GPUs from the kernel's files, and the version of NVIDIA's driver."""
    text = read_text(Path("/proc/driver/nvidia/version"))
    version = re.search(r"Kernel Module\D*([\d.]+)", text)
    driver = version.group(1) if version else None
    # the open driver hands out its memory by dma-buf, the other one needs a module for that
    direct = "Open Kernel Module" in text or any(
        Path("/sys/module", module).exists() for module in ("nvidia_peermem", "nv_peer_mem")
    )
    return {"gpus": accelerators.find_gpus(), "nvidia_driver": driver, "gpudirect": direct}


def rdma_facts(folder: str = "/sys/class/infiniband",
               devices: str = "/dev/infiniband") -> List[Facts]:  # fmt: skip
    """Ports of cards that bypass the kernel (InfiniBand, RoCE, EFA): speed in Mbit/s, -1 unknown.

    ``active`` are those that are connected and that this process may open. ``interfaces`` are those
    of the kernel that belong to the same card. ``fabric`` names a port's InfiniBand network.
    ``gids`` are the addresses of a port that speaks RoCE v2, without link-local ones.
    """
    ports = []
    for port in sorted(Path(folder).glob("*/ports/[0-9]*")):
        card = port.parent.parent
        # in a container the kernel's files may be there without the devices
        verbs = [Path(devices, file.name) for file in (card / "device/infiniband_verbs").glob("*")]
        is_accessible = not verbs or any(os.access(str(d), os.R_OK | os.W_OK) for d in verbs)
        rate = re.match(r"([\d.]+) Gb/sec", read_text(port / "rate"))
        ports.append({
            "name": card.name,
            "port": int(port.name),
            "active": is_accessible and read_text(port / "state").endswith("ACTIVE"),
            "speed": int(float(rate.group(1)) * 1000) if rate else -1,
            "interfaces": sorted(link.name for link in (card / "device" / "net").glob("*")),
            "fabric": infiniband_fabric(port),
            "gids": roce_addresses(port),
        })  # fmt: skip
    return ports


def infiniband_fabric(port: Path) -> str:
    """Names the network of an InfiniBand port by subnet prefix and subnet manager; else empty."""
    prefix, manager = read_text(port / "gids" / "0")[:19], read_text(port / "sm_lid")
    if read_text(port / "link_layer") != "InfiniBand" or not (prefix and manager):
        return ""
    return "InfiniBand %s, subnet manager %s" % (prefix, manager)


def roce_addresses(port: Path) -> List[Facts]:
    """Returns the addresses of a RoCE v2 port, each with its index in the table of GIDs."""
    addresses = []
    kinds = (port / "gid_attrs" / "types").glob("[0-9]*")
    for kind in sorted(kinds, key=lambda path: int(path.name)):
        gid = read_text(port / "gids" / kind.name).replace(":", "")
        # an index without an address cannot be read
        if read_text(kind) == "RoCE v2" and re.match("[0-9a-f]{32}$", gid):
            address = ipaddress.IPv6Address(int(gid, 16))
            if address.ipv4_mapped or not (address.is_link_local or address.is_unspecified):
                text = str(address.ipv4_mapped or address)
                addresses.append({"index": int(kind.name), "address": text})
    return addresses


def nccl_conf_facts() -> Facts:
    """Returns the variables that NCCL reads from files."""
    files = ("/etc/nccl.conf", "~/.nccl.conf")
    lines = [line for file in files for line in read_text(Path(file).expanduser()).splitlines()]
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    names = ((name.strip(), value.strip()) for name, _, value in pairs)
    return {name: value for name, value in names if re.match("[A-Z0-9_]{1,64}$", name)}


def limit_facts() -> Facts:
    """Returns limits of open files, locked memory and /dev/shm (bytes); -1 for no limit."""

    def limit(which: int, hard: bool = False) -> int:
        value = resource.getrlimit(which)[hard]
        return -1 if value == resource.RLIM_INFINITY or value > snapshot.MAX_BYTES else value

    return {
        "nofile": limit(resource.RLIMIT_NOFILE),
        "nofile_hard": limit(resource.RLIMIT_NOFILE, hard=True),
        "memlock": limit(resource.RLIMIT_MEMLOCK),
        "shm": disk_facts("/dev/shm").get("total", 0),  # noqa: S108 - its size is the fact
    }


def disk_facts(path: str) -> Facts:
    """Returns size and free bytes of the file system that holds ``path`` or a parent of it."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(str(folder))
    except OSError:
        return {"path": str(folder)}
    return {
        "path": str(folder),
        "total": min(usage.total, snapshot.MAX_BYTES),  # network disks report 8 EiB
        "free": min(usage.free, snapshot.MAX_BYTES),
        "writable": os.access(str(folder), os.W_OK),
        "noexec": bool(os.statvfs(str(folder)).f_flag & os.ST_NOEXEC),
    }


def ephemeral_ports() -> List[int]:
    """Returns the first and last port of the kernel's ephemeral range."""
    bounds = read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    return [int(bound) for bound in bounds] if len(bounds) == 2 else [32768, 60999]


def clock_facts() -> Facts:
    """Returns the wall clock in seconds since 1970, and the monotonic clock."""
    return {"time": time.time(), "monotonic": time.monotonic()}


def user_facts() -> Facts:
    """Who runs the agent; ``cache``: the folder below which it builds what it is sent."""
    home, cache = str(Path("~").expanduser()), str(snapshot.cache_folder())
    return {"uid": os.getuid(), "home": home, "shell": os.environ.get("SHELL"), "cache": cache}


_REPORTED_VARIABLES = re.compile(
    r"(NCCL|GLOO|TP|UCX|FI|I_MPI|OMP|TORCH|CCL)_[A-Z_]+|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|ZE_AFFINITY_MASK|ZE_FLAT_DEVICE_HIERARCHY|ONEAPI_DEVICE_SELECTOR"
    r"|PYTHON(HOME|PATH|USERBASE|NOUSERSITE|SAFEPATH|WARNINGS|OPTIMIZE)"
    r"|LD_(LIBRARY_PATH|PRELOAD|AUDIT)"
)


def environment_facts() -> Facts:
    """Returns the login's variables that change how jobs communicate or what they load."""
    return {name: os.environ[name] for name in filter(_REPORTED_VARIABLES.fullmatch, os.environ)}


def disks_facts() -> Facts:
    """Returns facts of the disks that every job uses: the cache, temporary files, /dev/shm."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - its room is the fact
    shm = "/dev/shm"  # noqa: S108
    return {"cache": disk_facts(cache), "tmp": disk_facts(temporary), "shm": disk_facts(shm)}


FACTS: Dict[str, Callable[[], Any]] = {
    "python": python_facts,
    "torch": torch_facts,
    "interfaces": interface_facts,
    "name": name_facts,
    "cpu": cpu_facts,
    "memory": memory_facts,
    "devices": device_facts,
    "rdma": rdma_facts,
    "nccl_conf": nccl_conf_facts,
    "limits": limit_facts,
    "ephemeral_ports": ephemeral_ports,
    "clock": clock_facts,
    "user": user_facts,
    "environment": environment_facts,
    "disks": disks_facts,
    "kernel": platform.release,
    "boot_id": lambda: read_text(Path("/proc/sys/kernel/random/boot_id")),
}


def gather() -> Facts:
    """Gathers all facts; a missing one is ``None``, with the reason under ``errors``."""
    facts: Facts = {"errors": {}}
    for name, read in FACTS.items():
        try:
            facts[name] = read()
        except Exception as error:  # a fact that fails must not take the others with it
            facts[name] = None
            facts["errors"][name] = "%s: %s" % (type(error).__name__, error)
    return facts
