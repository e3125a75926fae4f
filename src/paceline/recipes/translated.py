"""A trained translation model and its files, from its run directory and without running code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.recipes.datasets.pairs import PairRequest
from paceline.recipes.decoding import Search
from paceline.recipes.sources import HubSource
from paceline.recipes.tokenizing import END_ID, START_ID, Tokenizer, from_json
from paceline.recipes.transformer import Shape, Transformer
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.train import files, load_config

SOURCE_TOKENIZER, TARGET_TOKENIZER = "tokenizer-source.json", "tokenizer-target.json"
OUTPUTS = "translations.jsonl"
"""The last translation of the whole validation set: source, expected, translated."""


@dataclass(frozen=True)
class Translator:
    """A model as described by ``model/config.json``.

    Attributes:
        folder: The run directory.
        config: The whole description.
        shape: Of the network.
        source, target: The tokenizers.
    """

    folder: Path
    config: dict[str, Any]
    shape: Shape
    source: Tokenizer
    target: Tokenizer

    def network(self) -> Transformer:
        """A new network of this shape, with initial weights."""
        return Transformer(self.shape)

    def search(self, beam: int = 0) -> Search:
        """How to decode; the beams of the training unless others are asked for."""
        return Search(START_ID, END_ID, self.config["seq_len"], beam or self.config["beam"])

    def request(self, data: str = "", target: str = "") -> PairRequest:
        """How to read the corpus that it was trained on, or another one in the same way."""
        recorded = self.config["data"]
        split, languages = recorded["split"], self.config["languages"]
        config = "" if data else recorded["config"]
        return PairRequest(
            HubSource(data or recorded["source"], config),
            target if data else recorded["target"],
            (languages[0], languages[1]),
            split.get("val_fraction", 0.1),
            split.get("seed", 0),
        )


def translator(folder: Path) -> Translator:
    """The translation model of a run.

    Raises:
        DataError: There is no model, or none of the translation recipe.
    """
    config = load_config(folder)
    try:
        if config["task"] != "translation":
            raise ValueError(f"its model was trained by the recipe {config['task'] or '(unnamed)'}")
        shape = Shape(**config["shape"])
        texts = [
            (folder / rundir.MODEL / name).read_text(encoding="utf-8")
            for name in (SOURCE_TOKENIZER, TARGET_TOKENIZER)
        ]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{folder} holds no model of the translation recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
        ) from None
    return Translator(folder, config, shape, from_json(texts[0]), from_json(texts[1]))


def write_outputs(folder: Path, pairs: Sequence[tuple[str, str]], outputs: Sequence[str]) -> None:
    """Keeps translations beside what was expected."""
    lines = [
        json.dumps({"source": source, "expected": target, "translated": output}, ensure_ascii=False)
        for (source, target), output in zip(pairs, outputs, strict=True)
    ]
    files.write_bytes(folder / OUTPUTS, ("\n".join(lines) + "\n").encode())
