"""Seeded random faults in lab trainings: measured gaps and detection times against the limits.

``python bench/faults/soak.py [--faults 40] [--seed 1] [--hosts 3] [--each 8] [--width 48]
[--steps 1500] [--ranks 1] [--workers 0] [--kinds a,b] [--minutes 10] [--keep FOLDER]``

A job of ``steady.py`` is started over SSH on the lab's hosts, and faults are injected repeatedly.
After ``--each`` faults the job may end, and the next job starts. For each kind of fault, the script
prints as Markdown: the number of faults, the time until the job reported it (detection), the time
without a finished step (gap), whether the report named the right host only, and whether the job was
lost. For each job it compares the parameters with those of the undisturbed run (float64, largest
difference), counts repeated steps, and lists processes and listeners left on the hosts.

Every rank writes the time of each finished step into a folder that all hosts share (one kernel, one
monotonic clock). Nothing else is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.lab import Lab, LabOptions

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
STEP_MS = 20.0
MIN_FREEZE_S = 2.0
MAX_END_S = 600.0  # for a job to end after its last fault
SETTLE_S = 20.0  # limit from a fault to new steps of all ranks
MAX_DIFFERENCE = 1e-10
RANK = re.compile(r"\[rank (\d+) of \d+")
AGENT = "sys.stdin.buffer.raw.readline"  # part of the command that starts an agent over SSH


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        max_gap_s: Longest time without a new step, in seconds.
        inject: Injects the fault on a host of the lab. Returns a function that undoes it, or None.
        duration_s: Seconds until the fault is undone.
        names_host: Whether the job must name the affected hosts and no other.
        hits_rank_0: Whether it affects the current host of rank 0.
        hosts: Number of affected hosts.
        settle_s: Seconds within which a rank that it ends has finished its last step.
        may_pass: Whether it may end before the job gives a host up. The host must then be named
            only if the job gave one up.
    """

    max_gap_s: float
    inject: Callable[[Lab, str], Callable[[], object] | None]
    duration_s: float = 0.0
    names_host: bool = True
    hits_rank_0: bool = False
    hosts: int = 1
    settle_s: float = 0.5
    may_pass: bool = False

    def affected_hosts(self, lab: Lab, host: str) -> set[str]:
        """Names of the affected hosts, from ``host`` on."""
        first = lab.names.index(host)
        return {lab.names[(first + offset) % len(lab.names)] for offset in range(self.hosts)}


def find_processes(lab: Lab, host: str, role: str) -> list[int]:
    """PIDs, on this machine, of the processes of a host that have one role."""
    candidates = lab.processes(host)
    ranks = {pid for pid, line in candidates if RANK.search(line)}
    if role in ("rank", "worker"):  # a rank's loader workers have the title of the rank
        return [pid for pid in sorted(ranks) if (parent_pid(pid) in ranks) == (role == "worker")]
    matchers: dict[str, Callable[[str], object]] = {
        "forkserver": lambda line: " forkserver " in line and not RANK.search(line),
        "guard": lambda line: " guard " in line,
        "agent": lambda line: AGENT in line or line.endswith(" agent"),
        "sshd": lambda line: line.startswith("sshd: ") and "listener" not in line,
        "store": lambda line: line.endswith(" store"),
    }
    # Oldest first: a new login for an agent looks like the agent and may have a lower PID.
    return sorted((pid for pid, line in candidates if matchers[role](line)), key=start_ticks)


def parent_pid(pid: int) -> int:
    """PID of a process's parent; 0 if the process is gone."""
    return read_stat(pid, 1)


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks; 0 if the process is gone."""
    return read_stat(pid, 19)


def read_stat(pid: int, field: int) -> int:
    """A field of ``/proc/PID/stat``, counted from the state; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field])
    except OSError:
        return 0


def signal_store_then_kill(signum: int) -> Callable[[Lab, str], None]:
    """Send a signal to the store of the job's groups on its current host, then kill a rank."""

    def inject_fault(lab: Lab, host: str) -> None:
        store_hosts = [name for name in lab.names if find_processes(lab, name, "store")]
        if not store_hosts:
            raise LookupError("no store on any host")
        send_signal("store", signum)(lab, store_hosts[0])
        send_signal("rank", signal.SIGKILL)(lab, host)

    return inject_fault


def send_signal(role: str, signum: int, limit: int = 1) -> Callable[[Lab, str], None]:
    """Send a signal to processes of a host."""

    def inject_fault(lab: Lab, host: str) -> None:
        pids = find_processes(lab, host, role)
        if not pids:
            raise LookupError(f"no {role} on {host}")
        for pid in pids[:limit]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    return inject_fault


def fault(*words: str) -> Callable[[Lab, str], Callable[[], object]]:
    """A fault of the lab, which can be undone."""

    def inject_fault(lab: Lab, host: str) -> Callable[[], object]:
        name, *arguments = words
        lab.fault(name, host, *arguments)
        return lambda: lab.undo(name, host, *arguments)

    return inject_fault


def block_incoming(lab: Lab, host: str) -> Callable[[], object]:
    """Drop packets from another host to this one; the other direction works."""
    peer = next(name for name in lab.names if name != host)
    return fault("deaf", peer)(lab, host)


def isolate(lab: Lab, host: str) -> Callable[[], object]:
    """Block traffic between a host and the others; the launcher reaches all of them."""
    peers = [name for name in lab.names if name != host]
    directions = [*((host, peer) for peer in peers), *((peer, host) for peer in peers)]
    undos = [fault("deaf", peer)(lab, receiver) for receiver, peer in directions]
    return lambda: [undo() for undo in undos]


def kill_two_ranks(delay_s: float) -> Callable[[Lab, str], None]:
    """Kill a rank of the host and, after a delay, one of the next host."""

    def inject_fault(lab: Lab, host: str) -> None:
        second_host = lab.names[(lab.names.index(host) + 1) % len(lab.names)]
        send_signal("rank", signal.SIGKILL)(lab, host)
        time.sleep(delay_s)
        send_signal("rank", signal.SIGKILL)(lab, second_host)

    return inject_fault


KINDS = {
    "kill -9 of a rank": Kind(1.0, send_signal("rank", signal.SIGKILL)),
    "kill -9 of all ranks of a host": Kind(1.0, send_signal("rank", signal.SIGKILL, 99)),
    "kill -9 of the fork server": Kind(2.0, send_signal("forkserver", signal.SIGKILL)),
    "kill -9 of the agent": Kind(2.0, send_signal("agent", signal.SIGKILL)),
    "kill -9 of the guard": Kind(2.0, send_signal("guard", signal.SIGKILL)),
    "kill -9 of the SSH session": Kind(1.0, send_signal("sshd", signal.SIGKILL), names_host=False),
    "SIGSTOP of a rank": Kind(5.0, send_signal("rank", signal.SIGSTOP)),
    "SIGSTOP of the fork server": Kind(
        2.0, send_signal("forkserver", signal.SIGSTOP), names_host=False, settle_s=3.0
    ),
    "SIGSTOP of the agent": Kind(5.0, send_signal("agent", signal.SIGSTOP), names_host=False),
    "power off, on after 4 s": Kind(3.0, fault("power-off"), 4.0),
    "frozen host, thawed after 6 s": Kind(5.0, fault("freeze"), 6.0),
    "cable pulled for 1.5 s": Kind(3.0, fault("unplug"), 1.5, names_host=False),
    "cable pulled for 6 s": Kind(3.0, fault("unplug"), 6.0),
    "deaf in one direction for 4 s": Kind(10.0, block_incoming, 4.0, names_host=False),
    "cut off from the other hosts for 4 s": Kind(10.0, isolate, 4.0, names_host=False),
    "a firewall drops everything for 6 s": Kind(10.0, fault("drop", "all"), 6.0),
    "kill -9 of two ranks at once": Kind(1.0, kill_two_ranks(0.0), hosts=2),
    "kill -9 of a rank and 0.15 s later of another": Kind(1.0, kill_two_ranks(0.15), hosts=2),
    "kill -9 of a rank and 0.8 s later of another": Kind(1.0, kill_two_ranks(0.8), hosts=2),
    "kill -9 of rank 0": Kind(1.0, send_signal("rank", signal.SIGKILL), hits_rank_0=True),
    "kill -9 of the agent beside rank 0": Kind(
        2.0, send_signal("agent", signal.SIGKILL), hits_rank_0=True
    ),
    "power off beside rank 0, on after 4 s": Kind(3.0, fault("power-off"), 4.0, hits_rank_0=True),
    "cable of rank 0 pulled for 6 s": Kind(3.0, fault("unplug"), 6.0, hits_rank_0=True),
    "2 % of packets lost for 3 s": Kind(1.0, fault("loss", "2"), 3.0, names_host=False),
    "a firewall refuses everything for 6 s": Kind(10.0, fault("reject", "all"), 6.0, may_pass=True),
    "kill -9 of the store and of a rank": Kind(2.0, signal_store_then_kill(signal.SIGKILL)),
    "SIGSTOP of the store, and kill -9 of a rank": Kind(
        5.0, signal_store_then_kill(signal.SIGSTOP)
    ),
    "SIGSEGV of a rank": Kind(1.0, send_signal("rank", signal.SIGSEGV)),
    "kill -9 of a loader worker": Kind(1.0, send_signal("worker", signal.SIGKILL)),
}


@dataclass
class FaultOutcome:
    """An injected fault and what was measured."""

    kind: str
    host: str
    detection_s: float | None = None
    gap_s: float = 0.0
    repeated_steps: int = 0
    names_host: bool | None = None
    wrongly_blamed: tuple[str, ...] = ()  # reports that name unaffected hosts only
    lost: bool = False
    recovered: bool = True


@dataclass
class Job:
    """A running training with the records of its ranks."""

    lab: Lab
    log_folder: Path
    run: Path
    process: subprocess.Popen[bytes]
    ranks: int = 1  # per host
    outcomes: list[FaultOutcome] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> list[tuple[float, int, str]]:
        """Time, step and ``HOST-PID`` of every finished step, sorted by time."""
        steps = []
        for file in self.log_folder.glob("*.steps"):
            for line in file.read_text().splitlines():
                fields = line.split()
                if len(fields) == 4:
                    steps.append((float(fields[3]), int(fields[1]), file.stem))
        return sorted(steps)

    def first_host(self) -> str:
        """Host of rank 0, from the members of the last regroup."""
        groups = [event for event in self.events() if event.get("event") == "regroup"]
        members: Any = groups[-1]["members"] if groups else [0]
        return str(self.lab.names[members[0] // self.ranks])

    def events(self) -> list[dict[str, object]]:
        file = self.run / "events.jsonl"
        if not file.exists():
            return []
        events = []
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events


@contextlib.contextmanager
def job(
    lab: Lab,
    folder: Path,
    number: int,
    steps: int,
    step_ms: float,
    width: int,
    ranks: int,
    workers: int = 0,
) -> Iterator[Job]:
    """Start a job over SSH as a user does, and end it on exit."""
    log_folder, run = folder / f"notes-{number}", folder / f"run-{number}"
    log_folder.mkdir()
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--run-dir", str(run),
            "--nnodes", f"1:{len(lab.names)}", "-p", str(ranks),
            str(HERE / "steady.py"), str(steps), str(step_ms), str(log_folder),
            "--width", str(width), "--workers", str(workers)]  # fmt: skip
    with (folder / f"screen-{number}.txt").open("wb") as screen:
        # no bash start-up file, which a killed ssh could leave incomplete
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "SHELL": "/bin/sh"}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": screen, "stderr": screen}
        process = subprocess.Popen(argv, cwd=HERE, env=env, **streams)
        try:
            yield Job(lab, log_folder, run, process, ranks)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Poll a condition until it is true. Returns False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def all_ranks_train(training: Job, since: float) -> bool:
    """Whether all ranks have finished a step in the last second and after ``since``."""
    since_last = max(since, time.monotonic() - 1.0)
    return (
        len({name for moment, _, name in training.steps() if moment > since_last})
        >= len(training.lab.names) * training.ranks
    )


def inject_fault(training: Job, kind: str, host: str) -> FaultOutcome:
    """Inject a fault, wait until all ranks train again, and measure."""
    kind_of_fault, outcome = KINDS[kind], FaultOutcome(kind, host)
    num_events, wall_time = len(training.events()), time.time()
    undo = kind_of_fault.inject(training.lab, host)
    injected = time.monotonic()
    if undo is not None:
        time.sleep(kind_of_fault.duration_s)
        undo()

    time.sleep(kind_of_fault.settle_s)
    wait_until(
        lambda: training.is_over or all_ranks_train(training, injected + kind_of_fault.settle_s),
        SETTLE_S,
    )
    outcome.recovered = not training.is_over and all_ranks_train(
        training, injected + kind_of_fault.settle_s
    )
    outcome.lost = bool(training.process.poll())
    times = [moment for moment, _, _ in training.steps()]
    moments = [injected, *(moment for moment in times if injected < moment), time.monotonic()]
    if not outcome.recovered and not training.is_over:
        outcome.lost = moments[-1] - moments[-2] > SETTLE_S / 2
    outcome.gap_s = max(later - earlier for earlier, later in itertools.pairwise(moments))
    new_events = training.events()[num_events:]
    relevant = ("regroup", "lost", "rank ended", "hang", "fork server died", "reconnected")
    reports = [event for event in new_events if event.get("event") in relevant]
    if reports:
        outcome.detection_s = max(0.0, float(str(reports[0].get("time", wall_time))) - wall_time)
    blames = [text for event in new_events if (text := blame_text(event))]
    given_up = blames or any(event.get("event") == "lost" for event in reports)
    if kind_of_fault.names_host and (given_up or not kind_of_fault.may_pass):
        outcome.names_host = any(host in json.dumps(event) for event in reports)
        affected = kind_of_fault.affected_hosts(training.lab, host)
        outcome.wrongly_blamed = tuple(
            text for text in blames if not any(name in text for name in affected)
        )
    training.outcomes.append(outcome)
    return outcome


def blame_text(event: Mapping[str, object]) -> str:
    """Text of a report that blames a host; empty for all other events."""
    text = str(event.get("text", ""))
    if event.get("event") == "recovery":
        lost, _, consequence = text.partition(": ")
        return lost if "Training went on" in consequence or "left out" in consequence else ""
    return text if event.get("event") == "hang" else ""


def count_repeated_steps(training: Job) -> int:
    """Number of steps that a rank finished long after other ranks had gone on."""
    highest, repeated, finished = 0, 0, training.steps()
    last_moment = {name: moment for moment, _, name in finished}
    previous: dict[str, float] = {}
    for moment, step, name in finished:
        # a rank frozen right after a step records it when thawed, and then ends
        thawed = moment == last_moment[name] and moment - previous.get(name, moment) > MIN_FREEZE_S
        repeated += step < highest - 1 and not thawed  # ranks record a step in any order
        highest, previous[name] = max(highest, step), moment
    return repeated


def find_leftovers(lab: Lab, seconds: float = 12.0) -> str:
    """Processes and listeners that remain on running hosts after ``seconds``."""

    def leftovers() -> str:
        hosts_up = [host["name"] for host in lab.status()["hosts"] if host["up"]]
        lines = [f"{n}: {line}" for n in hosts_up for _, line in lab.processes(n)]
        return "; ".join(lines + [f"{n} listens {a}" for n in hosts_up for a in lab.listeners(n)])

    wait_until(lambda: not leftovers(), seconds)
    return leftovers()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--each", type=int, default=8, help="faults per job")
    parser.add_argument(
        "--width", type=int, default=48, help="of the network; 1024 sends 8 MB a step"
    )
    parser.add_argument("--kinds", default="", help="parts of names of kinds, separated by commas")
    parser.add_argument("--ranks", type=int, default=1, help="per host")
    parser.add_argument("--workers", type=int, default=0, help="loader workers per rank")
    parser.add_argument("--steps", type=int, default=1500, help="per job")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no job after this time")
    parser.add_argument("--keep", default="", help="folder that keeps the output and run folders")
    options = parser.parse_args()
    filters = [word for word in options.kinds.split(",") if word]
    kinds = [name for name in KINDS if not filters or any(word in name for word in filters)]
    if options.hosts < 3:  # of two hosts, such faults hit all replicas
        kinds = [name for name in kinds if KINDS[name].hosts < 2]
    if not options.workers:
        kinds = [name for name in kinds if "loader worker" not in name]
    rng, start = random.Random(options.seed), time.monotonic()
    print(
        f"# Random faults\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}; seed {options.seed}, "
        f"{options.hosts} hosts, ranks per host: {options.ranks}, "
        f"loader workers per rank: {options.workers}, steps of about {STEP_MS:g} ms, "
        f"width {options.width}\n",
        flush=True,
    )
    outcomes: list[FaultOutcome] = []
    all_problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(options.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        reference = np.zeros(0)
        with Lab(LabOptions(hosts=options.hosts, share=(str(folder),))) as lab:
            number = 0
            while len(outcomes) < options.faults:
                if options.minutes and time.monotonic() - start > options.minutes * 60:
                    break
                number += 1
                if number == 1:
                    reference = undisturbed(
                        lab, folder, options.steps, options.width, options.ranks
                    )
                    continue
                count = min(options.each, options.faults - len(outcomes))
                faults = [rng.choice(kinds) for _ in range(count)]
                job_outcomes, problems = one_job(
                    lab,
                    folder,
                    number,
                    options.steps,
                    faults,
                    rng,
                    reference,
                    options.width,
                    options.ranks,
                    options.workers,
                )
                outcomes += job_outcomes
                all_problems += problems
        report(outcomes, all_problems)
    return 1 if all_problems or any(outcome.lost for outcome in outcomes) else 0


def undisturbed(lab: Lab, folder: Path, steps: int, width: int = 48, ranks: int = 1) -> np.ndarray:
    """Parameters of the same training without a fault."""
    with job(lab, folder, 1, steps, 0.0, width, ranks) as training:
        if training.process.wait(MAX_END_S):
            raise RuntimeError((folder / "screen-1.txt").read_text(errors="replace")[-1500:])
    parameters: np.ndarray = np.load(training.log_folder / "final.npy")
    return parameters


def one_job(lab: Lab, folder: Path, number: int, steps: int, faults: Sequence[str],
            rng: random.Random, reference: np.ndarray, width: int = 48, ranks: int = 1,
            workers: int = 0) -> tuple[list[FaultOutcome], list[str]]:  # fmt: skip
    """Run one training with faults. Returns the outcomes and the problems found."""
    problems: list[str] = []
    with job(lab, folder, number, steps, STEP_MS, width, ranks, workers) as training:
        if not wait_until(
            lambda: training.is_over or len(training.steps()) > 10 * len(lab.names) * ranks, 180
        ):
            problems.append(f"job {number} did not start")
        for kind in faults:
            if (
                training.is_over
                or max((step for _, step, _ in training.steps()), default=0) > steps - 100
            ):
                break
            time.sleep(rng.uniform(0.2, 1.2))
            # do not hit a job that has a single replica left
            wait_until(lambda: training.is_over or all_ranks_train(training, 0.0), SETTLE_S)
            host = training.first_host() if KINDS[kind].hits_rank_0 else rng.choice(lab.names)
            try:
                if not all_ranks_train(training, 0.0):
                    raise LookupError("some ranks do not train")
                outcome = inject_fault(training, kind, host)
            except LookupError as error:
                print(f"<!-- {number}: not injected: {error} -->", flush=True)
                continue
            detection = "–" if outcome.detection_s is None else f"{outcome.detection_s:.2f} s"
            summary = (
                f"{number}: {kind} on {host}: gap {outcome.gap_s:.2f} s, detected after {detection}"
            )
            summary += f", named {outcome.names_host}" + (
                ", NOT RECOVERED" * (not outcome.recovered)
            )
            summary += "".join(f", WRONG HOST: {text}" for text in outcome.wrongly_blamed)
            print(f"<!-- {summary}{', LOST' * outcome.lost} -->", flush=True)
            if training.is_over:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.process.wait(MAX_END_S)
        if training.process.poll() != 0:
            screen = (folder / f"screen-{number}.txt").read_text(errors="replace")[-1500:]
            problems.append(f"job {number} ended with {training.process.poll()}:\n{screen}")
        else:
            final = np.load(training.log_folder / "final.npy")
            if (difference := float(np.abs(final - reference).max())) > MAX_DIFFERENCE:
                problems.append(f"job {number}: parameters differ by {difference:.1e}")
        if repeated := count_repeated_steps(training):
            problems.append(f"job {number}: {repeated} repeated steps")
        problems += [f"job {number}: {s.kind} on {s.host}: "
                     "the affected host was not named" for s in training.outcomes
                    if s.names_host is False]  # fmt: skip
        problems += [f"job {number}: {s.kind} on {s.host}: an unaffected host was named: {text}"
                for s in training.outcomes for text in s.wrongly_blamed]  # fmt: skip
        if leftovers := find_leftovers(lab):
            problems.append(f"job {number} left behind: {leftovers}")
        return training.outcomes, problems


def report(outcomes: Sequence[FaultOutcome], problems: Sequence[str]) -> None:
    """Print the table and the problems."""
    columns = ("fault", "n", "limit s", "within", "gap s, median (max)", "detection s",
               "named correctly", "lost")  # fmt: skip
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, kind in KINDS.items():
        selected = [outcome for outcome in outcomes if outcome.kind == name]
        if not selected:
            continue
        gaps = [outcome.gap_s for outcome in selected]
        detections = [
            outcome.detection_s for outcome in selected if outcome.detection_s is not None
        ]
        naming = [outcome.names_host for outcome in selected if outcome.names_host is not None]
        correct = sum(
            bool(outcome.names_host) and not outcome.wrongly_blamed for outcome in selected
        )
        correct_cell = f"{correct} of {len(naming)}" if naming else "–"
        detection = f"{statistics.median(detections):.2f}" if detections else "–"
        gap = f"{statistics.median(gaps):.2f} ({max(gaps):.2f})"
        lost, within = (
            sum(outcome.lost for outcome in selected),
            sum(outcome <= kind.max_gap_s for outcome in gaps),
        )
        row = (
            name,
            len(selected),
            f"{kind.max_gap_s:g}",
            within,
            gap,
            detection,
            correct_cell,
            lost,
        )
        print(f"| {' | '.join(map(str, row))} |")
    summary = (
        "All jobs ended with the parameters of the undisturbed run, repeated no step and left "
    )
    summary += "nothing behind."
    failures = "Problems:\n\n" + "\n".join(f"* {outcome}" for outcome in problems)
    print(f"\n{len(outcomes)} faults. {failures if problems else summary}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
