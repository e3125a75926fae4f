"""Prints numbered lines on both streams, without torch: ``count.py LINES PAUSE [WIDTH]``."""

import os
import sys
import time
from pathlib import Path

lines, pause = int(sys.argv[1]), float(sys.argv[2])
width = int(sys.argv[3]) if len(sys.argv) > 3 else 20
rank = os.environ["RANK"]
for number in range(lines):
    print(f"{rank} out {number} {'x' * width}", flush=True)
    if number % 7 == 0:
        print(f"{rank} err {number}", file=sys.stderr, flush=True)
    time.sleep(pause)
with Path(f"counted-{rank}.txt").open("w") as file:
    file.write(f"{lines}\n" * 1000)
