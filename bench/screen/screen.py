"""Cost of displaying a run: frames of the live screen, records of its state, and trainings.

    python bench/screen/screen.py [--rounds 3] [--epochs 60] [--no-training] [--model NAME]

The first table needs no run: the time of a frame for 64 hosts, of the launcher's processing of one
second of their events, and of an agent's read of its host's counters. The second table compares
trainings of the image recipe with two ranks on this machine: with the live screen on a terminal of
140 x 50, with lines, without a terminal, and detached, alternating. The recipe's default network
finishes several epochs a second, each with an evaluation and its events; ``--model resnet18
--epochs 3`` has longer epochs. Load on the machine changes samples per second by more than the
display does. Compare the CPU time of the launcher's (or the supervisor's) process instead.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from paceline.agent.surveys import host_load
from paceline.launch.terminal.render import View, frame
from paceline.launch.terminal.run_state import RunState
from paceline.rundir.directory import RunDirectory
from paceline.spec.events import PARTS, Event

HOSTS, NUM_FRAMES = 64, 60
COLUMNS, LINES = 140, 50
NO_TERMINAL, DETACHED = "no terminal", "--detach"
DISPLAY_FLAGS = {
    NO_TERMINAL: [],
    "--screen lines": ["--screen", "lines"],
    "--screen live": ["--screen", "live"],
    DETACHED: ["--detach"],
}
TICK_S = os.sysconf("SC_CLK_TCK")


def apply_one_second(state: RunState, hosts: int, ranks_per_host: int, step: int) -> None:
    """Apply one second of events of all ranks and hosts."""
    time_s, count = float(step), hosts * ranks_per_host
    for rank in range(count):
        event = Event(
            "heartbeat",
            f"n{rank // ranks_per_host + 1}",
            rank,
            time_s,
            {"step": step, "phase": "train"},
        )
        state.apply(event, time_s)
    row = [0.02, 0.6, 0.3, 0.08, 0.0, 0.0]
    assert len(row) == len(PARTS)
    pace = {"ranks_s": [row] * count, "rates": [12.5] * count}
    state.apply(Event("pace", "n1", 0, time_s, pace), time_s)
    progress = {"step": step, "steps": 10_000, "epoch": 1, "epochs": 3, "samples_per_s": 800.0}
    for _ in range(5):
        state.apply(Event("progress", "n1", 0, time_s, progress), time_s)
    state.add_metrics({"split": "train", "step": step, "loss": 1 / (step + 1)})
    for host in range(0, hosts, 2):  # each host reports every two seconds
        links = {"eth0": [step * 10**6, step * 10**6]}
        vitals = {"time": time_s, "cpu": [80 * step, 100 * step], "memory": [100, 60],
                  "links": links, "gpus": [0.9] * ranks_per_host}  # fmt: skip
        state.add_vitals(f"n{host + 1 + step % 2}", vitals, "eth0")


def make_state(hosts: int, ranks_per_host: int) -> RunState:
    """State of a run after its first seconds."""
    state = RunState()
    for rank in range(hosts * ranks_per_host):
        state.apply(
            Event("rank started", f"n{rank // ranks_per_host + 1}", rank, 0.0, {"pid": 5}), 0.0
        )
    state.apply(Event("started", fields={"attempt": 0, "world_size": hosts * ranks_per_host}), 0.0)
    for step in range(1, 4):
        apply_one_second(state, hosts, ranks_per_host, step)
    return state


def measure_calls(operation: Callable[[int], object], count: int = NUM_FRAMES) -> str:
    """Median and 95th percentile of the time of a call, and its median CPU time, in ms."""
    seconds, cpu_seconds = [], []
    for number in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        operation(number + 10)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    median_s, percentile_s = statistics.median(seconds), sorted(seconds)[int(0.95 * count)]
    cpu_s = statistics.median(cpu_seconds)
    return f"{1e3 * median_s:.1f} | {1e3 * percentile_s:.1f} | {1e3 * cpu_s:.1f}"


def measure_without_run() -> None:
    """Measure frames, events and counters without a run."""
    log = [
        f"[n{number % HOSTS + 1}/{number}] line {number} of a rank's output"
        for number in range(500)
    ]
    print(f"| {HOSTS} hosts | ranks | median ms | 95 % ms | CPU ms |\n|---|---|---|---|---|")
    for ranks_per_host, (columns, lines) in itertools.product((1, 8), ((80, 24), (140, 50))):
        state, ranks = make_state(HOSTS, ranks_per_host), HOSTS * ranks_per_host
        console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=lines)
        with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live:

            def draw(number: int, state: RunState = state, live: Live = live,
                     columns: int = columns, lines: int = lines) -> None:  # fmt: skip
                view = View("runs/one", number, number, 60.0, None, log, "log", (), "? help")
                live.update(Group(*frame(state, view, columns, lines)), refresh=True)

            print(f"| a frame of {columns} x {lines} | {ranks} | {measure_calls(draw)} |")
    for ranks_per_host in (1, 8):
        state, ranks = make_state(HOSTS, ranks_per_host), HOSTS * ranks_per_host
        with tempfile.TemporaryDirectory() as folder:
            directory = RunDirectory(Path(folder) / "run")

            def record(step: int, state: RunState = state, ranks_per_host: int = ranks_per_host,
                       directory: RunDirectory = directory) -> None:  # fmt: skip
                apply_one_second(state, HOSTS, ranks_per_host, step)
                directory.write_json("ranks.json", state.to_json(step, step), durable=False)

            print(f"| one second of events, and ranks.json | {ranks} | {measure_calls(record)} |")
            directory.close()
    counters_ms = measure_calls(lambda _: host_load.read_counters(["lo"]))
    print(f"| an agent's read of its host's counters, every 2 s | - | {counters_ms} |")


# --- a training ---------------------------------------------------------------------------------


def run_training(display: str, arguments: list[str], folder: Path) -> dict[str, float]:
    """Train once. Returns the launcher's CPU seconds per second, and samples per second."""
    controller, terminal_fd = pty.openpty()
    fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    arguments = ["train", "image", "-p", "2", *arguments, *DISPLAY_FLAGS[display]]
    output = terminal_fd if display != NO_TERMINAL else subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *arguments, "--run-dir", str(folder)],
        stdin=terminal_fd, stdout=output, stderr=output, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(terminal_fd)
    samples: list[tuple[float, float]] = []
    while not (folder / "result.json").exists() and (display == DETACHED or process.poll() is None):
        if not select.select([controller], [], [], 0.2)[0]:
            pass
        elif not _drain(controller):
            time.sleep(0.2)  # the writer has closed the terminal
        if (folder / "ranks.json").exists():  # the ranks run
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                pid = json.loads((folder / "owner.json").read_text())["pid"]
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                samples.append((time.monotonic(), (int(fields[11]) + int(fields[12])) / TICK_S))
    while display != DETACHED and process.poll() is None:
        if select.select([controller], [], [], 0.2)[0]:
            _drain(controller)
    os.close(controller)
    if process.wait():
        raise SystemExit(f"the training ended with status {process.returncode}: {folder}")
    # the last seconds transfer results
    steady = [sample for sample in samples if sample[0] <= samples[-1][0] - 2.0]
    (first_time, first_cpu), (last_time, last_cpu) = steady[0], steady[-1]
    lines = (folder / "events.jsonl").read_text().splitlines()
    final_event: dict[str, Any] = next(
        event for event in map(json.loads, reversed(lines)) if event["event"] == "trained"
    )
    return {
        "cpu": (last_cpu - first_cpu) / (last_time - first_time),
        "rate": final_event["samples"] / final_event["seconds"],
    }


def _drain(terminal: int) -> bool:
    """Read and discard output. Returns False if no process can write to the terminal."""
    with contextlib.suppress(OSError):
        return bool(os.read(terminal, 1 << 16))
    return False


def compare_displays(rounds: int, arguments: list[str]) -> None:
    results: dict[str, list[dict[str, float]]] = {display: [] for display in DISPLAY_FLAGS}
    with tempfile.TemporaryDirectory() as parent:
        for number in range(rounds):
            for display, measurements in results.items():
                measurements.append(
                    run_training(
                        display,
                        arguments,
                        Path(parent) / f"{display.strip('-').replace(' ', '-')}-{number}",
                    )
                )
    cpus = os.cpu_count() or 1
    print("\n| a training of two ranks | launcher's CPU, of one | of this machine | samples/s |")
    print("|---|---|---|---|")
    for display, measurements in results.items():
        cpu = statistics.median(measurement["cpu"] for measurement in measurements)
        rate = statistics.median(measurement["rate"] for measurement in measurements)
        print(f"| {display} | {cpu:.2%} | {cpu / cpus:.2%} | {rate:,.0f} |")
    pairs = zip(results["--screen live"], results[NO_TERMINAL], strict=True)
    additional = statistics.median(live["cpu"] - baseline["cpu"] for live, baseline in pairs)
    print(
        f"\nThe live screen itself: {additional:+.2%} of one CPU,"
        f" {additional / cpus:+.2%} of this machine."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--model", default="", help="model of the recipe; default: its small network"
    )
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    measure_without_run()
    if not options.no_training:
        model = ["--model", options.model] if options.model else []
        compare_displays(options.rounds, ["--epochs", str(options.epochs), *model])


if __name__ == "__main__":
    main()
