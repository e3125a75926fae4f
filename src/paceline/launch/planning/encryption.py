"""Whether the connections of a job can be encrypted (``--encrypt``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.spec.errors import SettingError
from paceline.spec.job import Job
from paceline.spec.jobenv import STORE

INTERFACE = "lo"
"""Where gloo listens in processes that are no ranks: nothing of theirs leaves the host."""
_WIREGUARD = (
    "Leave --encrypt out, connect the hosts with WireGuard (wg-quick(8)), and add --iface wg0"
)


def check(job: Job, closes_store: bool, gpus: Mapping[str, Sequence[Any]]) -> None:
    """Raises SettingError if a part of the job would not be encrypted.

    Args:
        closes_store: Agents carry all connections to the store.
        gpus: By host, the GPUs on which its ranks compute.
    """
    if not job.encrypt.value:
        return
    if job.backend not in (None, "gloo"):
        raise _refusal(f"--backend {job.backend} has connections of its own", _WIREGUARD)
    if found := [host for host, present in gpus.items() if present]:
        raise _refusal(
            f"the ranks on {', '.join(found)} compute on GPUs and talk over NCCL, which has no"
            " encryption in torch's packages",
            f"{_WIREGUARD}. Or compute on CPUs: --env CUDA_VISIBLE_DEVICES=",
        )
    if job.entry.kind == "binary" or not job.needs_torch:
        raise _refusal(
            "programs started with --no-python or --no-torch open connections of their own",
            _WIREGUARD,
        )
    if not closes_store:
        given = job.environment.variables().get(STORE)
        reason = f"{STORE}={given} opens it" if given else "the script opens one by itself"
        raise _refusal(
            f"the rendezvous store is not closed: {reason}",
            "Leave that variable out, or have the script meet by env:// instead of an address",
        )


def _refusal(found: str, remedy: str) -> SettingError:
    return SettingError(
        "--encrypt: not all connections of this job can be encrypted", found=found, remedy=remedy
    )
