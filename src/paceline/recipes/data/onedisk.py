"""One process of a disk at a time: whoever comes first does the work, the others find it done."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_HELD = (errno.EAGAIN, errno.EACCES)  # a share of SMB says the second
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


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
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno not in _HELD:
            raise
    waiting()
    fcntl.flock(file, fcntl.LOCK_EX)
    return True
