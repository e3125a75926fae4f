"""A password for ssh that stands in no argument, variable or file.

ssh asks a helper program (SSH_ASKPASS); the helper asks us over a socket in a private folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

_HELPER = """#!{python} -IS
import os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["PACELINE_ASKPASS"])
    sys.stdout.buffer.write(s.makefile("rb").read() + b"\\n")
"""


class Passwords:
    """Answers ssh's questions for a password while the ``with`` block runs.

    Attributes:
        asked: How often ssh has asked.
    """

    def __init__(self, password: str) -> None:
        self._password = password.encode()
        self.asked = 0
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Passwords:
        helper = self._folder / "askpass"
        helper.write_text(_HELPER.format(python=sys.executable))
        helper.chmod(0o700)
        self._socket.bind(str(self._folder / "socket"))
        self._socket.listen(64)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Variables for ssh; none of them is a secret."""
        return {
            **os.environ,
            "SSH_ASKPASS": str(self._folder / "askpass"),
            "SSH_ASKPASS_REQUIRE": "force",
            "DISPLAY": os.environ.get("DISPLAY", ":0"),  # older ssh asks only where this is set
            "PACELINE_ASKPASS": str(self._folder / "socket"),
        }

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self.asked += 1
                connection.sendall(self._password)
