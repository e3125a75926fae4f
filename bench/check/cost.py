"""What a check costs: beyond the login itself, by number of hosts.

``python bench/check/cost.py [HOSTS…]`` prints Markdown; 2, 4, 8, 16 and 32 hosts by default. All
hosts of the lab share this machine's processors: what grows with their number is their work too.
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


def paceline(lab: Lab, *words: str) -> tuple[float, str]:
    """Seconds of the command, and its output. SystemExit when it fails."""
    argv = [sys.executable, "-m", "paceline", *words, "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config)]
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/", check=False)
    seconds = time.monotonic() - began
    if not done.stdout:
        raise SystemExit(done.stderr)
    return seconds, done.stdout


def login(lab: Lab) -> float:
    """Seconds until every host has let us in and told its facts: nothing else is asked."""
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
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(argv, check=True, env=env, cwd="/")
    return time.monotonic() - began


def check(lab: Lab, *words: str) -> float:
    """Seconds of a check in which all must pass."""
    seconds, text = paceline(lab, "check", "--json", *words)
    odd = [one["message"] for one in json.loads(text)["findings"] if one["outcome"] != "pass"]
    if odd:
        print(f"(not a pass: {'; '.join(odd)})", file=sys.stderr)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def row(hosts: int) -> tuple[float, float, float, float]:
    """Seconds: login, quick check, full check without and with the trial."""
    with Lab(LabOptions(hosts=hosts)) as lab:
        login(lab)  # ships the agent
        logins = median([login(lab) for _ in range(REPEATS)])
        quick = median([check(lab, "--quick") for _ in range(REPEATS)])
        pairs = median([check(lab, "--no-trial") for _ in range(REPEATS)])
        full = median([check(lab) for _ in range(REPEATS if hosts <= 8 else 1)])
    return logins, quick, pairs, full


def main(words: list[str]) -> int:
    print(f"# The cost of paceline check\n\n{platform.platform()}, {os.cpu_count()} CPUs, Python "
          f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")  # fmt: skip
    print("Seconds of the whole command, median of three (above 8 hosts the full check once).\n")
    print("| hosts | login alone | --quick | beyond the login | full, without the trial | full | "
          "load before |\n|---|---|---|---|---|---|---|")  # fmt: skip
    rows = {}
    for hosts in [int(word) for word in words] or HOSTS:
        load = os.getloadavg()[0]
        rows[hosts] = logins, quick, pairs, full = row(hosts)
        print(f"| {hosts} | {logins:.2f} | {quick:.2f} | {quick - logins:.2f} | {pairs:.2f} | "
              f"{full:.1f} | {load:.1f} |", flush=True)  # fmt: skip
    low, high = min(rows), max(rows)
    if low < high:
        growth = [(b - a) / (high - low) for a, b in zip(rows[low], rows[high], strict=True)]
        print(f"\nGrowth a host, from {low} to {high}: login {growth[0]:.2f} s, quick check "
              f"{growth[1]:.2f} s, full without the trial {growth[2]:.2f} s, full "
              f"{growth[3]:.2f} s.")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
