"""Many children of the launching side, and what they cost it."""

from __future__ import annotations

import asyncio
import sys
import threading

from paceline.cluster.fanout import wait_without_threads

CHILDREN = 20


async def _children() -> tuple[int, list[int]]:
    """Threads while children run, and their exit statuses."""
    wait_without_threads()
    argv = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read(); sys.exit(7)"]
    pipe = asyncio.subprocess.PIPE
    children = [await asyncio.create_subprocess_exec(*argv, stdin=pipe) for _ in range(CHILDREN)]
    wait_without_threads()  # further hosts, dialled on the way: those before are not forgotten
    threads = threading.active_count()
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    return threads, [await child.wait() for child in children]


def test_children_are_waited_for_without_a_thread_each() -> None:
    before = threading.active_count()
    for _ in range(2):  # a second event loop of the same process, too
        threads, statuses = asyncio.run(_children())
        assert threads <= before + 1
        assert statuses == [7] * CHILDREN
