"""Runs a script on a host over ssh, with or without a password.

The password is in no argument, variable or file: ssh asks a helper program (SSH_ASKPASS), which
reads it from us over a socket in a private folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.remote.link import wait_for_exit
from paceline.remote.openssh import Refusal, SshOptions, classify, server_fingerprint, ssh_command
from paceline.spec.hosts import Host

TIMEOUT_S = 60.0
# for logins with a password; ssh_command's own settings are for logins without prompts
_PASSWORD_OPTIONS = {
    "BatchMode": "no",
    "NumberOfPasswordPrompts": "1",
    "PreferredAuthentications": "publickey,keyboard-interactive,password",
}


@dataclass(frozen=True, slots=True)
class LoginResult:
    """Result of a command on a host.

    Attributes:
        status: Exit status of ssh or of the command.
        output: Standard output.
        messages: Standard error.
        refusal: Why the login failed; ``None`` if it succeeded.
    """

    status: int
    output: str
    messages: str
    refusal: Refusal | None = None


def command(host: Host, options: SshOptions, remote: list[str], may_ask: bool) -> list[str]:
    """Returns the ssh call; with ``may_ask`` ssh may ask its helper for a password."""
    argv = ssh_command(host, options, remote)
    if not may_ask:
        return argv
    changed = [re.sub(r"^BatchMode=yes$", "BatchMode=no", argument) for argument in argv]
    at = changed.index("--")
    extra = [
        argument
        for k, v in _PASSWORD_OPTIONS.items()
        if k != "BatchMode"
        for argument in ("-o", f"{k}={v}")
    ]
    return [*changed[:at], *extra, *changed[at:]]


async def run_on_host(host: Host, options: SshOptions, remote: list[str], script: str = "",
              environment: Mapping[str, str] | None = None,
              timeout_s: float = TIMEOUT_S) -> LoginResult:  # fmt: skip
    """Runs ``remote`` with ``script`` on its standard input.

    Args:
        host, options: The host, and how to log in.
        remote: Command there.
        script: Standard input of the command.
        environment: Environment of ssh; if given, ssh may ask its helper for a password.
        timeout_s: Time limit.
    """
    argv = command(host, options, remote, may_ask=environment is not None)
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment) if environment is not None else None,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(script.encode()), timeout_s)
    except asyncio.TimeoutError:
        out, err = b"", b"Connection timed out"
    finally:
        if process.returncode is None:
            process.kill()
            await wait_for_exit(process)
    messages = err.decode(errors="replace")
    status = process.returncode if process.returncode is not None else 255
    refusal = classify(messages, status, host) if status == 255 else None
    return LoginResult(status, out.decode(errors="replace"), messages, refusal)


def newly_pinned_key(answer: LoginResult) -> str | None:
    """Returns the fingerprint that this call pinned, if any."""
    return server_fingerprint(answer.messages) if "Permanently added" in answer.messages else None


async def effective_config(host: Host, options: SshOptions) -> dict[str, list[str]]:
    """Returns ssh's effective configuration for a host (``ssh -G``), by lower-case key."""
    argv = ["ssh", *(["-F", str(options.config)] if options.config else []), "-G"]
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-i", host.identity_file] if host.identity_file else []
    process = await asyncio.create_subprocess_exec(
        *argv, "--", host.address, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await process.communicate()
    values: dict[str, list[str]] = {}
    for line in out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return values


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
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
