"""Shares by speed on real ranks: how much of the sum of all rates a job reaches, and how soon.

    python bench/balance/balance.py [--out FILE] [CASE…]

Ranks over gloo on this machine, started by torchrun's variables. A rank's samples cost time by
sleeping (``sleep``: the machine's own load matters little), or it computes under a CPU quota of a
control group (``quota``: needs root and control groups, version 1 or 2). The sum of the rates is
that of ranks that train by themselves at the same time, under the same conditions, measured before;
a job's is that of its last steps. Settled is the step after which the shares were within a tenth of
the last ones.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))


@dataclass(frozen=True)
class Case:
    """Ranks and what they cost.

    Attributes:
        costs: Seconds of a sample on each rank, by sleeping.
        quotas: Part of a CPU that each rank may have, by control group; 0: all of it.
        later: From the middle of the run to three quarters: factor of the last rank's cost.
        batch: Global batch.
        layers: Of what computes under a quota; a sample costs in proportion.
    """

    costs: tuple[float, ...] = ()
    quotas: tuple[float, ...] = ()
    later: float = 1.0
    batch: int = 64
    layers: int = 4

    @property
    def ranks(self) -> int:
        return len(self.costs or self.quotas)


CASES = {
    "2 ranks, one three times as slow": Case((0.003, 0.009)),
    "3 ranks, one three times as slow": Case((0.003, 0.003, 0.009), batch=96),
    "4 ranks, costs of 1, 2, 3 and 4": Case((0.003, 0.006, 0.009, 0.012), batch=128),
    "a GPU and a CPU, 20 to 1": Case((0.0006, 0.012), batch=256),
    "2 ranks, one three times as slow for a quarter of the steps": Case((0.003, 0.003), later=3.0),
    "2 ranks, one with a third of a CPU": Case(quotas=(1.0, 0.33), batch=128),
    "2 ranks, one with a third of a CPU, longer steps": Case(
        quotas=(1.0, 0.33), batch=128, layers=16
    ),
}
STEPS, FEW = 80, 12


def rank(case: Case, folder: Path, balance: str, steps: int) -> None:
    """One rank's training: times and shares of its steps."""
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    from paceline import train

    torch.set_num_threads(1)
    mine = int(os.environ["CASE_RANK"])
    last = mine == case.ranks - 1
    computes = bool(case.quotas)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
            # Much computing and few parameters: what a step costs besides its samples is little.
            maps = (1, *[24] * case.layers)
            both = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(maps)]
            self.inner = nn.Sequential(*both, nn.AdaptiveAvgPool2d(4)) if computes else None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not computes:
                step = session.progress.step
                slow = case.later if last and steps // 2 <= step < steps * 3 // 4 else 1.0
                time.sleep(case.costs[mine] * slow * len(inputs))
                return self.layers(inputs)
            image = inputs[:, None, None, :].expand(-1, -1, 32, -1)
            return self.layers(self.inner(image).mean(1).flatten(1))

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case.batch * 16, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
    ends, shares = [], []
    with train.join(run_dir=folder / "run", seed=1, quiet=True, device="cpu") as session:
        network = session.place(Network())
        if not computes:
            network = session.place(network.double())
            data = TensorDataset(*(one.double() for one in data.tensors))
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-3))
        loader = session.loader(data, case.batch, balance=balance)
        if meeting := os.environ.get("CASE_MEETING"):
            meet(Path(meeting), mine, case.ranks)
        for _ in session.epochs(loader, steps=steps):
            for batch in loader:
                wanted, targets = batch
                session.step(mse_loss(model(wanted), targets, reduction="none")[:, 0])
                ends.append(time.perf_counter())
                shares.append(batch.count)
        flat = torch.cat([one.detach().double().flatten() for one in network.parameters()])
        checked = [*flat[:2000].tolist()]
    found = {"ends": ends, "shares": shares, "end": checked}
    (folder / f"{mine}.json").write_text(json.dumps(found))


def meet(folder: Path, mine: int, ranks: int) -> None:
    """Until all of them are there: under a quota a process takes long to import torch."""
    (folder / f"ready-{mine}").touch()
    while not all((folder / f"ready-{other}").exists() for other in range(ranks)):
        time.sleep(0.01)


class Group:
    """A control group with so much of a CPU."""

    def __init__(self, name: str, part: float) -> None:
        root = Path("/sys/fs/cgroup")
        self.folder = (root if (root / "cgroup.controllers").exists() else root / "cpu") / name
        self.folder.mkdir(exist_ok=True)
        period = 100_000  # as containers have it
        if (self.folder / "cpu.cfs_quota_us").exists():
            (self.folder / "cpu.cfs_period_us").write_text(str(period))
            (self.folder / "cpu.cfs_quota_us").write_text(str(int(part * period)))
        else:
            if not (self.folder / "cpu.max").exists():
                (root / "cgroup.subtree_control").write_text("+cpu")
            (self.folder / "cpu.max").write_text(f"{int(part * period)} {period}")

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        self.folder.rmdir()


def run(name: str, case: Case, folder: Path, balance: str, ranks: list[int], steps: int,
        meeting: Path | None = None) -> Any:  # fmt: skip
    """What these ranks of a case found, together; others that begin with them meet in a folder."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started, groups = [], []
    for place, mine in enumerate(ranks):
        environ = {
            **os.environ, "RANK": str(place), "WORLD_SIZE": str(len(ranks)), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CASE_RANK": str(mine),
            "PACELINE_HOST": f"n{mine + 1}",
            **({"CASE_MEETING": str(meeting)} if meeting else {}),
        }  # fmt: skip
        argv = [sys.executable, __file__, name, "--folder", str(folder), "--balance", balance]
        argv += ["--batch", str(case.batch)]
        one = subprocess.Popen([*argv, "--steps", str(steps)], env=environ, stdout=subprocess.PIPE)
        started.append(one)
        if case.quotas and case.quotas[mine]:
            groups.append(Group(f"balance-{os.getpid()}-{mine}", case.quotas[mine]))
            groups[-1].add(one.pid)
    try:
        said = [one.communicate(timeout=300)[0].decode() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
        for group in groups:
            group.remove()
    if any(one.returncode for one in started):
        raise SystemExit(f"{name}: ranks failed\n{said[0]}")
    return [json.loads((folder / f"{mine}.json").read_text()) for mine in ranks]


def rate(found: Any, case: Case, start: int, stop: int) -> float:
    """Samples a second of the steps from one to the other, by their median.

    Under a quota by all of them: there some wait for the next period, and others do not.
    """
    ends = found["ends"][start:stop]
    if case.quotas:
        return case.batch * (len(ends) - 1) / (ends[-1] - ends[0])
    return case.batch / statistics.median(b - a for a, b in itertools.pairwise(ends))


def alone(name: str, case: Case, folder: Path) -> list[float]:
    """Each rank's own rate, by itself but at the same time: two CPUs may be one core's threads.

    What computes does so with the part of a batch that it would have: many samples at once take
    longer than as many in smaller batches.
    """
    parts = case.quotas or (1.0,) * case.ranks
    sizes = [case.batch] * case.ranks
    if case.quotas:
        sizes = [round(case.batch * part / sum(parts)) for part in parts]

    def one(rank: int) -> Any:
        where, asked = folder / f"alone-{rank}", replace(case, batch=sizes[rank])
        steps = 3 * FEW if case.quotas else FEW
        return run(name, asked, where, "even", [rank], steps, folder)[0]["ends"]

    with ThreadPoolExecutor(case.ranks) as pool:
        ends = [*pool.map(one, range(case.ranks))]
    begin, end = max(one[3] for one in ends), min(one[-1] for one in ends)
    rates = []
    for each, size in zip(ends, sizes, strict=True):
        both = [moment for moment in each if begin <= moment <= end]
        rates.append(size * (len(both) - 1) / (both[-1] - both[0]))
    return rates


def settled(shares: list[int], start: int, stop: int) -> int:
    """Steps after ``start`` until the share was about what it is before ``stop``."""
    last = shares[stop - 1]
    off = [n for n in range(start, stop) if abs(shares[n] - last) > max(1, 0.1 * last)]
    return off[-1] + 1 - start if off else 0


def measured(name: str, case: Case, folder: Path) -> list[str]:
    """Rows of the table."""
    own = alone(name, case, folder)
    both, rows = list(range(case.ranks)), []
    even = run(name, case, folder / "even", "even", both, FEW)
    steps = STEPS if case.later == 1 else 2 * STEPS  # 20 of each part are for finding the shares
    auto = run(name, case, folder / "auto", "auto", both, steps)
    half, late = steps // 2, steps * 3 // 4
    parts = {"": (0, half if case.later != 1 else steps)}
    if case.later != 1:
        parts |= {", slow": (half, late), ", quick again": (late, steps)}
    for what, (start, stop) in parts.items():
        rates = [*own[:-1], own[-1] / (case.later if what == ", slow" else 1.0)]
        reached = rate(auto[0], case, start + 20, stop) / sum(rates)
        evenly = rate(even[0], case, 3, FEW) / sum(own) if not what else None
        last = [one["shares"][stop - 1] for one in auto]
        rows.append(
            f"| {name}{what} | {sum(rates):.0f} | {'' if evenly is None else f'{evenly:.2f}'} |"
            f" {reached:.2f} | {settled(auto[0]['shares'], start, stop)} |"
            f" {', '.join(map(str, last))} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="all without")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--balance", default="auto")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, help="of a rank")
    options = parser.parse_args()
    if options.folder:
        case = replace(CASES[options.cases[0]], batch=options.batch)
        rank(case, options.folder, options.balance, options.steps)
        return
    import torch

    lines = [
        f"# Shares by speed, {datetime.date.today()}", "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch"
        f" {torch.__version__}; load {os.getloadavg()[0]:.1f} at the start", "",
        "| case | sum of the rates, samples/s | even shares reach | by speed | settled after |"
        " last shares |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            if options.cases and name not in options.cases:
                continue
            lines += measured(name, case, Path(folder) / str(number))
            print(lines[-1], flush=True)
    lines += ["", f"Load at the end {os.getloadavg()[0]:.1f}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
