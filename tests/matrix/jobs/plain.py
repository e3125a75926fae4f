"""Reads the data, prints its rank, writes a result; without torch: ``plain.py [SECONDS]``."""

import os
import sys
import time
from pathlib import Path

rank = os.environ["RANK"]
if "PACELINE_DATA_DIR" in os.environ:
    data = Path(os.environ["PACELINE_DATA_DIR"])
    sizes = sorted(file.stat().st_size for file in data.rglob("*") if file.is_file())
    print("data", sizes, flush=True)
print("python", sys.prefix, flush=True)
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
out = Path(f"out-{rank}")
out.mkdir(exist_ok=True)
(out / "result.txt").write_text(f"result of {rank}\n" * 1000)
print("wrote", rank, flush=True)
