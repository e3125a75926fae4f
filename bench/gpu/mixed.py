"""One job of a GPU and a CPU (two ranks over gloo, shares by speed) against a single process.

    python bench/gpu/mixed.py [--device cuda] [--steps 80] [--out FILE]

Needs only torch and this checkout: the script starts both ranks itself, with torchrun's variables.
Prints the shares of the two ranks, the rate of the job against the GPU alone and against even
shares, and the differences of the parameters between the ranks and from a single process. Some
measurements slow the GPU by a millisecond per sample, so that the CPU contributes. ``--device cpu``
tries the script out: both ranks use CPUs and sleep for each sample.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))
BATCH, SAMPLES, CLASSES = 256, 8192, 10


def rank(options: argparse.Namespace, folder: Path) -> None:
    """All trainings of one rank, or of the single process; writes the results to ``folder``."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    from paceline import train

    rank_id = int(os.environ.get("RANK", "0"))
    device = options.device if rank_id == 0 else "cpu"
    os.environ["PACELINE_HOST"] = "gpu" if rank_id == 0 else "cpu"
    results: dict[str, Any] = {}

    class Network(nn.Module):
        def __init__(self, norm: bool) -> None:
            super().__init__()
            self.extra_s = 0.0  # seconds a sample
            self.layers = nn.Sequential(
                nn.Conv2d(3, 64, 3, padding=1),
                nn.BatchNorm2d(64) if norm else nn.Identity(),
                nn.GELU(),
                *(part for _ in range(3) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.GELU())),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
                nn.Linear(64 * 16, CLASSES),
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if options.device == "cpu":  # a trial without a GPU
                time.sleep(len(images) * (0.0002 if rank_id == 0 else 0.002))
            elif rank_id == 0 and self.extra_s:
                torch.cuda.synchronize()
                time.sleep(len(images) * self.extra_s)
            outputs: torch.Tensor = self.layers(images)
            return outputs

    generator = torch.Generator().manual_seed(1)
    count = 512 if options.device == "cpu" else SAMPLES
    pixels = 8 if options.device == "cpu" else 32
    images = torch.randn(count, 3, pixels, pixels, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    batch = 64 if options.device == "cpu" else BATCH

    def training(
        name: str,
        steps: int,
        is_float64: bool = False,
        norm: bool = False,
        extra_s: float = 0.0,
        **loader_options: Any,
    ) -> dict[str, Any]:
        """Train and save the parameters. Returns rate of the second half, shares and last loss."""
        session.progress.step = session.progress.epoch = session.progress.offset = 0
        torch.manual_seed(2)
        network = Network(norm)
        network.extra_s = extra_s
        network = session.place(network.double() if is_float64 else network)
        data = TensorDataset(images.double() if is_float64 else images, labels)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        model = session.prepare(network, optimizer)
        loader = session.loader(data, batch, workers=0, **loader_options)
        shares: list[int] = []
        losses: list[float] = []
        ends: list[float] = []
        for _ in session.epochs(loader, steps=steps):
            for part in loader:
                inputs, targets = part
                sample_losses = cross_entropy(model(inputs), targets, reduction="none")
                session.step(sample_losses)
                if part.last:
                    losses.append(float(sample_losses.detach().mean()))
                    shares.append(part.count)
                    ends.append(time.perf_counter())
        deviation = (
            0.0 if session._training.checksum is None else session._training.checksum.deviation
        )
        half_way = len(ends) // 2
        rate = batch * (len(ends) - 1 - half_way) / (ends[-1] - ends[half_way])
        torch.save([p.detach().double().cpu() for p in network.parameters()], folder / f"{name}.pt")
        last_loss = round(losses[-1], 4)
        return {
            "samples/s": round(rate, 1),
            "shares": shares,
            "loss": last_loss,
            "apart": deviation,
        }

    with train.join(run_dir=folder / f"run-{os.environ.get('WORLD_SIZE', 1)}", seed=3,
                    device=device, quiet=True) as session:  # fmt: skip
        results["joined"] = f"{session.device} mixed={session.comms.mixed}"
        is_single = session.world.size == 1
        prefix = "alone" if is_single else f"both-{rank_id}"
        weights = "even" if is_single else {"gpu": 7, "cpu": 1}
        results["float64, 7 to 1"] = training(
            f"{prefix}-float64", 8, is_float64=True, balance=weights
        )
        results["even"] = training(f"{prefix}-even", 12)
        results["even, GPU slowed"] = training(f"{prefix}-slow-even", 12, extra_s=0.001)
        if not is_single:
            results["auto"] = training(f"{prefix}-auto", options.steps, balance="auto")
            results["auto, GPU slowed"] = training(
                f"{prefix}-slow-auto", options.steps // 2, extra_s=0.001, balance="auto"
            )
            results["auto, batch norm"] = training(f"{prefix}-norm", 20, norm=True, balance="auto")
            results["7 to 1 in pieces of 16"] = training(
                f"{prefix}-pieces", 8, limit=16, balance=weights
            )
            results["auto, dropped where useless"] = training(
                f"{prefix}-drop", options.steps // 2, balance="auto", drop_slow=True
            )
            session.comms.barrier()
    (folder / f"{prefix}.json").write_text(json.dumps(results))


def start(options: argparse.Namespace, folder: Path, size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number in range(size):
        spare = len(os.sched_getaffinity(0)) - 1
        threads = max(1, min(8, spare)) if number and options.device != "cpu" else 1
        environ = {
            **os.environ,
            "RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip
        argv = [sys.executable, __file__, "--device", options.device, "--steps",
                str(options.steps), "--folder", str(folder)]  # fmt: skip
        processes.append(subprocess.Popen(argv, env=environ))
    codes = [process.wait(180) for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.folder:
        rank(options, options.folder)
        return
    import torch

    lines = [f"# A GPU and a CPU in one job, {datetime.date.today()}", ""]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start_time = time.monotonic()
        start(options, folder, 1)
        start(options, folder, 2)
        duration_s = time.monotonic() - start_time
        results = {name: json.loads((folder / f"{name}.json").read_text())
                 for name in ("alone", "both-0", "both-1")}  # fmt: skip

        def largest_difference(first: str, second: str) -> float:
            pairs = zip(torch.load(folder / first), torch.load(folder / second), strict=True)
            return max(float((a - b).norm() / a.norm()) for a, b in pairs)

        for process_name, measurements in results.items():
            lines.append(f"* {process_name}: {measurements.pop('joined')}")
            for kind, values in measurements.items():
                shares = values["shares"]
                changes = [n for n in range(1, len(shares)) if shares[n] != shares[n - 1]]
                lines.append(
                    f"    * {kind}: {values['samples/s']} samples/s, loss {values['loss']}, shares"
                    f" {shares[0]} … {shares[-1]}, changes at steps {changes}; parameters"
                    f" differ by {values['apart']:.1e} at the end"
                )
        lines += ["", "Largest relative difference of parameters:", ""]
        for kind in ("float64", "even", "auto", "slow-auto", "norm", "pieces"):
            gpu, cpu = f"both-0-{kind}.pt", f"both-1-{kind}.pt"
            text = f"* {kind}: between the ranks {largest_difference(gpu, cpu):.1e}"
            if kind in ("float64", "even"):
                text += f", from one process {largest_difference(gpu, f'alone-{kind}.pt'):.1e}"
            lines.append(text)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU: a trial"
    lines += ["", f"{device}, torch {torch.__version__}, {os.cpu_count()} CPUs, {duration_s:.0f} s"]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
