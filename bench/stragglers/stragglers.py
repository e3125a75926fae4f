"""Straggler detection on real ranks: planted faults must be named, healthy runs must not.

    python bench/stragglers/stragglers.py [--runs 200] [--healthy 200] [--seconds 500] [--out DIR]

Worlds of two and three ranks train at the same time. Each rank has two CPUs, a network namespace
and a control group.

In a planted run, one rank gets a fault at the start or in mid-run: busy loops on its CPU (``cpu``),
a quota (``quota``), data from a pipe that is filled slowly (``data``), a slow link (``link``), or
larger samples (``batch``). The result is right if this rank is named with the right cause within 20
steps, and no other rank or cause before.

A healthy run has normal variations: a slow first step, evaluations, checkpoints, samples of
different lengths, garbage collection, a delay of the data, ranks that are late in turn, or a
network that is slow for all ranks, also with a small model whose steps only communicate. The result
is right if no rank is named.

Needs root, ``ip`` and ``tc``, and an otherwise idle machine, because other programs slow ranks
down. Prints a table and the failures; ``--out`` writes all step timings.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_DELAY_STEPS, ONSET_STEP, WIDTH, SAMPLES = 20, 14, 256, 8
COMPUTE_S = 0.020  # approximate computing of a step
USUAL_STEP_S = 1.4 * COMPUTE_S  # total of a step
SHORT_STEPS, SHORT_STEP_DIVISOR = 200, 8  # of a healthy run with short steps
CPUS_PER_RANK = 2  # a rank computes on one CPU and sends gradients on the other
FAULT_KINDS = ("cpu", "quota", "data", "link", "batch")
HEALTHY_KINDS = (
    "plain", "first step", "evaluation", "checkpoints", "lengths", "garbage", "hiccup", "in turn",
    "slow network", "short steps",
)  # fmt: skip
SLOW_NETWORK_KINDS = ("slow network", "short steps")
_NEWNET = 0x40000000


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        number: Index in its world.
        kind: One of :data:`FAULT_KINDS` or :data:`HEALTHY_KINDS`.
        rank: Rank that gets the fault or the harmless event.
        mid: Whether the fault starts in mid-run.
        strength: Strength of the fault, from 0 to 1.
    """

    number: int
    kind: str
    rank: int
    mid: bool
    strength: float

    @property
    def is_planted(self) -> bool:
        return self.kind in FAULT_KINDS

    @property
    def steps(self) -> int:
        if self.is_planted:
            return (ONSET_STEP if self.mid else 0) + MAX_DELAY_STEPS + 2
        return SHORT_STEPS if self.kind == "short steps" else 44


def make_cases(world: int, size: int, planted: int, healthy: int, kinds: list[str]) -> list[Case]:
    """The cases of a world, in an order that depends only on its number."""
    rng = random.Random(world)
    case_kinds = [kinds[(world + n) % len(kinds)] for n in range(planted)] if kinds else []
    case_kinds += [HEALTHY_KINDS[(world + n) % len(HEALTHY_KINDS)] for n in range(healthy)]
    rng.shuffle(case_kinds)
    return [
        Case(number, kind, rng.randrange(size), rng.random() < 0.4, rng.random())
        for number, kind in enumerate(case_kinds)
    ]


def _sh(*argv: object, check: bool = True) -> None:
    subprocess.run([str(argument) for argument in argv], check=check, stdout=subprocess.DEVNULL,
                   stderr=None if check else subprocess.DEVNULL)  # fmt: skip


def _enter_new_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare: this needs root")
    _sh("ip", "link", "set", "lo", "up")


# -- control groups -------------------------------------------------------------------------


class ControlGroup:
    """A control group whose CPU time can be limited."""

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        self._is_v2 = (root / "cgroup.controllers").exists()
        self.path = root / name if self._is_v2 else root / "cpu" / name
        if self._is_v2 and "cpu" not in (root / "cgroup.subtree_control").read_text():
            try:
                (root / "cgroup.subtree_control").write_text("+cpu")
            except OSError:  # a group with processes cannot have child groups
                (root / "everything-else").mkdir(exist_ok=True)
                for pid in (root / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (root / "everything-else" / "cgroup.procs").write_text(pid)
                (root / "cgroup.subtree_control").write_text("+cpu")
        self.path.mkdir()

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, part: float, period: int = 100_000) -> None:
        """Limit the group to a fraction of one CPU; 0 removes the limit."""
        if self._is_v2:
            quota = str(int(part * period)) if part else "max"
            (self.path / "cpu.max").write_text(f"{quota} {period}")
            return
        (self.path / "cpu.cfs_period_us").write_text(str(period))
        (self.path / "cpu.cfs_quota_us").write_text(str(int(part * period) if part else -1))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def control_group_error() -> str:
    """Why control groups cannot be created; empty if they can."""
    try:
        group = ControlGroup(f"paceline-bench-{os.getpid()}")
        group.limit(0.5)
        group.remove()
    except OSError as error:
        return str(error)
    return ""


# -- one world -------------------------------------------------------------------------------


class World:
    """Switch of a world, in its own process and namespace: starts the ranks and injects faults."""

    def __init__(self, number: int, size: int, cpus: list[list[int]], spare: list[int],
                 folder: Path, plan: list[Case], deadline: float) -> None:  # fmt: skip
        self.number, self.size, self.cpus, self.spare = number, size, cpus, spare
        self.folder, self.plan, self.deadline = folder, plan, deadline
        self.pids: list[int] = []
        self.groups: list[ControlGroup] = []
        self.busy_pids: list[int] = []
        self.slow_link = -1

    def run(self) -> int:
        """Run all cases. Returns 0 unless a rank failed."""
        _enter_new_network()
        os.sched_setaffinity(0, self.spare)
        _sh("ip", "link", "add", "sw", "type", "bridge")
        _sh("ip", "link", "set", "sw", "up")
        request_reader, request_writer = os.pipe()
        reply_reader, reply_writer = os.pipe()
        # Data for each rank: the switch fills all pipes, one of them slowly if data is the fault.
        self.pipes = [os.pipe() for _ in range(self.size)]
        for rank in range(self.size):
            ready_reader, ready_writer = os.pipe()
            start_reader, start_writer = os.pipe()
            if not (pid := os.fork()):
                status = 1
                try:
                    status = _rank(
                        self, rank, ready_writer, start_reader, request_writer, reply_reader
                    )
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(status)
            os.read(ready_reader, 1)
            link = ["ip", "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0"]
            _sh(*link, "netns", pid)
            _sh("ip", "link", "set", f"p{rank}", "master", "sw", "up")
            group = None
            with contextlib.suppress(OSError):
                group = ControlGroup(f"paceline-bench-{os.getpid()}-{rank}")
                group.add(pid)
            if group is not None:
                self.groups.append(group)
            self.pids.append(pid)
            os.write(start_writer, b"1")
        os.close(request_writer)
        try:
            self._serve(request_reader, reply_writer)
        finally:
            self._end_loops()
            statuses = [os.waitpid(pid, 0)[1] for pid in self.pids]
            for group in self.groups:
                group.remove()
        return int(any(statuses))

    def _serve(self, request_reader: int, reply_writer: int) -> None:
        """Inject and undo faults as rank 0 requests, and fill the pipes."""
        for _, pipe_writer in self.pipes:
            os.set_blocking(pipe_writer, False)
        self.rates = dict.fromkeys(range(self.size), 0.0)  # bytes per second; 0: no limit
        bytes_due = dict.fromkeys(range(self.size), 0.0)
        block, last_time = bytes(1 << 16), time.monotonic()
        while True:
            free_pipes = [self.pipes[r][1] for r in range(self.size) if not self.rates[r]]
            is_throttled = any(self.rates.values())
            ready, writable, _ = select.select(
                [request_reader], free_pipes, [], 0.002 if is_throttled else None
            )
            now, elapsed, last_time = (
                time.monotonic(),
                time.monotonic() - last_time,
                time.monotonic(),
            )
            for rank, rate in self.rates.items():
                _, pipe_writer = self.pipes[rank]
                if rate:
                    bytes_due[rank] = min(bytes_due[rank] + rate * elapsed, 0.01 * rate)
                    with contextlib.suppress(BlockingIOError):
                        bytes_due[rank] -= os.write(pipe_writer, block[: int(bytes_due[rank])])
                elif pipe_writer in writable:
                    with contextlib.suppress(BlockingIOError):
                        os.write(pipe_writer, block)
            del now
            if ready:
                requests = os.read(request_reader, 100).split()
                if not requests:
                    return
                for request in requests:
                    action, _, number = request.decode().partition(":")
                    self._inject(self.plan[int(number)]) if action == "strike" else self._heal()
                    os.write(reply_writer, b"1")

    def _inject(self, case: Case) -> None:
        if case.kind == "cpu":
            for loop in range(CPUS_PER_RANK * (1 + int(3 * case.strength))):
                if not (pid := os.fork()):
                    os.sched_setaffinity(0, [self.cpus[case.rank][loop % CPUS_PER_RANK]])
                    while os.getppid() != 1:
                        for _ in range(10_000):
                            pass
                    os._exit(0)
                self.busy_pids.append(pid)
        elif case.kind == "quota":
            period = 20_000 if case.number % 2 else 100_000
            self.groups[case.rank].limit(0.2 + 0.2 * case.strength, period)
        elif case.kind == "data":
            self.rates[case.rank] = self._data_rate() / (1.7 + case.strength)
        elif case.kind == "link":
            both_ways = self.size > 2 and case.number % 2 == 0
            self._limit_rate(case.rank, 60 + 100 * case.strength, both_ways=both_ways)
        elif case.kind in SLOW_NETWORK_KINDS:
            for rank in range(self.size):
                self._limit_rate(rank, 60 + 100 * case.strength, both_ways=False)

    def _data_rate(self) -> float:
        """Bytes per second that a rank reads if its steps have the usual duration."""
        tokens = int((self.folder / "tokens").read_text())
        return SAMPLES * tokens * WIDTH * 4 / USUAL_STEP_S

    def _heal(self) -> None:
        self._end_loops()
        for group in self.groups:
            group.limit(0)
        self.rates = dict.fromkeys(range(self.size), 0.0)
        for rank in range(self.size):
            self._in_network(rank, "tc", "qdisc", "del", "dev", "eth0", "root")
            _sh("tc", "qdisc", "del", "dev", f"p{rank}", "root", check=False)

    def _end_loops(self) -> None:
        for pid in self.busy_pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.busy_pids = []

    def _limit_rate(self, rank: int, megabits: float, both_ways: bool) -> None:
        limit = ["root", "tbf", "rate", f"{megabits:.0f}mbit", "burst", "32k", "latency", "50ms"]
        self._in_network(rank, "tc", "qdisc", "replace", "dev", "eth0", *limit)
        if both_ways:
            _sh("tc", "qdisc", "replace", "dev", f"p{rank}", *limit)

    def _in_network(self, rank: int, *argv: str) -> None:
        _sh("nsenter", "-t", self.pids[rank], "-n", *argv, check=False)


# -- one rank ---------------------------------------------------------------------------------


def _rank(
    world: World,
    rank: int,
    ready_writer: int,
    start_reader: int,
    request_writer: int,
    reply_reader: int,
) -> int:
    _enter_new_network()
    os.write(ready_writer, b"1")
    os.read(start_reader, 1)
    _sh("ip", "address", "add", f"10.9.0.{rank + 1}/24", "dev", "eth0")
    _sh("ip", "link", "set", "eth0", "up")
    os.sched_setaffinity(0, world.cpus[rank])
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="10.9.0.1", MASTER_PORT="29711", GLOO_SOCKET_IFNAME="eth0",
        PACELINE_HOST=f"h{rank}",
    )  # fmt: skip
    for other_rank, (pipe_reader, pipe_writer) in enumerate(world.pipes):
        os.close(pipe_writer)
        if other_rank != rank:
            os.close(pipe_reader)
    if rank:
        os.close(request_writer)
    import torch

    from paceline import train

    torch.set_num_threads(1)
    session = train.join(run_dir=world.folder / "run", quiet=True, log_every=10, device="cpu")
    RankRunner(world, session, rank, request_writer, reply_reader).run()
    session.close()
    return 0


class RankRunner:
    """Runs all cases on one rank."""

    def __init__(
        self, world: World, session: Any, rank: int, request_writer: int, reply_reader: int
    ) -> None:
        self.world, self.session, self.rank = world, session, rank
        self.request_writer, self.reply_reader = request_writer, reply_reader
        self.reports: list[dict[str, Any]] = []
        session.event = self._event
        session.say = session._journal.print = lambda text: None

    def _event(self, name: str, **details: Any) -> None:
        if name.startswith("straggler"):
            self.reports.append({"step": self.session.progress.step, "event": name, **details})

    def run(self) -> None:
        import torch

        self.tokens = self._calibrate()
        if self.rank == 0:
            (self.world.folder / "tokens").write_text(str(self.tokens))
        results_file = self.world.folder / "runs.jsonl"
        for case in self.world.plan:
            is_late = torch.tensor([float(time.time() > self.world.deadline)])
            if self.session.comms.sum(is_late)[0]:
                break
            result = self._run_case(case)
            if self.rank == 0:
                with results_file.open("a") as file:
                    file.write(json.dumps(result) + "\n")

    def _calibrate(self) -> int:
        """Tokens of a sample with which a step computes for about COMPUTE_S."""
        import torch

        network, tokens = _network(), 32
        for _ in range(3):
            inputs = torch.randn(SAMPLES, tokens, WIDTH)
            for _ in range(3):
                network(inputs).square().mean().backward()
            start_time = time.perf_counter()
            for _ in range(10):
                network(inputs).square().mean().backward()
            duration = (time.perf_counter() - start_time) / 10
            tokens = int(min(512, max(8, tokens * COMPUTE_S / duration)))
        negative_max = self.session.comms.max(torch.tensor([-float(tokens)], dtype=torch.float64))
        return int(-negative_max[0])

    def _request(self, action: str, number: int, waits_for_reply: bool) -> None:
        """Let the switch inject a fault (``strike``) or undo all (``heal``)."""
        import torch

        if self.rank == 0:
            os.write(self.request_writer, f"{action}:{number} ".encode())
            if waits_for_reply:
                os.read(self.reply_reader, 1)
        if waits_for_reply:
            self.session.comms.sum(torch.zeros(1))

    def _run_case(self, case: Case) -> dict[str, Any]:
        import torch

        session, is_affected = self.session, case.rank == self.rank
        session.progress.step = session.progress.epoch = session.progress.offset = 0
        self.reports, self.timings = [], []
        self._request("heal", case.number, waits_for_reply=True)
        network = _network(1 if case.kind == "short steps" else 4)
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-4))
        original_update = session._loop.stragglers.update

        def recording_update(step_timings: Any) -> None:
            self.timings.append(step_timings)
            original_update(step_timings)

        session._loop.stragglers.update = recording_update
        size_factor = 1.8 + case.strength if is_affected and case.kind == "batch" else 1.0
        data = Samples(self, case, size_factor)
        dataset = data if case.kind != "data" or case.number % 2 else BatchedSamples(data)
        loader = session.loader(dataset, SAMPLES * self.world.size, workers=0, collate=None
                                if dataset is not data else _pad)  # fmt: skip
        if case.kind == "checkpoints":
            session.checkpoints(every="7", resume="never")
        onset = ONSET_STEP if case.mid and case.is_planted else 0
        if (case.is_planted and not onset) or case.kind in SLOW_NETWORK_KINDS:
            self._request("strike", case.number, waits_for_reply=True)
            data.is_active = True
        is_pending, num_steps = bool(onset), 0
        for _ in session.epochs(
            loader, steps=case.steps, every=12 if case.kind == "evaluation" else 0
        ):
            for batch in loader:
                self._add_disturbance(case, num_steps)
                if is_pending and num_steps == ONSET_STEP:
                    data.is_active, is_pending = True, False
                    if case.kind != "batch":
                        self._request("strike", case.number, waits_for_reply=False)
                session.step(model(batch.data[0]).square().mean(dim=(1, 2)))
                num_steps += 1
            if case.kind == "evaluation":
                time.sleep(0.02 + 0.05 * self.rank)
        if session._checkpoints.keeper is not None:  # the next case may use checkpoints, too
            session._checkpoints.keeper.close()
            session._checkpoints.keeper = None
        if onset and case.kind != "batch" and self.rank == 0:
            os.read(self.reply_reader, 1)
        rounded_timings = (
            [_round_timings(step_timings) for step_timings in self.timings]
            if self.rank == 0
            else []
        )
        return {**asdict(case), "size": self.world.size, "onset": onset, "told": self.reports,
                "looks": rounded_timings}  # fmt: skip

    def _add_disturbance(self, case: Case, step: int) -> None:
        """Delay this rank as may happen in a healthy run."""
        is_affected = case.rank == self.rank
        if case.kind == "first step" and is_affected and step == 0:
            time.sleep(0.5)
        elif case.kind == "garbage" and is_affected and step in (17, 33):
            time.sleep(0.06)
        elif case.kind == "in turn" and (step * 7 + case.number) % self.world.size == self.rank:
            time.sleep(0.006)


def _network(layers: int = 4) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _pad(samples: list[Any]) -> Any:
    from torch.nn.utils.rnn import pad_sequence

    return (pad_sequence(samples, batch_first=True),)


def _round_timings(step_timings: Any) -> dict[str, Any]:
    def round_tensor(tensor: Any, digits: int) -> Any:
        return json.loads(
            json.dumps(tensor.tolist()), parse_float=lambda x: round(float(x), digits)
        )

    return {
        "first_step": step_timings.first_step,
        "every": step_timings.stride,
        "seconds": round_tensor(step_timings.seconds, 5),
        "samples": round_tensor(step_timings.samples, 0),
        "elements": round_tensor(step_timings.elements, 0),
        "facts": round_tensor(step_timings.vitals, 6),
    }


class Samples:
    """Sequences. In cases of slow data, reading one also reads its bytes from the rank's pipe."""

    def __init__(self, ranks: RankRunner, case: Case, size_factor: float) -> None:
        import torch

        self.ranks, self.case, self.size_factor, self.is_active = ranks, case, size_factor, False
        self.num_read = 0
        self._store = torch.randn(4 * ranks.tokens, WIDTH)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> Any:
        tokens, case = self.ranks.tokens, self.case
        self.num_read += 1
        if case.kind == "lengths":
            tokens = int(tokens * (0.7 + 0.6 * ((number * 2654435761) % 1000) / 1000))
        if case.kind == "short steps":
            tokens = max(1, tokens // SHORT_STEP_DIVISOR)
        if self.is_active:
            tokens = int(tokens * self.size_factor)
        if case.kind == "hiccup" and case.rank == self.ranks.rank and self.num_read == 20 * SAMPLES:
            time.sleep(0.15)
        if case.kind == "data":
            remaining, pipe_reader = tokens * WIDTH * 4, self.ranks.world.pipes[self.ranks.rank][0]
            while remaining:
                remaining -= len(os.read(pipe_reader, min(remaining, 1 << 16)))
        return self._store[:tokens]


class BatchedSamples:
    """The same samples as complete batches, which a thread prepares in advance."""

    slow = True

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, ids: Any, draws: Any) -> Any:
        return _pad([self._data[int(index)] for index in ids])

    @property
    def is_active(self) -> bool:
        return self._data.is_active


# -- the results --------------------------------------------------------------------------------


def verdict(run: dict[str, Any]) -> str:
    """``right``, or a description of the error."""
    reports = [report for report in run["told"] if report["event"] == "straggler"]
    if run["kind"] in HEALTHY_KINDS:
        return (
            "right"
            if not reports
            else f"named rank {reports[0]['straggler']}: {reports[0]['text']}"
        )
    if not reports:
        return "no rank named"
    if any(report["straggler"] != run["rank"] for report in reports):
        return f"wrong rank: {[report['straggler'] for report in reports]}"
    if reports[0]["step"] < run["onset"]:
        return "named before the fault"
    correct = [report for report in reports if report["cause"] == run["kind"]]
    if not correct:
        return f"wrong cause: {[report['text'] for report in reports]}"
    delay_steps = correct[0]["step"] - first_slow_step(run)
    if reports[0]["cause"] != run["kind"]:
        return f"another cause first: {reports[0]['text']}"
    return "right" if delay_steps <= MAX_DELAY_STEPS else f"late: after {delay_steps} steps"


def first_slow_step(run: dict[str, Any]) -> int:
    """First step that the fault slows down; prefetched data hide it for some steps."""
    if run["kind"] != "data":
        return int(run["onset"])
    waits = [
        step[0] for step_timings in run["looks"] for step in step_timings["seconds"][run["rank"]]
    ]
    return next(
        index
        for index, wait in enumerate(waits)
        if index >= run["onset"] and wait > 0.3 * COMPUTE_S
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="number of planted runs")
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=500, help="start no further run after this time"
    )
    parser.add_argument(
        "--sizes",
        default="",
        help="sizes of the worlds, such as 3,2,2; default: by the number of CPUs",
    )
    parser.add_argument("--kinds", default=",".join(FAULT_KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpus = sorted(os.sched_getaffinity(0))
    sizes = [int(size) for size in options.sizes.split(",") if size] or (
        [3, 2, 2] if len(cpus) >= 16 else [2]
    )
    import torch  # noqa: F401

    from paceline import train  # noqa: F401  (once, before all forks)

    folder = Path(tempfile.mkdtemp(prefix="stragglers-"))
    start_s, worlds, unused_cpus = time.time(), [], list(cpus)
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if "quota" in kinds and (reason := control_group_error()):
        print(f"no runs with a quota: {reason}")
        kinds.remove("quota")
    for number, size in enumerate(sizes):
        cpus_per_rank = CPUS_PER_RANK if len(cpus) >= CPUS_PER_RANK * sum(sizes) else 1
        cpus_by_rank = [
            (unused_cpus[n * cpus_per_rank : (n + 1) * cpus_per_rank] or cpus[:1]) * CPUS_PER_RANK
            for n in range(size)
        ]
        unused_cpus = unused_cpus[size * cpus_per_rank :]
        planted = options.runs // len(sizes) + (number < options.runs % len(sizes))
        healthy = options.healthy // len(sizes) + (number < options.healthy % len(sizes))
        world_folder = folder / str(number)
        world_folder.mkdir()
        plan = make_cases(number, size, planted, healthy, kinds)
        world = World(number, size, cpus_by_rank, [], world_folder, plan, start_s + options.seconds)
        worlds.append(world)
    pids = []
    for world in worlds:
        world.spare = unused_cpus or cpus
        if not (pid := os.fork()):
            status = 1
            try:
                status = world.run()
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    runs = [
        {"world": world.number, **json.loads(line)}
        for world in worlds
        if (world.folder / "runs.jsonl").exists()
        for line in (world.folder / "runs.jsonl").read_text().splitlines()
    ]
    text = report(runs, time.time() - start_s, sizes)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "stragglers.md").write_text(text)
        with gzip.open(options.out / "stragglers.json.gz", "wt") as file:
            json.dump(runs, file)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(int(any(statuses)))


def report(runs: list[dict[str, Any]], seconds: float, sizes: list[int]) -> str:
    import torch

    lines = [
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch"
        f" {torch.__version__}; worlds of {', '.join(map(str, sizes))} ranks; {seconds:.0f} s",
        "",
        "| run | right | of | steps until named (median, max) |",
        "|---|---|---|---|",
    ]
    failures = []
    for kind in (*FAULT_KINDS, *HEALTHY_KINDS):
        selected = [run for run in runs if run["kind"] == kind]
        if not selected:
            continue
        verdicts = [verdict(run) for run in selected]
        delays = sorted(
            run["told"][0]["step"] - run["onset"]
            for run, text in zip(selected, verdicts, strict=True)
            if text == "right" and run["told"]
        )
        steps = f"{delays[len(delays) // 2]}, {delays[-1]}" if delays else ""
        lines.append(f"| {kind} | {verdicts.count('right')} | {len(selected)} | {steps} |")
        failures += [
            f"* {kind}: world {run['world']} ({run['size']} ranks), run {run['number']}, rank"
            f" {run['rank']}, {'mid-run' if run['mid'] else 'from the start'}, strength"
            f" {run['strength']:.2f}: {text}"
            for run, text in zip(selected, verdicts, strict=True)
            if text != "right"
        ]
    for name, group_kinds in (("planted", FAULT_KINDS), ("healthy", HEALTHY_KINDS)):
        selected = [verdict(run) for run in runs if run["kind"] in group_kinds]
        lines.append(f"| **all {name}** | {selected.count('right')} | {len(selected)} | |")
    return "\n".join([*lines, "", *(failures or ["No failures."])]) + "\n"


if __name__ == "__main__":
    main()
