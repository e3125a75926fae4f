"""Tests that optimizers and DDP do not import PyTorch's compiler, and work the same without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compiler_imports.py")


def test_optimizers_and_ddp_match_without_compiler() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
