"""Which RDMA ports will NCCL use, and do they connect all hosts?

Looks at: the kernel's files on RDMA cards and GPUs, and the settings of NCCL.
Warns when: hosts have RDMA ports that cannot be used together, or data between a GPU and a card has
to pass through the host's memory.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, join_names, passed, warned
from paceline.remote.rdma import EXPLICIT, RdmaChoice, choose, usable_ports
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    explicit = {
        *survey.requirements.job_variables,
        *(name for host in survey.present for name in host.env),
    }
    if chosen := sorted(explicit & {*EXPLICIT}):
        return [passed("rdma", survey.names, f"{', '.join(chosen)} was given: left to NCCL")]
    choice = choose({name: survey.facts[name] for name in survey.names})
    used = {name: choice.on(name).get("NCCL_IB_HCA", "").lstrip("=") for name in survey.names}
    if not any(used.values()):
        return [_without_ports(survey, choice)]
    if indirect := [name for name in survey.names if not _is_direct(survey, name)]:
        message = f"GPUs and RDMA cards of {join_names(indirect)} exchange data through main memory"
        remedy = f"On {join_names(indirect)}: sudo modprobe nvidia-peermem"
        return [warned("rdma", indirect, message, remedy)]
    ports = ", ".join(f"{name} {names}" for name, names in used.items())
    return [passed("rdma", survey.names, f"NCCL will use {ports}: {choice.reason}")]


def _without_ports(survey: Survey, choice: RdmaChoice) -> Finding:
    if any(choice.variables.values()):
        ports = usable_ports({name: survey.facts[name] for name in survey.names})
        lacking = [name for name in survey.names if not ports[name]]
        remedy = f"On {join_names(lacking)}: ibstat; rdma link; ls -l /dev/infiniband. Connect a"
        remedy += " card, give it an address of its own, or let containers see /dev/infiniband"
        return warned("rdma", lacking, choice.reason, remedy)
    if choice.unknown:
        remedy = "If they do not reach each other, the job needs TCP: --env NCCL_NET=Socket"
        return warned("rdma", survey.names, choice.reason, remedy)
    return passed("rdma", survey.names, choice.reason)


def _is_direct(survey: Survey, name: str) -> bool:
    devices = survey.facts[name]["devices"]
    return devices.get("gpudirect") or all(gpu["maker"] != "nvidia" for gpu in devices["gpus"])


check = Check("rdma", "RDMA cards", evaluate, needs_several_hosts=True)
