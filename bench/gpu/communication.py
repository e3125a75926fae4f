"""Ways to send fewer bytes on one GPU, in less than a minute: what one card can show of them.

    python bench/gpu/communication.py [--device cuda] [--out FILE]

1. Codes: a GPU decodes what a CPU decodes, to the bit; how quick both are.
2. NCCL in a world of one: each way within DDP, in a stream of its own, beside exact averages.
3. Two ranks over gloo with the model on the GPU: whole sessions; all ranks the same (``verify``),
   resumed to the bit, what is not finite reaches both.

``--device cpu`` tries the script out. Ends with status 1 where something is wrong.
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

CODES = {"fp16": codecs.FP16, "bf16": codecs.BF16, "int8": codecs.INT8, "int4": codecs.INT4}
STEPS = 24


def now(device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def check_codes(device: str) -> dict[str, str]:
    """Bits, bounds and speed of each code."""
    torch.manual_seed(0)
    values, found = torch.randn(1 << 24 if device != "cpu" else 1 << 20), {}
    values[5], values[1000] = math.inf, math.nan
    there = values.to(device)
    for name, code in CODES.items():
        message = torch.zeros(code.message_bytes(len(values)), dtype=torch.uint8, device=device)
        rest, out, home = there.clone(), torch.empty_like(there), torch.empty_like(values)
        code.encode(rest, message, keep_error=True)
        code.decode(message, out)
        code.decode(message.cpu(), home)
        # not a number is not equal to itself
        same = torch.equal(out.cpu().nan_to_num(7.0), home.nan_to_num(7.0))
        assert same, f"{name}: a GPU and a CPU understand something else"
        assert bool(rest.isfinite().all()), f"{name}: what is kept is not finite"
        assert not out[[5, 1000]].isfinite().any(), f"{name}: it is finite"
        sound = out.isfinite()
        error = float((out + rest - there)[sound].abs().max())
        assert error < 1e-5, f"{name}: {error} is lost"
        seconds = []
        for _ in range(6):
            began = now(device)
            code.encode(rest.copy_(there), message, keep_error=True)
            middle = now(device)
            code.decode(message, out, add=True)
            seconds.append((middle - began, now(device) - middle))
        rates = [4e-9 * len(values) / min(one) for one in zip(*seconds, strict=True)]
        found[name] = f"encode {rates[0]:.1f} GB/s, decode {rates[1]:.1f} GB/s of float32"
    return found


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


def alone(device: str) -> dict[str, str]:
    """A world of one over NCCL: each method within DDP."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port()), RANK="0", WORLD_SIZE="1")
    target = torch.device(device if device == "cpu" else f"{device}:0")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    torch.manual_seed(0)
    first, found, losses = Net(1024 if device != "cpu" else 128).to(target), {}, {}
    for name, method in REDUCERS.items():
        module = copy.deepcopy(first)
        comms = Comms(World(), target)
        model = parallel.replicate(module, target, comms)
        exchange = GradientExchange(model, comms)
        exchange.set_bucket_sizes(1 << 20, 1 << 18)
        exchange.reducer = method(exchange.context())
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step in range(STEPS):
            if step == STEPS // 2:  # as a resumed run would
                kept = exchange.reducer.state()
                exchange.reducer = method(exchange.context())
                exchange.reducer.load_state(json_and_back(kept))
            if step == 4:
                began = now(device)
            inputs, targets = batch_of(step, str(target))
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        seconds = (now(device) - began) / (STEPS - 4)
        losses[name] = float(loss.detach())
        assert all(bool(one.isfinite().all()) for one in module.parameters()), name
        limit = 0.02 if name in ("fp16", "bf16", "int8") else 0.2
        assert abs(losses[name] - losses["exact"]) < limit, (name, losses)
        module.zero_grad()
        inputs, targets = batch_of(0, str(target))
        (cross_entropy(model(inputs), targets) * math.nan).backward()
        grads = [one.grad for one in module.parameters() if one.grad is not None]
        assert not any(bool(one.isfinite().all()) for one in grads[-2:]), f"{name} hides NaN"
        found[name] = f"loss {losses[name]:.4f}, {seconds * 1e3:.2f} ms a step"
        exchange.close()
    dist.destroy_process_group()
    return found


def json_and_back(state: object) -> dict[str, object]:
    """A state as a checkpoint would give it: its tensors on the CPU."""
    from paceline.train.checkpoints.format import pack, unpack

    tensors: dict[str, Tensor] = {}
    packed = json.loads(json.dumps(pack(state, tensors)))
    return dict(unpack(packed, {name: one.cpu() for name, one in tensors.items()}))


def session(folder: Path, device: str, asked: str, resume: str = "auto") -> None:
    """One rank of two over gloo; the end goes to ``folder``."""
    torch.manual_seed(1)
    with train.join(
        run_dir=folder, seed=4, device=device, backend="gloo", check_every=6, quiet=True
    ) as joined:
        network = joined.place(Net(256))
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        model = joined.prepare(network, optimizer, communication=asked)
        inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))
        loader = joined.loader(data, 64)
        joined.checkpoints(every="12", keep=0, resume=resume)
        for _ in joined.epochs(loader, steps=STEPS):
            for batch, targets in loader:
                joined.step(cross_entropy(model(batch), targets, reduction="none"))
        joined.verify()
        loss = cross_entropy(
            network(data.tensors[0].to(joined.device)), data.tensors[1].to(joined.device)
        )
        method = joined.models.first.exchange.reducer  # type: ignore[union-attr]
        if joined.world.rank == 0:
            state = {name: one.cpu() for name, one in network.state_dict().items()}
            torch.save((state, float(loss), method and method.name), folder / "end.pt")


def rank(folder: Path, device: str) -> None:
    """Everything that a rank of two does."""
    dist.init_process_group("gloo")
    for asked in (*REDUCERS, "auto"):
        whole, parts = folder / asked / "whole", folder / asked / "parts"
        session(whole, device, asked)
        if dist.get_rank() == 0:
            shutil.copytree(whole / "checkpoints", parts / "checkpoints")
        dist.barrier()
        session(parts, device, asked, resume="12")
    dist.destroy_process_group()


def two(device: str) -> dict[str, str]:
    """Two ranks over gloo."""
    found = {}
    with tempfile.TemporaryDirectory() as made:
        folder, free = Path(made), str(port())
        common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": free,
                  "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "2"}  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--device", device, "--rank-in", made],
                env={**common, "RANK": str(number), "LOCAL_RANK": "0"},
            )
            for number in range(2)
        ]
        assert not any(one.wait(120) for one in ranks), "a rank failed"
        for asked in (*REDUCERS, "auto"):
            whole, parts = (
                torch.load(folder / asked / one / "end.pt") for one in ("whole", "parts")
            )
            equal = all(torch.equal(whole[0][name], parts[0][name]) for name in whole[0])
            exact = torch.load(folder / "exact" / "whole" / "end.pt")[1]
            said = f"loss {whole[1]:.4f} (exact {exact:.4f})"
            found[asked] = f"{said}, resumed {'to the bit' if equal else 'with other bits'}"
            assert equal or asked == "auto", found[asked]
            assert abs(whole[1] - exact) < (0.3 if asked == "local" else 0.05), said
    return found


def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--out", type=Path)
    asked.add_argument("--rank-in", type=Path)
    given = asked.parse_args()
    if given.rank_in:
        rank(given.rank_in, given.device)
        return
    began = time.perf_counter()
    name = "a CPU" if given.device == "cpu" else torch.cuda.get_device_name()
    lines = [f"# Ways to send fewer bytes, on {name}", "", f"torch {torch.__version__}", ""]
    for title, part in (("Codes", check_codes), ("World of one", alone), ("Two, gloo", two)):
        print(title, flush=True)
        lines += [f"## {title}", "", *(f"* {a}: {b}" for a, b in part(given.device).items()), ""]
        print("\n".join(lines[lines.index(f"## {title}") + 2 :]), flush=True)
    lines.append(f"{time.perf_counter() - began:.0f} s in all.")
    print(lines[-1])
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
