"""Options and texts of the commands that use trained models. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.recipes.options import Backend, Device


def prompt_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts that a command has; none for ``-``, which means standard input."""
    return () if texts == ("-",) else texts


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a trained model on its held-out data, or on others."""

    run: str = ""
    """Run directory that holds model/."""
    split: str = ""
    """train, val or test (default: the part that the training reported)."""
    data: str = ""
    """Data to use instead of the training's: a name, a file or a folder. All of them are evaluated,
    or only the test part if they have parts."""
    target: str = ""
    """The second file of a parallel corpus of two files; --data is the first."""
    data_dir: str = ""
    """Folder that holds the files of the named data set (default: the usual places)."""
    device: Device = "auto"
    """Device to compute on."""
    backend: Backend = "auto"
    """Communication backend."""
    tasks: str = ""
    """For a language model: tasks of lm-eval instead of held-out data. Names or yaml files,
    separated by commas."""
    limit: int = 0
    """With --tasks: number of questions of each task (0: all)."""
    figures: str = ""
    """Also write the figures to this file, as JSON."""


@dataclass(frozen=True)
class PredictOptions:
    """Tell the class of images or texts."""

    inputs: tuple[str, ...] = field(default=(), metadata={"positional": True})
    """Image files and folders of images; or texts, and csv, tsv, jsonl, parquet and txt
    files of texts, or - for the lines of standard input."""
    run: str = ""
    """Run directory that holds model/."""
    top_k: int = 3
    """Classes shown for each input."""
    json: bool = False
    """Print one JSON object per line."""
    onnx: str = ""
    """Use an ONNX file from export or quantize instead of the run's own weights."""
    device: Device = "auto"
    """Device to compute on."""


@dataclass(frozen=True)
class TranslateOptions:
    """Translate sentences; without any, the lines of standard input."""

    sentences: tuple[str, ...] = field(default=(), metadata={"positional": True})
    """Sentences."""
    run: str = ""
    """Run directory that holds model/."""
    beam: int = 0
    """Beams of the search (0: as in training; 1: greedy)."""
    onnx: str = ""
    """Use an ONNX file from export or quantize instead of the run's own weights; decodes
    greedily."""
    attention: str = ""
    """File for a picture of the first sentence's attention (PNG)."""
    device: Device = "auto"
    """Device to compute on."""


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text, or answer in a conversation, with a language model."""

    prompts: tuple[str, ...] = field(default=(), metadata={"positional": True})
    """Texts to continue, or messages of a conversation (default: standard input)."""
    run: str = ""
    """Run directory that holds model/."""
    chat: bool | None = None
    """Hold a conversation: each prompt, or each line of standard input, is a message (default: on
    if the model was trained on conversations)."""
    system: str = ""
    """System message of the conversation."""
    max_tokens: int = 256
    """Largest number of tokens to write."""
    temperature: float = 0.8
    """How much the choice of tokens varies (0: always the likeliest)."""
    top_p: float = 0.95
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the choice; the same seed gives the same text."""
    device: Device = "auto"
    """Device to compute on."""


Format = Literal["transformers", "adapter", "torch", "onnx"]


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model for other programs."""

    run: str = ""
    """Run directory that holds model/."""
    to: str = ""
    """Folder to write. No file that is there is replaced (default: export in the run directory,
    which is replaced)."""
    format: Literal["", "transformers", "adapter", "torch", "onnx"] = ""
    """transformers: safetensors and config.json of that library, for its own models and for
    language models (adapters are merged). adapter: only the adapters, in the format of peft. torch:
    a torch.export program (.pt2). onnx: an ONNX file (default: transformers for language models,
    else onnx)."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Measure latency and throughput of a trained model."""

    run: str = ""
    """Run directory that holds model/."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Batch sizes to measure."""
    iterations: int = 30
    """Timed calls per batch size."""
    warm_up: int = 5
    """Untimed calls before the timed ones."""
    threads: int = 0
    """Threads of the CPU (0: torch's choice)."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Device to compute on."""
    dtype: Literal["", "float32", "bf16", "fp16"] = ""
    """Precision (default: that of the training)."""
    onnx: str = ""
    """Use an ONNX file from export or quantize instead of the run's own weights."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Make a trained model smaller: weights and activations in 8 bits, for CPUs."""

    run: str = ""
    """Run directory that holds model/."""
    to: str = ""
    """ONNX file to write, which must not exist (default: quantized/model.onnx in the run
    directory)."""
    approach: Literal["auto", "static", "dynamic"] = "auto"
    """How to quantize activations: static measures their ranges on training data beforehand,
    dynamic at run time (auto: static for images, dynamic for texts and translations)."""
    calibration: int = 128
    """Number of training samples on which static measures the ranges."""
    max_drop: float = 0.01
    """Largest accepted loss of accuracy on the held-out data, or of BLEU (0.01 is one point); with
    a larger loss, nothing is written."""
    samples: int = 0
    """Number of held-out samples on which the accuracy is measured (0: all)."""
