"""Reads description files, bytes to text, and checks the files that they name."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.hosts.dialect import line_error
from paceline.hosts.dialects.ssh_config import keyword
from paceline.hosts.lines import split_lines
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host
from paceline.spec.settings import TOML_NAME

MAX_BYTES = 4 << 20
_MAX_DEPTH = 16  # OpenSSH's own limit for nested Include
_MAX_FILES = 256


def read_text(path: Path, label: str) -> str:
    """Reads a file in UTF-8, or UTF-16 with a byte order mark. Raises HostsError."""
    try:
        # bash's <(…) is in /dev/fd, zsh's in /proc/self/fd
        if path.is_fifo() and path.parts[:2] not in (("/", "dev"), ("/", "proc")):
            raise HostsError(
                f"{label} is a named pipe, and nobody may be writing to it",
                remedy="name a file, or pass a command's output: -H <(COMMAND)",
            )
        if path.is_char_device():  # a terminal, or an endless one
            raise HostsError(
                f"{label} is a device, not a file",
                remedy="name a file, or pass a command's output: -H <(COMMAND)",
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as problem:
        is_folder = isinstance(problem, IsADirectoryError)
        advice = f"name a file; if a host is called that, write `{label},`"
        raise HostsError(
            f"the host file {label} cannot be read",
            found=problem.strerror or str(problem),
            remedy=advice if is_folder else f"check the path and its permissions: ls -l {label}",
        ) from None
    if len(data) > MAX_BYTES:
        raise HostsError(
            f"{label} is not a host file",
            found=f"more than {MAX_BYTES >> 20} MiB",
            remedy="name a file with one host a line",
        )
    return decode(data, label)


def decode(data: bytes, label: str) -> str:
    """Decodes bytes. Raises HostsError with the line of the first wrong byte."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as problem:
        decoded = data[: problem.start]
        line = data[decoded.rfind(b"\n") + 1 :].split(b"\n", 1)[0].decode("latin-1")
        raise line_error(label, decoded.count(b"\n") + 1, line, "UTF-8 text") from None
    if "\0" in text:
        number = text[: text.index("\0")].count("\n") + 1
        raise line_error(label, number, text.split("\n")[number - 1], "text, not a binary file")
    return text


def with_includes(text: str, file_folder: Path) -> tuple[str, list[Path]]:
    """Replaces the ``Include`` lines of an OpenSSH configuration by the files they name.

    Relative patterns belong to ``~/.ssh``, as for ssh itself, else to the file's folder.
    Unreadable files are skipped, as by ssh. Raises HostsError for endless includes.

    Returns:
        The text, and the files that it includes.
    """
    files: list[Path] = []

    def expand(text: str, depth: int) -> str:
        return "\n".join(expand_line(line, depth) for line in split_lines(text))

    def expand_line(line: str, depth: int) -> str:
        key, arguments = keyword(line)
        if key != "include" or depth >= _MAX_DEPTH:
            return line
        patterns = [pattern.strip('"') for pattern in arguments.split()]
        paths = [path for pattern in patterns for path in _matches(pattern, file_folder)]
        return "\n".join(expand(read(path), depth + 1) for path in paths)

    def read(path: Path) -> str:
        files.append(path)
        if len(files) > _MAX_FILES:
            raise HostsError(
                f"more than {_MAX_FILES} files are included", found=str(path),
                remedy="look for files that include each other",
            )  # fmt: skip
        try:
            if path.is_fifo():
                return ""
            with path.open("rb") as file:
                return file.read(MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    return expand(text, 0), files


def _matches(pattern: str, file_folder: Path) -> list[Path]:
    for base in (Path("~/.ssh"), file_folder):
        try:
            absolute = base.expanduser() / Path(pattern).expanduser()
            root = Path(absolute.anchor)
            relative = re.sub(r"\*+", "*", str(absolute.relative_to(root)))  # ssh knows no **
            paths = [path for path in sorted(root.glob(relative)) if path.is_file()]
        except (OSError, ValueError, RuntimeError, NotImplementedError):  # no such user, no pattern
            continue
        if paths:
            return paths
    return []


def check_keys(hosts: Iterable[Host]) -> None:
    """Raises HostsError if the key of a host is a pipe, a folder or a device: ssh may wait for it.

    A missing key is left to ssh, which may find another one.
    """
    for host in hosts:
        key = host.identity_file
        for name in (key, f"{key}.pub", f"{key}-cert.pub") if key and not host.local else ():
            try:
                path = Path(name).expanduser()
                is_unusable = path.exists() and not path.is_file()
            except (OSError, ValueError, RuntimeError):  # no such user, too long, a NUL
                continue
            if is_unusable:
                raise HostsError(
                    f"the SSH key of {host.name} is not a file",
                    found=f"{name} is a pipe, a folder or a device",
                    remedy=f"key = FILE under [hosts.{host.name}] in {TOML_NAME}, or in the host "
                    "file, with the path of a private key",
                )
