"""Seconds from the call of a function to the first all-reduce of its ranks, for repeated calls.

Compares ``paceline.launch`` on hosts that it keeps warm, torchrunx, and the command torchrun, each
with two hosts × two ranks of a virtual cluster and started on the first host. The table has the
first call of a process, which finds no warm ranks, and the median of its later calls.

    pip install --no-deps --target DIR torchrunx fabric paramiko invoke …    # all dependencies
    PYTHONPATH=DIR python bench/launch/calls.py [--runs 5] [--out FILE.md]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from launch import PYTHON, cluster_torchrun, compile_package, format_times, measure_all_reduce

from paceline.lab import Lab, LabOptions

TIMEOUT_S = 120
SOURCE = Path(__file__).resolve().parents[2] / "src"


def all_reduce(needs_group: bool) -> float:
    """The measured function. Returns the time at which its all-reduce finished."""
    import torch
    import torch.distributed as dist

    if needs_group:
        dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 4
    finished = time.time()
    if needs_group:
        dist.destroy_process_group()
    return finished


def calls(launcher: str, count: int) -> list[float]:
    """Seconds of each call made by this process."""
    if launcher == "paceline":
        import paceline
    else:
        import torchrunx

        torchrunx_launcher = torchrunx.Launcher(["n1", "n2"], 2, backend="gloo")
        torchrunx_launcher.set_logging_handlers(None)
    seconds = []
    for _ in range(count):
        start = time.time()
        if launcher == "paceline":
            moments = [*paceline.launch(all_reduce, (True,), hosts="n1,n2", nproc_per_node=2,
                                        torch=True, keep_warm=600.0, show="none")]  # fmt: skip
        else:
            results = torchrunx_launcher.run(all_reduce, False)
            moments = [results.rank(rank) for rank in range(4)]
        seconds.append(max(moments) - start)
    return seconds


def on_first_host(lab: Lab, launcher: str, count: int, folder: Path) -> list[float]:
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths),
           "GLOO_SOCKET_IFNAME": "eth0", "XDG_CACHE_HOME": str(folder / "cache")}  # fmt: skip
    argv = [PYTHON, __file__, "--call", launcher, "--runs", str(count)]
    try:
        completed = lab.exec("n1", argv, env=env, cwd=str(folder), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        print(f"{launcher} did not finish within {TIMEOUT_S} s: {error.stderr!r}")
        return []
    if completed.returncode != 0:
        print(f"{launcher} failed: {completed.stdout}{completed.stderr}")
        return []
    return [float(value) for value in json.loads(completed.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        print(json.dumps(calls(options.call, options.runs)))
        return
    compile_package()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.chdir(folder)
        with Lab(LabOptions(hosts=2, share=(temporary,))) as lab:
            ssh = lab.home("n1") / ".ssh"
            ssh.mkdir(exist_ok=True, mode=0o700)
            shutil.copy(lab.ssh_config, ssh / "config")
            rows = {
                "paceline.launch": on_first_host(lab, "paceline", options.runs + 1, folder),
                "torchrunx": on_first_host(lab, "torchrunx", options.runs + 1, folder),
                "torchrun (command)": [measure_all_reduce(lambda: cluster_torchrun(lab), 4)
                                       for _ in range(options.runs + 1)],
            }  # fmt: skip
            env = {"PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(folder / "cache")}
            lab.exec("n1", [PYTHON, "-m", "paceline", "warm", "down"], env=env)
    torchrun_s = statistics.median(rows["torchrun (command)"][1:])
    lines = [row(name, seconds, torchrun_s) for name, seconds in rows.items() if seconds]
    text = "\n".join([*header(options.runs), *lines]) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def header(runs: int) -> list[str]:
    return [
        f"# Calls of a function, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}; one "
        f"process, {runs} calls after the first; 2 hosts × 2 ranks.",
        "Seconds from the call to the end of the last rank's first all-reduce.",
        "",
        "| | first call | later calls, median (min–max) | median ÷ torchrun's |",
        "|---|---|---|---|",
    ]


def row(name: str, seconds: list[float], torchrun_s: float) -> str:
    first, *later = seconds
    ratio = statistics.median(later) / torchrun_s
    return f"| {name} | {first:.2f} | {format_times(tuple(later))} | **{ratio:.2f}** |"


if __name__ == "__main__":
    main()
