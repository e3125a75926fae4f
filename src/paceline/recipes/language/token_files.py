"""Tokens of a corpus in files, made once for each disk and mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.program import library
from paceline.recipes.data.download import cache
from paceline.recipes.language.corpus import Corpus
from paceline.recipes.language.rows import IGNORED
from paceline.recipes.tokens import TOKENIZER, Tokenizer, read_tokenizer
from paceline.spec.errors import DataError
from paceline.train import Draws, files
from paceline.train.data.order import Ids

END = "<|endoftext|>"
"""Token before each text. It has no bytes of its own."""
END_TOKEN = 0
SUMMARY = "summary.json"
_TEXTS_AT_ONCE = 32
_VERSION = 1
# Words with the space before them, numbers of up to three digits, signs, white space (GPT-4).
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Trains a tokenizer of byte pairs, which returns every text as it was.

    Args:
        size: Largest number of tokens.
    """
    tools = library("tokenizers", "a tokenizer is trained")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    fast = tools.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tools.Regex(_SPLIT), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    return Tokenizer(fast)


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[Sequence[int], int]]:
    """Yields tokens of some texts, each after ``END``, and the number of their bytes."""
    iterator = iter(texts)
    while batch := list(islice(iterator, _TEXTS_AT_ONCE)):
        tokens = [token for ids in tokenizer.encode(batch) for token in (END_TOKEN, *ids)]
        yield tokens, sum(len(text.encode()) for text in batch)


def token_folder(corpus: Corpus, vocabulary: int) -> Path:
    """Returns where the tokens of a corpus are on this host, by the content of the corpus."""
    key = f"{_VERSION} {corpus.fingerprint} {vocabulary}"
    return cache().with_name("tokens") / hashlib.sha256(key.encode()).hexdigest()[:16]


def write_tokens(corpus: Corpus, vocabulary: int, folder: Path) -> None:
    """Trains a tokenizer and writes it, the tokens of each part, and a summary into a folder.

    Only this user can read the folder: the tokens are the text.

    Raises:
        DataError: The disk is full, or the corpus cannot be read.
    """
    try:
        folder.chmod(0o700)
        tokenizer = train_bpe(corpus.texts("train"), vocabulary)
        content = tokenizer.to_json().encode()
        files.write_bytes(folder / TOKENIZER, content)
        digest, summary = hashlib.sha256(content), dict[str, Any]()
        for part in corpus.splits:
            num_bytes = 0
            with (folder / f"{part}.bin").open("wb") as file:
                for tokens, count in encode(tokenizer, corpus.texts(part)):
                    block = torch.tensor(tokens, dtype=_dtype(vocabulary)).numpy().tobytes()
                    digest.update(block)
                    file.write(block)
                    num_bytes += count
            summary[part] = num_bytes
        content = json.dumps({"bytes": summary, "sha256": digest.hexdigest()}).encode()
        files.write_bytes(folder / SUMMARY, content)
    except OSError as error:
        raise DataError(f"tokens cannot be written to {folder}", found=str(error)) from None


def _dtype(vocabulary: int) -> torch.dtype:
    return torch.uint16 if vocabulary <= 1 << 16 else torch.uint32


def encoded_rows(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> TokenRows:
    """Returns the rows of texts for an evaluation, in memory."""
    batches = [*encode(tokenizer, texts)]
    tokens = np.array([token for tokens, _ in batches for token in tokens])
    return TokenRows(tokens, length, sum(count for _, count in batches), is_whole=True)


@dataclass(frozen=True)
class TokenFiles:
    """Tokens of a corpus, as :func:`write_tokens` has written them.

    Attributes:
        vocabulary: Largest number of tokens, with which they were made.
        content: Hash of tokenizer and tokens.
        num_bytes: Bytes of the texts of each part.
    """

    folder: Path
    vocabulary: int
    content: str
    num_bytes: dict[str, int]

    @classmethod
    def open(cls, folder: Path, vocabulary: int) -> TokenFiles:
        """Reads the summary of a folder.

        Raises:
            DataError: It cannot be read.
        """
        try:
            summary = json.loads(files.read_bytes_limited(folder / SUMMARY))
            return cls(folder, vocabulary, summary["sha256"], summary["bytes"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} holds no tokens", found=str(error), remedy="remove this folder"
            ) from None

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer."""
        return read_tokenizer(self.folder / TOKENIZER)

    def rows(self, part: str, length: int) -> TokenRows:
        """Returns the tokens of a part in rows of ``length``."""
        path, dtype = self.folder / f"{part}.bin", _dtype(self.vocabulary)
        count = path.stat().st_size // dtype.itemsize
        if count < 2 or (part == "train" and count <= length):
            raise DataError(
                f"the {part} part of the data is too short",
                found=f"it has {count} tokens",
                remedy="more text, or a smaller --max-length",
            )
        # Unlike numpy, torch keeps no descriptor of a file that it has mapped.
        tokens = torch.from_file(str(path), shared=False, size=count, dtype=dtype).numpy()
        return TokenRows(tokens, length, self.num_bytes[part], is_whole=part != "train")


class TokenRows:
    """Rows of ``length`` tokens that follow each other, and of the tokens after each of them.

    The place of a row is its number: the order of rows is that of any other data set.

    Args:
        tokens: Shape ``[n]``.
        is_whole: Every token counts: the last row is filled up. Otherwise it is left out.

    Attributes:
        num_bytes: Bytes of the text.
        num_targets: Tokens that follow another one, over all rows.
    """

    def __init__(
        self, tokens: NDArray[Any], length: int, num_bytes: int, *, is_whole: bool
    ) -> None:
        self._tokens, self.length, self.num_bytes = tokens, length, num_bytes
        targets = max(0, len(tokens) - 1)
        self._num_rows = -(-targets // length) if is_whole else targets // length
        self.num_targets = min(targets, self._num_rows * length)

    def __len__(self) -> int:
        return self._num_rows

    def batch(self, ids: Ids, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels, the tokens after them, both of shape ``[rows, length]``."""
        rows = np.full((len(ids), self.length + 1), IGNORED, dtype=np.int64)
        for row, number in zip(rows, ids.tolist(), strict=True):
            start = number * self.length
            window = self._tokens[start : start + self.length + 1]
            row[: len(window)] = window
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].clamp(min=0), tokens[:, 1:]
