"""Runs the sft recipe in forked worlds of several sizes."""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path

import forked_worlds

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import peft  # noqa: F401 - imported once for all worlds
import tiny_language_model
import torch
import transformers  # noqa: F401
from recipe_worlds import killed_after, result
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

from paceline.recipes.language.sft import main

FOLDER = Path(sys.argv[1])
FLAGS = (
    *(f"--model={FOLDER}/base", f"--data={FOLDER}/data.jsonl", "--device=cpu", "--dtype=float64"),
    *("--epochs=2", "--global-batch=7", "--micro-batch=2", "--log-every=1", "--lr=0.01"),
    *("--max-length=200", "--samples=1", "--sample-tokens=3", "--lora-rank=4"),
)


def make_files() -> None:
    torch.set_num_threads(1)
    tiny_language_model.save(FOLDER / "base", kind="GPTNeoX")
    tiny_language_model.write_jsonl(FOLDER / "data.jsonl", tiny_language_model.chats(24))


def run(name: str, *flags: str) -> None:
    torch.set_num_threads(1)
    if status := main([*FLAGS, f"--run-dir={FOLDER}/{name}", *flags]):
        raise SystemExit(status)


if __name__ == "__main__":
    forked_worlds.run_ok(1, make_files)
    for size in (1, 2, 3, 4):
        forked_worlds.run_ok(size, partial(run, f"world{size}"))
    forked_worlds.run_ok(1, partial(run, "single_rows", "--no-pack", "--micro-batch=0"))
    forked_worlds.run_ok(2, partial(run, "recomputed", "--gradient-checkpointing"))
    every = ("--checkpoint-every=3",)
    statuses = forked_worlds.run(2, partial(killed_after, 5, partial(run, "killed", *every)))
    assert statuses[0] == -signal.SIGKILL, statuses
    forked_worlds.run_ok(2, partial(run, "killed", *every))
    names = ("world1", "world2", "world3", "world4", "single_rows", "recomputed", "killed")
    print(json.dumps({name: result(FOLDER / name) for name in names}))
