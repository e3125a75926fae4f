"""Load balancing by speed on real ranks: fraction of the summed rates that a job reaches.

    python bench/balance/balance.py [--out FILE] [CASE…]

The ranks use gloo on this machine and are started with torchrun's variables. A rank either sleeps
for each sample, which depends little on the machine's load, or computes under the CPU quota of a
control group, which needs root and control groups (version 1 or 2). The sum of the rates is
measured first, on ranks that train separately at the same time under the same conditions. The rate
of a job is that of its last steps. A job has settled once its shares stay within a tenth of the
last ones.
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
    """Ranks and the cost of their samples.

    Attributes:
        costs: Seconds that each rank sleeps for a sample.
        quotas: Fraction of a CPU that each rank's control group allows; 0 means no limit.
        later: Factor on the last rank's cost from the middle of the run to three quarters.
        batch: Global batch size.
        layers: Convolutions of a network that computes under a quota; its cost is proportional.
    """

    costs: tuple[float, ...] = ()
    quotas: tuple[float, ...] = ()
    slow_factor: float = 1.0
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
    "2 ranks, one three times as slow for a quarter of the steps": Case(
        (0.003, 0.003), slow_factor=3.0
    ),
    "2 ranks, one with a third of a CPU": Case(quotas=(1.0, 0.33), batch=128),
    "2 ranks, one with a third of a CPU, longer steps": Case(
        quotas=(1.0, 0.33), batch=128, layers=16
    ),
}
STEPS, FEW_STEPS = 80, 12


def rank(case: Case, folder: Path, balance: str, steps: int) -> None:
    """Train one rank; write the end times and shares of its steps to ``folder``."""
    import torch
    from torch import nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import TensorDataset

    from paceline import train

    torch.set_num_threads(1)
    case_rank = int(os.environ["CASE_RANK"])
    is_last = case_rank == case.ranks - 1
    computes = bool(case.quotas)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
            # Much computing and few parameters keep the fixed cost of a step low.
            maps = (1, *[24] * case.layers)
            convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(maps)]
            self.inner = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(4)) if computes else None

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not computes:
                step = session.progress.step
                factor = (
                    case.slow_factor if is_last and steps // 2 <= step < steps * 3 // 4 else 1.0
                )
                time.sleep(case.costs[case_rank] * factor * len(inputs))
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
            data = TensorDataset(*(value.double() for value in data.tensors))
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-3))
        loader = session.loader(data, case.batch, balance=balance)
        if barrier_folder := os.environ.get("CASE_MEETING"):
            wait_for_all(Path(barrier_folder), case_rank, case.ranks)
        for _ in session.epochs(loader, steps=steps):
            for batch in loader:
                features, targets = batch
                session.step(mse_loss(model(features), targets, reduction="none")[:, 0])
                ends.append(time.perf_counter())
                shares.append(batch.count)
        flat = torch.cat([value.detach().double().flatten() for value in network.parameters()])
        checked = [*flat[:2000].tolist()]
    result = {"ends": ends, "shares": shares, "end": checked}
    (folder / f"{case_rank}.json").write_text(json.dumps(result))


def wait_for_all(folder: Path, case_rank: int, ranks: int) -> None:
    """Wait for all ranks, because importing torch under a quota takes long."""
    (folder / f"ready-{case_rank}").touch()
    while not all((folder / f"ready-{rank}").exists() for rank in range(ranks)):
        time.sleep(0.01)


class ControlGroup:
    """A control group that may use a fraction ``part`` of a CPU."""

    def __init__(self, name: str, part: float) -> None:
        root = Path("/sys/fs/cgroup")
        self.folder = (root if (root / "cgroup.controllers").exists() else root / "cpu") / name
        self.folder.mkdir(exist_ok=True)
        period = 100_000  # the period that containers use
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
        barrier_folder: Path | None = None) -> Any:  # fmt: skip
    """Results of ranks of a case in one job; jobs with one ``barrier_folder`` start together."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started, groups = [], []
    for index, case_rank in enumerate(ranks):
        environ = {
            **os.environ, "RANK": str(index), "WORLD_SIZE": str(len(ranks)), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CASE_RANK": str(case_rank),
            "PACELINE_HOST": f"n{case_rank + 1}",
            **({"CASE_MEETING": str(barrier_folder)} if barrier_folder else {}),
        }  # fmt: skip
        argv = [sys.executable, __file__, name, "--folder", str(folder), "--balance", balance]
        argv += ["--batch", str(case.batch)]
        process = subprocess.Popen(
            [*argv, "--steps", str(steps)], env=environ, stdout=subprocess.PIPE
        )
        started.append(process)
        if case.quotas and case.quotas[case_rank]:
            groups.append(
                ControlGroup(f"balance-{os.getpid()}-{case_rank}", case.quotas[case_rank])
            )
            groups[-1].add(process.pid)
    try:
        outputs = [process.communicate(timeout=300)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        for group in groups:
            group.remove()
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}: ranks failed\n{outputs[0]}")
    return [json.loads((folder / f"{case_rank}.json").read_text()) for case_rank in ranks]


def rate(result: Any, case: Case, start: int, stop: int) -> float:
    """Samples per second of the steps from ``start`` to ``stop``.

    From the median step, or under a quota from the total, since only some steps wait for a period.
    """
    ends = result["ends"][start:stop]
    if case.quotas:
        return case.batch * (len(ends) - 1) / (ends[-1] - ends[0])
    return case.batch / statistics.median(b - a for a, b in itertools.pairwise(ends))


def isolated_rates(name: str, case: Case, folder: Path) -> list[float]:
    """Rate of each rank in its own job, all at the same time: two CPUs may be threads of one core.

    Under a quota, a rank gets its proportional part of the batch, because the time of a sample
    depends on the batch size.
    """
    parts = case.quotas or (1.0,) * case.ranks
    sizes = [case.batch] * case.ranks
    if case.quotas:
        sizes = [round(case.batch * part / sum(parts)) for part in parts]

    def measure_rank(rank: int) -> Any:
        subfolder, sized_case = folder / f"alone-{rank}", replace(case, batch=sizes[rank])
        # As many steps as take about the same time on all ranks.
        steps = FEW_STEPS * (3 if case.quotas else round(max(case.costs) / case.costs[rank]))
        return run(name, sized_case, subfolder, "even", [rank], steps, folder)[0]["ends"]

    with ThreadPoolExecutor(case.ranks) as pool:
        ends_by_rank = [*pool.map(measure_rank, range(case.ranks))]
    start, end = max(ends[3] for ends in ends_by_rank), min(ends[-1] for ends in ends_by_rank)
    rates = []
    for rank_ends, size in zip(ends_by_rank, sizes, strict=True):
        inside = [moment for moment in rank_ends if start <= moment <= end]
        rates.append(size * (len(inside) - 1) / (inside[-1] - inside[0]))
    return rates


def settling_steps(shares: list[int], start: int, stop: int) -> int:
    """Steps after ``start`` until the share stays within a tenth of that before ``stop``."""
    final = shares[stop - 1]
    unsettled = [n for n in range(start, stop) if abs(shares[n] - final) > max(1, 0.1 * final)]
    return unsettled[-1] + 1 - start if unsettled else 0


def measure(name: str, case: Case, folder: Path) -> list[str]:
    """Measure a case; rows of the table."""
    isolated = isolated_rates(name, case, folder)
    all_ranks, rows = list(range(case.ranks)), []
    even = run(name, case, folder / "even", "even", all_ranks, FEW_STEPS)
    # The first 20 steps of each part are for adjusting the shares.
    steps = STEPS if case.slow_factor == 1 else 2 * STEPS
    auto = run(name, case, folder / "auto", "auto", all_ranks, steps)
    half_way, late_start = steps // 2, steps * 3 // 4
    parts = {"": (0, half_way if case.slow_factor != 1 else steps)}
    if case.slow_factor != 1:
        parts |= {", slow": (half_way, late_start), ", quick again": (late_start, steps)}
    for suffix, (start, stop) in parts.items():
        rates = [*isolated[:-1], isolated[-1] / (case.slow_factor if suffix == ", slow" else 1.0)]
        reached = rate(auto[0], case, start + 20, stop) / sum(rates)
        even_share = rate(even[0], case, 3, FEW_STEPS) / sum(isolated) if not suffix else None
        last_shares = [result["shares"][stop - 1] for result in auto]
        rows.append(
            f"| {name}{suffix} | {sum(rates):.0f}"
            f" | {'' if even_share is None else f'{even_share:.2f}'} |"
            f" {reached:.2f} | {settling_steps(auto[0]['shares'], start, stop)} |"
            f" {', '.join(map(str, last_shares))} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--balance", default="auto")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, help="global batch size")
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
        "| case | sum of the rates, samples/s | even shares reach | by speed |"
        " settled after steps | last shares |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, case) in enumerate(CASES.items()):
            if options.cases and name not in options.cases:
                continue
            lines += measure(name, case, Path(folder) / str(number))
            print(lines[-1], flush=True)
    lines += ["", f"Load at the end {os.getloadavg()[0]:.1f}."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
