"""Where data come from: named, from files, or from a hub. Nothing here imports torch."""

from __future__ import annotations

import re
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


FILES = (".csv", ".tsv", ".txt", ".jsonl")
"""Endings of data files."""


def is_hub_id(name: str) -> bool:
    """True for what can only be an id of a hub: ``user/name``, and no path that is there."""
    path = Path(name)
    local = path.exists() or path.parent.is_dir() or path.suffix.lower() in FILES
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not local


def located(name: str, data_dir: str) -> Path:
    """A data file or folder: the file of that name in ``data_dir`` if it is there, else itself.

    On the launching machine the one there is a link to the named file, which is the one to tell of.
    """
    path = Path(name).expanduser()
    sent = Path(data_dir).expanduser() / path.name
    if not data_dir or not sent.is_file():
        return path
    return path if path.is_file() and path.samefile(sent) else sent


def is_path(data: str) -> bool:
    """True for what is no short name: a path, or an id of a hub."""
    return "/" in data or "." in data or data.startswith("~") or Path(data).exists()
