"""From Enter to the first finished all-reduce: paceline against torchrun.

Two hosts × two ranks: a virtual cluster; torchrun is started on both hosts by parallel ssh with
the same interpreter, static rendezvous. One host × four ranks: this machine. A warm second start
follows a command with ``--keep-warm``, which does not count. The two take turns in the same run;
quoted are medians and the median of the pairwise ratios.

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
    compiled()
    lines = header(options.runs)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines.append(row("1 host × 4 ranks", 4, options.runs, local_paceline, local_torchrun))
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # nobody else's hosts are ready
        with Lab(LabOptions(hosts=2)) as lab:
            theirs = lambda: cluster_torchrun(lab)  # noqa: E731
            cold = lambda: cluster_paceline(lab)  # noqa: E731
            warm = lambda: cluster_paceline(lab, "--keep-warm", "10m")  # noqa: E731
            lines.append(row("2 hosts × 2 ranks", 4, options.runs, cold, theirs))
            try:
                name = "2 hosts × 2 ranks, warm second start"
                lines.append(row(name, 4, options.runs, warm, theirs))
            finally:
                run([PYTHON, "-m", "paceline", "warm", "down"])
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def compiled() -> None:
    """Has the package's bytecode written, as pip does when it installs one: torch has its own."""
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)


def header(runs: int) -> list[str]:
    import torch

    today = datetime.date.today().isoformat()
    return [
        f"# Launch time, {today}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
        f"torch {torch.__version__}; {runs} runs each, in turns, after one that does not count.",
        "Seconds from the start of the command to the end of the last rank's first all-reduce.",
        "",
        "| | paceline median (min–max) | torchrun median (min–max) | ratio, median of pairs |",
        "|---|---|---|---|",
    ]


def row(
    name: str, ranks: int, runs: int, ours: Callable[[], list[str]], theirs: Callable[[], list[str]]
) -> str:
    measure(ours, ranks)
    measure(theirs, ranks)
    pairs = [(measure(ours, ranks), measure(theirs, ranks)) for _ in range(runs)]
    first, second = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return f"| {name} | {figure(first)} | {figure(second)} | **{ratio:.2f}** |"


def figure(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def measure(start: Callable[[], list[str]], ranks: int) -> float:
    """Runs once; seconds until the last rank's all-reduce."""
    begun = time.time()
    outputs = start()
    moments = re.findall(rf"all-reduce {ranks} at ([\d.]+)", "\n".join(outputs))
    assert len(moments) == ranks, outputs
    return max(map(float, moments)) - begun


def run(*commands: list[str]) -> list[str]:
    """Starts the commands at the same time; what they printed."""
    started = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    return [process.communicate(timeout=TIMEOUT_S)[0] for process in started]


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
