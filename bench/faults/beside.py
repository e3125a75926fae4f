"""Time without a step after the same faults under Paceline, torchrun's elastic mode and torchft.

``python bench/faults/beside.py [--trials 3] [--faults rank,node,stop,link] [--ways …] [--torchft
FOLDER]`` uses three lab hosts with one rank each and steps of 50 ms (``steady.py``, ``peers.py``).
The launchers take turns. The fault hits the second host. The gap is the longest time in which no
surviving process finished a new step.

* torchrun: ``--nnodes 2:3 --max-restarts 3``, c10d rendezvous on the first host, collectives time
  out after 20 s. ``torchrun-own-store`` sets the variable that gives every round its own store.
* torchft: a lighthouse on the first host. FOLDER is the installation (``pip install --no-deps
  --target FOLDER torchft-nightly``), not under /tmp, which each lab host has for itself. A killed
  replica is not restarted, although torchft's own launcher would.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from soak import HERE, SOURCE, wait_until

from paceline.lab import Lab, LabOptions

STEP_MS, STEPS, VICTIM = 50, 100000, "n2"
WATCH_S = 75.0  # limit for a gap to end
MIN_STEADY_S = 2.0  # of steady steps before the fault


def make_command(lab: Lab, launcher: str, log_folder: Path, run: Path, host: str) -> list[str]:
    """Command of a launcher. Paceline's runs on this machine, the others' run on each host."""
    tail = [str(STEPS), str(STEP_MS), str(log_folder)]
    if launcher == "paceline":
        source = ["-H", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]
        options = ["--nnodes", "1:3", "--run-dir", str(run)]
        script = str(HERE / "steady.py")
        return [sys.executable, "-m", "paceline", "run", *source, *options, script, *tail]
    if launcher.startswith("torchrun"):
        endpoint = f"{lab.address('n1')}:29400"
        torchrun_options = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3"]
        torchrun_options += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            "steady",
        ]
        torchrun_options += ["--local-addr", lab.address(host)]
        module = [sys.executable, "-m", "torch.distributed.run", *torchrun_options]
        return [*module, str(HERE / "peers.py"), "ddp", *tail]
    return [sys.executable, str(HERE / "peers.py"), "torchft", *tail]


@contextlib.contextmanager
def job(lab: Lab, launcher: str, log_folder: Path, run: Path, torchft: str) -> Iterator[list[Any]]:
    """Start a job. Yields its processes, and kills all processes on the hosts at the end."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": HERE}
    output = (log_folder.parent / f"{log_folder.name}.txt").open("wb")
    streams |= {"stdout": output, "stderr": output}
    started: list[Any] = []
    try:
        if launcher == "paceline":
            env = {**os.environ, "PYTHONPATH": str(SOURCE), "SHELL": "/bin/sh"}
            argv = make_command(lab, launcher, log_folder, run, "")
            started.append(subprocess.Popen(argv, env=env, **streams))
        else:
            if launcher == "torchft":
                arguments = ["--min_replicas", "1", "--bind", "0.0.0.0:29510"]
                lighthouse = [
                    f"{torchft}/bin/torchft_lighthouse",
                    *arguments,
                    "--quorum_tick_ms",
                    "100",
                ]
                lighthouse += ["--join_timeout_ms", "10000"]  # as in torchft's README
                env = {"PYTHONPATH": torchft}
                started.append(lab.popen("n1", [sys.executable, *lighthouse], env=env, **streams))
                time.sleep(1.0)
            for host in lab.names:
                environment = {
                    "PYTHONPATH": f"{SOURCE}:{torchft}" if launcher == "torchft" else "",
                    "MY_ADDRESS": lab.address(host),
                    "TORCHFT_LIGHTHOUSE": f"http://{lab.address('n1')}:29510",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(
                        int(launcher == "torchrun-own-store")
                    ),
                }
                argv = make_command(lab, launcher, log_folder, run, host)
                started.append(lab.popen(host, argv, env=environment, **streams))
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for host in [entry["name"] for entry in lab.status()["hosts"] if entry["up"]]:
            for pid, _ in lab.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        output.close()


def find_victim_ranks(lab: Lab, launcher: str) -> list[int]:
    """PIDs of the ranks on the host that the fault hits."""
    marker = {"paceline": "[rank ", "torchft": "peers.py torchft"}.get(launcher, "peers.py ddp")
    processes = [(pid, line) for pid, line in lab.processes(VICTIM) if marker in line]
    return [pid for pid, line in processes if "torch.distributed.run" not in line][:1]


def read_steps(log_folder: Path) -> list[tuple[float, int, str]]:
    """Time, step and process of every finished step, sorted by time."""
    steps = []
    for file in log_folder.glob("*.steps"):
        for line in file.read_text().splitlines():
            if len(fields := line.split()) == 4:
                steps.append((float(fields[3]), int(fields[1]), file.stem))
    return sorted(steps)


def trial(
    lab: Lab, launcher: str, fault: str, folder: Path, torchft: str
) -> tuple[float, int, bool]:
    """The gap in seconds, the number of repeated steps, and whether the job was lost."""
    log_folder, run = folder / "notes", folder / "run"
    log_folder.mkdir(parents=True)
    with job(lab, launcher, log_folder, run, torchft) as started:
        has_started = wait_until(
            lambda: len({name for _, _, name in read_steps(log_folder)}) == 3, 90
        )
        if not has_started:
            print((folder / "notes.txt").read_text(errors="replace")[-1500:], file=sys.stderr)
            raise SystemExit(f"{launcher} did not start")
        time.sleep(MIN_STEADY_S)
        pids = find_victim_ranks(lab, launcher)
        injected = time.monotonic()
        injections: dict[str, Callable[[], object]] = {
            "rank": lambda: [os.kill(pid, signal.SIGKILL) for pid in pids],
            "stop": lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids],
            "node": lambda: lab.fault("power-off", VICTIM),
            "link": lambda: lab.fault("unplug", VICTIM),
        }
        injections[fault]()

        def survivor_steps() -> list[float]:
            later_steps = [
                (finished, name)
                for finished, _, name in read_steps(log_folder)
                if finished > injected + 0.2
            ]
            return [finished for finished, name in later_steps if not name.startswith(f"{VICTIM}-")]

        wait_until(
            lambda: len(survivor_steps()) >= 2 * 20 or all(p.poll() is not None for p in started),
            WATCH_S,
        )
        all_steps = read_steps(log_folder)
        moments = [injected, *(finished for finished, _, name in all_steps if finished > injected)]
        lost = len(survivor_steps()) < 20
        moments += [time.monotonic()] * lost
        gap = max(later - earlier for earlier, later in itertools.pairwise(moments))
        last_step = max(
            (step for finished, step, _ in all_steps if finished <= injected), default=0
        )
        later = [step for finished, step, _ in all_steps if finished > injected + 0.2]
        repeated = max(0, last_step - min(later, default=last_step + 1) + 1)
    lab.heal()
    return gap, repeated, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--faults", default="rank,node,stop,link")
    parser.add_argument("--ways", default="paceline,torchrun,torchrun-own-store,torchft")
    parser.add_argument("--torchft", default="", help="folder that torchft was installed in")
    options = parser.parse_args()
    launchers = [
        launcher for launcher in options.ways.split(",") if launcher != "torchft" or options.torchft
    ]
    print(f"# The same faults under other launchers\n\n{platform.platform()}, "
          f"{os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print(
        "| fault | "
        + " | ".join(f"{launcher}: gap s, repeated steps, lost" for launcher in launchers)
        + " |"
    )
    print("|---" * (len(launchers) + 1) + "|")
    with tempfile.TemporaryDirectory(prefix="beside-") as temporary:
        folder, number = Path(temporary), itertools.count()
        with Lab(LabOptions(hosts=3, share=(temporary,))) as lab:
            for fault in options.faults.split(","):
                results: dict[str, list[tuple[float, int, bool]]] = {
                    launcher: [] for launcher in launchers
                }
                for _ in range(options.trials):
                    for launcher in launchers:
                        trial_folder = folder / str(next(number))
                        results[launcher].append(
                            trial(lab, launcher, fault, trial_folder, options.torchft)
                        )
                        print(f"<!-- {fault} {launcher}: {results[launcher][-1]} -->", flush=True)
                cells = []
                for launcher in launchers:
                    gaps = [gap for gap, _, _ in results[launcher]]
                    repeated = max(count for _, count, _ in results[launcher])
                    lost = sum(is_lost for _, _, is_lost in results[launcher])
                    cell = f"{statistics.median(gaps):.2f} ({max(gaps):.2f}), {repeated}, "
                    cells.append(cell + f"{lost} of {len(gaps)}")
                print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
