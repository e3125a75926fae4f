"""Rank 0 writes to a file without end: ``write_on.py FILE``."""

import os
import sys
import time
from pathlib import Path

print("writes", flush=True)
while True:
    if os.environ["RANK"] == "0":
        with Path(sys.argv[1]).open("ab", buffering=0) as file:
            file.write(b"x")
    time.sleep(0.05)
