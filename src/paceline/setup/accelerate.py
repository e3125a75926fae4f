"""Writes Accelerate's configuration file for each machine, as `accelerate config` would there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Processes, count_processes

# by a GPU's maker
DISTRIBUTED_TYPES = {"nvidia": "MULTI_GPU", "amd": "MULTI_GPU", "intel": "MULTI_XPU"}
PRECISIONS = ("no", "fp16", "bf16", "fp8")
# MULTI_CPU starts one process by itself, or all by mpirun, so it cannot be used
CPU_NOTE = (
    "# Accelerate finds no GPU and trains on CPUs, with gloo. Its MULTI_CPU would start one\n"
    "# process that knows nothing of the other machines, unless mpirun starts it.\n"
)
# Runs on the machine itself; keeps a copy of a file that differs. The umask of a login may be 000.
INSTALL = """
import contextlib, os
os.umask(os.umask(0o077) | 0o022)
text = {text}
home = os.environ.get("HF_HOME") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
file = os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")
os.makedirs(os.path.dirname(file), exist_ok=True)
old = open(file).read() if os.path.exists(file) else None
if old is not None and old != text:
    os.replace(file, file + ".before-paceline")
with contextlib.suppress(FileNotFoundError):
    os.unlink(file + ".new")
with open(file + ".new", "x") as out:  # not through a link
    out.write(text)
os.replace(file + ".new", file)
print(file)
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine; ``makers`` has one entry for each GPU and is empty on CPUs.

    ``interface`` is the one by which the other machines reach it.
    """

    host: Host
    makers: tuple[str, ...]
    processes: int
    interface: str = ""


def machine(host: Host, makers: Sequence[str], cpus: int, requested: Processes | None,
            interface: str) -> Machine:  # fmt: skip
    """Returns a machine with the requested processes, else its slots, else one a GPU, else one.

    Raises:
        SettingError: One process a GPU was requested, and it has none.
    """
    if requested == "gpu" and not makers:
        raise SettingError(
            f"--nproc-per-node gpu: {host.name} has no GPU",
            remedy="--nproc-per-node auto takes the CPUs where there is no GPU",
        )
    processes = host.slots or len(makers) or 1
    if requested is not None:
        processes = count_processes(requested, len(makers), cpus)
    return Machine(host, tuple(makers), processes, interface)


def files(machines: Sequence[Machine], address: str, port: int,
          precision: str) -> dict[str, str]:  # fmt: skip
    """Returns the text of every machine's file, by host; ``machines`` are in rank order.

    Raises:
        SettingError: The machines differ in kind or in the number of processes.
    """
    kind = distributed_type(machines)
    processes = sum(machine.processes for machine in machines)
    settings = {
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
    note = CPU_NOTE if not machines[0].makers and kind != "NO" else ""
    text = note + "".join(f"{key}: {value}\n" for key, value in settings.items())
    return {machine.host.name: f"{text}machine_rank: {rank}\n"
            for rank, machine in enumerate(machines)}  # fmt: skip


def distributed_type(machines: Sequence[Machine]) -> str:
    """Returns Accelerate's distributed type; NO for a single process."""
    kinds = {}
    for machine in machines:
        makers = dict.fromkeys(machine.makers)
        kinds[machine.host.name] = " and ".join(makers) + " GPUs" if makers else "no GPU"
    if len(set(kinds.values())) > 1:
        raise SettingError(
            "Accelerate trains on machines of one kind",
            found="\n".join(f"{name}: {kind}" for name, kind in kinds.items()),
            remedy="Leave those of the other kind out: -H",
        )
    counts = {machine.host.name: machine.processes for machine in machines}
    if len(set(counts.values())) > 1:
        summary = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise SettingError(
            "Accelerate starts equally many processes on every machine",
            found=summary,
            remedy=f"-p {min(counts.values())}; paceline run does without: -H HOSTS SCRIPT",
        )
    if sum(counts.values()) == 1:
        return "NO"
    return DISTRIBUTED_TYPES[machines[0].makers[0]] if machines[0].makers else "MULTI_GPU"


def commands(machines: Sequence[Machine], files_of: Mapping[str, str]) -> list[str]:
    """Returns the command to type on each machine; it sets the interface, which YAML cannot.

    Args:
        files_of: Path of the file on the machine, by host; empty for the default file.
    """
    lines = []
    for machine in machines:
        library, name = "NCCL" if machine.makers else "GLOO", machine.host.name
        variable = f"{library}_SOCKET_IFNAME={machine.interface} " if machine.interface else ""
        option = f" --config_file {files_of[name]}" if files_of[name] else ""
        lines.append(f"# on {name}:\n{variable}accelerate launch{option} SCRIPT")
    return lines
