"""Run by the tests in one process that forks: the recipe sft in worlds of several sizes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forking

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import peft  # noqa: F401 - imported once for all worlds
import tiny_language_model
import torch
import transformers  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

from paceline.recipes.language.sft import main
from paceline.train import Session

FOLDER = Path(sys.argv[1])
FLAGS = (
    *(f"--model={FOLDER}/base", f"--data={FOLDER}/chat.jsonl", "--device=cpu", "--dtype=float64"),
    *("--epochs=2", "--global-batch=7", "--micro-batch=2", "--log-every=1", "--lr=0.01"),
    *("--max-length=200", "--samples=1", "--sample-tokens=3", "--lora-rank=4"),
)


def make_files() -> None:
    torch.set_num_threads(1)
    tiny_language_model.save(FOLDER / "base", kind="GPTNeoX")
    tiny_language_model.write_jsonl(FOLDER / "chat.jsonl", tiny_language_model.chats(24))


def run(name: str, *flags: str) -> None:
    torch.set_num_threads(1)
    if status := main([*FLAGS, f"--run-dir={FOLDER}/{name}", *flags]):
        raise SystemExit(status)


def killed_after(steps: int, body: Callable[[], None]) -> None:
    """Runs the body in a process that is killed after so many steps."""
    original, count = Session.step, 0

    def step(self: Session, *losses: Any, **values: Any) -> bool:
        nonlocal count
        has_stepped = original(self, *losses, **values)
        count += has_stepped
        if count == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return has_stepped

    Session.step = step  # type: ignore[method-assign]
    body()


def result(name: str) -> dict[str, Any]:
    folder = FOLDER / name
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    state = load_file(folder / "model/model.safetensors")
    losses: dict[str, dict[int, float]] = {"train": {}, "val": {}}
    for line in lines:
        if line["split"] in losses:
            losses[line["split"]][line["step"]] = line["loss"]
    values = torch.cat([state[key].flatten() for key in sorted(state)])
    return {**losses, "parameters": values.tolist()}


if __name__ == "__main__":
    forking.run_ok(1, make_files)
    for size in (1, 2, 3):
        forking.run_ok(size, partial(run, f"world{size}"))
    forking.run_ok(1, partial(run, "single_rows", "--no-pack", "--micro-batch=0"))
    forking.run_ok(2, partial(run, "recomputed", "--gradient-checkpointing"))
    every = ("--checkpoint-every=3",)
    statuses = forking.run(2, partial(killed_after, 5, partial(run, "killed", *every)))
    assert statuses[0] == -signal.SIGKILL, statuses
    forking.run_ok(2, partial(run, "killed", *every))
    names = ("world1", "world2", "world3", "single_rows", "recomputed", "killed")
    print(json.dumps({name: result(name) for name in names}))
