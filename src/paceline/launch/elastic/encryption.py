"""Key and certificate with which the agents of a job encrypt its connections."""

from __future__ import annotations

import asyncio
import secrets

from paceline.rendezvous.certificate import make_certificate


class JobEncryption:
    """What agents need to encrypt the connections of an attempt.

    They get it in the conversation with the launcher, which is encrypted, and keep it in memory.
    """

    def __init__(self) -> None:
        self._key = secrets.token_hex(32)
        self._network = 64 + secrets.randbelow(64)  # of loopback: another one for other jobs
        self._certificate = self._private_key = ""
        self._numbers: dict[str, int] = {}  # of hosts, for their ranks' addresses

    async def prepare(self) -> None:
        """Makes the certificate. SettingError if there is no ``openssl``."""
        self._certificate, self._private_key = await asyncio.to_thread(make_certificate)

    def settings(self, host: str, address: str) -> dict[str, str]:
        """Returns the settings of one host; ``address``: for the traffic of the job."""
        number = self._numbers.setdefault(host, len(self._numbers) + 1)
        return {
            "address": address,
            "loopback": f"127.{self._network}.{number >> 8}.{number & 255}",
            "key": self._key,
            "certificate": self._certificate,
            "private_key": self._private_key,
        }
