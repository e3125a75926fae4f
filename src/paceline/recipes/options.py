"""Options of the recipes: those that all share, and those of image, text and translation.

Flags, keys of ``paceline.toml`` and reference pages are generated from them. Needs no torch: the
launcher validates options before it starts anything.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from paceline.recipes.argv import check_at_least, check_fraction, check_known, check_part
from paceline.recipes.data import IMAGE_SETS, PAIR_SETS, TEXT_SETS, is_path
from paceline.recipes.pretrained_list import IMAGENET, RESNET_FILES
from paceline.spec.errors import SettingError
from paceline.spec.training import balance, communication

Dtype = Literal["float32", "float64", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda", "xpu"]
Backend = Literal["auto", "gloo", "nccl", "xccl", "ccl", "mpi"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_INTERVAL = r"(?:[1-9]\d*|\d+(?:\.\d+)?[smh]|epoch)"
_CADENCE = re.compile(rf"never|{_INTERVAL}(?:,{_INTERVAL})*")


def check_data(data: str, known_names: Iterable[str]) -> None:
    """Raises SettingError unless it is a path, an id of the hub, or a known name."""
    if not is_path(data):
        problem = "there is no folder, file or data set of this name"
        check_known("--data", data, known_names, _names_here(), problem=problem)


def _names_here() -> Iterator[str]:
    """Yields the names in the current folder, which is not read before the first is needed."""
    with contextlib.suppress(OSError):  # it may be unreadable, or removed
        yield from (path.name for path in Path().iterdir())


@dataclass(frozen=True)
class Options:
    """Options of every recipe."""

    presets: ClassVar[Mapping[str, Sequence[str]]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    """Fields that have no default."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Fields whose 0 stands for a value that the recipe derives."""
    unused: ClassVar[Mapping[str, str]] = {}
    """Inherited fields that the recipe refuses and its help omits, each with the reason."""

    model: str = ""
    """Model to train, by name."""
    data: str = ""
    """Data set, by name or as a path."""
    data_dir: str = ""
    """Folder in which the files of a named data set are, or to which they are downloaded (default:
    the usual places)."""
    mirror: str = ""
    """Server that is asked first for the files of a named data set, as MIRROR/NAME/FILE."""
    epochs: int = 1
    """Passes through the training data."""
    steps: int = 0
    """Maximum number of steps; overrides --epochs (0: unlimited)."""
    global_batch: int = 64
    """Number of samples in one step, over all processes together."""
    batch_per_process: int = 0
    """Samples per process in a step. 0: --global-batch is divided among the processes. Otherwise
    the global batch grows with the number of processes, and --global-batch only says for which
    batch --lr is meant."""
    micro_batch: str = "0"
    """Largest number of samples that a process computes at once. If it has more, gradients are
    accumulated. A number (0: no limit), a number for some hosts, such as n2=8, or auto (each
    process tries what fits into its memory)."""
    balance: str = "even"
    """Each process's share of a step: even, auto (by its speed, measured during training), or a
    weight for each host, such as n1=3,n2=1."""
    drop_slow: bool = False
    """With --balance auto: give no samples to a process if steps are faster without it."""
    lr: float = 1e-3
    """Highest learning rate of the schedule."""
    find_lr: bool = False
    """Instead of training, raise the learning rate for 100 steps (or --steps) and suggest one."""
    find_batch: bool = False
    """Instead of training, find how many samples fit into a process's memory at once."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """How to scale --lr when --batch-per-process makes the batch grow."""
    schedule: Literal[
        "cosine", "linear", "inverse-sqrt", "constant", "step", "plateau", "stable"
    ] = "cosine"
    """Learning-rate schedule, over all steps. With stable the rate falls only at the end."""
    cool_down: float = 0.2
    """With --schedule stable: fraction of training over which the rate falls to zero."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """With --schedule step: fractions of training at which the rate is divided by 10."""
    warm_up: float = 0.05
    """Fraction of training over which the learning rate rises."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """Optimizer."""
    nesterov: bool = True
    """Use Nesterov's momentum in sgd if --momentum is not 0."""
    momentum: float = 0.9
    """Momentum of sgd; beta1 of the other optimizers."""
    weight_decay: float = 1e-2
    """Weight decay."""
    clip_norm: float = 0.0
    """Largest norm of the whole gradient (0: no limit)."""
    ema: float = 0.0
    """Decay of a moving average of the weights, such as 0.999 (0: no average). The average is
    evaluated and saved."""
    ema_start: int = 0
    """With --ema: number of steps before averaging starts."""
    evaluate_every: int = 0
    """Evaluate every N steps, in addition to the end of each epoch. 0: only at the end of each
    epoch; with --stop-at, also about sixteen times in a long epoch."""
    patience: int = 0
    """Stop early after N evaluations without an improvement (0: never)."""
    stop_at: float = 0.0
    """Stop as soon as an evaluation reaches this accuracy (0 to 1), or BLEU of translations in
    percent (0: never)."""
    shard: bool = False
    """Divide parameters and optimizer state among the processes (FSDP2) instead of copying them to
    each process (DDP)."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Seed of initial weights, data order, split and augmentation."""
    fast: bool = True
    """Compute in bf16 if the machine supports it in hardware and the network is large enough to
    gain by it; --no-fast uses --dtype."""
    dtype: Dtype = "float32"
    """Precision. bf16 and fp16 are used for computing; trained parameters stay in float32."""
    device: Device = "auto"
    """Device to train on."""
    backend: Backend = "auto"
    """Communication backend."""
    communication: str = "exact"
    """How gradients are averaged over the processes: exact; for slow links fp16 and bf16 (half the
    bytes), int8 (a quarter), int4 (a fifth; an eighth between two processes) or local (local steps;
    increases the loss); or auto, which measures and chooses."""
    overlap: str = "auto"
    """Sizes of the gradient buckets that are exchanged during the backward pass. auto: two
    processes on CPUs try some sizes in the first steps and use the fastest. backward: the sizes
    never change."""
    run_dir: str = ""
    """Folder for the run's files (default: runs/NAME-DATE-TIME)."""
    checkpoint_every: str = "epoch,10m"
    """When to save a checkpoint: 500 (steps), 10m (minutes), epoch, several separated by commas, or
    never. The best state is always saved."""
    keep: int = 3
    """How many of the newest checkpoints to keep (0: all). The best one is always kept. --keep
    without a number is another option: see `paceline train --help`."""
    resume: str = "auto"
    """Resume from: auto (the newest in --run-dir, if there is one), never, latest, best, a step, or
    the folder of a run or a checkpoint."""
    checkpoint_copies: str = "auto"
    """Number of other hosts that get copies of checkpoints: a number, or auto (one if hosts
    have their own disks, otherwise none)."""
    when_full: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written: continue training, or stop cleanly."""
    track: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio."""
    track_project: str = "paceline"
    """Project name for the trackers."""
    track_each_node: bool = False
    """Use one tracker run per node, in a group, instead of one for the job."""
    log_every: int = 0
    """Steps between two records in metrics.jsonl (0: chosen by the length of an epoch)."""
    watch: int = 0
    """Record the norms of gradients and weights every N steps (0: never)."""
    watch_devices: bool = False
    """Also record the load of CPUs and accelerators."""
    check_every: int = 100
    """Verify every N steps that all ranks have identical parameters and buffers."""
    deterministic: bool = False
    """On accelerators, use only kernels that are reproducible bit by bit; slower, and some
    operations have none."""

    def validate(self) -> None:
        """Raises SettingError for impossible values and combinations; loads nothing."""
        for field in self.required:
            if not getattr(self, field):
                raise SettingError(
                    f"--{field} is missing", remedy=f"--{field} with a file, a folder or an id"
                )
        for field, reason in self.unused.items():
            if getattr(self, field):
                raise SettingError(f"--{field} has no effect", found=reason, remedy="leave it out")
        self._validate_numbers()
        for name in self.track:
            check_known("--track", name, TRACKERS)
        if self.mirror and not re.match(r"https?://[^/]", self.mirror):
            raise SettingError(
                f"--mirror {self.mirror}: no address of a web server",
                remedy="--mirror https://HOST/FOLDER, or --data-dir FOLDER for files that are here",
            )
        if not _CADENCE.fullmatch(self.checkpoint_every):
            raise SettingError(
                f"--checkpoint-every {self.checkpoint_every} is not valid",
                remedy="500 (steps), 10m (minutes), epoch, never, or several: epoch,10m",
            )
        parse_copies(self.checkpoint_copies)
        balance.parse_weights(self.balance)
        balance.validate(
            self.balance,
            drop_slow=self.drop_slow,
            sharded=self.shard,
            communication=self.communication,
        )
        uses_trials = {
            "--micro-batch auto": parse_micro_batch(self.micro_batch) == "auto",
            "--find-batch": self.find_batch,
        }
        for flag, is_set in uses_trials.items():
            if is_set and self.shard:
                raise SettingError(
                    f"{flag} cannot be combined with --shard",
                    found="a process whose memory is full would leave the others waiting",
                    remedy="leave out one of the two",
                )
        communication.validate(
            self.communication,
            sharded=self.shard,
            scaled=self.dtype == "fp16",
            averaged=bool(self.ema),
        )
        communication.validate_overlap(self.overlap)
        if self.scale_lr != "none" and not self.batch_per_process:
            raise SettingError(
                f"--scale-lr {self.scale_lr} has nothing to scale by",
                found="the global batch is the same at any number of processes",
                remedy="--batch-per-process N lets the batch grow, or leave --scale-lr out",
            )

    def _validate_numbers(self) -> None:
        for name in ("epochs", "global_batch", "check_every"):
            minimum = int(name not in self.derived)
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), minimum)
        for name in (
            *("steps", "seed", "log_every", "keep", "batch_per_process", "weight_decay"),
            *("clip_norm", "ema_start", "watch", "evaluate_every", "patience", "stop_at"),
        ):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 0)
        is_derived = "lr" in self.derived and self.lr == 0
        if not (0 < self.lr < float("inf") or is_derived):
            raise SettingError(f"--lr {self.lr} must be greater than 0", remedy="--lr 0.001")
        check_fraction("--ema", self.ema)
        check_fraction("--warm-up", self.warm_up)
        check_fraction("--cool-down", self.cool_down)
        check_fraction("--momentum", self.momentum)
        for milestone in self.milestones:
            check_fraction("--milestones", milestone)


def parse_copies(text: str) -> int | None:
    """Parses ``--checkpoint-copies``; ``None`` for ``auto``."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 5):
        raise SettingError(
            f"--checkpoint-copies {text}: no number of copies", remedy="1, 0 for none, or auto"
        )
    return int(text)


def parse_micro_batch(micro_batch: str) -> Literal["auto"] | int | dict[str, int]:
    """Parses ``--micro-batch``: ``auto``, a number, or numbers by host."""
    if micro_batch == "auto":
        return "auto"
    if micro_batch.isdecimal():
        return int(micro_batch)
    limits: dict[str, int] = {}
    for entry in micro_batch.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        if not name or not number.isdecimal() or not int(number) or name in limits:
            duplicate = f"{name} has a limit already" if name in limits else ""
            raise SettingError(
                f"--micro-batch {micro_batch} is not valid",
                found=duplicate or f"{entry!r} is no number of samples, and no host with one",
                remedy="auto, a number (0: no limit), or one for some hosts: --micro-batch n2=8",
            )
        limits[name] = int(number)
    return limits


def check_accuracy(stop_at: float) -> None:
    """Raises SettingError if ``--stop-at`` is no accuracy."""
    if stop_at > 1:
        raise SettingError(
            f"--stop-at {stop_at:g} is more than an accuracy can be",
            found="an accuracy lies between 0 and 1",
            remedy=f"--stop-at {stop_at / 100:g}" if stop_at <= 100 else "--stop-at 0.9",
        )


def check_fine_tuning(is_builtin: bool, options: Options) -> None:
    """Raises SettingError for inconsistent --model, --weights, --from-scratch and --freeze.

    ``is_builtin`` tells whether the model is one of the recipe's own.
    """
    weights, scratch = getattr(options, "weights", ""), getattr(options, "from_scratch", False)
    freeze, stages = getattr(options, "freeze", False), getattr(options, "unfreeze_every", 0)
    is_random = scratch or (is_builtin and not weights)
    check_at_least("--unfreeze-every", stages, 0)
    for width in getattr(options, "add_layers", ()):
        check_at_least("--add-layers", width, 1)
    if weights == IMAGENET and is_builtin and options.model not in RESNET_FILES:
        raise SettingError(
            f"--weights {IMAGENET}: there are none for --model {options.model}",
            found=f"there are some for {', '.join(RESNET_FILES)}",
            remedy="--model resnet18",
        )
    if weights and not is_builtin:
        raise SettingError(
            f"--weights {weights} cannot be used with --model {options.model}",
            found="that model brings its own weights",
            remedy="--model FOLDER with the weights in it",
        )
    if freeze and is_random:
        raise SettingError(
            "--freeze would keep random weights",
            found=f"--model {options.model} starts from scratch here",
            remedy="--weights RUN, or a Hugging Face model with its weights",
        )
    if stages and (is_random or freeze is False):
        raise SettingError(
            f"--unfreeze-every {stages} needs something frozen",
            remedy="pretrained weights and --freeze, or leave it out",
        )


IMAGE_MODELS = {
    "cnn": "a small network without batch normalisation and dropout",
    "resnet18": "residual network, 11 million parameters",
    "resnet34": "residual network, 21 million parameters",
    "resnet50": "residual network, 26 million parameters",
}
AUGMENTATIONS = {
    "flip": "mirror half of the images, at random",
    "vflip": "turn half of the images upside down, at random",
    "crop": "shift by up to an eighth of the size",
    "rotate": "turn by up to 15 degrees",
    "zoom": "enlarge or shrink by up to 15 percent",
    "resized-crop": "enlarge a random part, 8 to 100 percent of the area, to the full size",
}
_IMAGENET = (
    *("--epochs=90", "--global-batch=256", "--lr=0.1", "--image-size=224"),
    *("--optimizer=sgd", "--momentum=0.9", "--weight-decay=0.0001"),
    *("--augment", "resized-crop", "flip"),
)
IMAGE_PRESETS: dict[str, tuple[str, ...]] = {
    "imagenet": (
        *("--model=resnet50", *_IMAGENET),
        *("--schedule=cosine", "--warm-up=0.055", "--label-smoothing=0.1"),
    ),
    "imagenet-example": (
        *("--model=resnet18", *_IMAGENET, "--no-nesterov", "--schedule=step", "--warm-up=0"),
        *("--milestones", "0.333333", "0.666666"),
    ),
}
"""Flags of each preset; flags on the command line come after them."""


@dataclass(frozen=True)
class ImageOptions(Options):
    """Train an image classifier."""

    presets = IMAGE_PRESETS

    preset: str = ""
    """Settings to start from: imagenet or imagenet-example. Other options change them."""
    model: str = "cnn"
    """cnn, resnet18, resnet34, resnet50, torchvision/NAME, or any image classifier of Hugging Face
    by id or folder."""
    weights: str = ""
    """Start from these weights: a run directory, a safetensors or .pth file (for cnn and resnets),
    or imagenet (torchvision's weights, for resnets). A run also sets the image size and the
    normalisation."""
    from_scratch: bool = False
    """Take only the architecture of a Hugging Face model, not its weights."""
    freeze: bool | None = None
    """Train only the head; the backbone stays as loaded (default: on if pretrained weights get a
    new head)."""
    unfreeze_every: int = 0
    """After every N epochs, train one more stage of a frozen backbone, starting at the head."""
    add_layers: tuple[int, ...] = ()
    """Widths of linear layers with ReLU to add between the backbone and the output layer."""
    fast: bool = True
    """Compute in bf16 if the machine supports it in hardware, and in the memory format
    channels_last; neither for cnn on images below 16 pixels. --no-fast uses --dtype."""
    data: str = "digits"
    """digits, fashion-mnist, mnist, cifar10, cifar100, dummy; a folder with one folder per class or
    with tar shards; or a Hugging Face data set by id or folder."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Use only the cache, never the network."""
    skip_damaged: bool = False
    """Leave out images that cannot be read; every file is tried at the start."""
    workers: int = -1
    """Processes per rank that decode photos in advance (0: the rank itself decodes; -1: as many as
    there are free CPUs)."""
    epochs: int = 15
    """Passes through the training data."""
    global_batch: int = 64
    """Number of samples in one step, over all processes together."""
    lr: float = 4e-3
    """Highest learning rate of the schedule."""
    label_smoothing: float = 0.0
    """Fraction of the target probability to spread over all classes."""
    augment: tuple[str, ...] = ()
    """Augmentations of the training images: flip, vflip, crop, rotate, zoom, resized-crop."""
    image_size: int = 0
    """Height and width to which images are scaled. 0: the size that a pretrained model expects;
    without such a model, 64 for images from a folder, and no scaling for other data sets."""
    test_fraction: float = 0.2
    """Fraction of every class to hold out, if the data set has no split of its own."""
    val_fraction: float = 0.0
    """Fraction of the training images to use for validation, if the data set has no validation
    part."""

    @property
    def crop(self) -> bool:
        """Whether files of another aspect ratio are cropped instead of squeezed."""
        return "resized-crop" in self.augment

    def validate(self) -> None:
        super().validate()
        check_accuracy(self.stop_at)
        if not is_path(self.model):
            check_known("--model", self.model, IMAGE_MODELS)
        if self.preset:
            check_known("--preset", self.preset, IMAGE_PRESETS)
        check_fine_tuning(self.model in IMAGE_MODELS, self)
        for name in self.augment:
            check_known("--augment", name, AUGMENTATIONS)
        check_data(self.data, IMAGE_SETS)
        check_fraction("--label-smoothing", self.label_smoothing)
        check_fraction("--val-fraction", self.val_fraction)
        check_at_least("--workers", self.workers, -1)
        check_part("--test-fraction", self.test_fraction)
        if self.image_size:
            check_at_least("--image-size", self.image_size, 8)


TEXT_MODELS = {
    "small": "a transformer encoder of two layers, from scratch",
    "words": "the mean of word vectors, from scratch: fast, and blind to word order",
}
GENERATED_TEXTS = {
    "meals": "short restaurant reviews: is the food praised? (generated)",
    "dummy": "random words, for measuring speed",
}
"""Generated text data sets."""


@dataclass(frozen=True)
class TextOptions(Options):
    """Train or fine-tune a text classifier."""

    model: str = "small"
    """small or words (from scratch), or any sequence classifier of Hugging Face by id or folder."""
    weights: str = ""
    """Start from these weights: a run directory or a safetensors file (for the models small and
    words)."""
    from_scratch: bool = False
    """Take only the architecture of a Hugging Face model, not its weights."""
    freeze: bool = False
    """Train only the head; the backbone stays as loaded."""
    unfreeze_every: int = 0
    """With --freeze: after every N epochs, train one more stage, starting at the head."""
    add_layers: tuple[int, ...] = ()
    """Widths of linear layers with ReLU to add between the backbone and the output layer."""
    dropout: float = 0.1
    """Dropout of the model small. Above 0, the result depends on how a batch is divided among
    processes."""

    data: str = "meals"
    """A csv, tsv, jsonl or parquet file; a folder with train, val and test files or with tar
    shards; a Hugging Face data set by id or folder; or ag-news, meals, dummy."""
    test_data: str = ""
    """Held-out file of the same format (default: a part of --data)."""
    data_config: str = ""
    """Configuration of a Hugging Face data set."""
    offline: bool = False
    """Use only the cache, never the network."""
    delimiter: str = ""
    """Delimiter between columns of a csv file (default: a comma, in tsv files a tab, unless a
    header with usual names has another one)."""
    label_column: str = ""
    """Name of the column with labels (default: label or another usual name, else the first)."""
    text_column: str = ""
    """Name of the column with texts (default: text or another usual name, else all but the
    first)."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, if labels are numbers that start at 0 or 1."""
    test_fraction: float = 0.1
    """Fraction to hold out, if the data set has no split of its own."""

    tokenizer: Literal["word", "bpe", "char"] = "word"
    """Tokenizer to train on the data, for the models small and words."""
    vocab_size: int = 0
    """Largest number of tokens (0: 30000 words, 8000 pieces)."""
    max_length: int = 128
    """Number of tokens to use of each text; the rest is cut off."""

    epochs: int = 10
    """Passes through the training data."""
    global_batch: int = 32
    """Number of texts in one step, over all processes together."""
    lr: float = 1e-3
    """Highest learning rate of the schedule; 5e-5 suits fine-tuning."""
    label_smoothing: float = 0.0
    """Fraction of the target probability to spread over all classes."""

    def validate(self) -> None:
        super().validate()
        check_accuracy(self.stop_at)
        if not is_path(self.model):
            check_known("--model", self.model, TEXT_MODELS)
        check_data(self.data, [*GENERATED_TEXTS, *TEXT_SETS])
        check_at_least("--vocab-size", self.vocab_size, 0)
        check_at_least("--max-length", self.max_length, 2)
        check_fraction("--dropout", self.dropout)
        check_fraction("--label-smoothing", self.label_smoothing)
        self._validate_data()
        check_fine_tuning(self.model in TEXT_MODELS, self)

    def _validate_data(self) -> None:
        check_part("--test-fraction", self.test_fraction)
        if len(self.delimiter) > 1 and self.delimiter != "\\t":
            raise SettingError(
                f"--delimiter {self.delimiter!r} must be one character", remedy="--delimiter ';'"
            )


TRANSLATION_SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (64, 2, 4, 256),
    "small": (256, 3, 4, 1024),
    "base": (512, 6, 8, 2048),
    "big": (1024, 6, 16, 4096),
}
"""(d_model, layers, heads, ff) by name; ``base`` and ``big`` are those of the original paper."""
GENERATED_PAIRS = {
    "numbers": "numbers, from digits to English words (generated)",
    "reverse": "short sequences of letters, to be reversed (generated)",
    "dummy": "random words, for measuring speed",
}
"""Generated parallel corpora."""


@dataclass(frozen=True)
class TranslationOptions(Options):
    """Train an encoder-decoder transformer from scratch on a parallel corpus."""

    model: str = "base"
    """Size: tiny, small, base or big. --d-model, --layers, --heads and --ff each change one of its
    dimensions."""
    d_model: int = 0
    """Width of the model (0: by --model; base: 512)."""
    layers: int = 0
    """Layers of the encoder, and of the decoder (0: by --model; base: 6)."""
    heads: int = 0
    """Attention heads (0: by --model; base: 8)."""
    ff: int = 0
    """Width of the feed-forward layers (0: by --model; base: 2048)."""
    norm: Literal["pre", "post"] = "pre"
    """Layer normalisation before each part (more stable) or after it (as in the paper)."""
    dropout: float = 0.1
    """Dropout. Above 0, the result depends on how a batch is divided among processes."""

    data: str = "numbers"
    """A TSV file (source, tab, target), a JSONL file, the source file of a pair (see --target), a
    folder with train/val/test files, a Hugging Face data set by id or folder; or multi30k, numbers,
    reverse, dummy."""
    target: str = ""
    """File with the translation of --data, line by line."""
    source_lang: str = ""
    """Language of the source, such as en, if the data set names languages."""
    target_lang: str = ""
    """Language of the target, such as it, if the data set names languages."""
    data_config: str = ""
    """Configuration of a Hugging Face data set, such as en-it."""
    offline: bool = False
    """Use only the cache, never the network."""
    val_fraction: float = 0.1
    """Fraction of the pairs to hold out, if the data set has no split of its own."""

    tokenizer: Literal["word", "bpe", "char"] = "word"
    """word: words, digits and punctuation marks; bpe: pieces of words; char: characters."""
    vocab_size: int = 0
    """Largest number of tokens of each language (0: 30000 words, 8000 pieces)."""
    min_frequency: int = 2
    """Words (bpe: pairs) that are rarer than this in the training data get no token."""
    seq_len: int = 350
    """Longest sentence, in tokens."""
    too_long: Literal["drop", "cut", "refuse"] = "drop"
    """What to do with longer sentences in training: leave them out and count them (drop), cut them,
    or refuse to start. Validation uses every sentence and cuts longer sources."""

    epochs: int = 20
    """Passes through the training data."""
    global_batch: int = 64
    """Number of sentence pairs in one step, over all processes together."""
    lr: float = 5e-4
    """Highest learning rate of the schedule."""
    label_smoothing: float = 0.1
    """Fraction of the target probability to spread over all tokens."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient (0: no limit)."""

    beam: int = 1
    """Beams of the search in validation (1: greedy)."""
    score_every: int = 1
    """Translate the whole validation set every N epochs, and after the last one."""
    samples: int = 3
    """Number of translations to show at each validation."""

    def validate(self) -> None:
        super().validate()
        check_known("--model", self.model, TRANSLATION_SIZES)
        self._validate_sizes()
        self._validate_data()
        check_at_least("--beam", self.beam, 1)
        check_at_least("--score-every", self.score_every, 1)
        check_at_least("--samples", self.samples, 0)
        check_fraction("--dropout", self.dropout)
        check_fraction("--label-smoothing", self.label_smoothing)

    def dimensions(self) -> tuple[int, int, int, int]:
        """Returns (d_model, layers, heads, ff) of the network."""
        defaults = TRANSLATION_SIZES[self.model]
        width, layers = self.d_model or defaults[0], self.layers or defaults[1]
        return width, layers, self.heads or defaults[2], self.ff or defaults[3]

    @property
    def languages(self) -> tuple[str, str]:
        """Names of source and target in data with named languages; may be empty."""
        return self.source_lang, self.target_lang

    def _validate_sizes(self) -> None:
        for flag in ("d_model", "layers", "heads", "ff", "vocab_size"):
            check_at_least("--" + flag.replace("_", "-"), getattr(self, flag), 0)
        check_at_least("--min-frequency", self.min_frequency, 1)
        check_at_least("--seq-len", self.seq_len, 4)
        width, _, heads, _ = self.dimensions()
        if width % heads or width % 2:
            raise SettingError(
                f"--d-model {width} must be even and a multiple of --heads {heads}",
                remedy=f"--d-model {max(width // (2 * heads), 1) * 2 * heads}",
            )

    def _validate_data(self) -> None:
        check_part("--val-fraction", self.val_fraction)
        if self.target and self.data in (*GENERATED_PAIRS, *PAIR_SETS):
            raise SettingError(
                f"--target {self.target} needs a file as --data",
                found=f"--data {self.data} has both sides",
                remedy="--data FILE.SOURCE --target FILE.TARGET",
            )
        if bool(self.source_lang) != bool(self.target_lang):
            raise SettingError(
                "--source-lang and --target-lang need each other", remedy="name both, or none"
            )
        check_data(self.data, [*GENERATED_PAIRS, *PAIR_SETS])
