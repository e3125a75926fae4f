"""Loading and evaluation of fine-tuned language models."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch import nn

from paceline import train
from paceline.recipes.language.adapters import TrainedPart, add_adapters, place
from paceline.recipes.language.base_model import BaseModel, content_hash, settings_hash
from paceline.recipes.language.base_quantization import quantize_base
from paceline.recipes.language.conversations import TEXT_FORMATS, Message
from paceline.recipes.language.options import SftOptions
from paceline.recipes.language.references import Reference, without_adapters
from paceline.recipes.language.sft import (
    EVALUATION_BATCH,
    add_end_tokens,
    encode_conversations,
    evaluate,
    load_conversations,
    make_encoder,
    make_objective,
    summary,
)
from paceline.recipes.use import EvaluateOptions
from paceline.recipes.use.evaluate import (
    Measured,
    TrainedModel,
    description_schema,
    model_config,
    run_evaluation,
    undivided,
)
from paceline.recipes.use.language_models import Generator, portable, predictions
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.spec.schema import boolean, choice, integer, number, text

__all__ = ["evaluate_run", "load_generator", "portable", "predictions"]


_TYPES = get_type_hints(SftOptions)
_CHOICES = {
    name: choice(*get_args(_TYPES[name])) for name in ("method", "objective", "system", "too_long")
}
_DESCRIPTION = description_schema(
    {"test": text(), "format": text()},
    {"objective": _CHOICES.pop("objective"), "dpo_beta": number, "base_settings": text()},
    **_CHOICES,
    model=text(),
    base=text(),
    lora_rank=integer(1),
    lora_alpha=number,
    chat_template=text(),
    max_length=integer(2),
    pack=boolean,
    skip_damaged=boolean,
)


@dataclass(frozen=True)
class TrainedLanguageModel(TrainedModel):
    """A fine-tuned language model; the run has what was trained, and its base is loaded again."""

    def options(self, evaluation: EvaluateOptions) -> SftOptions:
        """Returns the options of the training, with other data if they are named."""
        config, recorded = self.config, self.config["data"]
        return SftOptions(
            model=config["model"],
            method=config["method"],
            lora_rank=config["lora_rank"],
            lora_alpha=config["lora_alpha"],
            objective=config.get("objective", "sft"),
            dpo_beta=config.get("dpo_beta", SftOptions.dpo_beta),
            chat_template=config["chat_template"],
            system=config["system"],
            max_length=config["max_length"],
            too_long=config["too_long"],
            pack=config["pack"],
            skip_damaged=config["skip_damaged"],
            data=evaluation.data or recorded["source"],
            data_dir=evaluation.data_dir,
            data_config="" if evaluation.data else recorded["config"],
            test_data="" if evaluation.data else recorded["test"],
            val_fraction=recorded["split"].get("val_fraction", 0.1),
            seed=recorded["split"].get("seed", 0),
        )

    def load(self, session: train.Session) -> TrainedPart:
        """Loads the base, and the trained weights into it.

        Raises:
            DataError: The base is not the one of the training.
        """
        network = self.load_initial(session)
        train.load_weights(self.folder, network)
        return network

    def load_initial(self, session: train.Session) -> TrainedPart:
        """Loads the base as the training has started with it.

        Raises:
            DataError: The base is not the one of the training.
        """
        config = self.config
        model = BaseModel(config["model"]).load()
        if content_hash(model) != config["base"]:
            raise DataError(
                f"--model {config['model']} is not the base of the training",
                found=f"content {content_hash(model)}, trained on {config['base']}",
                remedy="put the model of the training there again",
            )
        expected = config.get("base_settings", "").removesuffix(" nf4")
        if expected not in ("", settings_hash(model)):  # or another version of transformers
            text = f"warning: the settings (config.json) of {config['model']} have changed"
            print(f"{text} since the training: results may differ", file=sys.stderr)
        method = config["method"]
        if method == "qlora" and session.device.type == "cuda":
            model = quantize_base(model, session.device)
        elif method == "qlora":  # the adapters also fit to the base as it was
            method = "lora"
        adapted = add_adapters(model, method, config["lora_rank"], config["lora_alpha"])
        placed = place(adapted, session.device, session.precision, method)
        return TrainedPart(placed)

    def reference(self, session: train.Session, network: TrainedPart) -> Reference:
        """Returns the model before the training; ``network`` is the trained one."""
        config = self.config
        is_full = config["method"] == "full"

        def open_initial() -> AbstractContextManager[TrainedPart]:
            return nullcontext(self.load_initial(session)) if is_full else without_adapters(network)

        return Reference(config["base"], config.get("base_settings", ""), open_initial)


def load_trained(run: str) -> TrainedLanguageModel:
    """Loads the description of a run's language model."""
    with model_config(run, "sft", _DESCRIPTION) as config:
        return TrainedLanguageModel(Path(run), config)


def load_generator(run: str, session: train.Session) -> Generator:
    """Loads the base with what was trained, to write text with."""
    trained = load_trained(run)
    model = trained.load(session).eval().whole_model
    is_chat = trained.config["data"]["format"] not in TEXT_FORMATS
    settings = trained.options(EvaluateOptions())
    tokenizer = BaseModel(str(trained.folder / rundir.MODEL)).load_tokenizer()
    encoder = make_encoder(tokenizer, settings)
    add_end_tokens(model, encoder.end_tokens())
    has_template = encoder.has_template and bool(tokenizer.chat_template)

    def encode_chat(messages: Sequence[Message]) -> list[int]:
        prompt, tokens = encoder.encode_prompt(messages)
        if messages[0].role == "system" and messages[0].content.strip() not in prompt:
            raise ValueError("it leaves out the message of --system")
        return tokens

    return Generator(
        model,
        tokenizer,
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        encode_chat=encode_chat if has_template else None,
        is_chat=is_chat and has_template,
    )


def evaluate_run(options: EvaluateOptions) -> None:
    """Evaluates once, on every rank."""
    model = load_trained(options.run)
    settings = model.options(options)
    data = load_conversations(settings)
    data = undivided(options, model, data, lambda parts: [*chain(*parts)])
    tokenizer: Any = BaseModel(str(model.folder / rundir.MODEL)).load_tokenizer()
    encoder = make_encoder(tokenizer, settings)

    def measure(session: train.Session, network: nn.Module, split: str) -> Measured:
        if not data.splits[split]:
            raise DataError(
                f"{data.source} has no example for {split}",
                found="a single one, which is in the train part",
                remedy="--split train",
            )
        examples = encode_conversations(encoder, data, split, settings)
        assert isinstance(network, TrainedPart)
        reference = model.reference(session, network)
        objective = make_objective(session, settings, examples, reference, split, EVALUATION_BATCH)
        figures = evaluate(session, network, examples, objective)
        noun = "pair" if settings.objective == "dpo" else "example"
        count = pluralize(len(examples), f"{split} {noun}")
        if settings.objective == "dpo":
            return len(examples), figures, f"{summary(figures)}  ({count})"
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        answers = (decode(example.tokens[example.targets]) for example in examples.examples)
        num_bytes = sum(len(text.encode()) for text in answers)
        nats = figures["loss"] * int(examples.targets.sum())
        figures["bits_per_byte"] = nats / math.log(2) / num_bytes
        line = f"{summary(figures)}  bits per byte {figures['bits_per_byte']:.4f}"
        return len(examples), figures, f"{line}  ({count})"

    run_evaluation(options, model, data, measure)
