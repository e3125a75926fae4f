"""Time to equal loss over slow links: this library's ways of averaging beside their peers.

Two ranks a job, each in a network of its own, pinned to cores of its own; between them a cable
whose speed is set by ``tbf``, and whose delay comes from the lab's delay line. A rank computes with
one thread. With ``--cores 2`` its gradients travel by another core, as on hosts that have more;
with one all that sends takes time from computing. As many jobs run side by side as there are cores
for. Needs Linux, root, and ``ip`` and ``tc`` on the PATH; nothing of the lab.

    python bench/slow_links/slow_links.py check                    # a minute, tiny models
    python bench/slow_links/slow_links.py run --stage rates  --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage curves --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage paces  --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage auto   --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage line,rates,all     # everything in one go
    python bench/slow_links/report.py results.jsonl

Every stage may be run again: what the results hold already is not done twice.

* ``rates``: seed 0 on an unshaped line, over half the steps, at each learning rate of a small grid.
* ``curves``: whole trainings on the unshaped line at each method's best rate, for each seed.
* ``paces``: the first steps of each method on each line, without validation: seconds a step.
* ``auto``: whole trainings with ``communication="auto"`` on each line, at the rate of ``exact``.

Where a line is too slow to train over to the end, the seconds to a loss are a validation curve over
steps from the unshaped line, times the seconds of a step that were measured on the slow one. The
updates do not depend on the line; that the losses of the first steps are equal to the last bit on
both is checked by the report. DDP is the method that needs it most: the judged 20 Mbit/s would take
it 20 minutes for each curve.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import platform
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import report
import torch
import work

from paceline.lab import delayline, kernel

LINKS = {  # bits a second (0: as fast as memory), seconds of delay one way
    "unshaped": (0, 0.0),
    "1 Gbit/s": (1_000_000_000, 0.0),
    "100 Mbit/s": (100_000_000, 0.0),
    "20 Mbit/s": (20_000_000, 0.0),
    "100 Mbit/s, 20 ms": (100_000_000, 0.010),
}
SHAPED = tuple(LINKS)[1:]
OURS = ("exact", "int8", "int4")
PEERS = ("ddp", "fp16 hook", "diloco 10 0.7 0.9", "diloco 10 0.9 0.5")


# -- what is to be done ------------------------------------------------------------------


@dataclass
class Plan:
    """What is measured.

    Attributes:
        steps: Of a training of plain DDP; others may take an eighth longer to its loss.
        tuned: Methods that get a grid of learning rates; the others take DDP's.
        every: Steps between validations.
    """

    models: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    steps: int
    every: int
    links: tuple[str, ...] = SHAPED
    auto: tuple[str, ...] = ("ours auto",)
    tuned: tuple[str, ...] = ("ddp",)

    def curve(self, model: str, method: str, lr: float, seed: int, link: str) -> work.Job:
        longer = self.steps if method == "ddp" else self.steps + self.steps // 8
        steps = -(-longer // self.every) * self.every
        return work.Job("curve", model, method, link, lr, seed, self.steps, steps, self.every)

    def of(self, stage: str, have: list[dict[str, Any]]) -> Iterator[work.Job]:
        """The jobs of a stage, the most wanted first."""
        if stage == "rates":
            # the middle rate first: a stage cut short still has something of everything
            deep = max(len(rates) for rates in self.rates.values())
            for number in sorted(range(deep), key=lambda n: abs(n - deep // 2)):
                for method, model in itertools.product(self.tuned, self.models):
                    if number < len(self.rates[model]):
                        lr, half = (
                            self.rates[model][number],
                            self.steps // 2 // self.every * self.every,
                        )
                        yield work.Job(
                            "rate", model, method, "unshaped", lr, 0, half, half, self.every
                        )
        elif stage == "curves":
            for seed, model in itertools.product(self.seeds, self.models):
                for method in self.chosen(model, have):
                    if method == "ours exact":  # makes DDP's steps
                        continue
                    lr = self.rate(model, method, have)
                    yield self.curve(model, method, lr, seed, "unshaped")
        elif stage == "paces":
            for link, model in itertools.product(self.links, self.models):
                for method in self.chosen(model, have):
                    if method == "ours exact" and LINKS[link][0] == 20_000_000:
                        continue  # its trials alone take minutes
                    lr, steps = self.rate(model, method, have), self.pace_steps(method, link)
                    yield work.Job(
                        "pace", model, method, link, lr, 0, self.steps, steps, self.every
                    )
            for model in self.models:
                yield work.Job("pace", model, "alone", "unshaped", 1e-3, 0, self.steps, 24, 1)
        elif stage == "auto":
            for seed, link, model in itertools.product(self.seeds, self.links, self.models):
                for method in self.auto:
                    yield self.curve(model, method, self.rate(model, method, have), seed, link)
        elif stage == "all":  # the most wanted first; of those the longest first
            one = dataclasses.replace(self, seeds=self.seeds[:1])
            rest = dataclasses.replace(self, seeds=self.seeds[1:])
            others = [*rest.of("auto", have), *rest.of("curves", have)]
            judged = [job for job in others if job.method in ("ddp", *self.auto)]
            between = [job for job in others if job not in judged]
            first = [*one.of("auto", have), *one.of("curves", have), *one.of("paces", have)]
            for part in (first, judged, between):
                yield from sorted(part, key=guess, reverse=True)
        else:
            raise SystemExit(f"no stage {stage}: line, rates, curves, paces, auto, all")

    def rate(self, model: str, method: str, have: list[dict[str, Any]]) -> float:
        """The best that is known; methods that only round take DDP's."""
        best = report.best_rate(have, model, method) or report.best_rate(have, model, "ddp")
        return best or self.rates[model][len(self.rates[model]) // 2]

    def chosen(self, model: str, have: list[dict[str, Any]]) -> list[str]:
        """The methods; of several settings of DiLoCo the one that did best."""
        settings = [one for one in self.methods if one.startswith("diloco")]
        ends = {one: report.best_end(have, model, one) for one in settings}
        best = min(settings, key=lambda one: ends[one], default="")
        return [one for one in self.methods if one == best or one not in settings]

    def pace_steps(self, method: str, link: str) -> int:
        if method.startswith("diloco"):
            return 30
        if SENT.get(method, 0.5) >= 0.5 and LINKS[link][0] == 20_000_000:
            return 7
        return 44 if method == "ours exact" else 24  # tries sizes of buckets in the first 30


SENT = {"ddp": 1.0, "ours exact": 1.0, "alone": 0.0, "ours int8": 0.26}
SENT |= {"ours int4": 0.11, "ours auto": 0.12}


COST = {"lm": (0.13, 9.6), "cnn": (0.05, 4.6), "translation": (0.05, 4.3)}  # seconds, MB a step


def guess(job: work.Job) -> float:
    """About how many seconds a job takes: only for the order of jobs."""
    rate = LINKS[job.link][0] or 5_000_000_000
    if job.kind == "line":
        return 1 + 8 * 32 * job.steps / rate
    sent = 0.1 if job.method.startswith("diloco") else SENT.get(job.method, 0.5)
    computing, megabytes = COST[job.model]
    validating = 1.2 if job.kind == "curve" else 1.0
    whole = 8e6 * megabytes / rate
    return 1 + whole + job.steps * (computing * validating + sent * whole)


# -- the cables --------------------------------------------------------------------------


class Pair:
    """Two networks with two cables between them: one as it is, one with a delay."""

    def __init__(self, number: int, cores: tuple[set[int], ...]) -> None:
        self.number, self.cores = number, cores
        self._holders = [_holder() for _ in range(2)]
        self.networks = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in self._holders]
        first, second = self._holders
        _run(f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}")
        self._forwarder = 0
        for side in (0, 1):
            self._inside(side, "ip link set lo up")
        self._address("eth0", 10 + number)

    def _address(self, interface: str, third: int) -> None:
        for side in (0, 1):
            self._inside(side, f"ip addr add 10.77.{third}.{side + 1}/24 dev {interface}")
            self._inside(side, f"ip link set {interface} up")

    def _inside(self, side: int, command: str) -> None:
        network = self.networks[side]
        _run(command, lambda: kernel.setns(network, kernel.CLONE_NEWNET))

    def set(self, link: str) -> tuple[str, str]:
        """Makes the cable what it is to be; its interface and the first side's address."""
        rate, delay = LINKS[link]
        interface, third = ("tap0", 110 + self.number) if delay else ("eth0", 10 + self.number)
        if delay and not self._forwarder:
            self._forwarder = _delay_line(self.networks, 2 * delay)
            self._address("tap0", third)
        for side in (0, 1):
            if rate:
                burst = max(16_000, int(rate / 8 * 0.004))
                self._inside(
                    side,
                    f"tc qdisc replace dev {interface} root tbf rate {rate} burst {burst}"
                    " latency 50ms",
                )
            else:
                self._inside(side, f"tc qdisc replace dev {interface} root pfifo_fast")
        return interface, f"10.77.{third}.1"

    def end(self) -> None:
        if self._forwarder:
            os.kill(self._forwarder, signal.SIGTERM)
            os.waitpid(self._forwarder, 0)
        for pid in self._holders:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for network in self.networks:
            os.close(network)


def _holder() -> int:
    """A process that keeps a new network namespace; its id."""
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        kernel.unshare(kernel.CLONE_NEWNET)
        os.write(says, b".")
        _wait_for_ever()
    os.close(says)
    if os.read(said, 1) != b".":
        raise SystemExit("no network namespaces here: this needs root")
    os.close(said)
    return pid


def _delay_line(networks: list[int], delay: float) -> int:
    """A process that forwards between two TAP devices; what the second sends waits."""
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        kernel.setns(networks[0], kernel.CLONE_NEWNET)
        forwarder = delayline.lay_cable("tap0", "tap0", networks[1], delay)
        os.write(says, b".")
        parent, ended = os.getppid(), []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
        while not ended and os.getppid() == parent:  # the forwarder itself takes no notice
            time.sleep(0.2)
        os.kill(forwarder, signal.SIGKILL)
        os._exit(0)
    os.close(says)
    os.read(said, 1)
    os.close(said)
    return pid


def _wait_for_ever() -> NoReturn:
    while True:
        signal.pause()


def _run(command: str, before: Any = None) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, preexec_fn=before)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")


# -- running jobs ------------------------------------------------------------------------


@dataclass
class Running:
    """A job under way.

    Attributes:
        ranks: Process ids that have not ended.
        until: When it is given up, by ``time.monotonic()``.
    """

    job: work.Job
    pair: Pair
    folder: Path
    ranks: set[int]
    until: float
    begun: float = field(default_factory=time.monotonic)
    failed: bool = False


def run_all(
    jobs: list[work.Job],
    pairs: list[Pair],
    made: dict[str, work.Task],
    record: Any,
    seconds: float,
) -> None:
    """Runs the jobs, as many at once as there are pairs; none that would not be over in time."""
    end, free, waiting = time.monotonic() + seconds, list(pairs), list(jobs)
    running: list[Running] = []
    taken: dict[tuple[str, str, str, str], float] = {}  # seconds of jobs of this kind
    finished: list[tuple[work.Job, float]] = []
    left_out = 0
    with tempfile.TemporaryDirectory(prefix="slow-links-") as scratch:
        while waiting or running:
            while waiting and free:
                job = waiting.pop(0)
                kind = (job.kind, job.model, job.method, job.link)
                scale = max(1.0, *(t / guess(o) for o, t in finished[-30:])) if finished else 1.0
                if time.monotonic() + taken.get(kind, guess(job) * scale) > end:
                    left_out += 1
                    continue
                folder = Path(scratch) / f"{len(jobs) - len(waiting)}"
                running.append(_start(job, free.pop(0), made[job.model], folder, end))
            for pid, status in _ended():
                for one in running:
                    if pid in one.ranks:
                        one.ranks.discard(pid)
                        if status and not one.failed:
                            one.failed = True
                            one.until = min(one.until, time.monotonic() + 3)
            for one in list(running):
                if one.ranks and time.monotonic() > one.until:
                    one.failed = True
                    for pid in one.ranks:
                        os.kill(pid, signal.SIGKILL)
                elif not one.ranks:
                    running.remove(one)
                    free.append(one.pair)
                    free.sort(key=lambda pair: pair.number)
                    kind = (one.job.kind, one.job.model, one.job.method, one.job.link)
                    taken[kind] = time.monotonic() - one.begun
                    if not one.failed:
                        finished.append((one.job, taken[kind]))
                    record(one.job, one.folder, one.failed, taken[kind])
            time.sleep(0.02)
    if left_out:
        print(f"{left_out} jobs are left for another time", flush=True)


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


_ports = itertools.count(29500)


def _start(job: work.Job, pair: Pair, task: work.Task, folder: Path, end: float) -> Running:
    interface, address = pair.set(job.link)
    folder.mkdir()
    port, ranks = next(_ports), set()
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            _rank(job, pair, rank, task, interface, (address, port), folder)
        ranks.add(pid)
    return Running(job, pair, folder, ranks, end + 15)


CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def _rank(
    job: work.Job,
    pair: Pair,
    rank: int,
    task: work.Task,
    interface: str,
    meet: tuple[str, int],
    folder: Path,
) -> NoReturn:
    status = 1
    try:
        kernel.die_with_parent()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        kernel.setns(pair.networks[rank], kernel.CLONE_NEWNET)
        os.sched_setaffinity(0, pair.cores[rank])
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=meet[0],
            MASTER_PORT=str(meet[1]),
            GLOO_SOCKET_IFNAME=interface,
            PACELINE_HOST=f"side{rank}",
        )
        if job.kind == "line":
            found = work.line(job.steps)
        else:
            found = work.run(job, task, interface, folder / "run")
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class Record:
    """Results as lines of JSON, each written when it is there."""

    def __init__(self, path: Path, have: Iterable[dict[str, Any]]) -> None:
        self.path, self.have = path, list(have)
        self._file = path.open("a")

    def __call__(self, job: work.Job, folder: Path, failed: bool, seconds: float) -> None:
        line: dict[str, Any] = {**dataclasses.asdict(job), "took": round(seconds, 1)}
        said = (folder / "rank0.log").read_text() if (folder / "rank0.log").exists() else ""
        if failed:
            both = [
                (folder / f"rank{n}.log").read_text()[-600:]
                for n in (0, 1)
                if (folder / f"rank{n}.log").exists()
            ]
            line["error"] = both
            print(f"FAILED {name_of(job)}\n  " + "\n".join(both).replace("\n", "\n  "), flush=True)
        else:
            line["found"] = json.loads((folder / "rank0.json").read_text())
            if job.method.startswith("ours"):
                line["said"] = said[-3000:]
            curve = line["found"].get("curve") or [[0, 0, float("nan")]]
            per = np.mean(line["found"].get("seconds", [0])[2:] or [0])
            print(
                f"{time.strftime('%H:%M:%S')} {name_of(job)}: {per * 1000:.0f} ms a step,"
                f" loss {curve[-1][2]:.4f}, {seconds:.0f} s"
                + (f" {line['found']}" if job.kind == "line" else ""),
                flush=True,
            )
        self.note(line)
        self.have.append(line)

    def note(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def done(self, job: work.Job) -> bool:
        about = dataclasses.asdict(job)
        return any(
            "error" not in line and all(line.get(key) == value for key, value in about.items())
            for line in self.have
        )


def name_of(job: work.Job) -> str:
    return f"{job.kind} {job.model} {job.method!r} {job.link} lr {job.lr:g} seed {job.seed}"


# -- data --------------------------------------------------------------------------------


def text_of(given: str) -> np.ndarray[Any, Any]:
    """The text to learn: a file, or the sources of Python's standard library."""
    if given:
        return np.frombuffer(Path(given).read_bytes(), dtype=np.uint8)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files)[:8_000_000], dtype=np.uint8)


def pictures_of(given: str, tiny: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Fashion-MNIST from a folder of its four files (or of one ``pictures.npz``)."""
    folder = Path(given)
    if (packed := folder / "pictures.npz").exists():
        return dict(np.load(packed))
    if not folder.exists():
        if not tiny:
            raise SystemExit(f"no Fashion-MNIST in {folder}: --pictures FOLDER")
        draw = np.random.default_rng(0)
        pixels = draw.integers(0, 255, (512, 28, 28), dtype=np.uint8)
        labels = (pixels[:, 0, 0] // 26).astype(np.uint8)
        same = {"pixels": pixels, "labels": labels}
        return {**same, **{f"held_{name}": part for name, part in same.items()}}
    found = {}
    for name, part, ahead in (("", "train", 16), ("held_", "t10k", 16)):
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read(), dtype=np.uint8)[ahead:].reshape(-1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), dtype=np.uint8)[8:]
        count = 20_000 if not name else 3_000
        found[f"{name}pixels"], found[f"{name}labels"] = pixels[:count], labels[:count]
    return found


# -- the command -------------------------------------------------------------------------


def machine(options: argparse.Namespace, text: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What the figures depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    return {
        "kind": "machine",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "congestion": CONGESTION.read_text().strip(),
        "text": hashlib.sha256(text.tobytes()).hexdigest()[:12],
        "text_bytes": len(text),
        "at_once": options.at_once,
        "cores_of_a_rank": options.cores,
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    options = parser().parse_args()
    tiny = options.command == "check" or options.tiny
    cores = sorted(os.sched_getaffinity(0))
    options.at_once = options.at_once or max(1, len(cores) // (2 * options.cores))
    text, pictures = text_of(options.text), pictures_of(options.pictures, tiny)
    made = work.tasks(text, pictures, tiny)
    plan = Plan(
        models=tuple(options.models.split(",")),
        methods=tuple(options.methods.split(",")),
        seeds=tuple(range(options.seeds)),
        rates={name: task.rates for name, task in made.items()},
        steps=options.steps,
        every=options.every,
        links=tuple(options.links.split(";")),
        auto=tuple(one for one in options.auto.split(",") if one),
        tuned=tuple(options.tuned.split(",")),
    )
    out = Path(options.out)
    have = [line for path in (*options.have, out) for line in report.read(Path(path))]
    record = Record(out, have)
    about = machine(options, text)
    own = report.read(out)
    for line in [*(one for one in have if one.get("kind") == "best" and one not in own), about]:
        record.note(line)
    print(about, flush=True)
    preload()
    pairs = []
    try:
        for number in range(options.at_once):
            chosen = [cores[at % len(cores)] for at in range(*_span(number, options.cores))]
            sides = chosen[: options.cores], chosen[options.cores :]
            pairs.append(Pair(number, tuple(set(one) for one in sides)))
        for stage in options.stage.split(","):
            if stage == "line":
                jobs = [
                    work.Job("line", "lm", "line", link, 0, seed, 0, options.elements, 0)
                    for seed in plan.seeds
                    for link in (*plan.links, "unshaped")
                ]
            else:
                jobs = list(plan.of(stage, record.have))
            jobs = [job for job in jobs if not record.done(job)]
            begun = time.monotonic()
            left = options.minutes * 60 - (time.monotonic() - STARTED)
            print(f"{stage}: {len(jobs)} jobs, {left:.0f} s left", flush=True)
            run_all(jobs, pairs, made, record, left)
            print(f"{stage}: {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        for pair in pairs:
            pair.end()
    if options.command == "check" and any("error" in line for line in record.have):
        raise SystemExit("check: something failed")


def _span(number: int, each: int) -> tuple[int, int]:
    """Places of the cores of a pair."""
    return 2 * each * number, 2 * each * (number + 1)


def preload() -> None:
    """Imports what ranks would otherwise import one by one, each of them."""
    import torch._dynamo
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: F401

    from paceline import train  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with contextlib.suppress(FileNotFoundError):
        work.diloco_class()


STARTED = time.monotonic()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    made.add_argument("command", choices=("run", "check"))
    made.add_argument("--stage", default="line,rates,curves,paces,auto")
    made.add_argument("--out", default="results.jsonl")
    made.add_argument("--have", nargs="*", default=[], help="earlier results")
    made.add_argument("--minutes", type=float, default=9.0)
    made.add_argument("--at-once", type=int, default=0, help="jobs; as many as there are cores for")
    made.add_argument("--cores", type=int, default=1, help="of each rank")
    made.add_argument("--models", default=",".join(work.MODELS))
    made.add_argument("--methods", default=",".join((*PEERS, *(f"ours {o}" for o in OURS))))
    made.add_argument("--auto", default="ours auto", help="methods of the stage auto")
    made.add_argument("--tuned", default=",".join(p for p in PEERS if p != "fp16 hook"))
    made.add_argument("--links", default=";".join(SHAPED))
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--every", type=int, default=10)
    made.add_argument("--elements", type=int, default=1_000_000)
    made.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    made.add_argument("--text", default="")
    made.add_argument("--pictures", default="/usr/share/datasets/fashion-mnist")
    return made


if __name__ == "__main__":
    main()
