"""One process of a disk at a time: whoever comes first does the work, the others find it done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.train.files import lock

SEEN_S = 2.0
"""How late a network disk may show what another host has made, once its folder is listed."""


def appears(path: Path, is_there: Callable[[Path], bool], waited: bool) -> bool:
    """Whether something is there by now.

    Args:
        path: What.
        is_there: Looks at it.
        waited: Another process had the lock, and may just have made it: a network disk may go on
            saying for a while that it is not there.
    """
    deadline = time.monotonic() + (SEEN_S if waited else 0)
    while not is_there(path):
        if time.monotonic() >= deadline:
            return False
        os.listdir(path.parent)  # noqa: PTH208 - has the disk asked anew
        time.sleep(SEEN_S / 20)
    return True


@contextmanager
def one_at_a_time(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds the lock that the file ``path`` stands for; it ends with the process.

    It holds for the hosts of a shared disk, too, where that knows locks (NFS and SMB do).

    Args:
        path: The file, made where it is missing; its folder is there.
        waiting: Called once when another process has the lock.

    Yields:
        Whether it is held: some disks have no locks, and then nobody waits.

    Raises:
        OSError: The file cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _take(file, waiting)
    finally:
        os.close(file)


def _take(file: int, waiting: Callable[[], None]) -> bool:
    held = lock(file)
    if held is False:
        waiting()
        held = lock(file, wait=True)
    return bool(held)
