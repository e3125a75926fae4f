"""Bus bandwidth of ``all_reduce`` over lab links, against iperf3 on the same links.

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


def iperf3_rate(lab: Lab, source: str, target: str) -> float:
    """Received TCP payload in bits per second, over four seconds."""
    with lab.popen(target, ["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        wait_until_listening = "while ! ss -ltn | grep -q ':5201 '; do sleep 0.05; done"
        lab.exec(target, ["sh", "-c", wait_until_listening], timeout=10, check=True)
        argv = ["iperf3", "-c", lab.address(target), "-J", "-t", "4"]
        report = json.loads(lab.exec(source, argv, timeout=30, check=True).stdout)
        server.wait(10)
    return float(report["end"]["sum_received"]["bits_per_second"])


def paceline_collectives(lab: Lab, size: str) -> dict[str, Any]:
    """Output of ``paceline bench collectives --json``."""
    argv = [sys.executable, "-m", "paceline", "bench", "collectives", "-H", str(lab.hostfile)]
    argv += ["--ssh-config", str(lab.ssh_config), "--json", "--collective", "all_reduce"]
    argv += ["-b", size, "-e", size, "-n", "5", "-w", "2"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with tempfile.TemporaryDirectory() as folder:
        command = [*argv, "--run-dir", f"{folder}/run"]
        completed = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    if completed.returncode:
        raise SystemExit(completed.stderr)
    return dict(json.loads(completed.stdout))


def compare_rates() -> bool:
    """Print the rates of both programs. Returns whether they differ by at most 10 %."""
    print("| link | iperf3, Mbit/s | all_reduce on the bus, Mbit/s | difference | "
          "Paceline's probe of the slowest link, Mbit/s |\n|---|---|---|---|---|")  # fmt: skip
    passed = True
    for rate, size in SIZES.items():
        with Lab(LabOptions(hosts=2, rate=rate)) as lab:
            independent = iperf3_rate(lab, "n1", "n2")
            report = paceline_collectives(lab, size)
        paceline_rate = report["rows"][0]["busbw"] * 8e9
        probe = min(link["bits_per_s"] for link in report["links"])
        passed &= abs(paceline_rate / independent - 1) <= 0.1
        print(f"| {rate}, 2 hosts, {size} | {independent / 1e6:.1f} | {paceline_rate / 1e6:.1f} | "
              f"{paceline_rate / independent - 1:+.1%} | {probe / 1e6:.1f} |",
              flush=True)  # fmt: skip
    return passed


def finds_slow_link() -> bool:
    """Slow one link down. Returns whether the report names it."""
    print("\nOne link of three slowed to a quarter:\n")
    with Lab(LabOptions(hosts=3, rate="400mbit")) as lab:
        lab.fault("slow", "n2", "100mbit")
        report = paceline_collectives(lab, "4M")
    print(f"> {report['conclusion']}")
    return any("link of n2" in message for message in report["slow"])


def main() -> int:
    print(f"# all_reduce over gloo against iperf3\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}, load "
          f"{os.getloadavg()[0]:.1f}. The target is 10 %.\n")  # fmt: skip
    passed = compare_rates()
    passed &= finds_slow_link()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
