"""Runs a script on a host over ssh, with or without a password.

The password is in no argument, variable or file: ssh asks a helper program (SSH_ASKPASS), which
reads it from us over a socket in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from paceline.remote.link import OutputTooLong, run_process
from paceline.remote.openssh import (
    SSH_FAILED,
    Refusal,
    SshOptions,
    classify,
    server_fingerprint,
    ssh_command,
    was_key_pinned,
)
from paceline.spec.hosts import Host

TIMEOUT_S = 60.0
# for logins with a password; ssh_command's own settings are for logins without prompts
_PASSWORD_SETTINGS = {
    "BatchMode": "no",
    "NumberOfPasswordPrompts": "1",
    "PreferredAuthentications": "publickey,keyboard-interactive,password",
}


@dataclass(frozen=True, slots=True)
class LoginResult:
    """Exit status of ssh or of the command, standard output and error, and why the login failed."""

    status: int
    output: str
    messages: str
    refusal: Refusal | None = None


async def run_on_host(host: Host, options: SshOptions, remote: list[str], script: str = "",
                      environment: Mapping[str, str] | None = None) -> LoginResult:  # fmt: skip
    """Runs ``remote`` with ``script`` on its standard input.

    Args:
        environment: Environment of ssh; if given, ssh may ask its helper for a password.
    """
    extra = _PASSWORD_SETTINGS if environment is not None else {}
    argv = ssh_command(host, options, remote, extra_settings=extra)
    try:
        result = await run_process(argv, TIMEOUT_S, script, environment)
    except asyncio.TimeoutError:
        result = CompletedProcess(argv, SSH_FAILED, "", "Connection timed out")
    except OutputTooLong as error:
        result = CompletedProcess(argv, SSH_FAILED, "", error.message)
    refusal = classify(result.stderr, SSH_FAILED, host) if result.returncode == SSH_FAILED else None
    return LoginResult(result.returncode, result.stdout, result.stderr, refusal)


def newly_pinned_key(answer: LoginResult) -> str | None:
    return server_fingerprint(answer.messages) if was_key_pinned(answer.messages) else None


_ASKPASS_SCRIPT = """#!{python} -IS
import os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["PACELINE_ASKPASS"])
    sys.stdout.buffer.write(s.makefile("rb").read() + b"\\n")
"""


class PasswordServer:
    """Answers ssh's password prompts while the ``with`` block runs."""

    def __init__(self, password: str) -> None:
        self._password = password.encode()
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> PasswordServer:
        helper = self._folder / "askpass"
        helper.write_text(_ASKPASS_SCRIPT.format(python=sys.executable))
        helper.chmod(0o700)
        self._socket.bind(str(self._folder / "socket"))
        self._socket.listen(64)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Returns variables for ssh, without secrets."""
        return {
            **os.environ,
            "SSH_ASKPASS": str(self._folder / "askpass"),
            "SSH_ASKPASS_REQUIRE": "force",
            "DISPLAY": os.environ.get("DISPLAY", ":0"),  # required by older versions of ssh
            "PACELINE_ASKPASS": str(self._folder / "socket"),
        }

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self._password)
