"""The agent as it travels: its files in one archive, named by their hash."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline import agent
from paceline.remote.openssh import GUARD_LINE

_FOLDER = Path(agent.__file__).parent
_SENT_ALONE = ("bootstrap.py", "again.py", "leave.py")
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


@dataclass(frozen=True)
class AgentCode:
    """What a node needs to become an agent.

    Attributes:
        digest: SHA-256 of the content. The node caches under it, and runs nothing else.
        first_line: What is sent before anything else: Python source behind the guard's line.
        files: The agent's files by name.
    """

    digest: str
    first_line: bytes
    files: Mapping[str, bytes] = field(repr=False)

    @functools.cached_property
    def archive(self) -> bytes:
        """Zip archive of the agent's files, for nodes that do not have them."""
        return _archive(self.files)


@functools.cache
def agent_code() -> AgentCode:
    """The agent of this installation."""
    files = {"__main__.py": _MAIN.encode()}
    for path in sorted(_FOLDER.glob("*.py")):
        if path.name not in _SENT_ALONE:
            files[f"paceline_agent/{path.name}"] = path.read_bytes()
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    name = digest.hexdigest()
    return AgentCode(name, _first_line(name), files)


def _archive(files: Mapping[str, bytes]) -> bytes:
    import io
    import zipfile  # here: hosts that were used before have it all

    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
    return target.getvalue()


def again_line(place: str, anew: bool = False) -> bytes:
    """Python source for a node whose agent waits at ``place``, sent instead of ``first_line``.

    Args:
        place: The name that the agent told.
        anew: For the next command, of which the agent knows nothing yet.
    """
    return _line(("again.py",), f"meet({place!r}, {anew})" if anew else f"meet({place!r})")


def leave_line(what: str) -> bytes:
    """Python source for a host on which something is started that stays, sent in the same place.

    Args:
        what: ``caller`` or ``supervisor``.
    """
    return _line(("bootstrap.py", "leave.py"), f"leave_{what}()")


def _first_line(digest: str) -> bytes:
    return _line(("bootstrap.py",), f"boot({digest!r}, sys.argv[1])")


def _line(files: Sequence[str], call: str) -> bytes:
    """The guard's line, and one that reads the rest at once: lines are read byte by byte there."""
    sources = [(_FOLDER / file).read_text(encoding="utf-8") for file in files]
    rest = "\n".join([*sources, call, ""]).encode()
    return GUARD_LINE + f"exec({_READ % {'count': len(rest)}!a})\n".encode("ascii") + rest
