"""Runs several ranks over NCCL on one GPU, which NCCL takes for GPUs of several hosts."""

from __future__ import annotations

import os

from paceline.train import device as devices

KIND = "cuda"


def share() -> None:
    """Makes this rank's sessions use the first GPU, and NCCL treat it as a host of its own."""
    os.environ |= {
        "NCCL_HOSTID": f"slot{os.environ.get('RANK', '0')}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    choose = devices.choose_device
    devices.choose_device = lambda requested, available, local_rank: choose(KIND, available, 0)
