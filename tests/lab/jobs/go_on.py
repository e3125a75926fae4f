"""Counts steps, saves its place on TERM, and goes on there: ``go_on.py STEPS``."""

import os
import signal
import sys
import time
from pathlib import Path

steps = int(sys.argv[1])
place = Path(os.environ["PACELINE_RUN_DIR"]) / f"place-{os.environ['RANK']}"
step = int(place.read_text()) if place.exists() else 0


def leave(*_: object) -> None:
    place.write_text(str(step))
    sys.exit(143)


while step < steps:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("step", step, flush=True)
    step += 1
    signal.signal(signal.SIGTERM, leave)
    time.sleep(0.5)
