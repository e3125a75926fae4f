"""The methods of ``--communication``: how gradients are averaged, and what excludes which."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.spec.errors import SettingError

METHODS: dict[str, str] = {
    "exact": "the mean of all gradients as it is",
    "fp16": "half the bytes, without a loss that shows",
    "bf16": "half the bytes",
    "int8": "a quarter of the bytes",
    "int4": "a fifth of the bytes; an eighth between two processes",
    "local": "local steps and a mean now and then (local:20 takes 20, otherwise 10); costs loss",
    "auto": "measures, and takes the method that leaves out least and hides its bytes",
}
"""Description by name."""
SCRIPT_METHODS = ("fp16", "bf16", "int8", "int4", "auto")
"""Methods for a script's own DistributedDataParallel."""
SINGLE_MODEL = ("auto", "local")
"""Methods for a session with only one model."""
PARAMETER_RANGES = {"local": (2, 10_000)}
"""Methods that take a number behind a colon, with its bounds."""


@dataclass(frozen=True, slots=True)
class Method:
    """One of :data:`METHODS`, and the number behind its colon (0 for none)."""

    name: str
    number: int = 0


def parse_method(text: str) -> Method:
    """Parses ``int8`` or ``local:20``; raises SettingError for anything else."""
    if re.match(r"powersgd\b", str(text)):
        raise SettingError(
            f"--communication {text}: powersgd was removed",
            remedy="--communication int4, or auto; in a script with a DDP of its own, torch's "
            "powerSGD_hook",
        )
    match = re.fullmatch(r"([a-z0-9]+)(?::(\d{1,9}))?", str(text))
    if match is None or match[1] not in METHODS:
        raise SettingError(
            f"--communication {text}: unknown value", remedy=f"one of {', '.join(METHODS)}"
        )
    name, number = match[1], int(match[2] or 0)
    if match[2] is None:
        return Method(name)
    if name not in PARAMETER_RANGES:
        raise SettingError(
            f"--communication {text}: {name} takes no number", remedy=f"--communication {name}"
        )
    low, high = PARAMETER_RANGES[name]
    if not low <= number <= high:
        raise SettingError(
            f"--communication {text}: the number lies between {low} and {high}",
            remedy=f"--communication {name}",
        )
    return Method(name, number)


def validate_forecast(text: str) -> None:
    """Raises SettingError for a method whose step times vary too much to be forecast."""
    if parse_method(text).name == "local":
        raise SettingError(
            "steps of --communication local cannot be forecast",
            found="most steps only compute, and a few take much longer for the exchange",
            remedy="forecast another method; between exchanges a step takes what it takes alone",
        )


def unused(method: str) -> str:
    """Returns the note on ``--communication`` for a script that had no use for it."""
    return f"--communication {method} did nothing: the script made no DistributedDataParallel"


def lost_errors(method: str) -> str:
    """Returns the note on a restart of a script; empty if its method has no error feedback."""
    if method in ("exact", "fp16"):
        return ""
    return (
        f"--communication {method}: the rounding errors of the last start are lost; they would have"
        " been added to the next gradients"
    )


_CONFLICTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--shard": (
        tuple(name for name in METHODS if name != "exact"),
        "FSDP exchanges parameters and gradients by itself, as they are",
        "leave out one of the two",
    ),
    "several models": (
        SINGLE_MODEL,
        "it looks at the steps of one model",
        "name a method for each: communication='int8'",
    ),
    "fp16": (
        ("local",),
        "with local steps each rank would scale its losses differently",
        "bf16, or another --communication",
    ),
    "an average of weights (--ema)": (
        ("local",),
        "with local steps each rank would have a different average",
        "leave out one of the two",
    ),
}


def validate(text: str, *, sharded: bool = False, several: bool = False, scaled: bool = False,
             averaged: bool = False) -> None:  # fmt: skip
    """Raises SettingError for an unknown method, and for one that other options rule out.

    Args:
        sharded: The parameters are spread over the processes.
        several: The session has several models.
        scaled: Losses are scaled, as with fp16.
        averaged: The model has an average of weights.
    """
    name = parse_method(text).name
    options = (
        ("--shard", sharded),
        ("several models", several),
        ("fp16", scaled),
        ("an average of weights (--ema)", averaged),
    )
    for option, is_set in options:
        names, reason, remedy = _CONFLICTS[option]
        if is_set and name in names:
            raise SettingError(
                f"--communication {text} cannot be combined with {option}",
                found=reason,
                remedy=remedy,
            )


# -- the sizes of gradient buckets

OVERLAP_VALUES = ("backward", "auto")
"""``backward``: buckets keep DDP's sizes; ``auto``: some sizes are tried, the fastest is used."""


def validate_overlap(text: str) -> None:
    """Raises SettingError for an unknown value."""
    if text == "late":
        raise SettingError(
            "--overlap late: late optimizer updates were removed", remedy="--overlap auto"
        )
    if text not in OVERLAP_VALUES:
        raise SettingError(
            f"--overlap {text}: unknown value", remedy=f"one of {', '.join(OVERLAP_VALUES)}"
        )
