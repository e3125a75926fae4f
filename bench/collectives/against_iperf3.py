"""all_reduce's bus bandwidth over lab links against iperf3 on the same links.

``python bench/collectives/against_iperf3.py`` prints Markdown. It needs iperf3.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.lab import Lab, LabOptions

SOURCE = Path(__file__).resolve().parents[2] / "src"
SIZES = {"100mbit": "4M", "1gbit": "32M"}


def iperf3(lab: Lab, source: str, target: str) -> float:
    """Bits a second of TCP payload that arrived, over four seconds."""
    with lab.popen(target, ["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        wait = "while ! ss -ltn | grep -q ':5201 '; do sleep 0.05; done"
        lab.exec(target, ["sh", "-c", wait], timeout=10, check=True)
        argv = ["iperf3", "-c", lab.address(target), "-J", "-t", "4"]
        said = json.loads(lab.exec(source, argv, timeout=30, check=True).stdout)
        server.wait(10)
    return float(said["end"]["sum_received"]["bits_per_second"])


def collectives(lab: Lab, size: str) -> dict[str, Any]:
    """The object of ``paceline bench collectives --json``."""
    argv = [sys.executable, "-m", "paceline", "bench", "collectives", "-H", str(lab.hostfile)]
    argv += ["--ssh-config", str(lab.ssh_config), "--json", "--collective", "all_reduce"]
    argv += ["-b", size, "-e", size, "-n", "5", "-w", "2"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with tempfile.TemporaryDirectory() as folder:
        words = [*argv, "--run-dir", f"{folder}/run"]
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def show_rates() -> bool:
    print("| link | iperf3, Mbit/s | all_reduce on the bus, Mbit/s | difference | own probe of the "
          "slowest way, Mbit/s |\n|---|---|---|---|---|")  # fmt: skip
    well = True
    for rate, size in SIZES.items():
        with Lab(LabOptions(hosts=2, rate=rate)) as lab:
            independent = iperf3(lab, "n1", "n2")
            said = collectives(lab, size)
        ours = said["rows"][0]["busbw"] * 8e9
        probe = min(link["bits_per_s"] for link in said["links"])
        well &= abs(ours / independent - 1) <= 0.1
        print(f"| {rate}, 2 hosts, {size} | {independent / 1e6:.1f} | {ours / 1e6:.1f} | "
              f"{ours / independent - 1:+.1%} | {probe / 1e6:.1f} |", flush=True)  # fmt: skip
    return well


def show_slow() -> bool:
    print("\nOne link of three slowed to a quarter:\n")
    with Lab(LabOptions(hosts=3, rate="400mbit")) as lab:
        lab.fault("slow", "n2", "100mbit")
        said = collectives(lab, "4M")
    print(f"> {said['conclusion']}")
    return any("link of n2" in words for words in said["slow"])


def main() -> int:
    print(f"# all_reduce over gloo against iperf3\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}, load "
          f"{os.getloadavg()[0]:.1f}. The target is 10 %.\n")  # fmt: skip
    well = show_rates()
    well &= show_slow()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
