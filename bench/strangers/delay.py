"""Step times of a job with and without hostile connections from the network.

    sudo python bench/strangers/delay.py [--repeats 3] [--steps 150]     # about 4 minutes

Two lab hosts train (``bench/encryption/steps.py``). The third host, and another user of the second
host (an address that the job accepts), attack every port of the job that is not on loopback
(``attack.py``). Runs with and without the attack alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paceline.lab import Lab, LabOptions

HERE = Path(__file__).resolve().parent
SOURCE, SCRIPT = HERE.parents[1] / "src", HERE.parent / "encryption" / "steps.py"
COMPUTING_S = 0.05
LIMIT_S = 60.0


def reachable_addresses(lab: Lab) -> list[str]:
    """Listening addresses of the job's hosts that other hosts can reach."""
    addresses = [address for host in ("n1", "n2") for address in lab.listeners(host)]
    return sorted({address for address in addresses if not address.startswith(("127.", "[::1]"))})


def train(
    lab: Lab, folder: Path, steps: int, *options: str, attacks: bool
) -> tuple[list[float], list[Counter[str]]]:
    """Returns the seconds of each step, and the counts of the stranger and of the other user."""
    argv = [
        sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--nnodes", "2",
        "--ssh-config", str(lab.ssh_config), "--run-dir", str(folder / os.urandom(4).hex()),
        "--check", "none", "--no-report", "--no-measure", *options,
        str(SCRIPT), "train", str(steps), str(COMPUTING_S),
    ]  # fmt: skip
    env, pipes = {**os.environ, "PYTHONPATH": str(SOURCE)}, {"stdout": -1, "stderr": -2}
    job = subprocess.Popen(argv, env=env, cwd=folder, text=True, **pipes)
    attack_counts, attackers = [], []
    if attacks:
        deadline = time.monotonic() + LIMIT_S
        while (
            len(reachable_addresses(lab)) < 3 and job.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        attackers = [
            lab.popen(host, [sys.executable, str(HERE / "attack.py"), role,
                             *reachable_addresses(lab)], stdout=-1, text=True)
            for host, role in (("n3", "stranger"), ("n2", "user"))
        ]  # fmt: skip
    output = job.communicate()[0]
    for attacker in attackers:
        attacker.terminate()
        attack_counts.append(Counter(json.loads(attacker.communicate()[0])))
    match = re.search(r"/0\] (\[.*\])", output)
    if match is None:
        raise SystemExit(output)
    return [float(value) for value in json.loads(match[1])], attack_counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| job | step, ms | under attack, ms | ratio | stranger | other user |")
    print("|---|--:|--:|--:|---|---|")
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(LabOptions(hosts=3, rate="1gbit")) as lab,
    ):
        for label, flags in (("clear", ()), ("`--encrypt`", ("--encrypt",))):
            step_seconds: dict[bool, list[float]] = {False: [], True: []}
            totals: list[Counter[str]] = [Counter(), Counter()]
            for _ in range(options.repeats):
                for attacks, values in step_seconds.items():
                    seconds, attack_counts = train(
                        lab, Path(name), options.steps, *flags, attacks=attacks
                    )
                    values += seconds
                    for total, counts in zip(totals, attack_counts, strict=False):
                        total.update(counts)
            baseline_ms, attacked_ms = (
                1000 * statistics.median(values) for values in step_seconds.values()
            )
            summaries = (
                ", ".join(f"{n:,} {name}" for name, n in total.items()) for total in totals
            )
            print(f"| {label} | {baseline_ms:.1f} | {attacked_ms:.1f} |"
                  f" {attacked_ms / baseline_ms:.3f} | {' | '.join(summaries)} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
