"""Tokenizers, trained ones and Hugging Face's, and batches of tokenized sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.program import library
from paceline.recipes import pretrained
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.train import Draws, files

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast

Kind = Literal["word", "bpe", "char"]
SPECIAL = ("[PAD]", "[UNK]", "[SOS]", "[EOS]")
PAD_ID, UNKNOWN_ID, START_ID, END_ID = range(len(SPECIAL))
SIZES: dict[Kind, int] = {"word": 30_000, "bpe": 8_000, "char": 30_000}
"""Default size of the vocabulary."""


class Tokenizer:
    """Converts texts to token ids and back. Ids 0 to 3 are padding, unknown, start and end."""

    def __init__(self, fast: Fast) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without start and end."""
        return [
            encoding.ids
            for encoding in self._fast.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Returns the texts of token ids; unknown words appear as ``[UNK]``."""
        visible = [
            [token for token in row if token == UNKNOWN_ID or token >= len(SPECIAL)] for row in rows
        ]
        texts = self._fast.decode_batch(visible, skip_special_tokens=False)
        return [text.strip() for text in texts]

    def tokens(self, row: Sequence[int]) -> list[str]:
        """Returns the text of each token."""
        names = [self._fast.id_to_token(token) or "?" for token in row]
        return [name.replace("Ġ", "▁") for name in names]

    def to_json(self) -> str:
        """Returns the content of ``tokenizer.json``."""
        return str(self._fast.to_str())


def from_json(text: str) -> Tokenizer:
    """Loads a tokenizer from the content of ``tokenizer.json``; DataError if it is damaged."""
    tools = library("tokenizers", "tokenizers are made")
    try:
        return Tokenizer(tools.Tokenizer.from_str(text))
    except Exception as error:  # the library raises plain exceptions
        raise DataError("the tokenizer cannot be read", found=str(error)) from None


def read_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer from ``tokenizer.json``; DataError if it is missing or damaged."""
    try:
        return from_json(files.read_bytes_limited(path).decode())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None


def train_tokenizer(
    kind: Kind, texts: Sequence[str], size: int = 0, min_frequency: int = 2
) -> Tokenizer:
    """Trains a tokenizer; equal texts give an equal one.

    Args:
        texts: Training texts of one language.
        size: Maximum size of the vocabulary (0: default of the kind).
        min_frequency: Minimum occurrences of a word or piece that gets a token.
    """
    tools = library("tokenizers", "tokenizers are made")
    fast, trainer = _character_tokenizer(tools) if kind == "char" else _split_tokenizer(tools, kind)
    trainer.special_tokens = [tools.AddedToken(token, special=True) for token in SPECIAL]
    trainer.vocab_size = size or SIZES[kind]
    trainer.min_frequency = 1 if kind == "char" else min_frequency
    trainer.show_progress = False
    fast.train_from_iterator(texts, trainer)
    return Tokenizer(fast)


def _split_tokenizer(tools: Any, kind: Kind) -> tuple[Any, Any]:
    """Creates a word or BPE tokenizer whose tokens include the space before them."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    digits, marks = pre_tokenizers.Digits(True), pre_tokenizers.Punctuation("isolated")
    trainer: Any
    if kind == "word":
        fast = tools.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
        trainer = trainers.WordLevelTrainer()
        pieces = [pre_tokenizers.Metaspace(), marks, digits]
        fast.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        fast = tools.Tokenizer(models.BPE())
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, characters])
        fast.decoder = decoders.ByteLevel()
    steps = [normalizers.NFC(), normalizers.Replace(tools.Regex(r"\s+"), " ")]
    lead = [] if kind == "word" else [normalizers.Prepend(" ")]
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Strip(), *lead])
    return fast, trainer


def _character_tokenizer(tools: Any) -> tuple[Any, Any]:
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    fast = tools.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    fast.pre_tokenizer = pre_tokenizers.Split(tools.Regex("(?m)."), "isolated")
    fast.decoder = decoders.Fuse()
    return fast, trainers.WordLevelTrainer()


Rows = list[list[int]]


@dataclass(frozen=True)
class Sentences:
    """Tokenized sentence pairs.

    Attributes:
        source: Token ids of each source sentence, with end.
        target: Token ids of each target sentence, without start and end.
        num_dropped: Number of pairs left out because they are too long.
    """

    source: Rows
    target: Rows
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> list[int]:
        """Returns the length of the longer side of each pair."""
        both = zip(self.source, self.target, strict=True)
        return [max(len(source), len(target)) for source, target in both]

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        """Returns source ``[n, s]``, decoder input ``[n, t]`` and expected output ``[n, t]``."""
        numbers = ids.tolist()
        targets = [self.target[i] for i in numbers]
        return (
            padded([self.source[i] for i in numbers]),
            padded([[START_ID, *row] for row in targets]),
            padded([[*row, END_ID] for row in targets]),
        )


@dataclass(frozen=True)
class Sources:
    """Source sentences to translate, in the order ``ids``."""

    rows: Rows
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        return (padded([self.rows[self.ids[i]] for i in ids.tolist()]),)


def padded(rows: Sequence[Sequence[int]], pad: int = PAD_ID) -> Tensor:
    """Pads rows of ids at the end, to shape ``[n, longest]``."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)


def source_rows(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> Rows:
    """Tokenizes source sentences, cut to ``limit`` tokens, with end."""
    return [[*row[:limit], END_ID] for row in tokenizer.encode(texts)]


def sentences(
    pairs: Sequence[tuple[str, str]],
    tokenizers: tuple[Tokenizer, Tokenizer],
    limit: int,
    too_long: str,
) -> Sentences:
    """Tokenizes pairs.

    Args:
        limit: Maximum tokens of a sentence.
        too_long: Treatment of pairs with a longer side: ``drop``, ``cut`` or ``refuse``.

    Raises:
        DataError: A sentence is too long and refused, or every pair was dropped.
    """
    encoded = [
        tokenizer.encode(texts)
        for tokenizer, texts in zip(tokenizers, zip(*pairs, strict=True), strict=True)
    ]
    within_limit = [max(len(a), len(b)) <= limit for a, b in zip(*encoded, strict=True)]
    if too_long == "refuse" and not all(within_limit):
        raise DataError(
            f"a sentence is longer than --seq-len {limit} tokens",
            found=repr(max(pairs[within_limit.index(False)], key=len)[:80]),
            remedy="raise --seq-len, or --too-long drop or cut",
        )
    indices = [i for i, is_short in enumerate(within_limit) if is_short or too_long == "cut"]
    if not indices:
        raise DataError(
            f"no pair has at most {limit} tokens a side",
            remedy="raise --seq-len, or --too-long cut",
        )
    source = [[*encoded[0][i][:limit], END_ID] for i in indices]
    return Sentences(source, [encoded[1][i][:limit] for i in indices], len(pairs) - len(indices))


TOKENIZER = "tokenizer.json"


class TrainedEncoding:
    """A tokenizer trained on the data; ``pad`` is the id of padding."""

    pad = PAD_ID

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Returns the ids of each text, at least one and at most ``limit``."""
        return [row[:limit] or [1] for row in self.tokenizer.encode(texts)]

    def save(self, folder: Path) -> None:
        """Saves the tokenizer in the folder of the model."""
        files.write_bytes(folder / TOKENIZER, self.tokenizer.to_json().encode())


class HubEncoding:
    """The tokenizer of a Hugging Face model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad: int = tokenizer.pad_token_id or 0

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        rows = self._tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        return [row or [self.pad] for row in rows]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save_pretrained(str(folder))


Encoding = TrainedEncoding | HubEncoding


def saved_encoding(run: Path, hub: bool) -> Encoding:
    """Loads the tokenizer of a run."""
    folder = run / rundir.MODEL
    if hub:
        return HubEncoding(
            pretrained.load_tokenizer(pretrained.HubModel("text", str(folder), offline=True))
        )
    return TrainedEncoding(read_tokenizer(folder / TOKENIZER))


def padded_ids(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Pads rows of ids to shape ``[n, longest]``; the mask is false for padding."""
    ids = padded(rows, pad)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]
