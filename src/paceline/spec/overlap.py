"""What ``--overlap`` may be: what the exchange of gradients may run beside."""

from __future__ import annotations

from typing import Literal, get_args

from paceline.spec.communication import asked as way_of
from paceline.spec.errors import SettingError

OverlapName = Literal["backward", "auto", "late"]
"""``backward``: the backward pass; ``auto``: the next forward pass, too, where that is quicker and
no lost rank is recovered from in place; ``late``: also where one could be, and then is not."""
NOT_RECOVERED = "updates may come late (--overlap late)"
"""Why ranks that are lost are not recovered from in place."""
_NEVER_LATE = ("powersgd", "local")


def refuse(
    text: str,
    *,
    communication: str = "exact",
    sharded: bool = False,
    several: bool = False,
    compiled: bool = False,
    clipped: bool = False,
    scaled: bool = False,
    averaged: bool = False,
) -> None:
    """For no such way, and for ``late`` beside what leaves no update to be put off.

    Args:
        text: What was asked for.
        communication: As ``--communication`` has it.
        sharded: The parameters are spread over the processes.
        several: It is for one of several models.
        compiled: The model is compiled.
        clipped: The norm of the whole gradient is limited.
        scaled: Losses are scaled, as those of fp16 are.
        averaged: The model has an average of weights.

    Raises:
        SettingError: There is no such way, or it cannot be had beside one of these.
    """
    if text not in get_args(OverlapName):
        raise SettingError(
            f"--overlap {text}: there is no such way",
            remedy=f"one of {', '.join(get_args(OverlapName))}",
        )
    all_at_once = "it needs all gradients, or all new weights, at once"
    beside: tuple[tuple[str, bool, str], ...] = (
        (f"--communication {communication}", way_of(communication).name in _NEVER_LATE,
         "only averages that are made bucket by bucket can come late"),
        ("--shard", sharded, "FSDP exchanges parameters and gradients by itself"),
        ("several models", several, "it looks at the steps of one model"),
        ("--compile", compiled, "compiled code reads parameters where it cannot be seen"),
        ("--clip-norm", clipped, all_at_once),
        ("fp16", scaled, all_at_once),
        ("an average of weights (--ema)", averaged, all_at_once),
    )  # fmt: skip
    for what, is_there, found in beside:
        if text == "late" and is_there:
            raise SettingError(
                f"--overlap late does not go with {what}",
                found=found,
                remedy="--clip-norm 0, or leave --overlap late out"
                if what == "--clip-norm"
                else "leave out one of the two",
            )
