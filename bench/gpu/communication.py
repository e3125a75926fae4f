"""Checks the communication methods on one GPU, in less than a minute.

    python bench/gpu/communication.py [--device cuda] [--out FILE]

1. Codecs: GPU and CPU decode to the same bits. Prints the rates of encoding and decoding.
2. NCCL with one rank: each method within DDP, in its own stream, against exact averages. No
   method hides NaN.
3. Two ranks over gloo with the model on the GPU: complete sessions. The ranks' parameters agree
   (``verify``), and a resumed session ends with the same bits.

``--device cpu`` tries the script out. Exits with status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import train
from paceline.train import parallel
from paceline.train.comms import Comms
from paceline.train.reduce import codecs
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.reduce.registry import REDUCERS
from paceline.train.world import World

CODECS = {"fp16": codecs.FP16, "bf16": codecs.BF16, "int8": codecs.INT8, "int4": codecs.INT4}
STEPS = 24


def synchronized_time(device: str) -> float:
    """Time in seconds after the device has finished its work."""
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def check_codecs(device: str) -> dict[str, str]:
    """Check each codec for equal bits and small errors, and measure its rates."""
    torch.manual_seed(0)
    values, results = torch.randn(1 << 24 if device != "cpu" else 1 << 20), {}
    values[5], values[1000] = math.inf, math.nan
    device_values = values.to(device)
    for name, code in CODECS.items():
        message = torch.zeros(code.message_bytes(len(values)), dtype=torch.uint8, device=device)
        residual, decoded, decoded_on_cpu = (
            device_values.clone(),
            torch.empty_like(device_values),
            torch.empty_like(values),
        )
        code.encode(residual, message, keep_error=True)
        code.decode(message, decoded)
        code.decode(message.cpu(), decoded_on_cpu)
        # NaN is not equal to itself
        is_equal = torch.equal(decoded.cpu().nan_to_num(7.0), decoded_on_cpu.nan_to_num(7.0))
        assert is_equal, f"{name}: GPU and CPU decode different values"
        assert bool(residual.isfinite().all()), f"{name}: the residual is not finite"
        assert not decoded[[5, 1000]].isfinite().any(), f"{name}: infinity and NaN became finite"
        finite = decoded.isfinite()
        error = float((decoded + residual - device_values)[finite].abs().max())
        assert error < 1e-5, f"{name}: error {error} is not in the residual"
        seconds = []
        for _ in range(6):
            start = synchronized_time(device)
            code.encode(residual.copy_(device_values), message, keep_error=True)
            middle = synchronized_time(device)
            code.decode(message, decoded, add=True)
            seconds.append((middle - start, synchronized_time(device) - middle))
        rates = [4e-9 * len(values) / min(durations) for durations in zip(*seconds, strict=True)]
        results[name] = f"encode {rates[0]:.1f} GB/s, decode {rates[1]:.1f} GB/s of float32"
    return results


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 4),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def batch_of(step: int, device: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(step)).to(device)
    return inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1)


def check_ddp(device: str) -> dict[str, str]:
    """One rank over NCCL: each method within DDP."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_port()), RANK="0", WORLD_SIZE="1"
    )
    target = torch.device(device if device == "cpu" else f"{device}:0")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    torch.manual_seed(0)
    initial, results, losses = Net(1024 if device != "cpu" else 128).to(target), {}, {}
    for name, method in REDUCERS.items():
        module = copy.deepcopy(initial)
        comms = Comms(World(), target)
        model = parallel.replicate(module, target, comms)
        exchange = GradientExchange(model, comms)
        exchange.set_bucket_sizes(1 << 20, 1 << 18)
        exchange.reducer = method(exchange.context())
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step in range(STEPS):
            if step == STEPS // 2:  # as a resumed run does
                state = exchange.reducer.state()
                exchange.reducer = method(exchange.context())
                exchange.reducer.load_state(checkpoint_round_trip(state))
            if step == 4:
                start = synchronized_time(device)
            inputs, targets = batch_of(step, str(target))
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        seconds = (synchronized_time(device) - start) / (STEPS - 4)
        losses[name] = float(loss.detach())
        assert all(bool(parameter.isfinite().all()) for parameter in module.parameters()), name
        limit = 0.02 if name in ("fp16", "bf16", "int8") else 0.2
        assert abs(losses[name] - losses["exact"]) < limit, (name, losses)
        module.zero_grad()
        inputs, targets = batch_of(0, str(target))
        (cross_entropy(model(inputs), targets) * math.nan).backward()
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        assert not any(bool(parameter.isfinite().all()) for parameter in grads[-2:]), (
            f"{name} hides NaN"
        )
        results[name] = f"loss {losses[name]:.4f}, {seconds * 1e3:.2f} ms a step"
        exchange.close()
    dist.destroy_process_group()
    return results


def checkpoint_round_trip(state: object) -> dict[str, object]:
    """A state after a round trip through a checkpoint, with its tensors on the CPU."""
    from paceline.train.checkpoints.format import pack, unpack

    tensors: dict[str, Tensor] = {}
    packed = json.loads(json.dumps(pack(state, tensors)))
    return dict(unpack(packed, {name: tensor.cpu() for name, tensor in tensors.items()}))


def train_session(folder: Path, device: str, method_name: str, resume: str = "auto") -> None:
    """One session on two ranks over gloo; rank 0 saves the end to ``folder``."""
    torch.manual_seed(1)
    with train.join(
        run_dir=folder, seed=4, device=device, backend="gloo", check_every=6, quiet=True
    ) as joined_session:
        network = joined_session.place(Net(256))
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        model = joined_session.prepare(network, optimizer, communication=method_name)
        inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))
        loader = joined_session.loader(data, 64)
        joined_session.checkpoints(every="12", keep=0, resume=resume)
        for _ in joined_session.epochs(loader, steps=STEPS):
            for batch, targets in loader:
                joined_session.step(cross_entropy(model(batch), targets, reduction="none"))
        joined_session.verify()
        loss = cross_entropy(
            network(data.tensors[0].to(joined_session.device)),
            data.tensors[1].to(joined_session.device),
        )
        method = joined_session.models.first.exchange.reducer  # type: ignore[union-attr]
        if joined_session.world.rank == 0:
            state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
            torch.save((state, float(loss), method and method.name), folder / "end.pt")


def rank(folder: Path, device: str) -> None:
    """All sessions of one of two ranks."""
    dist.init_process_group("gloo")
    for method_name in (*REDUCERS, "auto"):
        uninterrupted, resumed = folder / method_name / "whole", folder / method_name / "parts"
        train_session(uninterrupted, device, method_name)
        if dist.get_rank() == 0:
            shutil.copytree(uninterrupted / "checkpoints", resumed / "checkpoints")
        dist.barrier()
        train_session(resumed, device, method_name, resume="12")
    dist.destroy_process_group()


def check_two_ranks(device: str) -> dict[str, str]:
    """Sessions of two ranks over gloo, uninterrupted and resumed."""
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, free_port = Path(temporary), str(find_free_port())
        common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                  "MASTER_PORT": free_port, "MASTER_ADDR": "127.0.0.1",
                  "OMP_NUM_THREADS": "2"}  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--device", device, "--rank-in", temporary],
                env={**common, "RANK": str(number), "LOCAL_RANK": "0"},
            )
            for number in range(2)
        ]
        assert not any(process.wait(120) for process in ranks), "a rank failed"
        for method_name in (*REDUCERS, "auto"):
            uninterrupted, resumed = (
                torch.load(folder / method_name / name / "end.pt") for name in ("whole", "parts")
            )
            is_equal = all(
                torch.equal(uninterrupted[0][name], resumed[0][name]) for name in uninterrupted[0]
            )
            exact = torch.load(folder / "exact" / "whole" / "end.pt")[1]
            losses = f"loss {uninterrupted[1]:.4f} (exact {exact:.4f})"
            results[method_name] = (
                f"{losses}, resumed with {'the same bits' if is_equal else 'different bits'}"
            )
            assert is_equal or method_name == "auto", results[method_name]
            assert abs(uninterrupted[1] - exact) < (0.3 if method_name == "local" else 0.05), losses
    return results


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-in", type=Path)
    options = parser.parse_args()
    if options.rank_in:
        rank(options.rank_in, options.device)
        return
    start = time.perf_counter()
    name = "a CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    lines = [f"# Communication methods on {name}", "", f"torch {torch.__version__}", ""]
    for title, part in (
        ("Codecs", check_codecs),
        ("One rank", check_ddp),
        ("Two ranks, gloo", check_two_ranks),
    ):
        print(title, flush=True)
        lines += [f"## {title}", "", *(f"* {a}: {b}" for a, b in part(options.device).items()), ""]
        print("\n".join(lines[lines.index(f"## {title}") + 2 :]), flush=True)
    lines.append(f"{time.perf_counter() - start:.0f} s in total.")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
