"""From the call of a function to the first finished all-reduce of its ranks, call after call.

``paceline.launch`` on hosts that it keeps ready, torchrunx, and, for the same ranks, the command
torchrun. Two hosts × two ranks of a virtual cluster, everything typed on the first. The second and
later calls of one process count; the first is given beside them, which finds nobody ready.

    pip install --no-deps --target DIR torchrunx fabric paramiko invoke …    # and what they need
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

from launch import PYTHON, cluster_torchrun, compiled, figure, measure

from paceline.lab import Lab, LabOptions

TIMEOUT_S = 120
SOURCE = Path(__file__).resolve().parents[2] / "src"


def all_reduce(own_group: bool) -> float:
    """The measured function; the moment at which its sum was there."""
    import torch
    import torch.distributed as dist

    if own_group:
        dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 4
    moment = time.time()
    if own_group:
        dist.destroy_process_group()
    return moment


def calls(launcher: str, count: int) -> list[float]:
    """Seconds of each of the calls, made by this process."""
    if launcher == "paceline":
        import paceline
    else:
        import torchrunx

        launched = torchrunx.Launcher(["n1", "n2"], 2, backend="gloo")
        launched.set_logging_handlers(None)
    seconds = []
    for _ in range(count):
        begun = time.time()
        if launcher == "paceline":
            moments = [*paceline.launch(all_reduce, (True,), hosts="n1,n2", nproc_per_node=2,
                                        torch=True, keep_warm=600.0, show="none")]  # fmt: skip
        else:
            results = launched.run(all_reduce, False)
            moments = [results.rank(rank) for rank in range(4)]
        seconds.append(max(moments) - begun)
    return seconds


def on_first_host(lab: Lab, launcher: str, count: int, folder: Path) -> list[float]:
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths),
           "GLOO_SOCKET_IFNAME": "eth0", "XDG_CACHE_HOME": str(folder / "cache")}  # fmt: skip
    argv = [PYTHON, __file__, "--call", launcher, "--runs", str(count)]
    try:
        done = lab.exec("n1", argv, env=env, cwd=str(folder), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        print(f"{launcher} did not end within {TIMEOUT_S} s: {error.stderr!r}")
        return []
    if done.returncode != 0:
        print(f"{launcher} failed: {done.stdout}{done.stderr}")
        return []
    return [float(one) for one in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        print(json.dumps(calls(options.call, options.runs)))
        return
    compiled()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.chdir(folder)
        with Lab(LabOptions(hosts=2, share=(made,))) as lab:
            ssh = lab.home("n1") / ".ssh"
            ssh.mkdir(exist_ok=True, mode=0o700)
            shutil.copy(lab.ssh_config, ssh / "config")
            rows = {
                "paceline.launch": on_first_host(lab, "paceline", options.runs + 1, folder),
                "torchrunx": on_first_host(lab, "torchrunx", options.runs + 1, folder),
                "torchrun (command)": [measure(lambda: cluster_torchrun(lab), 4)
                                       for _ in range(options.runs + 1)],
            }  # fmt: skip
            env = {"PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(folder / "cache")}
            lab.exec("n1", [PYTHON, "-m", "paceline", "warm", "down"], env=env)
    theirs = statistics.median(rows["torchrun (command)"][1:])
    lines = [row(name, seconds, theirs) for name, seconds in rows.items() if seconds]
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


def row(name: str, seconds: list[float], theirs: float) -> str:
    first, *later = seconds
    ratio = statistics.median(later) / theirs
    return f"| {name} | {first:.2f} | {figure(tuple(later))} | **{ratio:.2f}** |"


if __name__ == "__main__":
    main()
