"""Text classifiers and the tokenizers that go with them: our own, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.recipes import hub_models
from paceline.recipes.tokenizing import Tokenizer, from_json
from paceline.recipes.transformer import PAD, Embedding, EncoderLayer, Shape
from paceline.spec import rundir
from paceline.train import files

TOKENIZER = "tokenizer.json"
WIDTH, LAYERS, HEADS, FF = 128, 2, 4, 256


class Words(nn.Module):
    """Word vectors, averaged over a text."""

    def __init__(self, tokens: int, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return _mean(self.table(ids), mask)


class Encoder(nn.Module):
    """A transformer encoder, averaged over a text."""

    def __init__(self, tokens: int, dropout: float) -> None:
        super().__init__()
        shape = Shape(tokens, tokens, WIDTH, LAYERS, HEADS, FF, dropout=dropout)
        self.embedding = Embedding(tokens, shape)
        self.layers = nn.ModuleList(EncoderLayer(shape) for _ in range(LAYERS))
        self.end = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return _mean(self.end(x), mask)


def _mean(vectors: Tensor, mask: Tensor) -> Tensor:
    weights = mask[:, :, None].to(vectors.dtype)
    return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)


class TextClassifier(nn.Module):
    """A backbone of ours and a linear head; logits ``[n, classes]`` of token ids ``[n, t]``."""

    def __init__(self, kind: str, tokens: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.backbone = Words(tokens) if kind == "words" else Encoder(tokens, dropout)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(ids, mask))
        return logits


class HubClassifier(nn.Module):
    """A sequence classifier of Hugging Face."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def backbone(self) -> nn.Module:
        """The model without its head."""
        found: nn.Module = self.model.base_model
        return found

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits
        return logits


class Encoding(Protocol):
    """From texts to token ids."""

    @property
    def pad(self) -> int:
        """Id of padding."""
        ...

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Ids of each text, at least one and at most ``limit``."""
        ...

    def save(self, folder: Path) -> None:
        """Keeps it in the folder of the model."""
        ...


class OwnEncoding:
    """A tokenizer that was trained on the data."""

    pad = PAD

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        return [row[:limit] or [1] for row in self.tokenizer.encode(texts)]

    def save(self, folder: Path) -> None:
        files.write_bytes(folder / TOKENIZER, self.tokenizer.to_json().encode())


class HubEncoding:
    """The tokenizer of a Hugging Face model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad: int = tokenizer.pad_token_id or 0

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        made = self._tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return [row or [self.pad] for row in made]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save_pretrained(str(folder))


def saved_encoding(run: Path, hub: bool) -> Encoding:
    """The tokenizer in a run's model folder."""
    folder = run / rundir.MODEL
    if hub:
        return HubEncoding(
            hub_models.load_tokenizer(hub_models.HubModel("text", str(folder), offline=True))
        )
    return OwnEncoding(from_json((folder / TOKENIZER).read_text(encoding="utf-8")))


def rebuilt(description: dict[str, Any], classes: int) -> nn.Module:
    """The network that a run's ``config.json`` describes, with initial weights."""
    if description["kind"] == "hub":
        return HubClassifier(hub_models.rebuilt("text", description["config"]))
    kind, tokens = description["kind"], description["tokens"]
    return TextClassifier(kind, tokens, classes, description["dropout"])


def padded_ids(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids ``[n, longest]`` and where they are no padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest)[None, :] < lengths[:, None]
