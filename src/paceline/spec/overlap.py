"""What ``--overlap`` may be: whether the first steps settle the size of gradient buckets."""

from __future__ import annotations

from paceline.spec.errors import SettingError

WAYS = ("backward", "auto")
"""``backward``: buckets keep DDP's sizes; ``auto``: some sizes are tried, the quickest stays."""


def refuse(text: str) -> None:
    """Refuses an unknown value.

    Raises:
        SettingError: Names the values that can be used.
    """
    if text == "late":
        raise SettingError(
            "--overlap late: late optimizer updates were removed",
            remedy="--overlap auto",
        )
    if text not in WAYS:
        raise SettingError(
            f"--overlap {text}: there is no such way", remedy=f"one of {', '.join(WAYS)}"
        )
