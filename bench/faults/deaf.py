"""A line between two hosts that lets nothing through in one direction: how long without a step.

``python bench/faults/deaf.py [--hosts 3,2] [--lines n1-n2,n2-n1] [--times 5] [--heal SECONDS]
[--step-ms 20] [--width 48]``

For each trial a job of ``steady.py`` is started over SSH on the lab's hosts, as a user does. Once
it trains, the first host of a line hears nothing more of the second (``paceline lab fault deaf``);
the launcher hears both. Printed as Markdown: seconds without a finished step, by the ranks' own
clocks (one kernel), the longest time that the job itself named for it, and who was left out. With
``--heal`` the host hears again after so many seconds, and nobody should be.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import soak

from paceline.lab import Lab, LabOptions

LONGEST_S = 70.0  # that is waited for a further step
AFTER_S = 3.0  # for which steps are watched once they come again
TOLD = re.compile(r"went on .*? after (\d+\.\d) s")
LEFT_OUT = re.compile(r": (\S+) is left out")


def trial(lab: Lab, folder: Path, number: int, line: tuple[str, str], heal_s: float,
          step_ms: float, width: int) -> tuple[float, float, str]:  # fmt: skip
    """Seconds without a step, those that were told, and who was left out."""
    hosts, (one, other) = len(lab.names), line
    with soak.job(lab, folder, number, 1_000_000, step_ms, width, 1) as job:
        if not soak.until(lambda: job.over or len(job.steps()) > 10 * hosts, 180):
            raise RuntimeError("the job did not begin")
        time.sleep(1.5)
        struck = time.monotonic()
        lab.fault("deaf", one, other)
        if heal_s:
            time.sleep(heal_s)
            lab.undo("deaf", one, other)

        def again() -> bool:
            times = [moment for moment, _, _ in job.steps() if moment > struck]
            gaps = [b - a for a, b in itertools.pairwise([struck, *times])]
            longest = max(gaps, default=0.0)
            at = gaps.index(longest) if gaps else 0
            return longest > 1.0 and times[-1] - times[at] > AFTER_S

        soak.until(lambda: job.over or again(), LONGEST_S)
        times = [struck, *(moment for moment, _, _ in job.steps() if moment > struck)]
        gap_s = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        if not again():
            gap_s = max(gap_s, time.monotonic() - times[-1])
        job.process.terminate()
        job.process.wait(60)
        screen = (folder / f"screen-{number}.txt").read_text(errors="replace")
        if not heal_s:
            lab.undo("deaf", one, other)
        if left := soak.left_behind(lab):
            print(f"<!-- left: {left} -->", flush=True)
    told = max(map(float, TOLD.findall(screen)), default=0.0)
    return gap_s, told, " ".join(LEFT_OUT.findall(screen)) or "nobody"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="3,2")
    parser.add_argument("--lines", default="n1-n2,n2-n1,n2-n3,n3-n2")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--heal", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=48)
    asked = parser.parse_args()
    healed = f", which hears again after {asked.heal:g} s" if asked.heal else ""
    print(f"# A host that is deaf to another one{healed}\n\n{platform.platform()}, "
          f"{os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}; "
          f"steps of about {asked.step_ms:g} ms, width {asked.width}\n", flush=True)  # fmt: skip
    print("| hosts | deaf | n | seconds without a step, median (most) | told | left out |")
    print("|---|---|---|---|---|---|", flush=True)
    for hosts in map(int, asked.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="deaf-") as temporary:
            folder = Path(temporary).resolve()
            with Lab(LabOptions(hosts=hosts, share=(str(folder),))) as lab:
                number = 0
                for words in asked.lines.split(","):
                    one, _, other = words.partition("-")
                    if not {one, other} <= {*lab.names}:
                        continue
                    found = []
                    for _ in range(asked.times):
                        number += 1
                        found.append(trial(lab, folder, number, (one, other), asked.heal,
                                           asked.step_ms, asked.width))  # fmt: skip
                        print(f"<!-- {found[-1]} -->", flush=True)
                    gaps, told, left = zip(*found, strict=True)
                    median, most = statistics.median(gaps), max(gaps)
                    who = ", ".join(f"{name} {left.count(name)}" for name in dict.fromkeys(left))
                    print(f"| {hosts} | {one} to {other} | {len(found)} | {median:.2f} ({most:.2f})"
                          f" | {statistics.median(told):.1f} | {who} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
