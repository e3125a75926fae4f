"""Helpers of operations, the functions that answer the launcher's requests."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Protocol, Tuple

if TYPE_CHECKING:
    from .files.blocks import Downloads, Uploads
    from .files.data import DataCopies
    from .supervision.job import NodeJob

Message = Dict[str, Any]
Operation = Callable[[Any, Message, bytes], None]  # agent, request, blob
Work = Callable[[], None]


class Agent(Protocol):
    """What operations use of the agent (``server.Agent``)."""

    identity: bytes
    job: NodeJob
    listeners: Dict[str, socket.socket]
    sinks: List[socket.socket]
    reserved: Optional[socket.socket]
    folders: List[Path]
    run_keys: Dict[str, Optional[List[str]]]
    output_roots: Dict[str, int]
    uploads: Uploads
    downloads: Downloads
    data_copies: DataCopies
    listed_files: Dict[str, Dict[str, Tuple[str, int]]]
    run_locks: Dict[str, int]

    def reply(self, request: Message, blob: bytes = b"", **answer: Any) -> None: ...
    def in_thread(self, work: Work, request: Optional[Message] = None) -> None: ...
    def in_queue(self, name: str, work: Work, request: Message) -> None: ...
    def on_loop(self, work: Work, request: Message) -> None: ...


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
