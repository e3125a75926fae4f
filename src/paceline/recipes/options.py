"""Settings of recipes: one frozen dataclass each, from which flags, files and pages are made.

Nothing here imports torch: the launcher reads and refuses options before anything starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.spec import rundir
from paceline.spec.errors import SettingError

Dtype = Literal["float32", "float64", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda", "xpu"]
Backend = Literal["auto", "gloo", "nccl", "xccl", "mpi"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_ONE = r"(?:[1-9]\d*|\d+(?:\.\d+)?[smh]|epoch)"
_CADENCE = re.compile(rf"never|{_ONE}(?:,{_ONE})*")


@dataclass(frozen=True)
class Options:
    """What every recipe understands."""

    model: str = ""
    """Model to train, by name."""
    data: str = ""
    """Data set, by name or as a path."""
    data_dir: str = ""
    """Folder that holds the files of the named data set (default: the usual places)."""
    epochs: int = 1
    """Passes over the training data."""
    steps: int = 0
    """Maximum number of steps; overrides --epochs (0: unlimited)."""
    global_batch: int = 64
    """Samples of one step over all processes together; the same at any number of them."""
    batch_per_process: int = 0
    """Samples of each process in a step: the global batch then grows with their number, and
    --global-batch is only the one that --lr is for (0: --global-batch is divided)."""
    micro_batch: int = 0
    """Most samples that one process computes at once; more are accumulated (0: no limit)."""
    lr: float = 1e-3
    """Highest learning rate of the schedule."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """How --lr follows a batch that --batch-per-process made grow."""
    schedule: Literal["cosine", "linear", "inverse-sqrt", "constant", "step", "plateau"] = "cosine"
    """Learning-rate schedule, over all steps."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """With --schedule step: fractions of training at which the rate is divided by 10."""
    warm_up: float = 0.05
    """Fraction of training over which the learning rate rises."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """Optimizer."""
    nesterov: bool = True
    """Nesterov's momentum in sgd, where --momentum is not 0."""
    momentum: float = 0.9
    """Momentum of sgd, first moment of the others."""
    weight_decay: float = 1e-2
    """Weight decay."""
    clip_norm: float = 0.0
    """Largest norm of the whole gradient (0: no limit)."""
    evaluate_every: int = 0
    """Evaluate every N steps, besides at the end of each epoch (0: only there)."""
    patience: int = 0
    """Stop early after N evaluations without an improvement (0: never)."""
    stop_at: float = 0.0
    """Stop as soon as an evaluation reaches this accuracy, or BLEU of translations (0: never)."""
    shard: bool = False
    """Spread parameters and optimizer state over the processes (FSDP2) instead of copies (DDP)."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Seed of initial weights, data order, split and augmentation."""
    fast: bool = True
    """Compute in bf16 where machine and model are faster in it; --no-fast keeps to --dtype."""
    dtype: Dtype = "float32"
    """Precision; bf16 and fp16 compute in it and keep float32 parameters."""
    device: Device = "auto"
    """Where to train."""
    backend: Backend = "auto"
    """Communication backend."""
    run_dir: str = ""
    """Folder for the run's files (default: runs/NAME-DATE-TIME)."""
    checkpoint_every: str = "epoch,10m"
    """When to save a checkpoint: 500 (steps), 10m (minutes), epoch, several with commas, or never;
    one of the best state is saved anyway."""
    keep: int = 3
    """How many of the newest checkpoints stay (0: all); the best one stays anyway."""
    resume: str = "auto"
    """Resume from: auto (the newest in --run-dir, if there is one), never, latest, best, a step, or
    the folder of a run or a checkpoint."""
    when_full: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint cannot be written: continue training, or stop cleanly."""
    track: tuple[str, ...] = ()
    """Trackers besides metrics.jsonl: tensorboard, wandb, mlflow, trackio."""
    track_project: str = "paceline"
    """Name under which the trackers collect runs."""
    track_each_node: bool = False
    """One tracker run for each node, in a group, instead of one for the job."""
    log_every: int = 0
    """Steps between two records in metrics.jsonl (0: by the length of an epoch)."""
    check_every: int = 100
    """Verify every N steps that all ranks have identical parameters and buffers."""
    deterministic: bool = False
    """On accelerators, only kernels that repeat bit for bit: slower; some operations have none."""

    def validate(self) -> None:
        """Refuses values that cannot be, without loading anything.

        Raises:
            SettingError: Names the flag, the value and what is allowed.
        """
        at_least("--epochs", self.epochs, 1)
        at_least("--steps", self.steps, 0)
        at_least("--global-batch", self.global_batch, 1)
        at_least("--seed", self.seed, 0)
        at_least("--log-every", self.log_every, 0)
        at_least("--check-every", self.check_every, 1)
        for name in self.track:
            known("--track", name, TRACKERS)
        at_least("--keep", self.keep, 0)
        if not _CADENCE.fullmatch(self.checkpoint_every):
            raise SettingError(
                f"--checkpoint-every {self.checkpoint_every}: cannot be understood",
                remedy="500 (steps), 10m (minutes), epoch, never, or several: epoch,10m",
            )
        at_least("--batch-per-process", self.batch_per_process, 0)
        at_least("--micro-batch", self.micro_batch, 0)
        at_least("--weight-decay", self.weight_decay, 0)
        at_least("--clip-norm", self.clip_norm, 0)
        at_least("--evaluate-every", self.evaluate_every, 0)
        at_least("--patience", self.patience, 0)
        at_least("--stop-at", self.stop_at, 0)
        if not 0 < self.lr < float("inf"):
            raise SettingError(f"--lr {self.lr} must be greater than 0", remedy="--lr 0.001")
        below_one("--warm-up", self.warm_up)
        for milestone in self.milestones:
            below_one("--milestones", milestone)
        below_one("--momentum", self.momentum)
        if self.scale_lr != "none" and not self.batch_per_process:
            raise SettingError(
                f"--scale-lr {self.scale_lr} has nothing to scale by",
                found="the global batch is the same at any number of processes",
                remedy="--batch-per-process N lets the batch grow, or leave --scale-lr out",
            )


O = TypeVar("O")  # noqa: E741


def at_least(flag: str, value: float, least: float) -> None:
    """Raises SettingError when a number is too small."""
    if not value >= least:
        raise SettingError(f"{flag} {value} must be at least {least}", remedy=f"{flag} {least}")


def below_one(flag: str, value: float) -> None:
    """Raises SettingError when a number is not in [0, 1)."""
    if not 0 <= value < 1:
        raise SettingError(f"{flag} {value} must be at least 0 and less than 1")


def check_accuracy(stop_at: float) -> None:
    """Raises SettingError when ``--stop-at`` is no accuracy."""
    if stop_at > 1:
        raise SettingError(
            f"--stop-at {stop_at:g} is more than an accuracy can be",
            found="an accuracy lies between 0 and 1",
            remedy=f"--stop-at {stop_at / 100:g}" if stop_at <= 100 else "--stop-at 0.9",
        )


def known(flag: str, value: str, names: Iterable[str]) -> None:
    """Raises SettingError, with the nearest name, when ``value`` is none of ``names``."""
    choices = sorted(names)
    if value in choices:
        return
    near = difflib.get_close_matches(value, choices, 1, cutoff=0.5)
    raise SettingError(
        f"{flag} {value}: unknown",
        found=f"known are {', '.join(choices)}",
        remedy=f"did you mean {flag} {near[0]}?" if near else f"{flag} {choices[0]}",
    )


def parse(kind: type[O], argv: Sequence[str], prog: str) -> O:
    """Options from flags.

    Args:
        kind: The recipe's options class.
        argv: Flags as typed; ``--like RUN`` stands for all options of that run.
        prog: Name of the command, for the help.

    Raises:
        SettingError: An unknown flag (with the nearest one) or a value of the wrong kind.
        SystemExit: After ``--help``.
    """
    if wanted := {"-h", "--help", "--help-all"}.intersection(argv):
        from paceline.recipes.reference import help_of

        sys.stdout.write(help_of(kind, prog, everything="--help-all" in wanted) + "\n")
        raise SystemExit(0)
    import tyro

    rest, default = _from_record(kind, list(argv))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if default is None:
                return tyro.cli(kind, args=rest, prog=prog)
            return tyro.cli(kind, args=rest, prog=prog, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        message, remedy = _said(complaint.getvalue())
        raise SettingError(message, remedy=remedy or f"{prog} --help lists all options") from None


def _from_record(kind: type[O], argv: list[str]) -> tuple[list[str], O | None]:
    """Takes ``--like RUN`` out of the flags: the others change what that run had."""
    joined = next((arg for arg in argv if arg.startswith("--like=")), None)
    if joined is not None:
        argv.remove(joined)
        return argv, recorded(kind, Path(joined.partition("=")[2]))
    if "--like" not in argv[:-1]:
        return argv, None
    place = argv.index("--like")
    return argv[:place] + argv[place + 2 :], recorded(kind, Path(argv[place + 1]))


def recorded(kind: type[O], path: Path) -> O:
    """The options of an earlier run, from its config.json or its directory.

    Raises:
        SettingError: The file cannot be read or holds other options.
    """
    file = path / rundir.CONFIG if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["options"]
        values.pop("run_dir", None)  # a repetition is a run of its own
        known_names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known_names):
            raise ValueError(f"unknown options: {', '.join(unknown)}")
        return kind(**{name: _frozen(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"--like {path}: no options of an earlier run",
            found=f"{type(error).__name__}: {error}",
            remedy="name the directory of a run of the same recipe",
        ) from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _said(box: str) -> tuple[str, str]:
    """Message and suggestion out of the parser's drawn box."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ").strip() for line in text.splitlines() if line.startswith("│")]
    sections = " ".join("\0" if set(line) == {"─"} else line for line in lines).split("\0")
    near = next((part for part in sections if "meant" in part), "")
    flag = re.search(r"--[\w-]+", near)
    return sections[0].strip(), f"did you mean {flag.group()}?" if flag else ""


def to_argv(options: Options) -> list[str]:
    """The flags that make these options again; settings at their default are left out."""
    argv: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            argv += as_flags("--" + field.name.replace("_", "-"), value)
    return argv


def option_names(kind: type[Options]) -> list[str]:
    """Every option of a recipe, as typed but for the dashes before it."""
    return [field.name.replace("_", "-") for field in dataclasses.fields(kind)]


def as_flags(flag: str, value: Any) -> list[str]:
    """An option with its value, as typed."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, (tuple, list)):
        return [flag, *(str(item) for item in value)]
    return [f"{flag}={value}"]
