"""How much a stranger on the network slows a job down: step times with and without an attack.

    sudo python bench/strangers/delay.py [--repeats 3] [--steps 150]     # about 4 minutes

Two hosts of a lab train (``bench/encryption/steps.py``). The third and another user of the second
host, whose address the job accepts, attack every port of theirs that is not on loopback, all the
time (``attack.py``). Without and with attack take turns.
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


def outside(lab: Lab) -> list[str]:
    places = [place for host in ("n1", "n2") for place in lab.listeners(host)]
    return sorted({place for place in places if not place.startswith(("127.", "[::1]"))})


def train(
    lab: Lab, folder: Path, steps: int, *words: str, attacks: bool
) -> tuple[list[float], list[Counter[str]]]:
    """Returns the seconds of each step, and what the stranger and the other user have done."""
    argv = [
        sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--nnodes", "2",
        "--ssh-config", str(lab.ssh_config), "--run-dir", str(folder / os.urandom(4).hex()),
        "--check", "none", "--no-report", "--no-measure", *words,
        str(SCRIPT), "train", str(steps), str(COMPUTING_S),
    ]  # fmt: skip
    env, pipes = {**os.environ, "PYTHONPATH": str(SOURCE)}, {"stdout": -1, "stderr": -2}
    job = subprocess.Popen(argv, env=env, cwd=folder, text=True, **pipes)
    done, attackers = [], []
    if attacks:
        deadline = time.monotonic() + LIMIT_S
        while len(outside(lab)) < 3 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        attackers = [
            lab.popen(host, [sys.executable, str(HERE / "attack.py"), who, *outside(lab)],
                      stdout=-1, text=True)
            for host, who in (("n3", "stranger"), ("n2", "user"))
        ]  # fmt: skip
    output = job.communicate()[0]
    for attacker in attackers:
        attacker.terminate()
        done.append(Counter(json.loads(attacker.communicate()[0])))
    found = re.search(r"/0\] (\[.*\])", output)
    if found is None:
        raise SystemExit(output)
    return [float(value) for value in json.loads(found[1])], done


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
        for label, words in (("clear", ()), ("`--encrypt`", ("--encrypt",))):
            found: dict[bool, list[float]] = {False: [], True: []}
            deeds: list[Counter[str]] = [Counter(), Counter()]
            for _ in range(options.repeats):
                for attacks, values in found.items():
                    seconds, done = train(lab, Path(name), options.steps, *words, attacks=attacks)
                    values += seconds
                    for total, counts in zip(deeds, done, strict=False):
                        total.update(counts)
            quiet, attacked = (1000 * statistics.median(values) for values in found.values())
            told = (", ".join(f"{n:,} {name}" for name, n in total.items()) for total in deeds)
            print(f"| {label} | {quiet:.1f} | {attacked:.1f} | {attacked / quiet:.3f} |"
                  f" {' | '.join(told)} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
