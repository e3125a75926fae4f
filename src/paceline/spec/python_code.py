"""Python code for ``python -c`` in a folder that may hold files of somebody else."""

from __future__ import annotations

# `python -m` and `python -c` import from the current folder first. The option -P prevents this only
# from Python 3.11 on, and -I also ignores PYTHONPATH and the user's site-packages.
DROP_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
