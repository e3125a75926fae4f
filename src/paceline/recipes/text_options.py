"""Settings of the text recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.recipes.fine_tuning_options import check_fine_tuning
from paceline.recipes.options import Options, at_least, below_one, check_accuracy, known
from paceline.recipes.sources import HubSource, is_path
from paceline.spec.errors import SettingError

MODELS = {
    "small": "a transformer encoder of two layers, from scratch",
    "words": "the mean of word vectors, from scratch: fast, and blind to word order",
}
GENERATED = {
    "meals": "short restaurant reviews, is the food praised? (generated)",
    "dummy": "random words, for measuring speed",
}
"""Text data sets that need no file."""


@dataclass(frozen=True)
class TextOptions(Options):
    """Train or fine-tune a text classifier."""

    model: str = "small"
    """small or words (from scratch), or any sequence classifier of Hugging Face by id or folder."""
    weights: str = ""
    """Start from these weights: a run directory or a safetensors file (small, words)."""
    from_scratch: bool = False
    """Take only the architecture of a Hugging Face model, not its weights."""
    freeze: bool = False
    """Train the head only; the backbone stays exactly as it was loaded."""
    unfreeze_every: int = 0
    """With --freeze: epochs after which one more stage, from the head backwards, trains too."""
    dropout: float = 0.1
    """Dropout of small; above 0 the result depends on how a batch is shared among processes."""

    data: str = "meals"
    """A csv, tsv or jsonl file, a folder with train, val and test files, a Hugging Face data set
    by id or folder; or meals, dummy."""
    test_data: str = ""
    """A file of the same form that is held out (default: a part of --data)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Never touch the network; use what is in the cache."""
    delimiter: str = ""
    """Between columns of a csv (default: a comma, in tsv files a tab)."""
    label_column: str = ""
    """Name of the column with labels (default: the first, or label)."""
    text_column: str = ""
    """Name of the column with texts (default: the second, or text)."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, where labels are numbers that start at 0 or 1."""
    test_fraction: float = 0.1
    """Part that is held out, where the data have no split of their own."""

    tokenizer: Literal["word", "bpe", "char"] = "word"
    """Tokenizer that is trained on the data, for small and words."""
    vocab_size: int = 0
    """Most tokens (0: 30000 words, 8000 pieces)."""
    max_length: int = 128
    """Tokens of a text that are used; the rest is cut off."""

    epochs: int = 10
    """Passes over the training data."""
    global_batch: int = 32
    """Texts of one step over all processes together; the same at any number of them."""
    lr: float = 1e-3
    """Highest learning rate of the schedule; 5e-5 suits fine-tuning."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over all classes."""

    def validate(self) -> None:
        super().validate()
        check_accuracy(self.stop_at)
        if not is_path(self.model):
            known("--model", self.model, MODELS)
        if not is_path(self.data):
            known("--data", self.data, GENERATED)
        at_least("--vocab-size", self.vocab_size, 0)
        at_least("--max-length", self.max_length, 2)
        at_least("--unfreeze-every", self.unfreeze_every, 0)
        below_one("--dropout", self.dropout)
        below_one("--label-smoothing", self.label_smoothing)
        self._validate_data()
        check_fine_tuning(self.model in MODELS, self)

    def hub(self) -> HubSource:
        """Where a Hugging Face data set would come from."""
        return HubSource(self.data, self.data_config, self.offline)

    def _validate_data(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise SettingError(
                f"--test-fraction {self.test_fraction} must lie between 0 and 1",
                remedy="--test-fraction 0.1",
            )
        if len(self.delimiter) > 1 and self.delimiter != "\\t":
            raise SettingError(
                f"--delimiter {self.delimiter!r} must be one character", remedy="--delimiter ';'"
            )
