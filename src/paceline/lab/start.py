"""Starts one of the lab's own programs: ``python -I -S start.py NAME ARGUMENT…``.

Without the site module and with nothing but the standard library it is up in some 20 ms.
"""

import os.path
import sys
from importlib import import_module


def main() -> int:
    root = os.path.abspath(__file__)  # noqa: PTH100 - pathlib alone would double the start
    for _ in ("start.py", "lab", "paceline"):
        root = os.path.dirname(root)  # noqa: PTH120
    sys.path.insert(0, root)
    module = import_module(f"paceline.lab.{sys.argv[1]}")
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
