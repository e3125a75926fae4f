"""Time without a step when a link between two hosts drops all traffic in one direction.

``python bench/faults/deaf.py [--hosts 3,2] [--lines n1-n2,n2-n1] [--times 5] [--heal SECONDS]
[--step-ms 20] [--width 48]``

Each trial starts a job of ``steady.py`` over SSH on the lab's hosts. Once it trains, the first host
of the pair receives nothing from the second (``paceline lab fault deaf``); the launcher still
reaches both. Prints as Markdown: seconds without a finished step, by the ranks' clocks (one
kernel), the longest gap that the job itself reported, and the hosts that were removed. With
``--heal`` the fault is undone after SECONDS, and no host should be removed.
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

MAX_GAP_S = 70.0  # limit for a new step
MIN_STEADY_S = 3.0  # of steps after a gap until the job counts as recovered
REPORTED_GAP = re.compile(r"went on .*? after (\d+\.\d) s")
REMOVED_HOST = re.compile(r": (\S+) is left out")


def trial(lab: Lab, folder: Path, number: int, pair: tuple[str, str], heal_s: float,
          step_ms: float, width: int) -> tuple[float, float, str]:  # fmt: skip
    """Seconds without a step, the reported seconds, and the removed hosts."""
    hosts, (receiver, sender) = len(lab.names), pair
    with soak.job(lab, folder, number, 1_000_000, step_ms, width, 1) as job:
        if not soak.wait_until(lambda: job.is_over or len(job.steps()) > 10 * hosts, 180):
            raise RuntimeError("the job did not start")
        time.sleep(1.5)
        injected = time.monotonic()
        lab.fault("deaf", receiver, sender)
        if heal_s:
            time.sleep(heal_s)
            lab.undo("deaf", receiver, sender)

        def has_recovered() -> bool:
            times = [finished for finished, _, _ in job.steps() if finished > injected]
            gaps = [b - a for a, b in itertools.pairwise([injected, *times])]
            longest = max(gaps, default=0.0)
            at = gaps.index(longest) if gaps else 0
            return longest > 1.0 and times[-1] - times[at] > MIN_STEADY_S

        soak.wait_until(lambda: job.is_over or has_recovered(), MAX_GAP_S)
        times = [injected, *(finished for finished, _, _ in job.steps() if finished > injected)]
        gap_s = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
        if not has_recovered():
            gap_s = max(gap_s, time.monotonic() - times[-1])
        job.process.terminate()
        job.process.wait(60)
        output = (folder / f"screen-{number}.txt").read_text(errors="replace")
        if not heal_s:
            lab.undo("deaf", receiver, sender)
        if leftovers := soak.find_leftovers(lab):
            print(f"<!-- left behind: {leftovers} -->", flush=True)
    reported_s = max(map(float, REPORTED_GAP.findall(output)), default=0.0)
    return gap_s, reported_s, " ".join(REMOVED_HOST.findall(output)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default="3,2")
    parser.add_argument("--lines", default="n1-n2,n2-n1,n2-n3,n3-n2")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--heal", type=float, default=0.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=48)
    options = parser.parse_args()
    healed = f", undone after {options.heal:g} s" if options.heal else ""
    print(f"# A link that is blocked in one direction{healed}\n\n{platform.platform()}, "
          f"{os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}; "
          f"steps of about {options.step_ms:g} ms, width {options.width}\n",
          flush=True)  # fmt: skip
    print("| hosts | blocked | n | seconds without a step, median (max) | reported | removed |")
    print("|---|---|---|---|---|---|", flush=True)
    for hosts in map(int, options.hosts.split(",")):
        with tempfile.TemporaryDirectory(prefix="deaf-") as temporary:
            folder = Path(temporary).resolve()
            with Lab(LabOptions(hosts=hosts, share=(str(folder),))) as lab:
                number = 0
                for pair in options.lines.split(","):
                    receiver, _, sender = pair.partition("-")
                    if not {receiver, sender} <= {*lab.names}:
                        continue
                    results = []
                    for _ in range(options.times):
                        number += 1
                        results.append(trial(lab, folder, number, (receiver, sender), options.heal,
                                           options.step_ms, options.width))  # fmt: skip
                        print(f"<!-- {results[-1]} -->", flush=True)
                    gaps, reported, removed = zip(*results, strict=True)
                    median, longest = statistics.median(gaps), max(gaps)
                    removed_counts = ", ".join(
                        f"{name} {removed.count(name)}" for name in dict.fromkeys(removed)
                    )
                    print(f"| {hosts} | {sender} to {receiver} | {len(results)} | "
                          f"{median:.2f} ({longest:.2f}) | {statistics.median(reported):.1f} | "
                          f"{removed_counts} |",
                          flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
