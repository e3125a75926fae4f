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
    "powersgd": "products of thin matrices (powersgd:8 has eight columns, otherwise four)",
    "local": "steps apart and a mean now and then (local:20 takes 20, otherwise 10); costs loss",
    "auto": "measures, and takes the way that leaves out least and hides its bytes",
}
"""Each way by its name."""
ALONE = ("auto", "local")
"""Those for a session's only model."""
NUMBERED = {"powersgd": (1, 256), "local": (2, 10_000)}
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
    """From ``int8`` or ``powersgd:8``.

    Raises:
        SettingError: There is no such way, or no such number.
    """
    found = re.fullmatch(r"([a-z0-9]+)(?::(\d{1,9}))?", text)
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


def refuse_sharded(text: str) -> None:
    """For a model whose parameters are spread over the processes.

    Raises:
        SettingError: Averages other than exact ones were asked for.
    """
    if asked(text).name != "exact":
        raise SettingError(
            f"--communication {text} does not go with --shard",
            found="FSDP exchanges parameters and gradients by itself, as they are",
            remedy="leave out one of the two",
        )


def refuse_several(text: str) -> None:
    """For one of several models.

    Raises:
        SettingError: It is a way that only a single model can have.
    """
    if asked(text).name in ALONE:
        raise SettingError(
            f"--communication {text} does not go with several models",
            found="it looks at the steps of one model",
            remedy="name a way for each: communication='int8'",
        )


def refuse_scaled(text: str) -> None:
    """For losses that are scaled, as those of fp16 are.

    Raises:
        SettingError: Ranks would scale differently.
    """
    if asked(text).name == "local":
        raise SettingError(
            f"--communication {text} does not go with fp16",
            found="ranks that step alone would scale their losses differently",
            remedy="bf16, or another way to communicate",
        )


def refuse_average(text: str) -> None:
    """For a model that has an average of weights.

    Raises:
        SettingError: Ranks would have different ones.
    """
    if asked(text).name == "local":
        raise SettingError(
            f"--communication {text} does not go with an average of weights (--ema)",
            found="ranks that step alone would have different averages",
            remedy="leave out one of the two",
        )
