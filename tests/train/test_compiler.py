"""PyTorch's compiler is imported when something compiles, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compiling.py")


def test_optimizers_and_ddp_compute_the_same_without_it() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
