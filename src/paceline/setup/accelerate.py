"""Accelerate's configuration, a file for each machine: what `accelerate config` would ask there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Processes

KINDS = {"nvidia": "MULTI_GPU", "amd": "MULTI_GPU", "intel": "MULTI_XPU"}  # by a GPU's maker
PRECISIONS = ("no", "fp16", "bf16", "fp8")
INSTALLED = "~/.cache/huggingface/accelerate/default_config.yaml"
# MULTI_CPU would be its name, but that starts one process by itself, or all by mpirun
ON_CPUS = (
    "# Accelerate finds no GPU and trains on CPUs, with gloo. Its MULTI_CPU would start one\n"
    "# process that knows nothing of the other machines, unless mpirun starts it.\n"
)
# on the machine itself: what is there and differs is kept beside
INSTALL = """
import json, os, sys
text = {text}
home = os.environ.get("HF_HOME") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
file = os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")
os.makedirs(os.path.dirname(file), exist_ok=True)
old = open(file).read() if os.path.exists(file) else None
if old is not None and old != text:
    os.replace(file, file + ".before-paceline")
with open(file + ".new", "w") as out:
    out.write(text)
os.replace(file + ".new", file)
print(file)
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one file says of its own machine.

    Attributes:
        host: Which.
        makers: Makers of its GPUs, one entry a GPU; empty on CPUs.
        processes: How many to start there.
        interface: Of the address by which the others reach it.
    """

    host: Host
    makers: tuple[str, ...]
    processes: int
    interface: str = ""


def machine(host: Host, makers: Sequence[str], cpus: int, asked: Processes | None,
            interface: str) -> Machine:  # fmt: skip
    """A machine with as many processes as asked, else its slots, else one a GPU, else one.

    SettingError where one a GPU was asked for and it has none.
    """
    if asked == "gpu" and not makers:
        raise SettingError(
            f"--nproc-per-node gpu: {host.name} has no GPU",
            remedy="--nproc-per-node auto takes the CPUs where there is no GPU",
        )
    if isinstance(asked, str):
        asked = len(makers) if makers and asked != "cpu" else max(1, cpus)
    return Machine(host, tuple(makers), asked or host.slots or len(makers) or 1, interface)


def files(machines: Sequence[Machine], address: str, port: int,
          precision: str) -> dict[str, str]:  # fmt: skip
    """The text of every machine's file, by host.

    Args:
        machines: In rank order.
        address, port: Where the first listens.
        precision: Accelerate's mixed precision.

    Raises:
        SettingError: The machines are of different kinds, or are to start different numbers.
    """
    kind = distributed_type(machines)
    processes = sum(one.processes for one in machines)
    about = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": "false",
        "distributed_type": f"'{kind}'",
        "downcast_bf16": "'no'",
        "enable_cpu_affinity": "false",
        "main_process_ip": f"'{address}'",
        "main_process_port": str(port),
        "main_training_function": "main",
        "mixed_precision": f"'{precision}'",
        "num_machines": str(len(machines)),
        "num_processes": str(processes),
        "rdzv_backend": "static",
        "same_network": "true",
        "use_cpu": "false" if machines[0].makers else "true",
    }
    note = ON_CPUS if not machines[0].makers and kind != "NO" else ""
    return {
        one.host.name: note
        + "".join(f"{key}: {value}\n" for key, value in {**about, "machine_rank": rank}.items())
        for rank, one in enumerate(machines)
    }


def distributed_type(machines: Sequence[Machine]) -> str:
    """Accelerate's word for the kind of machine: NO for one process alone."""
    kinds = {one.host.name: _kind(one) for one in machines}
    if len(set(kinds.values())) > 1:
        raise SettingError(
            "Accelerate trains on machines of one kind",
            found="\n".join(f"{name}: {kind}" for name, kind in kinds.items()),
            remedy="Leave those of the other kind out: -H",
        )
    counts = {one.host.name: one.processes for one in machines}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise SettingError(
            "Accelerate starts equally many processes on every machine",
            found=listed,
            remedy=f"-p {min(counts.values())}; paceline run does without: -H HOSTS SCRIPT",
        )
    if sum(counts.values()) == 1:
        return "NO"
    makers = machines[0].makers
    return KINDS[makers[0]] if makers else "MULTI_GPU"


def _told(one: Machine) -> str:
    names = ("NCCL_SOCKET_IFNAME",) if one.makers else ("GLOO_SOCKET_IFNAME",)
    return "".join(f"{name}={one.interface} " for name in names if one.interface)


def _kind(one: Machine) -> str:
    makers = dict.fromkeys(one.makers)
    return " and ".join(makers) + " GPUs" if makers else "no GPU"


def commands(machines: Sequence[Machine], files_of: Mapping[str, str]) -> list[str]:
    """What to type on each machine: a YAML has no place for the interface.

    Args:
        machines: In rank order.
        files_of: By host, where its file is there; empty where it is the default one.
    """
    return [
        f"# on {one.host.name}:\n{_told(one)}accelerate launch"
        + (f" --config_file {files_of[one.host.name]}" if files_of[one.host.name] else "")
        + " SCRIPT"
        for one in machines
    ]
