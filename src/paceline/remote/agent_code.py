"""Packs the agent's code for the nodes: one archive, named by its hash."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import agent
from paceline.remote.openssh import GUARD_LINE

_FOLDER = Path(agent.__file__).parent
_BOOT_FILES = ("bootstrap.py", "reattach.py", "detach.py")
_MAIN = "import sys\nfrom paceline_agent.entry import main\nsys.exit(main())\n"
_READ_SOURCE = """import os, sys
rest = b""
while len(rest) < %(count)d:
    more = os.read(0, %(count)d - len(rest))
    if not more:
        sys.exit(1)
    rest += more
exec(rest)
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the archive must depend on nothing but the files' content


@dataclass(frozen=True)
class AgentCode:
    """The code that turns a node's Python into an agent.

    Attributes:
        digest: SHA-256 of the content; the node's cache key, and the only code that it runs.
        first_line: Python source that is sent first, after the guard line.
        files: The agent's files by name.
    """

    digest: str
    first_line: bytes
    files: Mapping[str, bytes] = field(repr=False)

    @functools.cached_property
    def archive(self) -> bytes:
        """Zip archive of the agent's files, for nodes without a cached copy."""
        import io
        import zipfile  # only needed if a host has no cached copy

        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
        return target.getvalue()


@functools.cache
def agent_code() -> AgentCode:
    """The agent's code from this installation."""
    files = {"__main__.py": _MAIN.encode()}
    for name in sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.py")):
        if name not in _BOOT_FILES:
            files[f"paceline_agent/{name}"] = (_FOLDER / name).read_bytes()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    name = digest.hexdigest()
    first_line = _source(("bootstrap.py",), f"boot({name!r}, sys.argv[1])")
    return AgentCode(name, first_line, files)


def reconnect_source(place: str, starts_session: bool = False) -> bytes:
    """Python source that connects to an agent waiting at ``place``, sent as the first line.

    ``starts_session``: begin a new conversation, for the next command.
    """
    return _source(("reattach.py",), f"attach({place!r}, {starts_session})")


def detach_source(role: str) -> bytes:
    """Python source that starts a background process, ``caller`` or ``supervisor``."""
    return _source(("bootstrap.py", "detach.py"), f"detach_{role}()")


def _source(files: Sequence[str], call: str) -> bytes:
    """The guard line, a line that reads the remaining source in one piece, and that source."""
    sources = [(_FOLDER / file).read_text(encoding="utf-8") for file in files]
    body = "\n".join([*sources, call, ""]).encode()
    return GUARD_LINE + f"exec({_READ_SOURCE % {'count': len(body)}!a})\n".encode("ascii") + body
