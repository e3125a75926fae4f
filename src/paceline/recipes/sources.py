"""Where data come from: named, from files, or from a hub. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HubSource:
    """A Hugging Face data set.

    Attributes:
        name: Id (``user/name``) or folder.
        config: Its configuration; empty for the only one.
        offline: Whether the network must not be touched.
    """

    name: str
    config: str = ""
    offline: bool = False


def is_path(data: str) -> bool:
    """True for what is no short name: a path, or an id of a hub."""
    return "/" in data or "." in data or data.startswith("~") or Path(data).exists()
