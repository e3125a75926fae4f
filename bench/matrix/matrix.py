"""Runs the user journeys in every environment of the matrix and reports which of them fail.

    python bench/matrix/matrix.py [--only 17] [--out FILE]

Needs root and the packages of ``tools/system-parts.sh all``. The journeys and environments
are in ``tests/matrix``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "matrix"
sys.path.insert(0, str(TESTS))
from environments import AXES, SEED, Environment, all_pairs, select  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, help="number of one environment")
    name = f"matrix_{os.cpu_count()}-cpu_{datetime.date.today()}.md"
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name(name))
    options = parser.parse_args()
    selection = dict(enumerate(select(), 1))
    for number, environment in selection.items():
        print(f"{number:2} {environment}")
    numbers = [options.only] if options.only else list(selection)
    results = {number: run_journeys(number, selection[number]) for number in numbers}
    if not options.only:
        options.out.write_text(render_page(selection, results))
        print(f"written: {options.out}")
    return int(any(failed for failed, _ in results.values()))


def run_journeys(number: int, environment: Environment) -> tuple[list[str], float]:
    """Run all journeys in an environment. Returns the failed ones, and the seconds of all."""
    start = time.monotonic()
    argv = [sys.executable, "-m", "pytest", "-n", "1", "-q", str(TESTS / "test_matrix.py")]
    environ = {**os.environ, "CI": "true", "PACELINE_MATRIX": str(number)}
    completed = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True)
    seconds = time.monotonic() - start
    failed = re.findall(r"^failed journey: (\w+)", completed.stdout, re.MULTILINE)
    if completed.returncode and not failed:
        failed = ["set-up"]
    print(f"{number:2} {', '.join(failed) or 'passed'}, {seconds:.0f} s", flush=True)
    if failed:
        print(completed.stdout, completed.stderr, sep="\n", flush=True)
    return failed, seconds


def render_page(
    selection: dict[int, Environment], results: dict[int, tuple[list[str], float]]
) -> str:
    passed = sum(not failed for failed, _ in results.values())
    lines = [
        "# Users' journeys in different environments",
        "",
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()},"
        f" {datetime.date.today()}",
        "",
        f"{passed} of {len(results)} environments passed. They cover all {len(all_pairs())} pairs"
        f" of values that can occur together (`tests/matrix/environments.py`, seed {SEED}).",
        "",
        f"| | {' | '.join(AXES)} | failed | seconds |",
        "|---" * (len(AXES) + 3) + "|",
    ]
    for number, (failed, seconds) in results.items():
        values = [value for _, value in selection[number].values()]
        cells = [str(number), *values, ", ".join(failed) or "none", f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
