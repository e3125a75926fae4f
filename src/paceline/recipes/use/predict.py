"""Predict the classes of images or texts: ``paceline predict RUN INPUT…``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from paceline.recipes.argv import check_at_least, run_command
from paceline.recipes.use import PredictOptions
from paceline.recipes.use.evaluate import module_of
from paceline.spec.errors import PacelineError, SettingError
from paceline.spec.terminal import clean_line


@dataclass(frozen=True)
class Prediction:
    """Prediction for one input.

    Attributes:
        name: File or text.
        probabilities: Of each class, float32, shape ``[classes]``; ``None`` after an error.
    """

    name: str
    probabilities: Tensor | None
    classes: tuple[str, ...]
    error: PacelineError | None = None

    def top(self, top_k: int) -> list[tuple[str, float]]:
        """Returns the likeliest classes with their probabilities, in descending order."""
        assert self.probabilities is not None
        values, places = self.probabilities.topk(min(top_k, len(self.classes)))
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        return [(self.classes[place], value) for place, value in pairs]

    def line(self, top_k: int) -> str:
        """Returns a line with the likeliest classes and their probabilities."""
        text = f"{self.name}: " + "  ".join(f"{name} {p:.4f}" for name, p in self.top(top_k))
        return clean_line(text)  # a model's class names may come from a stranger

    def to_json(self, top_k: int) -> str:
        """Returns a JSON object: input, class, probabilities of the likeliest classes."""
        ranked = self.top(top_k)
        content = {"input": self.name, "class": ranked[0][0], "probabilities": dict(ranked)}
        text = json.dumps(content, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(content)


def predict(options: PredictOptions) -> int:
    """Prints one line for each input; returns 1 if one could not be read."""
    check_at_least("--top-k", options.top_k, 1)
    if not options.inputs:
        raise SettingError("nothing was named to predict", remedy="paceline predict RUN FILE…")
    failed = 0
    for prediction in module_of(options.run).predictions(options):
        if prediction.error is not None:
            print(prediction.error.render(), file=sys.stderr, flush=True)
            failed = 1
        else:
            render = prediction.to_json if options.json else prediction.line
            print(render(options.top_k), flush=True)
    return failed


main = partial(run_command, predict, PredictOptions, "paceline predict")


if __name__ == "__main__":
    sys.exit(main())
