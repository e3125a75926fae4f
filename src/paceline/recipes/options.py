"""Settings of recipes: one frozen dataclass each, from which flags, files and pages are made.

Nothing here imports torch: the launcher reads and refuses options before anything starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from paceline.spec.errors import SettingError

Dtype = Literal["float32", "float64", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda", "xpu"]
Backend = Literal["auto", "gloo", "nccl", "xccl", "mpi"]


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
    """End after so many global steps instead of --epochs (0: not)."""
    global_batch: int = 64
    """Samples of one step over all processes together; the same at any number of them."""
    lr: float = 1e-3
    """Highest learning rate of the schedule."""
    seed: int = 0
    """Seed of initial weights, data order, split and augmentation."""
    dtype: Dtype = "float32"
    """Number format; bf16 and fp16 compute in it and keep float32 parameters."""
    device: Device = "auto"
    """Where to train."""
    backend: Backend = "auto"
    """Communication backend."""
    run_dir: str = ""
    """Folder for the run's files (default: runs/NAME-DATE-TIME)."""
    log_every: int = 0
    """Global steps between two log records (0: by the length of an epoch)."""
    check_every: int = 100
    """Global steps between two proofs that all ranks hold the same parameters."""

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
        if not 0 < self.lr < float("inf"):
            raise SettingError(f"--lr {self.lr} must be greater than 0", remedy="--lr 0.001")


O = TypeVar("O")  # noqa: E741


def at_least(flag: str, value: float, least: float) -> None:
    """Raises SettingError when a number is too small."""
    if not value >= least:
        raise SettingError(f"{flag} {value} must be at least {least}", remedy=f"{flag} {least}")


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
        argv: Flags as typed.
        prog: Name of the command, for the help.

    Raises:
        SettingError: An unknown flag (with the nearest one) or a value of the wrong kind.
        SystemExit: After ``--help``.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(argv), prog=prog)
    except SystemExit as stop:
        if not stop.code:
            raise
        message, remedy = _said(complaint.getvalue())
        raise SettingError(message, remedy=remedy or f"{prog} --help lists all options") from None


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
            argv += _flag("--" + field.name.replace("_", "-"), value)
    return argv


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, (tuple, list)):
        return [flag, *(str(item) for item in value)]
    return [f"{flag}={value}"]
