"""Tell the class of image files: ``paceline predict RUN IMAGE…``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.datasets.folder import decode
from paceline.recipes.evaluate_options import PredictOptions
from paceline.recipes.options import at_least, parse
from paceline.recipes.running import guarded
from paceline.recipes.trained import Trained, trained
from paceline.spec.errors import DataError, SettingError


def predict(options: PredictOptions) -> int:
    """Prints one line for each image; returns 1 when an image could not be read."""
    at_least("--top-k", options.top_k, 1)
    if not options.images:
        raise SettingError("no image was named", remedy="paceline predict RUN IMAGE…")
    model = trained(options.run)
    failed = 0
    with train.join(device=options.device, dtype=model.config["dtype"], quiet=True) as session:
        network = session.place(model.network()).eval()
        model.load(network)
        for name in options.images:
            try:
                chances = probabilities(session, model, network, Path(name))
            except DataError as error:
                print(error.render(), file=sys.stderr, flush=True)
                failed = 1
            else:
                print(f"{name}: {ranking(chances, model.classes, options.top_k)}", flush=True)
    return failed


@torch.inference_mode()
def probabilities(
    session: train.Session, model: Trained, network: nn.Module, image: Path
) -> Tensor:
    """Probability of each class, float32, shape ``[classes]``.

    Raises:
        DataError: The file is no readable image.
    """
    pixels = decode(image, *model.shape)[None]
    inputs = model.normalise(pixels, session.precision.parameters).to(session.device)
    with session.autocast():
        outputs: Tensor = network(inputs)
    return outputs[0].float().softmax(0).cpu()


def ranking(chances: Tensor, classes: Sequence[str], top_k: int) -> str:
    """The likeliest classes with their probabilities, likeliest first."""
    values, places = chances.topk(min(top_k, len(classes)))
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    return "  ".join(f"{classes[place]} {value:.4f}" for place, value in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the prediction in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: predict(parse(PredictOptions, flags, "paceline predict")))


if __name__ == "__main__":
    sys.exit(main())
