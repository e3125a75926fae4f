"""Helpers of operations, the functions that answer the launcher's requests."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

Message = Dict[str, Any]
Operation = Callable[[Any, Message, bytes], None]  # agent, request, blob


def in_thread(operation: Operation) -> Operation:
    """Makes a slow operation run in a thread of its own."""

    @functools.wraps(operation)
    def threaded(agent: Any, request: Message, blob: bytes) -> None:
        agent.in_thread(lambda: operation(agent, request, blob), request)

    return threaded


def in_queue(name: str) -> Callable[[Operation], Operation]:
    """Makes operations with the same queue's name run one after the other, beside the loop."""

    def decorate(operation: Operation) -> Operation:
        @functools.wraps(operation)
        def queued(agent: Any, request: Message, blob: bytes) -> None:
            agent.in_queue(name, lambda: operation(agent, request, blob), request)

        return queued

    return decorate


def describe_error(error: BaseException) -> str:
    """Names the problem: the system's words and the file, or the exception's type and text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (" (%s)" % error.filename if error.filename else "")
    return "%s: %s" % (type(error).__name__, error)
