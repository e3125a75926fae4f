"""What ``--communication`` may be: the names of the ways to average gradients."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.spec.errors import SettingError

WAYS: dict[str, str] = {
    "exact": "the mean of all gradients as it is",
    "fp16": "half the bytes, without a loss that shows",
    "bf16": "half the bytes",
    "int8": "a quarter of the bytes",
    "int4": "a fifth of the bytes; an eighth between two processes",
    "local": "steps apart and a mean now and then (local:20 takes 20, otherwise 10); costs loss",
    "auto": "measures, and takes the way that leaves out least and hides its bytes",
}
"""Each way by its name."""
ALONE = ("auto", "local")
"""Those for a session's only model."""
NUMBERED = {"local": (2, 10_000)}
"""Those that take a number behind a colon, and between what."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for.

    Attributes:
        name: One of :data:`WAYS`.
        number: Behind the colon; 0 for none.
    """

    name: str
    number: int = 0


def asked(text: str) -> Asked:
    """From ``int8`` or ``local:20``.

    Raises:
        SettingError: There is no such way, or no such number.
    """
    if re.match(r"powersgd\b", str(text)):
        raise SettingError(
            f"--communication {text}: powersgd was removed",
            remedy="--communication int4, or auto; in a script with a DDP of its own, torch's "
            "powerSGD_hook",
        )
    found = re.fullmatch(r"([a-z0-9]+)(?::(\d{1,9}))?", str(text))
    if found is None or found[1] not in WAYS:
        raise SettingError(
            f"--communication {text}: there is no such way", remedy=f"one of {', '.join(WAYS)}"
        )
    name, number = found[1], int(found[2] or 0)
    if found[2] is None:
        return Asked(name)
    if name not in NUMBERED:
        raise SettingError(
            f"--communication {text}: {name} takes no number", remedy=f"--communication {name}"
        )
    least, most = NUMBERED[name]
    if not least <= number <= most:
        raise SettingError(
            f"--communication {text}: the number lies between {least} and {most}",
            remedy=f"--communication {name}",
        )
    return Asked(name, number)


def refuse_forecast(text: str) -> None:
    """SettingError for a way whose steps are too unlike each other to be forecast."""
    if asked(text).name == "local":
        raise SettingError(
            "steps of --communication local cannot be forecast",
            found="they take as long as computing, and now and then one takes much longer",
            remedy="forecast another way; between exchanges a step takes what it takes alone",
        )


_APART = ("local",)  # ranks step alone
_CLASHES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "--shard": (
        tuple(name for name in WAYS if name != "exact"),
        "FSDP exchanges parameters and gradients by itself, as they are",
        "leave out one of the two",
    ),
    "several models": (
        ALONE,
        "it looks at the steps of one model",
        "name a way for each: communication='int8'",
    ),
    "fp16": (
        _APART,
        "ranks that step alone would scale their losses differently",
        "bf16, or another way to communicate",
    ),
    "an average of weights (--ema)": (
        _APART,
        "ranks that step alone would have different averages",
        "leave out one of the two",
    ),
}


def refuse(text: str, *, sharded: bool = False, several: bool = False, scaled: bool = False,
           averaged: bool = False) -> None:  # fmt: skip
    """For no such way, and for one that does not go with what else there is.

    Args:
        text: What was asked for.
        sharded: The parameters are spread over the processes.
        several: It is for one of several models.
        scaled: Losses are scaled, as those of fp16 are.
        averaged: The model has an average of weights.

    Raises:
        SettingError: There is no such way, or it cannot be had beside one of these.
    """
    name = asked(text).name
    beside = (
        ("--shard", sharded),
        ("several models", several),
        ("fp16", scaled),
        ("an average of weights (--ema)", averaged),
    )
    for what, is_there in beside:
        ways, found, remedy = _CLASHES[what]
        if is_there and name in ways:
            raise SettingError(
                f"--communication {text} does not go with {what}", found=found, remedy=remedy
            )
