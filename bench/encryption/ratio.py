"""Step and all-reduce times of two lab hosts with ``--encrypt``, relative to those without it.

    sudo python bench/encryption/ratio.py [--repeats 3] [--only busy]     # about 5 minutes

Runs with and without encryption alternate; the ratio is that of the medians. The hosts share this
machine's CPUs. Steps of "train" sleep in place of computing, which leaves a core free for
encryption. The all-reduces and the steps of "busy" use all cores.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paceline.lab import Lab, LabOptions

SOURCE, SCRIPT = Path(__file__).resolve().parents[2] / "src", Path(__file__).with_name("steps.py")
CASES = (("reduce", 12, 0.0), ("train", 20, 0.1), ("train", 20, 0.5), ("busy", 20, 0.1),
         ("busy", 20, 0.5))  # fmt: skip
RATES = ("100mbit", "1gbit")


def measure(lab: Lab, folder: Path, arguments: list[str], *, encrypts: bool) -> list[float]:
    """Seconds of each repetition in one job."""
    argv = [
        sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile),
        "--ssh-config", str(lab.ssh_config), "--run-dir", str(folder / str(os.urandom(4).hex())),
        "--check", "none", "--no-report", "--no-measure", *["--encrypt"] * encrypts,
        str(SCRIPT), *arguments,
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    completed = subprocess.run(
        argv, env=env, capture_output=True, text=True, check=False, cwd=folder
    )
    match = re.search(r"/0\] (\[.*\])", completed.stdout)
    if match is None:
        raise SystemExit(completed.stdout + completed.stderr)
    return [float(value) for value in json.loads(match[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["reduce", "train", "busy"])
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| link | | clear | encrypted | ratio |\n|---|---|--:|--:|--:|")
    for rate in RATES:
        with tempfile.TemporaryDirectory() as name, Lab(LabOptions(hosts=2, rate=rate)) as lab:
            for workload, count, computing_s in CASES:
                if options.only not in (None, workload):
                    continue
                arguments = [workload, str(count if rate == "1gbit" or workload == "train" else 5),
                         str(computing_s)]  # fmt: skip
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(options.repeats):
                    for encrypts, values in seconds.items():
                        values += measure(lab, Path(name), arguments, encrypts=encrypts)
                clear, encrypted = (statistics.median(values) for values in seconds.values())
                label = {"reduce": "all-reduce of 50 MB"}.get(
                    workload,
                    f"step with 4 MB of gradients, computing {computing_s * 1000:.0f} ms"
                    f"{' on all CPUs' * (workload == 'busy')}",
                )
                print(
                    f"| {rate} | {label} | {clear:.3f} s | {encrypted:.3f} s |"
                    f" {encrypted / clear:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
