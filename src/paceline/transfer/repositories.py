"""Keeps files from other machines from forming a bare git repository in the run directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from paceline.agent.files.safe_paths import fold_name, is_head

_PARTS = {"objects", "refs", "commondir"}


class RepositoryGuard:
    """Refuses files that complete a bare git repository.

    Git takes a folder for a repository if it holds a file HEAD and the folders ``objects`` and
    ``refs``, or a file ``commondir`` in their place. Then git runs programs that a file ``config``
    names. Therefore a folder gets either a HEAD or the others. Names are compared as by
    :func:`fold_name`.

    Args:
        root: The run directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._with_head: set[str] = set()  # folders in which an accepted file is a HEAD
        self._with_parts: set[str] = set()  # folders in which an accepted file has one of _PARTS

    def accept(self, path: str) -> bool:
        """Whether a file may be made.

        Existing and accepted files count: accepted ones may still be on their way. Any thread.

        Args:
            path: Relative to the run directory; allowed by :func:`refusal_reason`.
        """
        with self._lock:
            return self._accept(path.split("/"))

    def _accept(self, names: Sequence[str]) -> bool:
        with_head, with_parts = set[str](), set[str]()
        for index, name in enumerate(map(fold_name, names)):
            is_file = index == len(names) - 1
            if name not in _PARTS and not (is_file and is_head(name)):
                continue
            folder = "/".join(names[:index])
            folded = fold_name(folder)
            has_head, has_parts = self._scan(folder)
            if name in _PARTS:
                if has_head or folded in self._with_head:
                    return False
                with_parts.add(folded)
            else:
                if has_parts or folded in self._with_parts:
                    return False
                with_head.add(folded)
        self._with_head |= with_head
        self._with_parts |= with_parts
        return True

    def _scan(self, folder: str) -> tuple[bool, bool]:
        """Whether a folder of the run directory holds a file HEAD, and any of ``_PARTS``."""
        has_head = has_parts = False
        with contextlib.suppress(OSError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                name = fold_name(entry.name)
                has_parts |= name in _PARTS
                has_head |= is_head(name) and not entry.is_dir(follow_symlinks=False)
        return has_head, has_parts
