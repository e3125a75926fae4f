"""From texts to token ids: our own tokenizers and Hugging Face's; batches of sentence pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.program import library
from paceline.recipes import pretrained
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.train import files

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast
from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.train import Draws

Kind = Literal["word", "bpe", "char"]
SPECIAL = ("[PAD]", "[UNK]", "[SOS]", "[EOS]")
PAD_ID, UNKNOWN_ID, START_ID, END_ID = range(len(SPECIAL))
SIZES: dict[Kind, int] = {"word": 30_000, "bpe": 8_000, "char": 30_000}
"""Most tokens, where the user names no number."""


class Tokenizer:
    """Text to token ids and back. Ids 0 to 3 are padding, unknown, start and end."""

    def __init__(self, fast: Fast) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without start and end."""
        return [one.ids for one in self._fast.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts again; unknown words appear as ``[UNK]``."""
        kept = [[one for one in row if one == UNKNOWN_ID or one >= len(SPECIAL)] for row in rows]
        texts = self._fast.decode_batch(kept, skip_special_tokens=False)
        return [text.strip() for text in texts]

    def tokens(self, row: Sequence[int]) -> list[str]:
        """Each token as it is written."""
        names = [self._fast.id_to_token(one) or "?" for one in row]
        return [name.replace("Ġ", "▁") for name in names]

    def to_json(self) -> str:
        """The content of ``tokenizer.json``."""
        return str(self._fast.to_str())


def from_json(text: str) -> Tokenizer:
    """A tokenizer from the content of ``tokenizer.json``.

    Raises:
        DataError: It is none.
    """
    tools = library("tokenizers", "tokenizers are made")
    try:
        return Tokenizer(tools.Tokenizer.from_str(text))
    except Exception as error:  # the library raises plain exceptions
        raise DataError("the tokenizer cannot be read", found=str(error)) from None


def train_tokenizer(
    kind: Kind, texts: Sequence[str], size: int = 0, min_frequency: int = 2
) -> Tokenizer:
    """A new tokenizer; the same for the same texts.

    Args:
        kind: What a token is.
        texts: Training texts of one language.
        size: Most tokens (0: by kind).
        min_frequency: Occurrences below which a word or piece gets no token.
    """
    tools = library("tokenizers", "tokenizers are made")
    fast, trainer = _characters(tools) if kind == "char" else _words(tools, kind)
    trainer.special_tokens = [tools.AddedToken(one, special=True) for one in SPECIAL]
    trainer.vocab_size = size or SIZES[kind]
    trainer.min_frequency = 1 if kind == "char" else min_frequency
    trainer.show_progress = False
    fast.train_from_iterator(texts, trainer)
    return Tokenizer(fast)


def _words(tools: Any, kind: Kind) -> tuple[Any, Any]:
    """Spaces become part of the word after them, so that joining the tokens restores the text."""
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


def _characters(tools: Any) -> tuple[Any, Any]:
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    fast = tools.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    fast.pre_tokenizer = pre_tokenizers.Split(tools.Regex("(?m)."), "isolated")
    fast.decoder = decoders.Fuse()
    return fast, trainers.WordLevelTrainer()


Rows = list[list[int]]


@dataclass(frozen=True)
class Sentences:
    """Tokenised pairs.

    Attributes:
        source: Token ids of each source sentence, end included.
        target: Token ids of each target sentence, without start and end.
        left_out: Pairs that were too long.
    """

    source: Rows
    target: Rows
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> list[int]:
        """The longer side of each pair."""
        both = zip(self.source, self.target, strict=True)
        return [max(len(one), len(other)) for one, other in both]

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        """Source ``[n, s]``, decoder input ``[n, t]`` and what it should say, ``[n, t]``."""
        numbers = ids.tolist()
        targets = [self.target[i] for i in numbers]
        return (
            padded([self.source[i] for i in numbers]),
            padded([[START_ID, *row] for row in targets]),
            padded([[*row, END_ID] for row in targets]),
        )


@dataclass(frozen=True)
class Sources:
    """Source sentences alone, to be translated in the order ``ids``."""

    rows: Rows
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, ids: NDArray, draws: Draws | None) -> tuple[Tensor, ...]:  # type: ignore[type-arg]
        """Source tokens ``[n, s]``."""
        return (padded([self.rows[self.ids[i]] for i in ids.tolist()]),)


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """One row of ids each, padded at the end, shape ``[n, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD_ID] * (longest - len(row))] for row in rows])


def source_rows(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> Rows:
    """Ids of each source sentence, cut to ``limit`` tokens, and the end."""
    return [[*row[:limit], END_ID] for row in tokenizer.encode(texts)]


def sentences(
    pairs: Sequence[tuple[str, str]],
    tokenizers: tuple[Tokenizer, Tokenizer],
    limit: int,
    too_long: str,
) -> Sentences:
    """Tokenises pairs.

    Args:
        pairs: Source and target texts.
        tokenizers: Of source and target.
        limit: Most tokens of a sentence.
        too_long: What becomes of a pair with a longer side: ``drop``, ``cut`` or ``refuse``.

    Raises:
        DataError: A sentence is too long and that is refused, or every pair was left out.
    """
    both = [
        one.encode(texts) for one, texts in zip(tokenizers, zip(*pairs, strict=True), strict=True)
    ]
    fits = [max(len(a), len(b)) <= limit for a, b in zip(*both, strict=True)]
    if too_long == "refuse" and not all(fits):
        raise _refused(pairs[fits.index(False)], limit)
    keep = [i for i, fit in enumerate(fits) if fit or too_long == "cut"]
    if not keep:
        raise DataError(
            f"no pair has at most {limit} tokens a side",
            remedy="raise --seq-len, or --too-long cut",
        )
    source = [[*both[0][i][:limit], END_ID] for i in keep]
    return Sentences(source, [both[1][i][:limit] for i in keep], len(pairs) - len(keep))


def _refused(pair: tuple[str, str], limit: int) -> DataError:
    return DataError(
        f"a sentence is longer than --seq-len {limit} tokens",
        found=repr(max(pair, key=len)[:80]),
        remedy="raise --seq-len, or --too-long drop or cut",
    )


TOKENIZER = "tokenizer.json"


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

    pad = PAD_ID

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
            pretrained.load_tokenizer(pretrained.HubModel("text", str(folder), offline=True))
        )
    return OwnEncoding(from_json((folder / TOKENIZER).read_text(encoding="utf-8")))


def padded_ids(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids ``[n, longest]`` and where they are no padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest)[None, :] < lengths[:, None]
