"""Captures packets while ``jobs/marked.py`` trains, and finds readable content in them."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from launches import Site

GRADIENT = struct.unpack("<f", b"LIn=")[0]
# Byte patterns that show that a kind of data is readable. Weights and gradients lie side by side.
MARKS = {
    "weights": [b"PAc<" * 4],
    "store": [b"paceline's message"],
    "gloo": [b"a whole message"],
    "gradients": [struct.pack("<f", GRADIENT * 2.0**power) * 4 for power in range(-6, 7)],
}


@contextlib.contextmanager
def captured(site: Site, path: Path) -> Iterator[Callable[[], None]]:
    """Records all packets that n2 exchanges with other hosts in a file.

    Yields a function that ends the capture early.
    """
    argv = [sys.executable, "capture.py", str(path)]
    capture = site.lab.popen("n2", argv, cwd=site.project, stdout=subprocess.PIPE)
    with capture:
        assert capture.stdout is not None
        capture.stdout.readline()
        try:
            yield capture.kill
        finally:
            capture.kill()


def readable(path: Path) -> set[str]:
    """Returns the names of :data:`MARKS` whose bytes appear in a capture."""
    packets = path.read_bytes()
    assert len(packets) > 1_000_000
    return {name for name, marks in MARKS.items() if any(mark in packets for mark in marks)}
