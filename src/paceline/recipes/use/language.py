"""Loading and evaluation of language models that were trained from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from paceline import train
from paceline.program import library
from paceline.recipes.language.base_model import BaseModel
from paceline.recipes.language.corpus import Corpus
from paceline.recipes.language.decoder import Decoder, Shape
from paceline.recipes.language.language import evaluate, summary
from paceline.recipes.language.options import LanguageOptions
from paceline.recipes.language.token_files import END_TOKEN, encoded_rows
from paceline.recipes.tokens import TOKENIZER, read_tokenizer
from paceline.recipes.use import EvaluateOptions
from paceline.recipes.use.evaluate import (
    Measured,
    TrainedModel,
    description_schema,
    model_config,
    run_evaluation,
)
from paceline.recipes.use.language_models import Generator, portable, predictions
from paceline.spec import rundir
from paceline.spec.schema import integer, text
from paceline.train.weights import build_limited, fill, saved_state

__all__ = ["evaluate_run", "load_generator", "portable", "predictions"]


_DESCRIPTION = description_schema(
    {"test": text(), "column": text()},
    depth=integer(1),
    vocab_size=integer(1),
    max_length=integer(2),
)


@dataclass(frozen=True)
class TrainedDecoder(TrainedModel):
    """A language model that was trained from scratch."""

    def shape(self) -> Shape:
        """Returns the sizes of the network."""
        return Shape(self.config["depth"], self.config["vocab_size"], self.config["max_length"])

    def network(self) -> nn.Module:
        return Decoder(self.shape())

    def load_corpus(self, evaluation: EvaluateOptions) -> Corpus:
        """Finds the data of the training, or all of others if they are named."""
        recorded, is_other = self.config["data"], bool(evaluation.data)
        options = LanguageOptions(
            data=evaluation.data or recorded["source"],
            data_dir=evaluation.data_dir,
            data_config="" if is_other else recorded["config"],
            test_data="" if is_other else recorded["test"],
            text_column=recorded["column"],
            val_fraction=recorded["split"].get("val_fraction", 0.05),
        )
        return Corpus(options, divides=not is_other)


def load_trained(run: str) -> TrainedDecoder:
    """Loads the description of a run's language model."""
    with model_config(run, "language", _DESCRIPTION) as config:
        return TrainedDecoder(Path(run), config)


def load_generator(run: str, session: train.Session) -> Generator:
    """Loads the model to write text with: the same network, by transformers."""
    model = load_trained(run)
    transformers = library("transformers", "text is generated")
    config = transformers.LlamaConfig(**model.shape().config(END_TOKEN))
    path, state = saved_state(model.folder)
    network = build_limited(lambda: transformers.LlamaForCausalLM(config), state)
    fill(network, path, {**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    tokenizer = BaseModel(str(model.folder / rundir.MODEL)).load_tokenizer()

    def encode(text: str) -> list[int]:
        return [END_TOKEN, *tokenizer(text)["input_ids"]]

    return Generator(session.place(network).eval(), tokenizer, encode)


def evaluate_run(options: EvaluateOptions) -> None:
    """Evaluates once, on every rank."""
    model = load_trained(options.run)
    corpus = model.load_corpus(options)
    tokenizer = read_tokenizer(model.folder / rundir.MODEL / TOKENIZER)

    def measure(session: train.Session, network: nn.Module, split: str) -> Measured:
        rows = encoded_rows(tokenizer, corpus.texts(split), model.config["max_length"])
        figures = evaluate(session, network, rows)
        return len(rows), figures, summary(figures, rows)

    run_evaluation(options, model, corpus, measure)
