"""Runs tests, and those that failed once more, alone: an unsteady one is told from a broken one.

``python tools/second_look.py [ARGUMENTS OF PYTEST]``. A test that fails twice fails the run, and
so do more than MOST failures, which nobody repeats. One that passes at the second try is named as
unsteady at the end: that is a fault to be mended, in the test or in what it tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST = 5
TESTS_FAILED = 1  # pytest's exit status; others say that not all tests were run
OF_XDIST = re.compile(r"-n(?!o)|--numprocesses|--dist|--(no-)?loadscope|--tx|--maxprocesses")


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 when every test passed at the first or at the second try."""
    with tempfile.TemporaryDirectory() as cache:
        status = run(arguments, cache)
        failed = failures(cache)
        if status != TESTS_FAILED or not failed:
            return status
        if len(failed) > MOST:
            print(f"{len(failed)} tests failed: too many for a second look", flush=True)
            return status
        print(f"a second look at {len(failed)} of them, alone", flush=True)
        status = run([*alone(arguments), "--last-failed", "-rA"], cache)
        unsteady = sorted(failed - failures(cache)) if status in (0, TESTS_FAILED) else []
    for test in unsteady:
        print(f"unsteady: {test}")
    if unsteady:
        print("they passed only at the second try: a fault to be mended, see CONTRIBUTING.md")
    return status


def run(arguments: Sequence[str], cache: str) -> int:
    """pytest's exit status; which tests failed is in a cache that no other run writes to."""
    argv = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(argv, check=False).returncode


def failures(cache: str) -> set[str]:
    """The tests that failed last, in their set-up and what ends them, too."""
    file = Path(cache) / "v" / "cache" / "lastfailed"
    return set(json.loads(file.read_text())) if file.exists() else set()


def alone(arguments: Sequence[str]) -> list[str]:
    """The same without parallel workers."""
    kept = []
    words = iter(arguments)
    for word in words:
        if not OF_XDIST.match(word):
            kept.append(word)
        elif word in ("-n", "--numprocesses", "--dist", "--tx", "--maxprocesses"):
            next(words, None)  # its value
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
