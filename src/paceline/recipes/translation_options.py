"""Settings of the translation recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.recipes.options import Options, at_least, below_one, known
from paceline.recipes.sources import HubSource, is_path
from paceline.spec.errors import SettingError

SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (64, 2, 4, 256),
    "small": (256, 3, 4, 1024),
    "base": (512, 6, 8, 2048),
    "big": (1024, 6, 16, 4096),
}
"""(d_model, layers, heads, ff) by name; ``base`` and ``big`` are those of the original paper."""
GENERATED = {
    "numbers": "numbers in digits to their English words (generated)",
    "reverse": "short sequences of letters to the same ones backwards (generated)",
    "dummy": "random words, for measuring speed",
}
"""Parallel corpora that need no file."""


@dataclass(frozen=True)
class TranslationOptions(Options):
    """Train an encoder-decoder transformer from scratch on a parallel corpus."""

    model: str = "base"
    """Size: tiny, small, base or big; the four settings below change one of its numbers."""
    d_model: int = 0
    """Width of the model (0: by --model; base: 512)."""
    layers: int = 0
    """Layers of the encoder, and of the decoder (0: by --model; base: 6)."""
    heads: int = 0
    """Attention heads (0: by --model; base: 8)."""
    ff: int = 0
    """Width of the feed-forward layers (0: by --model; base: 2048)."""
    norm: Literal["pre", "post"] = "pre"
    """Layer normalisation before each part (steadier) or after it (as in the paper)."""
    dropout: float = 0.1
    """Dropout; above 0 the result depends on how a batch is shared among processes."""

    data: str = "numbers"
    """A TSV (source, tab, target), JSONL, the source file beside --target, a folder with
    train/val/test files, a Hugging Face data set by id or folder; or numbers, reverse, dummy."""
    target: str = ""
    """The other file, line by line the translation of --data."""
    source_lang: str = ""
    """Language of the source, where the data name languages (en)."""
    target_lang: str = ""
    """Language of the target, where the data name languages (it)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set (en-it)."""
    offline: bool = False
    """Never touch the network; use what is in the cache."""
    val_fraction: float = 0.1
    """Part of the pairs that is held out, where the data have no split of their own."""

    tokenizer: Literal["word", "bpe", "char"] = "word"
    """word: words, digits and punctuation marks; bpe: pieces of words; char: characters."""
    vocab_size: int = 0
    """Most tokens of each language (0: 30000 words, 8000 pieces)."""
    min_frequency: int = 2
    """Words (bpe: pairs) that occur less often in the training data get no token of their own."""
    seq_len: int = 350
    """Longest sentence, in tokens."""
    too_long: Literal["drop", "cut", "refuse"] = "drop"
    """What becomes of longer sentences in training: left out and counted, cut, or refused.
    Validation keeps every sentence; there a longer source is cut."""

    epochs: int = 20
    """Passes over the training data."""
    global_batch: int = 64
    """Sentence pairs of one step over all processes together; the same at any number of them."""
    lr: float = 5e-4
    """Highest learning rate of the schedule."""
    label_smoothing: float = 0.1
    """Part of the probability that is spread over all tokens."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient (0: no limit)."""

    beam: int = 1
    """Beams of the search in validation (1: greedy)."""
    score_every: int = 1
    """Epochs between two translations of the whole validation set; always after the last."""
    samples: int = 3
    """Translations shown after each of them."""

    def validate(self) -> None:
        super().validate()
        known("--model", self.model, SIZES)
        self._validate_sizes()
        self._validate_data()
        at_least("--beam", self.beam, 1)
        at_least("--score-every", self.score_every, 1)
        at_least("--samples", self.samples, 0)
        below_one("--dropout", self.dropout)
        below_one("--label-smoothing", self.label_smoothing)

    def dimensions(self) -> tuple[int, int, int, int]:
        """(d_model, layers, heads, ff) as they will be."""
        asked = (self.d_model, self.layers, self.heads, self.ff)
        named = SIZES[self.model]
        return (
            asked[0] or named[0],
            asked[1] or named[1],
            asked[2] or named[2],
            asked[3] or named[3],
        )

    def hub(self) -> HubSource:
        """Where a Hugging Face data set would come from."""
        return HubSource(self.data, self.data_config, self.offline)

    def _validate_sizes(self) -> None:
        for flag in ("d_model", "layers", "heads", "ff", "vocab_size"):
            at_least("--" + flag.replace("_", "-"), getattr(self, flag), 0)
        at_least("--min-frequency", self.min_frequency, 1)
        at_least("--seq-len", self.seq_len, 4)
        width, _, heads, _ = self.dimensions()
        if width % heads or width % 2:
            raise SettingError(
                f"--d-model {width} must be even and a multiple of --heads {heads}",
                remedy=f"--d-model {max(width // (2 * heads), 1) * 2 * heads}",
            )

    def _validate_data(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise SettingError(
                f"--val-fraction {self.val_fraction} must lie between 0 and 1",
                remedy="--val-fraction 0.1",
            )
        if self.target and self.data in GENERATED:
            raise SettingError(
                f"--target {self.target} needs a file as --data",
                found=f"--data {self.data} is generated",
                remedy="--data FILE.SOURCE --target FILE.TARGET",
            )
        if bool(self.source_lang) != bool(self.target_lang):
            raise SettingError(
                "--source-lang and --target-lang belong together", remedy="name both, or none"
            )
        if not is_path(self.data):
            known("--data", self.data, GENERATED)
