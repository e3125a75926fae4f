"""Seeded random faults on a training in the lab: what was promised beside what came.

``python bench/faults/soak.py [--faults 40] [--seed 1] [--hosts 3] [--each 8] [--width 48]
[--steps 1500] [--ranks 1] [--workers 0] [--kinds a,b] [--minutes 10] [--keep FOLDER]``

A job of ``steady.py`` is started over SSH on the lab's hosts, as a user does, and struck again and
again; after ``--each`` faults it may end, and the next job begins. Printed as Markdown, for each
kind: how often, how long until the job said so (detection), how long no new step was finished
(gap), how many finished steps were done again, whether the report named the right host and no
other, and whether the job was lost. For each job: whether its parameters are those of the
undisturbed run (float64, largest difference), and what it left behind on the hosts.

Steps are told by the ranks themselves: every rank writes the moment of each finished step into a
folder that all hosts see (one kernel, one monotonic clock). Nothing else is shared.
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
FROZEN_S = 2.0
LONGEST_S = 600.0  # that a job may take after its last fault
SETTLE_S = 20.0  # at most, from a fault to further steps of all ranks
MOST_DIFFERENCE = 1e-10
RANK = re.compile(r"\[rank (\d+) of \d+")
AGENT = "sys.stdin.buffer.raw.readline"  # of the first line by which one is started over SSH


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        promise: Seconds without a new step, at most.
        strike: Lab, host → makes it; what it returns takes it back, if somebody has to.
        lasts: Seconds until it is taken back.
        named: Whether the job has to say which host it was (a flap need not be noticed), and no
            other.
        first: It strikes the host of rank 0, which writes, wherever that is by now.
        hosts: That it strikes.
        seen: Seconds after which a rank that it ends has done its last step, at most.
        passes: It may be over before any host is given up; only where one was has it to be named.
    """

    promise: float
    strike: Callable[[Lab, str], Callable[[], object] | None]
    lasts: float = 0.0
    named: bool = True
    first: bool = False
    hosts: int = 1
    seen: float = 0.5
    passes: bool = False

    def struck(self, lab: Lab, host: str) -> set[str]:
        """The hosts that it strikes."""
        first = lab.names.index(host)
        return {lab.names[(first + more) % len(lab.names)] for more in range(self.hosts)}


def processes(lab: Lab, host: str, what: str) -> list[int]:
    """The machine's numbers of a host's processes of one sort."""
    found = lab.processes(host)
    ranks = {pid for pid, line in found if RANK.search(line)}
    if what in ("rank", "worker"):  # a rank's loader workers have its title
        return [pid for pid in sorted(ranks) if (parent(pid) in ranks) == (what == "worker")]
    sorts: dict[str, Callable[[str], object]] = {
        "forkserver": lambda line: " forkserver " in line and not RANK.search(line),
        "guard": lambda line: " guard " in line,
        "agent": lambda line: AGENT in line or line.endswith(" agent"),
        "sshd": lambda line: line.startswith("sshd: ") and "listener" not in line,
        "store": lambda line: line.endswith(" store"),
    }
    # The oldest first: who logs in again for an agent looks like it, and may have a lower number.
    return sorted((pid for pid, line in found if sorts[what](line)), key=started)


def parent(pid: int) -> int:
    """The machine's number of a process's parent; 0 where it is gone."""
    return stat(pid, 1)


def started(pid: int) -> int:
    """When a process began, in ticks; 0 where it is gone."""
    return stat(pid, 19)


def stat(pid: int, field: int) -> int:
    """A field of proc(5)'s stat, counted from the state; 0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field])
    except OSError:
        return 0


def to_the_store(signum: int) -> Callable[[Lab, str], None]:
    """A signal to the store of the job's groups, wherever it is by now, and then a rank's end."""

    def strike(lab: Lab, host: str) -> None:
        on = [one for one in lab.names if processes(lab, one, "store")]
        if not on:
            raise LookupError("no store on any host")
        send("store", signum)(lab, on[0])
        send("rank", signal.SIGKILL)(lab, host)

    return strike


def send(what: str, signum: int, most: int = 1) -> Callable[[Lab, str], None]:
    """A signal to processes of a host."""

    def strike(lab: Lab, host: str) -> None:
        pids = processes(lab, host, what)
        if not pids:
            raise LookupError(f"no {what} on {host}")
        for pid in pids[:most]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    return strike


def fault(*words: str) -> Callable[[Lab, str], Callable[[], object]]:
    """One of the lab's own, taken back later."""

    def strike(lab: Lab, host: str) -> Callable[[], object]:
        name, *more = words
        lab.fault(name, host, *more)
        return lambda: lab.undo(name, host, *more)

    return strike


def deaf(lab: Lab, host: str) -> Callable[[], object]:
    """The host hears nothing from its neighbour, which hears it."""
    peer = next(name for name in lab.names if name != host)
    return fault("deaf", peer)(lab, host)


def cut_off(lab: Lab, host: str) -> Callable[[], object]:
    """The host and its neighbours cannot reach each other; the launcher hears all of them."""
    peers = [name for name in lab.names if name != host]
    both = [*((host, peer) for peer in peers), *((peer, host) for peer in peers)]
    undos = [fault("deaf", peer)(lab, one) for one, peer in both]
    return lambda: [undo() for undo in undos]


def one_after_the_other(seconds: float) -> Callable[[Lab, str], None]:
    """The host's rank is killed and, so much later, that of another host."""

    def strike(lab: Lab, host: str) -> None:
        other = lab.names[(lab.names.index(host) + 1) % len(lab.names)]
        send("rank", signal.SIGKILL)(lab, host)
        time.sleep(seconds)
        send("rank", signal.SIGKILL)(lab, other)

    return strike


KINDS = {
    "kill -9 of a rank": Kind(1.0, send("rank", signal.SIGKILL)),
    "kill -9 of all ranks of a host": Kind(1.0, send("rank", signal.SIGKILL, 99)),
    "kill -9 of the fork server": Kind(2.0, send("forkserver", signal.SIGKILL)),
    "kill -9 of the agent": Kind(2.0, send("agent", signal.SIGKILL)),
    "kill -9 of the guard": Kind(2.0, send("guard", signal.SIGKILL)),
    "kill -9 of the SSH session": Kind(1.0, send("sshd", signal.SIGKILL), named=False),
    "SIGSTOP of a rank": Kind(5.0, send("rank", signal.SIGSTOP)),
    "SIGSTOP of the fork server": Kind(
        2.0, send("forkserver", signal.SIGSTOP), named=False, seen=3.0
    ),
    "SIGSTOP of the agent": Kind(5.0, send("agent", signal.SIGSTOP), named=False),
    "power off, on after 4 s": Kind(3.0, fault("power-off"), 4.0),
    "frozen host, thawed after 6 s": Kind(5.0, fault("freeze"), 6.0),
    "cable pulled for 1.5 s": Kind(3.0, fault("unplug"), 1.5, named=False),
    "cable pulled for 6 s": Kind(3.0, fault("unplug"), 6.0),
    "deaf in one direction for 4 s": Kind(10.0, deaf, 4.0, named=False),
    "cut off from the other hosts for 4 s": Kind(10.0, cut_off, 4.0, named=False),
    "a firewall drops everything for 6 s": Kind(10.0, fault("drop", "all"), 6.0),
    "kill -9 of two ranks at once": Kind(1.0, one_after_the_other(0.0), hosts=2),
    "kill -9 of a rank and 0.15 s later of another": Kind(1.0, one_after_the_other(0.15), hosts=2),
    "kill -9 of a rank and 0.8 s later of another": Kind(1.0, one_after_the_other(0.8), hosts=2),
    "kill -9 of rank 0": Kind(1.0, send("rank", signal.SIGKILL), first=True),
    "kill -9 of the agent beside rank 0": Kind(2.0, send("agent", signal.SIGKILL), first=True),
    "power off beside rank 0, on after 4 s": Kind(3.0, fault("power-off"), 4.0, first=True),
    "cable of rank 0 pulled for 6 s": Kind(3.0, fault("unplug"), 6.0, first=True),
    "2 % of packets lost for 3 s": Kind(1.0, fault("loss", "2"), 3.0, named=False),
    "a firewall refuses everything for 6 s": Kind(10.0, fault("reject", "all"), 6.0, passes=True),
    "kill -9 of the store and of a rank": Kind(2.0, to_the_store(signal.SIGKILL)),
    "SIGSTOP of the store, and kill -9 of a rank": Kind(5.0, to_the_store(signal.SIGSTOP)),
    "SIGSEGV of a rank": Kind(1.0, send("rank", signal.SIGSEGV)),
    "kill -9 of a loader worker": Kind(1.0, send("worker", signal.SIGKILL)),
}


@dataclass
class Struck:
    """One fault and what came of it."""

    kind: str
    host: str
    told_s: float | None = None
    gap_s: float = 0.0
    again: int = 0
    named: bool | None = None
    others: tuple[str, ...] = ()  # words of the report that name other hosts only
    lost: bool = False
    back: bool = True


@dataclass
class Job:
    """A training under way, and what its ranks tell."""

    lab: Lab
    notes: Path
    run: Path
    process: subprocess.Popen[bytes]
    ranks: int = 1  # of a host
    struck: list[Struck] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> list[tuple[float, int, str]]:
        """Moment, step and host·process of every finished step, in order of time."""
        found = []
        for file in self.notes.glob("*.steps"):
            for line in file.read_text().splitlines():
                words = line.split()
                if len(words) == 4:
                    found.append((float(words[3]), int(words[1]), file.stem))
        return sorted(found)

    def first_host(self) -> str:
        """That of rank 0, which is that of its slot."""
        groups = [one for one in self.events() if one.get("event") == "regroup"]
        members: Any = groups[-1]["members"] if groups else [0]
        return str(self.lab.names[members[0] // self.ranks])

    def events(self) -> list[dict[str, object]]:
        file = self.run / "events.jsonl"
        if not file.exists():
            return []
        found = []
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


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
    """Started as a user does; ended, whatever happened."""
    notes, run = folder / f"notes-{number}", folder / f"run-{number}"
    notes.mkdir()
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--run-dir", str(run),
            "--nnodes", f"1:{len(lab.names)}", "-p", str(ranks),
            str(HERE / "steady.py"), str(steps), str(step_ms), str(notes),
            "--width", str(width), "--workers", str(workers)]  # fmt: skip
    with (folder / f"screen-{number}.txt").open("wb") as screen:
        # no start-up file of bash that a killed ssh could leave half done
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "SHELL": "/bin/sh"}
        ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": screen, "stderr": screen}
        process = subprocess.Popen(argv, cwd=HERE, env=env, **ends)
        try:
            yield Job(lab, notes, run, process, ranks)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(true: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return bool(true())


def all_train(one: Job, since: float) -> bool:
    """Whether all ranks have finished steps in the last second, and after a moment."""
    late = max(since, time.monotonic() - 1.0)
    return (
        len({who for moment, _, who in one.steps() if moment > late})
        >= len(one.lab.names) * one.ranks
    )


def strike(one: Job, kind: str, host: str) -> Struck:
    """Makes a fault, waits until the job trains on with all its ranks, and measures."""
    about, found = KINDS[kind], Struck(kind, host)
    before, wall = len(one.events()), time.time()
    undo = about.strike(one.lab, host)
    struck = time.monotonic()
    if undo is not None:
        time.sleep(about.lasts)
        undo()

    time.sleep(about.seen)
    until(lambda: one.over or all_train(one, struck + about.seen), SETTLE_S)
    found.back = not one.over and all_train(one, struck + about.seen)
    found.lost = bool(one.process.poll())
    times = [moment for moment, _, _ in one.steps()]
    near = [struck, *(moment for moment in times if struck < moment), time.monotonic()]
    if not found.back and not one.over:
        found.lost = near[-1] - near[-2] > SETTLE_S / 2
    found.gap_s = max(after - earlier for earlier, after in itertools.pairwise(near))
    news = one.events()[before:]
    telling = ("regroup", "lost", "rank ended", "hang", "fork server died", "reconnected")
    told = [event for event in news if event.get("event") in telling]
    if told:
        found.told_s = max(0.0, float(str(told[0].get("time", wall))) - wall)
    blamed = [text for event in news if (text := blame(event))]
    given_up = blamed or any(event.get("event") == "lost" for event in told)
    if about.named and (given_up or not about.passes):
        found.named = any(host in json.dumps(event) for event in told)
        right = about.struck(one.lab, host)
        found.others = tuple(text for text in blamed if not any(name in text for name in right))
    one.struck.append(found)
    return found


def blame(event: Mapping[str, object]) -> str:
    """What the report says of a loss; empty of all other events."""
    text = str(event.get("text", ""))
    if event.get("event") == "recovery":
        lost, _, after = text.partition(": ")
        return lost if "Training went on" in after or "left out" in after else ""
    return text if event.get("event") == "hang" else ""


def done_again(one: Job) -> int:
    """Finished steps that somebody finishes long after others have gone on."""
    most, again, noted = 0, 0, one.steps()
    last = {who: moment for moment, _, who in noted}
    before: dict[str, float] = {}
    for moment, step, who in noted:
        # who was frozen right after a step notes it when it is thawed, and then ends
        thawed = moment == last[who] and moment - before.get(who, moment) > FROZEN_S
        again += step < most - 1 and not thawed  # ranks write down a step in any order
        most, before[who] = max(most, step), moment
    return again


def left_behind(lab: Lab, seconds: float = 12.0) -> str:
    """Processes and listeners on hosts that are up, after a while."""

    def found() -> str:
        up = [host["name"] for host in lab.status()["hosts"] if host["up"]]
        lines = [f"{n}: {line}" for n in up for _, line in lab.processes(n)]
        return "; ".join(lines + [f"{n} listens {a}" for n in up for a in lab.listeners(n)])

    until(lambda: not found(), seconds)
    return found()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--each", type=int, default=8, help="faults of a job")
    parser.add_argument("--width", type=int, default=48, help="of the network; by 1024 8 MB a step")
    parser.add_argument("--kinds", default="", help="numbers or words of kinds, with commas")
    parser.add_argument("--ranks", type=int, default=1, help="of a host")
    parser.add_argument("--workers", type=int, default=0, help="of a rank's data loader")
    parser.add_argument("--steps", type=int, default=1500, help="of a job")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no job after so long")
    parser.add_argument("--keep", default="", help="folder for screens and runs of the jobs")
    asked = parser.parse_args()
    words = [word for word in asked.kinds.split(",") if word]
    kinds = [name for name in KINDS if not words or any(word in name for word in words)]
    if asked.hosts < 3:  # what strikes all replicas of two is no loss of ours
        kinds = [name for name in kinds if KINDS[name].hosts < 2]
    if not asked.workers:
        kinds = [name for name in kinds if "loader worker" not in name]
    chance, began = random.Random(asked.seed), time.monotonic()
    print(
        f"# Faults by chance\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}; seed {asked.seed}, "
        f"{asked.hosts} hosts, ranks of a host: {asked.ranks}, "
        f"loader workers of a rank: {asked.workers}, steps of about {STEP_MS:g} ms, "
        f"width {asked.width}\n",
        flush=True,
    )
    struck: list[Struck] = []
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(asked.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        reference = np.zeros(0)
        with Lab(LabOptions(hosts=asked.hosts, share=(str(folder),))) as lab:
            number = 0
            while len(struck) < asked.faults:
                if asked.minutes and time.monotonic() - began > asked.minutes * 60:
                    break
                number += 1
                if number == 1:
                    reference = undisturbed(lab, folder, asked.steps, asked.width, asked.ranks)
                    continue
                count = min(asked.each, asked.faults - len(struck))
                faults = [chance.choice(kinds) for _ in range(count)]
                found, problems = one_job(
                    lab,
                    folder,
                    number,
                    asked.steps,
                    faults,
                    chance,
                    reference,
                    asked.width,
                    asked.ranks,
                    asked.workers,
                )
                struck += found
                bad += problems
        report(struck, bad)
    return 1 if bad or any(one.lost for one in struck) else 0


def undisturbed(lab: Lab, folder: Path, steps: int, width: int = 48, ranks: int = 1) -> np.ndarray:
    """The parameters of the same training without a fault."""
    with job(lab, folder, 1, steps, 0.0, width, ranks) as one:
        if one.process.wait(LONGEST_S):
            raise RuntimeError((folder / "screen-1.txt").read_text(errors="replace")[-1500:])
    found: np.ndarray = np.load(one.notes / "final.npy")
    return found


def one_job(lab: Lab, folder: Path, number: int, steps: int, faults: Sequence[str],
            chance: random.Random, reference: np.ndarray, width: int = 48, ranks: int = 1,
            workers: int = 0) -> tuple[list[Struck], list[str]]:  # fmt: skip
    """One training; its faults, and what was wrong with its end."""
    bad: list[str] = []
    with job(lab, folder, number, steps, STEP_MS, width, ranks, workers) as one:
        if not until(lambda: one.over or len(one.steps()) > 10 * len(lab.names) * ranks, 180):
            bad.append(f"job {number} did not begin")
        for kind in faults:
            if one.over or max((step for _, step, _ in one.steps()), default=0) > steps - 100:
                break
            time.sleep(chance.uniform(0.2, 1.2))
            # what strikes a job whose last replica is the one that is struck is no loss of ours
            until(lambda: one.over or all_train(one, 0.0), SETTLE_S)
            host = one.first_host() if KINDS[kind].first else chance.choice(lab.names)
            try:
                if not all_train(one, 0.0):
                    raise LookupError("not all ranks train")
                found = strike(one, kind, host)
            except LookupError as error:
                print(f"<!-- {number}: not struck: {error} -->", flush=True)
                continue
            told = "–" if found.told_s is None else f"{found.told_s:.2f} s"
            line = f"{number}: {kind} on {host}: gap {found.gap_s:.2f} s, told {told}"
            line += f", named {found.named}" + (", NOT BACK" * (not found.back))
            line += "".join(f", ANOTHER: {text}" for text in found.others)
            print(f"<!-- {line}{', LOST' * found.lost} -->", flush=True)
            if one.over:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(LONGEST_S)
        if one.process.poll() != 0:
            screen = (folder / f"screen-{number}.txt").read_text(errors="replace")[-1500:]
            bad.append(f"job {number} ended with {one.process.poll()}:\n{screen}")
        else:
            final = np.load(one.notes / "final.npy")
            if (worst := float(np.abs(final - reference).max())) > MOST_DIFFERENCE:
                bad.append(f"job {number}: parameters differ by {worst:.1e}")
        if again := done_again(one):
            bad.append(f"job {number}: {again} steps done again")
        bad += [f"job {number}: {s.kind} on {s.host}: its host was not named" for s in one.struck
                if s.named is False]  # fmt: skip
        bad += [f"job {number}: {s.kind} on {s.host}: another host was named: {text}"
                for s in one.struck for text in s.others]  # fmt: skip
        if left := left_behind(lab):
            bad.append(f"job {number} left: {left}")
        return one.struck, bad


def report(struck: Sequence[Struck], bad: Sequence[str]) -> None:
    """The table, and what was wrong."""
    heads = ("fault", "n", "promise s", "kept", "gap s, median (most)", "told s", "named rightly",
             "lost")  # fmt: skip
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, kind in KINDS.items():
        of = [one for one in struck if one.kind == name]
        if not of:
            continue
        gaps = [one.gap_s for one in of]
        told = [one.told_s for one in of if one.told_s is not None]
        named = [one.named for one in of if one.named is not None]
        only = sum(bool(one.named) and not one.others for one in of)
        right = f"{only} of {len(named)}" if named else "–"
        when = f"{statistics.median(told):.2f}" if told else "–"
        gap = f"{statistics.median(gaps):.2f} ({max(gaps):.2f})"
        lost, kept = sum(one.lost for one in of), sum(one <= kind.promise for one in gaps)
        row = (name, len(of), f"{kind.promise:g}", kept, gap, when, right, lost)
        print(f"| {' | '.join(map(str, row))} |")
    well = "All jobs ended with the parameters of the undisturbed run, no step was done again, "
    well += "nothing was left behind."
    wrong = "What was wrong:\n\n" + "\n".join(f"* {one}" for one in bad)
    print(f"\n{len(struck)} faults. {wrong if bad else well}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
