"""Duration of ``paceline check`` by number of hosts, against that of the SSH logins alone.

``python bench/check/cost.py [HOSTS…]`` prints Markdown; 2, 4, 8, 16 and 32 hosts by default. All
hosts of the lab share this machine's processors, so the growth includes the work of every host.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.lab import Lab, LabOptions

SOURCE = Path(__file__).resolve().parents[2] / "src"
HOSTS = (2, 4, 8, 16, 32)
REPEATS = 3


def run_paceline(lab: Lab, *arguments: str) -> tuple[float, str]:
    """Seconds of the command, and its output. Raises SystemExit if it prints nothing."""
    argv = [sys.executable, "-m", "paceline", *arguments, "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config)]
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    completed = subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/", check=False)
    seconds = time.monotonic() - start
    if not completed.stdout:
        raise SystemExit(completed.stderr)
    return seconds, completed.stdout


def login_s(lab: Lab) -> float:
    """Seconds to log in to every host and receive its facts, without any check."""
    script = (
        "import asyncio, sys; from pathlib import Path; from paceline.remote.fanout import "
        "connect_hosts; from paceline.remote.openssh import SshOptions; from paceline.spec.hosts "
        "import Host\n"
        "async def main():\n"
        "    names = Path(sys.argv[1]).read_text().split()\n"
        "    hosts = [Host(name, name) for name in names]\n"
        "    channels = await connect_hosts(hosts, [sys.executable] * len(hosts),\n"
        "                                 SshOptions(Path(sys.argv[2])))\n"
        "    await asyncio.gather(*(channel.close(2.0) for channel in channels))\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", script, str(lab.hostfile), str(lab.ssh_config)]
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(argv, check=True, env=env, cwd="/")
    return time.monotonic() - start


def check_s(lab: Lab, *options: str) -> float:
    """Seconds of a check. Prints the findings that did not pass, to stderr."""
    seconds, text = run_paceline(lab, "check", "--json", *options)
    not_passed = [
        finding["message"]
        for finding in json.loads(text)["findings"]
        if finding["outcome"] != "pass"
    ]
    if not_passed:
        print(f"(not a pass: {'; '.join(not_passed)})", file=sys.stderr)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def measure(hosts: int) -> tuple[float, float, float, float]:
    """Seconds of the login, the quick check, and the full check without and with the trial."""
    with Lab(LabOptions(hosts=hosts)) as lab:
        login_s(lab)  # ships the agent
        logins = median([login_s(lab) for _ in range(REPEATS)])
        quick_check = median([check_s(lab, "--quick") for _ in range(REPEATS)])
        without_trial = median([check_s(lab, "--no-trial") for _ in range(REPEATS)])
        full_check = median([check_s(lab) for _ in range(REPEATS if hosts <= 8 else 1)])
    return logins, quick_check, without_trial, full_check


def main(arguments: list[str]) -> int:
    print(f"# The cost of paceline check\n\n{platform.platform()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")  # fmt: skip
    print("Seconds of the complete command, median of three (above 8 hosts the full check once).\n")
    print("| hosts | login alone | --quick | beyond the login | full, without the trial | full | "
          "load before |\n|---|---|---|---|---|---|---|")  # fmt: skip
    rows = {}
    for hosts in [int(argument) for argument in arguments] or HOSTS:
        load = os.getloadavg()[0]
        rows[hosts] = logins, quick_check, without_trial, full_check = measure(hosts)
        print(f"| {hosts} | {logins:.2f} | {quick_check:.2f} | {quick_check - logins:.2f} | "
              f"{without_trial:.2f} | {full_check:.1f} | {load:.1f} |", flush=True)  # fmt: skip
    smallest, largest = min(rows), max(rows)
    if smallest < largest:
        growth = [
            (b - a) / (largest - smallest)
            for a, b in zip(rows[smallest], rows[largest], strict=True)
        ]
        print(f"\nGrowth a host, from {smallest} to {largest}: login {growth[0]:.2f} s, "
              f"quick check {growth[1]:.2f} s, full without the trial {growth[2]:.2f} s, full "
              f"{growth[3]:.2f} s.")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
