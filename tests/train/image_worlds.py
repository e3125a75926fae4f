"""Runs the image recipe in forked worlds of several sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import forked_worlds
import torch

from paceline.recipes import image


def main() -> None:
    """Leaves the runs in FOLDER/1, FOLDER/2 and FOLDER/4; arguments: FOLDER FLAGS…."""
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    for size in (1, 2, 4):
        forked_worlds.run_ok(size, lambda size=size: sys.exit(trained(folder / str(size), flags)))


def trained(folder: Path, flags: list[str]) -> int:
    torch.set_num_threads(1)
    return image.main([f"--run-dir={folder}", "--device=cpu", *flags])


if __name__ == "__main__":
    main()
