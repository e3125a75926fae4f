"""Runs, in forked worlds of several sizes, trainings on preferences (DPO)."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import forked_worlds
import sft_worlds
import tiny_language_model
import torch
from recipe_worlds import killed_after, result

FOLDER = sft_worlds.FOLDER


def make_files() -> None:
    torch.set_num_threads(1)
    tiny_language_model.save(FOLDER / "base", kind="GPTNeoX")
    tiny_language_model.write_jsonl(FOLDER / "data.jsonl", tiny_language_model.preferences(24))


def run(name: str, *flags: str) -> None:
    os.environ["XDG_CACHE_HOME"] = str(FOLDER / f"cache-{name}")  # each computes its own reference
    sft_worlds.run(name, "--objective=dpo", *flags)


if __name__ == "__main__":
    forked_worlds.run_ok(1, make_files)
    for size in (1, 2, 3, 4):
        forked_worlds.run_ok(size, partial(run, f"world{size}"))
    forked_worlds.run_ok(1, partial(run, "whole_batches", "--micro-batch=0"))
    every = ("--checkpoint-every=3",)
    statuses = forked_worlds.run(2, partial(killed_after, 5, partial(run, "killed", *every)))
    assert statuses[0] == -signal.SIGKILL, statuses
    forked_worlds.run_ok(2, partial(run, "killed", *every))
    names = ("world1", "world2", "world3", "world4", "whole_batches", "killed")
    print(json.dumps({name: result(FOLDER / name) for name in names}))
