"""Is a straggler named, and only a straggler: planted faults and healthy runs on real ranks.

    python bench/stragglers/stragglers.py [--runs 200] [--healthy 200] [--seconds 500] [--out DIR]

Worlds of two and three ranks train side by side, each rank on two CPUs of its own, in a network
namespace and a control group of its own. In a planted run one rank gets a fault, at the start or
in mid-run: busy loops on its CPU (``cpu``), a quota (``quota``), data through a pipe that is filled
slowly (``data``), a slow link (``link``), larger samples (``batch``). It counts when the right rank
is named with the right cause within 20 steps, and nobody else before. A healthy run has what
belongs to training and is nobody's fault: first steps that take longer, evaluations, checkpoints,
samples of all lengths, a collection of garbage, a hiccup of the data, ranks that are late in turn,
a network that is slow for all, also with a small model whose steps are nothing but its bytes. It
counts when nobody is named.

Needs root, ``ip`` and ``tc``, and a machine on which nothing else runs: what else computes there is
a straggler's cause like any other. Prints a table and what went wrong; writes all looks.
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

WITHIN, ONSET, WIDTH, SAMPLES = 20, 14, 256, 8
STEP = 0.020  # seconds of computing of a step, about
USUAL = 1.4 * STEP  # of a whole step
SHORT_STEPS, SHORTER = 200, 8  # of a healthy run whose steps are short, and by what
EACH = 2  # CPUs of a rank: it computes on one, and its gradients travel by the other
FAULTS = ("cpu", "quota", "data", "link", "batch")
CALM = (
    "plain", "first step", "evaluation", "checkpoints", "lengths", "garbage", "hiccup", "in turn",
    "slow network", "short steps",
)  # fmt: skip
SLOW_FOR_ALL = ("slow network", "short steps")
_NEWNET = 0x40000000


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        number: In its world.
        kind: One of :data:`FAULTS` or :data:`CALM`.
        rank: That gets the fault, or the harmless event.
        mid: The fault comes in mid-run.
        strength: Of the fault: busy loops, part of a CPU, of the usual rate, …
    """

    number: int
    kind: str
    rank: int
    mid: bool
    strength: float

    @property
    def planted(self) -> bool:
        return self.kind in FAULTS

    @property
    def steps(self) -> int:
        if self.planted:
            return (ONSET if self.mid else 0) + WITHIN + 2
        return SHORT_STEPS if self.kind == "short steps" else 44


def cases(world: int, size: int, planted: int, healthy: int, kinds: list[str]) -> list[Case]:
    """Of one world, always the same."""
    draw = random.Random(world)
    wanted = [kinds[(world + n) % len(kinds)] for n in range(planted)] if kinds else []
    wanted += [CALM[(world + n) % len(CALM)] for n in range(healthy)]
    draw.shuffle(wanted)
    return [
        Case(number, kind, draw.randrange(size), draw.random() < 0.4, draw.random())
        for number, kind in enumerate(wanted)
    ]


def _sh(*words: object, check: bool = True) -> None:
    subprocess.run([str(word) for word in words], check=check, stdout=subprocess.DEVNULL,
                   stderr=None if check else subprocess.DEVNULL)  # fmt: skip


def _own_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare: this needs root")
    _sh("ip", "link", "set", "lo", "up")


# -- control groups -------------------------------------------------------------------------


class Group:
    """A control group whose CPU time can be limited."""

    def __init__(self, name: str) -> None:
        top = Path("/sys/fs/cgroup")
        self._second = (top / "cgroup.controllers").exists()
        self.path = top / name if self._second else top / "cpu" / name
        if self._second and "cpu" not in (top / "cgroup.subtree_control").read_text():
            try:
                (top / "cgroup.subtree_control").write_text("+cpu")
            except OSError:  # a group with processes of its own may have none below
                (top / "everything-else").mkdir(exist_ok=True)
                for pid in (top / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (top / "everything-else" / "cgroup.procs").write_text(pid)
                (top / "cgroup.subtree_control").write_text("+cpu")
        self.path.mkdir()

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, part: float, period: int = 100_000) -> None:
        """To so much of one CPU; 0: not any more."""
        if self._second:
            quota = str(int(part * period)) if part else "max"
            (self.path / "cpu.max").write_text(f"{quota} {period}")
            return
        (self.path / "cpu.cfs_period_us").write_text(str(period))
        (self.path / "cpu.cfs_quota_us").write_text(str(int(part * period) if part else -1))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def no_groups() -> str:
    """Why there can be no control groups."""
    try:
        group = Group(f"paceline-bench-{os.getpid()}")
        group.limit(0.5)
        group.remove()
    except OSError as error:
        return str(error)
    return ""


# -- one world -------------------------------------------------------------------------------


class World:
    """Its switch: starts the ranks and strikes them. In a process and a namespace of its own."""

    def __init__(self, number: int, size: int, cpus: list[list[int]], spare: list[int],
                 folder: Path, plan: list[Case], until: float) -> None:  # fmt: skip
        self.number, self.size, self.cpus, self.spare = number, size, cpus, spare
        self.folder, self.plan, self.until = folder, plan, until
        self.pids: list[int] = []
        self.groups: list[Group] = []
        self.loops: list[int] = []
        self.slow_link = -1

    def run(self) -> int:
        """Until all cases are done."""
        _own_network()
        os.sched_setaffinity(0, self.spare)
        _sh("ip", "link", "add", "sw", "type", "bridge")
        _sh("ip", "link", "set", "sw", "up")
        asks, asked = os.pipe()
        answers, answer = os.pipe()
        # Data for each rank: the switch fills all pipes, one of them slowly.
        self.pipes = [os.pipe() for _ in range(self.size)]
        for rank in range(self.size):
            born, told = os.pipe()
            go, start = os.pipe()
            if not (pid := os.fork()):
                status = 1
                try:
                    status = _rank(self, rank, told, go, asked, answers)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(status)
            os.read(born, 1)
            link = ["ip", "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0"]
            _sh(*link, "netns", pid)
            _sh("ip", "link", "set", f"p{rank}", "master", "sw", "up")
            group = None
            with contextlib.suppress(OSError):
                group = Group(f"paceline-bench-{os.getpid()}-{rank}")
                group.add(pid)
            if group is not None:
                self.groups.append(group)
            self.pids.append(pid)
            os.write(start, b"1")
        os.close(asked)
        try:
            self._serve(asks, answer)
        finally:
            self._end_loops()
            ended = [os.waitpid(pid, 0)[1] for pid in self.pids]
            for group in self.groups:
                group.remove()
        return int(any(ended))

    def _serve(self, asks: int, answer: int) -> None:
        """Strikes and heals as rank 0 asks."""
        for _, out in self.pipes:
            os.set_blocking(out, False)
        self.rates = dict.fromkeys(range(self.size), 0.0)  # bytes a second; 0: as they are read
        owed = dict.fromkeys(range(self.size), 0.0)
        block, last = bytes(1 << 16), time.monotonic()
        while True:
            free = [self.pipes[r][1] for r in range(self.size) if not self.rates[r]]
            slow = any(self.rates.values())
            ready, room, _ = select.select([asks], free, [], 0.002 if slow else None)
            now, passed, last = time.monotonic(), time.monotonic() - last, time.monotonic()
            for rank, rate in self.rates.items():
                _, out = self.pipes[rank]
                if rate:
                    owed[rank] = min(owed[rank] + rate * passed, 0.01 * rate)
                    with contextlib.suppress(BlockingIOError):
                        owed[rank] -= os.write(out, block[: int(owed[rank])])
                elif out in room:
                    with contextlib.suppress(BlockingIOError):
                        os.write(out, block)
            del now
            if ready:
                said = os.read(asks, 100).split()
                if not said:
                    return
                for word in said:
                    what, _, number = word.decode().partition(":")
                    self._strike(self.plan[int(number)]) if what == "strike" else self._heal()
                    os.write(answer, b"1")

    def _strike(self, case: Case) -> None:
        if case.kind == "cpu":
            for loop in range(EACH * (1 + int(3 * case.strength))):
                if not (pid := os.fork()):
                    os.sched_setaffinity(0, [self.cpus[case.rank][loop % EACH]])
                    while os.getppid() != 1:
                        for _ in range(10_000):
                            pass
                    os._exit(0)
                self.loops.append(pid)
        elif case.kind == "quota":
            period = 20_000 if case.number % 2 else 100_000
            self.groups[case.rank].limit(0.2 + 0.2 * case.strength, period)
        elif case.kind == "data":
            self.rates[case.rank] = self._data_rate() / (1.7 + case.strength)
        elif case.kind == "link":
            both = self.size > 2 and case.number % 2 == 0
            self._shape(case.rank, 60 + 100 * case.strength, both=both)
        elif case.kind in SLOW_FOR_ALL:
            for rank in range(self.size):
                self._shape(rank, 60 + 100 * case.strength, both=False)

    def _data_rate(self) -> float:
        """Bytes a second that a rank reads when its steps take as long as they are meant to."""
        tokens = int((self.folder / "tokens").read_text())
        return SAMPLES * tokens * WIDTH * 4 / USUAL

    def _heal(self) -> None:
        self._end_loops()
        for group in self.groups:
            group.limit(0)
        self.rates = dict.fromkeys(range(self.size), 0.0)
        for rank in range(self.size):
            self._in_network(rank, "tc", "qdisc", "del", "dev", "eth0", "root")
            _sh("tc", "qdisc", "del", "dev", f"p{rank}", "root", check=False)

    def _end_loops(self) -> None:
        for pid in self.loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.loops = []

    def _shape(self, rank: int, megabits: float, both: bool) -> None:
        limit = ["root", "tbf", "rate", f"{megabits:.0f}mbit", "burst", "32k", "latency", "50ms"]
        self._in_network(rank, "tc", "qdisc", "replace", "dev", "eth0", *limit)
        if both:
            _sh("tc", "qdisc", "replace", "dev", f"p{rank}", *limit)

    def _in_network(self, rank: int, *words: str) -> None:
        _sh("nsenter", "-t", self.pids[rank], "-n", *words, check=False)


# -- one rank ---------------------------------------------------------------------------------


def _rank(world: World, rank: int, told: int, go: int, asked: int, answers: int) -> int:
    _own_network()
    os.write(told, b"1")
    os.read(go, 1)
    _sh("ip", "address", "add", f"10.9.0.{rank + 1}/24", "dev", "eth0")
    _sh("ip", "link", "set", "eth0", "up")
    os.sched_setaffinity(0, world.cpus[rank])
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="10.9.0.1", MASTER_PORT="29711", GLOO_SOCKET_IFNAME="eth0",
        PACELINE_HOST=f"h{rank}",
    )  # fmt: skip
    for other, (inside, out) in enumerate(world.pipes):
        os.close(out)
        if other != rank:
            os.close(inside)
    if rank:
        os.close(asked)
    import torch

    from paceline import train

    torch.set_num_threads(1)
    session = train.join(run_dir=world.folder / "run", quiet=True, log_every=10, device="cpu")
    Ranks(world, session, rank, asked, answers).run()
    session.close()
    return 0


class Ranks:
    """One rank's side of all runs."""

    def __init__(self, world: World, session: Any, rank: int, asked: int, answers: int) -> None:
        self.world, self.session, self.rank = world, session, rank
        self.asked, self.answers = asked, answers
        self.told: list[dict[str, Any]] = []
        session.event = self._event
        session.say = session._journal.print = lambda text: None

    def _event(self, name: str, **details: Any) -> None:
        if name.startswith("straggler"):
            self.told.append({"step": self.session.progress.step, "event": name, **details})

    def run(self) -> None:
        import torch

        self.tokens = self._calibrated()
        if self.rank == 0:
            (self.world.folder / "tokens").write_text(str(self.tokens))
        out = self.world.folder / "runs.jsonl"
        for case in self.world.plan:
            late = torch.tensor([float(time.time() > self.world.until)])
            if self.session.comms.sum(late)[0]:
                break
            found = self._case(case)
            if self.rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps(found) + "\n")

    def _calibrated(self) -> int:
        """Tokens of a sample with which a step computes for about as long as it should."""
        import torch

        network, tokens = _network(), 32
        for _ in range(3):
            inputs = torch.randn(SAMPLES, tokens, WIDTH)
            for _ in range(3):
                network(inputs).square().mean().backward()
            begun = time.perf_counter()
            for _ in range(10):
                network(inputs).square().mean().backward()
            took = (time.perf_counter() - begun) / 10
            tokens = int(min(512, max(8, tokens * STEP / took)))
        most = self.session.comms.max(torch.tensor([-float(tokens)], dtype=torch.float64))
        return int(-most[0])

    def _ask(self, what: str, number: int, wait: bool) -> None:
        """Has the switch strike or heal."""
        import torch

        if self.rank == 0:
            os.write(self.asked, f"{what}:{number} ".encode())
            if wait:
                os.read(self.answers, 1)
        if wait:
            self.session.comms.sum(torch.zeros(1))

    def _case(self, case: Case) -> dict[str, Any]:
        import torch

        session, mine = self.session, case.rank == self.rank
        session.progress.step = session.progress.epoch = session.progress.offset = 0
        self.told, self.looks = [], []
        self._ask("heal", case.number, wait=True)
        network = _network(1 if case.kind == "short steps" else 4)
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-4))
        update = session._loop.stragglers.update

        def watched(look: Any) -> None:
            self.looks.append(look)
            update(look)

        session._loop.stragglers.update = watched
        larger = 1.8 + case.strength if mine and case.kind == "batch" else 1.0
        data = Samples(self, case, larger)
        given = data if case.kind != "data" or case.number % 2 else Whole(data)
        loader = session.loader(given, SAMPLES * self.world.size, workers=0, collate=None
                                if given is not data else _padded)  # fmt: skip
        if case.kind == "checkpoints":
            session.checkpoints(every="7", resume="never")
        onset = ONSET if case.mid and case.planted else 0
        if (case.planted and not onset) or case.kind in SLOW_FOR_ALL:
            self._ask("strike", case.number, wait=True)
            data.struck = True
        waiting, done = bool(onset), 0
        for _ in session.epochs(
            loader, steps=case.steps, every=12 if case.kind == "evaluation" else 0
        ):
            for batch in loader:
                self._harmless(case, done)
                if waiting and done == ONSET:
                    data.struck, waiting = True, False
                    if case.kind != "batch":
                        self._ask("strike", case.number, wait=False)
                session.step(model(batch.data[0]).square().mean(dim=(1, 2)))
                done += 1
            if case.kind == "evaluation":
                time.sleep(0.02 + 0.05 * self.rank)
        if session._checkpoints.keeper is not None:  # the next case may keep checkpoints, too
            session._checkpoints.keeper.close()
            session._checkpoints.keeper = None
        if onset and case.kind != "batch" and self.rank == 0:
            os.read(self.answers, 1)
        looks = [_kept(look) for look in self.looks] if self.rank == 0 else []
        return {**asdict(case), "size": self.world.size, "onset": onset, "told": self.told,
                "looks": looks}  # fmt: skip

    def _harmless(self, case: Case, step: int) -> None:
        """What may happen to a healthy rank."""
        mine = case.rank == self.rank
        if case.kind == "first step" and mine and step == 0:
            time.sleep(0.5)
        elif case.kind == "garbage" and mine and step in (17, 33):
            time.sleep(0.06)
        elif case.kind == "in turn" and (step * 7 + case.number) % self.world.size == self.rank:
            time.sleep(0.006)


def _network(layers: int = 4) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _padded(samples: list[Any]) -> Any:
    from torch.nn.utils.rnn import pad_sequence

    return (pad_sequence(samples, batch_first=True),)


def _kept(look: Any) -> dict[str, Any]:
    def rounded(tensor: Any, digits: int) -> Any:
        return json.loads(
            json.dumps(tensor.tolist()), parse_float=lambda x: round(float(x), digits)
        )

    return {
        "first_step": look.first_step,
        "every": look.stride,
        "seconds": rounded(look.seconds, 5),
        "samples": rounded(look.samples, 0),
        "elements": rounded(look.elements, 0),
        "facts": rounded(look.vitals, 6),
    }


class Samples:
    """Sequences; their numbers come through a pipe where data may be slow."""

    def __init__(self, ranks: Ranks, case: Case, larger: float) -> None:
        import torch

        self.ranks, self.case, self.larger, self.struck = ranks, case, larger, False
        self.made = 0
        self._store = torch.randn(4 * ranks.tokens, WIDTH)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> Any:
        tokens, case = self.ranks.tokens, self.case
        self.made += 1
        if case.kind == "lengths":
            tokens = int(tokens * (0.7 + 0.6 * ((number * 2654435761) % 1000) / 1000))
        if case.kind == "short steps":
            tokens = max(1, tokens // SHORTER)
        if self.struck:
            tokens = int(tokens * self.larger)
        if case.kind == "hiccup" and case.rank == self.ranks.rank and self.made == 20 * SAMPLES:
            time.sleep(0.15)
        if case.kind == "data":
            left, inside = tokens * WIDTH * 4, self.ranks.world.pipes[self.ranks.rank][0]
            while left:
                left -= len(os.read(inside, min(left, 1 << 16)))
        return self._store[:tokens]


class Whole:
    """The same in whole batches, made ahead in a thread."""

    slow = True

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, ids: Any, draws: Any) -> Any:
        return _padded([self._data[int(one)] for one in ids])

    @property
    def struck(self) -> bool:
        return self._data.struck


# -- what came out ------------------------------------------------------------------------------


def verdict(run: dict[str, Any]) -> str:
    """``right``, or what was wrong."""
    named = [one for one in run["told"] if one["event"] == "straggler"]
    if run["kind"] in CALM:
        return "right" if not named else f"named rank {named[0]['straggler']}: {named[0]['text']}"
    if not named:
        return "nobody named"
    if any(one["straggler"] != run["rank"] for one in named):
        return f"wrong rank: {[one['straggler'] for one in named]}"
    if named[0]["step"] < run["onset"]:
        return "named before the fault"
    right = [one for one in named if one["cause"] == run["kind"]]
    if not right:
        return f"wrong cause: {[one['text'] for one in named]}"
    late = right[0]["step"] - felt(run)
    if named[0]["cause"] != run["kind"]:
        return f"another cause first: {named[0]['text']}"
    return "right" if late <= WITHIN else f"late: after {late} steps"


def felt(run: dict[str, Any]) -> int:
    """The first step that the fault made longer: data that were made ahead hide it for some."""
    if run["kind"] != "data":
        return int(run["onset"])
    waits = [step[0] for look in run["looks"] for step in look["seconds"][run["rank"]]]
    return next(at for at, wait in enumerate(waits) if at >= run["onset"] and wait > 0.3 * STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="planted")
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=500, help="then no further run begins")
    parser.add_argument("--sizes", default="", help="of the worlds: 4,3,2; by the CPUs")
    parser.add_argument("--kinds", default=",".join(FAULTS))
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpus = sorted(os.sched_getaffinity(0))
    sizes = [int(size) for size in typed.sizes.split(",") if size] or (
        [3, 2, 2] if len(cpus) >= 16 else [2]
    )
    import torch  # noqa: F401

    from paceline import train  # noqa: F401  (once, before all forks)

    folder = Path(tempfile.mkdtemp(prefix="stragglers-"))
    begun, worlds, free = time.time(), [], list(cpus)
    kinds = [kind for kind in typed.kinds.split(",") if kind]
    if "quota" in kinds and (why := no_groups()):
        print(f"no runs with a quota: {why}")
        kinds.remove("quota")
    for number, size in enumerate(sizes):
        each = EACH if len(cpus) >= EACH * sum(sizes) else 1
        own = [(free[n * each : (n + 1) * each] or cpus[:1]) * EACH for n in range(size)]
        free = free[size * each :]
        planted = typed.runs // len(sizes) + (number < typed.runs % len(sizes))
        healthy = typed.healthy // len(sizes) + (number < typed.healthy % len(sizes))
        where = folder / str(number)
        where.mkdir()
        plan = cases(number, size, planted, healthy, kinds)
        world = World(number, size, own, [], where, plan, begun + typed.seconds)
        worlds.append(world)
    pids = []
    for world in worlds:
        world.spare = free or cpus
        if not (pid := os.fork()):
            status = 1
            try:
                status = world.run()
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    runs = [
        {"world": world.number, **json.loads(line)}
        for world in worlds
        if (world.folder / "runs.jsonl").exists()
        for line in (world.folder / "runs.jsonl").read_text().splitlines()
    ]
    text = report(runs, time.time() - begun, sizes)
    print(text)
    if typed.out:
        typed.out.mkdir(parents=True, exist_ok=True)
        (typed.out / "stragglers.md").write_text(text)
        with gzip.open(typed.out / "stragglers.json.gz", "wt") as file:
            json.dump(runs, file)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(int(any(ended)))


def report(runs: list[dict[str, Any]], seconds: float, sizes: list[int]) -> str:
    import torch

    lines = [
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch"
        f" {torch.__version__}; worlds of {', '.join(map(str, sizes))} ranks; {seconds:.0f} s",
        "",
        "| run | right | of | steps until named (median, most) |",
        "|---|---|---|---|",
    ]
    wrong = []
    for kind in (*FAULTS, *CALM):
        some = [run for run in runs if run["kind"] == kind]
        if not some:
            continue
        verdicts = [verdict(run) for run in some]
        took = sorted(
            run["told"][0]["step"] - run["onset"]
            for run, said in zip(some, verdicts, strict=True)
            if said == "right" and run["told"]
        )
        steps = f"{took[len(took) // 2]}, {took[-1]}" if took else ""
        lines.append(f"| {kind} | {verdicts.count('right')} | {len(some)} | {steps} |")
        wrong += [
            f"* {kind}: world {run['world']} ({run['size']} ranks), run {run['number']}, rank"
            f" {run['rank']}, {'mid-run' if run['mid'] else 'from the start'}, strength"
            f" {run['strength']:.2f}: {said}"
            for run, said in zip(some, verdicts, strict=True)
            if said != "right"
        ]
    for name, of in (("planted", FAULTS), ("healthy", CALM)):
        some = [verdict(run) for run in runs if run["kind"] in of]
        lines.append(f"| **all {name}** | {some.count('right')} | {len(some)} | |")
    return "\n".join([*lines, "", *(wrong or ["Nothing went wrong."])]) + "\n"


if __name__ == "__main__":
    main()
