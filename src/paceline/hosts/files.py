"""Reading description files from disk: bytes to text, with errors that say where."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from paceline.hosts.dialect import bad_line
from paceline.hosts.dialects.ssh_config import keyword
from paceline.hosts.lines import split_lines
from paceline.spec.errors import HostsError

MOST_BYTES = 4 << 20
_DEPTH = 16  # OpenSSH's own limit for nested Include
_MOST_FILES = 256


def read_text(path: Path, label: str) -> str:
    """The file's text, UTF-8 or UTF-16 with its mark. Raises HostsError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise _unreadable(label, problem) from None
    if len(data) > MOST_BYTES:
        raise HostsError(
            f"{label} is not a host file",
            found=f"more than {MOST_BYTES >> 20} MiB",
            remedy="name a file with one host a line",
        )
    return decode(data, label)


def decode(data: bytes, label: str) -> str:
    """Bytes to text. Raises HostsError with the line of the first wrong byte."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as problem:
        before = data[: problem.start]
        line = data[before.rfind(b"\n") + 1 :].split(b"\n", 1)[0].decode("latin-1")
        raise bad_line(label, before.count(b"\n") + 1, line, "UTF-8 text") from None
    if "\0" in text:
        number = text[: text.index("\0")].count("\n") + 1
        raise bad_line(label, number, text.split("\n")[number - 1], "text, not a binary file")
    return text


def with_includes(text: str, folder: Path) -> str:
    """An OpenSSH configuration with its ``Include`` lines replaced by what they include.

    Relative patterns are those of ``~/.ssh``, as for ssh itself, else of the file's folder.
    Files that cannot be read are passed over, as ssh does. HostsError where they never end.
    """
    return _Includes(folder).of(text, 0)


class _Includes:
    """Follows ``Include`` lines, but not for ever: files may include each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = _MOST_FILES

    def of(self, text: str, depth: int) -> str:
        return "\n".join(self._line(line, depth) for line in split_lines(text))

    def _line(self, line: str, depth: int) -> str:
        key, arguments = keyword(line)
        if key != "include" or depth >= _DEPTH:
            return line
        paths = [
            path for word in arguments.split() for path in _matches(word.strip('"'), self._folder)
        ]
        return "\n".join(self.of(self._read(path), depth + 1) for path in paths)

    def _read(self, path: Path) -> str:
        self._left -= 1
        if self._left < 0:
            raise HostsError(
                f"more than {_MOST_FILES} files are included", found=str(path),
                remedy="look for files that include each other",
            )  # fmt: skip
        try:
            with path.open("rb") as file:
                return file.read(MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""


def _matches(pattern: str, folder: Path) -> list[Path]:
    for base in (Path("~/.ssh"), folder):
        try:
            full = base.expanduser() / Path(pattern).expanduser()
            relative = re.sub(r"\*+", "*", str(full.relative_to(full.anchor)))  # ssh knows no **
            found = [path for path in sorted(Path(full.anchor).glob(relative)) if path.is_file()]
        except (OSError, ValueError, RuntimeError, NotImplementedError):  # no such user, no pattern
            continue
        if found:
            return found
    return []


def _unreadable(label: str, problem: OSError) -> HostsError:
    folder = isinstance(problem, IsADirectoryError)
    named = f"name a file; if a host is called that, write `{label},`"
    return HostsError(
        f"the host file {label} cannot be read",
        found=problem.strerror or str(problem),
        remedy=named if folder else f"check the path and its permissions: ls -l {label}",
    )
