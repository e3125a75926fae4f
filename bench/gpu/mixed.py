"""One job of a GPU and a CPU: two ranks over gloo, shares by speed, against one process alone.

    python bench/gpu/mixed.py [--device cuda] [--steps 80] [--out FILE]

Needs nothing but torch and this checkout: the script starts both ranks itself, by torchrun's
variables. It says which shares the two come to and how fast the job is beside the GPU alone and
beside even shares; that the ranks' parameters are those of one process; and how far apart the two
devices' rounding took them. The GPU is also slowed by a millisecond a sample, so that a CPU beside
it is worth something.
``--device cpu`` tries the script out: both ranks are then CPUs, and sleep for each sample.
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
    """What each rank does; also the one that is alone."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    from paceline import train

    mine = int(os.environ.get("RANK", "0"))
    device = options.device if mine == 0 else "cpu"
    os.environ["PACELINE_HOST"] = "gpu" if mine == 0 else "cpu"
    found: dict[str, Any] = {}

    class Network(nn.Module):
        def __init__(self, norm: bool) -> None:
            super().__init__()
            self.slowed = 0.0  # seconds a sample
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
                time.sleep(len(images) * (0.0002 if mine == 0 else 0.002))
            elif mine == 0 and self.slowed:
                torch.cuda.synchronize()
                time.sleep(len(images) * self.slowed)
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
        wide: bool = False,
        norm: bool = False,
        slowed: float = 0.0,
        **asked: Any,
    ) -> dict[str, Any]:
        """Rate of the last half, shares, and parameters at the end."""
        session.progress.step = session.progress.epoch = session.progress.offset = 0
        torch.manual_seed(2)
        network = Network(norm)
        network.slowed = slowed
        network = session.place(network.double() if wide else network)
        data = TensorDataset(images.double() if wide else images, labels)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        model = session.prepare(network, optimizer)
        loader = session.loader(data, batch, workers=0, **asked)
        shares: list[int] = []
        losses: list[float] = []
        ends: list[float] = []
        for _ in session.epochs(loader, steps=steps):
            for part in loader:
                inputs, targets = part
                each = cross_entropy(model(inputs), targets, reduction="none")
                session.step(each)
                if part.last:
                    losses.append(float(each.detach().mean()))
                    shares.append(part.count)
                    ends.append(time.perf_counter())
        apart = 0.0 if session._training.checksum is None else session._training.checksum.deviation
        half = len(ends) // 2
        rate = batch * (len(ends) - 1 - half) / (ends[-1] - ends[half])
        torch.save([p.detach().double().cpu() for p in network.parameters()], folder / f"{name}.pt")
        last = round(losses[-1], 4)
        return {"samples/s": round(rate, 1), "shares": shares, "loss": last, "apart": apart}

    with train.join(run_dir=folder / f"run-{os.environ.get('WORLD_SIZE', 1)}", seed=3,
                    device=device, quiet=True) as session:  # fmt: skip
        found["joined"] = f"{session.device} mixed={session.comms.mixed}"
        alone = session.world.size == 1
        where = "alone" if alone else f"both-{mine}"
        weights = "even" if alone else {"gpu": 7, "cpu": 1}
        found["float64, 7 to 1"] = training(f"{where}-float64", 8, wide=True, balance=weights)
        found["even"] = training(f"{where}-even", 12)
        found["even, GPU slowed"] = training(f"{where}-slow-even", 12, slowed=0.001)
        if not alone:
            found["auto"] = training(f"{where}-auto", options.steps, balance="auto")
            found["auto, GPU slowed"] = training(
                f"{where}-slow-auto", options.steps // 2, slowed=0.001, balance="auto"
            )
            found["auto, batch norm"] = training(f"{where}-norm", 20, norm=True, balance="auto")
            found["7 to 1 in pieces of 16"] = training(
                f"{where}-pieces", 8, limit=16, balance=weights
            )
            found["auto, dropped where useless"] = training(
                f"{where}-drop", options.steps // 2, balance="auto", drop_slow=True
            )
            session.comms.barrier()
    (folder / f"{where}.json").write_text(json.dumps(found))


def start(options: argparse.Namespace, folder: Path, size: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
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
        started.append(subprocess.Popen(argv, env=environ))
    codes = [one.wait(180) for one in started]
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.monotonic()
        start(options, folder, 1)
        start(options, folder, 2)
        took = time.monotonic() - begun
        found = {one: json.loads((folder / f"{one}.json").read_text())
                 for one in ("alone", "both-0", "both-1")}  # fmt: skip

        def apart(one: str, other: str) -> float:
            pairs = zip(torch.load(folder / one), torch.load(folder / other), strict=True)
            return max(float((a - b).norm() / a.norm()) for a, b in pairs)

        for who, what in found.items():
            lines.append(f"* {who}: {what.pop('joined')}")
            for kind, values in what.items():
                seen = values["shares"]
                changes = [n for n in range(1, len(seen)) if seen[n] != seen[n - 1]]
                lines.append(
                    f"    * {kind}: {values['samples/s']} samples/s, loss {values['loss']}, shares"
                    f" {seen[0]} … {seen[-1]}, others from steps {changes}; parameters were"
                    f" {values['apart']:.1e} apart at the end"
                )
        lines += ["", "Relative difference of parameters, the largest of all tensors:", ""]
        for kind in ("float64", "even", "auto", "slow-auto", "norm", "pieces"):
            one, other = f"both-0-{kind}.pt", f"both-1-{kind}.pt"
            text = f"* {kind}: between the ranks {apart(one, other):.1e}"
            if kind in ("float64", "even"):
                text += f", from one process {apart(one, f'alone-{kind}.pt'):.1e}"
            lines.append(text)
    what = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU: a trial"
    lines += ["", f"{what}, torch {torch.__version__}, {os.cpu_count()} CPUs, {took:.0f} s"]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
