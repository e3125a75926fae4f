"""Running one script on a host over ssh, with or without a password.

The password stands in no argument, variable or file: ssh asks a helper program (SSH_ASKPASS), and
the helper asks us over a socket in a private folder.
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

from paceline.remote.link import ended
from paceline.remote.openssh import Refusal, SshOptions, classify, pinned_key, ssh_command
from paceline.spec.hosts import Host

PATIENCE_S = 60.0
# for a login with a password: ssh_command's own settings are for logins without any question
_ASKING = {
    "BatchMode": "no",
    "NumberOfPasswordPrompts": "1",
    "PreferredAuthentications": "publickey,keyboard-interactive,password",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        status: Exit status of ssh or of what it ran.
        output: Standard output.
        words: ssh's own words.
        refusal: Why there was no login; ``None`` when there was one.
    """

    status: int
    output: str
    words: str
    refusal: Refusal | None = None


def command(host: Host, options: SshOptions, remote: list[str], asking: bool) -> list[str]:
    """The ssh call; with ``asking`` ssh may ask its helper for a password."""
    argv = ssh_command(host, options, remote)
    if not asking:
        return argv
    changed = [re.sub(r"^BatchMode=yes$", "BatchMode=no", word) for word in argv]
    at = changed.index("--")
    extra = [word for k, v in _ASKING.items() if k != "BatchMode" for word in ("-o", f"{k}={v}")]
    return [*changed[:at], *extra, *changed[at:]]


async def run(host: Host, options: SshOptions, remote: list[str], script: str = "",
              environment: Mapping[str, str] | None = None,
              patience_s: float = PATIENCE_S) -> Answer:  # fmt: skip
    """Runs ``remote`` with ``script`` on its standard input.

    Args:
        host, options: Whom to call, and how.
        remote: Command there.
        script: Sent to its standard input.
        environment: Of ssh; given, ssh may ask its helper for a password.
        patience_s: When to give up.
    """
    argv = command(host, options, remote, asking=environment is not None)
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment) if environment is not None else None,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(script.encode()), patience_s)
    except asyncio.TimeoutError:
        out, err = b"", b"Connection timed out"
    finally:
        if process.returncode is None:
            process.kill()
            await ended(process)
    words = err.decode(errors="replace")
    status = process.returncode if process.returncode is not None else 255
    refusal = classify(words, status, host) if status == 255 else None
    return Answer(status, out.decode(errors="replace"), words, refusal)


def newly_pinned_key(answer: Answer) -> str | None:
    """The fingerprint that this call pinned, if it did."""
    return pinned_key(answer.words) if "Permanently added" in answer.words else None


async def effective(host: Host, options: SshOptions) -> dict[str, list[str]]:
    """What ssh makes of its configuration for a host (``ssh -G``): values by lower-case key."""
    argv = ["ssh", *(["-F", str(options.config)] if options.config else []), "-G"]
    argv += ["-l", host.user] if host.user else []
    argv += ["-p", str(host.port)] if host.port else []
    argv += ["-i", host.identity_file] if host.identity_file else []
    process = await asyncio.create_subprocess_exec(
        *argv, "--", host.address, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await process.communicate()
    found: dict[str, list[str]] = {}
    for line in out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value)
    return found


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
