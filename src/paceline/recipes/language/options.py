"""Options of the recipes for language models. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.recipes.argv import check_at_least, check_part
from paceline.recipes.options import Options
from paceline.spec.errors import SettingError


@dataclass(frozen=True)
class SftOptions(Options):
    """Fine-tune a causal language model on conversations or texts."""

    required = ("model", "data")

    model: str = ""
    """Model to start from: a folder of transformers, a GGUF file, or an id of Hugging Face."""
    method: Literal["lora", "dora", "full"] = "lora"
    """What is trained: low-rank adapters of all linear layers (lora, dora), or the whole model."""
    lora_rank: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Scale of the adapters; their output is multiplied by --lora-alpha / --lora-rank."""
    gradient_checkpointing: bool = False
    """Keep fewer activations in memory and compute them again, which takes about a third longer."""

    data: str = ""
    """A jsonl, json, csv, tsv, parquet or txt file; a folder of such files, also with train, val
    and test parts; or a Hugging Face data set by id or folder."""
    test_data: str = ""
    """Held-out file of the same form (default: a part of --data)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Use only the cache, never the network."""
    val_fraction: float = 0.1
    """Part of the examples to hold out, if the data have no such part."""
    skip_damaged: bool = False
    """Leave out and count rows that cannot be used, such as broken JSON or empty answers."""
    show_examples: int = 0
    """Show N examples as they are trained on, with their masks, and stop."""

    chat_template: str = ""
    """File with a chat template, or none, which joins prompt and completion as they are (default:
    the model's own)."""
    system: Literal["keep", "merge", "drop"] = "keep"
    """System messages: keep them, merge them into the first message of the user, or drop them."""
    max_length: int = 1024
    """Largest number of tokens of an example."""
    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """What to do with longer examples: refuse to start, cut their end, or leave them out. Both are
    counted."""
    pack: bool = True
    """Put several examples into one row of up to --max-length tokens, without changing the result:
    they do not see each other."""

    epochs: int = 3
    """Passes through the training data."""
    global_batch: int = 16
    """Examples of one step over all processes; the same at any number of processes."""
    micro_batch: str = "0"
    """Largest number of examples that a process computes at once; gradients of more are
    accumulated. A number, a number for some hosts, such as n2=8, or auto (each process tries what
    fits into its memory). 0: as many as have 8192 tokens at the length of the longest."""
    lr: float = 2e-4
    """Highest learning rate of the schedule; 2e-5 suits --method full."""
    schedule: Literal["cosine", "linear", "inverse-sqrt", "constant", "step", "plateau"] = "linear"
    """Learning-rate schedule, over all steps."""
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
        if not 0 < self.lora_alpha < float("inf"):
            raise SettingError(f"--lora-alpha {self.lora_alpha} must be greater than 0")
        if self.shard:
            raise SettingError(
                "--shard does not go with sft",
                found="every process holds the whole model; only what is trained is exchanged",
                remedy="leave --shard out",
            )
        if self.mirror:
            raise SettingError(
                "--mirror has no effect", found="sft has no named data sets", remedy="leave it out"
            )
