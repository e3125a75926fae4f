"""Receives and sends files in blocks; a received file gets its name once it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any, BinaryIO, Dict, Tuple

from . import safe_paths

Message = Dict[str, Any]
RECEIVING, SENDING = "arriving", "departing"  # queues: see Agent.in_queue


class Uploads:
    """Receives several files at a time from the launcher; used from one thread."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], safe_paths.IncomingFile] = {}

    def receive(self, root: str, path: str, request: Message, data: bytes, durable: bool) -> None:
        """Receives the next block of a file, which gets its name after the last one.

        Args:
            root, path: A folder, and the file's path below it.
            request: ``offset`` and ``last``; for the last block also ``sha256``, perhaps ``size``.
            data: The block.
            durable: Whether to flush the file before it gets its name.

        Raises:
            ValueError: The block is not the next one, or the file differs from its hash or size.
        """
        file = self._open.pop((root, path), None)
        if request["offset"] == 0:
            if file is not None:
                file.drop()  # an earlier attempt was not finished
            file = safe_paths.IncomingFile(root, path, durable)
        if file is None:
            raise ValueError("the beginning of %s did not come" % path)
        try:
            file.add(request["offset"], data)
            if request["last"]:
                file.finish(request.get("size", -1), request["sha256"])
            else:
                self._open[root, path] = file
        except BaseException:
            file.drop()
            raise

    def drop(self) -> None:
        """Removes all incomplete files."""
        for file in self._open.values():
            file.drop()
        self._open = {}


class Downloads:
    """Reads several files at a time for the launcher; used from one thread."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], Tuple[BinaryIO, "hashlib._Hash"]] = {}

    def block(self, request: Message) -> Tuple[Message, bytes]:
        """Reads the next block of a file; with the last one, returns the file's hash.

        Args:
            request: ``root``, ``path`` (below it), ``offset``, ``count`` (bytes) and ``last``;
                perhaps ``may_grow``: the file may be longer than the launcher expects.

        Raises:
            ValueError: The file's size is not the one that the launcher expects.
        """
        key = (request["root"], request["path"])
        file, digest = self._open_at(key, request["offset"])
        data = file.read(request["count"])
        digest.update(data)
        if len(data) == request["count"] and not request["last"]:
            self._open[key] = file, digest
            return {}, data
        with file:
            is_longer = not request.get("may_grow") and file.read(1)
            if len(data) != request["count"] or is_longer:
                raise ValueError("%s changed while it was read" % request["path"])
        return {"sha256": digest.hexdigest()}, data

    def _open_at(self, key: Tuple[str, str], offset: int) -> Tuple[BinaryIO, "hashlib._Hash"]:
        cached = self._open.pop(key, None)
        if offset == 0:
            if cached is not None:
                cached[0].close()
            root, path = key
            fd = safe_paths.open_file(root, safe_paths.resolve_link(root, path), os.O_RDONLY)
            return os.fdopen(fd, "rb"), hashlib.sha256()
        if cached is None or cached[0].tell() != offset:
            raise ValueError("byte %d of %s is not the next one" % (offset, key[1]))
        return cached

    def drop(self) -> None:
        """Closes all files that were not read to their end."""
        for file, _ in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open = {}
