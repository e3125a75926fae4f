"""What it costs to show a run: a picture of many hosts, records of where they are, and a training.

    python bench/screen/screen.py [--rounds 3] [--epochs 60] [--no-training] [--model NAME]

First, without anything running: how long a picture of 64 hosts takes, what a second of their news
costs the launcher, and what an agent's look at its host costs. Then trainings of the image recipe
on this machine, with two ranks: on a terminal of 140 x 50 with the live screen, with lines, without
a terminal, and detached, in turn. The recipe's own small network ends several epochs a second, each
with an evaluation and news of it; ``--model resnet18 --epochs 3`` is a training whose epochs last.
A machine that is not quiet changes samples a second by more than what is looked for, so what counts
is the CPU time of the launcher's process, or of the supervisor's.
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

HOSTS, PICTURES = 64, 60
COLUMNS, LINES = 140, 50
NOTHING, DETACHED = "no terminal", "--detach"
LOOKS = {
    NOTHING: [],
    "--screen lines": ["--screen", "lines"],
    "--screen live": ["--screen", "live"],
    DETACHED: ["--detach"],
}
TICK_S = os.sysconf("SC_CLK_TCK")


def second(board: RunState, hosts: int, each: int, step: int) -> None:
    """The news of a second, from all ranks and hosts."""
    now, count = float(step), hosts * each
    for rank in range(count):
        event = Event(
            "heartbeat", f"n{rank // each + 1}", rank, now, {"step": step, "phase": "train"}
        )
        board.apply(event, now)
    row = [0.02, 0.6, 0.3, 0.08, 0.0, 0.0]
    assert len(row) == len(PARTS)
    pace = {"ranks_s": [row] * count, "rates": [12.5] * count}
    board.apply(Event("pace", "n1", 0, now, pace), now)
    about = {"step": step, "steps": 10_000, "epoch": 1, "epochs": 3, "samples_per_s": 800.0}
    for _ in range(5):
        board.apply(Event("progress", "n1", 0, now, about), now)
    board.add_metrics({"split": "train", "step": step, "loss": 1 / (step + 1)})
    for host in range(0, hosts, 2):  # each is asked every two seconds
        links = {"eth0": [step * 10**6, step * 10**6]}
        said = {"time": now, "cpu": [80 * step, 100 * step], "memory": [100, 60], "links": links,
                "gpus": [0.9] * each}  # fmt: skip
        board.add_vitals(f"n{host + 1 + step % 2}", said, "eth0")


def begun(hosts: int, each: int) -> RunState:
    board = RunState()
    for rank in range(hosts * each):
        board.apply(Event("rank started", f"n{rank // each + 1}", rank, 0.0, {"pid": 5}), 0.0)
    board.apply(Event("started", fields={"attempt": 0, "world_size": hosts * each}), 0.0)
    for step in range(1, 4):
        second(board, hosts, each, step)
    return board


def timed(act: Callable[[int], object], count: int = PICTURES) -> str:
    """Of so many calls the median and 95th percentile, and the median of CPU time, in ms."""
    seconds, used = [], []
    for number in range(count):
        begin, before = time.perf_counter(), time.process_time()
        act(number + 10)
        seconds.append(time.perf_counter() - begin)
        used.append(time.process_time() - before)
    low, high = statistics.median(seconds), sorted(seconds)[int(0.95 * count)]
    return f"{1e3 * low:.1f} | {1e3 * high:.1f} | {1e3 * statistics.median(used):.1f}"


def at_rest() -> None:
    """Everything that needs no run."""
    log = [f"[n{at % HOSTS + 1}/{at}] line {at} of what ranks write" for at in range(500)]
    print(f"| {HOSTS} hosts | ranks | median ms | 95 % ms | CPU ms |\n|---|---|---|---|---|")
    for each, (columns, lines) in itertools.product((1, 8), ((80, 24), (140, 50))):
        board, ranks = begun(HOSTS, each), HOSTS * each
        console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=lines)
        with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live:

            def draw(number: int, board: RunState = board, live: Live = live,
                     columns: int = columns, lines: int = lines) -> None:  # fmt: skip
                around = View("runs/one", number, number, 60.0, None, log, "log", (), "? help")
                live.update(Group(*frame(board, around, columns, lines)), refresh=True)

            print(f"| a picture of {columns} x {lines} | {ranks} | {timed(draw)} |")
    for each in (1, 8):
        board, ranks = begun(HOSTS, each), HOSTS * each
        with tempfile.TemporaryDirectory() as folder:
            directory = RunDirectory(Path(folder) / "run")

            def record(step: int, board: RunState = board, each: int = each,
                       directory: RunDirectory = directory) -> None:  # fmt: skip
                second(board, HOSTS, each, step)
                directory.write_json("ranks.json", board.to_json(step, step), durable=False)

            print(f"| a second of news, and ranks.json | {ranks} | {timed(record)} |")
            directory.close()
    look = timed(lambda _: host_load.read_counters(["lo"]))
    print(f"| an agent's look at its host, every 2 s | - | {look} |")


# --- a training ---------------------------------------------------------------------------------


def trained(look: str, words: list[str], folder: Path) -> dict[str, float]:
    """One training on a terminal: the launcher's CPU seconds a second, and samples a second."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    words = ["train", "image", "-p", "2", *words, *LOOKS[look]]
    shown = theirs if look != NOTHING else subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words, "--run-dir", str(folder)],
        stdin=theirs, stdout=shown, stderr=shown, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    marks: list[tuple[float, float]] = []
    while not (folder / "result.json").exists() and (look == DETACHED or process.poll() is None):
        if not select.select([ours], [], [], 0.2)[0]:
            pass
        elif not _read(ours):
            time.sleep(0.2)  # who wrote there has left
        if (folder / "ranks.json").exists():  # the ranks run
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                pid = json.loads((folder / "owner.json").read_text())["pid"]
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                marks.append((time.monotonic(), (int(words[11]) + int(words[12])) / TICK_S))
    while look != DETACHED and process.poll() is None:
        if select.select([ours], [], [], 0.2)[0]:
            _read(ours)
    os.close(ours)
    if process.wait():
        raise SystemExit(f"the training ended with status {process.returncode}: {folder}")
    # the last seconds bring things home
    cut = [one for one in marks if one[0] <= marks[-1][0] - 2.0]
    (since, before), (until, after) = cut[0], cut[-1]
    lines = (folder / "events.jsonl").read_text().splitlines()
    told: dict[str, Any] = next(
        one for one in map(json.loads, reversed(lines)) if one["event"] == "trained"
    )
    return {"cpu": (after - before) / (until - since), "rate": told["samples"] / told["seconds"]}


def _read(terminal: int) -> bool:
    """Takes what was written to it; False when nobody can write there any more."""
    with contextlib.suppress(OSError):
        return bool(os.read(terminal, 1 << 16))
    return False


def trainings(rounds: int, words: list[str]) -> None:
    found: dict[str, list[dict[str, float]]] = {look: [] for look in LOOKS}
    with tempfile.TemporaryDirectory() as parent:
        for number in range(rounds):
            for look, kept in found.items():
                kept.append(
                    trained(
                        look, words, Path(parent) / f"{look.strip('-').replace(' ', '-')}-{number}"
                    )
                )
    cpus = os.cpu_count() or 1
    print("\n| a training of two ranks | launcher's CPU, of one | of this machine | samples/s |")
    print("|---|---|---|---|")
    for look, kept in found.items():
        cpu = statistics.median(one["cpu"] for one in kept)
        rate = statistics.median(one["rate"] for one in kept)
        print(f"| {look} | {cpu:.2%} | {cpu / cpus:.2%} | {rate:,.0f} |")
    pairs = zip(found["--screen live"], found[NOTHING], strict=True)
    more = statistics.median(live["cpu"] - none["cpu"] for live, none in pairs)
    print(f"\nThe live screen itself: {more:+.2%} of one CPU, {more / cpus:+.2%} of this machine.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--model", default="", help="one of the recipe's; its own small one")
    parser.add_argument("--no-training", action="store_true")
    given = parser.parse_args()
    at_rest()
    if not given.no_training:
        model = ["--model", given.model] if given.model else []
        trainings(given.rounds, ["--epochs", str(given.epochs), *model])


if __name__ == "__main__":
    main()
