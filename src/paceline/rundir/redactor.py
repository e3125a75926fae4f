"""Keeps named secrets out of files, also when a secret comes in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

MASK = b"[secret]"


class Redactor:
    """Replaces secrets.

    Args:
        secrets: What no file may show; as text, and as JSON writes it.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        plain = [os.fsencode(secret) for secret in secrets]
        quoted = [json.dumps(secret)[1:-1].encode() for secret in secrets]
        # one secret may be the beginning of another: the longer first
        self._secrets = sorted({*plain, *quoted}, key=len, reverse=True)
        self._texts = sorted({*secrets}, key=len, reverse=True)
        self._held: dict[tuple[str, str], bytes] = {}

    def whole(self, data: bytes) -> bytes:
        """Data that is complete in itself, without the secrets."""
        for secret in self._secrets:
            data = data.replace(secret, MASK)
        return data

    def text(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self._texts:
            text = text.replace(secret, MASK.decode())
        return text

    def piece(self, name: str, stream: str, data: bytes) -> bytes:
        """What can be written of a stream by now.

        What may be the beginning of a secret is held back until the stream goes on or
        :meth:`rest` asks for it.
        """
        data = self.whole(self._held.pop((name, stream), b"") + data)
        count = max((_overlap(data, secret) for secret in self._secrets), default=0)
        if not count:
            return data
        self._held[name, stream] = data[-count:]
        return data[:-count]

    def rest(self, name: str) -> bytes:
        """What was held back of a file's streams: nothing more will come."""
        ours = [key for key in self._held if key[0] == name]
        return b"".join(self._held.pop(key) for key in ours)

    @property
    def waiting(self) -> list[str]:
        """Files of which something is held back."""
        return list(dict.fromkeys(name for name, _ in self._held))


def _overlap(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of ``data`` are the beginning of ``secret``."""
    longest = min(len(secret) - 1, len(data))
    return next((n for n in range(longest, 0, -1) if data.endswith(secret[:n])), 0)
