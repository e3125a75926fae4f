"""Files that another user made first, in a folder that all users share."""

from __future__ import annotations

import os
import stat


def is_planted(path: str) -> bool:
    """Whether another user made a file or folder where everybody may make some, as in /tmp.

    Files of the owner of such a folder do not count.
    """
    try:
        status, parent = os.lstat(path), os.stat(os.path.dirname(os.path.abspath(path)))
    except OSError:  # there is none
        return False
    is_open = bool(parent.st_mode & stat.S_IWOTH)
    return is_open and status.st_uid not in (0, os.getuid(), parent.st_uid)
