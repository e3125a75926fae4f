"""Entry of the shipped agent: ``PYTHON FOLDER serve|forkserver|guard …``."""

from __future__ import annotations

import os
import sys
from typing import List, Optional


def main(argv: Optional[List[str]] = None) -> int:
    """Runs one of the agent's processes; each imports only what it needs."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    role, *args = sys.argv[1:] if argv is None else argv
    if role == "forkserver":
        from .ranks import forkserver

        fd, parent, _, *preload = args
        return forkserver.main(int(fd), int(parent), preload)
    if role == "guard":
        from .supervision import guard

        return guard.main(int(args[0]), int(args[1]))
    from . import server

    return server.main(folder, chosen_python=args[0], temporary="--temporary" in args)
