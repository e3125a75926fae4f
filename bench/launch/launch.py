"""Seconds from the start of the command to the first all-reduce: paceline against torchrun.

Measures one host × four ranks on this machine, and two hosts × two ranks on a virtual cluster,
where parallel ssh starts torchrun on both hosts with the same interpreter and a static rendezvous.
A warm second start follows a command with ``--keep-warm``, which does not count. The two launchers
alternate. The table has the medians and the median of the pairwise ratios.

    python bench/launch/launch.py [--runs 5] [--out bench/launch/launch_HARDWARE_DATE.md]
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paceline
from paceline.lab import Lab, LabOptions

JOB = Path(__file__).with_name("first_all_reduce.py")
PYTHON = sys.executable
TIMEOUT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    compile_package()
    lines = header(options.runs)
    os.chdir(JOB.parent)  # hosts get the code of the current folder
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_OPT_RUN_DIR"] = f"{folder}/run"
        lines.append(row("1 host × 4 ranks", 4, options.runs, local_paceline, local_torchrun))
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # ignores warm hosts of other jobs
        with Lab(LabOptions(hosts=2)) as lab:
            torchrun = lambda: cluster_torchrun(lab)  # noqa: E731
            cold = lambda: cluster_paceline(lab)  # noqa: E731
            warm = lambda: cluster_paceline(lab, "--keep-warm", "10m")  # noqa: E731
            lines.append(row("2 hosts × 2 ranks", 4, options.runs, cold, torchrun))
            try:
                name = "2 hosts × 2 ranks, warm second start"
                lines.append(row(name, 4, options.runs, warm, torchrun))
            finally:
                run([PYTHON, "-m", "paceline", "warm", "down"])
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def compile_package() -> None:
    """Write the package's bytecode, as pip does, so that no start has to compile it."""
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)


def header(runs: int) -> list[str]:
    import torch

    today = datetime.date.today().isoformat()
    return [
        f"# Launch time, {today}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}; {runs} runs each, alternating, after one that does not count.",
        "Seconds from the start of the command to the end of the last rank's first all-reduce.",
        "",
        "| | paceline median (min–max) | torchrun median (min–max) | ratio, median of pairs |",
        "|---|---|---|---|",
    ]


def row(
    name: str,
    ranks: int,
    runs: int,
    run_paceline: Callable[[], list[str]],
    run_torchrun: Callable[[], list[str]],
) -> str:
    measure_all_reduce(run_paceline, ranks)
    measure_all_reduce(run_torchrun, ranks)
    pairs = [
        (measure_all_reduce(run_paceline, ranks), measure_all_reduce(run_torchrun, ranks))
        for _ in range(runs)
    ]
    paceline_s, torchrun_s = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return f"| {name} | {format_times(paceline_s)} | {format_times(torchrun_s)} | **{ratio:.2f}** |"


def format_times(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def measure_all_reduce(launch: Callable[[], list[str]], ranks: int) -> float:
    """Run once. Returns the seconds until the last rank's all-reduce."""
    start_time = time.time()
    outputs = launch()
    times = re.findall(rf"all-reduce {ranks} at ([\d.]+)", "\n".join(outputs))
    assert len(times) == ranks, outputs
    return max(map(float, times)) - start_time


def run(*commands: list[str]) -> list[str]:
    """Run the commands at the same time. Returns their outputs."""
    processes = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    return [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]


def local_paceline() -> list[str]:
    return run([PYTHON, "-m", "paceline", "run", "-p", "4", str(JOB)])


def local_torchrun() -> list[str]:
    return run([PYTHON, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=4", str(JOB)])  # fmt: skip


def cluster_paceline(lab: Lab, *options: str) -> list[str]:
    return run([PYTHON, "-m", "paceline", "run", "-p", "2", "--hosts", str(lab.hostfile),
                "--ssh-config", str(lab.ssh_config), *options, str(JOB)])  # fmt: skip


def cluster_torchrun(lab: Lab) -> list[str]:
    master = lab.address(lab.names[0])
    port = 20000 + int(time.time() * 10) % 10000
    commands = []
    for number, name in enumerate(lab.names):
        remote = (
            f"env GLOO_SOCKET_IFNAME=eth0 {PYTHON} -m torch.distributed.run --nnodes=2 "
            f"--nproc-per-node=2 --node-rank={number} --master-addr={master} "
            f"--master-port={port} {JOB}"
        )
        commands.append(["ssh", "-F", str(lab.ssh_config), name, remote])
    return run(*commands)


if __name__ == "__main__":
    main()
