"""Tokenizers trained on the data: words, pieces of words (BPE) or characters.

All of them give back the sentence they were given, up to repeated spaces and unknown words. They
are kept as the ``tokenizer.json`` that the ``tokenizers`` and ``transformers`` libraries read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from paceline.recipes import optional
from paceline.spec.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast

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
    library = optional.library("tokenizers", "tokenizers are made")
    try:
        return Tokenizer(library.Tokenizer.from_str(text))
    except Exception as error:  # the library raises plain exceptions
        raise DataError("the tokenizer cannot be read", found=str(error)) from None


def train(kind: Kind, texts: Sequence[str], size: int = 0, min_frequency: int = 2) -> Tokenizer:
    """A new tokenizer; the same for the same texts.

    Args:
        kind: What a token is.
        texts: Training texts of one language.
        size: Most tokens (0: by kind).
        min_frequency: Occurrences below which a word or piece gets no token.
    """
    library = optional.library("tokenizers", "tokenizers are made")
    fast, trainer = _characters(library) if kind == "char" else _words(library, kind)
    trainer.special_tokens = [library.AddedToken(one, special=True) for one in SPECIAL]
    trainer.vocab_size = size or SIZES[kind]
    trainer.min_frequency = 1 if kind == "char" else min_frequency
    trainer.show_progress = False
    fast.train_from_iterator(texts, trainer)
    return Tokenizer(fast)


def _words(library: Any, kind: Kind) -> tuple[Any, Any]:
    """Spaces become part of the word after them, so that joining the tokens restores the text."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    digits, marks = pre_tokenizers.Digits(True), pre_tokenizers.Punctuation("isolated")
    trainer: Any
    if kind == "word":
        fast = library.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
        trainer = trainers.WordLevelTrainer()
        pieces = [pre_tokenizers.Metaspace(), marks, digits]
        fast.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        fast = library.Tokenizer(models.BPE())
        characters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, characters])
        fast.decoder = decoders.ByteLevel()
    steps = [normalizers.NFC(), normalizers.Replace(library.Regex(r"\s+"), " ")]
    lead = [] if kind == "word" else [normalizers.Prepend(" ")]
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Strip(), *lead])
    return fast, trainer


def _characters(library: Any) -> tuple[Any, Any]:
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    fast = library.Tokenizer(models.WordLevel(unk_token="[UNK]"))  # noqa: S106
    fast.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    fast.pre_tokenizer = pre_tokenizers.Split(library.Regex("(?m)."), "isolated")
    fast.decoder = decoders.Fuse()
    return fast, trainers.WordLevelTrainer()
