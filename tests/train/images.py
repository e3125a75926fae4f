"""Run by the tests: the image recipe at several world sizes, in one process that forks."""

from __future__ import annotations

import sys
from pathlib import Path

import forking
import torch

from paceline.recipes import image


def main() -> None:
    """``images.py FOLDER FLAGS…`` leaves the runs in the folders 1, 2 and 4 there."""
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    for size in (1, 2, 4):
        forking.run_ok(size, lambda size=size: sys.exit(trained(folder / str(size), flags)))


def trained(folder: Path, flags: list[str]) -> int:
    torch.set_num_threads(1)
    return image.main([f"--run-dir={folder}", "--device=cpu", *flags])


if __name__ == "__main__":
    main()
