"""Evaluate a trained model in a fresh process: ``paceline evaluate RUN``.

Also distributed: every rank takes its share and the figures are those of one process. What is
particular to a recipe is in its ``…_use`` module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import train
from paceline.program import guarded
from paceline.recipes import use_of
from paceline.recipes.argv import parse
from paceline.recipes.use import EvaluateOptions
from paceline.spec.errors import DataError, SettingError


def evaluate_run(options: EvaluateOptions) -> None:
    """One evaluation, on every rank."""
    use_of(task_of(options.run)).evaluate_run(options)


def task_of(run: str) -> str:
    """The recipe that trained a run's model.

    Raises:
        SettingError: No run was named.
        DataError: It holds no model.
    """
    if not run:
        raise SettingError("--run is missing", remedy="--run runs/image-…")
    return str(train.load_config(Path(run)).get("task", ""))


def alone(device: str, config: Mapping[str, Any]) -> train.Session:
    """A session for this process only, in the precision of the training."""
    return train.join(device=device, dtype=config["number_format"], quiet=True)


def joined(options: EvaluateOptions, config: Mapping[str, Any]) -> train.Session:
    """A session in the precision of the training, which leaves no records behind."""
    return train.join(
        device=options.device,
        backend=options.backend,
        dtype=config["number_format"],
        run_dir=options.run,
        quiet=True,
    )


def choose_split(splits: Collection[str], asked: str, usual: str) -> str:
    """The part to evaluate on."""
    if asked and asked not in splits:
        raise SettingError(
            f"--split {asked}: the data set has no such part",
            found=f"it has {', '.join(splits)}",
            remedy=f"--split {usual}",
        )
    return asked or usual


def check_unchanged(
    source: str, fingerprint: str, config: Mapping[str, Any], options: EvaluateOptions
) -> None:
    """Refuses data that changed since the training, unless data were named."""
    recorded = config["data"]["fingerprint"]
    if not options.data and fingerprint != recorded:
        raise DataError(
            f"{source} has changed since the training",
            found=f"fingerprint {fingerprint}, trained on {recorded}",
            remedy=f"--data {source} evaluates on the data as they are now",
        )


def report(
    session: train.Session,
    options: EvaluateOptions,
    split: str,
    samples: int,
    figures: Mapping[str, float],
) -> None:
    """Writes the figures where ``--json`` says, once."""
    if options.json and session.world.rank == 0:
        content = {"split": split, "samples": samples, **figures}
        Path(options.json).write_text(json.dumps(content) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the evaluation in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: evaluate_run(parse(EvaluateOptions, flags, "paceline evaluate")))


if __name__ == "__main__":
    sys.exit(main())
