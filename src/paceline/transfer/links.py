"""Links in a folder to be sent that lead out of it: what they lead to is not sent unasked.

A project or a data set may come from anybody, with a link to a key of whoever sends it on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.spec.errors import SettingError

_SHOWN = 5
_is_link = os.path.islink  # there may be very many files


class OutwardLinks:
    """Finds links that lead out of a folder.

    Args:
        root: The folder; it may itself be reached through links.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        real = root.resolve()
        self._within = [real]
        if real.parent.name == "snapshots":
            # of the Hugging Face cache: all files of a snapshot are links to the blobs beside it
            self._within.append(real.parent.parent / "blobs")
        self._folders: dict[str, bool] = {}  # by relative path: whether it lies in the root

    def target(self, path: str) -> str:
        """Where the file ``path`` really lies if that is outside; empty if it is inside."""
        folder, _, _ = path.rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = not self._outside(folder)
        if self._folders[folder] and not _is_link(f"{self._root}/{path}"):
            return ""
        return self._outside(path)

    def _outside(self, path: str) -> str:
        real = Path(os.path.realpath(self._root / path))
        return "" if any(real.is_relative_to(folder) for folder in self._within) else str(real)


def refuse_outward(root: Path, outward: Mapping[str, str]) -> None:
    """SettingError that names the links, if there are any."""
    if not outward:
        return
    shown = [f"{path} -> {target}" for path, target in [*outward.items()][:_SHOWN]]
    more = f"\nand {len(outward) - _SHOWN} more" if len(outward) > _SHOWN else ""
    raise SettingError(
        f"links in {root} lead out of it, and their content would be sent to other hosts",
        found="\n".join(shown) + more,
        remedy="Remove them; or add --follow-links, if the hosts may have what they lead to",
    )
