"""The values of ``--overlap``: whether the first steps settle the size of gradient buckets."""

from __future__ import annotations

from paceline.spec.errors import SettingError

VALUES = ("backward", "auto")
"""``backward``: buckets keep DDP's sizes; ``auto``: some sizes are tried, the fastest is used."""


def validate(text: str) -> None:
    """Refuses an unknown value.

    Raises:
        SettingError: Names the possible values.
    """
    if text == "late":
        raise SettingError(
            "--overlap late: late optimizer updates were removed",
            remedy="--overlap auto",
        )
    if text not in VALUES:
        raise SettingError(
            f"--overlap {text}: there is no such way", remedy=f"one of {', '.join(VALUES)}"
        )
