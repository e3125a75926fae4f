"""Time and memory of a small job on 1, 2, 16 and 64 hosts of a virtual cluster.

The job is `paceline run --no-python hostname`: log in, find addresses, start one process per host,
collect its output, exit. Memory is that of the launcher and that of all its ssh clients together.
Further rows simulate the agents within the launcher's process, without hosts and ssh.

    python bench/hosts/many_hosts.py [--counts 1 2 16 64] [--simulated 500] [--runs 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from paceline.lab import Lab, LabOptions

TIMEOUT_S = 300
SIMULATED = Path(__file__).parents[2] / "tests" / "simulated_agents.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 16, 64])
    parser.add_argument("--simulated", type=int, nargs="*", default=[64, 500])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=lambda name: Path(name).absolute())
    options = parser.parse_args()
    lines = [
        f"# Many hosts, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for the launcher and all hosts together; "
        f"median of {options.runs} runs after one that ships the agent.",
        "",
        "| hosts | seconds | seconds a host | launcher MiB | its ssh clients MiB |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines += [row(count, options.runs) for count in options.counts]
        lines += [simulated_row(count, options.runs) for count in options.simulated]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def row(count: int, runs: int) -> str:
    with Lab(LabOptions(hosts=count)) as lab:
        measure(lab, count)
        figures = [measure(lab, count) for _ in range(runs)]
    seconds, launcher_mib, ssh_mib = (
        statistics.median(column) for column in zip(*figures, strict=True)
    )
    return (
        f"| {count} | {seconds:.2f} | {seconds / count:.3f} | {launcher_mib:.0f} | {ssh_mib:.0f} |"
    )


def simulated_row(count: int, runs: int) -> str:
    figures = [simulated(count) for _ in range(runs)]
    seconds, launcher_mib = (statistics.median(column) for column in zip(*figures, strict=True))
    return f"| {count} simulated | {seconds:.2f} | {seconds / count:.3f} | {launcher_mib:.0f} | - |"


def simulated(count: int) -> tuple[float, float]:
    """Seconds and peak memory in MiB of a launcher with ``count`` simulated agents."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, str(SIMULATED), str(count), "1", "20", f"{folder}/run"]
        result = json.loads(subprocess.check_output(argv, text=True))
    return result["seconds"], result["mib"]


def measure(lab: Lab, count: int) -> tuple[float, float, float]:
    """Run once. Returns seconds, and peak memory of the launcher and of its ssh clients in MiB."""
    command = [sys.executable, "-m", "paceline", "run", "--hosts", str(lab.hostfile),
               "--ssh-config", str(lab.ssh_config), "--no-python", "hostname"]  # fmt: skip
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peaks = [0.0, 0.0]
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    output, errors = process.communicate(timeout=TIMEOUT_S)
    seconds = time.monotonic() - start
    watcher.join()
    assert process.returncode == 0, errors
    assert sorted(line.split()[-1] for line in output.splitlines()) == sorted(lab.names), output
    return seconds, peaks[0], peaks[1]


def watch(process: subprocess.Popen[str], peaks: list[float]) -> None:
    """Record the peak proportional memory (PSS) of the launcher and of its ssh clients."""
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            client_pids = children.read_text().split()
        except OSError:
            return
        peaks[0] = max(peaks[0], pss(process.pid))
        peaks[1] = max(peaks[1], sum(pss(int(pid)) for pid in client_pids))
        time.sleep(0.1)


def pss(pid: int) -> float:
    """Proportional set size in MiB; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    kib = next((line.split()[1] for line in text.splitlines() if line.startswith("Pss:")), "0")
    return int(kib) / 1024


if __name__ == "__main__":
    main()
