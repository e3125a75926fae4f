"""The same faults, in the same minutes, under Paceline, torchrun's elastic mode and torchft.

``python bench/faults/beside.py [--trials 3] [--faults rank,node,stop,link] [--ways …] [--torchft
FOLDER]``: three lab hosts of one rank each, steps of 50 ms (``steady.py``, ``peers.py``). Gap: how
long no surviving process finished a new step. torchrun: ``--nnodes 2:3 --max-restarts 3``, c10d
rendezvous on the first host, collectives time out after 20 s; ``-own-store`` is the same with the
variable that gives every round a store of its own. torchft: a lighthouse on the first host; FOLDER
is where it was installed (``pip install --no-deps --target FOLDER torchft-nightly``; not under
/tmp, of which each lab host has its own); nobody starts a killed replica again, as its own launcher
would. The fault strikes the second host.
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

from soak import HERE, SOURCE, until

from paceline.lab import Lab, LabOptions

STEP_MS, STEPS, VICTIM = 50, 100000, "n2"
WATCH_S = 75.0  # at most, for a gap to end
BEFORE_S = 2.0  # of steady steps before the fault


def argv_of(lab: Lab, way: str, notes: Path, run: Path, host: str) -> list[str]:
    """What is typed; Paceline's on this machine, the others' on each host."""
    tail = [str(STEPS), str(STEP_MS), str(notes)]
    if way == "paceline":
        source = ["-H", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]
        options = ["--nnodes", "1:3", "--run-dir", str(run)]
        script = str(HERE / "steady.py")
        return [sys.executable, "-m", "paceline", "run", *source, *options, script, *tail]
    if way.startswith("torchrun"):
        end = f"{lab.address('n1')}:29400"
        where = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3"]
        where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", end, "--rdzv-id", "steady"]
        where += ["--local-addr", lab.address(host)]
        module = [sys.executable, "-m", "torch.distributed.run", *where]
        return [*module, str(HERE / "peers.py"), "ddp", *tail]
    return [sys.executable, str(HERE / "peers.py"), "torchft", *tail]


@contextlib.contextmanager
def job(lab: Lab, way: str, notes: Path, run: Path, torchft: str) -> Iterator[list[Any]]:
    """The job's processes here; whatever is left on the hosts is killed at the end."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": HERE}
    screen = (notes.parent / f"{notes.name}.txt").open("wb")
    quiet |= {"stdout": screen, "stderr": screen}
    started: list[Any] = []
    try:
        if way == "paceline":
            env = {**os.environ, "PYTHONPATH": str(SOURCE), "SHELL": "/bin/sh"}
            argv = argv_of(lab, way, notes, run, "")
            started.append(subprocess.Popen(argv, env=env, **quiet))
        else:
            if way == "torchft":
                words = ["--min_replicas", "1", "--bind", "0.0.0.0:29510"]
                light = [f"{torchft}/bin/torchft_lighthouse", *words, "--quorum_tick_ms", "100"]
                light += ["--join_timeout_ms", "10000"]  # as its README has it
                env = {"PYTHONPATH": torchft}
                started.append(lab.popen("n1", [sys.executable, *light], env=env, **quiet))
                time.sleep(1.0)
            for host in lab.names:
                mine = {
                    "PYTHONPATH": f"{SOURCE}:{torchft}" if way == "torchft" else "",
                    "MY_ADDRESS": lab.address(host),
                    "TORCHFT_LIGHTHOUSE": f"http://{lab.address('n1')}:29510",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(way == "torchrun-own-store")),
                }
                argv = argv_of(lab, way, notes, run, host)
                started.append(lab.popen(host, argv, env=mine, **quiet))
        yield started
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                one.kill()
            one.wait()
        for host in [one["name"] for one in lab.status()["hosts"] if one["up"]]:
            for pid, _ in lab.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        screen.close()


def workers(lab: Lab, way: str) -> list[int]:
    """The victim's ranks."""
    mark = {"paceline": "[rank ", "torchft": "peers.py torchft"}.get(way, "peers.py ddp")
    found = [(pid, line) for pid, line in lab.processes(VICTIM) if mark in line]
    return [pid for pid, line in found if "torch.distributed.run" not in line][:1]


def moments(notes: Path) -> list[tuple[float, int, str]]:
    found = []
    for file in notes.glob("*.steps"):
        for line in file.read_text().splitlines():
            if len(words := line.split()) == 4:
                found.append((float(words[3]), int(words[1]), file.stem))
    return sorted(found)


def trial(lab: Lab, way: str, fault: str, folder: Path, torchft: str) -> tuple[float, int, bool]:
    """The gap in seconds, finished steps that were done again, and whether the job was lost."""
    notes, run = folder / "notes", folder / "run"
    notes.mkdir(parents=True)
    with job(lab, way, notes, run, torchft) as started:
        begun = until(lambda: len({who for _, _, who in moments(notes)}) == 3, 90)
        if not begun:
            print((folder / "notes.txt").read_text(errors="replace")[-1500:], file=sys.stderr)
            raise SystemExit(f"{way} did not begin")
        time.sleep(BEFORE_S)
        pids = workers(lab, way)
        struck = time.monotonic()
        strikes: dict[str, Callable[[], object]] = {
            "rank": lambda: [os.kill(pid, signal.SIGKILL) for pid in pids],
            "stop": lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids],
            "node": lambda: lab.fault("power-off", VICTIM),
            "link": lambda: lab.fault("unplug", VICTIM),
        }
        strikes[fault]()

        def survivors() -> list[float]:
            late = [(at, who) for at, _, who in moments(notes) if at > struck + 0.2]
            return [at for at, who in late if not who.startswith(f"{VICTIM}-")]

        until(lambda: len(survivors()) >= 2 * 20 or all(p.poll() is not None for p in started),
              WATCH_S)  # fmt: skip
        every = moments(notes)
        near = [struck, *(at for at, _, who in every if at > struck)]
        lost = len(survivors()) < 20
        near += [time.monotonic()] * lost
        gap = max(after - before for before, after in itertools.pairwise(near))
        done = max((step for at, step, _ in every if at <= struck), default=0)
        after = [step for at, step, _ in every if at > struck + 0.2]
        again = max(0, done - min(after, default=done + 1) + 1)
    lab.heal()
    return gap, again, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--faults", default="rank,node,stop,link")
    parser.add_argument("--ways", default="paceline,torchrun,torchrun-own-store,torchft")
    parser.add_argument("--torchft", default="", help="folder that torchft was installed in")
    asked = parser.parse_args()
    ways = [way for way in asked.ways.split(",") if way != "torchft" or asked.torchft]
    print(f"# The same faults under others\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print("| fault | " + " | ".join(f"{way}: gap s, steps again, lost" for way in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    with tempfile.TemporaryDirectory(prefix="beside-") as temporary:
        folder, number = Path(temporary), itertools.count()
        with Lab(LabOptions(hosts=3, share=(temporary,))) as lab:
            for fault in asked.faults.split(","):
                found: dict[str, list[tuple[float, int, bool]]] = {way: [] for way in ways}
                for _ in range(asked.trials):
                    for way in ways:
                        place = folder / str(next(number))
                        found[way].append(trial(lab, way, fault, place, asked.torchft))
                        print(f"<!-- {fault} {way}: {found[way][-1]} -->", flush=True)
                cells = []
                for way in ways:
                    gaps = [gap for gap, _, _ in found[way]]
                    again = max(count for _, count, _ in found[way])
                    lost = sum(one for _, _, one in found[way])
                    many = f"{statistics.median(gaps):.2f} ({max(gaps):.2f}), {again}, "
                    cells.append(many + f"{lost} of {len(gaps)}")
                print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
