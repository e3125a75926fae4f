"""Trainings of a tiny language model on several ranks, in forked processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import forked_worlds
import torch
from recipe_worlds import killed_after, result

from paceline.recipes.language.language import main

FOLDER = Path(sys.argv[1])
FLAGS = (
    *(f"--data={FOLDER}/sums.txt", "--device=cpu", "--dtype=float64", "--log-every=1"),
    *("--depth=2", "--vocab-size=300", "--max-length=16", "--global-batch=7", "--micro-batch=2"),
    *("--lr=0.01", "--steps=8", "--evaluate-every=4"),
)


def run(name: str, *flags: str) -> None:
    torch.set_num_threads(1)
    if status := main([*FLAGS, f"--run-dir={FOLDER}/{name}", *flags]):
        raise SystemExit(status)


if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = str(FOLDER / "cache")
    lines = (f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(200))
    (FOLDER / "sums.txt").write_text("".join(lines))
    for size in (4, 3, 2, 1):  # the four ranks share a disk that has no tokens yet
        forked_worlds.run_ok(size, partial(run, f"world{size}"))
    every = ("--checkpoint-every=3",)
    statuses = forked_worlds.run(2, partial(killed_after, 5, partial(run, "killed", *every)))
    assert statuses[0] == -signal.SIGKILL, statuses
    forked_worlds.run_ok(2, partial(run, "killed", *every))
    names = ("world1", "world2", "world3", "world4", "killed")
    print(json.dumps({name: result(FOLDER / name) for name in names}))
