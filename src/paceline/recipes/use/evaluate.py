"""Evaluate a trained model: ``paceline evaluate RUN``.

Every rank evaluates its share; the result equals that of one process. What differs among recipes
is in the other modules of this package.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from torch import nn

from paceline import train
from paceline.recipes import load_use_module
from paceline.recipes.argv import run_command
from paceline.recipes.options import Dtype
from paceline.recipes.use import EvaluateOptions
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.spec.errors import DataError, SettingError
from paceline.spec.schema import (
    InvalidValue,
    Schema,
    any_json,
    choice,
    integer,
    number,
    record,
    reject,
    text,
)
from paceline.train.weights import build_limited, fill, saved_state

if TYPE_CHECKING:
    from paceline.recipes.data.images import ImageData
    from paceline.recipes.data.pairs import PairData
    from paceline.recipes.data.texts import TextData
    from paceline.recipes.language.corpus import Corpus
    from paceline.recipes.language.sft import ChatData


def _fraction(value: Any, path: str) -> None:
    number(value, path)
    if not 0 <= value < 1:
        reject(path, value, "a fraction")


_NUMBER_FORMAT = choice(*get_args(Dtype))
_SEED = integer(-(1 << 64), 1 << 64)
_SPLIT = record(
    {"val_fraction": _fraction, "test_fraction": _fraction, "seed": _SEED}, method=text()
)


def description_schema(
    data: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **fields: Schema
) -> Schema:
    """Returns the schema of a model's ``config.json``: what all recipes record, and more fields.

    Args:
        data: Schemas of what one recipe records about its data.
        optional: Schemas of fields that may be missing.
    """
    common = {"source": text(), "config": text(), "fingerprint": text(), "split": _SPLIT}
    return record(
        optional, data=record({}, **common, **data), number_format=_NUMBER_FORMAT, **fields
    )


def evaluate_run(options: EvaluateOptions) -> None:
    """Runs one evaluation; called on every rank."""
    if options.tasks:
        importlib.import_module("paceline.recipes.use.tasks").evaluate_tasks(options)
        return
    if options.limit:
        raise SettingError("--limit has no effect without --tasks", remedy="leave it out")
    module_of(options.run).evaluate_run(options)


def module_of(run: str) -> Any:
    """Imports the module that uses the model of a run; see :func:`load_use_module`."""
    if not run:
        raise SettingError("--run is missing", remedy="--run runs/image-…")
    return load_use_module(str(train.load_config(Path(run)).get("task", "")))


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, described by ``model/config.json``.

    Attributes:
        folder: Run directory.
    """

    folder: Path
    config: dict[str, Any]

    def network(self) -> nn.Module:
        """Builds the network, with initial weights."""
        raise NotImplementedError

    def load(self, session: train.Session) -> nn.Module:
        """Loads the trained network on the session's device."""
        path, state = saved_state(self.folder)
        network = session.place(build_limited(self.network, state))
        fill(network, path, state)
        return network

    def load_float32(self) -> nn.Module:
        """Loads the trained network on the CPU, in float32 and in evaluation mode."""
        path, state = saved_state(self.folder)
        network = build_limited(self.network, state).eval()
        fill(network, path, state)
        return network.float()

    def load_or_open(self, session: train.Session, onnx: str, names: Sequence[str]) -> nn.Module:
        """Loads the network for predictions, from the file ``onnx`` if one is named."""
        if onnx:
            return OnnxNetwork(Path(onnx), names, self.config)
        return self.load(session).eval()


@contextmanager
def model_config(run: str, task: str, schema: Schema = any_json) -> Iterator[dict[str, Any]]:
    """Loads the description of a run's model and converts errors in using it to DataError.

    Args:
        schema: What its values have to be: a run may come from a stranger.

    Raises:
        SettingError: No run was named.
        DataError: The run has no model, or one of another recipe.
    """
    if not run:
        raise SettingError("--run is missing", remedy=f"--run runs/{task}-…")
    config = train.load_config(Path(run))
    try:
        if config["task"] != task:
            raise DataError(
                f"{run} holds no model of the {task} recipe",
                found=f"its model was trained by the recipe {config['task'] or '(unnamed)'}",
                remedy="paceline predict, translate and generate use models of different recipes",
            )
        schema(config, "the description")
        yield config
    except (KeyError, TypeError, ValueError, OSError, InvalidValue) as error:
        raise DataError(
            f"{run} holds no model of the {task} recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
            remedy="copy the run directory again from where it was trained",
        ) from None


def local_session(device: str, config: Mapping[str, Any]) -> train.Session:
    """Starts a session of this process only, in the precision of the training."""
    try:
        _NUMBER_FORMAT(config.get("number_format"), "number_format")
    except InvalidValue as error:
        raise DataError(
            "the run's model cannot be used", found=f"model/config.json: {error}"
        ) from None
    return train.join(device=device, dtype=config["number_format"], quiet=True)


Data = TypeVar("Data", "ImageData", "TextData", "PairData", "ChatData")


def undivided(
    options: EvaluateOptions, model: TrainedModel, data: Data, join: Callable[[list[Any]], Any]
) -> Data:
    """Returns data that have no parts of their own as one part, ``test``.

    The data of the training keep the part that was held out, and ``--split`` names a drawn part.

    Args:
        join: Joins parts.
    """
    is_drawn = data.split["method"] == "seeded"
    is_trained_on = data.fingerprint == model.config["data"]["fingerprint"]
    if not options.data or options.split or not is_drawn or is_trained_on:
        return data
    return replace(data, splits={"test": join([*data.splits.values()])}, split={"method": "whole"})


Measured = tuple[int, dict[str, float], str]
"""Number of samples, metrics over them, and a line about them."""


def run_evaluation(
    options: EvaluateOptions,
    model: TrainedModel,
    data: ImageData | TextData | PairData | ChatData | Corpus,
    measure: Callable[[train.Session, nn.Module, str], Measured],
) -> None:
    """Evaluates on a part of the data, in the precision of the training, and reports.

    Raises:
        DataError: The training's data have changed, and --data does not name others.
        SettingError: The data set has no part of this name.
    """
    recorded = model.config["data"]["fingerprint"]
    if not options.data and data.fingerprint != recorded:
        raise DataError(
            f"{data.source} has changed since the training",
            found=f"fingerprint {data.fingerprint}, trained on {recorded}",
            remedy=f"--data {data.source} evaluates on the data as they are now; if they have no"
            " parts, on all of them, so that what was trained on counts, too",
        )
    split = options.split or data.held_out
    if split not in data.splits:
        raise SettingError(
            f"--split {split}: the data set has no such part",
            found=f"it has {', '.join(data.splits)}",
            remedy=f"--split {data.held_out}",
        )
    with train.join(
        device=options.device,
        backend=options.backend,
        dtype=model.config["number_format"],
        run_dir=options.run,
        quiet=True,
    ) as session:
        session.agree("the data set", data.fingerprint)
        if data.split["method"] == "whole":
            session.say(f"{data.source} is not divided: all of it is evaluated")
        elif options.data and not options.split and data.split["method"] == "seeded":
            session.say(
                f"{data.source} is what the model was trained on: its {split} part is evaluated,"
                " which was held out"
            )
        samples, figures, summary = measure(session, model.load(session), split)
        if options.figures and session.world.rank == 0:
            content = {"split": split, "samples": samples, **figures}
            Path(options.figures).write_text(json.dumps(content) + "\n", encoding="utf-8")
        session.say(summary)


main = partial(run_command, evaluate_run, EvaluateOptions, "paceline evaluate")


if __name__ == "__main__":
    sys.exit(main())
