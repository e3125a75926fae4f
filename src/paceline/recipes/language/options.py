"""Options of the recipes for language models. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.recipes.argv import check_at_least, check_part
from paceline.recipes.options import Options
from paceline.spec.errors import SettingError


@dataclass(frozen=True)
class LanguageOptions(Options):
    """Train a language model from scratch on texts."""

    required = ("data",)
    derived = ("epochs", "global_batch", "lr")
    unused: ClassVar[Mapping[str, str]] = {
        "mirror": "language has no named data sets",
        "model": "the model is trained from scratch, with --depth layers",
    }

    depth: int = 4
    """Number of layers. Width, vocabulary, batch, learning rate and length of the training follow
    from it and from the data, unless they are set."""
    vocab_size: int = 0
    """Largest number of tokens (0: 1024 for each layer, at most 32768)."""
    max_length: int = 512
    """Number of tokens that the model can read at once."""

    data: str = ""
    """A text file; a jsonl or parquet file with a text in each row; a folder of such files, also
    with train and val parts; or a Hugging Face data set by id or folder."""
    data_dir: str = ""
    """Folder that is searched first for the files that other options name."""
    test_data: str = ""
    """Held-out file of the same format (default: a part of --data)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    text_column: str = ""
    """Name of the column with texts (default: text)."""
    offline: bool = False
    """Use only the cache, never the network."""
    val_fraction: float = 0.05
    """Fraction of the text to hold out, if the data has no such part. With 0.05, every twentieth
    piece of 16,384 characters is held out."""

    epochs: int = 0
    """Passes through the training data. 0: until the model has seen twenty tokens for each of its
    parameters, but at most four passes."""
    global_batch: int = 0
    """Number of rows in one step, over all processes together; a row has --max-length tokens. 0:
    chosen by the size of the model and the length of the training."""
    micro_batch: str = "0"
    """Largest number of rows that a process computes at once. If it has more, gradients are
    accumulated. A number, a number for some hosts, such as n2=8, or auto (each process tries what
    fits into its memory). 0: as many rows as fit into 8192 tokens."""
    lr: float = 0.0
    """Highest learning rate of the schedule. 0: chosen by the size of the model and the length of
    the training."""
    schedule: Literal[
        "cosine", "linear", "inverse-sqrt", "constant", "step", "plateau", "stable"
    ] = "stable"
    """Learning-rate schedule, over all steps. With stable the rate falls only at the end."""
    cool_down: float = 0.4
    """With --schedule stable: fraction of training over which the rate falls to zero."""
    warm_up: float = 0.02
    """Fraction of training over which the learning rate rises."""
    muon: bool = True
    """Train matrices with Muon, and only the other parameters with --optimizer."""
    weight_decay: float = 0.1
    """Weight decay."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient (0: no limit)."""
    evaluate_every: int = 0
    """Evaluate every N steps, in addition to the end of each epoch. 0: so often that
    evaluations take a twentieth of the training time."""
    stop_at: float = 0.0
    """Stop as soon as an evaluation reaches at most this number of bits per byte (0: never)."""

    def validate(self) -> None:
        super().validate()
        check_at_least("--depth", self.depth, 1)
        check_at_least("--max-length", self.max_length, 2)
        if self.vocab_size:
            check_at_least("--vocab-size", self.vocab_size, 257)
        check_part("--val-fraction", self.val_fraction)
        if self.shard and self.muon:
            raise SettingError(
                "--shard cannot be combined with --muon",
                found="Muon needs whole matrices on every process",
                remedy="--no-muon",
            )


@dataclass(frozen=True)
class SftOptions(Options):
    """Fine-tune a causal language model on conversations, texts or preferences."""

    required = ("model", "data")
    derived = ("lr",)
    unused: ClassVar[Mapping[str, str]] = {"mirror": "sft has no named data sets"}

    model: str = ""
    """Base model: a folder saved by transformers, a GGUF file, or an id of Hugging Face."""
    method: Literal["lora", "qlora", "dora", "full"] = "lora"
    """What is trained: low-rank adapters of all linear layers (lora, dora), the same with a base in
    four bits (qlora, on GPUs with CUDA), or the whole model."""
    objective: Literal["sft", "dpo"] = "sft"
    """What is learnt: to write the answers of the data (sft), or to prefer one of two answers
    (dpo)."""
    dpo_beta: float = 0.1
    """With --objective dpo: how strongly the training keeps the model close to the initial
    one."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Scale of the adapters; their output is multiplied by --lora-alpha / --lora-rank."""
    gradient_checkpointing: bool = False
    """Keep fewer activations in memory and compute them again, which takes about a third longer."""

    data: str = ""
    """A jsonl, json, csv, tsv, parquet or txt file; a folder of such files, also with train, val
    and test parts; or a Hugging Face data set by id or folder."""
    data_dir: str = ""
    """Folder that is searched first for the files that other options name."""
    test_data: str = ""
    """Held-out file of the same format (default: a part of --data)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Use only the cache, never the network."""
    val_fraction: float = 0.1
    """Fraction of the examples to hold out, if the data has no such part."""
    skip_damaged: bool = False
    """Leave out and count rows that cannot be used, such as broken JSON or empty answers."""
    show_examples: int = 0
    """Show N examples as the training would use them, with their masks, and stop."""

    chat_template: str = ""
    """File with a chat template; or none, to join prompt and completion unchanged (default: the
    model's own template)."""
    system: Literal["keep", "merge", "drop"] = "keep"
    """System messages: keep them, merge them into the first message of the user, or drop them."""
    max_length: int = 1024
    """Largest number of tokens of an example."""
    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """What to do with longer examples: refuse to start, cut their end, or leave them out (drop).
    Examples that are cut or left out are counted."""
    pack: bool = True
    """Put several examples into one row of up to --max-length tokens. Examples in a row do not see
    each other, so the result does not change."""

    epochs: int = 3
    """Passes through the training data."""
    global_batch: int = 16
    """Number of examples in one step, over all processes together."""
    micro_batch: str = "0"
    """Largest number of examples that a process computes at once. If it has more, gradients are
    accumulated. A number, a number for some hosts, such as n2=8, or auto (each process tries what
    fits into its memory). 0: 8192 tokens divided by the length of the longest example."""
    lr: float = 0.0
    """Highest learning rate of the schedule. 0: 2e-4 for adapters, and 2e-5 for --method full; with
    --objective dpo 5e-6 and 5e-7."""
    schedule: Literal[
        "cosine", "linear", "inverse-sqrt", "constant", "step", "plateau", "stable"
    ] = "linear"
    """Learning-rate schedule, over all steps. With stable the rate falls only at the end."""
    warm_up: float = 0.03
    """Fraction of training over which the learning rate rises."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient (0: no limit)."""
    stop_at: float = 0.0
    """Stop as soon as the held-out loss is at most this (0: never)."""
    samples: int = 3
    """Number of held-out conversations whose answer is generated at each evaluation."""
    sample_tokens: int = 64
    """Largest number of tokens of such an answer."""

    def validate(self) -> None:
        super().validate()
        for name in ("lora_rank", "max_length", "sample_tokens"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        check_at_least("--max-length", self.max_length, 2)
        for name in ("show_examples", "samples"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 0)
        check_part("--val-fraction", self.val_fraction)
        for name in ("lora_alpha", "dpo_beta"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise SettingError(f"--{name.replace('_', '-')} {value} must be greater than 0")
        if self.shard:
            raise SettingError(
                "--shard cannot be combined with sft",
                found="every process holds the whole model; only what is trained is exchanged",
                remedy="leave --shard out",
            )
