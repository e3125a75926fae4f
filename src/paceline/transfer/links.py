"""Finds links that lead out of a folder, so that their targets are not sent unintentionally.

An untrusted project or data set may contain a link to a key of its user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.spec.errors import SettingError

_MAX_LINKS = 5
_is_link = os.path.islink  # called for very many files


class OutwardLinks:
    """Finds links that lead out of a folder.

    Args:
        root: The folder; its path may contain links.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        real = root.resolve()
        self._roots = [real]
        if real.parent.name == "snapshots":
            # Hugging Face cache: the files of a snapshot are links to blobs
            self._roots.append(real.parent.parent / "blobs")
        self._folders: dict[str, bool] = {}  # whether a folder is inside, by relative path

    def target(self, path: str) -> str:
        """The real path of a file that is outside; empty if it is inside."""
        folder, _, _ = path.rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = not self._outside(folder)
        if self._folders[folder] and not _is_link(f"{self._root}/{path}"):
            return ""
        return self._outside(path)

    def _outside(self, path: str) -> str:
        real = Path(os.path.realpath(self._root / path))
        return "" if any(real.is_relative_to(folder) for folder in self._roots) else str(real)


def reject_outward(root: Path, outward: Mapping[str, str]) -> None:
    """Raises SettingError with the names of the links, if there are any."""
    if not outward:
        return
    links = [f"{path} -> {target}" for path, target in [*outward.items()][:_MAX_LINKS]]
    suffix = f"\nand {len(outward) - _MAX_LINKS} more" if len(outward) > _MAX_LINKS else ""
    raise SettingError(
        f"links in {root} lead out of it, and their content would be sent to other hosts",
        found="\n".join(links) + suffix,
        remedy="Remove them; or add --follow-links, if the hosts may have what they lead to",
    )
