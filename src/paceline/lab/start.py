"""Starts one of the lab's programs: ``python -I -S start.py NAME ARGUMENT…``.

It needs about 20 ms, without the site module and with the standard library alone.
"""

import os.path
import sys
from importlib import import_module

PROGRAMS = {  # name → module and function
    "available": ("available", "main"),
    "dial": ("enter", "dial"),
    "run": ("enter", "run"),
    "switch": ("switch", "main"),
}


def main() -> int:
    root = os.path.abspath(__file__)  # noqa: PTH100 - pathlib alone would double the start
    for _ in ("start.py", "lab", "paceline"):
        root = os.path.dirname(root)  # noqa: PTH120
    sys.path.insert(0, root)
    module, function = PROGRAMS[sys.argv[1]]
    program = getattr(import_module(f"paceline.lab.{module}"), function)
    return int(program(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
