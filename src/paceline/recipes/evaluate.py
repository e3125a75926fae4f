"""Evaluate a trained image model in a fresh process: ``paceline evaluate RUN``.

Also distributed: every rank takes its share and the figures are those of one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import train
from paceline.recipes.datasets.find import load
from paceline.recipes.datasets.images import ImageData
from paceline.recipes.evaluate_options import EvaluateOptions
from paceline.recipes.image import evaluate
from paceline.recipes.options import parse
from paceline.recipes.pictures import Pictures
from paceline.recipes.running import guarded
from paceline.recipes.trained import Trained, trained
from paceline.spec.errors import DataError, SettingError


def evaluate_run(options: EvaluateOptions) -> None:
    """One evaluation, on every rank."""
    model = trained(options.run)
    data = load(options.data_dir, model.request(options.data))
    check_same(model, data, options)
    split = choose_split(data, options.split)
    with train.join(
        device=options.device,
        backend=options.backend,
        dtype=model.config["dtype"],
        run_dir=options.run,
        quiet=True,
    ) as session:
        session.agree("the data set", data.fingerprint)
        network = session.place(model.network())
        model.load(network)
        pictures = Pictures(data.splits[split], model.normalise, session.precision.parameters)
        result = evaluate(session, network, pictures)
        if options.json and session.world.rank == 0:
            report = {"split": split, "samples": result.count, **result.values()}
            Path(options.json).write_text(json.dumps(report) + "\n", encoding="utf-8")
        hits = round(result.sums["accuracy"])
        session.say(f"accuracy {result['accuracy']:.4f} ({hits} of {result.count} {split} images)")


def choose_split(data: ImageData, asked: str) -> str:
    """The part to evaluate on."""
    split = asked or data.held_out
    if split not in data.splits:
        raise SettingError(
            f"--split {split}: the data set has no such part",
            found=f"it has {', '.join(data.splits)}",
            remedy=f"--split {data.held_out}",
        )
    return split


def check_same(model: Trained, data: ImageData, options: EvaluateOptions) -> None:
    """Refuses data that changed since the training, unless other data were asked for."""
    if data.shape != model.shape or data.classes != model.classes:
        raise DataError(
            f"{data.source} does not fit the model",
            found=f"data: {data.shape}, {len(data.classes)} classes;"
            f" model: {model.shape}, {len(model.classes)} classes",
        )
    recorded = model.config["data"]["fingerprint"]
    if not options.data and data.fingerprint != recorded:
        raise DataError(
            f"{data.source} has changed since the training",
            found=f"fingerprint {data.fingerprint}, trained on {recorded}",
            remedy=f"--data {data.source} evaluates on the data as they are now",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the evaluation in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: evaluate_run(parse(EvaluateOptions, flags, "paceline evaluate")))


if __name__ == "__main__":
    sys.exit(main())
