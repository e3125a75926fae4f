"""Precision and memory layout that suit the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from paceline.train.device import choose_device, look


def fast_dtype(device: str) -> Literal["bf16", "float32"]:
    """``bf16`` where the device computes in it faster than in float32, else ``float32``."""
    target = choose_device(device, look(), 0)
    if target.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if target.type == "xpu":
        return "bf16"
    return "bf16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "float32"


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the CPU can do, as Linux names it; empty elsewhere."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())
