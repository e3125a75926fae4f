"""Tell the classes of images or texts: ``paceline predict RUN INPUT…``.

One line for each input, with the likeliest classes and their probabilities.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.program import guarded
from paceline.recipes import use_of
from paceline.recipes.argv import at_least, parse
from paceline.recipes.use import PredictOptions
from paceline.recipes.use.evaluate import task_of
from paceline.spec.errors import PacelineError, SettingError


@dataclass(frozen=True)
class Guess:
    """What a model says of one input.

    Attributes:
        name: The file or the text.
        chances: Probability of each class, float32, shape ``[classes]``; ``None`` after an error.
        classes: Name of each class.
        error: Why there is no guess.
    """

    name: str
    chances: Tensor | None
    classes: tuple[str, ...]
    error: PacelineError | None = None

    def best(self, top_k: int) -> list[tuple[str, float]]:
        """The likeliest classes with their probabilities, likeliest first."""
        assert self.chances is not None
        values, places = self.chances.topk(min(top_k, len(self.classes)))
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        return [(self.classes[place], value) for place, value in pairs]

    def line(self, top_k: int) -> str:
        """For people."""
        return f"{self.name}: " + "  ".join(f"{name} {p:.4f}" for name, p in self.best(top_k))

    def to_json(self, top_k: int) -> str:
        """One JSON object: input, class, probabilities of the likeliest classes."""
        best = self.best(top_k)
        content = {"input": self.name, "class": best[0][0], "probabilities": dict(best)}
        return json.dumps(content, ensure_ascii=False)


def predict(options: PredictOptions) -> int:
    """Prints one line for each input; returns 1 when one of them could not be read."""
    at_least("--top-k", options.top_k, 1)
    if not options.inputs:
        raise SettingError("nothing was named to predict", remedy="paceline predict RUN FILE…")
    failed = 0
    for guess in use_of(task_of(options.run)).guesses(options):
        if guess.error is not None:
            print(guess.error.render(), file=sys.stderr, flush=True)
            failed = 1
        else:
            text = guess.to_json(options.top_k) if options.json else guess.line(options.top_k)
            print(text, flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the prediction in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: predict(parse(PredictOptions, flags, "paceline predict")))


if __name__ == "__main__":
    sys.exit(main())
