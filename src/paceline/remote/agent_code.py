"""The agent as it travels: its files in one archive, named by their hash."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from paceline import agent

_FOLDER = Path(agent.__file__).parent
_MAIN = "import sys\nfrom paceline_agent.entry import main\nsys.exit(main())\n"
_READ = """import os, sys
rest = b""
while len(rest) < %(count)d:
    more = os.read(0, %(count)d - len(rest))
    if not more:
        sys.exit(1)
    rest += more
exec(rest)
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the archive must depend on nothing but the files' content


@dataclass(frozen=True, slots=True)
class AgentCode:
    """What a node needs to become an agent.

    Attributes:
        digest: SHA-256 of the content. The node caches under it, and runs nothing else.
        archive: Zip archive of the agent's files.
        first_line: Python source, sent before anything else.
    """

    digest: str
    archive: bytes
    first_line: bytes


@functools.cache
def agent_code() -> AgentCode:
    """The agent of this installation."""
    files = {"__main__.py": _MAIN.encode()}
    for path in sorted(_FOLDER.glob("*.py")):
        if path.name != "bootstrap.py":
            files[f"paceline_agent/{path.name}"] = path.read_bytes()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    name = digest.hexdigest()
    return AgentCode(name, _archive(files), _first_line(name))


def _archive(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
    return target.getvalue()


def _first_line(digest: str) -> bytes:
    """One line that reads the rest at once: the remote command reads its line byte by byte."""
    source = (_FOLDER / "bootstrap.py").read_text(encoding="utf-8")
    rest = f"{source}\nboot({digest!r}, sys.argv[1])\n".encode()
    return f"exec({_READ % {'count': len(rest)}!a})\n".encode("ascii") + rest
