"""One process of a disk at a time: whoever comes first does the work, the others find it done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.train.files import lock

NOTE_AFTER_S, POLL_S = 10.0, 0.1
SEEN_S = 2.0
"""How late a network disk may show what another host has made, once its folder is listed."""


def wait_until_exists(path: Path, exists: Callable[[Path], bool], other_held_lock: bool) -> bool:
    """Returns whether ``path`` exists.

    If another process held the lock, it may just have made it; a network disk shows that late.
    """
    deadline = time.monotonic() + (SEEN_S if other_held_lock else 0)
    while not exists(path):
        if time.monotonic() >= deadline:
            return False
        os.listdir(path.parent)  # noqa: PTH208 - has the disk asked anew
        time.sleep(SEEN_S / 20)
    return True


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds the lock that the file ``path`` stands for; it ends with the process.

    It holds for the hosts of a shared disk, too, where that knows locks (NFS and SMB do).

    Args:
        path: The file, made where it is missing; its folder is there.
        on_wait: Called once when another process has the lock.

    Yields:
        Whether it is held: some disks have no locks, and then nobody waits.

    Raises:
        OSError: The file cannot be made.
    """
    # who may not write it may not read it either: reading is enough to lock it for all
    mode = 0o622
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, mode)  # a pipe would keep us waiting for its reader
    with suppress(OSError):  # somebody else's
        os.fchmod(file, os.fstat(file).st_mode & mode)
    try:
        yield _acquire(file, on_wait, path)
    finally:
        os.close(file)


def _acquire(file: int, on_wait: Callable[[], None], path: Path) -> bool:
    is_held = lock(file)
    if is_held is False:
        on_wait()
        deadline = time.monotonic() + NOTE_AFTER_S
        while is_held is False and time.monotonic() < deadline:
            time.sleep(POLL_S)
            is_held = lock(file)
    if is_held is False:
        text = f"waiting for another process, which holds the lock {path}"
        print(f"paceline: {text}", file=sys.stderr, flush=True)
        is_held = lock(file, wait=True)
    return bool(is_held)
