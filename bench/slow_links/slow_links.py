"""Time to equal loss over slow links: Paceline's communication methods against other methods.

A job has two ranks. Each has its own network namespace and is pinned to its own cores. ``tbf``
limits the rate of the link between them, and the lab's delay line adds its delay. A rank computes
with one thread. With ``--cores 2`` another core sends the gradients; with one, sending takes time
from computing. As many jobs run at the same time as there are cores for. Needs Linux, root, and
``ip`` and ``tc`` on the PATH.

    python bench/slow_links/slow_links.py check                    # one minute, tiny models
    python bench/slow_links/slow_links.py run --stage rates  --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage curves --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage paces  --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage auto   --out results.jsonl --minutes 9
    python bench/slow_links/slow_links.py run --stage line,rates,all     # all stages
    python bench/slow_links/report.py results.jsonl

A stage can be repeated: jobs with a result in the file are skipped.

* ``rates``: seed 0 on an unshaped link, over half the steps, at each learning rate of a small grid.
* ``curves``: complete trainings on the unshaped link at each method's best rate, for each seed.
* ``paces``: the first steps of each method on each link without validation, for seconds per step.
* ``auto``: complete trainings with ``communication="auto"`` on each link, at the rate of ``exact``.
* ``line``: the rate and latency of all-reduces on each link.

A link may be too slow for a complete training: DDP would take 20 minutes for each curve at 20
Mbit/s. The seconds to a loss are then composed from the validation curve on the unshaped link and
the seconds of a step on the slow one. The updates do not depend on the link; the report checks that
the losses of the first steps are equal to the last bit on both.
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

LINKS = {  # bits per second (0: no limit), one-way delay in seconds
    "unshaped": (0, 0.0),
    "1 Gbit/s": (1_000_000_000, 0.0),
    "100 Mbit/s": (100_000_000, 0.0),
    "20 Mbit/s": (20_000_000, 0.0),
    "100 Mbit/s, 20 ms": (100_000_000, 0.010),
}
SHAPED = tuple(LINKS)[1:]
PACELINE_METHODS = ("exact", "int8", "int4")
TORCH_METHODS = ("ddp", "fp16 hook", "diloco 10 0.7 0.9", "diloco 10 0.9 0.5")


# -- the plan -----------------------------------------------------------------------------


@dataclass
class Plan:
    """The trainings to measure.

    Attributes:
        steps: Steps of a training of plain DDP; other methods get an eighth more.
        tuned: Methods that get a grid of learning rates; the others use DDP's.
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

    def jobs_of(self, stage: str, results: list[dict[str, Any]]) -> Iterator[work.Job]:
        """The jobs of a stage, the most important first."""
        if stage == "rates":
            # the middle rate first, so that an incomplete stage has a result for each method
            num_rates = max(len(rates) for rates in self.rates.values())
            for number in sorted(range(num_rates), key=lambda n: abs(n - num_rates // 2)):
                for method, model in itertools.product(self.tuned, self.models):
                    if number < len(self.rates[model]):
                        lr, num_steps = (
                            self.rates[model][number],
                            self.steps // 2 // self.every * self.every,
                        )
                        yield work.Job(
                            "rate",
                            model,
                            method,
                            "unshaped",
                            lr,
                            0,
                            num_steps,
                            num_steps,
                            self.every,
                        )
        elif stage == "curves":
            for seed, model in itertools.product(self.seeds, self.models):
                for method in self.selected_methods(model, results):
                    if method == "ours exact":  # has the same updates as DDP
                        continue
                    lr = self.rate(model, method, results)
                    yield self.curve(model, method, lr, seed, "unshaped")
        elif stage == "paces":
            for link, model in itertools.product(self.links, self.models):
                for method in self.selected_methods(model, results):
                    if method == "ours exact" and LINKS[link][0] == 20_000_000:
                        continue  # its bucket trials take minutes
                    lr, steps = self.rate(model, method, results), self.pace_steps(method, link)
                    yield work.Job(
                        "pace", model, method, link, lr, 0, self.steps, steps, self.every
                    )
            for model in self.models:
                yield work.Job("pace", model, "alone", "unshaped", 1e-3, 0, self.steps, 24, 1)
        elif stage == "auto":
            for seed, link, model in itertools.product(self.seeds, self.links, self.models):
                for method in self.auto:
                    yield self.curve(model, method, self.rate(model, method, results), seed, link)
        elif stage == "all":  # the most important first; among these the longest first
            first_seed = dataclasses.replace(self, seeds=self.seeds[:1])
            other_seeds = dataclasses.replace(self, seeds=self.seeds[1:])
            other_jobs = [
                *other_seeds.jobs_of("auto", results),
                *other_seeds.jobs_of("curves", results),
            ]
            important = [job for job in other_jobs if job.method in ("ddp", *self.auto)]
            remaining_jobs = [job for job in other_jobs if job not in important]
            first = [
                *first_seed.jobs_of("auto", results),
                *first_seed.jobs_of("curves", results),
                *first_seed.jobs_of("paces", results),
            ]
            for part in (first, important, remaining_jobs):
                yield from sorted(part, key=estimate_seconds, reverse=True)
        else:
            raise SystemExit(f"no stage {stage}: line, rates, curves, paces, auto, all")

    def rate(self, model: str, method: str, results: list[dict[str, Any]]) -> float:
        """Best known learning rate of a method; methods without a grid use DDP's."""
        best_rate = report.best_rate(results, model, method) or report.best_rate(
            results, model, "ddp"
        )
        return best_rate or self.rates[model][len(self.rates[model]) // 2]

    def selected_methods(self, model: str, results: list[dict[str, Any]]) -> list[str]:
        """The methods, with only the best of several settings of DiLoCo."""
        settings = [name for name in self.methods if name.startswith("diloco")]
        final_losses = {name: report.lowest_loss(results, model, name) for name in settings}
        best_setting = min(settings, key=lambda name: final_losses[name], default="")
        return [name for name in self.methods if name == best_setting or name not in settings]

    def pace_steps(self, method: str, link: str) -> int:
        if method.startswith("diloco"):
            return 30
        if SENT_FRACTION.get(method, 0.5) >= 0.5 and LINKS[link][0] == 20_000_000:
            return 7
        return 44 if method == "ours exact" else 24  # the first 30 steps try bucket sizes


SENT_FRACTION = {"ddp": 1.0, "ours exact": 1.0, "alone": 0.0, "ours int8": 0.26}
SENT_FRACTION |= {"ours int4": 0.11, "ours auto": 0.12}


# seconds and MB per step
STEP_COST = {"lm": (0.13, 9.6), "cnn": (0.05, 4.6), "translation": (0.05, 4.3)}


def estimate_seconds(job: work.Job) -> float:
    """Approximate seconds of a job, for ordering the jobs."""
    rate = LINKS[job.link][0] or 5_000_000_000
    if job.kind == "line":
        return 1 + 8 * 32 * job.steps / rate
    sent_fraction = 0.1 if job.method.startswith("diloco") else SENT_FRACTION.get(job.method, 0.5)
    computing, megabytes = STEP_COST[job.model]
    validation_factor = 1.2 if job.kind == "curve" else 1.0
    transfer_s = 8e6 * megabytes / rate
    return 1 + transfer_s + job.steps * (computing * validation_factor + sent_fraction * transfer_s)


# -- the links ---------------------------------------------------------------------------


class Pair:
    """Two network namespaces with two links between them, one of them with a delay."""

    def __init__(self, number: int, cores: tuple[set[int], ...]) -> None:
        self.number, self.cores = number, cores
        self._holder_pids = [_start_holder() for _ in range(2)]
        self.networks = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in self._holder_pids]
        first, second = self._holder_pids
        _run(f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}")
        self._forwarder = 0
        for side in (0, 1):
            self._in_network(side, "ip link set lo up")
        self._address("eth0", 10 + number)

    def _address(self, interface: str, subnet: int) -> None:
        for side in (0, 1):
            self._in_network(side, f"ip addr add 10.77.{subnet}.{side + 1}/24 dev {interface}")
            self._in_network(side, f"ip link set {interface} up")

    def _in_network(self, side: int, command: str) -> None:
        network = self.networks[side]
        _run(command, lambda: kernel.setns(network, kernel.CLONE_NEWNET))

    def configure(self, link: str) -> tuple[str, str]:
        """Configure the link. Returns its interface and the address of the first side."""
        rate, delay = LINKS[link]
        interface, subnet = ("tap0", 110 + self.number) if delay else ("eth0", 10 + self.number)
        if delay and not self._forwarder:
            self._forwarder = _delay_line(self.networks, 2 * delay)
            self._address("tap0", subnet)
        for side in (0, 1):
            if rate:
                burst = max(16_000, int(rate / 8 * 0.004))
                self._in_network(
                    side,
                    f"tc qdisc replace dev {interface} root tbf rate {rate} burst {burst}"
                    " latency 50ms",
                )
            else:
                self._in_network(side, f"tc qdisc replace dev {interface} root pfifo_fast")
        return interface, f"10.77.{subnet}.1"

    def close(self) -> None:
        if self._forwarder:
            os.kill(self._forwarder, signal.SIGTERM)
            os.waitpid(self._forwarder, 0)
        for pid in self._holder_pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for network in self.networks:
            os.close(network)


def _start_holder() -> int:
    """Start a process that holds a new network namespace open. Returns its PID."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        kernel.unshare(kernel.CLONE_NEWNET)
        os.write(writer, b".")
        _wait_forever()
    os.close(writer)
    if os.read(reader, 1) != b".":
        raise SystemExit("cannot create network namespaces: this needs root")
    os.close(reader)
    return pid


def _delay_line(networks: list[int], delay: float) -> int:
    """Start a process that forwards between two TAP devices with a delay. Returns its PID."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        kernel.setns(networks[0], kernel.CLONE_NEWNET)
        forwarder = delayline.lay_cable("tap0", "tap0", networks[1], delay)
        os.write(writer, b".")
        parent, ended = os.getppid(), []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
        while not ended and os.getppid() == parent:  # the forwarder does not notice these
            time.sleep(0.2)
        os.kill(forwarder, signal.SIGKILL)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return pid


def _wait_forever() -> NoReturn:
    while True:
        signal.pause()


def _run(command: str, preexec: Any = None) -> None:
    completed = subprocess.run(command.split(), capture_output=True, text=True, preexec_fn=preexec)
    if completed.returncode:
        raise SystemExit(f"{command}: {completed.stderr.strip()}")


# -- running jobs ------------------------------------------------------------------------


@dataclass
class Running:
    """A running job.

    Attributes:
        ranks: PIDs that have not ended.
        deadline: Time at which it is killed, by ``time.monotonic()``.
    """

    job: work.Job
    pair: Pair
    folder: Path
    ranks: set[int]
    deadline: float
    start: float = field(default_factory=time.monotonic)
    failed: bool = False


def run_all(
    jobs: list[work.Job],
    pairs: list[Pair],
    tasks: dict[str, work.Task],
    result_file: Any,
    seconds: float,
) -> None:
    """Run the jobs on the pairs. Jobs that would probably not finish in time are skipped."""
    deadline, free, queue = time.monotonic() + seconds, list(pairs), list(jobs)
    running: list[Running] = []
    seconds_by_kind: dict[tuple[str, str, str, str], float] = {}  # of the last job of each kind
    finished: list[tuple[work.Job, float]] = []
    num_skipped = 0
    with tempfile.TemporaryDirectory(prefix="slow-links-") as scratch:
        while queue or running:
            while queue and free:
                job = queue.pop(0)
                kind = (job.kind, job.model, job.method, job.link)
                scale = (
                    max(1.0, *(t / estimate_seconds(o) for o, t in finished[-30:]))
                    if finished
                    else 1.0
                )
                if (
                    time.monotonic() + seconds_by_kind.get(kind, estimate_seconds(job) * scale)
                    > deadline
                ):
                    num_skipped += 1
                    continue
                folder = Path(scratch) / f"{len(jobs) - len(queue)}"
                running.append(_start(job, free.pop(0), tasks[job.model], folder, deadline))
            for pid, status in _reap_children():
                for active in running:
                    if pid in active.ranks:
                        active.ranks.discard(pid)
                        if status and not active.failed:
                            active.failed = True
                            active.deadline = min(active.deadline, time.monotonic() + 3)
            for active in list(running):
                if active.ranks and time.monotonic() > active.deadline:
                    active.failed = True
                    for pid in active.ranks:
                        os.kill(pid, signal.SIGKILL)
                elif not active.ranks:
                    running.remove(active)
                    free.append(active.pair)
                    free.sort(key=lambda pair: pair.number)
                    kind = (active.job.kind, active.job.model, active.job.method, active.job.link)
                    seconds_by_kind[kind] = time.monotonic() - active.start
                    if not active.failed:
                        finished.append((active.job, seconds_by_kind[kind]))
                    result_file(active.job, active.folder, active.failed, seconds_by_kind[kind])
            time.sleep(0.02)
    if num_skipped:
        print(f"{num_skipped} jobs skipped for lack of time", flush=True)


def _reap_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


_ports = itertools.count(29500)


def _start(job: work.Job, pair: Pair, task: work.Task, folder: Path, deadline: float) -> Running:
    interface, address = pair.configure(job.link)
    folder.mkdir()
    port, ranks = next(_ports), set()
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            _rank(job, pair, rank, task, interface, (address, port), folder)
        ranks.add(pid)
    return Running(job, pair, folder, ranks, deadline + 15)


CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def _rank(
    job: work.Job,
    pair: Pair,
    rank: int,
    task: work.Task,
    interface: str,
    address: tuple[str, int],
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
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
            GLOO_SOCKET_IFNAME=interface,
            PACELINE_HOST=f"side{rank}",
        )
        if job.kind == "line":
            result = work.line(job.steps)
        else:
            result = work.run(job, task, interface, folder / "run")
        (folder / f"rank{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class ResultFile:
    """Results as lines of JSON, each written as soon as it exists."""

    def __init__(self, path: Path, results: Iterable[dict[str, Any]]) -> None:
        self.path, self.results = path, list(results)
        self._file = path.open("a")

    def __call__(self, job: work.Job, folder: Path, failed: bool, seconds: float) -> None:
        line: dict[str, Any] = {**dataclasses.asdict(job), "took": round(seconds, 1)}
        output = (folder / "rank0.log").read_text() if (folder / "rank0.log").exists() else ""
        if failed:
            logs = [
                (folder / f"rank{n}.log").read_text()[-600:]
                for n in (0, 1)
                if (folder / f"rank{n}.log").exists()
            ]
            line["error"] = logs
            print(f"FAILED {name_of(job)}\n  " + "\n".join(logs).replace("\n", "\n  "), flush=True)
        else:
            line["found"] = json.loads((folder / "rank0.json").read_text())
            if job.method.startswith("ours"):
                line["said"] = output[-3000:]
            curve = line["found"].get("curve") or [[0, 0, float("nan")]]
            mean_step_s = np.mean(line["found"].get("seconds", [0])[2:] or [0])
            print(
                f"{time.strftime('%H:%M:%S')} {name_of(job)}: {mean_step_s * 1000:.0f} ms per step,"
                f" loss {curve[-1][2]:.4f}, {seconds:.0f} s"
                + (f" {line['found']}" if job.kind == "line" else ""),
                flush=True,
            )
        self.write(line)
        self.results.append(line)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def is_done(self, job: work.Job) -> bool:
        values = dataclasses.asdict(job)
        return any(
            "error" not in line and all(line.get(key) == value for key, value in values.items())
            for line in self.results
        )


def name_of(job: work.Job) -> str:
    return f"{job.kind} {job.model} {job.method!r} {job.link} lr {job.lr:g} seed {job.seed}"


# -- data --------------------------------------------------------------------------------


def load_text(path_text: str) -> np.ndarray[Any, Any]:
    """Training text: a file, or the sources of Python's standard library."""
    if path_text:
        return np.frombuffer(Path(path_text).read_bytes(), dtype=np.uint8)
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files)[:8_000_000], dtype=np.uint8)


def load_images(path_text: str, tiny: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Fashion-MNIST from a folder with its four files or ``pictures.npz``; random if ``tiny``."""
    folder = Path(path_text)
    if (packed := folder / "pictures.npz").exists():
        return dict(np.load(packed))
    if not folder.exists():
        if not tiny:
            raise SystemExit(f"no Fashion-MNIST in {folder}: --pictures FOLDER")
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 255, (512, 28, 28), dtype=np.uint8)
        labels = (pixels[:, 0, 0] // 26).astype(np.uint8)
        random_arrays = {"pixels": pixels, "labels": labels}
        return {**random_arrays, **{f"held_{name}": part for name, part in random_arrays.items()}}
    arrays = {}
    for name, part, header_bytes in (("", "train", 16), ("held_", "t10k", 16)):
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read(), dtype=np.uint8)[header_bytes:].reshape(-1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), dtype=np.uint8)[8:]
        count = 20_000 if not name else 3_000
        arrays[f"{name}pixels"], arrays[f"{name}labels"] = pixels[:count], labels[:count]
    return arrays


# -- the command -------------------------------------------------------------------------


def describe_machine(options: argparse.Namespace, text: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Description of the machine and software, as a record."""
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
    text, images = load_text(options.text), load_images(options.pictures, tiny)
    tasks = work.tasks(text, images, tiny)
    plan = Plan(
        models=tuple(options.models.split(",")),
        methods=tuple(options.methods.split(",")),
        seeds=tuple(range(options.seeds)),
        rates={name: task.rates for name, task in tasks.items()},
        steps=options.steps,
        every=options.every,
        links=tuple(options.links.split(";")),
        auto=tuple(name for name in options.auto.split(",") if name),
        tuned=tuple(options.tuned.split(",")),
    )
    out = Path(options.out)
    results = [line for path in (*options.have, out) for line in report.read(Path(path))]
    result_file = ResultFile(out, results)
    description = describe_machine(options, text)
    records = report.read(out)
    for line in [
        *(entry for entry in results if entry.get("kind") == "best" and entry not in records),
        description,
    ]:
        result_file.write(line)
    print(description, flush=True)
    preload()
    pairs = []
    try:
        for number in range(options.at_once):
            pair_cores = [
                cores[index % len(cores)] for index in range(*_span(number, options.cores))
            ]
            cores_by_rank = pair_cores[: options.cores], pair_cores[options.cores :]
            pairs.append(Pair(number, tuple(set(cores_of_rank) for cores_of_rank in cores_by_rank)))
        for stage in options.stage.split(","):
            if stage == "line":
                jobs = [
                    work.Job("line", "lm", "line", link, 0, seed, 0, options.elements, 0)
                    for seed in plan.seeds
                    for link in (*plan.links, "unshaped")
                ]
            else:
                jobs = list(plan.jobs_of(stage, result_file.results))
            jobs = [job for job in jobs if not result_file.is_done(job)]
            stage_start = time.monotonic()
            remaining_s = options.minutes * 60 - (time.monotonic() - STARTED)
            print(f"{stage}: {len(jobs)} jobs, {remaining_s:.0f} s left", flush=True)
            run_all(jobs, pairs, tasks, result_file, remaining_s)
            print(f"{stage}: {time.monotonic() - stage_start:.0f} s", flush=True)
    finally:
        for pair in pairs:
            pair.close()
    if options.command == "check" and any("error" in line for line in result_file.results):
        raise SystemExit("check: a job failed")


def _span(number: int, cores_per_rank: int) -> tuple[int, int]:
    """Range of the indices of a pair's cores."""
    return 2 * cores_per_rank * number, 2 * cores_per_rank * (number + 1)


def preload() -> None:
    """Import modules before the fork, so that ranks do not import them one by one."""
    import torch._dynamo
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: F401

    from paceline import train  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with contextlib.suppress(FileNotFoundError):
        work.diloco_class()


STARTED = time.monotonic()


def parser() -> argparse.ArgumentParser:
    arguments_parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments_parser.add_argument("command", choices=("run", "check"))
    arguments_parser.add_argument("--stage", default="line,rates,curves,paces,auto")
    arguments_parser.add_argument("--out", default="results.jsonl")
    arguments_parser.add_argument("--have", nargs="*", default=[], help="earlier results")
    arguments_parser.add_argument("--minutes", type=float, default=9.0)
    arguments_parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        help="jobs at the same time; default: by the number of cores",
    )
    arguments_parser.add_argument("--cores", type=int, default=1, help="per rank")
    arguments_parser.add_argument("--models", default=",".join(work.MODELS))
    arguments_parser.add_argument(
        "--methods",
        default=",".join((*TORCH_METHODS, *(f"ours {name}" for name in PACELINE_METHODS))),
    )
    arguments_parser.add_argument("--auto", default="ours auto", help="methods of the stage auto")
    arguments_parser.add_argument(
        "--tuned", default=",".join(p for p in TORCH_METHODS if p != "fp16 hook")
    )
    arguments_parser.add_argument("--links", default=";".join(SHAPED))
    arguments_parser.add_argument("--seeds", type=int, default=3)
    arguments_parser.add_argument("--steps", type=int, default=150)
    arguments_parser.add_argument("--every", type=int, default=10)
    arguments_parser.add_argument("--elements", type=int, default=1_000_000)
    arguments_parser.add_argument(
        "--tiny", action="store_true", help="models of a few thousand parameters"
    )
    arguments_parser.add_argument("--text", default="")
    arguments_parser.add_argument("--pictures", default="/usr/share/datasets/fashion-mnist")
    return arguments_parser


if __name__ == "__main__":
    main()
