"""Files on their way to and from this node, block by block. Used from one thread each."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any, BinaryIO, Dict, Tuple

from . import inside

Message = Dict[str, Any]


class Arrivals:
    """Files that the launcher sends, several at a time."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], inside.Arriving] = {}

    def take(self, root: str, path: str, request: Message, data: bytes, durable: bool) -> None:
        """The next block of ``path`` below ``root``; the file is there after the last one.

        Args:
            root, path: Where the file belongs.
            request: ``offset``, ``last``; with the last ``sha256`` and perhaps ``size``.
            data: The block.
            durable: Flush the file before it gets its name.
        """
        file = self._open.pop((root, path), None)
        if request["offset"] == 0:
            if file is not None:
                file.drop()  # somebody began and went away
            file = inside.Arriving(root, path, durable)
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
        """Forgets what has not come as a whole."""
        for file in self._open.values():
            file.drop()
        self._open = {}


class Departures:
    """Files that the launcher fetches, several at a time."""

    def __init__(self) -> None:
        self._open: Dict[Tuple[str, str], Tuple[BinaryIO, "hashlib._Hash"]] = {}

    def block(self, request: Message) -> Tuple[Message, bytes]:
        """The next block of a file, and with the last one the hash of the whole.

        Args:
            request: ``root``, ``path`` (below it), ``offset``, ``count`` (bytes) and ``last``.

        Raises:
            ValueError: The file is not as long as the launcher believes.
        """
        key = (request["root"], request["path"])
        file, digest = self._opened(key, request["offset"])
        data = file.read(request["count"])
        digest.update(data)
        if len(data) == request["count"] and not request["last"]:
            self._open[key] = file, digest
            return {}, data
        with file:
            if len(data) != request["count"] or file.read(1):
                raise ValueError("%s changed while it was read" % request["path"])
        return {"sha256": digest.hexdigest()}, data

    def _opened(self, key: Tuple[str, str], offset: int) -> Tuple[BinaryIO, "hashlib._Hash"]:
        known = self._open.pop(key, None)
        if offset == 0:
            if known is not None:
                known[0].close()
            fd = inside.open_file(*key, os.O_RDONLY)
            return os.fdopen(fd, "rb"), hashlib.sha256()
        if known is None or known[0].tell() != offset:
            raise ValueError("byte %d of %s is not the next one" % (offset, key[1]))
        return known

    def drop(self) -> None:
        """Closes what was not read to its end."""
        for file, _ in self._open.values():
            with contextlib.suppress(OSError):
                file.close()
        self._open = {}
